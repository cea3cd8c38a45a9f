"""Sees to it that the memory of an owner that has ended is mapped here no longer than the copies under way need."""

from __future__ import annotations

import logging
import os
import select
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Generic, Protocol, TypeVar

log = logging.getLogger(__name__)

GRACE_SECONDS = 0.25
"""From the end of an owner until nothing of it is read any more: what a step counts on, which may not fail, is launched by then."""
LOOK_SECONDS = 0.5
"""How often to look whether an owner that lives has given its memory up."""


class Borrowed(Protocol):
    """What is mapped here of one owner's memory."""

    @property
    def given_up(self) -> bool:
        """Whether its owner, which may live, does not want it read any more."""
        ...

    def forbid(self) -> None:
        """No new copies out of it."""
        ...

    def unmap(self) -> bool:
        """Unless a copy is under way, which False says. After `forbid`; may wait for the device."""
        ...


B = TypeVar("B", bound=Borrowed)


class Caretaker(Generic[B]):
    """A thread that waits for the ends of processes, and unmaps what was theirs once nobody reads it.

    on_end: called in that thread for each whose owner has ended, when it is forbidden and before it is unmapped.
    """

    def __init__(self, on_end: Callable[[B], None]) -> None:
        self._on_end = on_end
        self._lock = threading.Lock()
        """Nobody waits for anything under it."""
        self._pidfds: dict[int, B] = {}
        self._going: list[B] = []
        self._closing, self._hurry = False, threading.Event()
        self._events = select.epoll()
        self._bell: int | None = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._events.register(self._bell, select.EPOLLIN)
        self._thread = threading.Thread(target=self._run, name="vcache-neighbours", daemon=True)
        self._thread.start()

    def admit(self, borrowed: B, pidfds: list[int]) -> bool:
        """Take care of it, and of these pidfds, from now on; False, and they stay the caller's, after `close`. Raises OSError likewise."""
        with self._lock, ExitStack() as undo:
            if self._closing:
                return False
            for pidfd in pidfds:
                self._events.register(pidfd, select.EPOLLIN)
                # Closing alone would leave it in there: whoever sent it holds the same open file.
                undo.callback(self._events.unregister, pidfd)
            undo.pop_all()
            self._pidfds |= dict.fromkeys(pidfds, borrowed)
        self.wake()
        return True

    def discard(self, borrowed: B) -> None:
        """It was never admitted, and nobody reads it: unmap it, in the thread as long as there is one."""
        borrowed.forbid()
        with self._lock:
            running = self._bell is not None
            if running:
                self._going.append(borrowed)
        if running:
            self.wake()
        else:
            borrowed.unmap()

    def wake(self) -> None:
        """Something was left, or something is to be looked at. Any thread."""
        with self._lock:
            if self._bell is not None:
                os.eventfd_write(self._bell, 1)

    @property
    def closed(self) -> bool:
        """Whether nothing is admitted any more."""
        return self._closing

    def close(self, seconds: float) -> None:
        """Forbid and unmap all, each when its last copy has left, and end the thread; wait so long for that. Idempotent."""
        with self._lock:
            self._closing = True
        self._hurry.set()
        self.wake()
        self._thread.join(seconds)
        if self._thread.is_alive():
            log.warning("KV caches of other instances stay mapped until the copies out of them are over")

    # ---- the thread

    def _run(self) -> None:
        try:
            while self._pidfds or self._going or not self._closing:
                self._turn()
        except Exception:  # the thread's last line of defence
            log.exception("KV caches of other instances are not read any more: their ends would not be noticed")
        finally:
            with self._lock:
                self._closing = True
                bell, self._bell = self._bell, None
            for each in set(self._pidfds.values()):
                self._end(each)
            for each in self._going:
                each.unmap()
            self._events.close()
            if bell is not None:
                os.close(bell)

    def _turn(self) -> None:
        ready = [fd for fd, _ in self._events.poll(LOOK_SECONDS if self._pidfds else None)]
        if self._bell in ready:
            with suppress(BlockingIOError):
                os.eventfd_read(self._bell)
        with self._lock:
            # Before any is closed: its number may be another's at once.
            ended = {self._pidfds[fd] for fd in ready if fd in self._pidfds}
            here = set(self._pidfds.values())
        if ended and not self._closing:
            self._linger()
        for each in here:
            if each in ended or self._closing or each.given_up:
                self._end(each)
        with self._lock:
            going, self._going = self._going, []
        staying = [each for each in going if not each.unmap()]
        with self._lock:
            self._going += staying

    def _linger(self) -> None:
        self._hurry.wait(GRACE_SECONDS)

    def _end(self, borrowed: B) -> None:
        borrowed.forbid()
        with self._lock:
            for pidfd in [pidfd for pidfd, of in self._pidfds.items() if of is borrowed]:
                del self._pidfds[pidfd]
                self._events.unregister(pidfd)
                os.close(pidfd)
            self._going.append(borrowed)
        self._on_end(borrowed)
