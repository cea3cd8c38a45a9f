"""One client's connection, as the server has it."""

from __future__ import annotations

import select
import socket
import time
from collections import deque

from vcache_backend.metadata_server import messages as m
from vcache_backend.metadata_server import wire
from vcache_backend.metadata_server.backlog import Waiting
from vcache_backend.metadata_server.descriptors import Holder
from vcache_backend.metadata_server.placement import Peer

MAX_UNREAD_BYTES = 1 << 16
"""A client that leaves more than this unread is not answered, nor read from, until it has read."""


class Connection:
    """One client's socket and what is on its way. `pid`: as this pid namespace has it, or 0."""

    def __init__(self, sock: socket.socket, number: int, pid: int) -> None:
        self.sock = sock
        self.number = number
        self.pid = pid
        self.client: Peer | None = None
        self.accepted = time.monotonic()
        self.reader = wire.FrameReader(m.MAX_REQUEST_BYTES)
        self.held = 0
        self.held_since = 0.0
        self.fds: list[int] = []
        self.unsent: deque[tuple[memoryview, Holder | None, int]] = deque()
        self.unsent_bytes = 0
        self.mask = select.EPOLLIN
        self.closing = self.closed = False
        self.queued = False
        self.charged = 0
        self.waiting: Waiting | None = None

    @property
    def ready(self) -> bool:
        """Whether a request can be answered now: not before earlier answers have left, but for a few."""
        free = self.reader.ready and self.waiting is None and self.unsent_bytes <= MAX_UNREAD_BYTES
        return free and not (self.closing or self.closed)

    @property
    def wanted(self) -> int:
        """What epoll is to tell of it: more requests only when all are answered, and the answers read."""
        if self.unsent:
            return select.EPOLLOUT
        return 0 if self.queued or self.waiting is not None else select.EPOLLIN

    def hold(self, completed: bool) -> int:
        """Note how many bytes of an unfinished frame there are, and since when; by how many they grew. completed: a frame was."""
        before, self.held = self.held, self.reader.held
        if self.held and (completed or not before):
            self.held_since = time.monotonic()
        return self.held - before

    def queue(self, reply: m.Reply, held: Holder | None = None) -> None:
        """`held` is held until the reply has left: its fd goes with it."""
        data = wire.frame(reply)
        self.unsent.append((memoryview(data), held, reply.reservation if isinstance(reply, m.Reserved) else 0))
        self.unsent_bytes += len(data)

    def untold(self) -> list[int]:
        """Reservations whose answer did not leave whole: nobody knows of them, so nobody writes under them."""
        return [reservation for _, _, reservation in self.unsent if reservation]

    def flush(self) -> None:
        """Send as much as the socket takes now. OSError if the peer is gone."""
        while self.unsent:
            data, held, reservation = self.unsent[0]
            try:
                sent = self.sock.send(data) if held is None else socket.send_fds(self.sock, [data], [held.fd])
            except BlockingIOError:
                return
            self.unsent_bytes -= sent
            if sent == len(data):
                self.unsent.popleft()
            else:
                self.unsent[0] = (data[sent:], None, reservation)

    def close(self) -> None:
        wire.close_fds(self.fds)
        self.fds.clear()
        self.closed = True
        self.sock.close()
