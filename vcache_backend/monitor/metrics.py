"""The server's statistics as Prometheus metrics."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, get_args

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from vcache_backend.protocol.messages import Level, ServerStats
from vcache_backend.status import SILENT_SECONDS

_GAUGES = {
    "uptime_seconds": "Time since the start of the server.",
    "clients": "Processes that are connected: vLLM's scheduler and each worker, and tools.",
    "chunks": "Chunks in the pool.",
    "reservations": "Requests to write into the pool that are under way.",
    "quarantined": "Writes whose slots are out of use until their writer ends or answers.",
    "rss_bytes": "Resident memory of the server, without the pool's.",
}
"""By the field of `ServerStats`."""
_COUNTERS = {
    "lookup_chunks": "Chunks that look-ups asked for.",
    "lookup_hits": "Chunks that look-ups found, in the pool or in another instance's KV cache.",
    "resident_hits": "Chunks that look-ups found in another instance's KV cache.",
    "loaded_tokens": "Tokens that instances loaded and did not compute.",
    "pin_chunks": "Chunks of the pool that loads asked for.",
    "pin_hits": "Chunks of the pool that loads found.",
}
"""The server's counters, which start at 0, so that a scraper sees the first increase."""
Row = tuple[Sequence[str], float]


class ServerMetrics(Collector):
    """The metrics of `latest()`, a server's statistics; None: the server does not answer."""

    def __init__(self, latest: Callable[[], ServerStats | None]) -> None:
        self._latest = latest
        self._models: dict[str, str] = {}
        """The model of each namespace with hits. The entry stays when the last instance goes: a
        changed label would begin another series."""

    def collect(self) -> Iterator[Metric]:
        """All metrics; only `vcache_server_up` if the server did not answer the last question."""
        stats = self._latest()
        what = "1 if the server answered the last question, asked every few seconds."
        yield _gauge("server_up", what, [((), stats is not None)])
        if stats is None:
            return
        self._models = {
            name: stats.namespaces.get(name) or self._models.get(name, "") for name in stats.hits
        }
        yield from _server(stats)
        yield _requests(stats)
        yield from _hits(stats, self._models)
        yield from _segments(stats)
        yield from _instances(stats)
        yield from _reads(stats)


def _server(stats: ServerStats) -> Iterator[Metric]:
    for name, what in _GAUGES.items():
        yield _gauge(f"server_{name}", what, [((), getattr(stats, name))])
    what = "Fields in which connected instances of one model differ, so that they do not share."
    yield _gauge("server_not_shared", what, [((), len(stats.mismatches))])
    since = time.time() - 600
    levels = Counter(report.level for report in stats.reports if report.time >= since)
    what = "What clients reported in the last 10 minutes, of the newest reports."
    rows = [((level,), levels[level]) for level in get_args(Level)]
    yield _gauge("server_reports_10m", what, rows, "level")
    for name, what in _COUNTERS.items():
        yield _counter(f"server_{name}", what, [((), stats.counters.get(name, 0))])


def _requests(stats: ServerStats) -> Metric:
    """A summary with quantiles, for which prometheus_client has no family."""
    what = "Time of requests inside the server; quantiles since its start."
    made = Metric("vcache_server_request_seconds", what, "summary")
    for name, latency in stats.latency.items():
        for quantile, us in (("0.5", latency.p50_us), ("0.99", latency.p99_us)):
            made.add_sample(made.name, {"request": name, "quantile": quantile}, us / 1e6)
        made.add_sample(f"{made.name}_count", {"request": name}, latency.count)
        made.add_sample(f"{made.name}_sum", {"request": name}, latency.total_us / 1e6)
    return made


def _hits(stats: ServerStats, models: dict[str, str]) -> Iterator[Metric]:
    for at, (name, did) in enumerate((("asked", "asked for"), ("found", "asked for and found"))):
        rows = [((space, models[space]), counts[at]) for space, counts in stats.hits.items()]
        what = f"Prompt tokens that instances {did}."
        yield _counter(f"namespace_{name}_tokens", what, rows, "namespace model")


def _segments(stats: ServerStats) -> Iterator[Metric]:
    def rows(value: Callable[[Any], float]) -> list[Row]:
        return [((one.id, one.device, one.medium), value(one)) for one in stats.segments]

    labels = "segment device medium"
    sizes = rows(lambda one: one.nbytes)
    yield _gauge("segment_bytes", "Size of a segment.", sizes, labels)
    used = rows(lambda one: one.used)
    yield _gauge("segment_used_bytes", "Bytes of a segment that hold chunks.", used, labels)
    evictions = rows(lambda one: one.evictions)
    what = "Chunks of a segment that made room for others."
    yield _counter("segment_evictions", what, evictions, labels)


def _instances(stats: ServerStats) -> Iterator[Metric]:
    def rows(value: Callable[[Any], float], pooled: bool = False) -> list[Row]:
        those = [one for one in stats.instances if one.id or pooled]
        return [((one.id, one.device, str(one.pid)), value(one)) for one in those]

    labels = "instance_id device pid"
    stopped = rows(lambda one: bool(one.stopped) or one.silent > SILENT_SECONDS, True)
    what = "1 if a process of an instance is stopped, or nothing was heard of it for 10 s."
    yield _gauge("instance_stopped", what, stopped, labels)
    what = "Blocks that others find in an instance's KV cache."
    yield _gauge("instance_resident_blocks", what, rows(lambda one: one.resident), labels)
    what = "0 if an instance that gets requests lacks a part, so that others cannot read its KV."
    shared = rows(lambda one: one.early or not one.missing)
    yield _gauge("instance_shared", what, shared, labels)
    what = "1, with the version of an instance's vLLM: listed, proved here on a day, or unproved."
    known = [((str(one.pid), one.vllm), 1.0) for one in stats.instances if one.vllm]
    yield _gauge("instance_vllm", what, known, "pid vllm")


def _reads(stats: ServerStats) -> Iterator[Metric]:
    rows = [((str(one.pid), one.device, one.instance), one) for one in stats.reads]
    labels, what = (
        "pid device instance_id",
        "Bytes that a process read out of an instance's KV cache, or the pool.",
    )
    yield _counter("read_bytes", what, [(key, one.nbytes) for key, one in rows], labels)
    what = "Chunks that their owner used again while a process read them."
    yield _counter("read_refused_chunks", what, [(key, one.refused) for key, one in rows], labels)


def _gauge(name: str, what: str, rows: Iterable[Row], labels: str = "") -> Metric:
    return _filled(GaugeMetricFamily(f"vcache_{name}", what, labels=labels.split()), rows)


def _counter(name: str, what: str, rows: Iterable[Row], labels: str = "") -> Metric:
    return _filled(CounterMetricFamily(f"vcache_{name}", what, labels=labels.split()), rows)


def _filled(family: GaugeMetricFamily | CounterMetricFamily, rows: Iterable[Row]) -> Metric:
    """Fill a metric. Rows with equal labels are added up: processes without a visible pid cannot be
    told apart."""
    totals = defaultdict[Sequence[str], float](float)
    for values, value in rows:
        totals[values] += value
    for values, total in totals.items():
        family.add_metric(values, total)
    return family
