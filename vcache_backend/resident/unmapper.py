"""Unmaps the memory of owners that have ended, after the last copy out of it."""

from __future__ import annotations

import logging
import os
import select
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vcache_backend.resident.neighbours import Neighbour

log = logging.getLogger(__name__)

LOOK_SECONDS = 0.1
"""How often to check for living owners that gave their memory up, for new neighbours, and for
copies that are over. The end of a process is noticed at once."""


class Unmapper:
    """A thread that waits for owners' processes to end, and unmaps their memory after the last
    copy. Any thread may call the methods.

    on_end: called in the unmapper's thread for each neighbour before it is unmapped, because the
    owner has ended or given the memory up, or because of `close`."""

    def __init__(self, on_end: Callable[[Neighbour], None]) -> None:
        self._on_end = on_end
        self._lock = threading.Lock()
        self._watched: dict[Neighbour, list[int]] = {}
        """The pidfds of each neighbour's owner."""
        self._going: list[Neighbour] = []
        self.closed = False
        """Whether `admit` refuses: after `close`, or if the thread has failed."""
        self._thread = threading.Thread(target=self._run, name="vcache-neighbours", daemon=True)
        self._thread.start()

    def admit(self, neighbour: Neighbour, pidfds: list[int]) -> bool:
        """Watch these processes, and take over the pidfds. After `close` it returns False: both
        then stay the caller's."""
        with self._lock:
            if not self.closed:
                self._watched[neighbour] = pidfds
            return not self.closed

    def close(self, seconds: float) -> None:
        """Forbid all copies, unmap each memory after its last copy, and end the thread. Waits at
        most `seconds`. Idempotent."""
        with self._lock:
            self.closed = True
        self._thread.join(seconds)
        if self._thread.is_alive():
            log.warning("other instances' KV caches stay mapped until copies out of them are over")

    # ---- the thread

    def _run(self) -> None:
        try:
            while self._watched or self._going or not self.closed:
                self._turn()
        except Exception:  # the thread's last line of defence
            log.exception("other instances' KV caches are not read any more")
        finally:
            with self._lock:
                self.closed = True
            for neighbour in list(self._watched):
                self._end(neighbour)
            for neighbour in self._going:
                neighbour.unmap()

    def _turn(self) -> None:
        with self._lock:
            watched = {fd: neighbour for neighbour, fds in self._watched.items() for fd in fds}
        poll = select.poll()
        for fd in watched:
            poll.register(fd, select.POLLIN)
        ended = {watched[fd] for fd, _ in poll.poll(LOOK_SECONDS * 1000)}
        for neighbour in dict.fromkeys(watched.values()):
            if neighbour in ended or self.closed or neighbour.view.dead:
                self._end(neighbour)
        for neighbour in list(self._going):
            if neighbour.unmap():
                self._going.remove(neighbour)

    def _end(self, neighbour: Neighbour) -> None:
        neighbour.forbid()
        with self._lock:
            pidfds = self._watched.pop(neighbour)
        for pidfd in pidfds:
            os.close(pidfd)
        self._going.append(neighbour)
        self._on_end(neighbour)
