"""Replaces functions of LMCache and vLLM, but for those of the scheduler (scheduler.py). May be
repeated.

Our plugin for vLLM (../plugin.py) has `wrap` called once vLLM imports LMCache's connector, that is,
when a user asked for `LMCacheConnectorV1`. If LMCache's configuration names our plugin, the
scheduler's connector gets our part (scheduler.py). On a CPU, for which LMCache has no GPU
connector, a worker gets our connector instead of an exception.

The plugin's backend calls `take_allocator_role` and `install` in a worker."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from ..hooks import replace, require
from .boundary import SCHEDULER, THEIRS, WORKER
from .scheduler import LMCacheScheduler

if TYPE_CHECKING:
    from .worker import LMCacheWorker


def our_names(config: Any) -> list[str]:
    """The names under which LMCache's `storage_plugins` have our plugin."""
    extra: Mapping[str, Any] = getattr(config, "extra_config", None) or {}
    names = getattr(config, "storage_plugins", None) or ()
    paths = {name: str(extra.get(f"storage_plugin.{name}.module_path")) for name in names}
    return [name for name, path in paths.items() if path.startswith(__package__)]


# ---- vLLM's processes: the constructor of its connector


def wrap(module: Any) -> None:
    """Wrap `LMCacheConnectorV1` in vLLM's module. Never raises."""
    connector = getattr(module, "LMCacheConnectorV1", None)
    SCHEDULER.run(replace, connector, "__init__", _constructor, "vllm_config role")


def _constructor(construct: Callable[..., None]) -> Callable[..., None]:
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        WORKER.run(_supply_connector)
        construct(self, *args, **kwargs)
        SCHEDULER.adopt(getattr(getattr(self, "_lmcache_engine", None), "config", None))
        SCHEDULER.run(_patch_scheduler, self)

    return __init__


def _supply_connector() -> None:
    """Make `CreateGPUConnector` return our connector on a CPU, for which LMCache has none. vLLM's
    adapter imports the function on each call."""
    source: Any = importlib.import_module("lmcache.v1.gpu_connector")
    vllm = importlib.import_module("lmcache.utils").EngineType.VLLM

    def ours(config: Any, _: Any, engine: Any, *__: Any, **___: Any) -> Any:
        if engine != vllm or source.torch_device_type != "cpu" or not our_names(config):
            return THEIRS
        import torch

        # A first model run that is small, as after a hit, uses AMX without asking Linux for it.
        torch.cpu._init_amx()
        return NoGPUConnector()

    # Once more after an error, since LMCache's own raises on a CPU.
    WORKER.instead(source, "CreateGPUConnector", ours, off=ours)


def _patch_scheduler(connector: Any) -> None:
    if connector.role.name == "SCHEDULER" and our_names(connector._lmcache_engine.config):
        from ..vllm.model import versions

        LMCacheScheduler(connector)
        versions.watch()


# ---- a worker


class NoGPUConnector:
    """In place of LMCache's GPU connector, which has buffers, and which LMCache lacks on a CPU.
    Nobody calls it: `LMCacheWorker` replaces the callers."""

    def to_gpu(self, *_: Any, **__: Any) -> NoReturn:
        """Raise RuntimeError."""
        raise RuntimeError("LMCache moves memory objects, which vcache replaces: another version?")

    from_gpu = batched_from_gpu = batched_to_gpu = get_shape = to_gpu


def take_allocator_role() -> None:
    """Make LMCache's storage managers allocate from our backend, if present. Patches the class,
    because a manager decides in its constructor."""
    manager = importlib.import_module("lmcache.v1.storage_backend.storage_manager").StorageManager

    def ours(manager: Any, _: Any) -> Any:
        backends = manager.storage_backends.values()
        return next((one for one in backends if getattr(one, "is_vcache", False)), THEIRS)

    # Once more after an error: LMCache may have no other allocator.
    WORKER.instead(manager, "_get_allocator_backend", ours, "config", off=ours)


def engine_of(metadata: Any) -> Any:
    """Find the LMCacheEngine being built with this `metadata` object; None if absent."""
    builder = importlib.import_module("lmcache.v1.cache_engine").LMCacheEngineBuilder
    require(builder, "_instances")
    engines = builder._instances.values()
    return next((engine for engine in engines if engine.metadata is metadata), None)


def install(engine: Any, backend: Any, worker: LMCacheWorker, adapter: Any) -> None:
    """Put `worker` in place of calls of LMCache's engine and of its adapter in vLLM. Changed if
    LMCache's internals have changed."""
    require(engine, "token_database retrieve_locations is_healthy mark_init_failed")
    require(adapter, "_parent _block_size")

    WORKER.instead(engine, "lookup", worker.look_up, "hashes lookup_id pin request_configs")
    WORKER.instead(engine, "retrieve", worker.retrieve, "tokens mask kwargs")
    WORKER.instead(engine, "store", worker.store, "tokens mask kwargs")
    # The engine's own methods then neither find nor store anything, in any tier.
    WORKER.on_off.append(engine.mark_init_failed)
    engine.gpu_connector = NoGPUConnector()
    if engine.storage_manager is not None:
        # LMCache's `recreate_backend` goes on allocating from the earlier backend.
        engine.storage_manager.allocator_backend = backend
    # Also while nothing is shared: loads that LMCache plans must be reported as failed.
    load = partial(_with_metadata, adapter)
    WORKER.changing(adapter, "start_load_kv", load, "forward_context")
    WORKER.behind(adapter, "get_block_ids_with_load_errors", worker.settle, worker.settle)
    # Keep slot mappings on the host, where copies are planned. The adapter would move them to the
    # GPU, behind the forward pass.
    adapter.device = importlib.import_module("torch").device("cpu")


def _with_metadata(adapter: Any, forward_context: Any) -> Any:
    """Replace attention metadata of None if requests have loads.

    Under full CUDA graphs vLLM passes None. LMCache, which only checks for None, would then load
    and report nothing, and the request would be computed from stale blocks."""
    requests = getattr(adapter._parent._connector_metadata, "requests", ())
    loads = any(request.load_spec and request.load_spec.can_load for request in requests)
    if loads and forward_context.attn_metadata is None:
        forward_context = copy.copy(forward_context)
        forward_context.attn_metadata = {}
    return forward_context
