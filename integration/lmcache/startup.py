"""Starts the plugin: reads the settings, checks the instance, and reports why it must not work."""

from __future__ import annotations

import logging
import os
from functools import partial
from typing import Any

import msgspec

from vcache_backend.config import Config, OffloadConfig, hash_seed, load
from vcache_backend.errors import ConfigError, VCacheError
from vcache_backend.metadata_server import start
from vcache_backend.protocol.client import Client
from vcache_backend.transfer.layout import Layout
from vcache_backend.transfer.session import Session

from ..served_at import served_at
from ..vllm.model import spec as model_spec
from ..vllm_memory import beside_vllm
from . import checks, patches
from .boundary import WORKER
from .instance import Instance, discover, hash_probe
from .settings import read
from .worker import LMCacheWorker

log = logging.getLogger(__name__)


class StepAside(VCacheError):
    """The plugin must not work here. The message says why, and what to change."""


def begin(config: Any, metadata: Any, backend: Any) -> LMCacheWorker:
    """Check LMCache and its settings, join the pool, and install the plugin. In the main thread.

    config, metadata: LMCache's. Raises StepAside, or any other error of the start."""
    # First, because LMCache needs an allocator even if the plugin steps aside: LMCache may have no
    # host tier.
    patches.take_allocator_role()
    WORKER.config, size = config, config.chunk_size
    _refuse(WORKER.off or checks.version())
    settings = read(config.extra_config or {}, size)
    engine = patches.engine_of(metadata)
    _refuse("" if engine is not None else "no LMCache engine of this process has this plugin")
    instance = discover(metadata, settings.connector.model)
    _refuse(checks.refusal(config, instance) or model_spec.seed(hash_seed()))
    if settings.connector.start_server:
        start.try_ensure(settings)
    if settings.offload.policy != "off":
        log.warning("%s", checks.NO_TIER)
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
        patches.install(engine, backend, worker, instance.adapter)
    except BaseException:
        session.close()
        raise
    trouble, chunk = session.client.trouble, f"{kv.chunk_bytes(size):,} B a chunk of {size} tokens"
    server = f"not connected: {trouble}" if trouble else f"at {settings.server.path}"
    where = session.namespace, session.device, server
    log.info("vcache: %s, namespace %s, %s, server %s", chunk, *where)
    return worker


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
    if settings.connector.start_server:
        session.client.on_killed = partial(start.try_ensure, settings)
    return session


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
