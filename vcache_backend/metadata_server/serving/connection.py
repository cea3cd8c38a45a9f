"""A client's connection in the server, the order of answering requests, and the fds of answers."""

from __future__ import annotations

import errno
import fcntl
import heapq
import select
import socket
import termios
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from itertools import count

from vcache_backend.metadata_server import messages as m
from vcache_backend.metadata_server import wire
from vcache_backend.metadata_server.client_lines import Caller
from vcache_backend.metadata_server.descriptors import Descriptor, closing
from vcache_backend.metadata_server.ledger import Ledger
from vcache_backend.metadata_server.pool.placement import Peer

TOO_MANY_FDS = "too many fds are on their way to clients; ask again later"
MAX_HANDED = 2 * m.MAX_FDS
"""The most fds on their way to one client."""
Holder = Descriptor | Ledger
Answer = tuple[m.Reply, Sequence[Holder]]
"""A reply, and the owners of its fds."""


class Account:
    """The seconds that a process's connections have cost, and the connections with a request. A
    process whose pid is not visible has an account for each connection."""

    def __init__(self) -> None:
        self.charged = 0.0
        self.waiting: deque[Connection] = deque()


class Connection:
    """A client's socket, with the requests and answers under way. caller: the client's user, and
    its pid in this pid namespace, or 0."""

    def __init__(self, sock: socket.socket, number: int, caller: Caller) -> None:
        self.sock = sock
        self.number = number
        self.caller = caller
        self.client: Peer | None = None
        self.accepted = time.monotonic()
        self.request: bytes | None = None
        self.fds: list[int] = []
        self.unsent: deque[tuple[bytes, Sequence[Holder], int]] = deque()
        """Answers, the owners of their fds, and the granted reservations."""
        self.mask = select.EPOLLIN
        self.closing = self.closed = False
        self.queued = False
        self.handed = 0
        """Fds sent since the client had last received all answers."""
        self.account = Account()

    @property
    def wanted(self) -> int:
        """The events that epoll should report. A request is read after the last answer has left."""
        if self.unsent:
            return select.EPOLLOUT
        return 0 if self.queued else select.EPOLLIN

    def queue(self, reply: m.Reply, held: Sequence[Holder] = ()) -> None:
        """Queue a reply. Keeps `held`, the owners of the fds, until the reply has left."""
        reservation = reply.reservation if isinstance(reply, m.Reserved) else 0
        self.unsent.append((wire.encode(reply), held, reservation))

    def untold(self) -> list[int]:
        """Reservations whose answers have not left: no client writes to these slots."""
        return [reservation for _, _, reservation in self.unsent if reservation]

    def flush(self) -> None:
        """Send as much as the socket takes now. OSError if the client is gone."""
        while self.unsent:
            data, held, _ = self.unsent[0]
            try:
                if held:
                    self._hand_over(data, [each.fd for each in held])
                else:
                    self.sock.send(data)
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno != errno.ETOOMANYREFS:
                    raise
                self.unsent[0] = wire.encode(m.Error(TOO_MANY_FDS)), (), 0
                continue
            self.unsent.popleft()

    def _hand_over(self, data: bytes, fds: list[int]) -> None:
        """Send an answer with fds. OSError ETOOMANYREFS if too many fds are under way to this
        client or to all clients: Linux counts them, and at its limit no client gets fds."""
        unread = any(fcntl.ioctl(self.sock, termios.TIOCOUTQ, bytes(4)))
        handed = len(fds) + (self.handed if unread else 0)
        if handed > MAX_HANDED:
            raise OSError(errno.ETOOMANYREFS, TOO_MANY_FDS)
        socket.send_fds(self.sock, [data], fds)
        self.handed = handed

    def close_fds(self) -> None:
        """Close a request's unused fds in the background: an fd may be the last of much memory."""
        while self.fds:
            closing().put(self.fds.pop())

    def close(self) -> None:
        """Hang up now, and close in the background, which also closes fds that nobody received."""
        self.close_fds()
        self.closed = True
        with suppress(OSError):  # the client has hung up
            self.sock.shutdown(socket.SHUT_RDWR)
        closing().put(self.sock.detach())


class Turns:
    """Connections with requests. The process with the least work comes first (start-time fair
    queueing).

    Each process is charged for the time of its requests. A quiet process starts level with busy
    processes: it waits for one request of each busy process, with any number of connections."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Account]] = []
        """The accounts with a waiting connection, each once."""
        self._now, self._numbers = 0.0, count()

    def __len__(self) -> int:
        return len(self._heap)

    def enter(self, connection: Connection) -> None:
        """Add a connection that has a request."""
        connection.queued, account = True, connection.account
        account.waiting.append(connection)
        if len(account.waiting) == 1:
            account.charged = max(account.charged, self._now)
            self._push(account)

    def next(self) -> Connection | None:
        """The next connection. Call `charge` with it before the next `next` or `enter`."""
        while self._heap:
            self._now, _, account = heapq.heappop(self._heap)
            connection = account.waiting.popleft()
            connection.queued = False
            if not connection.closed:
                return connection
            self.charge(connection, 0.0)
        return None

    def charge(self, connection: Connection, seconds: float) -> None:
        """Charge the time that the connection's request took."""
        account = connection.account
        account.charged += seconds
        if account.waiting:
            self._push(account)

    def _push(self, account: Account) -> None:
        heapq.heappush(self._heap, (account.charged, next(self._numbers), account))
