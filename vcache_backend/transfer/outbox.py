"""Work of a background thread: messages to the server, and what follows a copy or a step."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from math import inf
from queue import Empty, SimpleQueue

from vcache_backend import threads
from vcache_backend.errors import VCacheError

log = logging.getLogger(__name__)

LATER_SECONDS = 0.02
"""How long messages wait that are not urgent."""

Wait = Callable[[float], bool]
"""Waits for some seconds at most. Returns whether the awaited event has come."""


class Outbox:
    """A thread that works for its owner: `after` queues a call, and never waits. All methods may be
    called from any thread."""

    def __init__(self, failed: threads.Count | None = None) -> None:
        """failed: counts an exception of the thread, see `threads.survives`."""
        self._jobs = deque[tuple[Wait, Callable[[], object], Callable[[Exception], object]]]()
        """What `after` was given."""
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._woken = SimpleQueue[None]()
        """Wakes the thread. A condition takes the caller ten times as long."""
        self._busy, self._due = False, inf
        """Whether the thread works, and when it is to begin again (time.monotonic)."""
        self.stopping = False
        """Whether `close` was called: the thread ends after its current call."""
        self._thread = threads.start(self._turn, "vcache-outbox", failed)

    def __len__(self) -> int:
        """How many calls of `after` are still to be made."""
        return len(self._jobs)

    def after(
        self,
        wait: Wait,
        act: Callable[[], object],
        within: float = 0.0,
        failed: Callable[[Exception], object] = lambda error: None,
    ) -> None:
        """Call `act` after `wait` has returned True, and after the earlier calls of this method.
        If `wait` or `act` raises, `failed` is called. A VCacheError is logged for debugging.

        within: how many seconds the thread may leave it, to do it together with others. Each turn
        of the thread takes the interpreter from the present step."""
        with self._lock:  # the condition's own `with` is two calls more
            self._jobs.append((wait, act, failed))
            self._begin_within(within)

    def flush(self, timeout: float) -> bool:
        """Wait until all work is done or given up; False after `timeout` seconds."""
        with self._changed:
            if self.stopping:
                return not self._jobs
            self._begin_within(0.0)
            return self._changed.wait_for(lambda: not (self._jobs or self._busy), timeout)

    def close(self, timeout: float = 5.0) -> None:
        """Do the queued work, for at most `timeout` seconds, and end the thread after its current
        call. Idempotent."""
        try:
            self.flush(timeout)
        finally:
            self.stopping = True
            self._woken.put(None)
            self._thread.join(timeout)

    # ---- the thread

    def _turn(self) -> bool:
        """Wait for work, and do it up to the first job whose event has not come. Returns whether to
        end. Whatever raises is off the queue."""
        with self._changed:
            self._busy = False
            self._changed.notify_all()
        while not self.stopping and (left := self._due - time.monotonic()) > 0:
            with suppress(Empty):
                self._woken.get(timeout=None if left == inf else left)
        if self.stopping:
            return True
        with self._changed:
            self._busy, self._due = bool(self._jobs), inf
        try:
            for _ in range(len(self._jobs)):
                if not self._do_first():
                    break
        finally:
            with self._changed:
                self._due = 0.0 if self._jobs else self._due
        return False

    def _begin_within(self, seconds: float) -> None:
        """Wake the thread only if it would come later."""
        due = time.monotonic() + seconds
        if due < self._due:
            self._due = due
            self._woken.put(None)

    def _do_first(self) -> bool:
        """Do the first job. False if its event has not come: then other work gets its turn."""
        (wait, act, failed), over = self._jobs[0], True
        try:
            over = not self.stopping and wait(0.05)
            if over:
                act()
        except Exception as error:
            failed(error)
            if not isinstance(error, VCacheError):
                raise
            log.debug("not done: %s", error)
        finally:
            if over:
                with self._changed:
                    self._jobs.popleft()
        return over


def at_once(seconds: float) -> bool:
    """For `Outbox.after`: wait for nothing."""
    return True


def polled(reached: Callable[[], bool], pause: float) -> Wait:
    """Wait for `reached` by calling it every `pause` seconds."""

    def wait(seconds: float) -> bool:
        until = time.monotonic() + seconds
        while not reached():
            if time.monotonic() > until:
                return False
            time.sleep(pause)
        return True

    return wait
