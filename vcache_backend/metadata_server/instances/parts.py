"""One instance as its processes have shown it: a scheduler's generation table, workers' KV caches,
and which of it can be trusted.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator

from vcache_backend.metadata_server import messages as m
from vcache_backend.metadata_server.pool.placement import Peer
from vcache_backend.metadata_server.records import ProcessId
from vcache_backend.metadata_server.refuse import Refuse
from vcache_backend.metadata_server.serving.connection import Descriptor
from vcache_backend.seals import FUTURE_WRITE, RESIZING, lacking

CACHE_BYTES, PLANE_BYTES, REGION_BYTES = 4096, 144, 256
"""What the server's memory holds of a cache's description."""


class ShownTable:
    """What a scheduler has shown. `peer` is None once its connection is closed."""

    def __init__(self, peer: Peer, request: m.Join, table: Descriptor) -> None:
        self.peer: Peer | None = peer
        self.pidfd: Descriptor | None = None
        """Of its process, once somebody has asked for it."""
        self.table: Descriptor | None = table
        self.process, self.request = peer.process, request
        status = os.fstat(table.fd)
        self.memory = status.st_dev, status.st_ino

    def gone(self) -> None:
        """Its connection is closed. The description is kept, since the same process may connect
        again.
        """
        self.peer = self.pidfd = self.table = None


class ShownCache:
    """What a worker has shown. `peer` is None once its connection is closed."""

    def __init__(self, peer: Peer, shape: m.CacheShape) -> None:
        self.peer: Peer | None = peer
        self.pidfd: Descriptor | None = None
        self.owner, self.process, self.shape = peer, peer.process, shape
        self.nbytes = (
            CACHE_BYTES + PLANE_BYTES * len(shape.planes) + REGION_BYTES * len(shape.regions)
        )
        """About how many bytes of the server's memory its description takes."""
        self.regions: list[Descriptor] = []

    def gone(self) -> None:
        """Its connection is closed: close its fds. The description is kept, since the same process
        may connect again.
        """
        self.peer = self.pidfd = None
        self.regions = []


class KnownInstance:
    """The parts of one instance, by rank and `SCHEDULER`."""

    def __init__(self) -> None:
        self.table: ShownTable | None = None
        self.caches: dict[int, ShownCache] = {}

    def parts(self) -> Iterator[tuple[int, ShownTable | ShownCache]]:
        """All parts, with those whose connections are closed."""
        if self.table is not None:
            yield m.SCHEDULER, self.table
        yield from self.caches.items()

    def processes(self) -> set[ProcessId]:
        """The processes that show a part of it at present."""
        return {part.process for _, part in self.parts() if part.peer is not None}

    def missing(self) -> str:
        """Which part is not shown yet; empty if all are."""
        if self.table is None or self.table.peer is None:
            return "its scheduler"
        for rank in range(self.table.request.ranks):
            cache = self.caches.get(rank)
            if cache is None or cache.peer is None:
                return f"rank {rank}"
        return ""


def only(fds: list[int]) -> int:
    """The one fd that came with a message. Whoever keeps it takes it out of the list. Refuse unless
    there is exactly one.
    """
    if len(fds) != 1:
        raise Refuse(f"{len(fds)} fds came along; exactly 1 is needed")
    return fds[0]


def no_table(fd: int, blocks: int) -> str:
    """Why readers could not trust `fd` to be a table of fixed size that only its owner changes;
    empty if they can.
    """
    if fcntl.fcntl(fd, fcntl.F_GETFL) & (os.O_ACCMODE | os.O_PATH) not in (os.O_RDONLY, os.O_RDWR):
        return "the fd is not open for reading"
    if reason := lacking(fd, RESIZING | FUTURE_WRITE):
        return reason
    if (nbytes := os.fstat(fd).st_size) < blocks * m.GENERATION_BYTES:
        return f"the memfd has {nbytes:,} B, too few for the generations of {blocks:,} blocks"
    return ""
