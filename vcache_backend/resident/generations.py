"""Which bytes a block of a KV cache holds: a counter for each block, in memory that its owner writes and all others only read.

A counter changes before its block may be written again, so whoever finds the published even number after a copy has copied what the
number stood for. Odd: nobody has filled the block, or what it holds counts no more; it equals nothing. An even number is given once: to
all blocks that are filled together.

One memfd: a page with the header (`_HEADER`), then the counters, little-endian, 64 bits each, aligned, so that none is ever read in
halves. It is sealed: its size does not change, and only its owner, who mapped it before, can write it.

Nothing here is a fence. The owner stores the counter and then has the block written, the reader loads the block and then the counter:
x86-64 keeps stores in order, and loads too (TSO), and no compiler moves numpy's across a call. On other machines both classes refuse.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import platform
import struct
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from functools import cache

import numpy as np
import numpy.typing as npt

from vcache_backend.errors import SegmentError, raising_as
from vcache_backend.metadata_server.messages import INSTANCE_BYTES, MAX_BLOCKS
from vcache_backend.seals import FUTURE_WRITE, RESIZING, lacking

MAGIC = b"vcache-g"
VERSION = 2
MACHINE = "x86_64"
_HEADER = struct.Struct(f"<8sII{INSTANCE_BYTES}sQQQ")
"""Magic, version, 1 once the owner gave the table up, instance, blocks, by which clock the owner takes pins, or 0 if it takes none, and how
many blocks nobody uses."""
_DEAD_AT, _CLOCK_AT, _FREE_AT = 12, 40, 48
VOID = np.uint64(1)
"""Of a block that holds nothing which anybody may read."""
SEALS = RESIZING | FUTURE_WRITE
"""What every reader insists on: a table that others write says nothing."""

UInt32s = npt.NDArray[np.uint32]
UInt64s = npt.NDArray[np.uint64]
Blocks = Sequence[int] | npt.NDArray[np.intp] | npt.NDArray[np.uint32]


class Generations:
    """The owner's table. One thread, the scheduler's; `give_up` from any. `fd` is for others, and stays this object's.

    counters: as they are now, one for each of `blocks`. All start at 2, and 0 is never published. coming: the number of the blocks that are
    filled next.
    """

    def __init__(self, instance: bytes, blocks: int) -> None:
        """Raises SegmentError where there is no memory or descriptor for it, or the machine does not order stores."""
        _check_machine()
        if len(instance) != INSTANCE_BYTES or not 0 < blocks <= MAX_BLOCKS:
            raise SegmentError(
                f"a generation table needs {INSTANCE_BYTES} bytes of instance and 1 to {MAX_BLOCKS:,} blocks, "
                f"not {len(instance)} and {blocks:,}"
            )
        self.instance, self.blocks = instance, blocks
        with raising_as({OSError: SegmentError}, f"generation table of {blocks:,} blocks"), ExitStack() as undo:
            self.fd = os.memfd_create("vcache-generations", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            undo.callback(os.close, self.fd)
            os.ftruncate(self.fd, _size(blocks))
            self._memory = mmap.mmap(self.fd, _size(blocks))
            undo.callback(self._release)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, SEALS)
            self._undo = undo.pop_all()
        self.counters: UInt64s = np.frombuffer(self._memory, dtype="<u8", offset=mmap.PAGESIZE, count=blocks)
        self.counters[:], self.coming = 2, 4
        _HEADER.pack_into(self._memory, 0, MAGIC, VERSION, 0, instance, blocks, 0, 0)

    def void(self, blocks: Blocks | int) -> None:
        """These hold nothing that anybody may read until they are `filled`: somebody else may write them from now on. IndexError, and no
        change, if one of them is none of the cache's."""
        self.counters[blocks] = VOID

    def honours_pins(self, does: bool) -> None:
        """Whether readers may count on pins from now on; see `pins`. Nobody may at first."""
        struct.pack_into("<Q", self._memory, _CLOCK_AT, clock() if does else 0)

    def show_free(self, blocks: int) -> None:
        """So many of the blocks can be handed out; readers pin a part of these at most."""
        with suppress(ValueError):  # closed
            struct.pack_into("<Q", self._memory, _FREE_AT, blocks)

    def filled(self, blocks: Blocks) -> None:
        """What these, all void, are being given is what their new, even number stands for."""
        self.counters[blocks] = self.coming
        self.coming += 2

    def void_all(self) -> None:
        """What every block holds means something else: nobody may read it before it is handed out and filled again."""
        self.counters |= np.uint64(1)

    def give_up(self) -> None:
        """Nothing here is to be believed any more, whatever happens next. Never raises."""
        with suppress(ValueError, TypeError):  # closed, which gave it up
            struct.pack_into("<I", self._memory, _DEAD_AT, 1)

    def close(self) -> None:
        """Give it up, and let go of the memory: those who have it mapped see that nobody keeps it. Idempotent."""
        self.give_up()
        self._undo.close()

    def _release(self) -> None:
        self.counters = np.empty(0, dtype=np.uint64)
        # Somebody else still looks at the counters: the mapping goes with that array.
        with suppress(BufferError):
            self._memory.close()


class GenerationView:
    """Another instance's table, which is mapped as long as this object lives. Any thread."""

    def __init__(self, memory: mmap.mmap, instance: bytes, blocks: int) -> None:
        self.instance, self.blocks = instance, blocks
        self.counters: UInt64s = np.frombuffer(memory, dtype="<u8", offset=mmap.PAGESIZE, count=blocks)
        self._dead: UInt32s = np.frombuffer(memory, dtype="<u4", offset=_DEAD_AT, count=1)
        self._clock: UInt64s = np.frombuffer(memory, dtype="<u8", offset=_CLOCK_AT, count=1)
        self._free: UInt64s = np.frombuffer(memory, dtype="<u8", offset=_FREE_AT, count=1)

    @classmethod
    def open(cls, fd: int, instance: bytes, blocks: int) -> GenerationView:
        """The table behind `fd`, which stays the caller's, if it is `instance`'s, of so many blocks, and sealed.

        Raises SegmentError for everything else, before it is touched where touching it could kill this process.
        """
        _check_machine()
        with raising_as({OSError: SegmentError}, "generation table"):
            _check(fd, blocks)
            memory = mmap.mmap(fd, _size(blocks), flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        magic, version, _, theirs, count, *_ = _HEADER.unpack_from(memory)
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
        """Whether its owner gave it up. False says nothing about an owner that was killed."""
        return bool(self._dead[0])

    @property
    def free(self) -> int:
        """How many blocks its owner can hand out, as of a moment ago."""
        return int(self._free[0])

    def leading(self, blocks: UInt32s, generations: UInt64s, each: int) -> int:
        """How many leading chunks, of `each` blocks, still hold what `generations` stand for.

        The number of a block that is void, or that the cache does not have, equals nothing; of a dead table none does.
        """
        count = min(len(blocks), len(generations)) // each
        same = self.right(blocks[: count * each], generations[: count * each])
        if same.all():
            return count
        return int(same.reshape(count, each).all(axis=1).argmin())

    def right(self, blocks: UInt32s, generations: UInt64s) -> npt.NDArray[np.bool_]:
        """Which of these, as many as there are generations, still hold what those stand for."""
        now = self.counters.take(blocks, mode="clip")
        same: npt.NDArray[np.bool_] = (now == generations) & (generations & np.uint64(1) == 0) & (blocks < self.blocks)
        # After the counters: an owner whose counters fail it gives up before it hands out a block.
        return np.zeros_like(same) if self.dead else same

    def pinned(self, blocks: UInt32s, generations: UInt64s) -> bool:
        """Whether these, blocks of the cache that a pin was written for, are as `generations` say, and their owner looks for pins, by this
        process's clock, before it hands one out."""
        # In this order: what was handed out while it took no pins was void before it took them again.
        honoured = int(self._clock[0]) == clock()
        same = bool((self.counters[blocks] == generations).all() and not (generations & np.uint64(1)).any())
        return honoured and same and not self.dead


@cache
def clock() -> int:
    """The time namespace of this process: in another one `time.monotonic` says something else."""
    with suppress(OSError):
        return os.stat("/proc/self/ns/time").st_ino
    return 1


def _check(fd: int, blocks: int) -> None:
    """Refuse what could shrink under a mapping, be written by others, or has another size than it should. SegmentError, OSError."""
    if reason := lacking(fd, SEALS):
        raise SegmentError(f"generation table: {reason}")
    nbytes = os.fstat(fd).st_size
    if not 0 < blocks <= MAX_BLOCKS or nbytes != _size(blocks):
        raise SegmentError(f"generation table: fd {fd} holds {nbytes:,} B, but one of {blocks:,} blocks has {_size(blocks):,}")


def _check_machine() -> None:
    if platform.machine() != MACHINE:
        raise SegmentError(
            f"sharing in place needs a machine that orders stores and loads as {MACHINE} does, not {platform.machine()}; "
            "set connector.share: pool"
        )


def _size(blocks: int) -> int:
    """Whole pages: the header's, and the counters'."""
    return mmap.PAGESIZE * (1 + -(-blocks * 8 // mmap.PAGESIZE))
