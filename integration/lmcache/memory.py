"""Memory objects as LMCache handles them: a chunk that still lies in the KV cache, one that lies in the pool under a lease, or one that
came from the offload tier."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cached_property
from typing import Any, NamedTuple

import torch
from lmcache.v1.memory_management import MemoryAllocatorInterface, MemoryFormat, MemoryObj, MemoryObjMetadata

from vcache_backend.metadata_server.messages import ChunkKey
from vcache_backend.transfer.arguments import KVCaches
from vcache_backend.transfer.chunk_io import Lease


class Form(NamedTuple):
    """What LMCache takes a chunk for, the same for all of an instance."""

    shapes: list[torch.Size]
    dtypes: list[torch.dtype]
    fmt: MemoryFormat
    nbytes: int

    @classmethod
    def of(cls, shapes: list[torch.Size], dtypes: list[torch.dtype], fmt: MemoryFormat | None) -> Form:
        nbytes = sum(shape.numel() * dtype.itemsize for shape, dtype in zip(shapes, dtypes, strict=True))
        return cls(shapes, dtypes, fmt or MemoryFormat.KV_2LTD, nbytes)


_counting = threading.Lock()
"""For all objects: LMCache makes hundreds of them for one request."""


class ChunkObj(MemoryObj):  # type: ignore[misc]
    """One whole chunk, counted by references. Its bytes are opaque: shape and dtype only say how many there are.

    `tensor` and `raw_tensor` copy the chunk into memory of their own for tiers that want bytes; LMCache's other users of memory
    objects never ask for them.
    """

    is_vcache = True
    _l1_manager_id = None

    def __init__(self, form: Form) -> None:
        # Without MemoryObj's constructor, which wants the metadata now: a large request makes hundreds of objects that need none.
        self.form, self._references = form, 1

    @cached_property
    def meta(self) -> MemoryObjMetadata:
        shapes, dtypes, fmt, nbytes = self.form
        return MemoryObjMetadata(shapes[0], dtypes[0], 0, nbytes, 1, fmt=fmt, shapes=shapes, dtypes=dtypes)

    def bytes(self) -> torch.Tensor:
        """The chunk as a contiguous uint8 tensor on the worker's device, complete for the current stream, until the next one is asked
        for on that stream."""
        raise NotImplementedError

    def dropped(self) -> None:
        """The last reference is gone."""

    # ---- bytes, for other tiers

    @property
    def raw_tensor(self) -> torch.Tensor:
        return self.bytes()

    @property
    def tensor(self) -> torch.Tensor:
        return self.bytes().view(self.form.dtypes[0]).view(self.form.shapes[0])

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
        return self.form.nbytes

    def get_physical_size(self) -> int:
        return self.form.nbytes

    def get_shape(self) -> torch.Size:
        return self.form.shapes[0]

    def get_dtype(self) -> torch.dtype:
        return self.form.dtypes[0]

    def get_shapes(self) -> list[torch.Size]:
        return self.form.shapes

    def get_dtypes(self) -> list[torch.dtype]:
        return self.form.dtypes

    def get_memory_format(self) -> MemoryFormat:
        return self.form.fmt

    def get_num_tokens(self) -> int:
        return int(self.form.shapes[0][self.form.fmt.token_dim()])

    # ---- references

    def ref_count_up(self) -> None:
        with _counting:
            self._references += 1

    def ref_count_down(self) -> None:
        with _counting:
            self._references -= 1
            last = self._references == 0
        if last:
            self.dropped()

    def get_ref_count(self) -> int:
        return self._references

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


class Source(NamedTuple):
    """The tokens of a chunk in KV caches: at `slots[start:]` (int64), the slots of a request's tokens."""

    kvcaches: KVCaches
    slots: Any
    start: int


class DeferredObj(ChunkObj):
    """What `allocate` gives: no place in the pool yet. The GPU connector notes where the tokens lie; `put` moves them.

    source: where its tokens lie. copy_out: who can copy it out of the KV cache.
    """

    source: Source | None = None
    copy_out: Callable[[DeferredObj], torch.Tensor] | None = None

    def bytes(self) -> torch.Tensor:
        if self.copy_out is None:
            return torch.zeros(self.form.nbytes, dtype=torch.uint8)
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
        self, form: Form, shared: SharedLease, lease: Lease, index: int, copy_out: Callable[[LeasedObj], torch.Tensor]
    ) -> None:
        super().__init__(form)
        self.shared, self.key, self.location = shared, lease.keys[index], lease.locations[index]
        self._copy_out = copy_out

    def bytes(self) -> torch.Tensor:
        return self._copy_out(self)

    def dropped(self) -> None:
        self.shared.dropped()


class FetchedObj(ChunkObj):
    """A chunk from the offload tier, in host memory of its own. memory: None once the last reference is gone. epoch: the one it
    was stored in."""

    def __init__(self, form: Form, key: ChunkKey, epoch: int, memory: torch.Tensor, ordinal: int | None) -> None:
        """ordinal: of the worker's GPU."""
        super().__init__(form)
        self.key, self.epoch, self._ordinal = key, epoch, ordinal
        self.memory: torch.Tensor | None = memory

    def bytes(self) -> torch.Tensor:
        if self.memory is None:
            return torch.zeros(self.form.nbytes, dtype=torch.uint8)
        return self.memory if self._ordinal is None else self.memory.to(f"cuda:{self._ordinal}")

    def dropped(self) -> None:
        self.memory = None


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
