"""The journal: what a restarted server must know, appended to a file beside the socket before any
answer that depends on it leaves.

It is written with `write(2)` and never synced, since it has to outlive the server process, not the
machine (the VRAM does not either). Compaction copies what still holds into a new file, a slice at a
time, while records go to both files, so no request waits for it.

The file is a header (`_HEADER`: magic, format, epoch, the writer's pid and start time; then their
CRC-32) and frames. A frame is a record's length, a CRC-32, the frame's number and the record as
MessagePack. Numbers grow through a server's life, compactions included; each CRC covers the number
and record of its frame, and everything before. A file cannot tell that it was cut, or is an older
copy of itself: the server's `Witness` does."""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import stat
import struct
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import BinaryIO
from zlib import crc32

import msgspec

from vcache_backend.metadata_server.records import JournalState, ProcessId, Record

log = logging.getLogger(__name__)

COMPACT_BYTES = 64 << 20
"""A smaller journal is never compacted."""
SLICE_BYTES = 1 << 16
"""Bytes of the old file read in one turn of the server's loop, and the rest of a record."""
FORMAT = 3
_MAGIC = b"vcache-j"
_HEADER = struct.Struct("<8sIQIQ")
_CRC = struct.Struct("<I")
_FRAME = struct.Struct("<IIQ")
HEADER_BYTES = _HEADER.size + _CRC.size
FRAME_BYTES = _FRAME.size
"""Bytes of each frame before its record."""
NEVER = (1 << 64) - 1
"""The witness's count where the journal proves nothing: the server keeps none, could not go on with
it, or has a successor.
"""
_CELLS = struct.Struct("=QQ")
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


class Damaged(Exception):
    """The file cannot be what a server wrote. The text says where and why."""


def writer(path: Path) -> ProcessId | None:
    """The process that wrote the journal; None without a journal, or without a whole header.
    OSError if it cannot be read.
    """
    try:
        with _open(path) as file:
            return _header(file.read(HEADER_BYTES))[1]
    except (FileNotFoundError, Damaged):
        return None


def read(path: Path) -> JournalState:
    """Replay a journal; without a file, an empty state. A cut last frame is left out, and so is all
    from a damaged length on.

    If an answer rested on it, the witness disproves the journal. Damaged if anything else is not as
    it was written, OSError if the file cannot be read."""
    state = JournalState()
    try:
        file = _open(path)
    except FileNotFoundError:
        return state
    with file:
        size = os.fstat(file.fileno()).st_size
        header = file.read(HEADER_BYTES)
        state.epoch, _ = _header(header)
        for at, state.frame, record in _frames(file, header, size):
            try:
                state.apply(record)
            except ValueError as error:
                raise Damaged(
                    f"the record at byte {at:,} of {size:,} cannot be applied: {error}"
                ) from error
    try:
        state.check()
    except ValueError as error:
        raise Damaged(f"its records contradict each other: {error}") from error
    return state


def _frames(file: BinaryIO, header: bytes, size: int) -> Iterator[tuple[int, int, Record]]:
    """(offset, number, record) of each whole frame behind the header, up to `size` bytes. Damaged
    where one is not as it was written.
    """
    decoder = msgspec.msgpack.Decoder(Record)
    at, last, chain = HEADER_BYTES, 0, crc32(header[: _HEADER.size])
    while at + FRAME_BYTES <= size:
        frame = file.read(FRAME_BYTES)
        length, crc, number = _FRAME.unpack(frame) if len(frame) == FRAME_BYTES else (0, 0, 0)
        if at + FRAME_BYTES + length > size:
            break
        body = file.read(length)
        chain = crc32(body, crc32(frame[8:], chain))
        if chain != crc or number <= last:
            raise Damaged(
                f"the frame at byte {at:,} of {size:,} is not what was written (after frame {last})"
            )
        try:
            record = decoder.decode(body)
        except msgspec.DecodeError as error:
            raise Damaged(
                f"the record at byte {at:,} of {size:,} cannot be decoded: {error}"
            ) from error
        yield at, number, record
        at, last = at + FRAME_BYTES + length, number
    if at < size:
        log.warning(
            "journal: %s of %s B at its end are no whole record and are left out: it was cut, or damaged",
            size - at,
            size,
        )


def _open(path: Path) -> BinaryIO:
    """Open the file for reading. Follows no symbolic link, and takes no file of another user."""
    flags = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with ExitStack() as undo:
        file = undo.enter_context(
            open(path, "rb", opener=lambda name, mode: os.open(name, mode | flags))
        )
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise OSError("it is no regular file; move it away")
        if found.st_uid != os.geteuid():
            raise OSError(f"it belongs to uid {found.st_uid}, not to {os.geteuid()}; move it away")
        undo.pop_all()
    return file


def _header(data: bytes) -> tuple[int, ProcessId]:
    """(epoch, writer) from a file's header."""
    if (
        len(data) < HEADER_BYTES
        or crc32(data[: _HEADER.size]) != _CRC.unpack_from(data, _HEADER.size)[0]
    ):
        raise Damaged(f"its first {HEADER_BYTES} bytes are no header of format {FORMAT}")
    magic, format_, epoch, pid, started = _HEADER.unpack_from(data)
    if (magic, format_) != (_MAGIC, FORMAT):
        raise Damaged(f"it is of format {format_}, not {FORMAT}")
    return epoch, ProcessId(pid, started)


class Journal:
    """The open files, owned by the server's loop, which gets OSErrors (a full disk) and goes on
    without a journal.
    """

    def __init__(self, path: Path, epoch: int, process: ProcessId) -> None:
        self.frame = 0
        """The number of the last frame in the file that a restart would read, for the witness."""
        self._numbered = 0
        self._path, self._fresh = path, path.with_name(path.name + ".new")
        header = _HEADER.pack(_MAGIC, FORMAT, epoch, process.pid, process.started)
        self._header = header + _CRC.pack(crc32(header))
        self._encoder = msgspec.msgpack.Encoder()
        self._next: _File | None = None
        self._told: Iterator[tuple[int, int, Record]] = iter(())
        self._base = 0
        self._file = _File(self._fresh, self._header)

    def start(self, state: Iterable[Record]) -> None:
        """Write the state that the server starts from, then put this file in the old one's
        place.
        """
        for record in state:
            self._write([record], self._file)
        self._base = self._file.size
        self._fresh.replace(self._path)
        self.frame = self._numbered

    def append(self, records: list[Record]) -> None:
        """Write records. On return they are safe against this process's death."""
        self._write(records, self._file, self._next)
        self.frame = self._numbered

    def compact(self, still: Callable[[Record], Iterable[Record]]) -> None:
        """Do one slice of compaction, if one is due or under way: read records of the file again,
        and write what is `still` true to the next one.

        Called between requests. Damaged if somebody has changed the file.
        """
        if self._next is None:
            if self._file.size < max(COMPACT_BYTES, 4 * self._base):
                return
            self._next, self._told = _File(self._fresh, self._header), self._file.frames()
        first, kept, done = -1, list[Record](), True
        for at, _, record in self._told:
            kept += still(record)
            first = at if first < 0 else first
            if at >= first + SLICE_BYTES:
                done = False
                break
        self._write(kept, self._next)
        if not done:
            return
        self._fresh.replace(self._path)
        self.frame = self._numbered
        self._file.close()
        self._file, self._next = self._next, None
        self._base = self._file.size

    def abandon(self) -> None:
        """Close the files and remove them if possible. Those that stay prove nothing once the
        witness says so.
        """
        self.close()
        for path in (self._path, self._fresh):
            with suppress(OSError):
                path.unlink()

    def close(self) -> None:
        """Idempotent."""
        self._file.close()
        if self._next is not None:
            self._next.close()

    def _write(self, records: list[Record], *files: _File | None) -> None:
        numbered = []
        for record in records:
            self._numbered += 1
            numbered.append((self._numbered, self._encoder.encode(record)))
        for file in files:
            if file is not None:
                file.append(numbered)


class _File:
    """One new file of a journal. A file of the same name is unlinked, not written to."""

    def __init__(self, path: Path, header: bytes) -> None:
        path.unlink(missing_ok=True)
        self._fd = os.open(
            path,
            os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_APPEND | os.O_CLOEXEC,
            0o600,
        )
        self._chain = crc32(header[: _HEADER.size])
        self.size = 0
        self._put(header)

    def frames(self) -> Iterator[tuple[int, int, Record]]:
        """Read what has been written so far, from this very file."""
        size = self.size
        with open(f"/proc/self/fd/{self._fd}", "rb") as file:
            yield from _frames(file, file.read(HEADER_BYTES), size)
            if file.tell() != size:
                raise Damaged(f"the file ends at byte {file.tell():,} of {size:,}")

    def append(self, numbered: list[tuple[int, bytes]]) -> None:
        """Append frames of (number, record), chained to those before."""
        out = bytearray()
        for number, body in numbered:
            covered = number.to_bytes(8, "little") + body
            self._chain = crc32(covered, self._chain)
            out += len(body).to_bytes(4, "little") + self._chain.to_bytes(4, "little") + covered
        self._put(out)

    def close(self) -> None:
        """Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1

    def _put(self, data: bytes | bytearray) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(self._fd, view) :]
        self.size += len(data)


class Witness:
    """How far a server's journal has come, kept where it outlives the server and no damage to the
    file can reach it.

    A memfd with two numbers: the server's epoch, and the last journal frame that an answer may rest
    on. Every client holds the witness of the server it is connected to and hands it to the next
    one. So a restarted server knows whether the journal it found is its predecessor's whole last
    word, or was cut, given up, or replaced by a copy."""

    def __init__(self, epoch: int) -> None:
        """`fd` is for clients; it stays this object's."""
        self.fd = os.memfd_create("vcache-witness", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, mmap.PAGESIZE)
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEALS | fcntl.F_SEAL_SEAL)
        self._cells = memoryview(mmap.mmap(self.fd, mmap.PAGESIZE)).cast("Q")
        self._cells[0], self._cells[1] = epoch, NEVER

    def reached(self, frame: int) -> None:
        """The journal holds everything up to `frame`. One aligned 8-byte store: after a kill it is
        the old number or the new one.
        """
        self._cells[1] = frame

    def close(self) -> None:
        os.close(self.fd)


def read_witness(fd: int) -> tuple[int, int]:
    """(epoch, frame) of a witness that a client brought. OSError or struct.error if it is none."""
    if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
        raise OSError("it can shrink")
    epoch, frame = _CELLS.unpack(os.pread(fd, _CELLS.size, 0))
    return epoch, frame


def end_witness(fd: int) -> None:
    """Make a witness prove nothing more: its memory belongs to this server's life now, and an old
    copy of the journal may be put back.
    """
    os.pwrite(fd, NEVER.to_bytes(8, "little"), 8)
