"""Host memory that chunks pass through on their way to and from the store: buffers of one size, handed out and given back.

A buffer belongs to whoever took it until it is given back. One that a call of the store's may still read or write is not given back
before that call has returned: until then the ring has one buffer less.
"""

# torch.cuda's runtime bindings have no types.
# mypy: allow-untyped-calls

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from vcache_backend.offload.process import Place

ALIGNMENT = 4096


class Buffer(NamedTuple):
    """`memory`: 1-D uint8, on the host."""

    number: int
    memory: torch.Tensor


class Ring:
    """`count` buffers of `nbytes` bytes each, made of one allocation that the offload process shares. Any thread."""

    def __init__(self, nbytes: int, count: int, pinned: bool, share: Callable[[int], int] = lambda fd: 0) -> None:
        """pinned: page-locked, for copies from and to a GPU. share: is given the memory's fd, which stays open until `close`, and says
        how places name it. Raises RuntimeError, OSError where there is not so much memory."""
        self.nbytes, self.count, self._pinned = nbytes, count, pinned
        self._stride = stride = -(-nbytes // ALIGNMENT) * ALIGNMENT
        self.fd = os.memfd_create("vcache-staging", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self.fd, stride * count)
            self._whole = torch.frombuffer(mmap.mmap(self.fd, stride * count), dtype=torch.uint8)
            # Pages are taken now, not in the middle of somebody's request.
            self._whole.zero_()
            if pinned:
                _cuda("cudaHostRegister", self._whole.data_ptr(), stride * count, 0)
        except BaseException:
            os.close(self.fd)
            raise
        self._free = [Buffer(i, self._whole[i * stride : i * stride + nbytes]) for i in range(count)]
        self._returned = threading.Condition()
        self._number = share(self.fd)

    def close(self) -> None:
        """Give back the fd, and the pages' lock; copies must be complete. The memory goes with the last tensor over it. Idempotent."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)
            if self._pinned:
                _cuda("cudaHostUnregister", self._whole.data_ptr())

    @property
    def free(self) -> int:
        return len(self._free)

    def places(self, buffers: Sequence[Buffer]) -> list[Place]:
        """Where they are in the memory that is shared."""
        return [(self._number, buffer.number * self._stride, self.nbytes) for buffer in buffers]

    def take(self, count: int, seconds: float) -> list[Buffer]:
        """`count` buffers, all at once; none if there are not so many within so many seconds."""
        deadline = time.monotonic() + seconds
        with self._returned:
            while len(self._free) < count:
                left = deadline - time.monotonic()
                if left <= 0 or not self._returned.wait(left):
                    break
            if len(self._free) < count:
                return []
            taken, self._free = self._free[-count:], self._free[:-count]
            return taken

    def give(self, buffers: Sequence[Buffer]) -> None:
        """Nobody reads or writes these any more."""
        with self._returned:
            self._free += buffers
            self._returned.notify_all()


def _cuda(name: str, *arguments: Any) -> None:
    """A call of the CUDA runtime. Raises RuntimeError."""
    code = int(getattr(torch.cuda.cudart(), name)(*arguments))
    if code:
        raise RuntimeError(f"{name} failed with CUDA error {code}")
