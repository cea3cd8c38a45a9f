"""Resets of namespaces, and the file in which they outlive the server."""

from __future__ import annotations

import hashlib
import json
import mmap
import os
from contextlib import suppress
from typing import NamedTuple

from vcache_backend.metadata_server import processes


class Reset(NamedTuple):
    """first: the number of a namespace's last reset or clearing; chunks with a smaller number do
    not count. epoch: the number of its last reset; 0 without one."""

    first: int = 0
    epoch: int = 0


Resets = dict[bytes, Reset]
"""By namespace. b"" stands for all namespaces that are not listed."""

MAX_RESETS = 50
"""The most namespaces with a reset of their own, beside b"". They fit into a page."""


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
        with suppress(ValueError, TypeError):  # nobody has written any
            clock, resets = json.loads(os.pread(self._fd, mmap.PAGESIZE, 0).rstrip(b"\0"))
            if clock == _clock():
                return {bytes.fromhex(name): Reset(*one) for name, one in resets.items()}
        return {}

    def write(self, resets: Resets) -> None:
        """Replace them. At most `MAX_RESETS` and b""."""
        page = json.dumps([_clock(), {name.hex(): reset for name, reset in resets.items()}])
        os.pwrite(self._fd, page.encode().ljust(mmap.PAGESIZE, b"\0"), 0)


def _clock() -> str:
    """What the numbers are times of: a boot and a time namespace."""
    return hashlib.sha256(processes.namespaces().split(b" ", 1)[1]).hexdigest()
