"""The server's statistics as Prometheus metrics."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import get_args

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from vcache_backend.metadata_server.messages import Level, SegmentInfo, ServerStats
from vcache_backend.monitor.samples import Samples
from vcache_backend.status import SILENT_SECONDS

REPORTS_SECONDS = 600.0
_GAUGES = {
    "uptime_seconds": (
        "Time since the start of the server. When it falls, the server was restarted."
    ),
    "clients": "Processes that are connected: vLLM's scheduler and each worker, and tools.",
    "chunks": "Chunks in the pool.",
    "leases": (
        "Leases that keep chunks of the pool in place while they are read. They rise and "
        "fall with the load."
    ),
    "reservations": (
        "Requests to write into the pool that are under way. They rise and fall with the load."
    ),
}
_LONGEST = {
    "longest_turn": (
        "The longest that the server was busy at a stretch, since its start. Near "
        "client.request_seconds, requests fail."
    ),
    "longest_turn_cpu": (
        "The same in time of the processor. Far less than by the clock: the "
        "machine has too much to do."
    ),
}
_COUNTERS = {
    "clients_total": (
        "Clients that have connected. If it rises while no instance starts, "
        "clients lose their connection."
    ),
    "protocol_errors": (
        "Messages that the server could not read. Above 0, a client has another "
        "version, or is none of ours."
    ),
    "lookup_chunks": "Chunks that look-ups asked for.",
    "lookup_hits": "Chunks that look-ups found, in the pool or in another instance's KV cache.",
    "resident_hits": "Chunks that look-ups found in another instance's KV cache.",
    "promised_chunks": "Chunks that instances said they would compute, so that others wait.",
    "promised_chunks_arrived": "Promised chunks that others can read.",
    "promised_chunks_broken": (
        "Chunks that an instance began to compute and gave up, so that others compute them. If "
        "they rise, requests are aborted or preempted, or instances die."
    ),
    "acquire_chunks": "Chunks of the pool that loads asked to lease.",
    "acquire_hits": (
        "Chunks of the pool that loads leased. Far fewer than asked for: chunks go "
        "between look-up and load."
    ),
    "reserved": "Chunks of the pool that writers got a slot for.",
    "committed": "Chunks that were written to the pool.",
    "aborted": "Slots that writers gave back unwritten.",
    "expired_reservations": (
        "Reservations whose writer was too slow or is gone. If they rise, a "
        "worker hangs or the machine is overloaded."
    ),
    "expired_leases": (
        "Leases that ended before their reader released them. If they rise, a "
        "worker hangs or the machine is overloaded."
    ),
    "evicted": (
        "Chunks that made room for others in the pool. If they rise while the hit rate "
        "falls, the pool is too small."
    ),
    "removed": "Chunks of the pool that were forgotten because a client asked for it.",
    "published": "Chunks that instances showed to others in their KV caches.",
    "hints": "Chunks in KV caches whose owner was told that others read them.",
    "refused_full": (
        "Chunks that were not stored because nothing in the pool could make room. "
        "If they rise, the pool is too small."
    ),
    "refused_too_large": "Chunks that were not stored because they are larger than any segment.",
    "refused_no_segment": (
        "Chunks that were not stored because the pool has no segment that their worker can use."
    ),
}
"""The server's counters. They start at 0, so that a scraper sees the first increase."""
_OF_SEGMENTS = {
    "bytes": ("nbytes", "Size of a segment."),
    "used_bytes": (
        "used",
        (
            "Bytes of a segment that hold chunks. A full one is a good one: chunks that were used "
            "least make room."
        ),
    ),
    "chunks": ("chunks", "Chunks in a segment."),
    "leased": ("leased", "Chunks of a segment that are being read, and cannot make room."),
    "reserved": ("reserved", "Slots of a segment that are being written, or are in quarantine."),
}
"""Gauges of each segment: the field of `SegmentInfo`, and the help text."""
_SEGMENT = ("segment", "device", "medium")
_INSTANCE = ("instance_id", "device", "pid")
_READER = ("pid", "device", "instance_id")
Row = tuple[Sequence[str], float]


class ServerMetrics(Collector):
    """Makes all metrics at each scrape. pid: the server's; 0 if
    unknown.
    """

    def __init__(self, samples: Samples, pid: int) -> None:
        self._samples, self._pid = samples, pid
        self._models: dict[str, str] = {}
        """The model of each namespace with hits. It stays when the last instance goes: a changed
        label would begin another series.
        """

    def collect(self) -> Iterator[Metric]:
        """All metrics; only `vcache_server_up` if the server did not answer the last question."""
        stats = None if self._samples.problem else self._samples.stats
        yield _gauge(
            "server_up",
            (
                "1 if the server answered the last question, asked every few seconds. At 0 nothing "
                "is shared."
            ),
            stats is not None,
        )
        if stats is None:
            return
        yield from _whole(stats)
        yield from _descriptors(self._pid)
        if (rate := self._samples.hit_rate()) is not None:
            yield _gauge(
                "server_hit_ratio_1m",
                "Tokens found over tokens looked up, in the last minute. Not there if none was.",
                rate,
            )
        self._models = {
            name: stats.namespaces.get(name) or self._models.get(name, "") for name in stats.hits
        }
        yield from _hits(stats, self._samples, self._models)
        yield from _requests(stats)
        yield from _segments(stats.segments)
        yield from _in_place(stats)


def _whole(stats: ServerStats) -> Iterator[Metric]:
    for name, what in _GAUGES.items():
        yield _gauge(f"server_{name}", what, getattr(stats, name))
    yield _gauge(
        "server_memory_bytes", "Resident memory of the server, without the pool's.", stats.rss_bytes
    )
    what = (
        "Slots out of use until their writer ends or answers. If they stay, a process "
        "hangs; `vcache status` has its pid."
    )
    yield _gauge("server_quarantined_slots", what, sum(stats.quarantined_slots.values()))
    what = (
        "Fields in which connected instances of one model differ, so that they do not "
        "share. Above 0, `vcache status` says what to do."
    )
    yield _gauge("server_not_shared", what, len(stats.mismatches))
    since = time.time() - REPORTS_SECONDS
    levels = Counter(one.level for one in stats.reports if one.time >= since)
    what = (
        "What clients reported in the last 10 minutes, of the newest ones. If one is an "
        "error, read it in `vcache status`."
    )
    yield _family(
        GaugeMetricFamily,
        "server_reports_10m",
        what,
        ("level",),
        [((level,), levels[level]) for level in get_args(Level)],
    )
    for name, what in _LONGEST.items():
        yield _gauge(f"server_{name}_seconds", what, stats.counters.get(f"{name}_us", 0) / 1e6)
    told = {
        name: total for name, total in stats.counters.items() if not name.startswith("longest_")
    }
    for name, total in (dict.fromkeys(_COUNTERS, 0) | told).items():
        what = _COUNTERS.get(
            name, f"{name.replace('_', ' ').capitalize()}, since the server's start."
        )
        yield _counter(f"server_{name.removesuffix('_total')}", what, total)


def _descriptors(pid: int) -> Iterator[Metric]:
    """How many fds the server has, and may have. Nothing if that cannot be read."""
    with suppress(OSError, ValueError):
        yield _gauge(
            "server_open_fds",
            "File descriptors that the server has open. Near the limit, new clients wait.",
            len(os.listdir(f"/proc/{pid}/fd")),
        )
        limits = Path(f"/proc/{pid}/limits").read_text().splitlines()
        (most,) = [line.split()[3] for line in limits if line.startswith("Max open files")]
        yield _gauge(
            "server_max_fds",
            "File descriptors that the server may have open.",
            float(most.replace("unlimited", "inf")),
        )


def _hits(stats: ServerStats, samples: Samples, models: Mapping[str, str]) -> Iterator[Metric]:
    labels = ("namespace", "model")

    def rows(values: Iterable[tuple[str, float]]) -> list[Row]:
        return [((name, models.get(name, "")), value) for name, value in values]

    for number, (name, what) in enumerate(
        (("asked", "asked for"), ("found", "asked for and found"))
    ):
        totals = rows((name, float(counts[number])) for name, counts in stats.hits.items())
        yield _family(
            CounterMetricFamily,
            f"namespace_{name}_tokens",
            f"Prompt tokens that instances {what}.",
            labels,
            totals,
        )
    rates = rows((name, found / asked) for name, (asked, found) in samples.hits().items())
    what = (
        "Prompt tokens found over those asked for, in the last minute. Not there if nobody asked."
    )
    yield _family(GaugeMetricFamily, "namespace_hit_ratio_1m", what, labels, rates)


def _requests(stats: ServerStats) -> Iterator[Metric]:
    """A summary with quantiles. prometheus_client has no family for that."""
    what = (
        "Time of requests inside the server; quantiles since its start. Near "
        "client.request_seconds, requests fail."
    )
    made = Metric("vcache_server_request_seconds", what, "summary")
    for name, latency in stats.latency.items():
        for quantile, us in (("0.5", latency.p50_us), ("0.99", latency.p99_us)):
            made.add_sample(made.name, {"request": name, "quantile": quantile}, us / 1e6)
        made.add_sample(f"{made.name}_count", {"request": name}, latency.count)
        made.add_sample(f"{made.name}_sum", {"request": name}, latency.total_us / 1e6)
    yield made


def _segments(segments: Sequence[SegmentInfo]) -> Iterator[Metric]:
    labels = [(one.id, one.device, one.medium) for one in segments]

    def rows(field: str) -> list[Row]:
        values = [float(getattr(one, field)) for one in segments]
        return list(zip(labels, values, strict=True))

    for name, (field, what) in _OF_SEGMENTS.items():
        yield _family(GaugeMetricFamily, f"segment_{name}", what, _SEGMENT, rows(field))
    what = (
        "Chunks of a segment that made room for others. If they rise while the hit rate "
        "falls, the pool is too small."
    )
    yield _family(CounterMetricFamily, "segment_evictions", what, _SEGMENT, rows("evictions"))
    what = (
        "1 if chunks can be stored in a segment; 0 if it is being dropped, or was lost when "
        "the server was restarted."
    )
    live = [float(one.state == "live") for one in segments]
    live_rows = list(zip(labels, live, strict=True))
    yield _family(GaugeMetricFamily, "segment_live", what, _SEGMENT, live_rows)


def _in_place(stats: ServerStats) -> Iterator[Metric]:
    every = [((one.id, one.device, str(one.pid)), one) for one in stats.instances]
    what = (
        "1 if a process of an instance is stopped, or nothing was heard of it for 10 s. "
        "Continue it, or end it."
    )
    stopped = [
        (labels, float(bool(one.stopped) or one.silent > SILENT_SECONDS)) for labels, one in every
    ]
    yield _family(GaugeMetricFamily, "instance_stopped", what, _INSTANCE, stopped)
    shown = [(labels, one) for labels, one in every if one.id]
    what = "Chunks that others find in an instance's KV cache."
    chunks = [(labels, float(one.resident)) for labels, one in shown]
    yield _family(GaugeMetricFamily, "instance_resident_chunks", what, _INSTANCE, chunks)
    what = (
        "1 if others can read an instance's KV cache. At 0 for minutes, `vcache status` "
        "says what it lacks."
    )
    shared = [(labels, float(not one.missing)) for labels, one in shown]
    yield _family(GaugeMetricFamily, "instance_shared", what, _INSTANCE, shared)
    readers = [((str(one.pid), one.device, one.instance), one) for one in stats.reads]
    nbytes = [(labels, float(one.nbytes)) for labels, one in readers]
    yield _family(
        CounterMetricFamily,
        "read_bytes",
        "Bytes that a process read out of an instance's KV cache.",
        _READER,
        nbytes,
    )
    what = (
        "Chunks that their owner used again while a process read them. They are computed instead."
    )
    refused = [(labels, float(one.refused)) for labels, one in readers]
    yield _family(CounterMetricFamily, "read_refused_chunks", what, _READER, refused)
    what = (
        "1 for a process that keeps the memory of an instance that has ended. If it stays, "
        "that process hangs: end it."
    )
    kept = [((one.instance, one.device, str(one.pid)), 1.0) for one in stats.still_mapped]
    yield _family(GaugeMetricFamily, "instance_still_mapped", what, _INSTANCE, kept)


def _gauge(name: str, what: str, value: float) -> Metric:
    return GaugeMetricFamily(f"vcache_{name}", what, value=float(value))


def _counter(name: str, what: str, value: float) -> Metric:
    return CounterMetricFamily(f"vcache_{name}", what, value=float(value))


def _family(
    kind: type[GaugeMetricFamily | CounterMetricFamily],
    name: str,
    what: str,
    labels: Sequence[str],
    rows: Iterable[Row],
) -> Metric:
    """A metric with labels. Rows with equal labels are added up: processes whose pids are not
    visible cannot be told apart.
    """
    made = kind(f"vcache_{name}", what, labels=labels)
    totals: dict[tuple[str, ...], float] = {}
    for values, value in rows:
        totals[tuple(values)] = totals.get(tuple(values), 0.0) + value
    for values, value in totals.items():
        made.add_metric(values, value)
    return made
