"""Tells vLLM's scheduler that loads are over, before a step's report says so.

A worker's report comes with the output of a step, and by then vLLM has planned the next step. So
each worker also writes the number of a successful load into memory that the scheduler reads before
it plans. A worker still reports every load, which is enough if the memory does not work."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable
from contextlib import ExitStack, suppress

from vcache_backend.vram_pool.host_segment import allocate

from .metadata import LoadSpec

SIZE = 512
"""Words of a worker's ring. A load is in word `number % SIZE`. If a later load has overwritten the
word, the step's report tells of the load."""
WORD_BYTES = 8


class LoadEnds:
    """The loads for which vLLM waits, and a ring of each worker. Runs in the scheduler's thread.

    vLLM asserts that a reported request waits for its load or has ended. So vLLM must hear of each
    load once: from `over`, or from a report that `reported` passes on. Every worker reports each
    load once, and a request loads again only after vLLM has heard of its last load. So it is enough
    to count the reports to drop.

    address: a path to the memory for workers of this host, and the path's link target. waiting: by
    request, the number of the load for which vLLM waits."""

    def __init__(self, workers: int) -> None:
        self.address = "", ""
        self.waiting: dict[str, int] = {}
        self._dropped: dict[str, int] = {}
        """By request, how many reports of loads that `over` returned will still come."""
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

    def expect(self, loads: Iterable[LoadSpec]) -> None:
        """Note the loads of a step."""
        self.waiting |= {load.request_id: load.number for load in loads if load.number}

    def reported(self, requests: Iterable[str]) -> set[str]:
        """Return the requests, all reported by all workers, of which vLLM has not heard."""
        new = set(requests)
        for request_id in new & self._dropped.keys():
            new.remove(request_id)
            self._dropped[request_id] -= 1
            if not self._dropped[request_id]:
                del self._dropped[request_id]
        for request_id in new:
            self.waiting.pop(request_id, None)
        return new

    def over(self) -> set[str]:
        """Return the requests whose load has succeeded in all workers, and drop their reports."""
        done = {request_id for request_id, number in self.waiting.items() if self._in_all(number)}
        for request_id in done:
            del self.waiting[request_id]
            self._dropped[request_id] = self._dropped.get(request_id, 0) + 1
        return done

    def close(self) -> None:
        """Let no other worker open the memory. Idempotent."""
        self._undo.close()

    def _in_all(self, number: int) -> bool:
        at = number % SIZE
        return bool(self._rings) and all(ring[at] == number for ring in self._rings)


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
