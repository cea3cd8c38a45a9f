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
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from typing import NamedTuple

import msgspec

from vcache_backend import seals
from vcache_backend.metadata_server import processes
from vcache_backend.metadata_server.processes import ProcessId
from vcache_backend.protocol import generation_table as layout
from vcache_backend.protocol.generation_table import SLOTS
from vcache_backend.protocol.messages import KEY_BYTES, ChunkKey, Medium, SegmentInfo, SegmentState

ALIGNMENT = 256
"""Slots start and end on multiples of 256, CUDA's allocation alignment: 16-byte vector accesses
stay aligned."""
SLAB_BITS = 14
SLAB_SLOTS = 1 << SLAB_BITS
"""The most slots of a slab. Those of slab i begin at `i * SLAB_SLOTS`."""
SLABS = SLOTS // SLAB_SLOTS

# Behind the generations: a record for each slot, then the slabs. In the header's page: the bytes of
# the segment, and the scope of pids and numbers.
RECORD = struct.Struct(f"<{KEY_BYTES}s2xIQ16xQ")
"""Key, the writer's pid and start, and the number of the fill."""
SLAB = struct.Struct("<3Q")
"""Offset in the segment, bytes of a slot, bytes of the slab (stored last)."""
_NBYTES_AT, _SCOPE_AT = 40, 64
_RECORDS_AT = layout.nbytes(SLOTS)
_SLABS_AT = _RECORDS_AT + RECORD.size * SLOTS
TABLE_BYTES = _SLABS_AT + mmap.PAGESIZE


def padded(nbytes: int) -> int:
    """The size of a slot for `nbytes` bytes."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


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
        self._same_pids = memory[_SCOPE_AT : _SCOPE_AT + 16] == _scope()[:16]
        """Whether a pid means the same process here as in the records."""
        self.fd = os.open(_reopened(file), os.O_RDONLY | os.O_CLOEXEC)
        # Views come last: the caller could not close the memory if a step above failed.
        self.words = memoryview(memory).cast("Q")
        self.generations = self.words[mmap.PAGESIZE // 8 :][:SLOTS]
        each = RECORD.size // 8
        self.numbers = self.words[_RECORDS_AT // 8 : _SLABS_AT // 8][each - 1 :: each]

    @classmethod
    def create(cls, segment: str, nbytes: int) -> SlotsTable:
        """The table of a new segment: all slots are free. OSError if there is no memory."""
        with ExitStack() as undo:
            file, memory = seals.sealed("slots", TABLE_BYTES)
            undo.callback(os.close, file)
            undo.enter_context(memory)
            fcntl.flock(file, fcntl.LOCK_EX)
            os.fchmod(file, 0o600)
            memory[: layout.HEADER.size] = layout.header(layout.owner_of(segment), SLOTS)
            struct.pack_into("<Q", memory, _NBYTES_AT, nbytes)
            memory[_SCOPE_AT : _SCOPE_AT + 32] = _scope()
            table = cls(file, memory)
            undo.pop_all()
        return table

    @classmethod
    def take_over(cls, fd: int, segment: str, nbytes: int) -> SlotsTable:
        """The table that an earlier server made, from a client. The caller keeps `fd`.

        OSError unless a server of this user made it for this segment, and has ended
        (BlockingIOError until then). Another user cannot forge one: the file would belong to that
        user."""
        with ExitStack() as undo:
            file, memory = _opened(fd, segment, nbytes, undo)
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            table = cls(file, memory)
            undo.pop_all()
        return table

    # ---- slots

    def void(self, slot: int) -> None:
        """Tell readers that the slot is not what it was. It is free from now on."""
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

    def free(self, slot: int) -> None:
        """Note that the writer of a slot has stopped, and the slot has no content."""
        self.numbers[slot] = 0

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

    def slabs(self) -> Iterator[SlabPlace]:
        for at in range(_SLABS_AT, _SLABS_AT + SLABS * SLAB.size, SLAB.size):
            place = SlabPlace(*SLAB.unpack_from(self.memory, at))
            if not place.nbytes:
                return
            yield place

    def cut(self, number: int, place: SlabPlace) -> None:
        """Add slab `number`, the next one. All its slots are free."""
        at = _SLABS_AT + number * SLAB.size
        SLAB.pack_into(self.memory, at, place.offset, place.slot_bytes, 0)
        self.words[at // 8 + 2] = place.nbytes

    def resize(self, number: int, slot_bytes: int) -> None:
        """Give a slab slots of another size. All its slots must be free."""
        self.words[(_SLABS_AT + number * SLAB.size) // 8 + 1] = slot_bytes

    # ---- the end

    def give_up(self) -> None:
        """Declare the table dead for good: readers trust no generation in it, nor any server."""
        struct.pack_into("<I", self.memory, layout.DEAD_AT, 1)

    def close(self) -> None:
        """Leave the table to the next server. Idempotent."""
        if self.fd < 0:
            return
        for view in (self.generations, self.numbers, self.words):
            view.release()
        self.memory.close()
        os.close(self._file)
        os.close(self.fd)
        self.fd = -1


def _opened(fd: int, segment: str, nbytes: int, undo: ExitStack) -> tuple[int, mmap.mmap]:
    """Open an earlier server's table once more, to write to it. `undo` closes both. OSError unless
    a server of this user made it for this segment."""
    status = os.fstat(fd)
    own = stat.S_ISREG(status.st_mode) and stat.S_IMODE(status.st_mode) == 0o600
    if not own or status.st_uid != os.geteuid() or status.st_size != TABLE_BYTES:
        raise OSError(f"it is not a table of slots of uid {os.geteuid()}")
    if reason := seals.lacking(fd):
        raise OSError(reason)
    file = os.open(_reopened(fd), os.O_RDWR | os.O_CLOEXEC)
    undo.callback(os.close, file)
    memory = undo.enter_context(mmap.mmap(file, TABLE_BYTES))
    made_for = struct.unpack_from("<Q", memory, _NBYTES_AT)[0]
    if memory[: layout.HEADER.size] != layout.header(layout.owner_of(segment), SLOTS):
        raise OSError("it is another segment's, given up, or of another version")
    if memory[_SCOPE_AT + 16 : _SCOPE_AT + 32] != _scope()[16:]:
        raise OSError("its numbers are of another clock: another boot or time namespace")
    if made_for != nbytes:
        raise OSError(f"it is for a segment of {made_for:,} B, not of {nbytes:,}")
    return file, memory


def _scope() -> bytes:
    """16 bytes for the pid namespace, 16 for the boot and the time namespace."""
    parts = processes.namespaces().split(b" ", 1)
    return b"".join(hashlib.sha256(part).digest()[:16] for part in parts)


def _reopened(fd: int) -> str:
    """A path by which an open file is opened once more, with another mode."""
    return f"/proc/self/fd/{fd}"


# ---- a segment with its table


class Slab:
    """Slots of one size. free: their numbers within the slab, or empty before the slab was read."""

    def __init__(self, place: SlabPlace, free: Iterable[int] | None = None) -> None:
        self.place = place
        self.free = list(range(place.slots - 1, -1, -1) if free is None else free)

    @property
    def empty(self) -> bool:
        """Whether all slots are free."""
        return len(self.free) == self.place.slots


class SlotRegion:
    """A segment with its table.

    state: live, or draining while the server forgets its chunks. rebuilt: whether all slots of an
    earlier server's table were read; before that none of the free ones is granted. unused: bytes
    outside of all slabs and in free slots."""

    SLABS_WANTED = 32
    """A slab has this part of its segment, or one slot."""

    def __init__(self, info: SegmentInfo, table: SlotsTable) -> None:
        self.info, self.table = info, table
        self.fds: list[processes.Descriptor] = []
        """Of the segment and of its table, for clients; closed with this object."""
        self.id, self.device, self.nbytes = info.id, info.device, info.nbytes
        self.medium: Medium = info.medium
        self.state: SegmentState = "live"
        self.slabs = [Slab(place, ()) for place in table.slabs()]
        self.rebuilt = not self.slabs
        self.unused = self.nbytes
        self.chunks = self.evictions = 0
        self.pins = memoryview(mmap.mmap(-1, 8 * SLOTS)).cast("d")
        """Until when a slot's chunk is not evicted."""

    def described(self) -> SegmentInfo:
        """The segment as the protocol describes it."""
        return msgspec.structs.replace(
            self.info,
            used=self.nbytes - self.unused,
            chunks=self.chunks,
            evictions=self.evictions,
            state=self.state,
        )

    def cut(self, size: int) -> Slab | None:
        """A new slab with slots of `size`; None if there is no room for one."""
        last = self.slabs[-1].place if self.slabs else SlabPlace(0, 0, 0)
        start = last.offset + last.nbytes
        left = self.nbytes - start
        # `SLABS` slabs take up the segment even if its first chunks are tiny and later ones large.
        most = max(SLAB_SLOTS, -(-self.nbytes // SLABS // size))
        slots = min(max(self.nbytes // self.SLABS_WANTED // size, 1), left // size, most)
        if not slots or len(self.slabs) == SLABS:
            return None
        place = SlabPlace(start, size, slots * size)
        self.table.cut(len(self.slabs), place)
        self.slabs.append(Slab(place))
        return self.slabs[-1]

    def resize(self, number: int, size: int) -> None:
        """Give a slab slots of another size. All its slots must be free."""
        self.table.resize(number, size)
        self.slabs[number] = Slab(self.slabs[number].place._replace(slot_bytes=size))

    def slab_of(self, slot: int) -> Slab:
        return self.slabs[slot >> SLAB_BITS]

    def offset(self, slot: int) -> int:
        place = self.slabs[slot >> SLAB_BITS].place
        return place.offset + (slot & SLAB_SLOTS - 1) * place.slot_bytes

    def give(self, slot: int) -> None:
        """Make a slot free here; its table says so already."""
        slab = self.slabs[slot >> SLAB_BITS]
        slab.free.append(slot & SLAB_SLOTS - 1)
        self.unused += slab.place.slot_bytes
