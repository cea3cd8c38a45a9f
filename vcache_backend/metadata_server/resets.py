"""Resets of namespaces, and the file in which they outlive the server."""

from __future__ import annotations

import hashlib
import mmap
import os
import struct
from typing import NamedTuple

from vcache_backend.metadata_server import processes
from vcache_backend.protocol.messages import NAMESPACE_BYTES


class Reset(NamedTuple):
    """first: the number of a namespace's last reset or clearing; chunks with a smaller number do
    not count. epoch: the number of its last reset; 0 without one."""

    first: int = 0
    epoch: int = 0


Resets = dict[bytes, Reset]
"""By namespace. b"" stands for all namespaces that are not listed."""

_HEADER = struct.Struct("<8s16sQ")
"""What it is, the clock of its numbers (a boot and a time namespace), and how many rows follow."""
_ROW = struct.Struct(f"<{NAMESPACE_BYTES}sQQ")
_MAGIC = b"vcache-r"
MAX_RESETS = (mmap.PAGESIZE - _HEADER.size) // _ROW.size - 1
"""The most namespaces with a reset of their own, beside b""."""


def of(resets: Resets, namespace: bytes) -> Reset:
    return resets.get(namespace) or resets.get(b"") or Reset()


class ResetsFile:
    """The first page of an open file, written as a whole: a server that is killed leaves the resets
    of before or of after. OSError."""

    def __init__(self, fd: int) -> None:
        """Takes the place now, since a full disk must not lose a reset. The caller keeps `fd`."""
        self._fd = fd
        os.posix_fallocate(fd, 0, mmap.PAGESIZE)

    def read(self) -> Resets:
        """The resets that an earlier server wrote; none if their numbers are of another clock."""
        page = os.pread(self._fd, mmap.PAGESIZE, 0)
        magic, clock, count = _HEADER.unpack_from(page)
        if (magic, clock) != (_MAGIC, _clock()):
            return {}
        whole = page[_HEADER.size :][: min(count, MAX_RESETS + 1) * _ROW.size]
        rows = _ROW.iter_unpack(whole)
        return {name if any(name) else b"": Reset(first, epoch) for name, first, epoch in rows}

    def write(self, resets: Resets) -> None:
        """Replace them. At most `MAX_RESETS` and b""."""
        rows = [_ROW.pack(name, *reset) for name, reset in resets.items()]
        page = _HEADER.pack(_MAGIC, _clock(), len(rows)) + b"".join(rows)
        os.pwrite(self._fd, page.ljust(mmap.PAGESIZE, b"\0"), 0)


def _clock() -> bytes:
    return hashlib.sha256(processes.namespaces().split(b" ", 1)[1]).digest()[:16]
