"""The server's statistics as Prometheus metrics."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import get_args

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from vcache_backend.monitor.samples import Samples
from vcache_backend.protocol.messages import Level, SegmentInfo, ServerStats
from vcache_backend.status import SILENT_SECONDS

REPORTS_SECONDS = 600.0
_GAUGES = {
    "uptime_seconds": "Time since the start of the server.",
    "clients": "Processes that are connected: vLLM's scheduler and each worker, and tools.",
    "chunks": "Chunks in the pool.",
    "reservations": "Requests to write into the pool that are under way.",
}
"""Gauges by the field of `ServerStats`."""
_COUNTERS = {
    "clients_total": "Clients that have connected.",
    "protocol_errors": "Messages that the server could not read.",
    "lookup_chunks": "Chunks that look-ups asked for.",
    "lookup_hits": "Chunks that look-ups found, in the pool or in another instance's KV cache.",
    "resident_hits": "Chunks that look-ups found in another instance's KV cache.",
    "promised_chunks": "Chunks that instances said they would compute, so that others wait.",
    "promised_chunks_arrived": "Promised chunks that others can read.",
    "promised_chunks_broken": (
        "Chunks that an instance began to compute and gave up, so that others compute them. If "
        "they rise, requests are aborted or preempted, or instances die."
    ),
    "awaited_tokens": "Tokens that came while requests waited for them.",
    "waited_milliseconds": "Seconds that requests waited for chunks another instance computed.",
    "pin_chunks": "Chunks of the pool that loads asked for.",
    "pin_hits": "Chunks of the pool that loads found.",
    "reserved": "Chunks of the pool that writers got a slot for.",
    "committed": "Chunks that were written to the pool.",
    "aborted": "Slots that writers gave back unwritten.",
    "expired_reservations": "Reservations whose writer was too slow or is gone.",
    "evicted": "Chunks that made room for others in the pool.",
    "removed": "Chunks of the pool that were forgotten because a client asked for it.",
    "published": "Chunks that instances showed to others in their KV caches.",
    "refused_full": "Chunks that were not stored: nothing in the pool could make room.",
    "refused_too_large": "Chunks that were not stored: they are larger than any segment.",
    "refused_no_segment": "Chunks that were not stored: their worker can use no segment.",
}
"""The server's counters, which start at 0, so that a scraper sees the first increase."""
_SEGMENT = ("segment", "device", "medium")
_INSTANCE = ("instance_id", "device", "pid")
_READER = ("pid", "device", "instance_id")
Row = tuple[Sequence[str], float]


class ServerMetrics(Collector):
    def __init__(self, samples: Samples) -> None:
        self._samples = samples
        self._models: dict[str, str] = {}
        """The model of each namespace with hits. The entry stays when the last instance goes: a
        changed label would begin another series."""

    def collect(self) -> Iterator[Metric]:
        """All metrics; only `vcache_server_up` if the server did not answer the last question."""
        stats = None if self._samples.problem else self._samples.stats
        what = "1 if the server answered the last question, asked every few seconds."
        yield _gauge("server_up", what, stats is not None)
        if stats is None:
            return
        yield from _whole(stats)
        self._models = {
            name: stats.namespaces.get(name) or self._models.get(name, "") for name in stats.hits
        }
        yield from _hits(stats.hits, self._models)
        yield _requests(stats)
        yield from _segments(stats.segments)
        yield from _instances(stats)
        yield from _reads(stats)


def _whole(stats: ServerStats) -> Iterator[Metric]:
    for name, what in _GAUGES.items():
        yield _gauge(f"server_{name}", what, getattr(stats, name))
    what = "Resident memory of the server, without the pool's."
    yield _gauge("server_memory_bytes", what, stats.rss_bytes)
    what = "Slots out of use until their writer ends or answers."
    yield _gauge("server_quarantined_slots", what, sum(stats.quarantined_slots.values()))
    what = "Fields in which connected instances of one model differ, so that they do not share."
    yield _gauge("server_not_shared", what, len(stats.mismatches))
    since = time.time() - REPORTS_SECONDS
    levels = Counter(report.level for report in stats.reports if report.time >= since)
    what = "What clients reported in the last 10 minutes, of the newest reports."
    rows = [((level,), levels[level]) for level in get_args(Level)]
    yield _gauges("server_reports_10m", what, ("level",), rows)
    for name, what in _COUNTERS.items():
        base, total = name.removesuffix("_total"), float(stats.counters.get(name, 0))
        if name.endswith("_milliseconds"):
            base, total = base.replace("_milliseconds", "_seconds"), total / 1e3
        yield CounterMetricFamily(f"vcache_server_{base}", what, total)


def _hits(hits: Mapping[str, tuple[int, int]], models: Mapping[str, str]) -> Iterator[Metric]:
    labels = "namespace", "model"
    asked = [((name, models[name]), counts[0]) for name, counts in hits.items()]
    what = "Prompt tokens that instances asked for."
    yield _counters("namespace_asked_tokens", what, labels, asked)
    found = [((name, models[name]), counts[1]) for name, counts in hits.items()]
    what = "Prompt tokens that instances asked for and found."
    yield _counters("namespace_found_tokens", what, labels, found)


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


def _segments(segments: Sequence[SegmentInfo]) -> Iterator[Metric]:
    rows = [((info.id, info.device, info.medium), info) for info in segments]
    sizes = [(labels, info.nbytes) for labels, info in rows]
    yield _gauges("segment_bytes", "Size of a segment.", _SEGMENT, sizes)
    used = [(labels, info.used) for labels, info in rows]
    yield _gauges("segment_used_bytes", "Bytes of a segment that hold chunks.", _SEGMENT, used)
    evictions = [(labels, info.evictions) for labels, info in rows]
    what = "Chunks of a segment that made room for others."
    yield _counters("segment_evictions", what, _SEGMENT, evictions)
    live = [(labels, info.state == "live") for labels, info in rows]
    yield _gauges("segment_live", "1 if chunks can be stored in a segment.", _SEGMENT, live)


def _instances(stats: ServerStats) -> Iterator[Metric]:
    rows = [((each.id, each.device, str(each.pid)), each) for each in stats.instances]
    stopped = [
        (labels, bool(each.stopped) or each.silent > SILENT_SECONDS) for labels, each in rows
    ]
    what = "1 if a process of an instance is stopped, or nothing was heard of it for 10 s."
    yield _gauges("instance_stopped", what, _INSTANCE, stopped)
    in_place = [(labels, each) for labels, each in rows if each.id]
    resident = [(labels, each.resident) for labels, each in in_place]
    what = "Chunks that others find in an instance's KV cache."
    yield _gauges("instance_resident_chunks", what, _INSTANCE, resident)
    shared = [(labels, each.early or not each.missing) for labels, each in in_place]
    what = "0 if an instance that gets requests lacks a part, so that others cannot read its KV."
    yield _gauges("instance_shared", what, _INSTANCE, shared)


def _reads(stats: ServerStats) -> Iterator[Metric]:
    rows = [((str(each.pid), each.device, each.instance), each) for each in stats.reads]
    nbytes = [(labels, each.nbytes) for labels, each in rows]
    what = "Bytes that a process read out of an instance's KV cache."
    yield _counters("read_bytes", what, _READER, nbytes)
    refused = [(labels, each.refused) for labels, each in rows]
    what = "Chunks that their owner used again while a process read them."
    yield _counters("read_refused_chunks", what, _READER, refused)


def _gauge(name: str, what: str, value: float) -> Metric:
    return GaugeMetricFamily(f"vcache_{name}", what, value=float(value))


def _gauges(name: str, what: str, labels: Sequence[str], rows: Iterable[Row]) -> Metric:
    return _filled(GaugeMetricFamily(f"vcache_{name}", what, labels=labels), rows)


def _counters(name: str, what: str, labels: Sequence[str], rows: Iterable[Row]) -> Metric:
    return _filled(CounterMetricFamily(f"vcache_{name}", what, labels=labels), rows)


def _filled(family: GaugeMetricFamily | CounterMetricFamily, rows: Iterable[Row]) -> Metric:
    """Fill a metric. Rows with equal labels are added up: processes without a visible pid cannot be
    told apart."""
    totals = defaultdict[tuple[str, ...], float](float)
    for values, value in rows:
        totals[tuple(values)] += value
    for values, total in totals.items():
        family.add_metric(values, total)
    return family
