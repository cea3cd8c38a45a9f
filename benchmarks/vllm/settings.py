"""What instances are started with, as users would set it: vLLM's arguments, its connector's, LMCache's file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from .instances import KINDS, Spec
from .scale import Scale

STOCK_GB = 18
"""Room for what `stock` asks again and for the prompts between."""
BOTH = {"kv_role": "kv_both", "kv_load_failure_policy": "recompute"}


class Door(msgspec.Struct, frozen=True, kw_only=True):
    """How instances come to the pool. name: lmcache or vllm. more: of vcache's configuration, `vcache.SECTION.KEY` by value."""

    name: str
    socket: Path
    mp_port: int = 0
    more: dict[str, str] = {}
    store: dict[str, str] = {}
    """Likewise, of instances with a offload tier."""

    def of(self, spec: Spec) -> str:
        """vllm, lmcache, or "" for an instance without vcache."""
        return {"vcache": self.name, "lmcache": "lmcache"}.get(spec.variant, "")

    def settings(self, spec: Spec) -> dict[str, str]:
        """What an instance's configuration has beside the usual."""
        return {**(self.store if spec.below else {}), **self.more}


def arguments(scale: Scale, spec: Spec, model: Path, door: Door) -> dict[str, Any]:
    """Of vLLM's `LLM`. scale: as the instance's kind has it."""
    given: dict[str, Any] = {
        "model": str(model),
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "max_model_len": scale.max_model_len,
        "max_num_seqs": 32,
        "max_num_batched_tokens": scale.batched_tokens,
        "kv_cache_memory_bytes": scale.kv_bytes // spec.tensor_parallel,
        "block_size": scale.block,
        "enable_prefix_caching": True,
        "enforce_eager": scale.cpu,
        "tensor_parallel_size": spec.tensor_parallel,
    }
    if not scale.cpu:
        given["gpu_memory_utilization"] = 0.15
    if not (model / "model.safetensors").exists():
        given["load_format"] = "dummy"
    if spec.scheduler:
        given["scheduler_cls"] = f"{__package__}.scheduler.{spec.scheduler}"
    if spec.variant != "alone":
        given["kv_transfer_config"] = _transfer(scale, spec, door)
    return {**given, **KINDS[spec.kind].arguments}


def _transfer(scale: Scale, spec: Spec, door: Door) -> dict[str, Any]:
    if spec.variant == "mp":
        return {
            "kv_connector": "LMCacheMPConnector",
            "kv_connector_module_path": "lmcache.integration.vllm.lmcache_mp_connector",
            "kv_connector_extra_config": {
                "lmcache.mp.host": "tcp://127.0.0.1",
                "lmcache.mp.port": door.mp_port,
                "lmcache.mp.mq_timeout": 30,
            },
            **BOTH,
        }
    if door.of(spec) != "vllm":
        return {"kv_connector": "LMCacheConnectorV1", **BOTH}
    return {
        "kv_connector": "VCacheConnector",
        "kv_connector_module_path": "vcache_backend.integration.vllm_connector",
        "kv_connector_extra_config": _sections(scale, spec, door),
        **BOTH,
    }


def _sections(scale: Scale, spec: Spec, door: Door) -> dict[str, dict[str, Any]]:
    """vcache's configuration for our own connector."""
    sections: dict[str, dict[str, Any]] = {
        "server": {"socket": str(door.socket)},
        "pool": {"segment_bytes": scale.pool_bytes},
        "engine": {"chunk_size": scale.chunk},
        "connector": {"min_hit_tokens": scale.chunk},
    }
    for path, value in door.settings(spec).items():
        *names, key = path.removeprefix("vcache.").split(".")
        section: dict[str, Any] = sections
        for name in names:
            section = section.setdefault(name, {})
        section[key] = _plain(value)
    return sections


def _plain(value: str) -> Any:
    """A number or a truth value where it is one."""
    try:
        return json.loads(value)
    except ValueError:
        return value


def lmcache_file(scale: Scale, spec: Spec, door: Door) -> dict[str, Any]:
    """LMCache's YAML (JSON is YAML)."""
    common = {"chunk_size": scale.chunk, "pre_caching_hash_algorithm": "sha256"}
    if spec.variant == "stock":
        return {**common, "local_cpu": True, "max_local_cpu_size": STOCK_GB}
    # Beside instances of the other door, which lend the pool its memory, those of LMCache's lend nothing.
    lends = 0 if spec.variant == "lmcache" else scale.pool_bytes
    return {
        **common,
        "local_cpu": False,
        "max_local_cpu_size": 0,
        "storage_plugins": ["vcache"],
        "store_location": "vcache",
        # Without it look-ups promise the pool alone.
        **({"enable_async_loading": True} if spec.below else {}),
        "extra_config": {
            "save_only_first_rank": False,
            "storage_plugin.vcache.module_path": "vcache_backend.integration.lmcache",
            "storage_plugin.vcache.class_name": "VCacheBackend",
            "vcache.server.socket": str(door.socket),
            "vcache.pool.segment_bytes": lends,
            **door.settings(spec),
        },
    }
