"""Starts the plugin: reads the settings, checks the instance, and reports why it must not work."""

from __future__ import annotations

import logging
import os
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from vcache_backend.config import OffloadConfig, hash_seed, load
from vcache_backend.errors import ConfigError
from vcache_backend.metadata_server import start
from vcache_backend.metadata_server.client import Client
from vcache_backend.transfer.arguments import KVCaches
from vcache_backend.transfer.session import Session

from ..memory_budget import beside_vllm
from ..round_trip import through_pool
from ..served_at import data_parallel_rank, served_at
from ..vllm.model import spec as model_spec
from . import checks, patches
from .instance import Instance, discover, hash_probe
from .patches import StepAside
from .settings import Settings, read
from .worker import PoolWorker

if TYPE_CHECKING:
    from .backend import VCacheBackend

log = logging.getLogger(__name__)

_NO_TIER = (
    "offload.policy is %s, but there is no offload tier behind LMCache, and nothing is offloaded: "
    'start vLLM with "kv_connector":"VCacheConnector"'
)


class Start(NamedTuple):
    """The plugin in a worker of LMCache that may cache. config, engine: LMCache's."""

    config: Any
    engine: Any
    settings: Settings
    instance: Instance

    def bind(self, kvcaches: KVCaches) -> PoolWorker:
        """Connect under these KV caches' namespace, lend memory, and check that bytes come back
        from the pool unchanged. In the main thread.

        Raises StepAside or VCacheError."""
        instance, size = self.instance, self.config.chunk_size
        kv, config = instance.describe(kvcaches, self.settings.config)
        probe = hash_probe(self.engine.token_database)
        algorithm = self.config.pre_caching_hash_algorithm
        layout = instance.layout(kvcaches, kv, size, probe, algorithm)
        over_budget = beside_vllm(instance.model.device_type, instance.model.gpu_memory_utilization)
        vllm = instance.vllm_config
        name = served_at(data_parallel_rank(vllm) if vllm is not None else None)
        if config.offload.policy != "off":
            log.warning("vcache: " + _NO_TIER, config.offload.policy)
        session = Session(
            msgspec.structs.replace(config, offload=OffloadConfig()),
            layout,
            over_budget=over_budget,
            rank=instance.rank,
            kv_device=str(kv.device),
            name=name,
        )
        if self.settings.start_server:
            session.client.on_killed = partial(start.try_ensure, self.settings.config)
        try:
            session.bind(kvcaches)
            _refuse(through_pool(session, kv))
        except BaseException:
            session.close()
            raise
        chunk = f"{kv.chunk_bytes(size):,} B a chunk of {size} tokens"
        trouble = session.client.trouble
        server = f"not connected: {trouble}" if trouble else f"at {config.server.path}"
        where = session.namespace, session.device, server
        log.warning("vcache: %s, namespace %s, %s, server %s", chunk, *where)
        under_vllm = instance.adapter is not None
        worker = PoolWorker(session, kvcaches, instance.ranks, under_vllm)
        worker.settles = under_vllm
        return worker


def begin(config: Any, metadata: Any, backend: VCacheBackend) -> Start:
    """Check LMCache and its settings, and install the plugin. In the main thread.

    Raises StepAside, or any other error of the start."""
    # First, because LMCache needs an allocator even if the plugin steps aside: it may have no host
    # tier.
    patches.take_allocator_role()
    _refuse(checks.version())
    settings = read(config.extra_config or {}, config.chunk_size)
    engine = patches.engine_of(metadata)
    if engine is None:
        raise StepAside(
            "no LMCache engine has this plugin's metadata; is this LMCache's in-process engine?"
        )
    instance = discover(metadata, settings)
    _refuse(checks.refusal(config, instance))
    _refuse(model_spec.seed(hash_seed()) if instance.adapter is not None else None)
    for line in checks.remarks(config, instance):
        log.warning("%s", line)
    patches.install(engine, backend, instance.adapter)
    if settings.start_server:
        start.try_ensure(settings.config)
    return Start(config, engine, settings, instance)


def say_stepped_aside(config: Any, metadata: Any, reason: str, error: Exception | None) -> None:
    """Report why the plugin stepped aside: in the log, to the server, and to LMCache's engine.
    Never raises."""
    log.error("vcache stepped aside: %s. vLLM serves; nothing is cached", reason, exc_info=error)
    try:
        engine = patches.engine_of(metadata)
        if engine is not None:
            engine.mark_init_failed(f"vcache stepped aside: {reason}")
        try:
            ours = read(config.extra_config or {}, config.chunk_size).config
        except ConfigError:
            ours = load()  # at least the default socket
        who = f"LMCache's worker {metadata.worker_id} (pid {os.getpid()})"
        with Client(ours.server.path, ours.client, reconnect=False) as client:
            client.report("error", f"stepped aside in {who}: {reason}")
    except Exception as failure:  # noqa: BLE001 the log already says why
        log.debug("the server was not told: %s", failure)


def _refuse(reason: str | None) -> None:
    if reason:
        raise StepAside(reason)
