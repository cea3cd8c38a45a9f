"""Threads for calls that may take long or hang, so that the caller does not wait."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from queue import SimpleQueue
from threading import Thread

log = logging.getLogger(__name__)


class Workers:
    """`count` threads that make calls in order: daemons, unlike an executor's threads, so the
    process can end while a call hangs."""

    def __init__(self, name: str, count: int) -> None:
        self._queue: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        names = [f"{name}-{number}" for number in range(count)]
        self._threads = [Thread(target=self._run, name=name, daemon=True) for name in names]
        for thread in self._threads:
            thread.start()

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

    def _run(self) -> None:
        while (call := self._queue.get()) is not None:
            try:
                call()
            except Exception:  # the thread's last line of defence, for later calls
                log.exception("a call of the offload tier's failed")
