"""A client's connection in the server, and the answers on their way to the client."""

from __future__ import annotations

import errno
import select
import socket
from collections import deque
from collections.abc import Sequence
from contextlib import suppress

from vcache_backend.metadata_server.descriptors import Descriptor, closing
from vcache_backend.metadata_server.ledger import Ledger
from vcache_backend.metadata_server.pool.placement import Peer
from vcache_backend.protocol import messages as m
from vcache_backend.protocol import wire

TOO_MANY_FDS = "too many fds are on their way to clients; ask again later"


class Connection:
    """A client's socket. pid: of the client in this pid namespace, or 0. uid: the client's user."""

    def __init__(self, sock: socket.socket, number: int, pid: int, uid: int) -> None:
        self.sock = sock
        self.number = number
        self.pid, self.uid = pid, uid
        self.client: Peer | None = None
        self.request = b""
        """The present request; a hello that waits for a ledger stays here."""
        self.fds: list[int] = []
        """The present request's fds."""
        self.unsent: deque[tuple[bytes, Sequence[Descriptor | Ledger], int]] = deque()
        """Answers, the owners of their fds, and the granted reservations."""
        self.mask = select.EPOLLIN
        self.closing = self.closed = False

    @property
    def wanted(self) -> int:
        """The events that epoll should report. The next request is read after the last answer has
        left, so a client that reads nothing has one answer here."""
        if self.unsent:
            return select.EPOLLOUT
        return 0 if self.request else select.EPOLLIN

    def queue(self, reply: m.Reply, held: Sequence[Descriptor | Ledger] = ()) -> None:
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
                    socket.send_fds(self.sock, [data], [each.fd for each in held])
                else:
                    self.sock.send(data)
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno != errno.ETOOMANYREFS:  # Linux counts the unread fds of a user
                    raise
                self.unsent[0] = wire.encode(m.Error(TOO_MANY_FDS)), (), 0
                continue
            self.unsent.popleft()

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
