"""One client's connection, as the server has it; whose request is answered next, so that no client waits for another one's; and the
fds that leave with answers."""

from __future__ import annotations

import fcntl
import heapq
import logging
import mmap
import os
import select
import socket
import stat
import time
from collections import deque
from collections.abc import Iterator
from itertools import repeat
from typing import Protocol

from vcache_backend.errors import ProtocolError
from vcache_backend.metadata_server import messages as m
from vcache_backend.metadata_server import wire
from vcache_backend.metadata_server.closing import closer
from vcache_backend.metadata_server.placement import Peer
from vcache_backend.seals import FUTURE_WRITE, lacking

log = logging.getLogger(__name__)

FREED_AT_ONCE, FREEING_STEPS = 2 << 20, 256
"""Bytes, no less than a large page, and the steps they count for: a turn of the loop frees some 4 MiB, in about a millisecond."""


class Holder(Protocol):
    """What keeps an open file for others."""

    fd: int


class Descriptor:
    """An open file that is closed, soon after nobody needs it any more: neither the table it is in, nor an answer yet to be sent."""

    def __init__(self, fd: int) -> None:
        """`fd` is this object's from now on."""
        self.fd = fd
        closer.start()

    def __del__(self) -> None:
        closer.close(self.fd)


class Connection:
    """One client's socket and what is on its way. `pid`: as this pid namespace has it, or 0."""

    def __init__(self, sock: socket.socket, number: int, pid: int) -> None:
        self.sock = sock
        self.number = number
        self.pid = pid
        self.client: Peer | None = None
        self.accepted = time.monotonic()
        self.request: bytes | None = None
        self.fds: list[int] = []
        self.unsent: deque[tuple[bytes, Holder | None, int]] = deque()
        self.mask = select.EPOLLIN
        self.closing = self.closed = False
        self.queued = False
        self.charged = 0.0

    @property
    def wanted(self) -> int:
        """What epoll is to tell of it: the next request only when the one before is answered, and the answer has left."""
        if self.unsent:
            return select.EPOLLOUT
        return 0 if self.queued else select.EPOLLIN

    def queue(self, reply: m.Reply, held: Holder | None = None) -> None:
        """`held` is held until the reply has left: its fd goes with it."""
        try:
            data = wire.encode(reply)
        except ProtocolError as error:
            data = wire.encode(m.Error(str(error)))
        self.unsent.append((data, held, reply.reservation if isinstance(reply, m.Reserved) else 0))

    def untold(self) -> list[int]:
        """Reservations whose answer did not leave: nobody knows of them, so nobody writes under them."""
        return [reservation for _, _, reservation in self.unsent if reservation]

    def flush(self) -> None:
        """Send as much as the socket takes now. OSError if the peer is gone."""
        while self.unsent:
            data, held, _ = self.unsent[0]
            try:
                self.sock.send(data) if held is None else socket.send_fds(self.sock, [data], [held.fd])
            except BlockingIOError:
                return
            self.unsent.popleft()

    def close_fds(self) -> None:
        """Those that came along and that nobody took, soon: each may be the last of much memory."""
        if self.fds:
            closer.start()
        while self.fds:
            closer.close(self.fds.pop())

    def close(self) -> None:
        self.close_fds()
        self.closed = True
        self.sock.close()


class Turns:
    """Connections with a request, the one that was given least work lately first (start-time fair queueing).

    A connection is charged for the time that its requests take. One that was quiet starts level with those being served: it waits for one
    request of another's, however many they sent.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Connection]] = []
        self._now = 0.0

    def __len__(self) -> int:
        return len(self._heap)

    def enter(self, connection: Connection) -> None:
        """It has a request."""
        connection.queued = True
        connection.charged = max(connection.charged, self._now)
        heapq.heappush(self._heap, (connection.charged, connection.number, connection))

    def next(self) -> Connection | None:
        """Whose request comes now."""
        while self._heap:
            self._now, _, connection = heapq.heappop(self._heap)
            connection.queued = False
            if not connection.closed:
                return connection
        return None


class Longest:
    """The longest turn of the loop since the server's start: microseconds on the wall clock, and of the processor."""

    def __init__(self) -> None:
        self._wall = self._cpu = 0.0
        self._began = self._began_cpu = 0.0

    def begin(self) -> None:
        """The loop has something to do."""
        self._began, self._began_cpu = time.perf_counter(), time.thread_time()

    def end(self) -> None:
        """It waits again."""
        self._wall = max(self._wall, time.perf_counter() - self._began)
        self._cpu = max(self._cpu, time.thread_time() - self._began_cpu)

    def told(self) -> dict[str, int]:
        """As counters."""
        return {"longest_turn_us": round(self._wall * 1e6), "longest_turn_cpu_us": round(self._cpu * 1e6)}


def free_pages(memory: Holder, start: int, end: int) -> Iterator[None]:
    """Give the pages of a memfd between these bytes back to the system, a little a step. Who has it mapped finds zeros there."""
    start, at = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, 0
    try:
        with mmap.mmap(memory.fd, max(end - start, 1), offset=start) as pages:
            while start + at < end:
                size = min(FREED_AT_ONCE - (start + at) % FREED_AT_ONCE, len(pages) - at)
                pages.madvise(mmap.MADV_REMOVE, at, size)
                at += size
                yield from repeat(None, FREEING_STEPS)
    except (OSError, ValueError) as error:
        log.warning("%s B that were taken back from a segment cannot be freed before it goes: %s", f"{end - start:,}", error)


def unmappable(medium: m.Medium, nbytes: int, fd: int, to_write: bool = True) -> str:
    """Why workers could not map so much of `fd`, to write or only to read, or would die of it; empty if nothing here speaks against it.

    Whether GPU memory is what it is said to be, only its driver knows: a worker that cannot map it says so (`Unusable`).
    """
    status, flags = os.fstat(fd), fcntl.fcntl(fd, fcntl.F_GETFL)
    if flags & os.O_PATH or flags & os.O_ACCMODE not in ((os.O_RDWR,) if to_write else (os.O_RDWR, os.O_RDONLY)):
        return f"the fd is not open for reading{' and writing' if to_write else ''}, as workers need it"
    if medium == "cuda":
        # The driver exports memory as an open file of its own device, /dev/nvidiactl.
        return "" if stat.S_ISCHR(status.st_mode) else "the fd is a file, a memfd or a socket, no memory of a GPU"
    if reason := lacking(fd):
        return reason
    seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    if to_write and seals & (fcntl.F_SEAL_WRITE | FUTURE_WRITE):
        return f"the memfd is sealed against writing (seals {seals:#x})"
    if status.st_size < nbytes:
        return f"the memfd has {status.st_size:,} B, fewer than the {nbytes:,} B announced"
    return ""
