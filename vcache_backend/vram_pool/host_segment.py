"""Segments in host memory: sealed memfds, in place of GPU segments where there is no GPU."""

from __future__ import annotations

import mmap
import os

import torch

from vcache_backend.errors import SegmentError
from vcache_backend.seals import lacking, sealed


def allocate(name: str, nbytes: int) -> int:
    """A sealed memfd of `nbytes` zero bytes, closed on exec. The caller closes the memfd. OSError.

    The first write to a page allocates the page, so a segment larger than the machine's memory
    fails in use, not here (`vcache doctor` compares both sizes)."""
    fd, memory = sealed(name, nbytes)
    memory.close()
    return fd


def map_fd(fd: int, nbytes: int) -> torch.Tensor:
    """Map `nbytes` of `fd`, shared, as a 1-D uint8 tensor. The mapping lasts as long as the tensor
    or a view of the tensor.

    SegmentError if the fd is no memfd, too small or not sealed; OSError."""
    check(fd, nbytes)
    memory = mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    # torch keeps a reference to `memory` but exports no buffer, so `memory.close()` would unmap
    # memory under live views. Nobody calls `close()`: the mapping ends with the last reference.
    return torch.frombuffer(memory, dtype=torch.uint8)


def check(fd: int, nbytes: int) -> None:
    """Raise SegmentError unless `fd` is a sealed memfd of at least `nbytes`."""
    if reason := lacking(fd):
        raise SegmentError(reason)
    if (held := os.fstat(fd).st_size) < nbytes:
        raise SegmentError(f"fd {fd} holds {held:,} B but the segment is said to have {nbytes:,} B")
