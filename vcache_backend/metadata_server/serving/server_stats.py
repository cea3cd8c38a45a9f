"""Collects the server's statistics, and cuts them to the size of a message."""

from __future__ import annotations

import resource
import time
from typing import TYPE_CHECKING

import msgspec

from vcache_backend.metadata_server import messages as m

if TYPE_CHECKING:
    from vcache_backend.metadata_server.serving.service import Service

_MOST = 1 << 62
"""The largest number that a message can hold. Only a client that lies about its tokens reaches
it."""


def server_stats(service: Service) -> m.ServerStats:
    """Collect all statistics but the number of connections."""
    directory, layouts = service.directory, service.layouts
    layouts.forget_gone(directory.stores)
    open_, quarantined = directory.reservations.counts()
    instances = service.instances.stats() + layouts.through_pool(service.instances.processes())
    counters = (
        dict(directory.counters)
        | {"expired_leases": directory.leases.expired}
        | service.longest.told()
    )
    stats = m.ServerStats(
        epoch=service.epoch,
        uptime_seconds=time.monotonic() - service.started,
        clients=0,
        chunks=len(directory),
        leases=len(directory.leases),
        reservations=open_,
        quarantined=quarantined,
        counters={name: min(count, _MOST) for name, count in counters.items()},
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
        still_mapped=service.instances.still_mapped(),
        reads=service.of_instances.reads.stats(),
        hits={
            name: (min(asked, _MOST), min(found, _MOST))
            for name, (asked, found) in layouts.hits.items()
        },
        tenants=directory.quotas.stats(directory.contents.placement.capacity()),
    )
    return fitting(stats)


def fitting(stats: m.ServerStats) -> m.ServerStats:
    """Cut `stats` to the size of a message: repeatedly halve the clients' reports, then the lists
    of instances."""
    while len(msgspec.msgpack.encode(stats)) > m.MAX_MESSAGE_BYTES:
        if stats.reports or stats.mismatches or stats.namespaces or stats.reads or stats.hits:
            stats = _less_told(stats)
        elif stats.instances or stats.still_mapped:
            some, kept = stats.instances, stats.still_mapped
            stats = msgspec.structs.replace(
                stats, instances=some[: len(some) // 2], still_mapped=kept[: len(kept) // 2]
            )
        else:
            break
    return stats


def _less_told(stats: m.ServerStats) -> m.ServerStats:
    """Halve the parts that clients reported: keep the newest reports, namespaces and hits, the
    first mismatches and the largest reads."""
    namespaces, hits = list(stats.namespaces.items()), list(stats.hits.items())
    return msgspec.structs.replace(
        stats,
        reports=stats.reports[(len(stats.reports) + 1) // 2 :],
        mismatches=stats.mismatches[: len(stats.mismatches) // 2],
        reads=stats.reads[: len(stats.reads) // 2],
        namespaces=dict(namespaces[(len(namespaces) + 1) // 2 :]),
        hits=dict(hits[(len(hits) + 1) // 2 :]),
    )


def _rss_bytes() -> int:
    """This process's resident memory; 0 if no descriptor is free to read it."""
    try:
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * resource.getpagesize()
    except OSError:
        return 0
