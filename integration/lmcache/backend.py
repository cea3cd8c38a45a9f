"""The storage plugin: LMCache's storage backend and allocator."""

from __future__ import annotations

from typing import Any

from lmcache.v1.storage_backend.abstract_backend import (
    AllocatorBackendInterface,
    StoragePluginInterface,
)

from vcache_backend.errors import VCacheError

from .. import logs
from .boundary import WORKER
from .startup import begin, say_stepped_aside
from .worker import LMCacheWorker


class VCacheBackend(StoragePluginInterface, AllocatorBackendInterface):  # type: ignore[misc]
    """The plugin's storage backend in one worker. LMCache makes it for `storage_plugins: [vcache]`;
    see docs/lmcache.md.

    Requests are served by `LMCacheWorker`, in place of LMCache's engine. By itself the backend
    finds, loads and stores nothing. It is LMCache's allocator, which always returns None, even if
    the plugin must not work here (see `checks`). Nothing raises (see `boundary`)."""

    is_vcache = True

    def __init__(self, *, config: Any, metadata: Any, **given: Any) -> None:
        super().__init__(config=config, metadata=metadata, **given)
        self.worker: LMCacheWorker | None = None
        """None if the plugin stepped aside, and after `close`."""
        try:
            logs.join_vllm()
            self.worker = begin(config, metadata, self)
        except Exception as error:  # noqa: BLE001
            # LMCache would swallow the error, and go on without us but with our GPU connector.
            reason = str(error) or type(error).__name__
            unknown = None if isinstance(error, VCacheError) else error
            say_stepped_aside(config, metadata, reason, unknown)

    def contains(self, *_: Any, **__: Any) -> bool:
        return False

    pin = unpin = exists_in_put_tasks = remove = contains

    def allocate(self, *_: Any, **__: Any) -> None:
        return None

    batched_allocate = batched_submit_put_task = get_blocking = touch_cache = allocate

    def clear(self) -> int:
        """Reset the namespace for all instances. Returns the number of tokens removed."""
        removed = WORKER.run(self.worker.clear) if self.worker is not None else None
        return int(removed or 0) * int(self.config.chunk_size)

    def get_allocator_backend(self, *_: Any) -> VCacheBackend:
        return self

    get_memory_allocator = initialize_allocator = get_allocator_backend

    def memcheck(self) -> bool:
        """As of an allocator: its books are right, being empty."""
        return True

    def close(self) -> None:
        """Finish stores and leave the pool. The chunks stay in the pool."""
        worker = self.worker
        self.worker = None
        if worker is not None:
            WORKER.run(worker.close, off=worker.close)
