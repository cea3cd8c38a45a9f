"""Frames on a stream socket: a 4-byte little-endian length, then one MessagePack message; fds beside its first byte."""

from __future__ import annotations

import os
import socket
from array import array

import msgspec

from vcache_backend.errors import ProtocolError
from vcache_backend.metadata_server.messages import MAX_FRAME_BYTES, AnyReply, AnyRequest, Reply, Request

HEADER_BYTES = 4
MAX_FDS = 4
"""Most fds accepted with one read; a frame carries at most one."""
READ_BYTES = 1 << 18
_FD_SPACE = socket.CMSG_SPACE(MAX_FDS * 4)

encoder = msgspec.msgpack.Encoder()
request_decoder = msgspec.msgpack.Decoder(AnyRequest)
reply_decoder = msgspec.msgpack.Decoder(AnyReply)


def frame(message: Request | Reply) -> bytes:
    """A message as it goes over the wire. ProtocolError if it exceeds MAX_FRAME_BYTES."""
    body = encoder.encode(message)
    if len(body) > MAX_FRAME_BYTES:
        kind = type(message).__name__
        raise ProtocolError(
            f"{kind} of {len(body):,} B exceeds the limit of {MAX_FRAME_BYTES:,} B a frame; send fewer keys at once"
        )
    return len(body).to_bytes(HEADER_BYTES, "little") + body


class Receiver:
    """Reads from one socket after another into one buffer, so that a read costs no allocation. One thread at a time."""

    def __init__(self) -> None:
        self._buffer = bytearray(READ_BYTES)
        self._view = memoryview(self._buffer)

    def receive(self, sock: socket.socket) -> tuple[memoryview, list[int]]:
        """One read: bytes, valid until the next call, and any fds (close-on-exec, the caller's to close).

        Empty at end of stream. OSError as recvmsg gives it.
        """
        size, ancillary, _flags, _address = sock.recvmsg_into([self._buffer], _FD_SPACE, socket.MSG_CMSG_CLOEXEC)
        if not ancillary:
            return self._view[:size], []
        fds = array("i")
        for level, kind, payload in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
        return self._view[:size], list(fds)


class FrameReader:
    """Cuts a byte stream into frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    @property
    def held(self) -> int:
        """Bytes of a frame whose end has yet to come."""
        return len(self._buffer)

    def feed(self, data: bytes | memoryview) -> list[bytes]:
        """The frames that `data` completes. ProtocolError on a length above the limit: the stream cannot be trusted."""
        self._buffer += data
        frames, at, end = [], 0, len(self._buffer)
        while end - at >= HEADER_BYTES:
            size = int.from_bytes(self._buffer[at : at + HEADER_BYTES], "little")
            if size > MAX_FRAME_BYTES:
                raise ProtocolError(f"a frame announces {size:,} B; the limit is {MAX_FRAME_BYTES:,} B")
            if end - at < HEADER_BYTES + size:
                break
            frames.append(bytes(self._buffer[at + HEADER_BYTES : at + HEADER_BYTES + size]))
            at += HEADER_BYTES + size
        del self._buffer[:at]
        return frames


def close_fds(fds: list[int]) -> None:
    """Close fds nobody asked for."""
    for fd in fds:
        os.close(fd)
