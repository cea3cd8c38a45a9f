"""What tests of mapped memory share: what a process holds of it, and fds that are not what they
should be."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vcache_backend import seals
from vcache_backend.errors import SegmentError
from vcache_backend.vram_pool.devices import Device
from vcache_backend.vram_pool.regions import OwnedSegment, map_segment

NBYTES = 1 << 20


def open_fds() -> int:
    """Of this process. What an earlier test left to a thread may go at any time: later there may be
    fewer.
    """
    return len(os.listdir("/proc/self/fd"))


def mappings() -> int:
    """Mappings of vcache's memfds in this process."""
    return sum("memfd:vcache-" in line for line in Path("/proc/self/maps").read_text().splitlines())


def why_not_mapped(owned: OwnedSegment, reader: Device) -> str:
    """Not by `pytest.raises`: it may keep the traceback, and with it the mapping."""
    try:
        map_segment(owned.info, owned.fd, reader)
    except SegmentError as error:
        return str(error)
    return ""


@contextmanager
def forged(kind: str) -> Iterator[int]:
    """An fd that is no segment of `NBYTES`."""
    fd = os.memfd_create("forged", os.MFD_ALLOW_SEALING | (os.MFD_HUGETLB if kind == "huge" else 0))
    try:
        os.ftruncate(fd, {"small": 4096, "huge": 1 << 30}.get(kind, NBYTES))
        more = fcntl.F_SEAL_WRITE if kind == "frozen" else 0
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, 0 if kind == "unsealed" else seals.RESIZING | more)
        yield fd
    finally:
        os.close(fd)
