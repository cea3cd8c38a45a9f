"""How the plugin starts: what it finds out, what it checks, and what it says when it must not work."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any

import msgspec

from vcache_backend.config import Config, OffloadConfig, hash_seed, load
from vcache_backend.metadata_server.client import Client
from vcache_backend.transfer.arguments import KVCaches
from vcache_backend.transfer.chunk_io import ChunkIO, checked_layout
from vcache_backend.vram_pool.paged import PagedKV

from ..memory_budget import beside_vllm
from ..round_trip import through_pool
from ..vllm import model_spec
from . import installation, selftest, start_server
from .gpu_connector import VCacheGPUConnector
from .instance import Instance, discover, hash_probe, layout
from .offload import Below
from .settings import Settings, read
from .worker import PoolWorker

if TYPE_CHECKING:
    from .backend import VCacheBackend

log = logging.getLogger(__name__)


SERVER_SECONDS = 10.0
"""How long to wait for a server that LMCache has been told to start."""


class StepAside(Exception):
    """The plugin must not work here; the message says why, and what to change."""


class Starter:
    """Turns LMCache's configuration into a `PoolWorker`, or says why not. In the worker's main thread."""

    def __init__(self, config: Any, metadata: Any, backend: VCacheBackend) -> None:
        self._config, self._metadata, self._backend = config, metadata, backend
        self._engine: Any = None
        self._settings: Settings | None = None
        self._instance: Instance | None = None

    def start(self) -> PoolWorker | None:
        """Check LMCache and its settings, and put the plugin in its places. The worker if the KV caches are known already, as they
        are under vLLM; else `bind` makes it. Raises StepAside, or whatever else went wrong."""
        _refuse(selftest.versions())
        self._settings = read(self._config.extra_config or {}, self._config.chunk_size)
        self._engine = installation.engine_of(self._metadata)
        if self._engine is None:
            raise StepAside("no LMCache engine has this plugin's metadata; is this LMCache's in-process engine?")
        self._instance = discover(self._metadata, self._config, self._settings)
        _refuse(selftest.modes(self._config, self._instance))
        _refuse(model_spec.seed(hash_seed()) if self._instance.under_vllm else None)
        for line in selftest.remarks(self._config, self._instance):
            log.warning("%s", line)
        self._install()
        kvcaches = self._instance.kvcaches
        return self.bind(kvcaches) if kvcaches else None

    def bind(self, kvcaches: KVCaches) -> PoolWorker:
        """Connect under the namespace these KV caches belong to, lend memory, and send bytes to the pool and back."""
        if self._instance is None or self._settings is None:
            raise StepAside("the plugin did not start")
        instance, config = self._instance, _whole_blocks(self._settings.config, self._instance)
        engine = config.engine
        axes = engine.kv_axes or instance.kv_axes
        kv = PagedKV.describe(kvcaches, instance.block_size, axes=axes, whole_blocks_only=engine.whole_blocks_only)
        self._refuse_other_sizes(kv.chunk_bytes(engine.chunk_size))
        probe = hash_probe(self._engine.token_database)
        agreed = checked_layout(config, layout(instance, kv, engine.chunk_size, probe, self._config.pre_caching_hash_algorithm))
        if start_server.is_named_in(self._config.runtime_plugin_locations):
            start_server.wait_for(config, SERVER_SECONDS)
        over_budget = beside_vllm(instance.device_type, instance.gpu_memory_utilization)
        io = ChunkIO(_on_device_of(kv, config), agreed, over_budget=over_budget, rank=instance.rank)
        try:
            io.bind(kvcaches)
            _refuse(through_pool(io, kv))
        except BaseException:
            io.close()
            raise
        log.warning(
            "vcache: %s B a chunk of %d tokens, namespace %s, %s, server %s",
            f"{kv.chunk_bytes(engine.chunk_size):,}",
            engine.chunk_size,
            agreed.namespace(),
            io.device,
            f"not connected: {io.client.trouble}" if io.client.trouble else f"at {config.server.path}",
        )
        below = self._below(io, config.offload)
        rank, ranks = instance.rank, instance.ranks
        worker = PoolWorker(io, kvcaches, agreed.namespace(), rank, ranks, instance.under_vllm, self._metadata, below)
        worker.settles = instance.connector is not None
        if self._backend.local_cpu_backend is not None:
            worker.foreign.share()
        return worker

    def say_stepped_aside(self, reason: str, error: Exception | None) -> None:
        """One line in the log, one at the server; LMCache's engine is told that it does not work. Never raises."""
        log.error("vcache stepped aside: %s. vLLM serves, nothing is cached", reason, exc_info=error)
        try:
            engine = self._engine or installation.engine_of(self._metadata)
            if engine is not None:
                engine.mark_init_failed(f"vcache stepped aside: {reason}")
            # Settings that could not be read name no socket: the default one is worth a try.
            config = self._settings.config if self._settings is not None else load()
            with Client(config.server.path, config.client, reconnect=False) as there:
                there.report(
                    "error", f"stepped aside in LMCache's worker {self._metadata.worker_id} (pid {os.getpid()}): {reason}"
                )
        except Exception as failure:  # noqa: BLE001 nobody is left to tell
            log.debug("the server was not told: %s", failure)

    # ---- inside

    def _below(self, io: ChunkIO, config: OffloadConfig) -> Below:
        """The offload tier, and a line about it where there is one."""
        below = Below(io, config.staging_bytes)
        loads_ahead = bool(getattr(self._config, "enable_async_loading", False))
        below.counts = loads_ahead or self._instance is None or self._instance.recomputes
        if below.there:
            log.warning("vcache: offload tier: %s", config)
            if not below.counts:
                text = (
                    "look-ups do not count what is below the pool: vLLM would compute wrongly if it did not come "
                    "(vLLM issue #49250). Set enable_async_loading: true in LMCache's configuration"
                )
                log.warning("vcache: %s", text)
        return below

    def _install(self) -> None:
        theirs = self._engine.gpu_connector
        mine = VCacheGPUConnector(self._backend, getattr(theirs, "load_stream", None))
        self._engine.gpu_connector = mine

        engine = self._engine

        def retrieving() -> None:
            mine.failed_from = None
            # The host tier may have been made again since (`recreate_backend`).
            if engine.storage_manager is not None and engine.storage_manager.local_cpu_backend is not None:
                installation.guard_hot_cache(engine.storage_manager.local_cpu_backend)

        installation.wrap_retrieve(self._engine, lambda: mine.failed_from, retrieving)
        installation.retrieve_directly(self._engine, self._name, self._backend.load_found)
        if self._backend.local_cpu_backend is not None:
            installation.guard_hot_cache(self._backend.local_cpu_backend)
        self._succeed()
        adapter = self._instance.connector if self._instance is not None else None
        if adapter is not None:
            installation.load_under_full_graphs(adapter)
            installation.report_blocks(adapter, self._backend.settle)
            installation.keep_slot_mappings_on_host(adapter)

    def _name(self) -> str:
        """What LMCache calls our tier."""
        backends = self._engine.storage_manager.storage_backends.items()
        return next((name for name, backend in backends if backend is self._backend), "")

    def _succeed(self) -> None:
        """Take the place of the plugin's backend before this one. `recreate_backend` of LMCache, and of any other tier, makes a new
        one: it goes on allocating from the old one, and closes that only if it was the one to be made again."""
        manager = self._engine.storage_manager
        if manager is None:
            return
        for backend in list(manager.storage_backends.values()):
            if getattr(backend, "is_vcache", False) and backend is not self._backend:
                backend.close()
        manager.allocator_backend = self._backend

    def _refuse_other_sizes(self, nbytes: int) -> None:
        """Other tiers of LMCache allocate what its metadata says a chunk has."""
        shapes, dtypes = self._metadata.get_shapes(self._config.chunk_size), self._metadata.get_dtypes()
        theirs = sum(shape.numel() * dtype.itemsize for shape, dtype in zip(shapes, dtypes, strict=True))
        if theirs != nbytes and self._backend.local_cpu_backend is not None:
            raise StepAside(
                f"LMCache takes a chunk for {theirs:,} B where the KV caches have {nbytes:,} B, and a host tier is configured beside "
                "vcache; set max_local_cpu_size: 0 and remove remote tiers"
            )


def _refuse(reason: str | None) -> None:
    if reason:
        raise StepAside(reason)


def _whole_blocks(config: Config, instance: Instance) -> Config:
    """The configuration with what the instance knows about its blocks."""
    whole = config.engine.whole_blocks_only or instance.whole_blocks_only
    return msgspec.structs.replace(config, engine=msgspec.structs.replace(config.engine, whole_blocks_only=whole))


def _on_device_of(kv: PagedKV, config: Config) -> Config:
    """`auto` is the device of the KV caches."""
    if config.pool.device != "auto":
        return config
    device = "host" if kv.device.type == "cpu" else str(kv.device)
    return msgspec.structs.replace(config, pool=msgspec.structs.replace(config.pool, device=device))
