"""Segments in host memory: sealed memfds. What GPU segments are on a machine without one, and what CI runs."""

from __future__ import annotations

import fcntl
import mmap
import os
from contextlib import ExitStack

import torch

from vcache_backend.errors import SegmentError
from vcache_backend.seals import RESIZING, lacking


def allocate(name: str, nbytes: int) -> int:
    """A sealed memfd of exactly `nbytes` zero bytes, closed on exec; the caller closes it. Raises OSError.

    Pages are taken when first written, so a segment larger than the machine's memory fails at use, not here
    (`vcache doctor` compares them).
    """
    with ExitStack() as undo:
        fd = os.memfd_create(f"vcache-{name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        undo.callback(os.close, fd)
        os.ftruncate(fd, nbytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, RESIZING)
        undo.pop_all()
        return fd


def map_fd(fd: int, nbytes: int) -> torch.Tensor:
    """`nbytes` of `fd`, shared, as a 1-D uint8 tensor; the mapping lasts as long as the tensor or a view of it.

    Raises SegmentError where the fd is not a memfd, too small or not sealed; OSError where the kernel refuses.
    """
    check(fd, nbytes)
    memory = mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    # torch keeps a reference to `memory` but exports no buffer: `memory.close()` would unmap under live views. So nobody
    # calls it, and the mapping goes with the last reference.
    return torch.frombuffer(memory, dtype=torch.uint8)


def check(fd: int, nbytes: int) -> None:
    """Refuse an fd that is no sealed memfd of at least `nbytes`. Raises SegmentError with the figures."""
    if reason := lacking(fd):
        raise SegmentError(reason)
    if (held := os.fstat(fd).st_size) < nbytes:
        raise SegmentError(f"fd {fd} holds {held:,} B but the segment is said to have {nbytes:,} B")
