"""Starts the plugin: reads the settings, checks the instance, and reports why it must not work."""

from __future__ import annotations

import logging
import os
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from vcache_backend.config import Config, OffloadConfig, hash_seed, load
from vcache_backend.errors import ConfigError
from vcache_backend.metadata_server import start
from vcache_backend.metadata_server.client import Client
from vcache_backend.transfer.layout import Layout
from vcache_backend.transfer.session import Session
from vcache_backend.vram_pool.paged import PagedKV

from ..served_at import served_at
from ..vllm.model import spec as model_spec
from ..vllm_memory import beside_vllm
from . import checks, patches
from .boundary import WORKER
from .instance import Instance, discover, hash_probe
from .patches import StepAside
from .settings import read
from .worker import PoolWorker

if TYPE_CHECKING:
    from .backend import VCacheBackend

log = logging.getLogger(__name__)

_NO_TIER = (
    "offload.policy is %s, but there is no offload tier behind LMCache, and nothing is offloaded: "
    'start vLLM with "kv_connector":"VCacheConnector"'
)


def begin(config: Any, metadata: Any, backend: VCacheBackend) -> PoolWorker:
    """Check LMCache and its settings, install the plugin, and join the pool. In the main thread.

    config, metadata: LMCache's. Raises StepAside, or any other error of the start."""
    # First, because LMCache needs an allocator even if the plugin steps aside: LMCache may have no
    # host tier.
    patches.take_allocator_role()
    WORKER.config = config
    _refuse(WORKER.off)
    _refuse(checks.version())
    settings = read(config.extra_config or {}, config.chunk_size)
    engine = patches.engine_of(metadata)
    if engine is None:
        raise StepAside(
            "no LMCache engine has this plugin's metadata; is this LMCache's in-process engine?"
        )
    instance = discover(metadata, settings.connector.model)
    _refuse(checks.refusal(config, instance))
    _refuse(model_spec.seed(hash_seed()))
    for line in checks.remarks(config, instance):
        log.warning("%s", line)
    patches.install(engine, backend, instance.adapter)
    if settings.connector.start_server:
        start.try_ensure(settings)
    if settings.offload.policy != "off":
        log.warning("vcache: " + _NO_TIER, settings.offload.policy)
    kv = instance.describe(config.chunk_size)
    probe, algorithm = hash_probe(engine.token_database), config.pre_caching_hash_algorithm
    return _join(settings, instance, kv, instance.layout(kv, config.chunk_size, probe, algorithm))


def _join(settings: Config, instance: Instance, kv: PagedKV, layout: Layout) -> PoolWorker:
    """Connect, and lend memory. VCacheError."""
    session = Session(
        msgspec.structs.replace(settings, offload=OffloadConfig()),
        layout,
        over_budget=beside_vllm(instance.vllm_config),
        rank=instance.rank,
        kv_device=str(kv.device),
        name=served_at(instance.vllm_config),
    )
    if settings.connector.start_server:
        session.client.on_killed = partial(start.try_ensure, settings)
    try:
        session.bind(instance.kvcaches, kv)
    except BaseException:
        session.close()
        raise
    size, trouble = settings.engine.chunk_size, session.client.trouble
    chunk = f"{kv.chunk_bytes(size):,} B a chunk of {size} tokens"
    server = f"not connected: {trouble}" if trouble else f"at {settings.server.path}"
    where = session.namespace, session.device, server
    log.info("vcache: %s, namespace %s, %s, server %s", chunk, *where)
    return PoolWorker(session, kv, instance.ranks)


def say_stepped_aside(config: Any, metadata: Any, reason: str, error: Exception | None) -> None:
    """Report why the plugin stepped aside: in the log, to the server, and to LMCache's engine.
    Never raises."""
    log.error("vcache stepped aside: %s. vLLM serves; nothing is cached", reason, exc_info=error)
    try:
        engine = patches.engine_of(metadata)
        if engine is not None:
            engine.mark_init_failed(f"vcache stepped aside: {reason}")
        who = f"LMCache's worker {metadata.worker_id} (pid {os.getpid()})"
        tell_server(config, f"stepped aside in {who}: {reason}")
    except Exception as failure:  # noqa: BLE001 the log already says why
        log.debug("the server was not told: %s", failure)


def tell_server(config: Any, text: str) -> None:
    """Report an error to the metadata server that LMCache's configuration names. Raises
    VCacheError."""
    try:
        ours = read(config.extra_config or {}, config.chunk_size)
    except ConfigError:
        ours = load()  # at least the default socket
    with Client(ours.server.path, ours.client, reconnect=False) as client:
        client.report("error", text)


def _refuse(reason: str | None) -> None:
    if reason:
        raise StepAside(reason)
