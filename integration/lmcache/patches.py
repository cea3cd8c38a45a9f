"""Every place in LMCache and in vLLM where the plugin puts itself. Each is replaced by `_replace`, so that doing it twice is once.

In vLLM's processes, by our plugin for vLLM (../plugin.py), which calls `register()` in each of them: when vLLM itself imports LMCache's
connector (a user asked for `LMCacheConnectorV1`), its constructor is wrapped. Where LMCache's configuration names our plugin the
scheduler's connector gives each request its scope as a tag (scope.py) before it looks anything up, and does not cache requests that no
key tells apart; without that the plugin refuses every key. A worker on a platform for which LMCache has no GPU connector (the CPU) gets
ours instead of an exception.

In a worker, by the plugin's backend: `take_allocator_role` and `install`.
"""

from __future__ import annotations

import copy
import functools
import importlib
import inspect
import json
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn

from .scope import Scheduler

if TYPE_CHECKING:
    from .backend import VCacheBackend
    from .verbs import Verbs

CONNECTOR_MODULE = "vllm.distributed.kv_transfer.kv_connector.v1.lmcache_connector"
CONNECTOR_CLASS = "LMCacheConnectorV1"
PLUGIN_MODULE = "vcache_backend.integration.lmcache"
WANTED = "lmcache>=0.5.3,<0.6"
"""The versions whose private points were read."""
_THEIRS = "_theirs_before_vcache"
log = logging.getLogger(__name__)


class StepAside(Exception):
    """The plugin must not work here; the message says why, and what to change."""


def _replace(owner: Any, name: str, make: Callable[[Any], Callable[..., Any]], wanted: str = "") -> None:
    """`owner.name` becomes `make(theirs)`, of what had been there before anything of ours. wanted: parameters it must have. StepAside
    where it is another than it was."""
    theirs = getattr(owner, name, None)
    theirs = getattr(theirs, _THEIRS, theirs)
    there = inspect.signature(theirs).parameters if callable(theirs) else {}
    lacking = [one for one in wanted.split() if one not in there]
    if not callable(theirs) or lacking:
        _changed(owner, f"{name} with {' and '.join(lacking)}" if lacking else name)
    ours = functools.wraps(theirs)(make(theirs))
    setattr(ours, _THEIRS, theirs)
    setattr(owner, name, ours)


def _changed(owner: Any, what: str) -> NoReturn:
    kind = owner if isinstance(owner, type | ModuleType) else type(owner)
    raise StepAside(f"LMCache has changed where vcache holds on to it: {kind.__name__} has no {what}; install {WANTED}")


def _must_have(owner: Any, names: str) -> None:
    lacking = [name for name in names.split() if not hasattr(owner, name)]
    if lacking:
        _changed(owner, ", ".join(lacking))


def names_our_plugin(config: Any) -> bool:
    """Whether an `LMCacheEngineConfig` has a storage plugin that is ours."""
    extra: Mapping[str, Any] = getattr(config, "extra_config", None) or {}
    modules = (extra.get(f"storage_plugin.{name}.module_path") for name in getattr(config, "storage_plugins", None) or ())
    return any(str(module).startswith(PLUGIN_MODULE) for module in modules)


# ---- vLLM's processes: the constructor of its connector


def register() -> None:
    """Have `LMCacheConnectorV1` wrapped as soon as vLLM imports it. Idempotent, cheap, and never raises."""
    try:
        module = sys.modules.get(CONNECTOR_MODULE)
        if module is not None:
            _replace(getattr(module, CONNECTOR_CLASS), "__init__", _constructor)
        elif not any(isinstance(finder, _OnImport) for finder in sys.meta_path):
            sys.meta_path.insert(0, _OnImport())
    except Exception:  # vLLM must start
        log.warning("vcache's hook could not be set; nothing will be cached", exc_info=True)


class _OnImport(MetaPathFinder):
    """Finds one module the ordinary way, and has it wrapped when it has been executed."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname != CONNECTOR_MODULE:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                register()

            setattr(spec.loader, "exec_module", exec_module)  # noqa: B010 - of this one loader, made for this one module
        return spec


def _constructor(construct: Callable[..., None]) -> Callable[..., None]:
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        native = _guarded(_uses_native, *args, **kwargs)
        if native is False:
            _guarded(_supply_connector)
        construct(self, *args, **kwargs)
        if native is False:
            _guarded(_patch_scheduler, self)

    return __init__


def _guarded(what: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The answer of a step of ours, or None and one line if it fails: the connector is made all the same."""
    try:
        return what(*args, **kwargs)
    except Exception as error:  # noqa: BLE001 - vLLM must start
        log.warning("vcache's hook failed and nothing will be cached (%s: %s: %s)", what.__name__, type(error).__name__, error)
        return None


def _uses_native(vllm_config: Any, *_: Any, **__: Any) -> bool:
    native = bool(vllm_config.kv_transfer_config.get_from_extra_config("use_native", False))
    if native:
        log.info("vcache does nothing: `use_native: true` picks vLLM's own copy of LMCache's adapter, without storage plugins")
    return native


def _supply_connector() -> None:
    """Have `CreateGPUConnector` answer our connector where LMCache has none. vLLM's adapter imports it when it calls it."""
    source: Any = importlib.import_module("lmcache.v1.gpu_connector")
    vllm = importlib.import_module("lmcache.utils").EngineType.VLLM

    def make(create: Callable[..., Any]) -> Callable[..., Any]:
        def create_gpu_connector(config: Any, metadata: Any, engine: Any, *args: Any, **kwargs: Any) -> Any:
            if engine == vllm and source.torch_device_type == "cpu" and names_our_plugin(config):
                from .. import amx
                from .gpu_connector import VCacheGPUConnector

                amx.permit()
                return VCacheGPUConnector()
            return create(config, metadata, engine, *args, **kwargs)

        return create_gpu_connector

    _replace(source, "CreateGPUConnector", make)


# ---- the scheduler


def _patch_scheduler(connector: Any) -> None:
    adapter = connector._lmcache_engine
    if connector.role.name == "SCHEDULER" and names_our_plugin(adapter.config):
        _look_up_at_hand(adapter.lookup_client)
        scheduler = Scheduler(adapter)
        adapter.get_num_new_matched_tokens = scheduler.get_num_new_matched_tokens
        adapter.build_connector_meta = scheduler.build_connector_meta


def _look_up_at_hand(client: Any) -> None:
    """With one worker, in the scheduler's own process, a look-up need not go through a socket and another thread to reach it."""
    transport: Any = getattr(client, "transport", None)
    if type(client).__name__ != "LMCacheLookupClient" or client.enable_blending or getattr(transport, "world_size", 0) != 1:
        return
    builder = importlib.import_module("lmcache.v1.cache_engine").LMCacheEngineBuilder
    name = importlib.import_module("lmcache.integration.vllm.utils").ENGINE_NAME

    def make(theirs: Callable[..., list[bytes]]) -> Callable[..., list[bytes]]:
        def send_and_recv_all(message: list[Any]) -> list[bytes]:
            engine = builder.get(name)
            if engine is None or engine.storage_manager is None or engine.metadata.role != "worker":
                return theirs(message)
            hashes, offsets, lookup_id, configs = message
            asked = {"hashes": hashes, "offsets": offsets, "request_configs": json.loads(configs) if configs else None}
            try:
                return [engine.lookup(lookup_id=lookup_id, pin=True, **asked).to_bytes(4, "big")]
            except Exception as error:  # noqa: BLE001 - vLLM's scheduler would die of it
                log.warning("vcache: a look-up failed, which counts as a miss (%s: %s)", type(error).__name__, error)
                return []

        return send_and_recv_all

    _replace(transport, "send_and_recv_all", make)


# ---- a worker


def take_allocator_role() -> None:
    """From now on a StorageManager that has a backend of ours allocates from it; others are as before. LMCache decides it before
    anybody can reach the instance."""
    manager = importlib.import_module("lmcache.v1.storage_backend.storage_manager").StorageManager

    def make(theirs: Callable[..., Any]) -> Callable[..., Any]:
        def _get_allocator_backend(self: Any, config: Any) -> Any:
            ours = [backend for backend in self.storage_backends.values() if getattr(backend, "is_vcache", False)]
            return ours[0] if ours else theirs(self, config)

        return _get_allocator_backend

    _replace(manager, "_get_allocator_backend", make, "config")


def engine_of(metadata: Any) -> Any:
    """The LMCacheEngine that is being built with this metadata; None if there is none."""
    builder = importlib.import_module("lmcache.v1.cache_engine").LMCacheEngineBuilder
    _must_have(builder, "_instances")
    return next((engine for engine in builder._instances.values() if engine.metadata is metadata), None)


def install(engine: Any, backend: VCacheBackend, adapter: Any) -> Verbs:
    """Put `backend` into its engine, and into LMCache's adapter in vLLM where there is one, in place of a backend before it.

    `recreate_backend` of LMCache, and of any other tier, makes a new one: LMCache goes on allocating from the one before, and closes
    that only if it was the one to be made again.
    """
    from .gpu_connector import VCacheGPUConnector
    from .verbs import Verbs

    _must_have(engine, "token_database retrieve_locations is_healthy stats_monitor")
    _must_have(engine.stats_monitor, "on_lookup_request on_lookup_finished on_retrieve_request on_retrieve_finished")
    verbs, look_up = Verbs(engine, backend), "hashes offsets search_range lookup_id pin request_configs"
    for name, verb, wanted in (
        ("lookup", verbs.lookup, look_up),
        ("async_lookup_and_prefetch", verbs.fetch, look_up),
        ("lookup_unpin", verbs.unpin, "lookup_id"),
        ("cleanup_memory_objs", verbs.clean_up, "lookup_id"),
        ("retrieve", verbs.retrieve, "tokens mask kwargs"),
    ):
        _replace(engine, name, lambda theirs, verb=verb: functools.partial(verb, theirs), wanted)  # type: ignore[misc]
    engine.gpu_connector = VCacheGPUConnector(backend)
    if engine.storage_manager is not None:
        for before in list(engine.storage_manager.storage_backends.values()):
            if getattr(before, "is_vcache", False) and before is not backend:
                before.close()
        engine.storage_manager.allocator_backend = backend
    if adapter is not None:
        _must_have(adapter, "_parent _block_size")
        _replace(adapter, "start_load_kv", functools.partial(_load_under_full_graphs, adapter), "forward_context")
        _replace(adapter, "get_block_ids_with_load_errors", functools.partial(_report_blocks, adapter, backend))
        # Moved to a GPU, as the adapter would have it, a slot mapping waits for the forward pass. Copies are planned on the host.
        adapter.device = importlib.import_module("torch").device("cpu")
    return verbs


def _load_under_full_graphs(adapter: Any, theirs: Callable[..., Any]) -> Callable[..., Any]:
    """Under full CUDA graphs vLLM calls `start_load_kv` without attention metadata. LMCache then loads nothing and reports nothing,
    so that the request would be computed on whatever its blocks hold. It only asks whether the metadata is None."""

    def start_load_kv(forward_context: Any, **kwargs: Any) -> Any:
        if forward_context.attn_metadata is None:
            requests = getattr(adapter._parent._get_connector_metadata(), "requests", ())
            if any(request.load_spec is not None and request.load_spec.can_load for request in requests):
                forward_context = copy.copy(forward_context)
                forward_context.attn_metadata = {}
        return theirs(forward_context, **kwargs)

    return start_load_kv


def _report_blocks(adapter: Any, backend: VCacheBackend, theirs: Callable[[], set[int]]) -> Callable[[], set[int]]:
    """vLLM asks at the end of a step which blocks could not be loaded. Loads were launched at its beginning; now they must be done."""

    def get_block_ids_with_load_errors() -> set[int]:
        return theirs() | backend.settle(adapter._block_size)

    return get_block_ids_with_load_errors
