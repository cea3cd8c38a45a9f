"""Pins: a reader asks an owner not to hand out blocks for a moment, so that a step can count on
reading them in place.

A pin is a time, written by a reader into memory of the owner: the owner does not hand out the block
before then. Nobody waits for anybody, nothing has to be taken back, and a reader that dies or stops
holds nothing for longer than `HOLD_SECONDS`.

Both sides write first and then look. Before the owner hands blocks out it says that it honours no
pins, looks for pins, makes the blocks void, and honours pins again. The reader writes its pins and
then looks: first whether pins are honoured, then whether all generations are as published. A
processor may execute a load before an earlier store, and then neither would see the other.
`barrier`, which only the reader calls, makes that impossible:

- If the owner looks for pins after the reader's barrier, it sees them.
- If it looked before, it had said that it honours none. After the barrier the reader sees either
  that, or that pins are honoured again;
  in that case the blocks handed out are void.

Each reader writes a row of its own, since Python has no atomic update of a number in shared memory.
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
"""How long a pin holds: ten times what the largest copy takes. The owner ignores pins that end
later than that: no reader writes them.
"""
LATE_SECONDS = 0.05
"""The most time that `Pinning.pin` may take. After more, for example if the process was stopped, it
counts on nothing.
"""
ROWS = 64
"""The most readers of one owner that can pin. Rows that are not written to take no memory."""
SHARE = 8
"""A reader pins at most 1/8 of the blocks that an owner can hand out, so that the owner has
others.
"""
_HOLD, _LATE, _SKEW = int(HOLD_SECONDS * 1e9), int(LATE_SECONDS * 1e9), 1_000_000
_SYSCALL, _REGISTER, _EXPEDITED = 324, 4, 2
"""membarrier(2) on x86-64: its number, and the commands `REGISTER_GLOBAL_EXPEDITED` and
`GLOBAL_EXPEDITED`. It takes a microsecond.
"""


def barrier(command: int = _EXPEDITED) -> bool:
    """A full memory barrier between this thread and the threads of all processes that have called
    `possible`: afterwards each sees what the others wrote before. False if the kernel does not have
    it."""
    return bool(_libc().syscall(_SYSCALL, command, 0, 0) == 0)


@cache
def _libc() -> ctypes.PyDLL:
    """libc, called with the interpreter's lock held: `CDLL` would release it, and wait for it
    afterwards.
    """
    return ctypes.PyDLL(None)


@cache
def possible() -> bool:
    """Whether this process can pin, and have its blocks pinned."""
    with suppress(OSError, AttributeError):
        return platform.machine() == "x86_64" and barrier(_REGISTER) and barrier()
    return False


class _Board:
    """One owner's pins, mapped: for each of `ROWS` readers the end of its last pin, and from the
    next page on its row, with the end of its pin on each block. All are nanoseconds of
    `time.monotonic_ns`."""

    def __init__(self, fd: int, blocks: int) -> None:
        self.blocks, self._memory = blocks, mmap.mmap(fd, size(blocks))
        self.last: npt.NDArray[np.int64] = np.frombuffer(self._memory, dtype="<i8", count=ROWS)
        self.ends = memoryview(self._memory)[: 8 * ROWS].cast("q")
        """The same as `last`; reading it takes a microsecond only."""
        rows = np.frombuffer(self._memory, dtype="<i8", offset=mmap.PAGESIZE, count=ROWS * blocks)
        self.until: npt.NDArray[np.int64] = rows.reshape(ROWS, blocks)


class _Row:
    """One reader's row of a board. It is locked for as long as this object or its process lives."""

    def __init__(self, fd: int, blocks: int) -> None:
        """Raises SegmentError if `fd` is no board for `blocks` blocks, or others have all rows;
        OSError.
        """
        if reason := misfit(fd, blocks):
            raise SegmentError(reason)
        # Opened anew, since everybody who was given this fd shares its open file, and so its locks.
        # The mapping keeps the new one open.
        own = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        try:
            self.number = next((row for row in range(ROWS) if _locked(own, row)), -1)
            if self.number < 0:
                raise SegmentError(f"{ROWS} others pin blocks there")
            self._board = _Board(own, blocks)
        finally:
            os.close(own)
        self.blocks, self._until, self._last = (
            blocks,
            self._board.until[self.number],
            self._board.last,
        )

    def write(self, blocks: UInt32s, until: int) -> None:
        self._until[blocks] = until
        self._last[self.number] = until

    def clear(self, blocks: UInt32s, until: int, last: int) -> None:
        """Remove the pins of these blocks that end at `until`. last: the end of the reader's last
        pin that remains.
        """
        self._until[blocks[self._until[blocks] == until]] = 0
        self._last[self.number] = last


def _locked(fd: int, row: int) -> bool:
    """Lock a row for this open file; False if another has it."""
    try:
        fcntl.fcntl(
            fd,
            fcntl.F_OFD_SETLK,
            struct.pack("hhxxxxqqixxxx", fcntl.F_WRLCK, os.SEEK_SET, row, 1, 0),
        )
    except (BlockingIOError, PermissionError):
        return False
    return True


class Pins:
    """An owner's side of pins. In its scheduler's thread. fd: for readers; stays this object's."""

    def __init__(self, generations: Generations) -> None:
        """Raises SegmentError if there is no memory or descriptor for it. Of no use unless
        `possible()`.
        """
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
        """Honour no new pins until `resume`. Returns whether somebody may count on a pin
        already.
        """
        self._generations.honours_pins(False)
        return not self._rests and max(self._board.ends) > time.monotonic_ns()

    def resume(self) -> None:
        """Honour pins again. Every block that was handed out since `halt` must be void by now."""
        if self._rests and time.monotonic_ns() >= self._rests:
            self._rests = 0
        if not self._rests:
            self._generations.honours_pins(True)

    def on(self, blocks: npt.NDArray[np.integer[Any]]) -> npt.NDArray[np.bool_] | None:
        """Which of these blocks are pinned; None if none is. Called after `halt`."""
        now, last = time.monotonic_ns(), self._board.last
        # Reads only these blocks' words, in the rows of readers with pins: a row may be long.
        until = self._board.until[np.flatnonzero(last > now)[:, None], blocks]
        pinned: npt.NDArray[np.bool_] = np.asarray(
            ((until > now) & (until <= now + _HOLD + _SKEW)).any(axis=0)
        )
        return pinned if pinned.any() else None

    def rest(self) -> None:
        """Honour and look for no pins for `HOLD_SECONDS`. Called when all free blocks are
        pinned.
        """
        self._rests = time.monotonic_ns() + _HOLD

    @contextmanager
    def none(self) -> Iterator[None]:
        """A context in which nobody counts on a pin. First waits until the present pins are over,
        at most `HOLD_SECONDS`.
        """
        self._settle()
        yield
        self._rests = 0
        self.resume()

    def close(self) -> None:
        """Honour no more pins. Waits until the present ones are over, at most `HOLD_SECONDS`. Call
        it once.
        """
        self._settle()
        os.close(self.fd)

    def _settle(self) -> None:
        self._generations.honours_pins(False)
        ends = time.monotonic_ns() + _HOLD
        while (left := min(ends, int(self._board.last.max())) - time.monotonic_ns()) > 0:
            time.sleep(min(0.005, left * 1e-9))


class Pinning:
    """A reader's side of pins. In its scheduler's thread."""

    def __init__(self, client: Client, tables: Tables) -> None:
        self._client, self._tables = client, tables
        self._rows: dict[bytes, _Row] = {}
        self._refused = Refusals()
        self._held: list[tuple[int, str, bytes, UInt32s]] = []
        """Pins: (end in ns, request's name, owner, blocks)."""

    def pin(self, name: str, chunks: Iterable[tuple[bytes, UInt32s, UInt64s]]) -> bool:
        """Pin all blocks of these chunks: (owner, blocks, published generations) each. name: for
        `release`.

        True if none of them will be handed out for `HOLD_SECONDS`, or until `release`; False if
        that is not certain: then this call leaves nothing pinned. Takes some microseconds, and a
        request to the server for each new owner. Never raises."""
        of: dict[bytes, list[tuple[UInt32s, UInt64s]]] = {}
        for instance, blocks, generations in chunks:
            of.setdefault(instance, []).append((blocks, generations))
        wanted = {
            instance: (*map(np.concatenate, zip(*its, strict=True)),)
            for instance, its in of.items()
        }
        rows = {instance: self._row(instance) for instance in wanted}
        began = time.monotonic_ns()
        self._held = [held for held in self._held if held[0] > began]
        for instance, (blocks, _) in wanted.items():
            row, view = rows[instance], self._tables.view(instance)
            mine = sum(len(its) for _, _, whose, its in self._held if whose == instance) + len(
                blocks
            )
            if (
                row is None
                or view is None
                or mine * SHARE > view.free
                or int(blocks.max()) >= row.blocks
            ):
                return False
        until = began + _HOLD
        for instance, (blocks, _) in wanted.items():
            row = rows[instance]
            assert row is not None
            row.write(blocks, until)
            self._held.append((until, name, instance, blocks))
        views = {instance: self._tables.view(instance) for instance in wanted} if barrier() else {}
        sure = all(
            (view := views.get(instance)) is not None and view.pinned(*wanted[instance])
            for instance in wanted
        )
        if sure and time.monotonic_ns() - began < _LATE:
            return True
        self.release([name])
        return False

    def release(self, names: Iterable[str]) -> None:
        """Remove the pins under these names. Blocks that are pinned under another name, too, stay
        pinned.
        """
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
        """This reader's row of the owner's board; None while it cannot have one."""
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
    """Bytes of the memory for the pins of `blocks` blocks."""
    return mmap.PAGESIZE * (1 + -(-ROWS * blocks * 8 // mmap.PAGESIZE))


def misfit(fd: int, blocks: int) -> str:
    """Why `fd` is not memory for the pins of `blocks` blocks; empty if it is. Raises OSError."""
    if reason := lacking(fd):
        return reason
    nbytes = os.fstat(fd).st_size
    return (
        ""
        if nbytes == size(blocks)
        else f"the memfd has {nbytes:,} B, but pins of {blocks:,} blocks take {size(blocks):,}"
    )
