"""Unmaps the memory of owners that have ended as soon as the copies that read it are over."""

from __future__ import annotations

import logging
import os
import select
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Generic, Protocol, TypeVar

log = logging.getLogger(__name__)

LOOK_SECONDS = 0.5
"""How often to check whether a living owner has given its memory up."""


class Borrowed(Protocol):
    """One owner's memory that is mapped here."""

    @property
    def given_up(self) -> bool:
        """Whether its owner, which may still live, does not want it read any more."""
        ...

    def forbid(self) -> None:
        """Allow no new copies out of it."""
        ...

    def unmap(self) -> bool:
        """Unmap it; False, and nothing happens, while a copy is under way. Called after `forbid`;
        may wait for the device.
        """
        ...


B = TypeVar("B", bound=Borrowed)


class Unmapper(Generic[B]):
    """A thread that waits for the ends of owners' processes, and unmaps their memory once no copy
    reads it. Any thread.

    on_end: called in that thread for each memory that is forbidden, before it is unmapped: its
    owner has ended or given it up, or `close` was called."""

    def __init__(self, on_end: Callable[[B], None]) -> None:
        self._on_end = on_end
        self._lock = threading.Lock()
        """Held for moments only: nothing waits under it."""
        self._pidfds: dict[int, B] = {}
        self._going: list[B] = []
        self._closing = False
        self._events = select.epoll()
        self._wake_fd: int | None = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._events.register(self._wake_fd, select.EPOLLIN)
        self._thread = threading.Thread(target=self._run, name="vcache-neighbours", daemon=True)
        self._thread.start()

    def admit(self, borrowed: B, pidfds: list[int]) -> bool:
        """Watch these processes for `borrowed`, and own the pidfds from now on. False after
        `close`; then, and after an OSError, both stay the caller's."""
        with self._lock, ExitStack() as undo:
            if self._closing:
                return False
            for pidfd in pidfds:
                self._events.register(pidfd, select.EPOLLIN)
                # Closing a pidfd does not unregister it, since its sender holds the same open file.
                undo.callback(self._events.unregister, pidfd)
            undo.pop_all()
            self._pidfds |= dict.fromkeys(pidfds, borrowed)
        self.wake()
        return True

    def discard(self, borrowed: B) -> None:
        """Unmap what was never admitted and nobody reads: in the thread, or in this one if the
        thread has ended.
        """
        borrowed.forbid()
        with self._lock:
            running = self._wake_fd is not None
            if running:
                self._going.append(borrowed)
        if running:
            self.wake()
        else:
            borrowed.unmap()

    def wake(self) -> None:
        """Have the thread look again: a copy has left, or there is something new. Any thread."""
        with self._lock:
            if self._wake_fd is not None:
                os.eventfd_write(self._wake_fd, 1)

    @property
    def closed(self) -> bool:
        """Whether `admit` refuses: after `close`, or if the thread has failed."""
        return self._closing

    def close(self, seconds: float) -> None:
        """Forbid all memory, unmap each once its last copy is over, and end the thread. Waits at
        most `seconds`. Idempotent.
        """
        with self._lock:
            self._closing = True
        self.wake()
        self._thread.join(seconds)
        if self._thread.is_alive():
            log.warning(
                "KV caches of other instances stay mapped until the copies out of them are over"
            )

    # ---- the thread

    def _run(self) -> None:
        try:
            while self._pidfds or self._going or not self._closing:
                self._turn()
        except Exception:  # the thread's last line of defence
            log.exception(
                "KV caches of other instances are not read any more: their ends would not be noticed"
            )
        finally:
            with self._lock:
                self._closing = True
                wake_fd, self._wake_fd = self._wake_fd, None
            for each in set(self._pidfds.values()):
                self._end(each)
            for each in self._going:
                each.unmap()
            self._events.close()
            if wake_fd is not None:
                os.close(wake_fd)

    def _turn(self) -> None:
        ready = [fd for fd, _ in self._events.poll(LOOK_SECONDS if self._pidfds else None)]
        if self._wake_fd in ready:
            with suppress(BlockingIOError):
                os.eventfd_read(self._wake_fd)
        with self._lock:
            # Looked up before any pidfd is closed, since its number may be used again at once.
            ended = {self._pidfds[fd] for fd in ready if fd in self._pidfds}
            here = set(self._pidfds.values())
        for each in here:
            if each in ended or self._closing or each.given_up:
                self._end(each)
        with self._lock:
            going, self._going = self._going, []
        staying = [each for each in going if not each.unmap()]
        with self._lock:
            self._going += staying

    def _end(self, borrowed: B) -> None:
        borrowed.forbid()
        with self._lock:
            for pidfd in [pidfd for pidfd, of in self._pidfds.items() if of is borrowed]:
                del self._pidfds[pidfd]
                self._events.unregister(pidfd)
                os.close(pidfd)
            self._going.append(borrowed)
        self._on_end(borrowed)
