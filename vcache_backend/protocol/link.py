"""A client's connected socket: sends requests and reads replies, within deadlines."""

from __future__ import annotations

import errno
import os
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from vcache_backend.protocol import messages as m
from vcache_backend.protocol import wire
from vcache_backend.protocol.trust import folder_fault, peer


class ServerLink:
    """One connected socket. Not thread-safe. Deadlines are times of `time.perf_counter`."""

    def __init__(self, server_uid: int | None = None) -> None:
        self._trusted = {os.getuid(), 0} | ({server_uid} if server_uid is not None else set())
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._receiver = wire.Receiver()
        self._early: deque[bytes] = deque()
        """Replies that arrived during a send."""
        self._incoming = select.poll()
        self._incoming.register(self._socket, select.POLLIN)
        self._either = select.poll()
        self._either.register(self._socket, select.POLLIN | select.POLLOUT)
        self._spin = wire.spin(0.0002, 0.001)

    def open(
        self, path: Path, hello: m.Hello, deadline: float, resets: int | None, received: list[int]
    ) -> m.Welcome:
        """Connect, say hello and wait for the welcome. OSError, also if another user serves or
        could serve at the path, or if the server refuses.

        Sends nothing before the server's user is known. resets: the fd of the previous server's
        table, sent with the hello. The fd of the new server's is put into `received`."""
        if fault := folder_fault(path, self._trusted):
            raise ConnectionError(f"{fault}, or name its user in client.server_uid if it is meant")
        # With a timeout of Python's, `connect` would not wait where others fill the server's queue.
        micros = max(1, round((deadline - time.perf_counter()) * 1e6))
        within = struct.pack("@ll", *divmod(micros, 1_000_000))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, within)
        self._socket.connect(str(path))
        self._socket.setblocking(False)
        _, uid = peer(self._socket)
        if uid not in self._trusted:
            raise ConnectionError(
                f"a process of uid {uid} serves there, this one has uid {os.getuid()}; set "
                f"client.server_uid: {uid} to trust it"
            )
        # The pidfd tells the server when this process ends.
        try:
            pidfd = os.pidfd_open(os.getpid())
        except OSError as error:
            raise ConnectionError(f"no pidfd: {error.strerror}; see `vcache doctor`") from error
        try:
            fds = [pidfd] if resets is None else [pidfd, resets]
            self.send(wire.encode(hello), deadline, fds)
            reply = self.read(deadline, received)
        finally:
            os.close(pidfd)
        if isinstance(reply, m.Error):
            raise ConnectionError(reply.message)
        if not isinstance(reply, m.Welcome):
            raise ConnectionError(f"it answered a hello with {type(reply).__name__}")
        if self._receiver.lacks_fds:
            # Without the table the next server would not know of resets.
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return reply

    def read(self, deadline: float, received: list[int] | None = None) -> m.Reply:
        """Read the next reply. The server answers requests in their order."""
        message: bytes | memoryview
        if self._early:
            message = self._early.popleft()
        else:
            message, fds = self._receive(deadline)
            if received is not None:
                received += fds
            else:
                wire.close_fds(fds)
        if not message:
            raise ConnectionError("the server closed it")
        return wire.reply_decoder.decode(message)

    def interrupt(self) -> None:
        """End the connection, also under a thread that waits for an answer. Any thread."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket. Not during an exchange, since the next opened file gets its number."""
        self._socket.close()

    def send(self, data: bytes, deadline: float, fds: Sequence[int] = ()) -> None:
        """Send one request; `read` returns the reply later. Reads earlier answers meanwhile, since
        a server with unread answers reads no requests."""
        while True:
            try:
                socket.send_fds(self._socket, [data], fds) if fds else self._socket.send(data)
                return
            except (BrokenPipeError, ConnectionResetError):
                # A server that closed the connection may have sent the reason: read it.
                return
            except BlockingIOError:
                if self._wait(self._either, deadline) & select.POLLIN and not self._take_in():
                    return

    def _take_in(self) -> bool:
        """Receive a reply that has arrived. False at the end of the connection."""
        message, fds = self._receiver.receive(self._socket)
        wire.close_fds(fds)
        self._early.append(bytes(message))
        return bool(message)

    def _receive(self, deadline: float) -> tuple[memoryview, list[int]]:
        """Receive once. Polls first, without sleeping: an answer mostly comes before a sleeping
        thread would wake."""
        try:
            return self._receiver.receive(self._socket)
        except BlockingIOError:
            spin_until = min(time.perf_counter() + self._spin, deadline)
        while not self._incoming.poll(0) and time.perf_counter() < spin_until:
            os.sched_yield()
        while True:
            try:
                return self._receiver.receive(self._socket)
            except BlockingIOError:
                self._wait(self._incoming, deadline)

    def _wait(self, poll: select.poll, deadline: float) -> int:
        """Wait for events, and return them. TimeoutError at the deadline."""
        left = deadline - time.perf_counter()
        ready = poll.poll(left * 1000) if left > 0 else []
        if not ready:
            raise TimeoutError
        return ready[0][1]
