"""The ledger: the pool's state for the next server, in memory that the clients also hold.

The server writes each change to the ledger before it sends an answer that depends on the change.
Every client gets a read-only descriptor with its welcome, and shows it to the next server. So the
ledger lives as long as the segments do: as long as the server or any client.

The memory is a memfd. Its first page is the header; two areas follow, of which one is valid. An
area holds frames: the length of a record, then the record as MessagePack. The server first writes
frames, then stores the area's number and length as one word of the header. So a server killed at
any moment leaves a whole ledger: the state before the write, or after it. Compaction copies valid
records to the other area, a slice at a time, while new records go to both. The same word then
switches the area for all clients at once.

Only the server's user and root can write to the ledger: the mode is 0600, and the clients'
descriptors are read-only. The server locks the file until its process ends, so no other server
takes over a ledger that may still change. A server that takes over marks the ledger as ended for
good: from then on its own ledger describes the segments."""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import stat
import struct
from collections.abc import Callable, Iterable, Iterator
from itertools import repeat

import msgspec

from vcache_backend import seals
from vcache_backend.metadata_server import processes
from vcache_backend.metadata_server.records import LedgerState, Record

log = logging.getLogger(__name__)

COMPACT_BYTES = 16 << 20
"""A smaller ledger is never compacted."""
GROWTH = 3
"""A ledger is compacted once it is this many times as large as after the last compaction."""
SLICE_BYTES = 1 << 16
"""Bytes of records to read again in one turn of the loop, rounded up to whole records."""
RECORD_BYTES = 100
"""About the bytes of a chunk in a record."""
MAX_RECORD_BYTES = 1 << 20
"""The most bytes of a record in an earlier server's ledger. A server writes some 250 KB at most."""
FREED_BYTES = 1 << 20
"""Bytes to return to the system in one turn."""
AREAS = (mmap.PAGESIZE, 1 << 40)
"""The offsets of the two areas. Unwritten pages take no memory."""
MAGIC = int.from_bytes(b"vcacheL2")
"""Changes with the format."""
_MAGIC, _EPOCH, _VALID, _ENDED = range(4)
"""The words of the header. The lowest bit of the valid word names the area."""
_WORDS = struct.Struct("=4Q")
_NAMESPACES = 64
"""The offset in the header of the namespaces of the records' pids."""
_LENGTH = struct.Struct("=I")
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL


class Damaged(Exception):
    """No server can have written this ledger. The text says why."""


class Ledger:
    """The ledger of this server. One thread."""

    def __init__(self, epoch: int) -> None:
        """`fd` is for clients. This object closes it."""
        self._file, self._header = seals.sealed("ledger", mmap.PAGESIZE, _SEALS)
        fcntl.flock(self._file, fcntl.LOCK_EX)
        os.fchmod(self._file, 0o600)
        os.pwrite(self._file, processes.namespaces(), _NAMESPACES)
        self._words = memoryview(self._header).cast("Q")
        self._words[_MAGIC], self._words[_EPOCH] = MAGIC, epoch
        self.fd = os.open(_reopened(self._file), os.O_RDONLY | os.O_CLOEXEC)
        self._encoder = msgspec.msgpack.Encoder()
        self._area = _Area(self._file, 0)
        self._next: _Area | None = None
        self._old: Iterator[tuple[int, Record]] = iter(())
        self._freed: Iterator[None] = iter(())
        self._base = 0
        """The size of the valid area after the last compaction."""

    def write(self, records: list[Record], still: Callable[[Record], Iterable[Record]]) -> None:
        """Write records. On return they outlive this process, and answers may leave.

        Also does a slice of a due compaction. `still` returns the parts of a record that still
        hold. If the memory cannot be written, the ledger ends, and the next server starts empty."""
        if self._words[_ENDED]:
            return
        try:
            if records:
                frames = self._encoded(records)
                self._area.append(frames)
                if self._next is not None:
                    self._next.append(frames)
            self._compact(still)
            self._words[_VALID] = self._area.valid
        except (OSError, Damaged) as error:
            log.error("ledger: %s; going on without one, a restart will be cold", error)
            self._words[_ENDED] = self._words[_EPOCH]

    def close(self) -> None:
        """Close the memory, which unlocks the ledger for the next server. Idempotent."""
        if self.fd < 0:
            return
        self._words.release()
        self._header.close()  # it has the file open, too
        os.close(self._file)
        os.close(self.fd)
        self.fd = -1

    def _encoded(self, records: Iterable[Record]) -> bytearray:
        frames = bytearray()
        for record in records:
            body = self._encoder.encode(record)
            frames += _LENGTH.pack(len(body)) + body
        return frames

    def _compact(self, still: Callable[[Record], Iterable[Record]]) -> None:
        if self._next is None:
            more_to_free = next(self._freed, True) is None
            if more_to_free or self._area.size < max(COMPACT_BYTES, GROWTH * self._base):
                return
            self._next = _Area(self._file, 1 - self._area.number)
            self._old = self._area.records(self._area.size)
        kept = list[Record]()
        read = 0
        for nbytes, record in self._old:
            kept += still(record)
            read += nbytes
            if read >= SLICE_BYTES:
                break
        self._next.append(self._encoded(kept))
        if read < SLICE_BYTES:
            self._freed = self._area.free()
            self._area = self._next
            self._next = None
            self._base = self._area.size


class _Area:
    """One of the two areas: a sequence of frames."""

    def __init__(self, file: int, number: int) -> None:
        self._file, self.number, self.size = file, number, 0

    @property
    def valid(self) -> int:
        """The header's word that makes this area valid at its present size."""
        return self.size << 1 | self.number

    def append(self, frames: bytearray) -> None:
        view = memoryview(frames)
        while view:
            written = os.pwrite(self._file, view, AREAS[self.number] + self.size)
            self.size += written
            view = view[written:]

    def records(self, size: int) -> Iterator[tuple[int, Record]]:
        """The records in the first `size` bytes, each with its frame's bytes. Raises Damaged."""
        decoder = msgspec.msgpack.Decoder(Record)
        at = 0
        while at < size:
            start = AREAS[self.number] + at
            head = os.pread(self._file, _LENGTH.size, start)
            length = _LENGTH.unpack(head)[0] if len(head) == _LENGTH.size else size
            at += _LENGTH.size + length
            if at > size or length > MAX_RECORD_BYTES:
                raise Damaged(f"the frame at byte {start:,} has {length:,} B, too many")
            try:
                record = decoder.decode(os.pread(self._file, length, start + _LENGTH.size))
            except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
                raise Damaged(f"the record at byte {start:,} cannot be decoded: {error}") from error
            yield _LENGTH.size + length, record

    def free(self) -> Iterator[None]:
        """Return the memory to the system, `FREED_BYTES` at each step."""
        with mmap.mmap(self._file, self.size, offset=AREAS[self.number]) as pages:
            for at in range(0, self.size, FREED_BYTES):
                pages.madvise(mmap.MADV_REMOVE, at, min(FREED_BYTES, self.size - at))
                yield


class EarlierLedger:
    """The ledger of an earlier server, from a client."""

    def __init__(self, fd: int) -> None:
        """OSError unless a server of this user made the memory. The caller keeps `fd`.

        A client of another user cannot forge a ledger: the file would belong to that user. Nor can
        the client write a ledger to other memory of this user: only ledgers have the mode 0600."""
        status = os.fstat(fd)
        own = stat.S_ISREG(status.st_mode) and stat.S_IMODE(status.st_mode) == 0o600
        if not own or status.st_uid != os.geteuid():
            raise OSError(f"it is not a ledger of uid {os.geteuid()}")
        if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
            raise OSError("it can shrink")
        own_namespaces = processes.namespaces()
        self._file = os.open(_reopened(fd), os.O_RDWR | os.O_CLOEXEC)
        head = os.pread(self._file, _WORDS.size, 0)
        magic, self.epoch, *_ = _WORDS.unpack(head.ljust(_WORDS.size, b"\0"))
        if magic != MAGIC or not 0 < self.epoch < 1 << 63:
            os.close(self._file)
            raise OSError("it is not a ledger, or one of another version")
        """The epoch of the server that wrote the ledger."""
        self.same_pids = os.pread(self._file, len(own_namespaces), _NAMESPACES) == own_namespaces
        """Whether a pid means the same process here as in the records."""

    @property
    def heir(self) -> int:
        """The epoch of the server that took over; 0: none. A writer that gave up names itself."""
        return self._word(_ENDED)

    def take_over(self, epoch: int) -> bool:
        """Mark the ledger as ended, so that no other server takes it over. False if a server has
        taken it over, or if its writer still runs, even stopped."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        if self.heir:
            return False
        os.pwrite(self._file, epoch.to_bytes(8, "little"), 8 * _ENDED)
        return True

    def read(self, state: LedgerState) -> Iterator[None]:
        """Read the ledger into `state`, a record for each step, or `RECORD_BYTES` of a long one.
        Raises Damaged if a record cannot be."""
        valid = self._word(_VALID)
        for nbytes, record in _Area(self._file, valid & 1).records(valid >> 1):
            state.apply(record)
            yield from repeat(None, 1 + nbytes // RECORD_BYTES)

    def close(self) -> None:
        os.close(self._file)

    def _word(self, number: int) -> int:
        words: tuple[int, ...] = _WORDS.unpack(os.pread(self._file, _WORDS.size, 0))
        return words[number]


def _reopened(fd: int) -> str:
    """A path by which an open file is opened once more, with another mode."""
    return f"/proc/self/fd/{fd}"
