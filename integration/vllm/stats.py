"""What the connector tells vLLM's metrics: one step's counts and times, their way over process borders, and Prometheus.

Both sides of the connector count into a `Meter`. vLLM takes what came together once a step, adds up the workers and the scheduler,
sends `data` to the front end by MessagePack, and there logs it (`reduce`) and adds it to Prometheus (`VCachePromMetrics`).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any, NamedTuple

from prometheus_client import Counter, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

TIERS = ("own", "peer", "host", "store")
"""Where a loaded chunk lay: this worker's GPU, another GPU of the node, host memory, the offload tier."""
PARTS = ("metadata", "data")
"""Asking the server, and copying bytes."""
OTHER = "other"
FAILURES = (
    *("lease_lost", "server", "segment", "checksum", "timeout", "copy", "refused"),
    *("store", "store_absent", "store_bad", "store_late", OTHER),
)
NOT_STORED = ("exists", "busy", "full", "no_slot", "backlog", "late", OTHER)
NOT_WRITTEN = ("backlog", "down", "gone", "full", "too_large", "failed", "codec", OTHER)
"""Causes; one that is not listed is counted as `other`, so that the number of Prometheus series is bounded."""
MAX_KEPT = 256
"""Observations of one histogram that travel one by one. Of the rest only number and sum do."""


class _Count(NamedTuple):
    documentation: str
    label: str | None = None
    values: tuple[str, ...] = ("",)


COUNTERS = {
    "lookup_asked_tokens": _Count("Prompt tokens that the pool, and the offload tier it, were asked for."),
    "lookup_hit_tokens": _Count("Prompt tokens that they promised."),
    "loaded_tokens": _Count("Tokens loaded, by where they lay.", "tier", TIERS),
    "loaded_bytes": _Count("Bytes loaded by all workers, by where they lay.", "tier", TIERS),
    "stored_tokens": _Count("Tokens stored."),
    "stored_bytes": _Count("Bytes stored by all workers."),
    "load_time_seconds": _Count("Time of loads, summed over workers.", "part", PARTS),
    "store_time_seconds": _Count("Time of stores, summed over workers.", "part", PARTS),
    "failures": _Count("Loads, stores and look-ups that failed.", "cause", FAILURES),
    "recomputed_tokens": _Count("Promised tokens that were computed after all."),
    "not_stored_chunks": _Count("Chunks that were not stored; `exists` and `busy` are no failures.", "cause", NOT_STORED),
    "offload_written_chunks": _Count("Chunks written to the offload tier, counted by worker."),
    "offload_written_bytes": _Count("Bytes written to the offload tier, as they lie there."),
    "offload_dropped_chunks": _Count("Chunks that were to be written there and were not.", "cause", NOT_WRITTEN),
}
HISTOGRAMS = {
    "load_seconds": "Time of one worker's load, metadata and data.",
    "lookup_seconds": "Time of one look-up in the scheduler.",
    "scheduler_seconds": "Time added to the scheduler by one request.",
}
BUCKETS = [0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0]


@dataclass
class VCacheStats(KVConnectorStats):  # type: ignore[misc]
    """Counts and times of one interval. One thread at a time.

    `data`, empty at first: `{"counters": {name: {label value: number}}, "histograms": {name: {"kept": [seconds], "more": [n, sum]}}}`;
    the label value is "" where a counter has no label. Only strings, numbers, lists and dictionaries with string keys.
    """

    data: dict[str, Any] = field(default_factory=dict)

    def reset(self) -> None:
        self.data = {}

    def is_empty(self) -> bool:
        return not (self.data.get("counters") or self.data.get("histograms"))

    def count(self, name: str, amount: float, label: str = "") -> None:
        """Add to a counter. What is not above 0 leaves no trace."""
        if amount > 0:
            series = self.data.setdefault("counters", {}).setdefault(name, {})
            series[label] = series.get(label, 0) + amount

    def observe(self, name: str, seconds: float) -> None:
        """One observation of a histogram."""
        self._extend(name, [max(seconds, 0.0)], 0, 0.0)

    def aggregate(self, other: KVConnectorStats) -> VCacheStats:
        """Add `other`, another worker's or step's, to this one, and return this one. `other` stays as it is and shares nothing."""
        for name, label, amount in _counters(other.data):
            self.count(name, amount, label)
        for name, kept, more, total in _histograms(other.data):
            self._extend(name, kept, more, total)
        return self

    def reduce(self) -> dict[str, int | float]:
        """The short line of vLLM's log. Loads and failures are counted by worker; the median is that of the kept loads."""
        sums: dict[str, float] = {}
        for name, _, amount in _counters(self.data):
            sums[name] = sums.get(name, 0) + amount
        loads = {name: (kept, more) for name, kept, more, _ in _histograms(self.data)}
        kept, more = loads.get("load_seconds", ([], 0))
        return {
            "Hit tokens": int(sums.get("lookup_hit_tokens", 0)),
            "Loads": len(kept) + more,
            "Loaded MB": round(sums.get("loaded_bytes", 0) / 1e6, 1),
            "Median load ms": round(median(kept) * 1e3, 2) if kept else 0.0,
            "Stored MB": round(sums.get("stored_bytes", 0) / 1e6, 1),
            "Recomputed tokens": int(sums.get("recomputed_tokens", 0)),
            "Failures": int(sums.get("failures", 0)),
        }

    def _extend(self, name: str, kept: list[float], more: int, total: float) -> None:
        series = self.data.setdefault("histograms", {}).setdefault(name, {"kept": [], "more": [0, 0.0]})
        room = MAX_KEPT - len(series["kept"])
        series["kept"].extend(kept[:room])
        surplus = kept[room:]
        series["more"] = [series["more"][0] + more + len(surplus), series["more"][1] + total + sum(surplus)]


def _counters(data: Mapping[str, Any]) -> Iterator[tuple[str, str, float]]:
    for name, series in data.get("counters", {}).items():
        yield from ((name, label, amount) for label, amount in series.items())


def _histograms(data: Mapping[str, Any]) -> Iterator[tuple[str, list[float], int, float]]:
    for name, series in data.get("histograms", {}).items():
        yield name, series["kept"], *series["more"]


class Meter:
    """Counts what happens between two `take()`s. Any thread. Its methods do not raise."""

    def __init__(self, counts_tokens: bool = True) -> None:
        """`counts_tokens`: False for every worker but one. Each loads and stores its share of the same tokens, so that bytes,
        times, failures and chunks add up over workers and tokens do not."""
        self._counts_tokens = counts_tokens
        self._lock = threading.Lock()
        self._stats = VCacheStats()

    def take(self) -> VCacheStats | None:
        """What came together since the last call; None if nothing did."""
        with self._lock:
            if self._stats.is_empty():
                return None
            taken, self._stats = self._stats, VCacheStats()
            return taken

    def looked_up(self, asked_tokens: int, hit_tokens: int, seconds: float) -> None:
        """One look-up, in the scheduler."""
        with self._lock:
            self._tokens("lookup_asked_tokens", asked_tokens)
            self._tokens("lookup_hit_tokens", hit_tokens)
            self._stats.observe("lookup_seconds", seconds)

    def loaded(
        self,
        tokens_by_tier: Mapping[str, int],
        bytes_by_tier: Mapping[str, int],
        metadata_seconds: float,
        data_seconds: float,
    ) -> None:
        """One load whose lease held. Tiers: see TIERS."""
        with self._lock:
            for tier, tokens in tokens_by_tier.items():
                self._tokens("loaded_tokens", tokens, tier)
            for tier, nbytes in bytes_by_tier.items():
                self._stats.count("loaded_bytes", nbytes, tier)
            self._time("load_time_seconds", metadata_seconds, data_seconds)
            self._stats.observe("load_seconds", metadata_seconds + data_seconds)

    def stored(self, tokens: int, nbytes: int, metadata_seconds: float, data_seconds: float) -> None:
        """One store that was committed."""
        with self._lock:
            self._tokens("stored_tokens", tokens)
            self._stats.count("stored_bytes", nbytes)
            self._time("store_time_seconds", metadata_seconds, data_seconds)

    def failed(self, cause: str) -> None:
        """One failure. Causes: see FAILURES."""
        with self._lock:
            self._stats.count("failures", 1, cause if cause in FAILURES else OTHER)

    def recomputed(self, tokens: int) -> None:
        """Tokens that were promised and did not come."""
        with self._lock:
            self._tokens("recomputed_tokens", tokens)

    def not_stored(self, cause: str, chunks: int) -> None:
        """Chunks of one rank that were not stored. Causes: see NOT_STORED."""
        with self._lock:
            self._stats.count("not_stored_chunks", chunks, cause if cause in NOT_STORED else OTHER)

    def written_offloaded(self, chunks: int, nbytes: int, dropped: Mapping[str, int]) -> None:
        """Chunks of one rank that were written to the offload tier, and those that were not, by cause. See NOT_WRITTEN."""
        with self._lock:
            self._stats.count("offload_written_chunks", chunks)
            self._stats.count("offload_written_bytes", nbytes)
            for cause, count in dropped.items():
                self._stats.count("offload_dropped_chunks", count, cause if cause in NOT_WRITTEN else OTHER)

    def scheduler_time(self, seconds: float) -> None:
        """What one request cost the scheduler, from its look-up to its metadata."""
        with self._lock:
            self._stats.observe("scheduler_seconds", seconds)

    def _tokens(self, name: str, tokens: int, label: str = "") -> None:
        if self._counts_tokens:
            self._stats.count(name, tokens, label)

    def _time(self, name: str, metadata_seconds: float, data_seconds: float) -> None:
        self._stats.count(name, metadata_seconds, "metadata")
        self._stats.count(name, data_seconds, "data")


class VCachePromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """The metrics `vllm:vcache_*`, one set of series for each engine. Front end's process.

    Every series that is known beforehand stands at 0 from the start. The constructor's arguments are vLLM's: `metric_types` says
    which classes stand for prometheus_client's (Ray has its own).
    """

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._engines = per_engine_labelvalues
        self._families: dict[str, Any] = {}
        self._bound: dict[tuple[int, str, str], Any] = {}
        for name, counter in COUNTERS.items():
            self._families[name] = metric_types[Counter](
                name=f"vllm:vcache_{name}",
                documentation=counter.documentation,
                labelnames=[*labelnames, *([counter.label] if counter.label else [])],
            )
        for name, documentation in HISTOGRAMS.items():
            self._families[name] = metric_types[Histogram](
                name=f"vllm:vcache_{name}", documentation=documentation, labelnames=labelnames, buckets=BUCKETS
            )
        for engine in per_engine_labelvalues:
            for name, counter in COUNTERS.items():
                for value in counter.values:
                    self._series(engine, name, value)
            for name in HISTOGRAMS:
                self._series(engine, name, "")

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add one interval's `VCacheStats.data`. Names and engines that are not known here, a newer worker's, are passed over.

        Observations that did not travel one by one are added with their mean: count and sum are exact, their buckets are not.
        """
        if engine_idx not in self._engines:
            return
        for name, label, amount in _counters(transfer_stats_data):
            counter = COUNTERS.get(name)
            if counter is not None and bool(label) == bool(counter.label):
                self._series(engine_idx, name, label).inc(amount)
        for name, kept, more, total in _histograms(transfer_stats_data):
            if name in HISTOGRAMS:
                series = self._series(engine_idx, name, "")
                for seconds in [*kept, *([total / more] * more if more else [])]:
                    series.observe(seconds)

    def _series(self, engine: int, name: str, label: str) -> Any:
        key = (engine, name, label)
        if key not in self._bound:
            self._bound[key] = self._families[name].labels(*self._engines[engine], *([label] if label else []))
        return self._bound[key]


def build_stats(data: dict[str, Any] | None) -> VCacheStats:
    """Stats from what came over the process border. A copy: vLLM has one `data` for several loggers, and each adds to its own."""
    return VCacheStats().aggregate(VCacheStats(data=data or {}))


def build_metrics(
    vllm_config: Any,
    metric_types: dict[type[Any], type[Any]],
    labelnames: list[str],
    per_engine_labelvalues: dict[int, list[object]],
) -> VCachePromMetrics:
    """What `build_prom_metrics` of a connector class returns."""
    return VCachePromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)
