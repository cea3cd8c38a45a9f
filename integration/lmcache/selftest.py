"""What must be right before the plugin works, each as a sentence that says what is wrong and what to change, or None.

LMCache and vLLM are imported inside of functions only: `vcache doctor` asks these questions where they may be absent.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from importlib import metadata
from typing import Any

from ..vllm import model_spec
from .instance import Instance

LOWEST, BELOW = (0, 5, 3), (0, 6)
"""The versions of LMCache whose private points were read: at least, and below."""
CLASS_NAME = "VCacheBackend"

_ENGINE = "lmcache.v1.cache_engine"
_MANAGER = "lmcache.v1.storage_backend.storage_manager"
_BACKENDS = "lmcache.v1.storage_backend.abstract_backend"
_CONNECTORS = "lmcache.v1.gpu_connector.gpu_connectors"
_STATS = "lmcache.observability"
_LOCAL_CPU = "lmcache.v1.storage_backend.local_cpu_backend"
_ADAPTER = "lmcache.integration.vllm.vllm_v1_adapter"

_CALLS = (
    # (module, class, method, its parameters that we pass or are passed by name)
    (_ENGINE, "LMCacheEngine", "store", "tokens hashes offsets mask kwargs"),
    (_ENGINE, "LMCacheEngine", "retrieve", "tokens mask kwargs"),
    (_ENGINE, "LMCacheEngine", "lookup", "tokens hashes offsets lookup_id pin request_configs"),
    (_ENGINE, "LMCacheEngine", "lookup_unpin", ""),
    (_ENGINE, "LMCacheEngine", "mark_init_failed", "reason"),
    (_STATS, "LMCStatsMonitor", "on_retrieve_request", ""),
    (_STATS, "LMCStatsMonitor", "on_retrieve_finished", ""),
    (_LOCAL_CPU, "LocalCPUBackend", "submit_put_task", "key memory_obj"),
    (_MANAGER, "StorageManager", "_get_allocator_backend", "config"),
    (_MANAGER, "StorageManager", "allocate", "shapes dtypes"),
    (_MANAGER, "StorageManager", "batched_put", "keys memory_objs location"),
    (_BACKENDS, "StoragePluginInterface", "__init__", "dst_device config metadata local_cpu_backend loop"),
    (_BACKENDS, "StorageBackendInterface", "batched_submit_put_task", "keys objs transfer_spec on_complete_callback"),
    (_BACKENDS, "StorageBackendInterface", "batched_contains", "keys pin"),
    (_BACKENDS, "StorageBackendInterface", "batched_get_blocking", "keys"),
    (_BACKENDS, "StorageBackendInterface", "batched_async_contains", "lookup_id keys pin"),
    (_BACKENDS, "StorageBackendInterface", "batched_get_non_blocking", "lookup_id keys"),
    (_BACKENDS, "StorageBackendInterface", "unpin", "key"),
    (_BACKENDS, "AllocatorBackendInterface", "allocate", "shapes dtypes fmt eviction busy_loop"),
    (_BACKENDS, "AllocatorBackendInterface", "batched_allocate", "shapes dtypes batch_size fmt eviction busy_loop"),
    (_CONNECTORS, "GPUConnectorInterface", "batched_from_gpu", "memory_objs starts ends kwargs"),
    (_CONNECTORS, "GPUConnectorInterface", "batched_to_gpu", "memory_objs starts ends kwargs"),
    (_CONNECTORS, "GPUConnectorInterface", "initialize_kvcaches_ptr", "kwargs"),
)
_VLLM_CALLS = (
    (_ADAPTER, "LMCacheConnectorV1Impl", "get_block_ids_with_load_errors", ""),
    (_ADAPTER, "LMCacheConnectorV1Impl", "start_load_kv", "forward_context"),
    (_ADAPTER, "LMCacheConnectorV1Impl", "record_failed_blocks", "request_id expected_mask ret_mask slot_mapping"),
    (_ADAPTER, "LMCacheConnectorV1Impl", "register_kv_caches", "kv_caches"),
)
_ATTRIBUTES = (
    # (module, class, attributes that its constructor, or the method named, sets)
    (
        _ENGINE,
        "LMCacheEngine",
        "__init__",
        "config metadata token_database gpu_connector lookup_pins storage_manager async_loading "
        "save_only_first_rank remove_after_retrieve stats_monitor",
    ),
    (_MANAGER, "StorageManager", "__init__", "storage_backends allocator_backend"),
)
_VLLM_ATTRIBUTES = (
    (_ADAPTER, "LMCacheConnectorV1Impl", "__init__", "_parent _vllm_config _manager"),
    (_ADAPTER, "LMCacheConnectorV1Impl", "_init_connector_state", "kv_caches _invalid_block_ids _block_size"),
)


def versions() -> str | None:
    """Why this LMCache is not one that the plugin fits, or None. Imports it; what belongs to vLLM is looked at if it is in use."""
    wanted = f"lmcache>={'.'.join(map(str, LOWEST))},<{'.'.join(map(str, BELOW))}"
    try:
        version = metadata.version("lmcache")
    except metadata.PackageNotFoundError:
        return f"LMCache is not installed: pip install '{wanted}'"
    leading = re.match(r"\d+(\.\d+)*", version)
    if not leading or not LOWEST <= tuple(map(int, leading[0].split("."))) < BELOW:
        return f"LMCache {version} is not one that vcache fits: pip install '{wanted}'"
    vllm = _ADAPTER in sys.modules
    probes = (*_CALLS, *_VLLM_CALLS) if vllm else _CALLS
    attributes = (*_ATTRIBUTES, *_VLLM_ATTRIBUTES) if vllm else _ATTRIBUTES
    missing = [*_missing(probes, _parameters), *_missing(attributes, _names_set), *_missing_builder()]
    if missing:
        return f"LMCache {version} has changed where vcache holds on to it ({'; '.join(missing)}): install another of {wanted}"
    return None


def modes(lm_config: Any, instance: Instance | None = None) -> str | None:
    """The first setting with which the plugin cannot work, and what to change; None if there is none. With `instance`, of it too."""
    return next(_unsupported(lm_config), None) or (next(_unfit(lm_config, instance), None) if instance is not None else None)


def remarks(lm_config: Any, instance: Instance) -> list[str]:
    """Settings with which it works, but not as one may expect."""
    return [*_costly(lm_config), *_surprising(lm_config, instance)]


# ---- versions


def _missing(probes: Iterable[tuple[str, str, str, str]], names: Callable[[Any], Iterable[str]]) -> Iterator[str]:
    for module, owner, method, wanted in probes:
        try:
            found = set(names(getattr(getattr(importlib.import_module(module), owner), method)))
        except (ImportError, AttributeError):
            yield f"{module}: no {owner}.{method}"
            continue
        lacking = [name for name in wanted.split() if name not in found]
        if lacking:
            yield f"{owner}.{method} without {', '.join(lacking)}"


def _parameters(method: Any) -> Iterable[str]:
    return inspect.signature(method).parameters


def _names_set(method: Any) -> Iterable[str]:
    """The attributes a method's own code touches: what a constructor sets is not to be seen on its class."""
    names: tuple[str, ...] = inspect.unwrap(method).__code__.co_names
    return names


def _missing_builder() -> Iterator[str]:
    try:
        builder = importlib.import_module(_ENGINE).LMCacheEngineBuilder
    except (ImportError, AttributeError):
        yield "no LMCacheEngineBuilder"
        return
    if not isinstance(getattr(builder, "_instances", None), dict):
        yield "LMCacheEngineBuilder without _instances"


# ---- modes


def _unsupported(lm_config: Any) -> Iterator[str]:
    extra = getattr(lm_config, "extra_config", None) or {}
    reasons = {
        "use_layerwise": "vcache moves all layers of a chunk in one launch: set use_layerwise: false",
        "enable_blending": "blended chunks are no prefixes, which is what vcache shares: set enable_blending: false",
        "enable_pd": "prefill-decode transfer has an allocator of its own: set enable_pd: false",
        "enable_p2p": "LMCache's peer-to-peer tier needs its host allocator: set enable_p2p: false; vcache shares within the node",
        "external_lookup_client": "look-ups would not ask vcache: remove external_lookup_client",
        "enable_scheduler_bypass_lookup": "vcache answers look-ups in the workers: set enable_scheduler_bypass_lookup: false",
    }
    for name, reason in reasons.items():
        if getattr(lm_config, name, None):
            yield reason
    if extra.get("audit_backend_enabled"):
        yield "the audit wraps every backend, and an allocator cannot be wrapped: remove audit_backend_enabled from extra_config"
    wanted = getattr(lm_config, "retrieve_locations", None)
    if wanted and not set(wanted) & set(_our_names(lm_config)):
        yield f"retrieve_locations {wanted} leaves vcache out: add {_our_names(lm_config)[0]} to it, or remove it"


def _unfit(lm_config: Any, instance: Instance) -> Iterator[str]:
    odd = model_spec.chunk_misfit(lm_config.chunk_size, instance.block_size, "chunk_size")
    yield from (odd,) if odd else ()
    yield from model_spec.misfits(instance, instance.kv_groups)


def _costly(lm_config: Any) -> Iterator[str]:
    ours = _our_names(lm_config)
    if getattr(lm_config, "save_unfull_chunk", False):
        yield "save_unfull_chunk is true, but vcache keeps whole chunks only: set save_unfull_chunk: false"
    location = getattr(lm_config, "store_location", None)
    host = getattr(lm_config, "max_local_cpu_size", 0) > 0
    if location and location not in ours:
        yield f"store_location is {location}, so that nothing is stored in vcache: set store_location: {ours[0]}, or remove it"
    elif not location and host:
        yield f"every store is copied to host memory too: set store_location: {ours[0]}, unless a tier below is to have it as well"
    if getattr(lm_config, "local_cpu", False):
        yield "local_cpu is true: what is found in the host tier is read from there, over PCIe; set local_cpu: false to read NVLink"
    if host and not location and getattr(lm_config, "save_decode_cache", False):
        yield "save_decode_cache is true: a copy to host memory follows every chunk that decoding fills"


def _surprising(lm_config: Any, instance: Instance) -> Iterator[str]:
    extra = getattr(lm_config, "extra_config", None) or {}
    if getattr(lm_config, "pre_caching_hash_algorithm", "builtin") == "builtin":
        yield "Python's own hash can be made to collide on purpose: set pre_caching_hash_algorithm: sha256"
    if instance.load_failure_policy == "fail":
        yield (
            "kv_load_failure_policy is fail, so that a chunk lost between look-up and load fails its request: "
            'put "kv_load_failure_policy":"recompute" into --kv-transfer-config'
        )
    if instance.use_mla and instance.tp_size > 1 and extra.get("save_only_first_rank", True):
        yield (
            "LMCache lets the first rank read and broadcast MLA chunks: set save_only_first_rank: false in extra_config, "
            "and every rank reads the pool itself; chunks are stored once all the same"
        )


def _our_names(lm_config: Any) -> list[str]:
    """What LMCache calls us: the names of `storage_plugins` that are of our class."""
    extra = getattr(lm_config, "extra_config", None) or {}
    named = getattr(lm_config, "storage_plugins", None) or []
    return [name for name in named if extra.get(f"storage_plugin.{name}.class_name") == CLASS_NAME] or ["vcache"]
