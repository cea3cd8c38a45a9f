"""The memory objects that we give to LMCache."""

from __future__ import annotations

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
    """Describe a chunk for LMCache. Its bytes are opaque: shapes and dtypes only count them."""
    nbytes = sum(
        shape.numel() * dtype.itemsize for shape, dtype in zip(shapes, dtypes, strict=True)
    )
    fmt = fmt or MemoryFormat.KV_2LTD
    return MemoryObjMetadata(
        shapes[0], dtypes[0], 0, nbytes, 1, fmt=fmt, shapes=list(shapes), dtypes=list(dtypes)
    )


class NotedSlots(NamedTuple):
    """A chunk's place in KV caches: its tokens are at `slots[start:]` (int64)."""

    kvcaches: KVCaches
    slots: Any
    start: int


class StoredObj(TensorMemoryObj):  # type: ignore[misc]
    """A memory object without memory, for one whole chunk.

    source: the place of the chunk's tokens, for `put`. The GPU connector sets it."""

    source: NotedSlots | None = None

    def __init__(self, metadata: MemoryObjMetadata) -> None:
        super().__init__(None, metadata, None)


class NoAllocator(MemoryAllocatorInterface):  # type: ignore[misc]
    """An allocator without memory, for LMCache's check of its books: the server allocates."""

    def allocate(self, *_: Any, **__: Any) -> None:
        return None

    batched_allocate = free = batched_free = allocate

    def memcheck(self) -> bool:
        return True
