"""Reads a serving instance from vLLM's configuration and KV tensors, for both integrations, and
makes the instance's layout.

Imports neither vLLM nor LMCache."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Any

import msgspec
from torch import Tensor

from vcache_backend.errors import LayoutError
from vcache_backend.transfer.layout import Layout
from vcache_backend.vram_pool.copies.geometry import PagedKV

from .groups import Groups
from .weights import digest, extra, plain, rope, text, weights

AXES = "block head token dim"
"""The axes of vLLM's view of a layer's KV, in any memory order (vLLM 0.31 and later). A state's
view has one head and no tokens."""


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A whole serving instance, which each of its processes reads from vLLM's configuration.

    kv_cache_dtype: `auto` resolved. kv_heads, head_dim: of the whole model without draft layers.
    rope: canonical text. named: the user has named the weights. block_size: tokens of the blocks
    that vLLM hands out. hash_algorithm: of vLLM's block hashes. extra: further settings that change
    the bytes, by name."""

    model: str
    kv_cache_dtype: str
    kv_heads: int
    head_dim: int
    tp_size: int
    use_mla: bool
    block_size: int
    revision: str = ""
    rope: str = ""
    pp_size: int = 1
    named: bool = False
    device_type: str = ""
    hash_algorithm: str = ""
    extra: dict[str, str] = {}


class ShardSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One worker's part of every chunk.

    kv_layout, dtype, layers: see `PagedKV`. block_size: tokens of the tensors' blocks, maybe fewer
    than of vLLM's blocks. chunk_bytes: of this worker's part. attention: the backends' names.
    layer_names: a digest of the names, in order. problem: why this worker must not cache; then
    other fields may be missing."""

    pp_rank: int
    tp_rank: int
    kv_layout: str = ""
    dtype: str = ""
    layers: int = 0
    block_size: int = 0
    chunk_bytes: int = 0
    attention: str = ""
    layer_names: str = ""
    problem: str = ""


def read_model(vllm_config: Any, name: str = "") -> ModelSpec:
    """The instance that `vllm_config` describes. In the scheduler's process or a worker's, before
    or after the KV caches are made.

    name: the user's name for the weights, which also replaces their revision. A model's code may
    change the configuration while it loads, so only the scheduler's reading goes into the
    layout."""
    model = vllm_config.model_config
    parallel = vllm_config.parallel_config
    cache = vllm_config.cache_config
    known_as, revision = (name, "") if name else weights(model, vllm_config.load_config)
    return ModelSpec(
        model=known_as,
        revision=revision,
        kv_cache_dtype=_cache_dtype(cache.cache_dtype, model.dtype),
        rope=rope(model),
        kv_heads=model.get_total_num_kv_heads(),
        head_dim=model.get_head_size(),
        tp_size=parallel.tensor_parallel_size,
        pp_size=parallel.pipeline_parallel_size,
        use_mla=bool(model.use_mla),
        named=bool(name),
        device_type=str(vllm_config.device_config.device_type),
        block_size=cache.block_size,
        hash_algorithm=text(cache.prefix_caching_hash_algo),
        extra=extra(vllm_config),
    )


def describe(groups: Groups, kv_caches: Mapping[str, Tensor], num_blocks: int) -> PagedKV:
    """Describe the geometry of a worker's `kv_caches`, vLLM's view of each layer (`AXES`).

    num_blocks: vLLM's number. LayoutError if blocks do not match vLLM's, or are not whole pages."""
    held, states = (
        [{name: kv_caches[name] for name in group.layers if name in kv_caches} for group in kind]
        for kind in (groups.groups, groups.states)
    )
    # The attention kernel may cut vLLM's blocks. A pipeline stage may lack a group's layers; the
    # group's blocks are then cut like all other blocks.
    counts = {len(cache) for layers in held for cache in layers.values()}
    split = max((count // num_blocks for count in counts if count % num_blocks == 0), default=1)
    shares = [share._replace(block_size=share.block_size // split) for share in groups.shares]
    kv = PagedKV.describe_groups(list(zip(held, shares, strict=True)), axes=AXES)
    if kv.num_blocks != num_blocks * split:
        raise LayoutError(
            f"KV caches have {kv.num_blocks} blocks of {kv.block_size} tokens where vLLM hands out "
            f"{num_blocks} of {groups.groups[0].block_size}"
        )
    return kv.with_states(states, split)


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
    return ShardSpec(
        pp_rank=pp_rank,
        tp_rank=tp_rank,
        kv_layout=kv.name,
        dtype=kv.dtype,
        layers=kv.layers,
        block_size=kv.block_size,
        chunk_bytes=kv.chunk_bytes(chunk_size),
        attention=attention(vllm_config, kv_caches),
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
    first = ordered[0]
    fields = model.extra | {
        "integration": "vllm",
        "hash_root": blake2b(hash_root, digest_size=16, person=b"vcache-model-1").hexdigest(),
        "shards": digest([msgspec.structs.asdict(shard) | {"problem": ""} for shard in ordered]),
        "kv_cache_dtype": model.kv_cache_dtype,
        "mla": str(model.use_mla),
        "device_type": model.device_type,
        "vllm_block_size": str(model.block_size),
    }
    return Layout(
        model=model.model,
        revision=model.revision,
        dtype=first.dtype,
        layers=first.layers,
        kv_heads=model.kv_heads,
        head_dim=model.head_dim,
        block_size=first.block_size,
        kv_layout=first.kv_layout,
        chunk_size=chunk_size,
        rope=model.rope,
        tp_size=model.tp_size,
        pp_size=model.pp_size,
        hash_algorithm=model.hash_algorithm,
        extra={name: value for name, value in fields.items() if value},
    )


# ---- reasons against caching


def refusal(vllm_config: Any, model: ModelSpec, hash_seed: str | None) -> str | None:
    """Say in one line why nothing may be cached, and what to change; None if caching is possible.

    hash_seed: see `config.hash_seed`."""
    if reason := next(misfits(vllm_config, model), None):
        return reason
    if vllm_config.weight_transfer_config is not None and not model.named:
        return (
            "--weight-transfer-config brings new weights, and KV of old ones must not be found: "
            "set connector.weights to the version with which the instance starts "
            "(see New weights in docs/vllm/operation.md)"
        )
    if not model.hash_algorithm.startswith("sha256"):
        return (
            f"prefixes whose hashes are {model.hash_algorithm} can be made to collide: "
            "set --prefix-caching-hash-algo sha256"
        )
    return seed(hash_seed)


def misfits(vllm_config: Any, model: ModelSpec) -> Iterator[str]:
    """List why neither integration may cache this instance, each reason with the change to make."""
    config, parallel = vllm_config.model_config, vllm_config.parallel_config
    if parallel.decode_context_parallel_size * parallel.prefill_context_parallel_size > 1:
        yield (
            "context parallelism splits the tokens of a block among workers: set both "
            "context parallel sizes to 1"
        )
    if config.enable_prompt_embeds:
        yield (
            "prompts given as embeddings have no tokens to tell them apart: start vLLM "
            "without --enable-prompt-embeds"
        )
    if parallel.enable_fault_tolerance:
        yield (
            "after a failed step vLLM's prefix cache names blocks that were never written: "
            "start it without --enable-fault-tolerance"
        )
    if model.kv_cache_dtype.endswith("per_token_head"):
        yield (
            f"vLLM clears the scales of {model.kv_cache_dtype} when it first runs a layer, those "
            "of loaded chunks with them: set --kv-cache-dtype fp8 or auto"
        )
    # vLLM's caches identify images by content. Without a cache each process numbers images on its
    # own.
    images, cache = config.multimodal_config, vllm_config.cache_config
    if images and not (images.mm_processor_cache_gb or cache.enable_prefix_caching):
        yield (
            "each instance counts images instead of naming them by content: start vLLM "
            "without --mm-processor-cache-gb 0"
        )
    if not (model.revision or model.named):
        yield (
            f"it is not known which weights of {model.model} vLLM has loaded: they have no "
            "revision, come from another process, or were written while vLLM started: start it "
            "again, or set connector.model to a name of these weights"
        )


def seed(hash_seed: str | None) -> str | None:
    """Say why instances cannot agree on hashes, given `PYTHONHASHSEED` (see `config.hash_seed`);
    None if they can."""
    if hash_seed and hash_seed != "random":
        return None
    given = f"PYTHONHASHSEED is {hash_seed or 'not set'}"
    return (
        f"{given}, so that each process may hash the same tokens differently: set "
        "PYTHONHASHSEED=0 in the environment of every instance before it starts"
    )


# ---- KV tensors


def attention(vllm_config: Any, kv_caches: Mapping[str, Any]) -> str:
    """The names of the layers' attention backends, which arrange K, V and heads within a block.
    Known in workers only."""
    layers = vllm_config.compilation_config.static_forward_context
    backends = (getattr(layers.get(name), "attn_backend", None) for name in kv_caches)
    return ",".join(sorted({str(backend.get_name()) for backend in backends if backend}))


# ---- the configuration


def _cache_dtype(name: object, model_dtype: object) -> str:
    """vLLM's `cache_dtype`, with `auto` resolved to the model's dtype and `fp8` to `fp8_e4m3`."""
    named = str(name)
    return {"auto": plain(model_dtype), "fp8": "fp8_e4m3"}.get(named, named)
