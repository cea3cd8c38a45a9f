"""Tells vLLM's scheduler that loads are over: once, and before a step's report says so.

A worker's report comes with the output of a step, and by then vLLM has planned the next step. So
each worker also writes the number of a successful load into memory that the scheduler reads before
it plans. A worker still reports every load, which is enough if the memory does not work."""

from __future__ import annotations

import mmap
import os
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from typing import Any

from vcache_backend.vram_pool.host_memory import allocate

from .metadata import LoadSpec, StepMetadata

SIZE = 512
"""Words of a worker's ring, each of 64 bits. A load is in word `number % SIZE`. If a later load has
overwritten the word, the step's report tells of the load."""


class LoadEnds:
    """The scheduler's end: a ring of each worker. Runs in the scheduler's thread.

    address: a path to the memory for workers of this host, and the path's link target."""

    def __init__(self, workers: int) -> None:
        self.address = "", ""
        self._rings: list[memoryview] = []
        self._undo = ExitStack()
        nbytes = workers * SIZE * 8
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
        return {ring[at] for ring in self._rings} == {number}

    def close(self) -> None:
        """Let no other worker open the memory. Idempotent."""
        self._undo.close()


class EndRing:
    """A worker's ring. Runs in the worker's main thread, but for `put`."""

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
        """Note that a load has succeeded. Any thread."""
        if self._ring:
            self._ring[number % SIZE] = number


class AwaitedLoads:
    """The loads for which vLLM's scheduler waits, ours and numbered ones of another connector, and
    what vLLM has heard of them. In the scheduler's thread.

    vLLM asserts that a reported request waits for its load or has ended. So it must hear of each
    load once: from the workers' reports, or before (`tell`). Each worker reports each load once,
    and a request loads again only after vLLM has heard of its last load. So it is enough to count
    the reports to drop. Beside another connector the workers report by request, so that there a
    request loads again only once nothing of it is to be reported (`unreported`)."""

    def __init__(self) -> None:
        self.waiting: dict[str, int] = {}
        """By request, the number of its load; 0 if the load is to be reported as failed."""
        self._unsent = set[str]()
        """Requests whose loads the workers do not know yet."""
        self._told: dict[str, int] = {}
        """By request, how many reports of loads of which vLLM has heard will still come."""
        self._settled: Any = None
        """The last output that `settle` saw."""

    def expect(self, request: Any, tokens: int) -> None:
        """Note that vLLM waits for a load of this request, of so many tokens; 0: for none."""
        if tokens:
            self.waiting[request.request_id] = 0
            self._unsent.add(request.request_id)

    def sent(self, loads: Iterable[LoadSpec]) -> None:
        """Note that the workers get these loads."""
        for load in loads:
            self.waiting[load.request_id] = load.number
            self._unsent.discard(load.request_id)

    def unreported(self, request_id: str) -> bool:
        """Whether workers are still to report a load of this request of which vLLM has heard."""
        return request_id in self._told

    def stop(self) -> StepMetadata:
        """The message to the workers after the scheduler's half has gone out of use: end all
        loads."""
        loads = [LoadSpec(request_id) for request_id in self._unsent]
        self._unsent.clear()
        return StepMetadata(loads, stop=True)

    def settle(self, output: Any) -> None:
        """Take loads of which vLLM has heard out of `output.finished_recving`: the loads that all
        workers report with a step, also another connector's. Later calls with the same output do
        nothing."""
        if output is self._settled or not output.finished_recving:
            return
        self._settled = output
        kept = set[str]()
        for request_id in output.finished_recving:
            told = self._told.pop(request_id, 0)
            if told > 1:
                self._told[request_id] = told - 1
            elif not told:
                self.waiting.pop(request_id, None)
                kept.add(request_id)
        output.finished_recving = kept

    def tell(self, output: Any, numbers: Callable[[int], bool]) -> None:
        """Add the loads that have succeeded to `output.finished_recving`, before the workers report
        them. numbers: whether the load of this number has succeeded in all workers."""
        done = [request for request, load in self.waiting.items() if load and numbers(load)]
        for request_id in done:
            del self.waiting[request_id]
            self._told[request_id] = self._told.get(request_id, 0) + 1
        output.finished_recving = {*(output.finished_recving or ()), *done}


class WorkerLoads:
    """A worker's loads whose end the scheduler has not heard. In the worker's main thread."""

    def __init__(self) -> None:
        self._running = Counter[str]()
        """By request: a request may begin a load before the end of its last one is reported."""

    def expect(self, loads: Iterable[LoadSpec]) -> None:
        """Note the loads of a step: the end of each is reported in any case, since vLLM waits."""
        self._running.update(load.request_id for load in loads)

    def over(self, requests: Iterable[str]) -> None:
        """Note that a load of each of these requests is reported."""
        self._running.subtract(requests)
        self._running = +self._running

    def fail(self) -> set[str]:
        """Report a load of each request as failed, in this step."""
        failed = set(self._running)
        self.over(failed)
        return failed
