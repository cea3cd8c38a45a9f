"""Unmaps the memory of owners that have ended, after the last copy out of it."""

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
    """The memory of one owner, mapped here."""

    @property
    def given_up(self) -> bool:
        """Whether the owner, which may still live, has given this memory up."""
        ...

    def forbid(self) -> None:
        """Forbid new copies out of this memory."""
        ...

    def unmap(self) -> bool:
        """Unmap the memory, after `forbid`. False, and nothing is unmapped, while a copy runs. May
        wait for the device."""
        ...


B = TypeVar("B", bound=Borrowed)


class Unmapper(Generic[B]):
    """A thread that waits for owners' processes to end, and unmaps their memory after the last
    copy. Any thread may call the methods.

    on_end: called in the unmapper's thread for each memory after `forbid` and before `unmap`,
    because the owner has ended or given the memory up, or because of `close`."""

    def __init__(self, on_end: Callable[[B], None]) -> None:
        self._on_end = on_end
        self._lock = threading.Lock()
        """Held for moments only: no thread waits for anything else while it holds this lock."""
        self._pidfds: dict[int, B] = {}
        self._going: list[B] = []
        self._closing = False
        self._events = select.epoll()
        self._wake_fd: int | None = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._events.register(self._wake_fd, select.EPOLLIN)
        self._thread = threading.Thread(target=self._run, name="vcache-neighbours", daemon=True)
        self._thread.start()

    def admit(self, borrowed: B, pidfds: list[int]) -> bool:
        """Watch these processes for `borrowed`, and take over the pidfds. After `close` it returns
        False, and after an OSError it raises: both then stay the caller's."""
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
        """Unmap memory that was never admitted and that no copy reads: in the unmapper's thread, or
        in the caller's if that thread has ended."""
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
        """Make the thread look again, after a copy left or memory was added. Any thread."""
        with self._lock:
            if self._wake_fd is not None:
                os.eventfd_write(self._wake_fd, 1)

    @property
    def closed(self) -> bool:
        """Whether `admit` refuses: after `close`, or if the thread has failed."""
        return self._closing

    def close(self, seconds: float) -> None:
        """Forbid all copies, unmap each memory after its last copy, and end the thread. Waits at
        most `seconds`. Idempotent."""
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
                "KV caches of other instances are not read any more: their ends would not be "
                "noticed"
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
            # Look up before closing any pidfd, since its number may be used again at once.
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
