"""The fds that the server keeps for clients. Only a client that maps an fd checks the mapping."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from queue import SimpleQueue

from vcache_backend import threads
from vcache_backend.protocol.messages import Reply


class Closer:
    """A thread that closes fds for the server's loop. A number stays taken until its fd is closed.

    Closing the last fd of a memory frees the memory, which takes a quarter of a second a GiB of
    host memory."""

    def __init__(self) -> None:
        self._fds = SimpleQueue[int]()
        self.put = self._fds.put
        threads.start(self._turn, "vcache-closer")

    def _turn(self) -> None:
        with suppress(OSError):  # of the file's own flush: the fd is closed all the same
            os.close(self._fds.get())


@cache
def closing() -> Closer:
    """The thread of this process. RuntimeError if there are too many threads."""
    return Closer()


class Descriptor:
    """An open file, closed soon after the last user, a table or an unsent answer, drops it."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._closing = closing()

    def __del__(self) -> None:
        self._closing.put(self.fd)


Answer = tuple[Reply, Sequence[Descriptor]]
"""A reply, and the owners of its fds."""
