"""Tells vLLM's scheduler that loads are over, before a step's report says so.

A worker's report comes with the output of a step, and by then vLLM has planned the next step. So
each worker also writes the number of a successful load into memory that the scheduler reads before
it plans. A worker still reports every load, which is enough if the memory does not work."""

from __future__ import annotations

import mmap
import os
from contextlib import ExitStack, suppress

from vcache_backend.vram_pool.host_memory import allocate

SIZE = 512
"""Words of a worker's ring. A load is in word `number % SIZE`. If a later load has overwritten the
word, the step's report tells of the load."""
WORD_BYTES = 8


class LoadEnds:
    """The scheduler's end: a ring of each worker. Runs in the scheduler's thread.

    address: a path to the memory for workers of this host, and the path's link target."""

    def __init__(self, workers: int) -> None:
        self.address = "", ""
        self._rings: list[memoryview] = []
        self._undo = ExitStack()
        nbytes = workers * SIZE * WORD_BYTES
        with suppress(OSError), ExitStack() as undo:
            fd = allocate(f"ends-{os.urandom(8).hex()}", nbytes)
            undo.callback(os.close, fd)
            link = os.readlink(f"/proc/self/fd/{fd}")
            words = memoryview(mmap.mmap(fd, nbytes)).cast("Q")
            self._rings = [words[at : at + SIZE] for at in range(0, len(words), SIZE)]
            self.address = f"/proc/{os.getpid()}/fd/{fd}", link
            self._undo = undo.pop_all()

    def in_all(self, number: int) -> bool:
        """Whether the load of this number has succeeded in all workers."""
        at = number % SIZE
        return bool(self._rings) and all(ring[at] == number for ring in self._rings)

    def close(self) -> None:
        """Let no other worker open the memory. Idempotent."""
        self._undo.close()


class EndRing:
    """A worker's ring. Runs in the worker's main thread."""

    def __init__(self, worker: int) -> None:
        """worker: the worker's number."""
        self._first = worker * SIZE
        self._link = ""
        self._ring: memoryview | None = None

    def open(self, address: tuple[str, str]) -> None:
        """Map the scheduler's memory, once. Does nothing without access, for example on another
        host or in another pid namespace, where the path may lead to any file."""
        path, link = address
        if link == self._link:
            return
        self._link = link
        self._ring = None
        with suppress(OSError, ValueError), ExitStack() as undo:
            if os.readlink(path) != link:
                return
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            undo.callback(os.close, fd)
            if os.readlink(f"/proc/self/fd/{fd}") == link:
                words = memoryview(mmap.mmap(fd, 0)).cast("Q")
                self._ring = words[self._first : self._first + SIZE]

    def put(self, number: int) -> None:
        """Note that a load has succeeded."""
        if self._ring:
            self._ring[number % SIZE] = number
