"""Replaces LMCache's GPU connector: KV blocks move as opaque bytes, in one launch each way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from lmcache.v1.gpu_connector.gpu_connectors import GPUConnectorInterface
from lmcache.v1.memory_management import MemoryObj

if TYPE_CHECKING:
    from .backend import VCacheBackend


class VCacheGPUConnector(GPUConnectorInterface):  # type: ignore[misc]
    """Moves KV for LMCacheEngine. All calls come inside `store`, in the worker's main thread."""

    def __init__(self, backend: VCacheBackend | None = None) -> None:
        self.backend = backend

    def initialize_kvcaches_ptr(self, **kwargs: Any) -> None:
        """Use `kvcaches`, vLLM's tensors, one for each layer."""
        if "kvcaches" in kwargs:
            self._there().bind(kwargs["kvcaches"])

    def batched_from_gpu(
        self, memory_objs: Sequence[MemoryObj], starts: list[int], ends: list[int], **kwargs: Any
    ) -> None:
        """Note the chunks' slots in `kvcaches`, from `slot_mapping`. The copy follows when LMCache
        puts the chunks with their keys."""
        self._there().note_sources(list(memory_objs), starts, kwargs)

    def batched_to_gpu(self, *_: Any, **__: Any) -> None:
        """Raise RuntimeError: `Verbs.retrieve` replaces the engine's method and needs no memory
        objects, so nobody calls this."""
        raise RuntimeError(
            "LMCache loads memory objects where vcache loads chunks by itself; is this another "
            "version of LMCache?"
        )

    to_gpu = batched_to_gpu

    def from_gpu(self, memory_obj: MemoryObj, start: int, end: int, **kwargs: Any) -> None:
        self.batched_from_gpu([memory_obj], [start], [end], **kwargs)

    def get_shape(self, num_tokens: int) -> torch.Size:
        shapes: list[torch.Size] = self._there().metadata.get_shapes(num_tokens)
        return shapes[0]

    def _there(self) -> VCacheBackend:
        if self.backend is None:
            raise RuntimeError("LMCache did not build the storage plugin vcache; its log says why")
        return self.backend
