"""Buffers of equal size in host memory, for chunks on their way to and from the store.

The taker owns a buffer and gives it back after the store's call has returned."""

# torch.cuda's runtime bindings have no types.
# mypy: allow-untyped-calls

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from vcache_backend.offload.verbs import Place

ALIGNMENT = 4096


class Buffer(NamedTuple):
    """place: the bytes in the shared memory. memory: the same bytes, 1-D uint8, on the host."""

    place: Place
    memory: torch.Tensor


class Staging:
    """`count` buffers of `nbytes` bytes each, in a memfd. Sets the memfd's size."""

    def __init__(self, fd: int, nbytes: int, count: int, pinned: bool) -> None:
        """pinned: lock the pages, for a GPU's copies. RuntimeError or OSError: no memory."""
        stride = -(-nbytes // ALIGNMENT) * ALIGNMENT
        os.ftruncate(fd, stride * count)
        self._whole = torch.frombuffer(mmap.mmap(fd, stride * count), dtype=torch.uint8)
        # Take the pages now, not during a request.
        self._whole.zero_()
        if pinned:
            _cuda("cudaHostRegister", self._whole.data_ptr(), stride * count, 0)
        self._pinned = pinned
        starts = range(0, stride * count, stride)
        self.buffers = [Buffer((at, nbytes), self._whole[at : at + nbytes]) for at in starts]

    def close(self) -> None:
        """Unlock the pages, after the last copy. Idempotent."""
        pinned = self._pinned
        self._pinned = False
        if pinned:
            _cuda("cudaHostUnregister", self._whole.data_ptr())


class Ring:
    """Buffers that callers take in turn. Any thread."""

    def __init__(self, buffers: Sequence[Buffer]) -> None:
        self.count, self._free = len(buffers), list(buffers)
        self._returned = threading.Condition()

    def take(self, count: int, seconds: float) -> list[Buffer]:
        """Take `count` buffers at once; empty if too few become free within `seconds`."""
        deadline = time.monotonic() + seconds
        with self._returned:
            while len(self._free) < count:
                left = deadline - time.monotonic()
                if left <= 0 or not self._returned.wait(left):
                    return []
            taken = self._free[-count:]
            self._free = self._free[:-count]
            return taken

    def give(self, buffers: Sequence[Buffer]) -> None:
        """Return buffers without readers and writers."""
        with self._returned:
            self._free += buffers
            self._returned.notify_all()


def _cuda(name: str, *arguments: Any) -> None:
    code = int(getattr(torch.cuda.cudart(), name)(*arguments))
    if code:
        raise RuntimeError(f"{name} failed with CUDA error {code}")
