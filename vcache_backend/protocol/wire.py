"""Messages on a Unix socket (SOCK_SEQPACKET). A packet is one MessagePack array, with fds."""

from __future__ import annotations

import os
import socket
from array import array
from typing import Any, Union

import msgspec

from vcache_backend.errors import ProtocolError
from vcache_backend.protocol import messages as m

_FD_SPACE = socket.CMSG_SPACE(m.MAX_FDS * 4)
_TRUNCATED, _LACKS_FDS = int(socket.MSG_TRUNC), int(socket.MSG_CTRUNC)
"""Plain numbers: `&` with members of the enumeration calls three Python functions a message."""

SPIN_CORES = 2
"""With fewer cores, a spinning process would take the core from the process it waits for. (Measured
on 2 cores: a look-up takes 24 µs at the median with spinning, 108 µs without.)"""
MANY_CORES = 16
"""With this many cores, spinning is worth a core: no look-up waits for the server's wake-up.
(Measured on a virtual machine of 32 cores with two H200s: 0.02 ms instead of 0.3.)"""

_encoder = msgspec.msgpack.Encoder()
request_decoder = msgspec.msgpack.Decoder(m.AnyRequest)
_any_reply: Any = Union[tuple(m.Reply.__subclasses__())]  # noqa: UP007 - from a list
reply_decoder: msgspec.msgpack.Decoder[m.Reply] = msgspec.msgpack.Decoder(_any_reply)


def encode(message: m.Request | m.Reply) -> bytes:
    """Encode a message. ProtocolError if it exceeds MAX_MESSAGE_BYTES, or if a text, such as a
    file's name, is not UTF-8."""
    kind = type(message).__name__
    try:
        data = _encoder.encode(message)
    except UnicodeEncodeError as error:
        raise ProtocolError(f"{kind}: {error}") from error
    if len(data) > m.MAX_MESSAGE_BYTES:
        raise ProtocolError(f"{kind}: {len(data):,} B exceed {m.MAX_MESSAGE_BYTES:,} B")
    return data


class Receiver:
    """Receives from many sockets into one buffer, without allocating. One thread at a time.

    lacks_fds: the last message had more fds than this process had free descriptors. too_long: the
    message was longer than MAX_MESSAGE_BYTES, and is cut."""

    def __init__(self) -> None:
        self.lacks_fds = self.too_long = False
        self._buffer = bytearray(m.MAX_MESSAGE_BYTES)
        self._view = memoryview(self._buffer)

    def receive(self, sock: socket.socket) -> tuple[memoryview, list[int]]:
        """Read the next message, valid until the next call, and the message's fds, closed on exec.
        The caller closes the fds.

        Empty at the end of the connection; no message is empty. Fewer fds arrive than were sent if
        this process reaches its limit of descriptors: the caller counts them. OSError from
        recvmsg."""
        given = [self._buffer], _FD_SPACE, socket.MSG_CMSG_CLOEXEC
        try:
            size, ancillary, flags, _address = sock.recvmsg_into(*given)
        except ConnectionResetError:  # raised once, before the peer's last message can be read
            size, ancillary, flags, _address = sock.recvmsg_into(*given)
        self.lacks_fds, self.too_long = flags & _LACKS_FDS != 0, flags & _TRUNCATED != 0
        if not ancillary:
            return self._view[:size], []
        fds = array("i")
        for level, kind, payload in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
        return self._view[:size], list(fds)


def close_fds(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)


def spin(few: float, many: float) -> float:
    """How long to poll for the next message before sleeping: `few` seconds, `many` with many cores,
    0 with too few."""
    cores = len(os.sched_getaffinity(0))
    return 0.0 if cores < SPIN_CORES else many if cores >= MANY_CORES else few
