"""All patches of LMCache and vLLM. All use `_replace`, which may be repeated.

Our plugin for vLLM (../plugin.py) calls `register` in each of vLLM's processes. `register` wraps
the constructor of LMCache's connector once vLLM imports the connector, that is, when a user asked
for `LMCacheConnectorV1`. If LMCache's configuration names our plugin, the scheduler's connector
tags each request with the request's scope (scope.py) before any look-up, and does not cache
requests that keys cannot tell apart. Without the tag the plugin refuses every key. On a CPU, for
which LMCache has no GPU connector, a worker gets our connector instead of an exception.

The plugin's backend calls `take_allocator_role` and `install` in a worker."""

from __future__ import annotations

import copy
import functools
import importlib
import inspect
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn

from vcache_backend.supported import LMCACHE

from .boundary import SCHEDULER, THEIRS, WORKER
from .doubts import LMCacheDoubts, Steps
from .scope import Scheduler

if TYPE_CHECKING:
    from .backend import VCacheBackend

CONNECTOR_MODULE = "vllm.distributed.kv_transfer.kv_connector.v1.lmcache_connector"
CONNECTOR_CLASS = "LMCacheConnectorV1"
PLUGIN_MODULE = "vcache_backend.integration.lmcache"
WANTED = LMCACHE.name + LMCACHE.wanted
"""This module relies on the internals of these versions."""
_THEIRS = "_theirs_before_vcache"
log = logging.getLogger(__name__)


class StepAside(Exception):
    """The plugin must not work here. The message says why, and what to change."""


def _replace(
    owner: Any, name: str, make: Callable[[Any], Callable[..., Any]], wanted: str = ""
) -> None:
    """Replace `owner.name` by `make(theirs)`. `theirs` is the original, also on repetition.

    wanted: names of parameters that the original must have. StepAside if the original or a
    parameter is missing."""
    theirs = getattr(owner, name, None)
    theirs = getattr(theirs, _THEIRS, theirs)
    parameters = inspect.signature(theirs).parameters if callable(theirs) else {}
    lacking = [parameter for parameter in wanted.split() if parameter not in parameters]
    if not callable(theirs) or lacking:
        _changed(owner, f"{name} with {' and '.join(lacking)}" if lacking else name)
    ours = functools.wraps(theirs)(make(theirs))
    setattr(ours, _THEIRS, theirs)
    setattr(owner, name, ours)


def _changed(owner: Any, what: str) -> NoReturn:
    kind = owner if isinstance(owner, type | ModuleType) else type(owner)
    raise StepAside(
        f"LMCache has changed where vcache holds on to it: {kind.__name__} has no {what}; "
        f"install {WANTED}"
    )


def _must_have(owner: Any, names: str) -> None:
    lacking = [name for name in names.split() if not hasattr(owner, name)]
    if lacking:
        _changed(owner, ", ".join(lacking))


def our_names(config: Any) -> list[str]:
    """The names under which LMCache's `storage_plugins` have our plugin."""
    extra: Mapping[str, Any] = getattr(config, "extra_config", None) or {}
    names = getattr(config, "storage_plugins", None) or ()
    module = "storage_plugin.{}.module_path"
    return [name for name in names if str(extra.get(module.format(name))).startswith(PLUGIN_MODULE)]


# ---- vLLM's processes: the constructor of its connector


def register() -> None:
    """Wrap `LMCacheConnectorV1` as soon as vLLM imports it. Idempotent, cheap, and never raises."""
    SCHEDULER.run(_register)


def _register() -> None:
    module = sys.modules.get(CONNECTOR_MODULE)
    if module is not None:
        _replace(getattr(module, CONNECTOR_CLASS), "__init__", _constructor)
    elif not any(isinstance(finder, _OnImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _OnImport())


class _OnImport(MetaPathFinder):
    """Finds LMCache's connector module as always, and calls `register` after its execution."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        # None: the next finder finds it.
        found: ModuleSpec | None = SCHEDULER.run(self._find, fullname, path, target)
        return found

    @staticmethod
    def _find(
        fullname: str, path: Sequence[str] | None, target: ModuleType | None
    ) -> ModuleSpec | None:
        if fullname != CONNECTOR_MODULE:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                register()

            # This loader serves this module only.
            setattr(spec.loader, "exec_module", exec_module)  # noqa: B010
        return spec


def _constructor(construct: Callable[..., None]) -> Callable[..., None]:
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        WORKER.run(_supply_connector)
        construct(self, *args, **kwargs)
        SCHEDULER.config = getattr(getattr(self, "_lmcache_engine", None), "config", None)
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

        from .unused import NoGPUConnector

        # A first model run that is small, as after a hit, uses AMX without asking Linux for it.
        torch.cpu._init_amx()
        return NoGPUConnector()

    # Once more after an error, since LMCache's own raises on a CPU.
    _replace(source, "CreateGPUConnector", lambda create: WORKER.instead(create, ours, off=ours))


# ---- the scheduler


def _patch_scheduler(connector: Any) -> None:
    adapter = connector._lmcache_engine
    if connector.role.name == "SCHEDULER" and our_names(adapter.config):
        from ..vllm.model import versions

        Scheduler(adapter, LMCacheDoubts(connector))
        versions.watch()


# ---- a worker


def take_allocator_role() -> None:
    """Make LMCache's storage managers allocate from our backend, if present. Patches the class,
    because a manager decides in its constructor."""
    manager = importlib.import_module("lmcache.v1.storage_backend.storage_manager").StorageManager

    def ours(manager: Any, _: Any) -> Any:
        backends = manager.storage_backends.values()
        return next((one for one in backends if getattr(one, "is_vcache", False)), THEIRS)

    # Once more after an error: LMCache may have no other allocator.
    def make(theirs: Callable[..., Any]) -> Callable[..., Any]:
        return WORKER.instead(theirs, ours, off=ours)

    _replace(manager, "_get_allocator_backend", make, "config")


def engine_of(metadata: Any) -> Any:
    """Find the LMCacheEngine being built with this `metadata` object; None if absent."""
    builder = importlib.import_module("lmcache.v1.cache_engine").LMCacheEngineBuilder
    _must_have(builder, "_instances")
    engines = builder._instances.values()
    return next((engine for engine in engines if engine.metadata is metadata), None)


def install(engine: Any, backend: VCacheBackend, adapter: Any) -> None:
    """Put `backend` into its engine and LMCache's adapter, in place of our earlier backend.

    LMCache's `recreate_backend` makes a new backend of ours, even for another tier. LMCache would
    go on allocating from the earlier backend, and would close it only if the call was for our tier.
    So this function replaces and closes the earlier backend. StepAside if LMCache's internals have
    changed."""
    from .unused import NoGPUConnector
    from .verbs import Verbs

    parts = "token_database retrieve_locations is_healthy kv_events_enabled stats_monitor "
    parts += "mark_init_failed"
    _must_have(engine, parts)
    for call in ("lookup", "retrieve", "store"):
        _must_have(engine.stats_monitor, f"on_{call}_request on_{call}_finished")
    steps = Steps(adapter, lambda: backend.worker is None)
    verbs = Verbs(engine, backend, steps)

    def instead(name: str, verb: Callable[..., Any], wanted: str, **off: Any) -> None:
        _replace(engine, name, lambda theirs: WORKER.instead(theirs, verb, **off), wanted)

    asked = "hashes offsets lookup_id pin request_configs"
    instead("lookup", verbs.lookup, asked, off=verbs.lookup_off)
    instead("retrieve", verbs.retrieve, "tokens mask kwargs")
    instead("store", verbs.store, "tokens mask kwargs")
    _replace(engine, "lookup_unpin", lambda its: WORKER.around(its, verbs.unpin), "lookup_id")
    # The engine's own methods then neither find nor store anything, in any tier.
    WORKER.on_off.append(engine.mark_init_failed)
    engine.gpu_connector = NoGPUConnector()
    if engine.storage_manager is not None:
        for before in list(engine.storage_manager.storage_backends.values()):
            if getattr(before, "is_vcache", False) and before is not backend:
                before.close()
        engine.storage_manager.allocator_backend = backend
    _must_have(adapter, "_parent _block_size")
    load = functools.partial(_load_under_full_graphs, adapter)
    _replace(adapter, "start_load_kv", load, "forward_context")
    report = functools.partial(_report_blocks, adapter, backend, steps)
    _replace(adapter, "get_block_ids_with_load_errors", report)
    # Keep slot mappings on the host, where copies are planned. The adapter would move them to the
    # GPU, behind the forward pass.
    adapter.device = importlib.import_module("torch").device("cpu")


def _load_under_full_graphs(adapter: Any, theirs: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `start_load_kv`: replace attention metadata of None if requests have loads.

    Under full CUDA graphs vLLM passes None. LMCache, which only checks for None, would then load
    and report nothing, and the request would be computed from stale blocks."""

    def with_metadata(forward_context: Any) -> Any:
        if forward_context.attn_metadata is None:
            requests = getattr(adapter._parent._get_connector_metadata(), "requests", ())
            specs = [request.load_spec for request in requests]
            if any(spec is not None and spec.can_load for spec in specs):
                forward_context = copy.copy(forward_context)
                forward_context.attn_metadata = {}
        return forward_context

    # Also while nothing is shared: loads that LMCache plans must be reported as failed.
    return WORKER.changing(theirs, with_metadata)


def _report_blocks(
    adapter: Any, backend: VCacheBackend, steps: Steps, theirs: Callable[[], set[int]]
) -> Callable[[], set[int]]:
    """Wrap `get_block_ids_with_load_errors`, which vLLM calls at a step's end: wait for the step's
    loads, and add the blocks of failed loads. Also while nothing is shared."""

    def settle(blocks: set[int]) -> set[int]:
        worker = backend.worker
        return blocks if worker is None else blocks | worker.settle(adapter._block_size)

    return WORKER.around(theirs, lambda: steps.over(), after=settle, after_off=settle)
