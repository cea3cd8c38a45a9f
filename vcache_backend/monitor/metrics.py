"""The server's statistics as Prometheus metrics."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from vcache_backend.metadata_server.endpoint import beside
from vcache_backend.metadata_server.messages import SegmentInfo, ServerStats
from vcache_backend.monitor.samples import Samples

_SEGMENT = ("segment", "device", "medium")
_INSTANCE = ("instance", "device", "pid")
_READER = ("pid", "device", "instance")
Row = tuple[Sequence[str], float]


class ServerMetrics(Collector):
    """Makes all metrics, at each scrape, in the thread of its HTTP request. path: the server's socket. pid: the server's; 0 if unknown."""

    def __init__(self, samples: Samples, path: Path, pid: int) -> None:
        self._samples, self._journal, self._pid = samples, beside(path, ".journal"), pid
        self._models: dict[str, str] = {}
        """The model of each namespace that has hits. Kept when its last instance goes: another label would begin another series."""

    def collect(self) -> Iterator[Metric]:
        """The metrics. Only `vcache_server_up` if the last question was not answered: older values may be wrong by now."""
        stats = None if self._samples.problem else self._samples.stats
        yield _gauge(
            "server_up", "1 if the metadata server answered the last question, asked every few seconds", stats is not None
        )
        if stats is None:
            return
        yield from _whole(stats)
        yield from _files(self._pid, self._journal)
        if (rate := self._samples.hit_rate()) is not None:
            yield _gauge("server_hit_ratio_1m", "chunks found over chunks asked for, in the last minute", rate)
        self._models = {name: stats.namespaces.get(name) or self._models.get(name, "") for name in stats.hits}
        yield from _hits(stats, self._samples, self._models)
        yield from _requests(stats)
        yield from _segments(stats.segments)
        yield from _in_place(stats)


def _whole(stats: ServerStats) -> Iterator[Metric]:
    yield _gauge("server_uptime_seconds", "since the start of the metadata server", stats.uptime_seconds)
    yield _gauge("server_memory_bytes", "resident memory of the server's process, the pool's not counted", stats.rss_bytes)
    for name in ("clients", "chunks", "leases", "reservations"):
        yield _gauge(f"server_{name}", f"{name} now", getattr(stats, name))
    yield _gauge("server_quarantined_slots", "slots that wait for their writer's end or answer", stats.quarantined)
    yield _gauge("server_not_shared", "fields in which connected instances of one model differ", len(stats.mismatches))
    for name, total in stats.counters.items():
        if name.startswith("longest_"):
            yield _gauge(
                f"server_{name.removesuffix('_us')}_seconds", "the longest turn of the server's loop lately", total / 1e6
            )
        else:
            yield _counter(f"server_{name.removesuffix('_total')}", f"{name.replace('_', ' ')} since the server's start", total)


def _files(pid: int, journal: Path) -> Iterator[Metric]:
    """What the system knows of the server: fds, their limit, size of the journal. What cannot be read is left out."""
    with suppress(OSError, ValueError):
        yield _gauge("server_open_fds", "file descriptors that the server has open", len(os.listdir(f"/proc/{pid}/fd")))
        limits = Path(f"/proc/{pid}/limits").read_text().splitlines()
        (most,) = [line.split()[3] for line in limits if line.startswith("Max open files")]
        yield _gauge("server_max_fds", "file descriptors that the server may have open", float(most.replace("unlimited", "inf")))
    with suppress(OSError):
        yield _gauge("server_journal_bytes", "size of the journal", journal.stat().st_size)


def _hits(stats: ServerStats, samples: Samples, models: Mapping[str, str]) -> Iterator[Metric]:
    labels = ("namespace", "model")

    def rows(values: Iterable[tuple[str, float]]) -> list[Row]:
        return [((name, models.get(name, "")), value) for name, value in values]

    for number, what in enumerate(("asked", "found")):
        told = f"prompt tokens that instances {'asked for' if not number else 'asked for and that were there'}"
        totals = rows((name, float(counts[number])) for name, counts in stats.hits.items())
        yield _family(CounterMetricFamily, f"namespace_{what}_tokens", told, labels, totals)
    what = "seconds of prefill that hits have saved, as vLLM's instances estimate"
    saved = rows((name, seconds) for name, seconds in stats.saved.items())
    yield _family(CounterMetricFamily, "namespace_saved_prefill_seconds", what, labels, saved)
    rates = rows((name, found / asked) for name, (asked, found) in samples.hits().items())
    what = "tokens that were there over tokens asked for, in the last minute"
    yield _family(GaugeMetricFamily, "namespace_hit_ratio_1m", what, labels, rates)


def _requests(stats: ServerStats) -> Iterator[Metric]:
    counts = {(name,): float(latency.count) for name, latency in stats.latency.items()}
    yield _family(CounterMetricFamily, "server_requests", "requests answered", ("request",), counts.items())
    rows = [
        ((name, quantile), us / 1e6)
        for name, latency in stats.latency.items()
        for quantile, us in (("0.5", latency.p50_us), ("0.99", latency.p99_us))
    ]
    what = "time of a request inside the server, since its start"
    yield _family(GaugeMetricFamily, "server_request_seconds", what, ("request", "quantile"), rows)


def _segments(segments: Sequence[SegmentInfo]) -> Iterator[Metric]:
    def rows(field: str) -> list[Row]:
        return [((one.id, one.device, one.medium), float(getattr(one, field))) for one in segments]

    sizes = [((one.id, one.device, one.medium), float(one.nbytes - one.given_back)) for one in segments]
    yield _family(GaugeMetricFamily, "segment_bytes", "size of a segment", _SEGMENT, sizes)
    yield _family(GaugeMetricFamily, "segment_used_bytes", "bytes of a segment that hold chunks", _SEGMENT, rows("used"))
    for name in ("chunks", "leased", "reserved"):
        yield _family(GaugeMetricFamily, f"segment_{name}", f"{name} in a segment now", _SEGMENT, rows(name))
    yield _family(CounterMetricFamily, "segment_evictions", "chunks evicted from a segment", _SEGMENT, rows("evictions"))
    live = [((one.id, one.device, one.medium), float(one.state == "live")) for one in segments]
    yield _family(GaugeMetricFamily, "segment_live", "1 if chunks can be stored in a segment", _SEGMENT, live)


def _in_place(stats: ServerStats) -> Iterator[Metric]:
    shown = [((one.id, one.device, str(one.pid)), one) for one in stats.instances]
    chunks = [(labels, float(one.resident)) for labels, one in shown]
    shared = [(labels, float(not one.missing)) for labels, one in shown]
    yield _family(
        GaugeMetricFamily, "instance_resident_chunks", "chunks that others find in an instance's KV cache", _INSTANCE, chunks
    )
    yield _family(GaugeMetricFamily, "instance_shared", "1 if others can read an instance's KV cache in place", _INSTANCE, shared)
    readers = [((str(one.pid), one.device, one.instance), one) for one in stats.reads]
    nbytes = [(labels, float(one.nbytes)) for labels, one in readers]
    refused = [(labels, float(one.refused)) for labels, one in readers]
    yield _family(CounterMetricFamily, "read_bytes", "read out of an instance's KV cache, by a process", _READER, nbytes)
    what = "chunks that their owner had used again while they were read"
    yield _family(CounterMetricFamily, "read_refused_chunks", what, _READER, refused)
    kept = [((one.instance, one.device, str(one.pid)), 1.0) for one in stats.still_mapped]
    what = "1 for a process that keeps the memory of an instance that has ended"
    yield _family(GaugeMetricFamily, "instance_still_mapped", what, _INSTANCE, kept)


def _gauge(name: str, what: str, value: float) -> Metric:
    return GaugeMetricFamily(f"vcache_{name}", what, value=float(value))


def _counter(name: str, what: str, value: float) -> Metric:
    return CounterMetricFamily(f"vcache_{name}", what, value=float(value))


def _family(
    kind: type[GaugeMetricFamily | CounterMetricFamily], name: str, what: str, labels: Sequence[str], rows: Iterable[Row]
) -> Metric:
    """A metric with labels. Rows with equal labels are added up: processes whose pids are not visible cannot be told apart."""
    made = kind(f"vcache_{name}", what, labels=labels)
    totals: dict[tuple[str, ...], float] = {}
    for values, value in rows:
        totals[tuple(values)] = totals.get(tuple(values), 0.0) + value
    for values, value in totals.items():
        made.add_metric(values, value)
    return made
