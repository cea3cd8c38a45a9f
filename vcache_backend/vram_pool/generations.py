"""Generation tables: a counter for each block of a KV cache, or each slot of a segment, identifies
the contents. Only the owner writes its table; all other processes read it. This is the table of a
KV cache; the metadata server writes the tables of segments (`metadata_server.slots`).

The owner changes a block's counter before it writes to the block again. After a copy, the reader
compares the counter with the published number: if both are equal, the copy is right. Published
numbers are even, and each stands for one fill of one set of blocks. An odd number marks a block
that must not be read.

A table is one memfd: a page with the header (`HEADER`), then the counters. Each counter is 64
bits, little-endian and aligned, so no reader sees half of a write. The memfd is sealed: nobody can
change its size, and only the owner, who mapped it before, can write to it.

No fences are needed. The owner stores the counter before the block is written, and the reader loads
the block before the counter. x86-64 keeps the order of stores and of loads (TSO), and no compiler
moves numpy's accesses across a call. On other machines both classes refuse."""

from __future__ import annotations

import mmap
import os
import platform
import struct
from collections.abc import Sequence
from contextlib import ExitStack, suppress

import numpy as np
import numpy.typing as npt

from vcache_backend.errors import SegmentError, raising_as
from vcache_backend.protocol import generation_table
from vcache_backend.protocol.generation_table import (
    DEAD_AT,
    HEADER,
    SEALS,
    SLOTS,
    ForeignTable,
    header,
    owner_of,
)
from vcache_backend.protocol.messages import GENERATION_BYTES, NUMBER_BYTES
from vcache_backend.seals import RESIZING, sealed

MACHINE = "x86_64"
VOID = 1
"""The counter of a block that must not be read."""
_ODD = np.uint64(1)
_PARITY = bytes(byte & 1 for byte in range(256))

UInt32s = npt.NDArray[np.uint32]
UInt64s = npt.NDArray[np.uint64]
Blocks = Sequence[int] | npt.NDArray[np.intp] | npt.NDArray[np.uint32]


def packed(counters: UInt64s, blocks: Blocks) -> bytes:
    """The generations of these blocks, packed. Keeps the interpreter. Raises IndexError."""
    return b"".join([counters[part].tobytes() for part in _parts(blocks)])


def _parts(blocks: Blocks, most: int = 500) -> list[npt.NDArray[np.intp]]:
    """Split blocks into parts of `most`. With more elements numpy lends the interpreter to other
    threads, and vLLM's scheduler waits to get it back. `take` always lends it."""
    # Each part by itself: numpy would lend the interpreter to convert all blocks at once. numpy
    # takes less time for its own type of index.
    starts = range(0, len(blocks), most)
    return [np.asarray(blocks[at : at + most], np.intp) for at in starts]


def first_odd(packed: bytes) -> int:
    """The place of the first odd number among packed generations; -1 if all are even."""
    return packed[::GENERATION_BYTES].translate(_PARITY).find(1)


class Generations:
    """The owner's table. All methods but `give_up` belong to the scheduler's thread. fd: for other
    processes to map; this object closes it.

    counters: the present number of each block. All counters start at 2; 0 is never published.
    coming: the number for the next fill."""

    def __init__(self, instance: bytes, blocks: int) -> None:
        """Create the table. Raises SegmentError if memory or descriptors are exhausted, or if the
        machine does not order stores."""
        _check_machine()
        self.blocks = blocks
        with raising_as(SegmentError, f"generation table of {blocks:,} blocks", OSError):
            self.fd, self._memory = sealed("generations", generation_table.nbytes(blocks), SEALS)
        self._undo = ExitStack()
        self._undo.callback(os.close, self.fd)
        self._undo.callback(self._release)
        self.counters: UInt64s = np.frombuffer(
            self._memory, dtype="<u8", offset=mmap.PAGESIZE, count=blocks
        )
        self.counters[:], self.coming = 2, 4
        self._memory[: HEADER.size] = header(instance, blocks)

    def void(self, blocks: Blocks) -> None:
        """Mark blocks as not to be read until `filled`. The caller may now write to them.

        Raises IndexError if a block is outside of the cache."""
        memory = self.counters.data
        for block in blocks:
            memory[block] = VOID

    def filled(self, blocks: Blocks) -> int:
        """Give void blocks the next even number, which stands for their new content. Returns the
        number."""
        number, memory = self.coming, self.counters.data
        # Not slower than numpy, of which little is in the CPU's caches here. Fastest with a list.
        for block in blocks:
            memory[block] = number
        self.coming += 2
        return number

    def has_void(self, blocks: Sequence[int]) -> bool:
        """Whether one of these blocks must not be read."""
        memory = self.counters.data
        return any(memory[block] & VOID for block in blocks)

    def void_all(self) -> None:
        """Mark all blocks as not to be read until they are filled again."""
        self.counters |= np.uint64(1)

    def give_up(self) -> None:
        """Declare the table dead for good: readers then trust no number in it. Any thread. Never
        raises."""
        with suppress(ValueError, TypeError):  # closed, and so given up
            struct.pack_into("<I", self._memory, DEAD_AT, 1)

    def close(self) -> None:
        """Give the table up and release the memory. Processes that map the table see a dead table.
        Idempotent."""
        self.give_up()
        self._undo.close()

    def _release(self) -> None:
        self.counters = np.empty(0, dtype=np.uint64)
        # If a caller still holds an array of the counters, the mapping ends with the array.
        with suppress(BufferError):
            self._memory.close()


class GenerationView(ForeignTable):
    """Another instance's table, mapped as long as this object lives. Any thread."""

    def __init__(self, fd: int, owner: bytes, blocks: int, seals: int = SEALS) -> None:
        """See `ForeignTable`."""
        _check_machine()
        super().__init__(fd, owner, blocks, seals)
        self.blocks = blocks
        self.counters: UInt64s = np.frombuffer(self.words, dtype="<u8")

    @classmethod
    def of_segment(cls, fd: int, segment: str) -> GenerationView:
        """Map the table of a segment's slots (`metadata_server.slots`) behind the caller's
        `fd`, which must come from the server: others of the server's user can write the table.
        Raises SegmentError unless it is this segment's."""
        return cls(fd, owner_of(segment), SLOTS, RESIZING)

    def leading(self, blocks: bytes, generations: bytes) -> int:
        """Count the leading blocks that still have the numbers in `generations`. Both arguments are
        packed as in the protocol, with an entry for each block.

        Void blocks, blocks outside of the cache and blocks of a dead table do not count."""
        count = min(len(blocks) // NUMBER_BYTES, len(generations) // GENERATION_BYTES)
        numbers = np.frombuffer(blocks, dtype=np.uint32, count=count)
        expected = generations[: count * GENERATION_BYTES]
        right = count if self._unchanged(numbers, expected) else self._same(numbers, expected)
        # Read `dead` after the counters: an owner that cannot keep its counters gives the table up
        # before it hands out a block.
        return 0 if self.dead else right

    def _unchanged(self, blocks: UInt32s, generations: bytes) -> bool:
        """Whether no block has changed, which is the usual case. Comparing bytes takes a third of
        the time of `_same`."""
        try:
            return packed(self.counters, blocks) == generations and first_odd(generations) < 0
        except IndexError:  # a block outside of the cache
            return False

    def _same(self, blocks: UInt32s, generations: bytes) -> int:
        expected = np.frombuffer(generations, dtype=np.uint64)
        # Clip: a block outside of the cache is compared with the last block, and refused below.
        unchanged = self.counters.take(blocks, mode="clip") == expected
        unchanged &= expected & _ODD == 0
        unchanged &= blocks < self.blocks
        return len(unchanged) if unchanged.all() else int(unchanged.argmin())


def _check_machine() -> None:
    if platform.machine() != MACHINE:
        raise SegmentError(
            f"generations need a machine that orders stores and loads as {MACHINE} does, not "
            f"{platform.machine()}"
        )
