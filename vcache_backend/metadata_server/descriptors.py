"""The fds that the server keeps for clients. Only a client that maps an fd checks the mapping."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from functools import cache
from queue import SimpleQueue

from vcache_backend import threads


class Closer:
    """A thread that closes fds for the server's loop. A number stays taken until its fd is closed.

    Closing the last fd of a memory frees the memory, which takes a quarter of a second a GiB of
    host memory. Closing a socket may wait for hours for a client that reads nothing, if the client
    has set SO_LINGER."""

    def __init__(self) -> None:
        self._fds = SimpleQueue[int]()
        self.put = self._fds.put
        self._thread = threads.start(self._turn, "vcache-closer")

    def hurry(self) -> None:
        """Interrupt the present close if other fds wait. (A signal ends a close that waits.)"""
        if self._fds.qsize() and self._thread.ident is not None:
            signal.pthread_kill(self._thread.ident, signal.SIGURG)

    def _turn(self) -> None:
        with suppress(OSError):  # of the file's own flush: the fd is closed all the same
            os.close(self._fds.get())


@cache
def closing() -> Closer:
    """The thread of this process."""
    return Closer()


class Descriptor:
    """An open file, closed soon after the last user, a table or an unsent answer, drops it."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._closing = closing()

    def __del__(self) -> None:
        self._closing.put(self.fd)
