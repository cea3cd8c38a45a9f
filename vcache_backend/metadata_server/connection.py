"""The server's sockets: the one it listens on, and one connection a client."""

from __future__ import annotations

import fcntl
import os
import socket
import time
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from vcache_backend.errors import ConfigError
from vcache_backend.metadata_server import messages as m
from vcache_backend.metadata_server import wire
from vcache_backend.metadata_server.directory import Client
from vcache_backend.metadata_server.journal import ProcessId


@contextmanager
def listening(path: Path) -> Iterator[socket.socket]:
    """A listening socket only this user can reach; a lock file beside it keeps a second server away."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(f"server.socket: cannot use {path}: {error}") from error
    with ExitStack() as undo:
        undo.callback(os.close, lock)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(f"server.socket: another server already serves {path}") from error
        path.unlink(missing_ok=True)
        listener = undo.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        umask = os.umask(0o177)
        try:
            listener.bind(str(path))
        except OSError as error:
            raise ConfigError(f"server.socket: cannot bind {path}: {error}") from error
        finally:
            os.umask(umask)
        undo.callback(path.unlink, missing_ok=True)
        listener.listen(256)
        listener.setblocking(False)
        yield listener


class Connection:
    """One client's socket and what is on its way."""

    def __init__(self, sock: socket.socket, number: int, process: ProcessId) -> None:
        self.sock = sock
        self.number = number
        self.process = process
        self.client: Client | None = None
        self.accepted = time.monotonic()
        self.reader = wire.FrameReader()
        self.fds: list[int] = []
        self.unsent: deque[tuple[memoryview, int | None, int]] = deque()
        self.unsent_bytes = 0
        self.blocked = False
        self.closing = False

    def queue(self, reply: m.Reply, fd: int | None = None) -> None:
        data = wire.frame(reply)
        self.unsent.append((memoryview(data), fd, reply.reservation if isinstance(reply, m.Reserved) else 0))
        self.unsent_bytes += len(data)

    def untold(self) -> list[int]:
        """Reservations whose answer did not leave whole: nobody knows of them, so nobody writes under them."""
        return [reservation for _, _, reservation in self.unsent if reservation]

    def flush(self) -> None:
        """Send as much as the socket takes now. OSError if the peer is gone."""
        while self.unsent:
            data, fd, reservation = self.unsent[0]
            try:
                sent = self.sock.send(data) if fd is None else socket.send_fds(self.sock, [data], [fd])
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
        self.sock.close()
