"""Segments' descriptors in the server: how long they stay open, and which ones are taken."""

from __future__ import annotations

import fcntl
import os
import stat
from typing import Protocol

from vcache_backend.metadata_server import messages as m

_RESIZES = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_READ_ONLY = fcntl.F_SEAL_WRITE | 0x10  # F_SEAL_FUTURE_WRITE, which Python 3.11 does not name


class Holder(Protocol):
    """What keeps an open file for others."""

    fd: int


class Descriptor:
    """An open file that is closed when nobody needs it any more: neither the table it is in, nor an answer that is yet to be sent."""

    def __init__(self, fd: int) -> None:
        """`fd` is this object's from now on."""
        self.fd = fd

    def __del__(self) -> None:
        os.close(self.fd)


def unfit(request: m.AddSegment, fd: int) -> str:
    """Why workers could not map `fd` as this segment, or would die of it; empty if nothing here speaks against it.

    Whether GPU memory is what it is said to be, only its driver knows: a worker that cannot map it says so (`Unusable`).
    """
    status, flags = os.fstat(fd), fcntl.fcntl(fd, fcntl.F_GETFL)
    if flags & os.O_ACCMODE != os.O_RDWR or flags & os.O_PATH:
        return "the fd is not open for reading and writing, as workers need it"
    if request.medium == "cuda":
        # The driver exports memory as an open file of its own device, /dev/nvidiactl.
        return "" if stat.S_ISCHR(status.st_mode) else "the fd is a file, a memfd or a socket, no memory of a GPU"
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as error:
        return f"the fd is no memfd ({error.strerror})"
    if seals & _RESIZES != _RESIZES:
        return f"the memfd is not sealed against shrinking, growing and other seals (it has {seals:#x}, needs {_RESIZES:#x})"
    if seals & _READ_ONLY:
        return f"the memfd is sealed against writing (seals {seals:#x})"
    if status.st_size < request.nbytes:
        return f"the memfd has {status.st_size:,} B, fewer than the {request.nbytes:,} B announced"
    return ""
