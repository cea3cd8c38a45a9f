"""The systems compared: what each is started with, as its users would, at the same VRAM a GPU."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from ..vllm.scale import GIB
from .load import MODEL
from .sizes import Sizes

BOTH = {"kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
UTILISATION = 0.15
"""vLLM takes the KV cache it is given; of this it only wants to see so much of the GPU free."""


class System(msgspec.Struct, frozen=True, kw_only=True):
    """label: for people. colour: in the plot. lends: VRAM of each GPU goes to the pool. host: it takes host memory. gpu_only: why it
    does not run on the CPU."""

    label: str
    colour: str
    lends: bool = False
    host: bool = False
    gpu_only: str = ""


SYSTEMS = {
    "alone": System(label="vLLM alone", colour="#8a8a8a"),
    "offload": System(
        label="vLLM, native CPU offload",
        colour="#3a8f4d",
        host=True,
        gpu_only="vLLM's native CPU offload runs on CUDA and XPU devices only",
    ),
    "mp": System(label="LMCache MP server, host memory", colour="#c1762b", host=True),
    "vcache": System(label="vcache", colour="#1f6fb4", lends=True),
}


def memory(name: str, sizes: Sizes) -> str:
    """What a system has, in words."""
    system = SYSTEMS[name]
    own = sizes.kv_bytes if system.lends else sizes.kv_bytes + sizes.pool_bytes
    said = f"{own / GIB:.3g} GiB of KV cache a GPU"
    if system.lends:
        said += f" and {sizes.pool_bytes / GIB:.3g} GiB of it in the pool"
    return said + (f", {sizes.host_gib:g} GiB of host memory" if system.host else "")


def serve_arguments(name: str, sizes: Sizes, model: Path, port: int, side: Mapping[str, Any]) -> list[str]:
    """Of vLLM's OpenAI server. side: see `transfer`."""
    scale, system = sizes.scale, SYSTEMS[name]
    kv_bytes = sizes.kv_bytes if system.lends else sizes.kv_bytes + sizes.pool_bytes
    given: dict[str, Any] = {
        "model": model,
        "served-model-name": MODEL,
        "host": "127.0.0.1",
        "port": port,
        "dtype": "bfloat16",
        "max-model-len": scale.max_model_len,
        "max-num-seqs": sizes.seqs,
        "max-num-batched-tokens": scale.batched_tokens,
        "kv-cache-memory-bytes": kv_bytes,
        "block-size": scale.block,
    }
    flags = ["skip-tokenizer-init", "enable-prefix-caching", "enable-prompt-tokens-details", "disable-uvicorn-access-log"]
    if scale.cpu:
        flags.append("enforce-eager")
    else:
        given |= {"load-format": "dummy", "gpu-memory-utilization": UTILISATION}
    if name == "offload":
        given |= {"kv-offloading-size": sizes.host_gib / 2, "kv-offloading-backend": "native"}
    if (config := transfer(name, sizes, side)) is not None:
        given["kv-transfer-config"] = json.dumps(config)
    return [*(f"--{flag}" for flag in flags), *(part for key, value in given.items() for part in (f"--{key}", str(value)))]


def transfer(name: str, sizes: Sizes, side: Mapping[str, Any]) -> dict[str, Any] | None:
    """The connector. side: where the process beside the servers is (`port` of LMCache's, `socket` of ours), `index` of the server, and
    `more`, settings of vcache by `SECTION.KEY`."""
    if name == "mp":
        return {
            "kv_connector": "LMCacheMPConnector",
            "kv_connector_module_path": "lmcache.integration.vllm.lmcache_mp_connector",
            "kv_connector_extra_config": {
                "lmcache.mp.host": "tcp://127.0.0.1",
                "lmcache.mp.port": side["port"],
                "lmcache.mp.mq_timeout": 60,
            },
            **BOTH,
        }
    if name != "vcache":
        return None
    sections: dict[str, dict[str, Any]] = {
        "server": {"socket": str(side["socket"])},
        "pool": {"segment_bytes": sizes.pool_bytes},
        "engine": {"chunk_size": sizes.scale.chunk},
        "connector": {"min_hit_tokens": sizes.scale.chunk},
    }
    if sizes.scale.cpu:
        # Two of the same name would be one device, which is lent once.
        sections["pool"]["device"] = f"host:{side['index']}"
    for path, value in side.get("more", {}).items():
        section, _, key = path.partition(".")
        sections.setdefault(section, {})[key] = _plain(value)
    return {
        "kv_connector": "VCacheConnector",
        "kv_connector_module_path": "vcache_backend.integration.vllm_connector",
        "kv_connector_extra_config": sections,
        **BOTH,
    }


def mp_arguments(sizes: Sizes, port: int) -> list[str]:
    """Of LMCache's server."""
    given = ["--port", str(port), "--l1-size-gb", f"{sizes.host_gib:g}", "--eviction-policy", "LRU"]
    given += ["--chunk-size", str(sizes.scale.chunk)]
    return given + (["--supported-transfer-mode", "auto", "--disable-observability"] if sizes.scale.cpu else [])


def _plain(value: str) -> Any:
    """A number or a truth value where it is one."""
    try:
        return json.loads(value)
    except ValueError:
        return value
