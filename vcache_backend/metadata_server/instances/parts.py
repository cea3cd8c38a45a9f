"""The parts of one instance: the scheduler's generation table, and each worker's KV cache."""

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
"""Bytes of server memory for the description of a cache, of a plane and of a region."""


class SchedulerPart:
    """A scheduler's generation table. `peer` is None once the scheduler's connection is closed."""

    def __init__(self, peer: Peer, request: m.Join, table: Descriptor) -> None:
        self.peer: Peer | None = peer
        self.pidfd: Descriptor | None = None
        """A pidfd of the scheduler's process, made when a client first asks for it."""
        self.table: Descriptor | None = table
        self.process, self.request = peer.process, request
        status = os.fstat(table.fd)
        self.memory = status.st_dev, status.st_ino

    def gone(self) -> None:
        """Close the fds after the connection closed. Keep the description, since the same process
        may connect again."""
        self.peer = self.pidfd = self.table = None


class WorkerPart:
    """A worker's KV cache. `peer` is None once the worker's connection is closed."""

    def __init__(self, peer: Peer, shape: m.CacheShape) -> None:
        self.peer: Peer | None = peer
        self.pidfd: Descriptor | None = None
        self.owner, self.process, self.shape = peer, peer.process, shape
        self.nbytes = (
            CACHE_BYTES + PLANE_BYTES * len(shape.planes) + REGION_BYTES * len(shape.regions)
        )
        """About how many bytes of server memory the description takes."""
        self.regions: list[Descriptor] = []

    def gone(self) -> None:
        """Close the fds after the connection closed. Keep the description, since the same process
        may connect again."""
        self.peer = self.pidfd = None
        self.regions = []


class RegisteredInstance:
    """The parts of one instance, by rank and `SCHEDULER`."""

    def __init__(self) -> None:
        self.table: SchedulerPart | None = None
        self.caches: dict[int, WorkerPart] = {}

    def parts(self) -> Iterator[tuple[int, SchedulerPart | WorkerPart]]:
        """All parts, including parts whose connections are closed."""
        if self.table is not None:
            yield m.SCHEDULER, self.table
        yield from self.caches.items()

    def processes(self) -> set[ProcessId]:
        """The connected processes that show a part of the instance."""
        return {part.process for _, part in self.parts() if part.peer is not None}

    def missing(self) -> str:
        """Name the first part that is not shown; empty if all parts are shown."""
        if self.table is None or self.table.peer is None:
            return "its scheduler"
        for rank in range(self.table.request.ranks):
            cache = self.caches.get(rank)
            if cache is None or cache.peer is None:
                return f"rank {rank}"
        return ""


def only(fds: list[int]) -> int:
    """Return the single fd of a message. A caller that keeps the fd removes it from the list.
    Refuse unless the message brought exactly 1 fd."""
    if len(fds) != 1:
        raise Refuse(f"{len(fds)} fds came along; exactly 1 is needed")
    return fds[0]


def no_table(fd: int, blocks: int) -> str:
    """Explain why readers cannot trust `fd` as a generation table: a table has a fixed size, and
    only its owner can change it. Empty if readers can trust the fd."""
    if fcntl.fcntl(fd, fcntl.F_GETFL) & (os.O_ACCMODE | os.O_PATH) not in (os.O_RDONLY, os.O_RDWR):
        return "the fd is not open for reading"
    if reason := lacking(fd, RESIZING | FUTURE_WRITE):
        return reason
    if (nbytes := os.fstat(fd).st_size) < blocks * m.GENERATION_BYTES:
        return f"the memfd has {nbytes:,} B, too few for the generations of {blocks:,} blocks"
    return ""
