"""What the plugin knows of the serving instance it runs in, and the layout that follows from it.

Under vLLM its own configuration says it; without vLLM LMCache's metadata and our settings do. Everything that changes the bytes of
a chunk, or what they mean, goes into the `Layout`; nothing else does. vLLM and LMCache are never imported here: whoever calls has
loaded what there is.

The weights have a name and a revision. From the Hugging Face hub: the repository and its commit, whether vLLM names it or a folder
of the hub's cache. A folder or file of one's own: its real path, and a digest of the names, sizes and times of its files, since the
pool outlives weights that are overwritten in place. So equal copies under two paths do not share, unless `vcache.model` in LMCache's
extra_config names them alike.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

from vcache_backend.chunk import Layout
from vcache_backend.errors import ConfigError
from vcache_backend.vram_pool.paged import PagedKV

from .settings import Settings

_SNAPSHOT = re.compile(r"models--(?P<repository>[^/]+)/snapshots/(?P<commit>[0-9a-f]{7,64})(?:/|$)")
_VOLATILE = ("transformers_version",)
"""Keys of a Hugging Face configuration, beside those that begin with `_`, that say nothing about the model."""
_ROPE = ("rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor", "rope_local_base_freq")
_NO_DRAFT_KV = (None, "ngram", "ngram_gpu", "suffix")
"""Speculative methods without a model of their own, and so without layers in the KV cache."""


@dataclass(frozen=True, kw_only=True)
class Instance:
    """One worker of a serving instance.

    dtype, kv_cache_dtype: of the computation, and of what is cached (`auto` resolved). layers, kv_heads, head_dim: as one worker
    holds them, draft layers included. block_size: tokens a block of the KV cache tensors. worker_id: among all of the instance's
    workers. rank, ranks: which shard of a chunk this worker holds, of how many, within its pipeline stage; 0 of 1 with MLA, where
    all hold the same. rope: canonical text. facts: what else the bytes depend on, by name. gpu_memory_utilization: None where it
    is unknown or does not apply. kv_groups: groups of layers with block tables of their own. kvcaches: by layer, None while vLLM
    has not registered them. connector: LMCache's adapter in vLLM, None without vLLM.
    """

    model: str
    revision: str = ""
    dtype: str
    kv_cache_dtype: str
    layers: int
    kv_heads: int
    head_dim: int
    block_size: int
    tp_size: int = 1
    pp_size: int = 1
    pp_rank: int = 0
    worker_id: int = 0
    rank: int = 0
    ranks: int = 1
    use_mla: bool = False
    rope: str = ""
    quantization: str = ""
    facts: Mapping[str, str] = field(default_factory=dict)
    lora_enabled: bool = False
    prompt_embeds: bool = False
    dynamic_kv_scales: bool = False
    context_parallel: int = 1
    kv_groups: int = 1
    gpu_memory_utilization: float | None = None
    device_type: str = ""
    under_vllm: bool = False
    load_failure_policy: str = ""
    kv_role: str = ""
    kvcaches: dict[str, Any] | None = field(default=None, compare=False, repr=False)
    connector: Any = field(default=None, compare=False, repr=False)

    @property
    def whole_blocks_only(self) -> bool:
        """vLLM's CPU attention arranges a block in its own way: single tokens of it must not be moved."""
        return self.under_vllm and self.device_type == "cpu"

    @property
    def kv_axes(self) -> str | None:
        """What the axes of vLLM's tensors are (see `PagedKV.describe`), where as many heads as tokens a block leave shapes in doubt."""
        shape = tuple(next(iter(self.kvcaches.values())).shape) if self.under_vllm and self.kvcaches else ()
        if len(shape) == 4 and shape[1] == shape[2] == self.block_size:
            return "block head token dim"
        if len(shape) == 5 and shape[2] == shape[3] == self.block_size:
            return "part block token head dim" if shape[0] == 2 else "block part token head dim"
        return None


def discover(metadata: Any, lm_config: Any, settings: Settings) -> Instance:
    """The instance that LMCache's `metadata` belongs to. ConfigError if the block size cannot be known, or is not what was set."""
    group = _transfer_group()
    connector = _adapter(group)
    if connector is not None:
        return _under_vllm(metadata, settings, group, connector)
    if not settings.block_size:
        raise ConfigError("no vLLM here to ask for the KV block size: set vcache.block_size in LMCache's extra_config")
    ranks = 1 if metadata.use_mla else metadata.world_size
    return Instance(
        model=settings.model or metadata.model_name,
        dtype=_plain(metadata.kv_dtype),
        kv_cache_dtype=_plain(metadata.kv_dtype),
        layers=metadata.kv_shape[0],
        kv_heads=metadata.kv_shape[3],
        head_dim=metadata.kv_shape[4],
        block_size=settings.block_size,
        tp_size=metadata.world_size,
        worker_id=metadata.worker_id,
        rank=metadata.worker_id % ranks,
        ranks=ranks,
        use_mla=metadata.use_mla,
    )


def layout(instance: Instance, paged: PagedKV, chunk_size: int, hash_probe: str, hash_algorithm: str) -> Layout:
    """What must be equal for two instances to share. LMCache's key has the model, the dtype and the number of workers only.

    hash_algorithm: LMCache's `pre_caching_hash_algorithm`. hash_probe: see `hash_probe`.
    """
    extra = {
        "door": "lmcache",
        "hash_probe": hash_probe,
        "model_dtype": instance.dtype,
        "kv_cache_dtype": instance.kv_cache_dtype,
        "quantization": instance.quantization,
        "mla": str(instance.use_mla),
        "context_parallel": str(instance.context_parallel),
        **instance.facts,
    }
    return Layout(
        model=instance.model,
        revision=instance.revision,
        dtype=paged.dtype,
        layers=paged.layers,
        kv_heads=instance.kv_heads,
        head_dim=instance.head_dim,
        block_size=paged.block_size,
        kv_layout=paged.name,
        chunk_size=chunk_size,
        rope=instance.rope,
        tp_size=instance.tp_size,
        pp_size=instance.pp_size,
        pp_rank=instance.pp_rank,
        hash_algorithm=hash_algorithm,
        extra={name: value for name, value in extra.items() if value},
    )


def hash_probe(token_database: Any) -> str:
    """The hash that LMCache gives a fixed chunk of tokens: its algorithm, its seed and its chunk size in one number, as text."""
    tokens = list(range(1, token_database.chunk_size + 1))
    _, _, chunk_hash = next(iter(token_database.process_tokens(tokens, make_key=False)))
    return str(chunk_hash)


def _transfer_group() -> Any:
    """vLLM's KV connector of this worker, or None. If vLLM has made one, its module is loaded."""
    module = sys.modules.get("vllm.distributed.kv_transfer")
    return module.get_kv_transfer_group() if module is not None and module.has_kv_transfer_group() else None


def _adapter(group: Any) -> Any:
    """LMCache's adapter (`LMCacheConnectorV1Impl`) inside vLLM's connector, which may be one of several (`MultiConnector`)."""
    for connector in (group, *getattr(group, "_connectors", ())):
        adapter = getattr(connector, "_lmcache_engine", None)
        if hasattr(adapter, "_vllm_config"):
            return adapter
    return None


def _under_vllm(metadata: Any, settings: Settings, group: Any, connector: Any) -> Instance:
    vllm = connector._vllm_config
    model, parallel, cache, transfer = vllm.model_config, vllm.parallel_config, vllm.cache_config, vllm.kv_transfer_config
    kvcaches = getattr(connector, "kv_caches", None) or None
    kv_config = getattr(group, "_kv_cache_config", None)
    device_type = str(getattr(getattr(vllm, "device_config", None), "device_type", ""))
    stage = parallel.tensor_parallel_size * getattr(parallel, "prefill_context_parallel_size", 1)
    ranks = 1 if metadata.use_mla else stage
    name, revision = (settings.model, "") if settings.model else _weights(model)
    return Instance(
        model=name,
        revision=revision,
        dtype=_plain(model.dtype),
        kv_cache_dtype=_cache_dtype(cache.cache_dtype, model.dtype),
        layers=metadata.kv_shape[0],
        kv_heads=metadata.kv_shape[3],
        head_dim=metadata.kv_shape[4],
        block_size=_block_size(settings, cache.block_size, kvcaches, getattr(kv_config, "num_blocks", 0)),
        tp_size=parallel.tensor_parallel_size,
        pp_size=parallel.pipeline_parallel_size,
        pp_rank=metadata.worker_id // stage % parallel.pipeline_parallel_size,
        worker_id=metadata.worker_id,
        rank=metadata.worker_id % ranks,
        ranks=ranks,
        use_mla=metadata.use_mla,
        rope=_rope(model),
        quantization=str(model.quantization or ""),
        facts=_facts(vllm, kvcaches),
        lora_enabled=vllm.lora_config is not None,
        prompt_embeds=bool(getattr(model, "enable_prompt_embeds", False)),
        dynamic_kv_scales=bool(getattr(cache, "calculate_kv_scales", False)),
        context_parallel=getattr(parallel, "decode_context_parallel_size", 1)
        * getattr(parallel, "prefill_context_parallel_size", 1),
        kv_groups=max(1, len(getattr(kv_config, "kv_cache_groups", ()))),
        gpu_memory_utilization=_utilization(cache, device_type),
        device_type=device_type,
        under_vllm=True,
        load_failure_policy=str(getattr(transfer, "kv_load_failure_policy", "")),
        kv_role=str(getattr(transfer, "kv_role", "") or ""),
        kvcaches=kvcaches,
        connector=connector,
    )


def _block_size(settings: Settings, configured: int, kvcaches: Mapping[str, Any] | None, num_blocks: int) -> int:
    """Tokens a block of the tensors: the attention kernel may want smaller blocks than vLLM hands out, and slots count alike in both."""
    if settings.block_size and settings.block_size != configured:
        raise ConfigError(f"vcache.block_size is {settings.block_size} but vLLM's block size is {configured}: leave ours out")
    tensor: Any = next(iter(kvcaches.values()), None) if kvcaches else None
    # Blocks are the first axis, or the second behind a pair of K and V.
    axes = list(tensor.shape[:2]) if num_blocks and hasattr(tensor, "shape") else []
    if num_blocks in axes:
        return configured
    parts = [size // num_blocks for size in axes if size > num_blocks and size % num_blocks == 0]
    return next((configured // part for part in parts if configured % part == 0), configured)


def _facts(vllm: Any, kvcaches: Mapping[str, Any] | None) -> dict[str, str]:
    """What changes the bytes of a block, or what is computed into it, and has no field of its own."""
    cache, model = vllm.cache_config, vllm.model_config
    found = {
        "engine": f"vllm {'.'.join(str(getattr(sys.modules.get('vllm'), '__version__', '')).split('.')[:2])}",
        "attention": _attention(vllm, kvcaches),
        "layer_names": _digest(list(kvcaches)) if kvcaches else "",
        "model_config": _digest(_model_config(model)),
        "weights": "dummy" if _load_format(vllm) == "dummy" else "",
        "kv_skip_layers": ",".join(map(str, getattr(cache, "kv_cache_dtype_skip_layers", ()) or ())),
        "sliding_window": "off" if getattr(model, "disable_sliding_window", False) else "",
        "draft": _draft(getattr(vllm, "speculative_config", None)),
    }
    return {name: value for name, value in found.items() if value}


def _load_format(vllm: Any) -> str:
    named = getattr(getattr(vllm, "load_config", None), "load_format", "")
    return str(getattr(named, "value", named))


def _attention(vllm: Any, kvcaches: Mapping[str, Any] | None) -> str:
    """The attention backends of the layers that cache, which arrange K, V and heads inside of a block."""
    layers = getattr(getattr(vllm, "compilation_config", None), "static_forward_context", None) or {}
    used: list[Any] = [getattr(layer, "attn_backend", None) for name, layer in layers.items() if not kvcaches or name in kvcaches]
    return ",".join(sorted({str(backend.get_name()) for backend in used if hasattr(backend, "get_name")}))


def _draft(speculative: Any) -> str:
    method = getattr(speculative, "method", None)
    if method in _NO_DRAFT_KV:
        return ""
    draft = getattr(speculative, "draft_model_config", None)
    return f"{method} {'@'.join(_weights(draft)) if draft is not None else ''}".strip()


def _rope(model: Any) -> str:
    text = getattr(model, "hf_text_config", None)
    found = {name: getattr(text, name, None) for name in _ROPE}
    return _canonical({name: value for name, value in found.items() if value is not None}) if any(found.values()) else ""


def _model_config(model: Any) -> Any:
    """The Hugging Face configuration without what differs between equal instances: where it was read from, and by which version."""
    hf_config: Any = getattr(model, "hf_config", None)
    return _without_volatile(hf_config.to_dict()) if hasattr(hf_config, "to_dict") else None


def _without_volatile(values: Any) -> Any:
    if isinstance(values, Mapping):
        kept = {str(name): value for name, value in values.items() if not str(name).startswith("_") and name not in _VOLATILE}
        return {name: _without_volatile(value) for name, value in kept.items()}
    return [_without_volatile(value) for value in values] if isinstance(values, list | tuple) else values


def _canonical(values: Any) -> str:
    # An object's own text may hold its address, which is another one in every process.
    return json.dumps(values, sort_keys=True, separators=(",", ":"), default=lambda value: type(value).__qualname__)


def _digest(values: Any) -> str:
    return blake2b(_canonical(values).encode(), digest_size=8, person=b"vcache-facts-1").hexdigest() if values else ""


def _cache_dtype(name: object, model_dtype: object) -> str:
    """vLLM's `cache_dtype`: `auto` is the model's own, and `fp8` another word for `fp8_e4m3`."""
    text = str(name)
    return {"auto": _plain(model_dtype), "fp8": "fp8_e4m3"}.get(text, text)


def _plain(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")


def _utilization(cache: Any, device_type: str) -> float | None:
    """None on a CPU, and where `kv_cache_memory_bytes` decides instead."""
    if device_type == "cpu" or getattr(cache, "kv_cache_memory_bytes", None):
        return None
    share = getattr(cache, "gpu_memory_utilization", None)
    return float(share) if share is not None else None


def _weights(model: Any) -> tuple[str, str]:
    """(name, revision) of what vLLM's `ModelConfig` loads; see the module's text."""
    # Weights in object storage: vLLM pulls the small files into a folder of its own and keeps the address here.
    name = str(getattr(model, "model_weights", "") or model.model)
    snapshot = _SNAPSHOT.search(name)
    if snapshot:
        return snapshot["repository"].replace("--", "/", 1), snapshot["commit"]
    path = Path(name)
    if path.exists():
        return str(path.resolve()), _files_digest(path.resolve())
    commit = getattr(getattr(model, "hf_config", None), "_commit_hash", None)
    return name, str(commit or getattr(model, "revision", None) or "")


def _files_digest(path: Path) -> str:
    """What the files at `path` are, as far as one can tell without reading them."""
    files = [path] if path.is_file() else sorted(file for file in path.iterdir() if file.is_file() and file.name[0] != ".")
    digest = blake2b(digest_size=8, person=b"vcache-facts-1")
    for file in files:
        there = file.stat()
        digest.update(os.fsencode(file.name) + f"/{there.st_size} {there.st_mtime_ns}\n".encode())
    return f"files-{digest.hexdigest()}"
