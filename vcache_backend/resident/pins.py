"""Blocks that their owner is asked not to hand out while they are read: what lets a step count on a read that may not fail.

A pin is a time, in memory of the owner's that its readers write: until then nobody gets the block. Nobody waits for anybody, nothing has
to be taken back, and who dies or stops holds nothing for longer than `HOLD_SECONDS`.

Both sides write first and then look. The owner, before it hands blocks out, says that it takes no pins, looks for those there are, makes
the blocks void, and takes pins again. The reader writes its pins, and then looks: first whether they are taken, then at the generations,
which must all be as they were published. A processor may let a load pass an earlier store, so that both would see nothing; `barrier`,
which the reader pays for alone, makes that impossible:

- if the owner looks for pins after the reader's barrier, it sees them;
- if it looked before, it had said that it takes none; behind the barrier the reader sees that, or that it takes them again, and then the
  blocks are void.

Each reader writes a row of its own: nobody can change a number in one go from Python.
"""

from __future__ import annotations

import ctypes
import fcntl
import logging
import mmap
import os
import platform
import struct
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from vcache_backend.errors import SegmentError, VCacheError, raising_as
from vcache_backend.metadata_server.client import Client
from vcache_backend.resident.generations import Generations, UInt32s, UInt64s
from vcache_backend.resident.tables import Refusals, Tables, pause
from vcache_backend.seals import RESIZING, lacking

log = logging.getLogger(__name__)

HOLD_SECONDS = 0.25
"""How long a pin holds: ten times what the largest copy takes. One that ends later than that from now is nobody's, and holds nothing."""
LATE_SECONDS = 0.05
"""A reader that took longer than that to pin counts on nothing: it was stopped."""
ROWS = 64
"""Readers of one owner that can pin. What is not written to takes no memory."""
SHARE = 8
"""A reader pins at most so small a part of the blocks that an owner can hand out, an eighth: so many that it has others."""
_HOLD, _LATE, _SKEW = int(HOLD_SECONDS * 1e9), int(LATE_SECONDS * 1e9), 1_000_000
_SYSCALL, _REGISTER, _EXPEDITED = 324, 4, 2
"""Of membarrier(2) on x86-64: `REGISTER_GLOBAL_EXPEDITED`, and `GLOBAL_EXPEDITED`, a microsecond."""


def barrier(command: int = _EXPEDITED) -> bool:
    """From here on this thread sees what threads of processes that take pins wrote before, and they see what it has written. False where
    the kernel does not do that."""
    return bool(_libc().syscall(_SYSCALL, command, 0, 0) == 0)


@cache
def _libc() -> ctypes.PyDLL:
    """Not `CDLL`, which would let other threads run meanwhile, and wait for them afterwards."""
    return ctypes.PyDLL(None)


@cache
def possible() -> bool:
    """Whether this process can pin, and have its blocks pinned."""
    with suppress(OSError, AttributeError):
        return platform.machine() == "x86_64" and barrier(_REGISTER) and barrier()
    return False


class _Board:
    """One owner's pins: for each of `ROWS` readers the end of its last pin, and, from the next page on, a row with a word for each block.
    All are nanoseconds of `time.monotonic_ns`."""

    def __init__(self, fd: int, blocks: int) -> None:
        self.blocks, self._memory = blocks, mmap.mmap(fd, size(blocks))
        self.last: npt.NDArray[np.int64] = np.frombuffer(self._memory, dtype="<i8", count=ROWS)
        self.ends = memoryview(self._memory)[: 8 * ROWS].cast("q")
        """The same, for a look that takes a microsecond."""
        rows = np.frombuffer(self._memory, dtype="<i8", offset=mmap.PAGESIZE, count=ROWS * blocks)
        self.until: npt.NDArray[np.int64] = rows.reshape(ROWS, blocks)


class _Row:
    """One reader's row of a board. Nobody else's while this lives: the lock goes with the process."""

    def __init__(self, fd: int, blocks: int) -> None:
        """Raises SegmentError if others have all of them; OSError."""
        if reason := misfit(fd, blocks):
            raise SegmentError(reason)
        # A file of its own, or the lock would be everybody's who was given the same one; the mapping keeps it open.
        own = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        try:
            self.number = next((row for row in range(ROWS) if _locked(own, row)), -1)
            if self.number < 0:
                raise SegmentError(f"{ROWS} others pin blocks there")
            self._board = _Board(own, blocks)
        finally:
            os.close(own)
        self.blocks, self._until, self._last = blocks, self._board.until[self.number], self._board.last

    def write(self, blocks: UInt32s, until: int) -> None:
        self._until[blocks] = until
        self._last[self.number] = until

    def clear(self, blocks: UInt32s, until: int, last: int) -> None:
        """Those of the blocks that were pinned until then; until `last` there are others."""
        self._until[blocks[self._until[blocks] == until]] = 0
        self._last[self.number] = last


def _locked(fd: int, row: int) -> bool:
    """Whether that row is this open file's alone, from now on."""
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, struct.pack("hhxxxxqqixxxx", fcntl.F_WRLCK, os.SEEK_SET, row, 1, 0))
    except (BlockingIOError, PermissionError):
        return False
    return True


class Pins:
    """An owner's. One thread, its scheduler's. fd: for its readers, and stays this object's."""

    def __init__(self, generations: Generations) -> None:
        """Raises SegmentError where there is no memory or descriptor for it. `possible` says whether it is of use."""
        self._generations, self._rests = generations, 0
        with raising_as({OSError: SegmentError}, "pins"):
            self.fd = os.memfd_create("vcache-pins", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            try:
                os.ftruncate(self.fd, size(generations.blocks))
                fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, RESIZING)
                self._board = _Board(self.fd, generations.blocks)
            except BaseException:
                os.close(self.fd)
                raise
        generations.honours_pins(True)

    def halt(self) -> bool:
        """Nobody begins to count on a pin until `resume`. Whether somebody may do so already."""
        self._generations.honours_pins(False)
        return not self._rests and max(self._board.ends) > time.monotonic_ns()

    def resume(self) -> None:
        """No block of those that others may count on was handed out since `halt`, or it is void."""
        if self._rests and time.monotonic_ns() >= self._rests:
            self._rests = 0
        if not self._rests:
            self._generations.honours_pins(True)

    def on(self, blocks: npt.NDArray[np.integer[Any]]) -> npt.NDArray[np.bool_] | None:
        """Which of these are pinned; None if none is. After `halt`."""
        now, last = time.monotonic_ns(), self._board.last
        # Of the rows of those who pin these words alone: a row may be long.
        until = self._board.until[np.flatnonzero(last > now)[:, None], blocks]
        pinned: npt.NDArray[np.bool_] = np.asarray(((until > now) & (until <= now + _HOLD + _SKEW)).any(axis=0))
        return pinned if pinned.any() else None

    def rest(self) -> None:
        """All free blocks were pinned: for `HOLD_SECONDS` nobody begins to count on a pin, and none is looked for."""
        self._rests = time.monotonic_ns() + _HOLD

    @contextmanager
    def none(self) -> Iterator[None]:
        """Meanwhile nobody counts on a pin: waits for those that somebody may count on, `HOLD_SECONDS` at most."""
        self._settle()
        yield
        self._rests = 0
        self.resume()

    def close(self) -> None:
        """Once. Nobody counts on a pin any more, after at most `HOLD_SECONDS`."""
        self._settle()
        os.close(self.fd)

    def _settle(self) -> None:
        self._generations.honours_pins(False)
        ends = time.monotonic_ns() + _HOLD
        while (left := min(ends, int(self._board.last.max())) - time.monotonic_ns()) > 0:
            time.sleep(min(0.005, left * 1e-9))


class Pinning:
    """A reader's. One thread, its scheduler's."""

    def __init__(self, client: Client, tables: Tables) -> None:
        self._client, self._tables = client, tables
        self._rows: dict[bytes, _Row] = {}
        self._refused = Refusals()
        self._held: list[tuple[int, str, bytes, UInt32s]] = []
        """Until when, for which request, whose, and which blocks."""

    def pin(self, name: str, chunks: Iterable[tuple[bytes, UInt32s, UInt64s]]) -> bool:
        """Whether none of these will be handed out for `HOLD_SECONDS`, or until `release`: whose, the blocks, and the generations they were
        published with. Some microseconds, and a request to the server for each owner that is new. Never raises."""
        of: dict[bytes, list[tuple[UInt32s, UInt64s]]] = {}
        for instance, blocks, generations in chunks:
            of.setdefault(instance, []).append((blocks, generations))
        wanted = {instance: (*map(np.concatenate, zip(*its, strict=True)),) for instance, its in of.items()}
        rows = {instance: self._row(instance) for instance in wanted}
        began = time.monotonic_ns()
        self._held = [held for held in self._held if held[0] > began]
        for instance, (blocks, _) in wanted.items():
            row, view = rows[instance], self._tables.view(instance)
            mine = sum(len(its) for _, _, whose, its in self._held if whose == instance) + len(blocks)
            if row is None or view is None or mine * SHARE > view.free or int(blocks.max()) >= row.blocks:
                return False
        until = began + _HOLD
        for instance, (blocks, _) in wanted.items():
            row = rows[instance]
            assert row is not None
            row.write(blocks, until)
            self._held.append((until, name, instance, blocks))
        views = {instance: self._tables.view(instance) for instance in wanted} if barrier() else {}
        sure = all((view := views.get(instance)) is not None and view.pinned(*wanted[instance]) for instance in wanted)
        if sure and time.monotonic_ns() - began < _LATE:
            return True
        self.release([name])
        return False

    def release(self, names: Iterable[str]) -> None:
        """Nobody reads any more what was pinned under these names. What others have pinned as well stays so."""
        over = set(names)
        ended = [held for held in self._held if held[1] in over]
        self._held = [held for held in self._held if held[1] not in over]
        for until, _, instance, blocks in ended:
            if (row := self._rows.get(instance)) is not None:
                others = [held for held in self._held if held[2] == instance]
                for held in others:
                    blocks = blocks[~np.isin(blocks, held[3])]
                row.clear(blocks, until, max((held[0] for held in others), default=0))

    def _row(self, instance: bytes) -> _Row | None:
        """None while there is none to be had."""
        known, view = self._rows.get(instance), self._tables.view(instance)
        if view is None or not possible():
            self._rows.pop(instance, None)
            return None
        if known is not None or instance in self._refused:
            return known
        for gone in [other for other in self._rows if self._tables.view(other) is None]:
            del self._rows[gone]
        try:
            fd = self._client.open_pins(instance)
            try:
                known = self._rows[instance] = _Row(fd, view.blocks)
            finally:
                os.close(fd)
        except (VCacheError, OSError) as error:
            log.debug("no block of instance %s is pinned: %s", instance.hex(), error)
            self._refused.add(instance, pause(error))
        return known


def size(blocks: int) -> int:
    """Of the memory for the pins of so many blocks."""
    return mmap.PAGESIZE * (1 + -(-ROWS * blocks * 8 // mmap.PAGESIZE))


def misfit(fd: int, blocks: int) -> str:
    """Why `fd` is no memory for the pins of so many blocks; empty if it is. Raises OSError."""
    if reason := lacking(fd):
        return reason
    nbytes = os.fstat(fd).st_size
    return "" if nbytes == size(blocks) else f"the memfd has {nbytes:,} B, but pins of {blocks:,} blocks take {size(blocks):,}"
