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
from vcache_backend.transfer.leases import Lease


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


class NotedSlots(NamedTuple):
    """The tokens of a chunk in KV caches: at `slots[start:]` (int64), the slots of a request's tokens."""

    kvcaches: KVCaches
    slots: Any
    start: int


class DeferredObj(ChunkObj):
    """What `allocate` gives: no place in the pool yet. The GPU connector notes where the tokens lie; `put` moves them.

    source: where its tokens lie. copy_out: who can copy it out of the KV cache.
    """

    source: NotedSlots | None = None
    copy_out: Callable[[DeferredObj], torch.Tensor] | None = None

    def bytes(self) -> torch.Tensor:
        if self.copy_out is None:
            return torch.zeros(self.form.nbytes, dtype=torch.uint8)
        return self.copy_out(self)


class SharedLease:
    """One lease for the chunks of one `get`; released with the last of them, unless somebody took it."""

    def __init__(self, lease: Lease, release: Callable[[Lease], None], users: int) -> None:
        self._lease: Lease | None = lease
        self._release, self._users = release, users
        self._lock = threading.Lock()

    def take(self) -> Lease | None:
        """The lease, for good: whoever takes it ends it. None if it is over."""
        with self._lock:
            lease, self._lease = self._lease, None
            return lease

    def dropped(self) -> None:
        with self._lock:
            self._users -= 1
            last = self._users == 0
        lease = self.take() if last else None
        if lease is not None:
            self._release(lease)


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


class FetchedObj(ChunkObj):
    """A chunk from the offload tier, in host memory of its own until the last reference is gone. epoch: the one it was stored in."""

    def __init__(self, form: Form, key: ChunkKey, epoch: int, memory: torch.Tensor, give: Callable[[torch.Tensor], None]) -> None:
        """give: takes the memory back."""
        super().__init__(form)
        self.key, self.epoch, self._give = key, epoch, give
        self.memory: torch.Tensor | None = memory

    def bytes(self) -> torch.Tensor:
        """A copy: the memory is used again."""
        return torch.zeros(self.form.nbytes, dtype=torch.uint8) if self.memory is None else self.memory.clone()

    def dropped(self) -> None:
        memory, self.memory = self.memory, None
        if memory is not None:
            self._give(memory)

    def __del__(self) -> None:
        # Whoever forgot to count it down: LMCache where a call of it failed.
        self.dropped()


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
