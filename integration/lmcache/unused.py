"""Objects that LMCache's interfaces require and nobody uses: `Verbs` replaces their callers."""

from __future__ import annotations

from typing import Any, NoReturn

from lmcache.v1.gpu_connector.gpu_connectors import GPUConnectorInterface
from lmcache.v1.memory_management import MemoryAllocatorInterface


class NoGPUConnector(GPUConnectorInterface):  # type: ignore[misc]
    """Replaces LMCache's GPU connector, which has buffers, and which LMCache lacks on a CPU."""

    def to_gpu(self, *_: Any, **__: Any) -> NoReturn:
        """Raise RuntimeError."""
        raise RuntimeError(
            "LMCache moves memory objects where vcache moves chunks by itself; is this another "
            "version of LMCache?"
        )

    from_gpu = batched_from_gpu = batched_to_gpu = get_shape = to_gpu


class NoAllocator(MemoryAllocatorInterface):  # type: ignore[misc]
    """An allocator without memory, for LMCache's check of its books: the server allocates."""

    def allocate(self, *_: Any, **__: Any) -> None:
        return None

    batched_allocate = free = batched_free = allocate

    def memcheck(self) -> bool:
        return True
