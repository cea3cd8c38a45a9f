"""The fds that the server keeps for others, and whether others can use them."""

from __future__ import annotations

import fcntl
import os
import stat
import threading
from queue import SimpleQueue

from vcache_backend.metadata_server.messages import Medium
from vcache_backend.seals import FUTURE_WRITE, lacking


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


def unmappable(medium: Medium, nbytes: int, fd: int, to_write: bool = True) -> str:
    """Explain why workers could not map `nbytes` of `fd`, or would be killed for using it. Empty if
    the server finds no reason.

    Only the driver can check GPU memory. A worker that cannot map it sends `Unusable`."""
    status, flags = os.fstat(fd), fcntl.fcntl(fd, fcntl.F_GETFL)
    if flags & os.O_PATH or flags & os.O_ACCMODE not in (
        (os.O_RDWR,) if to_write else (os.O_RDWR, os.O_RDONLY)
    ):
        return (
            f"the fd is not open for reading{' and writing' if to_write else ''}, as "
            "workers need it"
        )
    if medium == "cuda":
        # The driver exports memory as an open file of its own device, /dev/nvidiactl.
        return (
            ""
            if stat.S_ISCHR(status.st_mode)
            else "the fd is a file, a memfd or a socket, no memory of a GPU"
        )
    if reason := lacking(fd):
        return reason
    seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    if to_write and seals & (fcntl.F_SEAL_WRITE | FUTURE_WRITE):
        return f"the memfd is sealed against writing (seals {seals:#x})"
    if status.st_size < nbytes:
        return f"the memfd has {status.st_size:,} B, fewer than the {nbytes:,} B announced"
    return ""
