"""The protocol as somebody else would speak it."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgpack

from vcache_backend.protocol import messages as m

SECONDS = 60.0


class Raw:
    """The protocol by hand: a socket and the `msgpack` package. Nothing of ours."""

    def __init__(self, path: Path, hello: bool = True) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.settimeout(SECONDS)
        self.fds: list[int] = []
        try:
            self.socket.connect(str(path))
            self.welcome = self.hello() if hello else None
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Raw:
        return self

    def __exit__(self, *reason: object) -> None:
        self.close()

    def close(self) -> None:
        self.socket.close()
        while self.fds:
            os.close(self.fds.pop())

    def hello(
        self, layout: dict[str, str] | None = None, device: str = "host", fds: tuple[int, ...] = ()
    ) -> list[Any] | None:
        """The answer to a hello of this protocol."""
        return self.ask("hello", m.PROTOCOL_VERSION, device, "host", layout or {}, fds=fds)

    def send(self, *message: Any, fds: tuple[int, ...] = ()) -> None:
        """A server that has closed the connection already may have said why: that is for
        `receive`.
        """
        with suppress(BrokenPipeError):
            self.send_bytes(msgpack.packb(list(message), use_bin_type=True), fds)

    def send_bytes(self, data: bytes, fds: tuple[int, ...] = ()) -> None:
        socket.send_fds(self.socket, [data], list(fds)) if fds else self.socket.send(data)

    def receive(self) -> list[Any] | None:
        """The next message, or None if the server closed the connection."""
        try:
            data, fds, _, _ = socket.recv_fds(self.socket, m.MAX_MESSAGE_BYTES, m.MAX_FDS)
        except ConnectionResetError:  # told once, before the last that the server said
            data, fds, _, _ = socket.recv_fds(self.socket, m.MAX_MESSAGE_BYTES, m.MAX_FDS)
        self.fds += fds
        return msgpack.unpackb(data, raw=False, strict_map_key=False) if data else None

    def ask(self, *message: Any, fds: tuple[int, ...] = ()) -> list[Any] | None:
        """A message and its answer. If the server has closed the connection, the last it said, or
        None.
        """
        with suppress(BrokenPipeError):
            self.send(*message, fds=fds)
        return self.receive()

    def closed(self) -> bool:
        """Read to the end: does the server close (rather than leave us waiting)?"""
        try:
            while self.socket.recv(1 << 16):
                pass
        except ConnectionResetError:
            pass
        return True
