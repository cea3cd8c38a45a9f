"""The storage plugin: LMCache's storage backend and allocator, and how it starts."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import msgspec
from lmcache.v1.storage_backend.abstract_backend import (
    AllocatorBackendInterface,
    StoragePluginInterface,
)

from vcache_backend.config import Config, OffloadConfig, hash_seed
from vcache_backend.errors import ConfigError, VCacheError
from vcache_backend.metadata_server import start
from vcache_backend.supported import LMCACHE
from vcache_backend.transfer.layout import Layout
from vcache_backend.transfer.session import Session

from ..around_vllm import beside_vllm, join_log, served_at
from ..vllm.model import spec as model_spec
from . import hooks
from .boundary import WORKER, settings_of
from .instance import Instance, discover, hash_probe, refusal
from .worker import LMCacheWorker

log = logging.getLogger(__name__)


class VCacheBackend(StoragePluginInterface, AllocatorBackendInterface):  # type: ignore[misc]
    """The plugin's storage backend in one worker. LMCache makes it for `storage_plugins: [vcache]`;
    see docs/lmcache.md.

    Requests are served by `LMCacheWorker`, in place of LMCache's engine. By itself the backend
    finds, loads and stores nothing. It is LMCache's allocator, which always returns None, even if
    the plugin must not work here (see `refusal`). Nothing raises (see `boundary`)."""

    is_vcache = True

    def __init__(self, *, config: Any, metadata: Any, **given: Any) -> None:
        super().__init__(config=config, metadata=metadata, **given)
        self.worker: LMCacheWorker | None = None
        """None if the plugin stepped aside, and after `close`."""
        try:
            WORKER.adopt(config)
            join_log()
            self.worker = _begin(config, metadata, self)
        except Exception as error:  # noqa: BLE001
            # LMCache would swallow the error, and go on without us but with our GPU connector.
            _step_aside(metadata, error)

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


def _begin(config: Any, metadata: Any, backend: VCacheBackend) -> LMCacheWorker:
    """Check LMCache and its settings, join the pool, and install the plugin. In the main thread.

    config, metadata: LMCache's. Raises ConfigError with what to change where the plugin must not
    work, or any other error of the start."""
    # First, because LMCache needs an allocator even if the plugin steps aside: LMCache may have no
    # host tier.
    hooks.take_allocator_role()
    _refuse(WORKER.off)
    size = config.chunk_size
    if not LMCACHE.supports(installed := LMCACHE.installed()[1]):
        wrong = f"LMCache {installed} is not one that vcache works with"
        _refuse(f"{wrong}: pip install '{LMCACHE.name}{LMCACHE.wanted}'")
    settings, engine = settings_of(config), hooks.engine_of(metadata)
    _refuse("" if engine is not None else "no LMCache engine of this process has this plugin")
    instance = discover(metadata, settings.connector.model)
    _refuse(refusal(config, instance) or model_spec.seed(hash_seed()) or "")
    if settings.connector.start_server:
        start.try_ensure(settings)
    if settings.offload.policy != "off":
        log.warning("vcache: there is no offload tier behind LMCache: nothing is offloaded")
    # LMCache's `recreate_backend` makes a new backend of ours, even for another tier.
    tiers = getattr(engine.storage_manager, "storage_backends", {})
    for before in list(tiers.values()):
        if getattr(before, "is_vcache", False) and before is not backend:
            before.close()
    kv, probe = instance.describe(size), hash_probe(engine.token_database)
    layout = instance.layout(kv, size, probe, config.pre_caching_hash_algorithm)
    session = _connect(settings, instance, layout, str(kv.device))
    try:
        session.bind(instance.kvcaches, kv)
        worker = LMCacheWorker(session, kv, instance, engine, backend)
        hooks.install(engine, backend, worker, instance.adapter)
    except BaseException:
        session.close()
        raise
    trouble, chunk = session.client.trouble, f"{kv.chunk_bytes(size):,} B a chunk of {size} tokens"
    server = f"not connected: {trouble}" if trouble else f"at {settings.server.path}"
    where = session.namespace, session.device, server
    log.info("vcache: %s, namespace %s, %s, server %s", chunk, *where)
    return worker


def _refuse(reason: str) -> None:
    if reason:
        raise ConfigError(reason)


def _connect(settings: Config, instance: Instance, layout: Layout, device: str) -> Session:
    """Connect, and lend memory. VCacheError."""
    session = Session(
        msgspec.structs.replace(settings, offload=OffloadConfig()),
        layout,
        over_budget=beside_vllm(instance.vllm_config),
        rank=instance.rank,
        kv_device=device,
        name=served_at(instance.vllm_config),
    )
    session.counts = instance.first
    if settings.connector.start_server:
        session.client.on_killed = partial(start.try_ensure, settings)
    return session


def _step_aside(metadata: Any, error: Exception) -> None:
    """Say why the plugin must not work here: in the log, to the server, and to LMCache's engine.
    Never raises."""
    reason = str(error) or type(error).__name__
    WORKER.fail(reason, None if isinstance(error, VCacheError) else error)
    try:
        if (engine := hooks.engine_of(metadata)) is not None:
            engine.mark_init_failed(f"vcache caches nothing: {reason}")
    except Exception as failure:  # noqa: BLE001 the log already says why
        log.debug("LMCache's engine was not told: %s", failure)
