"""Threads for calls that may take long or hang, so that the caller does not wait."""

from __future__ import annotations

import time
from collections.abc import Callable
from queue import SimpleQueue

from vcache_backend import threads


class Workers:
    """`count` threads that make calls in order: daemons, unlike an executor's threads, so the
    process can end while a call hangs."""

    def __init__(self, name: str, count: int) -> None:
        self._queue: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        names = [f"{name}-{number}" for number in range(count)]
        self._threads = [threads.start(self._turn, name) for name in names]

    def submit(self, call: Callable[[], object]) -> None:
        """Queue a call for a thread. Never blocks. Does nothing after `close`."""
        self._queue.put(call)

    def close(self, seconds: float) -> None:
        """Wait up to `seconds` for the submitted calls."""
        for _ in self._threads:
            self._queue.put(None)
        deadline = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(deadline - time.monotonic(), 0.0))

    def _turn(self) -> bool:
        call = self._queue.get()
        if call is not None:
            call()
        return call is None
