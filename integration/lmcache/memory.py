"""The memory objects that we give to LMCache, and host memory for chunks that were read ahead."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from lmcache.v1.memory_management import (
    MemoryAllocatorInterface,
    MemoryFormat,
    MemoryObjMetadata,
    TensorMemoryObj,
)

from vcache_backend.transfer.arguments import KVCaches


def described(
    shapes: Sequence[torch.Size], dtypes: Sequence[torch.dtype], fmt: MemoryFormat | None
) -> MemoryObjMetadata:
    """LMCache's description of a chunk. The bytes are opaque: shapes and dtypes only give their
    number.
    """
    nbytes = sum(
        shape.numel() * dtype.itemsize for shape, dtype in zip(shapes, dtypes, strict=True)
    )
    fmt = fmt or MemoryFormat.KV_2LTD
    return MemoryObjMetadata(
        shapes[0], dtypes[0], 0, nbytes, 1, fmt=fmt, shapes=list(shapes), dtypes=list(dtypes)
    )


class NotedSlots(NamedTuple):
    """Where a chunk's tokens lie in KV caches: at `slots[start:]`, of the slots of a request's
    tokens (int64).
    """

    kvcaches: KVCaches
    slots: Any
    start: int


class StoredObj(TensorMemoryObj):  # type: ignore[misc]
    """What `allocate` gives for one whole chunk. It holds no memory, only `source`: where the
    chunk's tokens lie, from which `put` stores them; None until the GPU connector has noted it."""

    source: NotedSlots | None = None

    def __init__(self, metadata: MemoryObjMetadata) -> None:
        super().__init__(None, metadata, None)


class HostMemory:
    """Host memory for chunks that were read ahead. Any thread. held: bytes handed out.

    It reuses memory: the first write into new memory takes 15 ms for a chunk of 32 MiB, since the
    kernel adds it page by page; a copy into memory written before takes 3 ms (2-core CPU machine).
    """

    def __init__(self, most: int, spare: int) -> None:
        """most: bytes that may be handed out at once. spare: bytes that are kept for reuse."""
        self.most, self.held = most, 0
        self._spare = spare
        self._kept: list[torch.Tensor] = []
        # Reentrant: garbage collection may call `give` in the middle of a method here.
        self._lock = threading.RLock()

    def take(self, nbytes: int) -> torch.Tensor | None:
        """A 1-D uint8 tensor of so many bytes, contents undefined. None if too much is handed out,
        or there is no memory.
        """
        with self._lock:
            if self.held + nbytes > self.most:
                return None
            self.held += nbytes
            memory = self._kept.pop() if self._kept else None
        try:
            return (
                memory
                if memory is not None and memory.numel() == nbytes
                else torch.empty(nbytes, dtype=torch.uint8)
            )
        except RuntimeError:
            with self._lock:
                self.held -= nbytes
            return None

    def give(self, memory: torch.Tensor) -> None:
        """Give memory back that nobody reads or writes any more."""
        with self._lock:
            self.held -= memory.numel()
            if (len(self._kept) + 1) * memory.numel() <= self._spare:
                self._kept.append(memory)


class NoAllocator(MemoryAllocatorInterface):  # type: ignore[misc]
    """LMCache asks each backend for an allocator, to check its books. It has none to check here:
    the server allocates.
    """

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
