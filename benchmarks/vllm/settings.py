"""What instances are started with, as users would set it: vLLM's arguments, its connector's,
LMCache's file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from ..processes import ROOT
from .environment import on_one_gpu
from .instances import KINDS, Spec
from .scale import Scale
from .weights import write_head

BOTH = {"kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
COMPILED_BY_RULE = {
    "inductor_compile_config": {"combo_kernels": True, "benchmark_combo_kernel": False}
}
"""vLLM 0.26 has the compiler time whether kernels are to be combined; then instances that compile
for themselves may differ.
"""

DECODE_GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
"""CUDA graphs of decode steps, and nothing compiled."""
ONE_GPU = {"distributed_executor_backend": "mp", "disable_custom_all_reduce": True}
"""For ranks that share a GPU: by itself vLLM refuses more of them than there are GPUs, and its
all-reduce reads the peer GPU's memory.
"""


class Integration(msgspec.Struct, frozen=True, kw_only=True):
    """How instances come to the pool. name: lmcache or vllm. more: of vcache's configuration,
    `vcache.SECTION.KEY` by value.
    """

    name: str
    socket: Path
    more: dict[str, str] = {}

    def of(self, spec: Spec) -> str:
        """vllm, lmcache, or "" for an instance without vcache."""
        return self.name if spec.variant == "vcache" else ""


def arguments(scale: Scale, spec: Spec, model: Path, integration: Integration) -> dict[str, Any]:
    """Of vLLM's `LLM`. scale: as the instance's kind has it."""
    kind = KINDS[spec.kind]
    given: dict[str, Any] = {
        "model": str(model),
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "max_model_len": scale.max_model_len,
        "max_num_seqs": 32,
        "max_num_batched_tokens": scale.batched_tokens,
        "kv_cache_memory_bytes": scale.kv_bytes // kind.tensor_parallel,
        "block_size": scale.block,
        "enable_prefix_caching": True,
        "enforce_eager": scale.cpu,
        "tensor_parallel_size": kind.tensor_parallel,
    }
    if not scale.cpu:
        graphs = COMPILED_BY_RULE if scale.compiled else DECODE_GRAPHS
        given |= {"gpu_memory_utilization": 0.15, "compilation_config": graphs}
    if not (model / "model.safetensors").exists():
        given["load_format"] = "dummy"
    if kind.tensor_parallel > 1 and not scale.cpu and on_one_gpu():
        given |= ONE_GPU
    if spec.scheduler:
        given["scheduler_cls"] = f"{__package__}.scheduler.{spec.scheduler}"
    if spec.variant != "alone":
        given["kv_transfer_config"] = _transfer(scale, spec, integration)
    if kind.head:
        folder = write_head(model.with_name(f"{model.name}-head"), scale, kind.head)
        guesses = {"method": "eagle", "model": str(folder), "num_speculative_tokens": 2}
        given["speculative_config"] = guesses
    given |= kind.arguments
    return given


def _transfer(scale: Scale, spec: Spec, integration: Integration) -> dict[str, Any]:
    if integration.of(spec) != "vllm":
        return {"kv_connector": "LMCacheConnectorV1", **BOTH}
    more = {path.removeprefix("vcache."): value for path, value in integration.more.items()}
    more |= KINDS[spec.kind].settings
    lends = 0 if spec.role == "consumer" else scale.pool_bytes
    return our_connector(integration.socket, lends, scale.chunk, more) | (
        {"kv_role": f"kv_{spec.role}"} if spec.role else {}
    )


def our_connector(socket: Path, lends: int, chunk: int, more: Mapping[str, str]) -> dict[str, Any]:
    """`kv_transfer_config` of ours. more: of vcache's configuration, `SECTION.KEY` by value."""
    sections: dict[str, dict[str, Any]] = {
        "server": {"socket": str(socket)},
        "pool": {"segment_bytes": lends},
        "engine": {"chunk_size": chunk},
        "connector": {"min_hit_tokens": chunk},
    }
    for path, value in more.items():
        *names, key = path.split(".")
        section: dict[str, Any] = sections
        for name in names:
            section = section.setdefault(name, {})
        section[key] = _plain(value)
    return {
        "kv_connector": "VCacheConnector",
        "kv_connector_module_path": "vcache_backend.integration.vllm_connector",
        "kv_connector_extra_config": sections,
        **BOTH,
    }


def _plain(value: str) -> Any:
    """A number or a truth value where it is one."""
    try:
        return json.loads(value)
    except ValueError:
        return value


def lmcache_file(scale: Scale, integration: Integration) -> dict[str, Any]:
    """configs/lmcache-vcache.yaml with what is different here, for JSON, which is YAML."""
    own = {
        "vcache.server.socket": str(integration.socket),
        "vcache.pool.segment_bytes": scale.pool_bytes,
        **integration.more,
    }
    return lmcache(own, {"chunk_size": scale.chunk})


def lmcache(extra: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, Any]:
    """configs/lmcache-vcache.yaml with changes: of `extra_config`, and of LMCache's own."""
    written = msgspec.yaml.decode(
        (ROOT / "configs/lmcache-vcache.yaml").read_bytes(), type=dict[str, Any]
    )
    return {**written, "extra_config": {**written["extra_config"], **extra}, **theirs}
