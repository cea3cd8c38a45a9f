"""A segment's slots: a 64-bit generation and a record for each slot, in memory that clients map for
reading. Only the metadata server writes it.

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

import msgspec

from vcache_backend import seals
from vcache_backend.metadata_server import processes
from vcache_backend.metadata_server.processes import Descriptor, ProcessId
from vcache_backend.protocol import generation_table as layout
from vcache_backend.protocol.generation_table import SLOTS
from vcache_backend.protocol.messages import KEY_BYTES, ChunkKey, SegmentInfo

ALIGNMENT = 256
"""Slots start and end on multiples of 256, CUDA's allocation alignment: 16-byte vector accesses
stay aligned."""
SLAB_BITS = 14
SLAB_SLOTS = 1 << SLAB_BITS
"""The most slots of a slab. Those of slab i begin at `i * SLAB_SLOTS`."""
SLABS = SLOTS // SLAB_SLOTS

# Behind the generations: a record for each slot, then the slabs. In the header's page: the scope of
# pids and numbers.
RECORD = struct.Struct(f"<{KEY_BYTES}s2xIQ16xQ")
"""Key, the writer's pid and start, and the number of the fill."""
SLAB = struct.Struct("<3Q")
"""Offset in the segment, bytes of a slot, bytes of the slab (stored last)."""
_SCOPE_AT = 64
_RECORDS_AT = layout.nbytes(SLOTS)
_SLABS_AT = _RECORDS_AT + RECORD.size * SLOTS
TABLE_BYTES = _SLABS_AT + mmap.PAGESIZE


def padded(nbytes: int) -> int:
    """The size of a slot for `nbytes` bytes."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class Slot(NamedTuple):
    """A slot that is not free. writer: the process to which it was granted."""

    slot: int
    key: ChunkKey
    number: int
    writer: ProcessId
    committed: bool


class Slab:
    """A part of a segment with slots of one size; all in bytes. free: the numbers of free slots
    within the slab; none before the slab of an earlier server was read."""

    def __init__(self, offset: int, slot_bytes: int, nbytes: int, is_read: bool = True) -> None:
        self.offset, self.slot_bytes, self.nbytes = offset, slot_bytes, nbytes
        self.is_read = is_read
        self.slots = min(nbytes // slot_bytes, SLAB_SLOTS)
        self.free = list(range(self.slots - 1, -1, -1)) if is_read else []

    @property
    def empty(self) -> bool:
        """Whether all slots are free."""
        return len(self.free) == self.slots


class SlotRegion:
    """A segment with its table. One thread. Use `create` or `take_over`.

    fds: the table's, for clients, and before it the segment's, once known. unused: bytes outside of
    all slabs and in free slots."""

    SLABS_WANTED = 32
    """A slab has this part of its segment, or one slot."""

    def __init__(self, info: SegmentInfo, file: int, memory: mmap.mmap) -> None:
        self.info, self._file, self.memory = info, file, memory
        self.id, self.device, self.medium, self.nbytes = (
            info.id,
            info.device,
            info.medium,
            info.nbytes,
        )
        self._same_pids = memory[_SCOPE_AT : _SCOPE_AT + 16] == _scope(info)[:16]
        """Whether a pid means the same process here as in the records."""
        self.slabs = list(_slabs(memory))
        self.unused, self.chunks, self.evictions = self.nbytes, 0, 0
        self.pins = memoryview(mmap.mmap(-1, 8 * SLOTS)).cast("d")
        """Until when a slot's chunk is not evicted."""
        self.fds = [Descriptor(os.open(_reopened(file), os.O_RDONLY | os.O_CLOEXEC))]
        # Views come last: the caller could not close the memory if a step above failed.
        self.words = memoryview(memory).cast("Q")
        self.generations = self.words[mmap.PAGESIZE // 8 :][:SLOTS]
        each = RECORD.size // 8
        self.numbers = self.words[_RECORDS_AT // 8 : _SLABS_AT // 8][each - 1 :: each]

    @classmethod
    def create(cls, info: SegmentInfo) -> SlotRegion:
        """A new segment: all slots are free. OSError if there is no memory."""
        with ExitStack() as undo:
            file, memory = seals.sealed("slots", TABLE_BYTES)
            undo.callback(os.close, file)
            undo.enter_context(memory)
            fcntl.flock(file, fcntl.LOCK_EX)
            os.fchmod(file, 0o600)
            memory[: layout.HEADER.size] = layout.header(layout.owner_of(info.id), SLOTS)
            memory[_SCOPE_AT : _SCOPE_AT + 32] = _scope(info)
            region = cls(info, file, memory)
            undo.pop_all()
        return region

    @classmethod
    def take_over(cls, info: SegmentInfo, fd: int) -> SlotRegion:
        """A segment with the table that an earlier server made, from a client. The caller keeps
        `fd`.

        OSError unless a server of this user made it for this segment, and has ended
        (BlockingIOError until then). Another user cannot forge one: the file would belong to that
        user."""
        with ExitStack() as undo:
            _check(fd)
            file = os.open(_reopened(fd), os.O_RDWR | os.O_CLOEXEC)
            undo.callback(os.close, file)
            memory = undo.enter_context(mmap.mmap(file, TABLE_BYTES))
            if memory[: layout.HEADER.size] != layout.header(layout.owner_of(info.id), SLOTS):
                raise OSError("it is another segment's, given up, or of another version")
            if memory[_SCOPE_AT + 16 : _SCOPE_AT + 32] != _scope(info)[16:]:
                what = "of another clock (boot, time namespace), or of a segment of another size"
                raise OSError(f"it is {what}")
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            region = cls(info, file, memory)
            undo.pop_all()
        return region

    def described(self) -> SegmentInfo:
        """The segment as the protocol describes it."""
        return msgspec.structs.replace(
            self.info,
            used=self.nbytes - self.unused,
            chunks=self.chunks,
            evictions=self.evictions,
        )

    # ---- slots

    def void(self, slot: int) -> None:
        """Tell readers that the slot is not what it was. It has no content from now on."""
        self.generations[slot] |= 1

    def grant(self, slot: int, key: ChunkKey, writer: ProcessId, number: int) -> None:
        """Note who may write to a free slot, before anybody is told. number: even, larger than any
        before."""
        self.generations[slot] = number - 1
        at = _RECORDS_AT + slot * RECORD.size
        RECORD.pack_into(self.memory, at, key, writer.pid, writer.started, 0)
        self.numbers[slot] = number

    def fill(self, slot: int, number: int) -> None:
        """Commit a slot: from now on readers find its content right."""
        self.generations[slot] = number

    def ended(self, slot: int) -> None:
        """Note that the writer of a slot has stopped, and the slot has no content."""
        self.numbers[slot] = 0

    def give(self, slot: int) -> None:
        """Let a slot without content be granted again."""
        slab = self.slab_of(slot)
        slab.free.append(slot & SLAB_SLOTS - 1)
        self.unused += slab.slot_bytes

    def occupied(self, first: int, count: int) -> Iterator[Slot]:
        """The slots from `first` on that are committed or being written. Their keys may be any."""
        generations, numbers = self.generations, self.numbers
        for slot in range(first, first + count):
            number = numbers[slot]
            generation = generations[slot]
            if not number or number - generation not in (0, 1):
                continue
            at = _RECORDS_AT + slot * RECORD.size
            key, pid, started, _ = RECORD.unpack_from(self.memory, at)
            writer = ProcessId(pid if self._same_pids else 0, started)
            yield Slot(slot, ChunkKey(key), number, writer, generation == number)

    # ---- slabs

    def cut(self, size: int) -> Slab | None:
        """A new slab with slots of `size`; None if there is no room for one."""
        start = self.slabs[-1].offset + self.slabs[-1].nbytes if self.slabs else 0
        # `SLABS` slabs take up the segment even if its first chunks are tiny and later ones large.
        most = max(SLAB_SLOTS, -(-self.nbytes // SLABS // size))
        wanted = max(self.nbytes // self.SLABS_WANTED // size, 1)
        slots = min(wanted, (self.nbytes - start) // size, most)
        if not slots or len(self.slabs) == SLABS:
            return None
        slab, at = Slab(start, size, slots * size), _SLABS_AT + len(self.slabs) * SLAB.size
        SLAB.pack_into(self.memory, at, start, size, 0)
        self.words[at // 8 + 2] = slab.nbytes
        self.slabs.append(slab)
        return slab

    def resize(self, number: int, size: int) -> None:
        """Give a slab slots of another size. All its slots must be free."""
        self.words[(_SLABS_AT + number * SLAB.size) // 8 + 1] = size
        slab = self.slabs[number]
        self.slabs[number] = Slab(slab.offset, size, slab.nbytes)

    def slab_of(self, slot: int) -> Slab:
        return self.slabs[slot >> SLAB_BITS]

    def offset(self, slot: int) -> int:
        slab = self.slab_of(slot)
        return slab.offset + (slot & SLAB_SLOTS - 1) * slab.slot_bytes

    # ---- the end

    def give_up(self) -> None:
        """Declare the table dead for good: readers trust no generation in it, nor any server."""
        struct.pack_into("<I", self.memory, layout.DEAD_AT, 1)

    def close(self) -> None:
        """Leave the table to the next server. Idempotent."""
        if self._file < 0:
            return
        for view in (self.generations, self.numbers, self.words):
            view.release()
        self.memory.close()
        os.close(self._file)
        self._file = -1


def _check(fd: int) -> None:
    """OSError unless only a server of this user can have made the file."""
    status = os.fstat(fd)
    own = stat.S_ISREG(status.st_mode) and stat.S_IMODE(status.st_mode) == 0o600
    if not own or status.st_uid != os.geteuid() or status.st_size != TABLE_BYTES:
        raise OSError(f"it is not a table of slots of uid {os.geteuid()}")
    if reason := seals.lacking(fd):
        raise OSError(reason)


def _slabs(memory: mmap.mmap) -> Iterator[Slab]:
    for at in range(_SLABS_AT, _SLABS_AT + SLABS * SLAB.size, SLAB.size):
        offset, slot_bytes, nbytes = SLAB.unpack_from(memory, at)
        if not nbytes:
            return
        yield Slab(offset, slot_bytes, nbytes, is_read=False)


def _scope(info: SegmentInfo) -> bytes:
    """16 bytes for the pid namespace; 16 for the boot, the time namespace and the segment's
    bytes."""
    pids, clock = processes.namespaces().split(b" ", 1)
    parts = pids, clock + str(info.nbytes).encode()
    return b"".join(hashlib.sha256(part).digest()[:16] for part in parts)


def _reopened(fd: int) -> str:
    """A path by which an open file is opened once more, with another mode."""
    return f"/proc/self/fd/{fd}"
