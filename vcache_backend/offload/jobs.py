"""Threads for calls that may hang: whoever waits for one has a deadline, and the thread is the only one that is lost."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Job(Generic[T]):
    """A call that another thread makes. `result` once it is done; `error` instead where it raised."""

    def __init__(self, call: Callable[[], T]) -> None:
        self._call = call
        self._done = threading.Event()
        self.result: T | None = None
        self.error: Exception | None = None

    @property
    def done(self) -> bool:
        return self._done.is_set()

    def wait(self, seconds: float) -> bool:
        """Is it done within so many seconds?"""
        return self._done.wait(seconds)

    def run(self) -> None:
        try:
            self.result = self._call()
        except Exception as error:  # noqa: BLE001 - it is the asking thread's to deal with
            self.error = error
        finally:
            self._done.set()


class Workers:
    """`count` daemon threads and at most `backlog` calls that wait for one. Started with the first call; not before a fork.

    begin: what each thread does first.
    """

    def __init__(self, name: str, count: int, backlog: int, begin: Callable[[], None] = lambda: None) -> None:
        self._name, self._count, self._backlog, self._begin = name, count, backlog, begin
        self._queue: deque[Job[object]] = deque()
        self._changed = threading.Condition()
        self._threads: list[threading.Thread] = []
        self._busy = 0
        self._stopping = False

    def submit(self, call: Callable[[], T]) -> Job[T] | None:
        """Let a thread make this call; None if too many wait already, or after `close`. Never blocks."""
        job = Job(call)
        with self._changed:
            if self._stopping or len(self._queue) >= self._backlog:
                return None
            self._queue.append(job)  # type: ignore[arg-type]
            if len(self._threads) < self._count and self._busy + len(self._queue) > len(self._threads):
                thread = threading.Thread(target=self._run, name=f"{self._name}-{len(self._threads)}", daemon=True)
                self._threads.append(thread)
                thread.start()
            self._changed.notify()
        return job

    def close(self, seconds: float) -> bool:
        """Drop what waits, and wait for what runs; False if something still does after so many seconds."""
        with self._changed:
            self._stopping = True
            dropped, self._queue = list(self._queue), deque()
            self._changed.notify_all()
        for job in dropped:
            job.error = RuntimeError("closed")
            job._done.set()
        deadline = time.monotonic() + seconds
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(deadline - time.monotonic(), 0.0))
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        self._begin()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._stopping)
                if not self._queue:
                    return
                job = self._queue.popleft()
                self._busy += 1
            job.run()
            with self._changed:
                self._busy -= 1
