"""Describes a serving instance by vLLM's configuration and KV tensors, for both integrations, and
makes the instance's layout. Imports neither vLLM nor LMCache."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
from torch import Tensor

from vcache_backend.transfer.layout import Layout
from vcache_backend.vram_pool.copies.geometry import PagedKV

from .weights import ROPE, canonical, digest, dtype_name, set_in, settings, text, weights

_COMMON = ("model", "revision", "kv_heads", "head_dim", "rope", "tp_size", "pp_size")
_OF_A_SHARD = ("dtype", "layers", "block_size", "kv_layout")
"""Fields of `Layout`, also of `ModelSpec` and `ShardSpec`."""


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A whole serving instance, as each of its processes reads it from vLLM's configuration."""

    model: str
    """The weights' name, see `weights`, or the user's name for them."""
    revision: str = ""
    named: bool = False
    """The user has named the weights."""
    kv_cache_dtype: str
    """`auto` resolved."""
    kv_heads: int
    """Of the whole model without draft layers, as `head_dim`."""
    head_dim: int
    rope: str = ""
    """The rotary embedding as canonical JSON."""
    tp_size: int
    pp_size: int = 1
    use_mla: bool
    device_type: str = ""
    block_size: int
    """Tokens of the blocks that vLLM hands out."""
    hash_algorithm: str = ""
    """Of vLLM's block hashes."""
    extra: dict[str, str] = {}
    """Further settings that change the bytes, by name."""


class ShardSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One worker's part of every chunk. kv_layout, dtype, layers: see `PagedKV`."""

    pp_rank: int
    tp_rank: int
    kv_layout: str = ""
    dtype: str = ""
    layers: int = 0
    block_size: int = 0
    """Tokens of the tensors' blocks, maybe fewer than of vLLM's blocks."""
    chunk_bytes: int = 0
    """Of this worker's part."""
    attention: str = ""
    """The backends' names."""
    layer_names: str = ""
    """A digest of the names, in order."""
    problem: str = ""
    """Why this worker must not cache; then other fields may be missing."""


def read_model(vllm_config: Any, name: str = "") -> ModelSpec:
    """The instance that `vllm_config` describes. In the scheduler's process or a worker's, before
    or after the KV caches are made.

    name: the user's name for the weights, which also replaces their revision. A model's code may
    change the configuration while it loads, so only the scheduler's reading goes into the
    layout."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    parallel = vllm_config.parallel_config
    known_as, revision = (name, "") if name else weights(model, vllm_config.load_config)
    dtypes = {"auto": dtype_name(model.dtype), "fp8": "fp8_e4m3"}
    rotary = set_in(getattr(model, "hf_text_config", None), ROPE)
    return ModelSpec(
        model=known_as,
        revision=revision,
        named=bool(name),
        kv_cache_dtype=dtypes.get(str(cache.cache_dtype), str(cache.cache_dtype)),
        kv_heads=model.get_total_num_kv_heads(),
        head_dim=model.get_head_size(),
        rope=canonical(rotary) if rotary else "",
        tp_size=parallel.tensor_parallel_size,
        pp_size=parallel.pipeline_parallel_size,
        use_mla=bool(model.use_mla),
        device_type=str(vllm_config.device_config.device_type),
        block_size=cache.block_size,
        hash_algorithm=text(cache.prefix_caching_hash_algo),
        extra=settings(vllm_config, canonical(rotary)),
    )


def read_shard(
    vllm_config: Any,
    kv_caches: Mapping[str, Tensor],
    kv: PagedKV,
    chunk_size: int,
    pp_rank: int,
    tp_rank: int,
    names: str = "",
) -> ShardSpec:
    """Describe a worker's shard to the scheduler. Runs in the worker, after the model is loaded.

    kv: the geometry of `kv_caches`. chunk_size: in tokens. names: a digest of the layers' names; by
    default of `kv_caches`, in order. LayoutError if a chunk does not consist of whole blocks."""
    layers = vllm_config.compilation_config.static_forward_context
    # Attention backends arrange K, V and heads within a block.
    backends = (getattr(layers.get(name), "attn_backend", None) for name in kv_caches)
    return ShardSpec(
        pp_rank=pp_rank,
        tp_rank=tp_rank,
        kv_layout=kv.name,
        dtype=kv.dtype,
        layers=kv.layers,
        block_size=kv.block_size,
        chunk_bytes=kv.chunk_bytes(chunk_size),
        attention=",".join(sorted({str(backend.get_name()) for backend in backends if backend})),
        layer_names=names or digest(list(kv_caches)),
    )


def layout(
    model: ModelSpec, shards: Sequence[ShardSpec], chunk_size: int, hash_root: bytes
) -> Layout:
    """Make the layout on which two instances must agree to share. shards: of all workers, at least
    one, in any order.

    Some fields come from the first rank, so a worker can make a layout for its KV caches from its
    shard alone. With several workers, the namespace of a worker's layout is not the instance's.
    hash_root: vLLM's NONE_HASH, which follows from the seed."""
    ordered = sorted(shards, key=lambda shard: (shard.pp_rank, shard.tp_rank))
    fields = model.extra | {
        "integration": "vllm",
        "hash_root": digest(hash_root.hex()),
        "shards": digest([msgspec.structs.asdict(shard) | {"problem": ""} for shard in ordered]),
        "kv_cache_dtype": model.kv_cache_dtype,
        "mla": str(model.use_mla),
        "device_type": model.device_type,
        "vllm_block_size": str(model.block_size),
    }
    return Layout(
        **{name: getattr(model, name) for name in _COMMON},
        **{name: getattr(ordered[0], name) for name in _OF_A_SHARD},
        hash_algorithm=model.hash_algorithm,
        chunk_size=chunk_size,
        extra={name: value for name, value in fields.items() if value},
    )


# ---- reasons against caching


def misfits(vllm_config: Any, model: ModelSpec) -> Iterator[str]:
    """List why neither integration may cache this instance, each reason with the change to make."""
    config, parallel = vllm_config.model_config, vllm_config.parallel_config
    images, cache = config.multimodal_config, vllm_config.cache_config
    if parallel.decode_context_parallel_size * parallel.prefill_context_parallel_size > 1:
        yield "context parallelism splits blocks among workers: set both sizes of it to 1"
    if config.enable_prompt_embeds:
        yield "embeddings have no tokens to tell prompts apart: leave out --enable-prompt-embeds"
    if parallel.enable_fault_tolerance:
        yield "a failed step leaves blocks unwritten: start vLLM without --enable-fault-tolerance"
    if model.kv_cache_dtype.endswith("per_token_head"):
        why = f"vLLM clears the scales of {model.kv_cache_dtype} at a layer's first run"
        yield f"{why}: set --kv-cache-dtype fp8 or auto"
    if images and not (images.mm_processor_cache_gb or cache.enable_prefix_caching):
        yield "without a cache vLLM numbers images: leave out --mm-processor-cache-gb 0"
    if not (model.revision or model.named):
        why = (
            f"it is not known which weights of {model.model} vLLM has loaded: they have no revision"
        )
        why += ", come from another process, or were written while vLLM started"
        yield f"{why}: start it again, or set connector.model to a name of these weights"


def seed(hash_seed: str | None) -> str:
    """Say why instances cannot agree on hashes, given `PYTHONHASHSEED` (see `config.hash_seed`);
    empty if they can."""
    if hash_seed and hash_seed != "random":
        return ""
    why = f"PYTHONHASHSEED is {hash_seed or 'not set'}, so that each process may hash differently"
    return f"{why}: set PYTHONHASHSEED=0 in the environment of every instance before it starts"
