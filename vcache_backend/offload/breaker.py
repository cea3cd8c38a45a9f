"""Decides when to leave a failing store alone, and when to try it again. Pure: the caller passes
the clock, and no thread runs."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Breaker:
    """A circuit breaker, open at first, with a trial due.

    `failures` failures in a row open the breaker. The next trials come after `retry_seconds`,
    doubling up to `longest_pause`. A successful trial closes the breaker. Any thread. `now`: a
    monotonic clock in seconds."""

    def __init__(
        self, failures: int, retry_seconds: float, longest_pause: float, now: Callable[[], float]
    ) -> None:
        self._failures = failures
        self._retry = retry_seconds
        self._longest = longest_pause
        self._now = now
        self._lock = threading.Lock()
        self._in_a_row = 0
        self._pause, self._due = retry_seconds, now()
        self.is_open = True
        self.opened = 0
        """How often failures have opened the breaker."""

    def succeeded(self) -> None:
        """Note a successful call. Only a trial closes an open breaker."""
        with self._lock:
            if not self.is_open:
                self._in_a_row = 0

    def failed(self) -> bool:
        """Note a failed or late call. Returns whether the call opened the breaker."""
        with self._lock:
            self._in_a_row += 1
            if self.is_open or self._in_a_row < self._failures:
                return False
            self.opened += 1
            self._open()
            self._wait()
            return True

    def lost(self) -> None:
        """Open the breaker because the store's process is gone, with a trial due at once."""
        with self._lock:
            if not self.is_open:
                self._open()

    def trial_due(self) -> bool:
        with self._lock:
            return self.is_open and self._now() >= self._due

    def tried(self, held: bool) -> None:
        """Note the end of a trial: close the breaker, or wait longer for the next trial."""
        with self._lock:
            if held:
                self.is_open = False
                self._in_a_row = 0
            else:
                self._wait()

    def _open(self) -> None:
        self.is_open = True
        self._pause = self._retry
        self._due = self._now()

    def _wait(self) -> None:
        self._due = self._now() + self._pause
        self._pause = min(2 * self._pause, self._longest)
