"""Starts the plugin: reads the settings, checks the instance, and reports why it must not work."""

from __future__ import annotations

import logging
import os
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from vcache_backend.config import OffloadConfig, hash_seed, load
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


class Starter:
    """Makes a `PoolWorker` from LMCache's configuration, or says why not. In the main thread."""

    def __init__(self, config: Any, metadata: Any, backend: VCacheBackend) -> None:
        self._config, self._metadata, self._backend = config, metadata, backend
        self._engine: Any = None
        self._settings: Settings | None = None
        self._instance: Instance | None = None

    def start(self) -> PoolWorker | None:
        """Check LMCache and its settings, and install the plugin. Returns the worker if the KV
        caches exist, as under vLLM; else None, and `bind` makes it later.

        Raises StepAside, or any other error of the start."""
        # First, because LMCache needs an allocator even if the plugin steps aside: it may have
        # no host tier.
        patches.take_allocator_role()
        _refuse(checks.version())
        self._settings = read(self._config.extra_config or {}, self._config.chunk_size)
        self._engine = patches.engine_of(self._metadata)
        if self._engine is None:
            raise StepAside(
                "no LMCache engine has this plugin's metadata; is this LMCache's in-process engine?"
            )
        self._instance = discover(self._metadata, self._settings)
        _refuse(checks.refusal(self._config, self._instance))
        _refuse(model_spec.seed(hash_seed()) if self._instance.adapter is not None else None)
        for line in checks.remarks(self._config, self._instance):
            log.warning("%s", line)
        patches.install(self._engine, self._backend, self._instance.adapter)
        if self._settings.start_server:
            start.try_ensure(self._settings.config)
        kvcaches = self._instance.kvcaches
        return self.bind(kvcaches) if kvcaches else None

    def bind(self, kvcaches: KVCaches) -> PoolWorker:
        """Connect under these KV caches' namespace, lend memory, and check that bytes come back
        from the pool unchanged.

        Raises StepAside or VCacheError."""
        if self._instance is None or self._settings is None:
            raise StepAside("the plugin did not start")
        instance, size = self._instance, self._config.chunk_size
        kv, config = instance.describe(kvcaches, self._settings.config)
        probe = hash_probe(self._engine.token_database)
        algorithm = self._config.pre_caching_hash_algorithm
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
        if self._settings.start_server:
            session.client.on_killed = partial(start.try_ensure, self._settings.config)
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

    def say_stepped_aside(self, reason: str, error: Exception | None) -> None:
        """Report why the plugin stepped aside: in the log, to the server, and to LMCache's engine.
        Never raises."""
        log.error(
            "vcache stepped aside: %s. vLLM serves; nothing is cached", reason, exc_info=error
        )
        try:
            engine = self._engine or patches.engine_of(self._metadata)
            if engine is not None:
                engine.mark_init_failed(f"vcache stepped aside: {reason}")
            # Without readable settings try the default socket.
            config = self._settings.config if self._settings is not None else load()
            who = f"LMCache's worker {self._metadata.worker_id} (pid {os.getpid()})"
            with Client(config.server.path, config.client, reconnect=False) as client:
                client.report("error", f"stepped aside in {who}: {reason}")
        except Exception as failure:  # noqa: BLE001 the log already says why
            log.debug("the server was not told: %s", failure)


def _refuse(reason: str | None) -> None:
    if reason:
        raise StepAside(reason)
