"""Collects the server's statistics, and cuts them to the size of a message."""

from __future__ import annotations

import resource
import time
from functools import cache
from typing import TYPE_CHECKING

import msgspec

from vcache_backend.metadata_server import processes
from vcache_backend.protocol import messages as m

if TYPE_CHECKING:
    from vcache_backend.metadata_server.serving.service import Service


def server_stats(service: Service) -> m.ServerStats:
    """Collect all statistics."""
    directory, layouts = service.directory, service.layouts
    open_, quarantined = directory.reservations.counts()
    # One process may belong to a hundred instances.
    stopped, in_place = cache(processes.stopped), service.instances
    instances = in_place.stats(stopped) + layouts.through_pool(in_place.processes(), stopped)
    counters = dict(directory.counters) | {"expired_leases": directory.leases.expired}
    stats = m.ServerStats(
        epoch=service.epoch,
        uptime_seconds=time.monotonic() - service.started,
        clients=len(layouts.clients),
        chunks=len(directory),
        leases=len(directory.leases),
        reservations=open_,
        quarantined=quarantined,
        counters=counters,
        latency={
            n: m.Latency(h.count, h.percentile(0.5), h.percentile(0.99), h.total_us)
            for n, h in service.latency.items()
        },
        segments=directory.segment_infos(),
        namespaces=layouts.namespaces(),
        rss_bytes=_rss_bytes(),
        reports=service.reports.newest_last(),
        quarantined_slots=dict(directory.reservations.writers()),
        mismatches=layouts.mismatches(),
        instances=instances,
        reads=in_place.reads(layouts.clients.values()),
        hits=dict(layouts.hits),
    )
    return fitting(stats)


_NEWEST = ("reports", "hits", "namespaces")
_FIRST = ("mismatches", "reads", "instances", "quarantined_slots")
"""Lists that may be cut: `_NEWEST` keep the newest entries, `_FIRST` the first entries."""


def fitting(stats: m.ServerStats) -> m.ServerStats:
    """Cut `stats` to the size of a message: halve the lists as often as needed."""
    while len(msgspec.msgpack.encode(stats)) > m.MAX_MESSAGE_BYTES:
        halves = {}
        for name in _NEWEST + _FIRST:
            some = getattr(stats, name)
            half = slice((len(some) + 1) // 2, None) if name in _NEWEST else slice(len(some) // 2)
            halves[name] = dict(list(some.items())[half]) if isinstance(some, dict) else some[half]
        stats = msgspec.structs.replace(stats, **halves)
    return stats


def _rss_bytes() -> int:
    """This process's resident memory; 0 if no descriptor is free to read it."""
    try:
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * resource.getpagesize()
    except OSError:
        return 0
