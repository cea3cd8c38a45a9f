"""Generation tables: a counter for each block of a KV cache tells what it holds. Its owner writes
them, all others only read.

A counter changes before its block may be written again. So a reader that finds the published number
after its copy has copied what that number stood for. Published numbers are even, and each is used
once, for all blocks that are filled together. An odd number means that the block holds nothing that
may be read; it equals no published number.

A table is one memfd: a page with the header (`_HEADER`), then the counters, 64 bits each,
little-endian and aligned, so that none is ever read in halves. It is sealed: its size cannot
change, and nobody but the owner, who mapped it before, can write it.

There are no fences here. The owner stores the counter before it has the block written, and the
reader loads the block before the counter. x86-64 keeps stores in order, and loads, too (TSO), and
no compiler moves numpy's accesses across a call. On other machines both classes refuse."""

from __future__ import annotations

import fcntl
import mmap
import os
import platform
import struct
from collections.abc import Sequence
from contextlib import ExitStack, suppress

import numpy as np
import numpy.typing as npt

from vcache_backend.errors import SegmentError, raising_as
from vcache_backend.metadata_server.messages import INSTANCE_BYTES, MAX_BLOCKS
from vcache_backend.seals import FUTURE_WRITE, RESIZING, lacking

MAGIC = b"vcache-g"
VERSION = 3
MACHINE = "x86_64"
_HEADER = struct.Struct(f"<8sII{INSTANCE_BYTES}sQ")
"""Magic, version, 1 once the owner gave the table up, instance, number of blocks."""
_DEAD_AT = 12
VOID = np.uint64(1)
"""The counter of a block that holds nothing that may be read."""
SEALS = RESIZING | FUTURE_WRITE
"""The seals that every reader insists on: a table that others can write proves nothing."""

UInt32s = npt.NDArray[np.uint32]
UInt64s = npt.NDArray[np.uint64]
Blocks = Sequence[int] | npt.NDArray[np.intp] | npt.NDArray[np.uint32]


class Generations:
    """The owner's table. In the scheduler's thread; `give_up` in any. fd: for others to map; stays
    this object's.

    counters: the present numbers, one for each of `blocks` blocks. All start at 2, and 0 is never
    published. coming: the number that the blocks filled next will get."""

    def __init__(self, instance: bytes, blocks: int) -> None:
        """Raises SegmentError if there is no memory or descriptor for it, or the machine does not
        order stores.
        """
        _check_machine()
        if len(instance) != INSTANCE_BYTES or not 0 < blocks <= MAX_BLOCKS:
            raise SegmentError(
                f"a generation table needs {INSTANCE_BYTES} bytes of instance and 1 to {MAX_BLOCKS:,} blocks, "
                f"not {len(instance)} and {blocks:,}"
            )
        self.instance, self.blocks = instance, blocks
        with (
            raising_as({OSError: SegmentError}, f"generation table of {blocks:,} blocks"),
            ExitStack() as undo,
        ):
            self.fd = os.memfd_create("vcache-generations", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            undo.callback(os.close, self.fd)
            os.ftruncate(self.fd, _size(blocks))
            self._memory = mmap.mmap(self.fd, _size(blocks))
            undo.callback(self._release)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, SEALS)
            self._undo = undo.pop_all()
        self.counters: UInt64s = np.frombuffer(
            self._memory, dtype="<u8", offset=mmap.PAGESIZE, count=blocks
        )
        self.counters[:], self.coming = 2, 4
        _HEADER.pack_into(self._memory, 0, MAGIC, VERSION, 0, instance, blocks)

    def void(self, blocks: Blocks | int) -> None:
        """Mark blocks as holding nothing that may be read until they are `filled`. From now on they
        may be written.

        Raises IndexError, and changes nothing, if the cache does not have one of them.
        """
        self.counters[blocks] = VOID

    def filled(self, blocks: Blocks) -> None:
        """Give these blocks, all of them void, the next even number, which stands for what is being
        written into them.
        """
        self.counters[blocks] = self.coming
        self.coming += 2

    def void_all(self) -> None:
        """Mark all blocks as holding nothing that may be read until they are handed out and filled
        again.
        """
        self.counters |= np.uint64(1)

    def give_up(self) -> None:
        """Declare the table dead for good: readers believe nothing in it any more. Any thread.
        Never raises.
        """
        with suppress(ValueError, TypeError):  # closed, which gave it up
            struct.pack_into("<I", self._memory, _DEAD_AT, 1)

    def close(self) -> None:
        """Give the table up, and release its memory. Those who have it mapped see that it is dead.
        Idempotent.
        """
        self.give_up()
        self._undo.close()

    def _release(self) -> None:
        self.counters = np.empty(0, dtype=np.uint64)
        # Raised if somebody still has an array of the counters: the mapping then goes with it.
        with suppress(BufferError):
            self._memory.close()


class GenerationView:
    """Another instance's table, mapped for as long as this object lives. Any thread."""

    def __init__(self, memory: mmap.mmap, instance: bytes, blocks: int) -> None:
        self.instance, self.blocks = instance, blocks
        self.counters: UInt64s = np.frombuffer(
            memory, dtype="<u8", offset=mmap.PAGESIZE, count=blocks
        )
        self._dead: UInt32s = np.frombuffer(memory, dtype="<u4", offset=_DEAD_AT, count=1)

    @classmethod
    def open(cls, fd: int, instance: bytes, blocks: int) -> GenerationView:
        """Map the table behind `fd`, which stays the caller's. It must be `instance`'s, of `blocks`
        blocks, and sealed.

        Raises SegmentError otherwise. What could kill this process when touched is refused before
        it is mapped."""
        _check_machine()
        with raising_as({OSError: SegmentError}, "generation table"):
            _check(fd, blocks)
            memory = mmap.mmap(fd, _size(blocks), flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        magic, version, _, theirs, count = _HEADER.unpack_from(memory)
        if magic != MAGIC or version != VERSION:
            raise SegmentError(
                f"generation table: begins with {magic!r}, version {version}, not {MAGIC!r}, {VERSION}; install the same vcache-backend"
            )
        if theirs != instance or count != blocks:
            raise SegmentError(
                f"generation table: of instance {theirs.hex()} with {count:,} blocks, not of {instance.hex()} with {blocks:,}"
            )
        return cls(memory, instance, blocks)

    @property
    def dead(self) -> bool:
        """Whether the owner gave it up. An owner that was killed did not."""
        return bool(self._dead[0])

    def leading(self, blocks: UInt32s, generations: UInt64s, each: int) -> int:
        """How many leading chunks, of `each` blocks each, still hold what `generations` stand for:
        see `right`.
        """
        count = min(len(blocks), len(generations)) // each
        same = self.right(blocks[: count * each], generations[: count * each])
        if same.all():
            return count
        return int(same.reshape(count, each).all(axis=1).argmin())

    def right(self, blocks: UInt32s, generations: UInt64s) -> npt.NDArray[np.bool_]:
        """Which of these blocks still hold what their `generations`, one for each block, stand for.

        None of a dead table, and no block that is void or that the cache does not have.
        """
        now = self.counters.take(blocks, mode="clip")
        same: npt.NDArray[np.bool_] = (
            (now == generations) & (generations & np.uint64(1) == 0) & (blocks < self.blocks)
        )
        # Read after the counters: an owner that cannot keep its counters gives the table up before
        # it hands out a block.
        return np.zeros_like(same) if self.dead else same


def _check(fd: int, blocks: int) -> None:
    """Refuse a table that could shrink under a mapping or be written by others, or has the wrong
    size. Raises SegmentError, OSError.
    """
    if reason := lacking(fd, SEALS):
        raise SegmentError(f"generation table: {reason}")
    nbytes = os.fstat(fd).st_size
    if not 0 < blocks <= MAX_BLOCKS or nbytes != _size(blocks):
        raise SegmentError(
            f"generation table: fd {fd} holds {nbytes:,} B, but one of {blocks:,} blocks has {_size(blocks):,}"
        )


def _check_machine() -> None:
    if platform.machine() != MACHINE:
        raise SegmentError(
            f"sharing in place needs a machine that orders stores and loads as {MACHINE} does, not {platform.machine()}; "
            "set connector.share: pool"
        )


def _size(blocks: int) -> int:
    """Bytes of a table, in whole pages: the header's, and the counters'."""
    return mmap.PAGESIZE * (1 + -(-blocks * 8 // mmap.PAGESIZE))
