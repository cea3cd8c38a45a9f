"""Work of a background thread: messages to the server, and what follows a copy or a step."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from math import inf
from typing import NamedTuple

from vcache_backend import threads
from vcache_backend.errors import ServerUnavailable, VCacheError
from vcache_backend.protocol.client import Client

log = logging.getLogger(__name__)

LATER_SECONDS = 0.02
"""How long messages wait that are not urgent."""

Wait = Callable[[float], bool]
"""Waits for some seconds at most. Returns whether the awaited event has come."""


class _Job(NamedTuple):
    """See `Outbox.after`."""

    wait: Wait
    act: Callable[[], object]
    failed: Callable[[], object]


class Outbox:
    """A thread that works for its owner: `send` and `after` queue calls, and never wait. All
    methods may be called from any thread."""

    def __init__(self, client: Client, failed: threads.Count | None = None) -> None:
        """failed: counts an exception of the thread, see `threads.survives`."""
        self._client = client
        # Reservations of dropped messages end by themselves.
        self._messages: deque[tuple[Callable[[], object], bool]] = deque(maxlen=4096)
        """Calls of the client, and whether to repeat each until the server has answered."""
        self._jobs: deque[_Job] = deque()
        self._changed = threading.Condition()
        self._busy, self._due = False, inf
        """Whether the thread works, and when it is to begin again (time.monotonic)."""
        self.stopping = False
        """Whether `close` was called: the thread ends after its current call."""
        self._thread = threads.start(self._turn, "vcache-outbox", failed)

    def __len__(self) -> int:
        """How many calls of `after` are still to be made."""
        return len(self._jobs)

    def send(self, call: Callable[[], object], again: bool = True) -> None:
        """Call the client while a connection exists. again: repeat the call until the server has
        answered. Other errors are logged for debugging."""
        with self._changed:
            self._messages.append((call, again))
            self._begin_within(0.0)

    def after(
        self,
        wait: Wait,
        act: Callable[[], object],
        within: float = 0.0,
        failed: Callable[[], object] = lambda: None,
    ) -> None:
        """Call `act` after `wait` has returned True, and after the earlier calls of this method.
        If `wait` or `act` raises, `failed` is called. A VCacheError is logged for debugging.

        within: how many seconds the thread may leave it, to do it together with others. Each turn
        of the thread takes the interpreter from the present step."""
        with self._changed:
            self._jobs.append(_Job(wait, act, failed))
            self._begin_within(within)

    def flush(self, timeout: float) -> bool:
        """Wait until all work is done or given up; False after `timeout` seconds. Messages that
        wait for a connection do not count."""
        with self._changed:
            if self.stopping:
                return not self._has_work()
            self._begin_within(0.0)
            return self._changed.wait_for(lambda: not (self._has_work() or self._busy), timeout)

    def close(self, timeout: float = 5.0) -> None:
        """Do the queued work, for at most `timeout` seconds, and end the thread after its current
        call. Idempotent."""
        try:
            self.flush(timeout)
        finally:
            with self._changed:
                self.stopping = True
                self._changed.notify_all()
            self._thread.join(timeout)

    # ---- the thread

    def _turn(self) -> bool:
        """Wait for work, and do it. Returns whether to end. Whatever raises is off its queue."""
        with self._changed:
            self._busy = False
            self._changed.notify_all()
            while not self.stopping and (left := self._due - time.monotonic()) > 0:
                if not self._changed.wait(min(left, 0.2)) and self._messages:
                    # The connection may be back.
                    break
            if self.stopping:
                return True
            self._busy, self._due = self._has_work(), inf
        try:
            self._send_all()
            self._do_all()
        finally:
            with self._changed:
                self._due = 0.0 if self._jobs else self._due
        return False

    def _begin_within(self, seconds: float) -> None:
        """Wake the thread only if it would come later."""
        due = time.monotonic() + seconds
        if due < self._due:
            self._due = due
            self._changed.notify_all()

    def _has_work(self) -> bool:
        return bool(self._jobs) or (bool(self._messages) and self._client.connected)

    def _send_all(self) -> None:
        """Send the messages queued so far."""
        for _ in range(len(self._messages)):
            if self.stopping or not self._client.connected:
                return
            call, repeats = self._messages.popleft()
            try:
                call()
            except VCacheError as error:
                log.debug("the server was not told something: %s", error)
                if repeats and isinstance(error, ServerUnavailable):
                    self._messages.appendleft((call, repeats))
                    return

    def _do_all(self) -> None:
        """Do the work queued so far, up to the first job whose event has not come."""
        for _ in range(len(self._jobs)):
            job, over = self._jobs[0], True
            try:
                # Then other work gets its turn.
                over = not self.stopping and job.wait(0.05)
                if not over:
                    return
                job.act()
            except Exception as error:
                job.failed()
                if not isinstance(error, VCacheError):
                    raise
                log.debug("not done: %s", error)
            finally:
                if over:
                    with self._changed:
                        self._jobs.popleft()


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
