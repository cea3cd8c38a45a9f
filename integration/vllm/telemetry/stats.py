"""The connector's metrics: counts and times of each step, for vLLM's log and for Prometheus.

Both halves of the connector count into a `Meter`. Once a step vLLM takes the stats, adds up the
stats of workers and scheduler, and sends `data` to the front end as MessagePack. The front end logs
it (`reduce`) and adds it to Prometheus (`VCachePromMetrics`)."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any, NamedTuple

from prometheus_client import Counter, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from vcache_backend.transfer.stats import LoadStats

log = logging.getLogger("vllm.vcache")
OTHER = "other"
FAILURES = (
    *("internal", "server", "late", "segment", "copy", "changed"),
    *("store", "store_absent", "store_bad", "store_late", OTHER),
)
NOT_STORED = ("exists", "busy", "full", "no_slot", "backlog", "late", "changed", OTHER)
NOT_OFFLOADED = ("backlog", "down", "gone", "full", "failed", OTHER)
TIERS = ("own", "peer", "host", "resident", "store")
"""The places of loaded chunks: this worker's GPU, another GPU of the node, host memory, another
instance's KV cache, the offload tier."""


@functools.cache
def _log_once(name: str) -> None:
    log.exception("vcache: %s failed, so its metrics are too low", name)


def _harmless(otherwise: Callable[[Any], Any]) -> Callable[[Callable[..., Any]], Any]:
    """Decorator for what vLLM calls on statistics: if the method raises, return
    `otherwise(self)`."""

    def decorate(method: Callable[..., Any]) -> Any:
        @functools.wraps(method)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return method(self, *args, **kwargs)
            except Exception:  # noqa: BLE001 - nothing of ours raises into vLLM
                _log_once(method.__qualname__)
                return otherwise(self)

        return call

    return decorate


class _Counter(NamedTuple):
    """A counter with at most one label. Label values that are not in `values` count as the last
    value, which bounds the number of series."""

    documentation: str
    label: str = ""
    values: tuple[str, ...] = ("",)


WAITS = ("kept", "withdrawn", "silent", "late", "aborted")
"""How waits end: the chunks came; the promise was withdrawn, or the request took it over; no chunk
came for three of the owner's steps; the time was over; the request ended first."""

COUNTERS = {
    "lookup_asked_tokens": _Counter(
        "Prompt tokens that look-ups asked the pool, other instances and the offload tier for."
    ),
    "lookup_hit_tokens": _Counter("Prompt tokens that look-ups found."),
    "awaited_tokens": _Counter(
        "Tokens that another instance computed while a request here waited for them."
    ),
    "waits": _Counter(
        "Requests that waited for chunks another instance was computing.", "end", WAITS
    ),
    "loaded_tokens": _Counter("Tokens loaded, by where they lay.", "tier", TIERS),
    "loaded_bytes": _Counter("Bytes loaded by all workers, by where they lay.", "tier", TIERS),
    "stored_tokens": _Counter("Tokens stored."),
    "stored_bytes": _Counter("Bytes stored by all workers."),
    "published_chunks": _Counter(
        "Chunks published for others to read in this instance's KV cache, counted by worker."
    ),
    "load_time_seconds": _Counter(
        "Time of loads, summed over workers.", "part", ("metadata", "data")
    ),
    "store_time_seconds": _Counter(
        "Time of stores, summed over workers.", "part", ("metadata", "data")
    ),
    "failures": _Counter("Loads, stores and look-ups that failed.", "cause", FAILURES),
    "recomputed_tokens": _Counter("Tokens that a look-up found and that were computed after all."),
    "not_stored_chunks": _Counter(
        "Chunks that were not stored; `exists` and `busy` are not failures.", "cause", NOT_STORED
    ),
    "offload_written_chunks": _Counter("Chunks written to the offload tier, counted by worker."),
    "offload_written_bytes": _Counter("Bytes written to the offload tier, with their headers."),
    "offload_dropped_chunks": _Counter(
        "Chunks that should have been written to the offload tier and were not.",
        "cause",
        NOT_OFFLOADED,
    ),
}
HISTOGRAMS = {
    "load_seconds": "Time of one worker's load, metadata and data.",
    "lookup_seconds": "Time of one look-up in the scheduler.",
    "wait_seconds": "Time that a request waited for chunks another instance was computing.",
}
BUCKETS = [
    *(0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005),
    *(0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0),
]
MOST_OBSERVED = 4096
"""The most observations of one histogram that wait to be taken."""


@dataclass
class VCacheStats(KVConnectorStats):  # type: ignore[misc]
    """Counts and times of one interval. One thread at a time.

    `data`: `{"counters": {name: {label value: number}}, "histograms": {name: [seconds]}}`, without
    zeros. The label value is "" for a counter without a label."""

    data: dict[str, Any] = field(default_factory=dict)

    @_harmless(lambda self: None)
    def reset(self) -> None:
        self.data = {}

    @_harmless(lambda self: True)
    def is_empty(self) -> bool:
        return not self.data

    def count(self, name: str, amount: float, label: str = "") -> None:
        """Add to a counter. Amounts of 0 or less are ignored."""
        if amount > 0:
            series = self.data.setdefault("counters", {}).setdefault(name, {})
            series[label] = series.get(label, 0) + amount

    def observe(self, name: str, *seconds: float) -> None:
        """Add observations to a histogram, up to `MOST_OBSERVED`."""
        kept = self.data.setdefault("histograms", {}).setdefault(name, [])
        kept.extend(seconds[: max(MOST_OBSERVED - len(kept), 0)])

    @_harmless(lambda self: self)
    def aggregate(self, other: KVConnectorStats) -> VCacheStats:
        """Add the stats `other` of another worker or step, and return `self`. `other` stays
        unchanged."""
        for name, series in other.data.get("counters", {}).items():
            for label, amount in series.items():
                self.count(name, amount, label)
        for name, seconds in other.data.get("histograms", {}).items():
            self.observe(name, *seconds)
        return self

    @_harmless(lambda self: {})
    def reduce(self) -> dict[str, int | float]:
        """The values for vLLM's log line. Loads and failures are summed over workers."""
        counters = self.data.get("counters", {})
        sums = {name: sum(series.values()) for name, series in counters.items()}
        loads = self.data.get("histograms", {}).get("load_seconds", [])
        return {
            "Hit tokens": int(sums.get("lookup_hit_tokens", 0)),
            "Loads": len(loads),
            "Loaded MB": round(sums.get("loaded_bytes", 0) / 1e6, 1),
            "Median load ms": round(median(loads) * 1e3, 2) if loads else 0.0,
            "Stored MB": round(sums.get("stored_bytes", 0) / 1e6, 1),
            "Recomputed tokens": int(sums.get("recomputed_tokens", 0)),
            "Failures": int(sums.get("failures", 0)),
        }


class Meter:
    """Counts events between two calls of `take`. Any thread."""

    def __init__(self, counts_tokens: bool = True) -> None:
        """counts_tokens: True for a single worker. All workers load and store shards of the same
        tokens: bytes, times, failures and chunks add up over workers, tokens do not."""
        self._counts_tokens = counts_tokens
        self._lock = threading.Lock()
        self._stats = VCacheStats()

    def take(self) -> VCacheStats | None:
        """Return the stats since the last call; None if there are none."""
        if not self._stats.data:
            return None
        with self._lock:
            taken = self._stats
            self._stats = VCacheStats()
        return taken

    def looked_up(self, asked: int, hit: int, seconds: float) -> None:
        """Count a look-up of the scheduler: tokens asked for, tokens hit, seconds."""
        with self._lock:
            self._stats.count("lookup_asked_tokens", asked)
            self._stats.count("lookup_hit_tokens", hit)
            self._stats.observe("lookup_seconds", seconds)

    def count(self, name: str, amount: float, label: str = "") -> None:
        """Add to one of COUNTERS."""
        with self._lock:
            self._add(name, amount, label)

    def waited(self, end: str, tokens: int, seconds: float) -> None:
        """Count the end of a request's wait, and the tokens that came during it."""
        with self._lock:
            self._add("waits", 1, end)
            self._add("awaited_tokens", tokens, "")
            self._stats.observe("wait_seconds", seconds)

    def loaded(self, stats: LoadStats) -> None:
        """Count a load that has filled some blocks."""
        asking, copying = stats.metadata_seconds, stats.data_seconds
        with self._lock:
            for tier, tokens in stats.tokens.items():
                self._add("loaded_tokens", tokens, tier)
                self._add("loaded_bytes", tokens * stats.token_bytes, tier)
            self._add("load_time_seconds", asking, "metadata")
            self._add("load_time_seconds", copying, "data")
            self._stats.observe("load_seconds", asking + copying)

    def _add(self, name: str, amount: float, label: str) -> None:
        """Under the lock."""
        if self._counts_tokens or not name.endswith("_tokens"):
            values = COUNTERS[name].values
            self._stats.count(name, amount, label if label in values else values[-1])


class VCachePromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """The metrics `vllm:vcache_*`, one set of series for each engine. Runs in the front end's
    process.

    All series exist from the start, at 0; if one cannot be made, it and all later ones are missing.
    vLLM passes the constructor's arguments: `metric_types` maps prometheus_client's classes to
    replacements (Ray has its own)."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters: dict[tuple[int, str, str], Any] = {}
        self._histograms: dict[tuple[int, str], Any] = {}
        self._make(metric_types, labelnames, per_engine_labelvalues)

    @_harmless(lambda self: None)
    def _make(
        self,
        metric_types: dict[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        for name, (documentation, label, values) in COUNTERS.items():
            labels = [*labelnames, *([label] if label else [])]
            said: dict[str, Any] = {"documentation": documentation, "labelnames": labels}
            family = metric_types[Counter](name=f"vllm:vcache_{name}", **said)
            for engine, given in per_engine_labelvalues.items():
                for value in values:
                    series = family.labels(*given, *([value] if label else []))
                    self._counters[engine, name, value] = series
        for name, documentation in HISTOGRAMS.items():
            said = {"documentation": documentation, "labelnames": labelnames, "buckets": BUCKETS}
            family = metric_types[Histogram](name=f"vllm:vcache_{name}", **said)
            for engine, given in per_engine_labelvalues.items():
                self._histograms[engine, name] = family.labels(*given)

    @_harmless(lambda self: None)
    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add one interval's `VCacheStats.data`. Ignores unknown names and engines, for example of
        a newer worker."""
        for name, series in transfer_stats_data.get("counters", {}).items():
            for label, amount in series.items():
                if (engine_idx, name, label) in self._counters:
                    self._counters[engine_idx, name, label].inc(amount)
        for name, observed in transfer_stats_data.get("histograms", {}).items():
            if (engine_idx, name) in self._histograms:
                for seconds in observed:
                    self._histograms[engine_idx, name].observe(seconds)


def build_stats(data: Mapping[str, Any] | None) -> VCacheStats:
    """Copy stats from another process's `data`. vLLM passes the same `data` to several loggers, and
    each adds to its stats."""
    stats = VCacheStats()
    stats.aggregate(VCacheStats(data=dict(data or {})))
    return stats
