"""Threads for calls that take long: whoever has one made neither waits for it nor is held up by one that hangs."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable

log = logging.getLogger(__name__)


class Workers:
    """`count` daemon threads and at most `backlog` calls that wait for one. Started with the first calls; not before a fork.

    begin: what each thread does first.
    """

    def __init__(self, name: str, count: int, backlog: int, begin: Callable[[], None] = lambda: None) -> None:
        self._name, self._count, self._backlog, self._begin = name, count, backlog, begin
        self._queue: deque[Callable[[], object]] = deque()
        self._changed = threading.Condition()
        self._threads: list[threading.Thread] = []
        self._busy = 0
        self._stopping = False

    def submit(self, call: Callable[[], object]) -> bool:
        """Let a thread make this call; False if too many wait already, or after `close`. Never blocks."""
        with self._changed:
            if self._stopping or len(self._queue) >= self._backlog:
                return False
            self._queue.append(call)
            if len(self._threads) < self._count and self._busy + len(self._queue) > len(self._threads):
                thread = threading.Thread(target=self._run, name=f"{self._name}-{len(self._threads)}", daemon=True)
                self._threads.append(thread)
                thread.start()
            self._changed.notify()
        return True

    def close(self, seconds: float) -> bool:
        """Drop what waits, and wait for what runs; False if something still does after so many seconds."""
        with self._changed:
            self._stopping = True
            self._queue.clear()
            self._changed.notify_all()
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
                call = self._queue.popleft()
                self._busy += 1
            try:
                call()
            except Exception:  # the thread's last line of defence: what comes next is not to suffer
                log.exception("%s: a call failed", self._name)
            with self._changed:
                self._busy -= 1
