"""Closing fds without waiting for it."""

from __future__ import annotations

import os
import threading
from queue import SimpleQueue


class Closer:
    """Closes fds in a thread of its own: whoever closes the last fd of a piece of memory frees it, which takes a quarter of a second a
    GiB of host memory, and nobody in the loop shall wait for that."""

    def __init__(self) -> None:
        self._fds: SimpleQueue[int] = SimpleQueue()
        self._started = threading.Lock()

    def start(self) -> None:
        """To be called before `close`; again, it does nothing."""
        if self._started.acquire(blocking=False):
            threading.Thread(target=self._run, name="vcache-closer", daemon=True).start()

    def close(self, fd: int) -> None:
        """The caller has no use for `fd` any more. Its number is not given to another file before it is closed."""
        self._fds.put(fd)

    def _run(self) -> None:
        while True:
            os.close(self._fds.get())


closer = Closer()
