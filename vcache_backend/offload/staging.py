"""Buffers of equal size in host memory, for chunks on their way to and from the store. A GPU's
kernels read them where they lie, like a pool in host memory."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import NamedTuple

import torch

from vcache_backend.offload.objects import HEADER_BYTES
from vcache_backend.offload.verbs import Place
from vcache_backend.seals import RESIZING
from vcache_backend.vram_pool import host_memory
from vcache_backend.vram_pool.regions import SlotView

ALIGNMENT = 4096


class Buffer(NamedTuple):
    """place: the bytes in the shared memory. memory: the same bytes, 1-D uint8, on the host."""

    place: Place
    memory: torch.Tensor

    @property
    def chunk(self) -> SlotView:
        """The chunk of the object in the buffer, for a copier."""
        return SlotView.over(self.memory[HEADER_BYTES:], local=False)


def staging(fd: int, nbytes: int, count: int, ordinal: int | None) -> list[Buffer]:
    """Make `count` buffers of `nbytes` bytes each in the memfd, whose size this sets. The buffers
    keep the memory.

    ordinal: of the GPU that copies, for which the pages are locked. SegmentError, OSError."""
    stride = -(-nbytes // ALIGNMENT) * ALIGNMENT
    size = stride * count
    os.ftruncate(fd, size)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, RESIZING)
    # In one step: the driver's own copies, which write objects, may not cross steps.
    whole = host_memory.map_fd(fd, size, ordinal, step=size)
    if ordinal is None:
        # Take the pages now, not during a request.
        whole.zero_()
    return [Buffer((at, nbytes), whole[at : at + nbytes]) for at in range(0, size, stride)]


class Ring:
    """Buffers that callers take in turn, and give back once the store's call has returned. Any
    thread."""

    def __init__(self, buffers: Sequence[Buffer]) -> None:
        self.count = len(buffers)
        self._free = SimpleQueue[Buffer]()
        self.give(buffers)

    def take(self, count: int, seconds: float) -> list[Buffer]:
        """Take `count` buffers; empty if too few become free within `seconds`."""
        taken, until = list[Buffer](), time.monotonic() + seconds
        with suppress(Empty):
            while len(taken) < count:
                taken.append(self._free.get(timeout=max(until - time.monotonic(), 0.0)))
            return taken
        self.give(taken)
        return []

    def give(self, buffers: Sequence[Buffer]) -> None:
        """Return buffers without readers and writers."""
        for buffer in buffers:
            self._free.put(buffer)
