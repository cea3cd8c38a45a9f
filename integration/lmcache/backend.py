"""The storage plugin: LMCache's storage backend and allocator."""

from __future__ import annotations

from typing import Any

from lmcache.utils import CacheEngineKey
from lmcache.v1.memory_management import MemoryAllocatorInterface
from lmcache.v1.storage_backend.abstract_backend import (
    AllocatorBackendInterface,
    StoragePluginInterface,
)

from vcache_backend.errors import VCacheError

from .. import logs
from .boundary import WORKER
from .patches import StepAside
from .startup import begin, say_stepped_aside
from .unused import NoAllocator
from .worker import PoolWorker


class VCacheBackend(StoragePluginInterface, AllocatorBackendInterface):  # type: ignore[misc]
    """The plugin's storage backend in one worker. LMCache makes it for `storage_plugins: [vcache]`;
    see docs/lmcache.md.

    LMCache calls `contains` and its variants in the look-up thread, and other methods in the
    worker's main thread. Nothing raises (see `boundary`), and no call waits longer than the
    client's deadlines. The backend is LMCache's allocator, which always returns None, even if the
    plugin must not work here (see `checks`)."""

    is_vcache = True

    def __init__(self, *, config: Any, metadata: Any, **given: Any) -> None:
        super().__init__(config=config, metadata=metadata, **given)
        self.worker: PoolWorker | None = None
        """None if the plugin stepped aside, and after `close`."""
        try:
            logs.join_vllm()
            self.worker = begin(config, metadata, self)
        except Exception as error:  # noqa: BLE001
            # LMCache would swallow the error, and go on without us but with our GPU connector.
            reason = str(error) or type(error).__name__
            unknown = None if isinstance(error, StepAside | VCacheError) else error
            say_stepped_aside(config, metadata, reason, unknown)

    # ---- look-ups and reads outside of requests; those of requests go through `Verbs`

    def contains(self, key: CacheEngineKey, pin: bool = False) -> bool:
        return bool(self._ask("contains", key))

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

    def remove(self, key: CacheEngineKey, force: bool = True) -> bool:
        """Remove a chunk, even a leased one: LMCache never asks a plugin to spare some."""
        return bool(self._ask("remove", key))

    def clear(self) -> int:
        """Reset the namespace for all instances. Returns the number of tokens removed."""
        return self._ask("clear") * int(self.config.chunk_size)

    def get_allocator_backend(self) -> AllocatorBackendInterface:
        return self

    def get_memory_allocator(self, *_: Any) -> MemoryAllocatorInterface:
        return NoAllocator()

    initialize_allocator = get_memory_allocator

    def close(self) -> None:
        """Finish stores and leave the pool. The chunks stay in the pool."""
        worker = self.worker
        self.worker = None
        if worker is not None:
            WORKER.run(worker.session.close, off=worker.session.close)

    def _ask(self, verb: str, *given: Any) -> int:
        """Call the worker's method; 0 after a failure, and without a worker."""
        worker = self.worker
        return 0 if worker is None else int(WORKER.run(worker.ask, verb, *given, nothing=0))
