"""The systems compared: what each is started with, as its users would, at the same VRAM a GPU."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from ..vllm.scale import GIB
from ..vllm.settings import mp_connector, our_connector
from .load import MODEL
from .sizes import Sizes

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
        return mp_connector(side["port"])
    if name != "vcache":
        return None
    # On the CPU two of the same name would be one device, which is lent once.
    more = {"pool.device": f"host:{side['index']}"} if sizes.scale.cpu else {}
    return our_connector(side["socket"], sizes.pool_bytes, sizes.scale.chunk, more | dict(side.get("more", {})))
