"""The storage plugin: LMCache's storage backend and allocator."""

from __future__ import annotations

import logging
from typing import Any

from lmcache.utils import CacheEngineKey
from lmcache.v1.memory_management import MemoryAllocatorInterface
from lmcache.v1.storage_backend.abstract_backend import (
    AllocatorBackendInterface,
    StoragePluginInterface,
)

from vcache_backend.errors import VCacheError

from .. import logs
from ..guard import answers
from .patches import StepAside
from .startup import begin, say_stepped_aside
from .unused import NoAllocator
from .worker import PoolWorker

log = logging.getLogger(__name__)


class VCacheBackend(StoragePluginInterface, AllocatorBackendInterface):  # type: ignore[misc]
    """The plugin's storage backend in one worker. LMCache makes it for `storage_plugins: [vcache]`;
    see docs/lmcache.md.

    LMCache calls `contains` and its variants in the look-up thread, and other methods in the
    worker's main thread. Nothing raises, and no call waits longer than the client's deadlines. The
    backend is LMCache's allocator, which always returns None, even if the plugin must not work here
    (see `checks`)."""

    is_vcache = True

    def __init__(self, *, config: Any, metadata: Any, **given: Any) -> None:
        super().__init__(config=config, metadata=metadata, **given)
        logs.join_vllm()
        self.worker: PoolWorker | None = None
        """None if the plugin stepped aside, and after `close`."""
        try:
            self.worker = begin(config, metadata, self)
        except Exception as error:  # noqa: BLE001
            # LMCache would swallow the error, and go on without us but with our GPU connector.
            reason = str(error) or type(error).__name__
            unknown = None if isinstance(error, StepAside | VCacheError) else error
            say_stepped_aside(config, metadata, reason, unknown)

    @answers(set)
    def settle(self, block_size: int) -> set[int]:
        return self.worker.settle(block_size) if self.worker is not None else set()

    # ---- look-ups and reads outside of requests; those of requests go through `Verbs`

    @answers(False)
    def contains(self, key: CacheEngineKey, pin: bool = False) -> bool:
        return self.worker is not None and self.worker.contains(key)

    def pin(self, key: CacheEngineKey) -> bool:
        return False

    unpin = exists_in_put_tasks = pin

    def touch_cache(self) -> None:
        """Do nothing: the server marks chunks as used when it leases them."""

    def get_blocking(self, key: CacheEngineKey) -> None:
        """Return None: `Verbs.retrieve` loads hits straight into the paged KV cache."""

    # ---- stores: `Verbs.store` stores chunks straight out of the paged KV cache

    def allocate(self, *_: Any, **__: Any) -> None:
        """Return None: LMCache then stores nothing."""

    batched_allocate = batched_submit_put_task = allocate

    # ---- the rest

    @answers(False)
    def remove(self, key: CacheEngineKey, force: bool = True) -> bool:
        """Remove a chunk, even a leased one: LMCache never asks a plugin to spare some."""
        return self.worker is not None and self.worker.remove(key)

    @answers(0)
    def clear(self) -> int:
        """Reset the namespace for all instances. Returns the number of tokens removed."""
        return self.worker.clear() * int(self.config.chunk_size) if self.worker is not None else 0

    def get_allocator_backend(self) -> AllocatorBackendInterface:
        return self

    def get_memory_allocator(self, *_: Any) -> MemoryAllocatorInterface:
        return NoAllocator()

    initialize_allocator = get_memory_allocator

    @answers(None)
    def close(self) -> None:
        """Finish stores and leave the pool. The chunks stay in the pool."""
        worker = self.worker
        self.worker = None
        if worker is not None:
            worker.session.close()

    def note_failure(self, call: str, error: Exception) -> None:
        """Count a failure, and log each cause once. Without a worker only `close` can fail."""
        if self.worker is not None:
            self.worker.session.miss(call, error)
        else:
            log.warning("%s failed: %s", call, error)
