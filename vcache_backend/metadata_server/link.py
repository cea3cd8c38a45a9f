"""One connected socket of a client: framed requests out, replies in, within deadlines."""

from __future__ import annotations

import os
import select
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from vcache_backend.errors import ProtocolError
from vcache_backend.metadata_server import messages as m
from vcache_backend.metadata_server import processes, wire
from vcache_backend.metadata_server.endpoint import folder_fault


class Unwelcome(ConnectionError):
    """Somebody is there who must not be spoken to, or who refuses; the text says who and why."""


class ServerLink:
    """One connected socket. Not thread-safe: its client's lock guards it. Deadlines are times of `time.perf_counter`."""

    def __init__(self, spin_seconds: float, server_uid: int | None = None) -> None:
        self._trusted = {os.getuid(), 0} | ({server_uid} if server_uid is not None else set())
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._receiver = wire.Receiver()
        self._reader = wire.FrameReader()
        self._spin = processes.spin(spin_seconds)

    def open(self, path: Path, hello: m.Hello, deadline: float, witness: int | None, received: list[int]) -> m.Welcome:
        """Connect and be welcomed. Unwelcome: another user could serve there, or does, or the server refuses; OSError.

        Nothing is sent before it is known whose the server is. `witness`: of the server before, to be shown to this one, whose own
        is put into `received`.
        """
        if fault := folder_fault(path, self._trusted):
            raise Unwelcome(f"{fault}, or name its user in client.server_uid if that is meant")
        self._socket.settimeout(max(deadline - time.perf_counter(), 1e-4))
        self._socket.connect(str(path))
        self._socket.setblocking(False)
        _, uid = processes.peer(self._socket)
        if uid not in self._trusted:
            raise Unwelcome(
                f"a process of uid {uid} serves there, this one has uid {os.getuid()}; set client.server_uid: {uid} to trust it"
            )
        reply = self._introduce(hello, deadline, witness, received)
        if not isinstance(reply, m.Welcome):
            raise Unwelcome(reply.message if isinstance(reply, m.Error) else f"it answered a hello with {type(reply).__name__}")
        return reply

    def _introduce(self, hello: m.Hello, deadline: float, witness: int | None, received: list[int]) -> m.AnyReply:
        """Say hello, with a pidfd of this process: by it the server sees our end, whichever pid namespace it lives in."""
        pidfd = processes.own_pidfd()
        try:
            fds = [fd for fd in (pidfd, witness) if fd is not None]
            self.send(wire.frame(hello), deadline, fds)
            return self.read(deadline, received)
        finally:
            if pidfd is not None:
                os.close(pidfd)

    def read(self, deadline: float, received: list[int] | None = None) -> m.AnyReply:
        """The next reply: the server answers requests in their order."""
        while (frame := self._reader.take()) is None:
            piece, came = self._receive(deadline)
            if received is not None:
                received += came
            else:
                wire.close_fds(came)
            if not piece:
                raise ConnectionError("the server closed it")
            self._reader.push(piece)
        reply: m.AnyReply = wire.reply_decoder.decode(frame)
        return reply

    def expect_no_more(self) -> None:
        """ProtocolError if more came than was asked for."""
        if self._reader.ready:
            raise ProtocolError("several answers to one request")

    def interrupt(self) -> None:
        """End the connection for whoever waits for an answer on it. Any thread."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Not while somebody exchanges: the number of a closed socket is given to the next file that is opened."""
        self._socket.close()

    def send(self, data: bytes, deadline: float, fds: Sequence[int] = ()) -> None:
        """Send one framed request, whose reply is to be `read`. Takes in answers meanwhile: a server whose answers nobody reads reads
        nothing either."""
        rest = memoryview(data)
        # If it closed the connection, the last it said may be there to be read, and says why.
        with suppress(BrokenPipeError, ConnectionResetError):
            while rest:
                try:
                    sent = socket.send_fds(self._socket, [rest], fds) if fds else self._socket.send(rest)
                except BlockingIOError:
                    if self._wait(select.POLLIN | select.POLLOUT, deadline) & select.POLLIN and not self._take_in():
                        return
                else:
                    rest, fds = rest[sent:], ()

    def _take_in(self) -> bool:
        """Read some of what is there; False at the end."""
        piece, came = self._receiver.receive(self._socket)
        wire.close_fds(came)
        self._reader.push(piece)
        return bool(piece)

    def _receive(self, deadline: float) -> tuple[memoryview, list[int]]:
        """One read; looks for it without sleeping at first, since the answer mostly is there sooner than a sleeper wakes."""
        spin_until = time.perf_counter() + self._spin
        while True:
            try:
                return self._receiver.receive(self._socket)
            except BlockingIOError:
                if time.perf_counter() < spin_until:
                    os.sched_yield()
                else:
                    self._wait(select.POLLIN, deadline)

    def _wait(self, events: int, deadline: float) -> int:
        """Which of these the socket is ready for."""
        poll = select.poll()
        poll.register(self._socket, events)
        left = deadline - time.perf_counter()
        ready = poll.poll(left * 1000) if left > 0 else []
        if not ready:
            raise TimeoutError
        return ready[0][1]
