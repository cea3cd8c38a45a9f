"""What vLLM must do for the plugin: its entry point `vcache` in the group `vllm.general_plugins`.

vLLM calls `register()` in each of its processes. Nothing is imported there but this module; when vLLM itself imports LMCache's
connector (a user asked for `LMCacheConnectorV1`), its constructor is wrapped. Where LMCache's configuration names our plugin:

* the scheduler's connector gives each request its scope as a tag (scope.py) before it looks anything up, and does not cache
  requests that no key tells apart;
* a worker on a platform for which LMCache has no GPU connector (the CPU) gets ours instead of an exception.

Without this hook the plugin refuses every key, so nothing can be shared that must not be.
"""

from __future__ import annotations

import copy
import functools
import importlib
import json
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

from ..vllm.adapters import Adapters
from .scope import TAG, has_own_tag, is_refused, scope, tagged, uncached

CONNECTOR_MODULE = "vllm.distributed.kv_transfer.kv_connector.v1.lmcache_connector"
CONNECTOR_CLASS = "LMCacheConnectorV1"
PLUGIN_MODULE = "vcache_backend.integration.lmcache"
_MARK = "_vcache_hook"
log = logging.getLogger(__name__)


def register() -> None:
    """Have `LMCacheConnectorV1` hooked as soon as vLLM imports it. Idempotent, cheap, and never raises."""
    try:
        module = sys.modules.get(CONNECTOR_MODULE)
        if module is not None:
            _hook(module)
        elif not any(isinstance(finder, _OnImport) for finder in sys.meta_path):
            sys.meta_path.insert(0, _OnImport())
    except Exception:  # the door to vLLM
        log.warning("vcache's hook could not be set; nothing will be cached", exc_info=True)


def names_our_plugin(config: Any) -> bool:
    """Whether an `LMCacheEngineConfig` has a storage plugin that is ours."""
    extra: Mapping[str, Any] = getattr(config, "extra_config", None) or {}
    modules = (extra.get(f"storage_plugin.{name}.module_path") for name in getattr(config, "storage_plugins", None) or ())
    return any(str(module).startswith(PLUGIN_MODULE) for module in modules)


class _OnImport(MetaPathFinder):
    """Finds one module the ordinary way, and hooks it when it has been executed."""

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


def _hook(module: ModuleType) -> None:
    """Wrap the constructor of the connector class, once."""
    cls = getattr(module, CONNECTOR_CLASS)
    construct = cls.__init__
    if hasattr(construct, _MARK):
        return

    @functools.wraps(construct)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        native = _guarded(_uses_native, *args, **kwargs)
        if native is False:
            _guarded(_supply_connector)
        construct(self, *args, **kwargs)
        if native is False:
            _guarded(_hook_scheduler, self)

    setattr(__init__, _MARK, True)
    cls.__init__ = __init__


def _guarded(what: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The answer of a step of ours, or None and one line if it fails: the connector is made all the same."""
    try:
        return what(*args, **kwargs)
    except Exception as error:  # noqa: BLE001 - the door to vLLM
        log.warning("vcache's hook failed and nothing will be cached (%s: %s: %s)", what.__name__, type(error).__name__, error)
        return None


def _uses_native(vllm_config: Any, *_: Any, **__: Any) -> bool:
    native = bool(vllm_config.kv_transfer_config.get_from_extra_config("use_native", False))
    if native:
        log.info("vcache does nothing: `use_native: true` picks vLLM's own copy of LMCache's adapter, without storage plugins")
    return native


# ---- the worker on a platform without a GPU


def _supply_connector() -> None:
    """Have `CreateGPUConnector` answer our connector where LMCache has none. vLLM's adapter imports it when it calls it."""
    source: Any = importlib.import_module("lmcache.v1.gpu_connector")
    vllm = importlib.import_module("lmcache.utils").EngineType.VLLM
    create = source.CreateGPUConnector
    if hasattr(create, _MARK):
        return

    @functools.wraps(create)
    def create_gpu_connector(config: Any, metadata: Any, engine: Any, *args: Any, **kwargs: Any) -> Any:
        if engine == vllm and source.torch_device_type == "cpu" and names_our_plugin(config):
            from .. import amx
            from .gpu_connector import VCacheGPUConnector

            amx.permit()
            return VCacheGPUConnector()
        return create(config, metadata, engine, *args, **kwargs)

    setattr(create_gpu_connector, _MARK, True)
    source.CreateGPUConnector = create_gpu_connector


# ---- the scheduler


def _hook_scheduler(connector: Any) -> None:
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
    theirs = transport.send_and_recv_all

    def send_and_recv_all(message: list[Any]) -> list[bytes]:
        engine = builder.get(name)
        if engine is None or engine.storage_manager is None or engine.metadata.role != "worker":
            answers: list[bytes] = theirs(message)
            return answers
        hashes, offsets, lookup_id, configs = message
        try:
            found = engine.lookup(
                hashes=hashes,
                offsets=offsets,
                lookup_id=lookup_id,
                pin=True,
                request_configs=json.loads(configs) if configs else None,
            )
        except Exception as error:  # noqa: BLE001 - the door to vLLM
            log.warning("vcache: a look-up failed, which counts as a miss (%s: %s)", type(error).__name__, error)
            return []
        return [found.to_bytes(4, "big")]

    transport.send_and_recv_all = send_and_recv_all


class Scheduler:
    """LMCache's adapter as vLLM's scheduler sees it, with every request given its scope. Lives on the scheduler's thread."""

    def __init__(self, adapter: Any) -> None:
        self._adapter = adapter
        self._look_up = adapter.get_num_new_matched_tokens
        self._build = adapter.build_connector_meta
        self._adapters = Adapters()
        self._warned = False

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> int | None:
        """As the adapter's, after the request got its tag. 0 without asking for a request that is not to be cached, or of which
        every token is to be computed (prompt log probabilities; before 0.30 or so vLLM does not see to that itself)."""
        try:
            cacheable = give_scope(request, self._adapters)
        except Exception as error:  # noqa: BLE001 - the door to vLLM
            cacheable = False
            self._refuse_to_save(request, error)
        wanted = cacheable and not getattr(request, "skip_reading_prefix_cache", False)
        if wanted or self._adapter.lookup_client is None:
            found: int | None = self._look_up(request, num_computed_tokens)
            return found
        # The adapter wants to know of every request what was cached when it was scheduled (it asserts so after a preemption).
        load_spec = importlib.import_module(type(self._adapter).__module__).LoadSpec
        self._adapter.load_specs[request.request_id] = load_spec(
            vllm_cached_tokens=num_computed_tokens, lmcache_cached_tokens=0, can_load=False
        )
        return 0

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        """As the adapter's, but nothing is saved of a request without a tag (a pooling request has no place for one)."""
        meta = self._build(scheduler_output)
        for request in meta.requests:
            if request.save_spec is not None and TAG not in (request.request_configs or {}):
                request.save_spec.can_save = False
        return meta

    def _refuse_to_save(self, request: Any, error: Exception) -> None:
        level, self._warned = logging.DEBUG if self._warned else logging.WARNING, True
        log.log(level, "vcache: request %s is not cached (%s: %s)", request.request_id, type(error).__name__, error)
        try:
            _replace(request, uncached)
        except Exception as again:  # noqa: BLE001 - without its tag it is not saved either
            log.debug("vcache: request %s keeps its parameters (%s)", request.request_id, again)


def give_scope(request: Any, adapters: Adapters) -> bool:
    """Write the scope of a vLLM request into its sampling parameters; whether it may be cached.

    Not cached: a request without sampling parameters (pooling), one with prompt embeddings (LMCache's key has only token ids),
    one with a LoRA adapter of which nobody knows which weights it has (see `Adapters`) and no tag of the user's that says so, and
    one that was refused before.
    May be called again for the same request. The parameters are copied: other requests may hold the same object.
    """
    params = request.sampling_params
    if params is None:
        return False
    lora, extra = request.lora_request, params.extra_args
    embedded = getattr(request, "prompt_embeds", None) is not None
    content = adapters.content(lora) if lora is not None else ""
    if is_refused(extra) or embedded or (lora is not None and not content and not has_own_tag(extra)):
        _replace(request, uncached)
        return False
    value = scope(request.cache_salt, None if lora is None else (lora.lora_name, lora.lora_path, content))
    _replace(request, functools.partial(tagged, value=value))
    return True


def _replace(request: Any, rewrite: Callable[[Mapping[str, Any] | None], dict[str, Any]]) -> None:
    if request.sampling_params is not None:
        params = copy.copy(request.sampling_params)
        params.extra_args = rewrite(params.extra_args)
        request.sampling_params = params
