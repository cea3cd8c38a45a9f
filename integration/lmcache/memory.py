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
