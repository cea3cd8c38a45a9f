"""Memory objects as LMCache handles them, and host memory for what was read ahead."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from lmcache.v1.memory_management import MemoryAllocatorInterface, MemoryFormat, MemoryObjMetadata, TensorMemoryObj

from vcache_backend.transfer.arguments import KVCaches


def described(shapes: Sequence[torch.Size], dtypes: Sequence[torch.dtype], fmt: MemoryFormat | None) -> MemoryObjMetadata:
    """What LMCache takes a chunk for. Its bytes are opaque: shapes and dtypes only say how many there are."""
    nbytes = sum(shape.numel() * dtype.itemsize for shape, dtype in zip(shapes, dtypes, strict=True))
    fmt = fmt or MemoryFormat.KV_2LTD
    return MemoryObjMetadata(shapes[0], dtypes[0], 0, nbytes, 1, fmt=fmt, shapes=list(shapes), dtypes=list(dtypes))


class NotedSlots(NamedTuple):
    """The tokens of a chunk in KV caches: at `slots[start:]` (int64), the slots of a request's tokens."""

    kvcaches: KVCaches
    slots: Any
    start: int


class StoredObj(TensorMemoryObj):  # type: ignore[misc]
    """What `allocate` gives for one whole chunk: no memory, but a note of where its tokens lie, by which `put` moves them.

    source: where its tokens lie; None until the GPU connector has noted it.
    """

    source: NotedSlots | None = None

    def __init__(self, metadata: MemoryObjMetadata) -> None:
        super().__init__(None, metadata, None)


class HostMemory:
    """Host memory for chunks that were read ahead, used again and again: new memory is given by the kernel page by page as it is first
    written, 15 ms for a chunk of 32 MiB where a copy into memory that was written before takes 3 (2-core CPU machine). Any thread.

    held: bytes that somebody has.
    """

    def __init__(self, most: int, spare: int) -> None:
        """most: bytes that may be held at once. spare: bytes that are kept for next time."""
        self.most, self.held = most, 0
        self._spare = spare
        self._kept: list[torch.Tensor] = []
        # An object may end in the middle of anything, also of what is done here.
        self._lock = threading.RLock()

    def take(self, nbytes: int) -> torch.Tensor | None:
        """1-D uint8, contents undefined, until it is given back; None if too much is held, or there is no memory."""
        with self._lock:
            if self.held + nbytes > self.most:
                return None
            self.held += nbytes
            memory = self._kept.pop() if self._kept else None
        try:
            return memory if memory is not None and memory.numel() == nbytes else torch.empty(nbytes, dtype=torch.uint8)
        except RuntimeError:
            with self._lock:
                self.held -= nbytes
            return None

    def give(self, memory: torch.Tensor) -> None:
        """Nobody reads or writes it any more."""
        with self._lock:
            self.held -= memory.numel()
            if (len(self._kept) + 1) * memory.numel() <= self._spare:
                self._kept.append(memory)


class NoAllocator(MemoryAllocatorInterface):  # type: ignore[misc]
    """LMCache asks a backend for its allocator to check its books. The server keeps ours."""

    def allocate(self, *_: Any, **__: Any) -> None:
        return None

    def batched_allocate(self, *_: Any, **__: Any) -> None:
        return None

    def free(self, *_: Any, **__: Any) -> None:
        return None

    def batched_free(self, *_: Any, **__: Any) -> None:
        return None

    def memcheck(self) -> bool:
        return True
