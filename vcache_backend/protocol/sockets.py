"""Sockets of the protocol (SOCK_SEQPACKET): messages with fds, whose socket it is, and a client's
connected socket with deadlines. A packet is one MessagePack array."""

from __future__ import annotations

import os
import select
import socket
import stat
import struct
import threading
import time
from array import array
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Union

import msgspec

from vcache_backend.errors import ProtocolError
from vcache_backend.protocol import messages as m

OWN_FOLDER = "set server.socket to a path in a folder of your own"
"""What to do about a socket's folder that this user cannot use, or should not trust."""
_FD_SPACE = socket.CMSG_SPACE(m.MAX_FDS * 4)
_TRUNCATED, _LACKS_FDS = int(socket.MSG_TRUNC), int(socket.MSG_CTRUNC)
"""Plain numbers: `&` with members of the enumeration calls three Python functions a message."""

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
    message was longer than MAX_MESSAGE_BYTES, and is cut. reset: the peer has closed its socket,
    and has not read the last message sent to it."""

    def __init__(self) -> None:
        self.lacks_fds = self.too_long = self.reset = False
        self._buffer = bytearray(m.MAX_MESSAGE_BYTES)
        self._view = memoryview(self._buffer)

    def receive(self, sock: socket.socket) -> tuple[memoryview, list[int]]:
        """Read the next message, valid until the next call, and the message's fds, closed on exec.
        The caller closes the fds.

        Empty at the end of the connection; no message is empty. Fewer fds arrive than were sent if
        this process reaches its limit of descriptors: the caller counts them. OSError from
        recvmsg."""
        given = [self._buffer], _FD_SPACE, socket.MSG_CMSG_CLOEXEC
        self.reset = False
        try:
            size, ancillary, flags, _address = sock.recvmsg_into(*given)
        except ConnectionResetError:  # raised once, before the peer's last message can be read
            self.reset = True
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
    0 with too few.

    A spinning process would take the only core from the process that it waits for. On 2 cores a
    look-up takes 24 us at the median with spinning, 108 without. With many cores, spinning is worth
    one: on 32 cores beside two H200s 0.02 ms instead of 0.3."""
    cores = len(os.sched_getaffinity(0))
    return 0.0 if cores < 2 else many if cores >= 16 else few


def peer(sock: socket.socket) -> tuple[int, int]:
    """(pid, uid) of the process that connected. pid 0: its pid namespace is not visible here."""
    pid, uid, _gid = struct.unpack(
        "3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    )
    return pid, uid


def listener(path: Path) -> int:
    """The pid of the process that listens at `path`, also if it is stopped. 0: nobody, or its pid
    cannot be known here."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as asking, suppress(OSError):
        asking.setblocking(False)
        asking.connect(str(path))
        return peer(asking)[0]
    return 0


def advice(error: OSError) -> str:
    """What to do about an error in a socket's folder, behind what it says; or empty."""
    return f"; {OWN_FOLDER}" if isinstance(error, PermissionError) else ""


def folder_fault(path: Path, trusted: Collection[int], own: str = OWN_FOLDER) -> str:
    """Explain why a user outside of `trusted` could put a file at `path`, and what to do; or empty.
    own: how to take another folder.

    OSError if the folder does not exist."""
    folder = path.parent
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode):
        kind = "a link" if stat.S_ISLNK(status.st_mode) else "a file"
        return f"{folder} is not a folder but {kind}; {own}, or remove {folder}"
    if status.st_uid not in trusted:
        return (
            f"{folder} belongs to uid {status.st_uid}, not to uid {os.getuid()}; {own}, "
            f"or remove {folder}"
        )
    if status.st_mode & 0o022:
        shared = status.st_mode & stat.S_ISVTX  # such as /tmp, shared on purpose
        mend = own if shared else f"`chmod go-w {folder}`, or {own}, or remove {folder}"
        return f"others can write to {folder} (mode {stat.S_IMODE(status.st_mode):04o}); {mend}"
    return ""


class ServerLink:
    """One connected socket. Not thread-safe. Deadlines are times of `time.perf_counter`."""

    def __init__(self, server_uid: int | None = None) -> None:
        self._trusted = {os.getuid(), 0} | ({server_uid} if server_uid is not None else set())
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._receiver = Receiver()
        self._incoming = select.poll()
        self._incoming.register(self._socket, select.POLLIN)
        self._spin = spin(0.0002, 0.001)

    def open(self, path: Path, hello: m.Hello, deadline: float) -> m.Welcome:
        """Connect, say hello and wait for the welcome. OSError, also if another user serves or
        could serve at the path, or if the server refuses.

        Sends nothing before the server's user is known."""
        if fault := folder_fault(path, self._trusted):
            folder = path.parent.lstat()
            if stat.S_ISDIR(folder.st_mode) and folder.st_uid not in self._trusted:
                fault += f", or set client.server_uid: {folder.st_uid} to trust it"
            raise ConnectionError(fault)
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
            self.send(encode(hello), [pidfd])
            reply = self.read(deadline)
        finally:
            os.close(pidfd)
        if isinstance(reply, m.Error):
            raise ConnectionError(reply.message)
        if not isinstance(reply, m.Welcome):
            raise ConnectionError(f"it answered a hello with {type(reply).__name__}")
        return reply

    def read(self, deadline: float, received: list[int] | None = None) -> m.Reply:
        """Read the next reply. The server answers requests in their order."""
        try:
            message, fds = self._receiver.receive(self._socket)
        except BlockingIOError:
            message, fds = self._receive(deadline)
        if received is not None:
            received += fds
        elif fds:
            close_fds(fds)
        if not message:
            raise ConnectionError("the server closed it")
        return reply_decoder.decode(message)

    def interrupt(self) -> None:
        """End the connection, also under a thread that waits for an answer. Any thread."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket. Not during an exchange, since the next opened file gets its number."""
        self._socket.close()

    def send(self, data: bytes, fds: Sequence[int] = ()) -> bool:
        """Send one request; `read` returns the reply later. False if there is no room for it now:
        a server with unread answers reads no requests, so read one, and try again."""
        try:
            socket.send_fds(self._socket, [data], fds) if fds else self._socket.send(data)
        except BlockingIOError:
            return False
        except (BrokenPipeError, ConnectionResetError):
            pass  # a server that closed the connection may have sent the reason: read it
        return True

    def _receive(self, deadline: float) -> tuple[memoryview, list[int]]:
        """Wait for a message. The main thread polls first, without sleeping: an answer mostly comes
        before a sleeping thread would wake. Any other thread would wait for the interpreter at each
        poll: beside a main thread at work its call took 1 to 2 ms, and takes 0.2."""
        if threading.current_thread() is threading.main_thread():
            spin_until = min(time.perf_counter() + self._spin, deadline)
            while not self._incoming.poll(0) and time.perf_counter() < spin_until:
                os.sched_yield()
        while True:
            try:
                return self._receiver.receive(self._socket)
            except BlockingIOError:
                left = deadline - time.perf_counter()
                if left <= 0 or not self._incoming.poll(left * 1000):
                    raise TimeoutError from None
