"""Frames on a stream socket: a 4-byte little-endian length, then one MessagePack message; fds beside its first byte."""

from __future__ import annotations

import os
import socket
import struct
from array import array

import msgspec

from vcache_backend.errors import ProtocolError
from vcache_backend.metadata_server.messages import MAX_FRAME_BYTES, MAX_REQUEST_BYTES, AnyReply, AnyRequest, Reply, Request

_LENGTH = struct.Struct("<I")
HEADER_BYTES = _LENGTH.size
MAX_FDS = 4
"""Most fds accepted with one read; a frame carries at most one."""
READ_BYTES = 1 << 18
_FD_SPACE = socket.CMSG_SPACE(MAX_FDS * 4)

encoder = msgspec.msgpack.Encoder()
request_decoder = msgspec.msgpack.Decoder(AnyRequest)
reply_decoder = msgspec.msgpack.Decoder(AnyReply)


def frame(message: Request | Reply) -> bytes:
    """A message as it goes over the wire. ProtocolError if it exceeds MAX_REQUEST_BYTES, as a reply MAX_FRAME_BYTES."""
    body = encoder.encode(message)
    limit = MAX_REQUEST_BYTES if isinstance(message, Request) else MAX_FRAME_BYTES
    if len(body) > limit:
        kind = type(message).__name__
        raise ProtocolError(f"{kind} of {len(body):,} B exceeds the limit of {limit:,} B a frame; send fewer keys at once")
    return len(body).to_bytes(HEADER_BYTES, "little") + body


class Receiver:
    """Reads from one socket after another into one buffer, so that a read costs no allocation. One thread at a time."""

    def __init__(self, most: int = READ_BYTES) -> None:
        self._buffer = bytearray(most)
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
    """Cuts a byte stream into frames of at most `limit` bytes. `ready`: whether `take` has something to say."""

    def __init__(self, limit: int = MAX_FRAME_BYTES) -> None:
        self.ready = False
        self._limit = limit
        self._buffer = bytearray()
        self._at = self._size = 0
        """Where the next frame starts, and how large it is, as far as that is known."""

    def push(self, data: bytes | memoryview) -> None:
        """More of the stream, to be had by `take`."""
        if self._at:
            del self._buffer[: self._at]
            self._at = 0
        self._buffer += data
        if not self.ready:
            self._look()

    def take(self) -> bytes | None:
        """The next whole frame, if it is there. ProtocolError on a length above the limit: the stream cannot be trusted."""
        if not self.ready:
            return None
        if self._size > self._limit:
            raise ProtocolError(f"a frame announces {self._size:,} B; the limit is {self._limit:,} B")
        start = self._at + HEADER_BYTES
        self._at = start + self._size
        frame = bytes(self._buffer[start : self._at])
        self._look()
        return frame

    @property
    def held(self) -> int:
        """Bytes of a frame whose end has yet to come."""
        return 0 if self.ready else len(self._buffer) - self._at

    def _look(self) -> None:
        have = len(self._buffer) - self._at - HEADER_BYTES
        if have < 0:
            self.ready = False
            return
        (self._size,) = _LENGTH.unpack_from(self._buffer, self._at)
        self.ready = have >= self._size or self._size > self._limit


def close_fds(fds: list[int]) -> None:
    """Close fds nobody asked for."""
    for fd in fds:
        os.close(fd)
