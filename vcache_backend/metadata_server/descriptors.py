"""The fds that the server keeps for others. Only who maps one checks that it can be mapped."""

from __future__ import annotations

import os
import threading
from queue import SimpleQueue


class Closer:
    """A thread that closes fds for the server's loop.

    Closing the last fd of a memory frees the memory, which takes a quarter of a second a GiB of
    host memory."""

    def __init__(self) -> None:
        self._fds: SimpleQueue[int] = SimpleQueue()
        self._started = threading.Lock()

    def start(self) -> None:
        """Start the thread, before the first `close`. Idempotent."""
        if self._started.acquire(blocking=False):
            threading.Thread(target=self._run, name="vcache-closer", daemon=True).start()

    def close(self, fd: int) -> None:
        """Close `fd` later. The caller no longer uses it; its number stays taken until then."""
        self._fds.put(fd)

    def _run(self) -> None:
        while True:
            os.close(self._fds.get())


closer = Closer()


class Descriptor:
    """An open file. It is closed soon after its last user drops it: a table, or an answer yet to be
    sent."""

    def __init__(self, fd: int) -> None:
        """Take over `fd`."""
        self.fd = fd
        closer.start()

    def __del__(self) -> None:
        closer.close(self.fd)
