"""The table of a segment's slots: a 64-bit generation and a record for each slot, in memory that
clients map for reading. Only the metadata server writes it.

Readers compare a slot's generation after they have copied the slot, as they do with a block of
another instance's KV cache (`vram_pool.generations`). The next server takes the table over from any
client that holds the segment. The segment's memory and its table live equally long.

A generation and the slot's record together say what the slot is:

- committed: the generation is even, and equals the record's number;
- being written: the generation is the record's number minus one, so it is odd;
- free: anything else.

Each change of state is one aligned store of 64 bits, and a record's number is stored after the
other fields. So a server that is killed at any store leaves the state of before or of after.

Only the server's user and root can write the table: its mode is 0600, and clients' descriptors are
read-only. A server locks it until its process ends, so no other one takes over a table that may
still change."""

from __future__ import annotations

import fcntl
import hashlib
import mmap
import os
import stat
import struct
from collections.abc import Iterator
from contextlib import ExitStack
from typing import NamedTuple

from vcache_backend import seals
from vcache_backend.metadata_server import processes
from vcache_backend.metadata_server.pool.allocator import ALIGNMENT
from vcache_backend.metadata_server.records import ProcessId
from vcache_backend.protocol.messages import (
    ChunkKey,
)
from vcache_backend.protocol.slot_layout import (
    DEAD_AT,
    HEADER,
    MAGIC,
    MAX_RESETS,
    SLAB_SLOTS,
    SLABS,
    SLOTS,
    TABLE_BYTES,
    VERSION,
    owner,
)
from vcache_backend.protocol.slot_layout import GENERATIONS as _GENERATIONS
from vcache_backend.protocol.slot_layout import NBYTES_AT as _NBYTES_AT
from vcache_backend.protocol.slot_layout import NUMBERS as _NUMBERS
from vcache_backend.protocol.slot_layout import RECORD as _RECORD
from vcache_backend.protocol.slot_layout import RECORD_WORDS as _RECORD_WORDS
from vcache_backend.protocol.slot_layout import RECORDS_AT as _RECORDS_AT
from vcache_backend.protocol.slot_layout import RESET as _RESET
from vcache_backend.protocol.slot_layout import RESETS_AT as _RESETS_AT
from vcache_backend.protocol.slot_layout import RESETS_WORD as _RESETS_WORD
from vcache_backend.protocol.slot_layout import SCOPE_AT as _SCOPE_AT
from vcache_backend.protocol.slot_layout import SLAB as _SLAB
from vcache_backend.protocol.slot_layout import SLABS_AT as _SLABS_AT


class SlabPlace(NamedTuple):
    """A part of a segment with slots of one size. All in bytes."""

    offset: int
    slot_bytes: int
    nbytes: int

    @property
    def slots(self) -> int:
        return min(self.nbytes // self.slot_bytes, SLAB_SLOTS)


class Slot(NamedTuple):
    """A slot that is not free. writer: the process to which it was granted."""

    slot: int
    key: ChunkKey
    number: int
    writer: ProcessId
    committed: bool


class SlotsTable:
    """The server's side of a table. One thread. `fd`: for clients; this object closes it."""

    def __init__(self, file: int, memory: mmap.mmap) -> None:
        """Use `create` or `take_over`."""
        self._file, self.memory = file, memory
        self.words = memoryview(memory).cast("Q")
        self.generations = self.words[_GENERATIONS : _GENERATIONS + SLOTS]
        self.fd = os.open(_reopened(file), os.O_RDONLY | os.O_CLOEXEC)
        self._same_pids = memory[_SCOPE_AT : _SCOPE_AT + 16] == _scope()[:16]
        """Whether a pid means the same process here as in the records."""

    @classmethod
    def create(cls, segment: str, nbytes: int) -> SlotsTable:
        """The table of a new segment: all slots are free. OSError if there is no memory."""
        file, memory = seals.sealed("slots", TABLE_BYTES)
        fcntl.flock(file, fcntl.LOCK_EX)
        os.fchmod(file, 0o600)
        HEADER.pack_into(memory, 0, MAGIC, VERSION, 0, owner(segment), SLOTS)
        struct.pack_into("<Q", memory, _NBYTES_AT, nbytes)
        memory[_SCOPE_AT : _SCOPE_AT + 32] = _scope()
        return cls(file, memory)

    @classmethod
    def take_over(cls, fd: int, segment: str, nbytes: int) -> SlotsTable:
        """The table that an earlier server made, from a client. The caller keeps `fd`.

        OSError unless a server of this user made it for this segment, and has ended. Another user
        cannot forge one: the file would belong to that user."""
        with ExitStack() as undo:
            status = os.fstat(fd)
            own = stat.S_ISREG(status.st_mode) and stat.S_IMODE(status.st_mode) == 0o600
            if not own or status.st_uid != os.geteuid() or status.st_size != TABLE_BYTES:
                raise OSError(f"it is not a table of slots of uid {os.geteuid()}")
            if reason := seals.lacking(fd):
                raise OSError(reason)
            file = os.open(_reopened(fd), os.O_RDWR | os.O_CLOEXEC)
            undo.callback(os.close, file)
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            memory = undo.enter_context(mmap.mmap(file, TABLE_BYTES))
            made_for = struct.unpack_from("<Q", memory, _NBYTES_AT)[0]
            if HEADER.unpack_from(memory) != (MAGIC, VERSION, 0, owner(segment), SLOTS):
                raise OSError("it is another segment's, given up, or of another version")
            if memory[_SCOPE_AT + 16 : _SCOPE_AT + 32] != _scope()[16:]:
                raise OSError("its numbers are of another clock: another boot or time namespace")
            if made_for != nbytes:
                raise OSError(f"it is for a segment of {made_for:,} B, not of {nbytes:,}")
            undo.pop_all()
        table = cls(file, memory)
        try:
            _check(list(table.slabs()), nbytes)
        except OSError:
            table.close()
            raise
        return table

    # ---- slots

    def void(self, slot: int) -> None:
        """Tell readers that the slot is not what it was. It is free from now on."""
        self.generations[slot] |= 1

    def grant(self, slot: int, key: ChunkKey, writer: ProcessId, number: int) -> None:
        """Note who may write to a free slot, before anybody is told. number: even, larger than any
        before."""
        self.generations[slot] = number - 1
        at = _RECORDS_AT + slot * _RECORD.size
        _RECORD.pack_into(self.memory, at, key, writer.pid, writer.started, 0)
        self.words[_NUMBERS + slot * _RECORD_WORDS] = number

    def fill(self, slot: int, number: int) -> None:
        """Commit a slot: from now on readers find its content right."""
        self.generations[slot] = number

    def free(self, slot: int) -> None:
        """Note that the writer of a slot has stopped, and the slot has no content."""
        self.words[_NUMBERS + slot * _RECORD_WORDS] = 0

    def occupied(self, first: int, count: int) -> Iterator[Slot]:
        """The slots from `first` on that are committed or being written. Their keys may be any."""
        generations, words = self.generations, self.words
        for slot in range(first, first + count):
            number = words[_NUMBERS + slot * _RECORD_WORDS]
            generation = generations[slot]
            if not number or number - generation not in (0, 1):
                continue
            at = _RECORDS_AT + slot * _RECORD.size
            key, pid, started, _ = _RECORD.unpack_from(self.memory, at)
            writer = ProcessId(pid if self._same_pids else 0, started)
            yield Slot(slot, ChunkKey(key), number, writer, generation == number)

    # ---- slabs

    def slabs(self) -> Iterator[SlabPlace]:
        for at in range(_SLABS_AT, _SLABS_AT + SLABS * _SLAB.size, _SLAB.size):
            place = SlabPlace(*_SLAB.unpack_from(self.memory, at))
            if not place.nbytes:
                return
            yield place

    def cut(self, number: int, place: SlabPlace) -> None:
        """Add slab `number`, the next one. All its slots are free."""
        at = _SLABS_AT + number * _SLAB.size
        _SLAB.pack_into(self.memory, at, place.offset, place.slot_bytes, 0)
        self.words[at // 8 + 2] = place.nbytes

    def resize(self, number: int, slot_bytes: int) -> None:
        """Give a slab slots of another size. All its slots must be free."""
        self.words[(_SLABS_AT + number * _SLAB.size) // 8 + 1] = slot_bytes

    # ---- resets

    def resets(self) -> dict[bytes, int]:
        """For each namespace the first number after its last reset; b"": for all others."""
        half, count = self.words[_RESETS_WORD] & 1, self.words[_RESETS_WORD] >> 1
        start, size = _RESETS_AT[half], _RESET.size
        places = range(start, start + min(count, MAX_RESETS + 1) * size, size)
        pairs = dict(_RESET.unpack_from(self.memory, at) for at in places)
        return {key if any(key) else b"": first for key, first in pairs.items()}

    def write_resets(self, resets: dict[bytes, int]) -> None:
        """Replace them at once. At most `MAX_RESETS` and b""."""
        half = 1 - (self.words[_RESETS_WORD] & 1)
        for place, (namespace, first) in enumerate(resets.items()):
            _RESET.pack_into(self.memory, _RESETS_AT[half] + place * _RESET.size, namespace, first)
        self.words[_RESETS_WORD] = len(resets) << 1 | half

    # ---- the end

    def give_up(self) -> None:
        """Declare the table dead for good: readers trust no generation in it, nor any server."""
        struct.pack_into("<I", self.memory, DEAD_AT, 1)

    def close(self) -> None:
        """Leave the table to the next server. Idempotent."""
        if self.fd < 0:
            return
        self.generations.release()
        self.words.release()
        self.memory.close()
        os.close(self._file)
        os.close(self.fd)
        self.fd = -1


def _check(slabs: list[SlabPlace], nbytes: int) -> None:
    """OSError unless such slabs can be in a segment: one behind the other, with whole slots."""
    end = 0
    for place in slabs:
        wrong = place.slot_bytes % ALIGNMENT or not 0 < place.slot_bytes <= place.nbytes
        if wrong or place.offset != end or end + place.nbytes > nbytes:
            raise OSError(f"a slab that cannot be: {place}")
        end += place.nbytes


def _scope() -> bytes:
    """16 bytes for the pid namespace, 16 for the boot and the time namespace."""
    parts = processes.namespaces().split(b" ", 1)
    return b"".join(hashlib.sha256(part).digest()[:16] for part in parts)


def _reopened(fd: int) -> str:
    """A path by which an open file is opened once more, with another mode."""
    return f"/proc/self/fd/{fd}"
