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
from itertools import product
from statistics import median
from typing import Any, NamedTuple

from prometheus_client import Counter, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from vcache_backend.transfer.stats import NOT_OFFLOADED, NOT_STORED, LoadStats

log = logging.getLogger("vllm.vcache")
OTHER = "other"
FAILURES = (
    *("internal", "server", "late", "segment", "copy", "changed", "unkept"),
    *("store", "store_absent", "store_bad", "store_late", OTHER),
)
TIERS = ("own", "peer", "host", "resident", "store")
"""The places of loaded chunks: this worker's GPU, another GPU of the node, host memory, another
instance's KV cache, the offload tier."""
WAITS = ("kept", "withdrawn", "silent", "late", "aborted")
"""How waits end: the chunks came; the promise was withdrawn, or the request took it over; no chunk
came for three of the owner's steps; the time was over; the request ended first."""
PARTS = ("metadata", "data")


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
    """A counter with at most one label."""

    documentation: str
    label: str = ""
    values: tuple[str, ...] = ("",)
    """The label's values. Others count as the last one, which bounds the number of series."""
    counted: str = ""
    """The session's counter (`EngineStats`) that a worker's counter follows; {}: the label."""


COUNTERS = {
    "lookup_asked_tokens": _Counter("Prompt tokens that look-ups asked for, wherever they lie."),
    "lookup_hit_tokens": _Counter("Prompt tokens that look-ups found."),
    "awaited_tokens": _Counter("Tokens that came from another instance while a request waited."),
    "waits": _Counter("Requests that waited for another instance's chunks.", "end", WAITS),
    "computed_prompts": _Counter(
        "Prompts longer than a chunk of which a kv_consumer loaded nothing."
    ),
    "loaded_tokens": _Counter("Tokens loaded, by where they lay.", "tier", TIERS),
    "loaded_bytes": _Counter("Bytes loaded by all workers, by where they lay.", "tier", TIERS),
    "stored_tokens": _Counter("Tokens stored.", counted="tokens_stored"),
    "stored_bytes": _Counter("Bytes stored by all workers.", counted="bytes_stored"),
    "published_blocks": _Counter("Blocks published in place.", counted="blocks_published"),
    "load_time_seconds": _Counter("Time of loads, summed over workers.", "part", PARTS),
    "store_time_seconds": _Counter("Time of stores, summed over workers.", "part", PARTS),
    "failures": _Counter("Loads, stores and look-ups that failed.", "cause", FAILURES),
    "recomputed_tokens": _Counter("Tokens that a look-up found and that were computed after all."),
    "not_stored_chunks": _Counter("Chunks not stored.", "cause", NOT_STORED, "not_stored_{}"),
    "offload_written_chunks": _Counter("Chunks offloaded.", counted="offload_written"),
    "offload_written_bytes": _Counter("Bytes offloaded.", counted="bytes_offload_written"),
    "offload_dropped_chunks": _Counter(
        "Chunks that were not offloaded.", "cause", NOT_OFFLOADED, "offload_dropped_{}"
    ),
}
"""`exists` and `busy` in `not_stored_chunks` are no failures."""
FOLLOWED = {
    counter.counted.format(value): (name, value)
    for name, counter in COUNTERS.items()
    for value in counter.values
    if counter.counted
}
FOLLOWED |= dict.fromkeys(("reserve", "commit"), ("store_time_seconds", "metadata"))
FOLLOWED["store_copy"] = "store_time_seconds", "data"
"""By name in `EngineStats`, our counter and its label."""
HISTOGRAMS = {
    "load_seconds": "Time of one worker's load, metadata and data.",
    "lookup_seconds": "Time of one look-up in the scheduler.",
    "wait_seconds": "Time that a request waited for chunks another instance was computing.",
}
BUCKETS = [
    *(0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005),
    *(0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0),
]


@dataclass
class VCacheStats(KVConnectorStats):  # type: ignore[misc]
    """Counts and times of one interval. One thread at a time.

    `data`: by counter `{label value: number}`, by histogram `[seconds]`, without zeros. The label
    value is "" for a counter without a label."""

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
            series = self.data.setdefault(name, {})
            series[label] = series.get(label, 0) + amount

    def observe(self, name: str, *seconds: float) -> None:
        """Add observations to a histogram. No more than some thousand wait to be taken."""
        kept = self.data.setdefault(name, [])
        kept.extend(seconds[: max(4096 - len(kept), 0)])

    @_harmless(lambda self: self)
    def aggregate(self, other: KVConnectorStats) -> VCacheStats:
        """Add the stats `other` of another worker or step, and return `self`. `other` stays
        unchanged."""
        for name, counted in other.data.items():
            if isinstance(counted, list):
                self.observe(name, *counted)
                continue
            for label, amount in counted.items():
                self.count(name, amount, label)
        return self

    @_harmless(lambda self: {})
    def reduce(self) -> dict[str, int | float]:
        """The values for vLLM's log line. Loads and failures are summed over workers."""

        def total(name: str) -> float:
            return float(sum(self.data.get(name, {}).values()))

        loads = self.data.get("load_seconds", [])
        return {
            "Hit tokens": int(total("lookup_hit_tokens")),
            "Loads": len(loads),
            "Loaded MB": round(total("loaded_bytes") / 1e6, 1),
            "Median load ms": round(median(loads) * 1e3, 2) if loads else 0.0,
            "Stored MB": round(total("stored_bytes") / 1e6, 1),
            "Recomputed tokens": int(total("recomputed_tokens")),
            "Failures": int(total("failures")),
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
            taken, self._stats = self._stats, VCacheStats()
        return taken

    def count(self, name: str, amount: float, label: str = "") -> None:
        """Add to one of COUNTERS."""
        if self._counts_tokens or not name.endswith("_tokens"):
            values = COUNTERS[name].values
            with self._lock:
                self._stats.count(name, amount, label if label in values else values[-1])

    def observe(self, name: str, seconds: float) -> None:
        """Add to one of HISTOGRAMS."""
        with self._lock:
            self._stats.observe(name, seconds)

    def looked_up(self, asked: int, hit: int, seconds: float) -> None:
        """Count a look-up of the scheduler: tokens asked for, tokens hit, seconds."""
        with self._lock:
            self._stats.count("lookup_asked_tokens", asked)
            self._stats.count("lookup_hit_tokens", hit)
            self._stats.observe("lookup_seconds", seconds)

    def waited(self, end: str, tokens: int, seconds: float) -> None:
        """Count the end of a request's wait, and the tokens that came during it."""
        self.count("waits", 1, end)
        self.count("awaited_tokens", tokens)
        self.observe("wait_seconds", seconds)

    def loaded(self, stats: LoadStats) -> None:
        """Count a load that has filled some blocks."""
        for tier, tokens in stats.tokens.items():
            self.count("loaded_tokens", tokens, tier)
        for tier, nbytes in stats.nbytes.items():
            self.count("loaded_bytes", nbytes, tier)
        self.count("load_time_seconds", stats.metadata_seconds, "metadata")
        self.count("load_time_seconds", stats.data_seconds, "data")
        self.observe("load_seconds", stats.metadata_seconds + stats.data_seconds)

    def follow(self, **amounts: float) -> None:
        """Count what a worker's session counts: see `EngineStats.listeners`."""
        for name in amounts.keys() & FOLLOWED.keys():
            self.count(FOLLOWED[name][0], amounts[name], FOLLOWED[name][1])


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
        self._series: dict[tuple[int, str, str], Any] = {}
        """By engine, metric and label value."""
        self._make(metric_types, labelnames, per_engine_labelvalues)

    @_harmless(lambda self: None)
    def _make(
        self,
        metric_types: dict[type[Any], type[Any]],
        labelnames: list[str],
        engines: dict[int, list[object]],
    ) -> None:
        for name, (documentation, label, values, _) in COUNTERS.items():
            labels = [*labelnames, *([label] if label else [])]
            family = metric_types[Counter](f"vllm:vcache_{name}", documentation, labels)
            for (engine, given), value in product(engines.items(), values):
                series = family.labels(*given, *([value] if label else []))
                self._series[engine, name, value] = series
        for name, documentation in HISTOGRAMS.items():
            said: dict[str, Any] = {"labelnames": labelnames, "buckets": BUCKETS}
            family = metric_types[Histogram](f"vllm:vcache_{name}", documentation, **said)
            for engine, given in engines.items():
                self._series[engine, name, ""] = family.labels(*given)

    @_harmless(lambda self: None)
    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add one interval's `VCacheStats.data`. Ignores unknown names and engines, for example of
        a newer worker."""
        for name, counted in transfer_stats_data.items():
            if name in HISTOGRAMS and (engine_idx, name, "") in self._series:
                for seconds in counted:
                    self._series[engine_idx, name, ""].observe(seconds)
            for label, amount in counted.items() if name in COUNTERS else ():
                if (engine_idx, name, label) in self._series:
                    self._series[engine_idx, name, label].inc(amount)


def build_stats(data: Mapping[str, Any] | None) -> VCacheStats:
    """Copy stats from another process's `data`. vLLM passes the same `data` to several loggers, and
    each adds to its stats."""
    stats = VCacheStats()
    stats.aggregate(VCacheStats(data=dict(data or {})))
    return stats
