"""Memory objects as LMCache handles them: a chunk that still lies in the KV cache, or one that lies in the pool under a lease."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from lmcache.v1.memory_management import MemoryAllocatorInterface, MemoryFormat, MemoryObj, MemoryObjMetadata

from vcache_backend.chunk_io import Lease


class ChunkObj(MemoryObj):  # type: ignore[misc]
    """One whole chunk, counted by references. Its bytes are opaque: `shape` and `dtype` only say how many there are.

    `tensor` and `raw_tensor` copy the chunk into memory of their own for tiers that want bytes; LMCache's other users of memory
    objects never ask for them.
    """

    def __init__(self, shapes: list[torch.Size], dtypes: list[torch.dtype], fmt: MemoryFormat | None) -> None:
        meta = MemoryObjMetadata(shapes[0], dtypes[0], 0, 0, 1, fmt=fmt or MemoryFormat.KV_2LTD, shapes=shapes, dtypes=dtypes)
        meta.phy_size = meta.get_size()
        super().__init__(meta)
        self._lock = threading.Lock()

    def bytes(self) -> torch.Tensor:
        """The chunk as a new contiguous uint8 tensor on the worker's device, complete for the current stream."""
        raise NotImplementedError

    def dropped(self) -> None:
        """The last reference is gone."""

    # ---- bytes, for other tiers

    @property
    def raw_tensor(self) -> torch.Tensor:
        return self.bytes()

    @property
    def tensor(self) -> torch.Tensor:
        return self.bytes().view(self.meta.dtype).view(self.meta.shape)

    def get_tensor(self, index: int) -> torch.Tensor:
        """Group `index` of the bytes: they lie one after the other."""
        sizes = [shape.numel() * dtype.itemsize for shape, dtype in zip(self.get_shapes(), self.get_dtypes(), strict=True)]
        part = torch.split(self.bytes(), sizes)[index]
        grouped: torch.Tensor = part.view(self.get_dtypes()[index]).view(self.get_shapes()[index])
        return grouped

    @property
    def byte_array(self) -> bytes:  # type: ignore[valid-type]
        return self.bytes().cpu().numpy().tobytes()

    @property
    def data_ptr(self) -> int:
        return 0

    # ---- sizes

    @property
    def metadata(self) -> MemoryObjMetadata:
        return self.meta

    def get_size(self) -> int:
        return int(self.meta.phy_size)

    def get_physical_size(self) -> int:
        return int(self.meta.phy_size)

    def get_shape(self) -> torch.Size:
        shape: torch.Size = self.meta.shape
        return shape

    def get_dtype(self) -> torch.dtype:
        dtype: torch.dtype = self.meta.dtype
        return dtype

    def get_shapes(self) -> list[torch.Size]:
        return self.meta.shapes or [self.get_shape()]

    def get_dtypes(self) -> list[torch.dtype]:
        return self.meta.dtypes or [self.get_dtype()]

    def get_memory_format(self) -> MemoryFormat:
        return self.meta.fmt

    def get_num_tokens(self) -> int:
        return int(self.meta.shape[self.meta.fmt.token_dim()])

    # ---- references

    def ref_count_up(self) -> None:
        with self._lock:
            self.meta.ref_count += 1

    def ref_count_down(self) -> None:
        with self._lock:
            self.meta.ref_count -= 1
            last = self.meta.ref_count == 0
        if last:
            self.dropped()

    def get_ref_count(self) -> int:
        return int(self.meta.ref_count)

    def pin(self) -> bool:
        """Nothing of ours waits to be evicted under LMCache: leases do that."""
        return True

    def unpin(self) -> bool:
        return True

    @property
    def is_pinned(self) -> bool:
        return False

    @property
    def can_evict(self) -> bool:
        return False

    def invalidate(self) -> None:
        """Nothing to take back."""

    def is_valid(self) -> bool:
        return True

    def parent(self) -> MemoryAllocatorInterface | None:
        return None


class DeferredObj(ChunkObj):
    """What `allocate` gives: no place in the pool yet. The GPU connector notes where the tokens lie; `put` moves them.

    source: slots of the request (int64), index in them of the chunk's first token, and who can copy it out of the KV cache.
    """

    source: tuple[Any, int] | None = None
    copy_out: Callable[[DeferredObj], torch.Tensor] | None = None

    def bytes(self) -> torch.Tensor:
        if self.copy_out is None:
            return torch.zeros(self.meta.phy_size, dtype=torch.uint8)
        return self.copy_out(self)


class SharedLease:
    """One lease for the chunks of one `get`; let go with the last of them, unless it ended before."""

    def __init__(self, lease: Lease, let_go: Callable[[Lease], None], users: int) -> None:
        self.lease: Lease | None = lease
        self._let_go = let_go
        self._lock = threading.Lock()
        self._users = users

    def take(self) -> Lease | None:
        """The lease, for good: whoever takes it ends it. None if it is over."""
        with self._lock:
            lease, self.lease = self.lease, None
            return lease

    def dropped(self) -> None:
        with self._lock:
            self._users -= 1
            lease = self.lease if self._users == 0 else None
            if lease is not None:
                self.lease = None
        if lease is not None:
            self._let_go(lease)


class LeasedObj(ChunkObj):
    """A chunk of the pool: the `index`-th of a lease."""

    def __init__(
        self,
        shapes: list[torch.Size],
        dtypes: list[torch.dtype],
        fmt: MemoryFormat | None,
        shared: SharedLease,
        index: int,
        copy_out: Callable[[LeasedObj], torch.Tensor],
    ) -> None:
        super().__init__(shapes, dtypes, fmt)
        assert shared.lease is not None
        self.shared, self.key, self.location = shared, shared.lease.keys[index], shared.lease.locations[index]
        self._copy_out = copy_out

    def bytes(self) -> torch.Tensor:
        return self._copy_out(self)

    def dropped(self) -> None:
        self.shared.dropped()


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
