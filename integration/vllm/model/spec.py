"""Reads a serving instance from vLLM's configuration and KV tensors, for both integrations, and
makes its layout.

It imports neither vLLM nor LMCache."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from itertools import chain
from typing import Any

import msgspec
from torch import Tensor

from vcache_backend.errors import LayoutError
from vcache_backend.transfer.layout import Layout
from vcache_backend.vram_pool.paged import PagedKV

from .groups import Groups
from .weights import digest, extra, rope, text, weights


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A whole serving instance, as each of its processes reads it from vLLM's configuration.

    dtype, kv_cache_dtype: of the computation and of the cache (`auto` resolved). layers, kv_heads,
    head_dim: of the whole model without draft layers. rope: canonical text. context_parallel: the
    product of both sizes. unnamed_inputs: images and the like are identified within one process
    only. new_weights: the weights may change at run time. named: the user has named the weights.
    block_size: tokens of the blocks that vLLM hands out. gpu_memory_utilization: None if it does
    not apply. hash_algorithm: of vLLM's block hashes. extra: other settings that change the bytes,
    by name."""

    model: str
    dtype: str
    kv_cache_dtype: str
    layers: int
    kv_heads: int
    head_dim: int
    tp_size: int
    use_mla: bool
    block_size: int
    revision: str = ""
    quantization: str = ""
    rope: str = ""
    pp_size: int = 1
    prompt_embeds: bool = False
    dynamic_kv_scales: bool = False
    context_parallel: int = 1
    sleep_mode: bool = False
    unnamed_inputs: bool = False
    new_weights: bool = False
    named: bool = False
    gpu_memory_utilization: float | None = None
    device_type: str = ""
    hash_algorithm: str = ""
    extra: dict[str, str] = {}


class ShardSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One worker's part of every chunk.

    kv_layout, dtype, layers, parts, page_bytes: see `PagedKV`. block_size: tokens of the tensors'
    blocks, maybe fewer than vLLM's. chunk_bytes: this worker's part of a chunk. attention: the
    backends' names. layer_names: a digest of the names, in order. problem: why this worker must not
    cache; then the rest may be missing."""

    pp_rank: int
    tp_rank: int
    kv_layout: str = ""
    dtype: str = ""
    layers: int = 0
    page_bytes: int = 0
    parts: int = 0
    block_size: int = 0
    chunk_bytes: int = 0
    attention: str = ""
    layer_names: str = ""
    problem: str = ""


def read_model(vllm_config: Any, name: str = "") -> ModelSpec:
    """The instance that `vllm_config` describes. In the scheduler's process or a worker's, before
    or after the KV caches are made.

    name: the user's name for the weights; it also replaces their revision. Reads the names, sizes
    and times of local weights; OSError if it cannot. A model's code may change its configuration
    while it loads, so only the scheduler's reading goes into the layout."""
    model = vllm_config.model_config
    parallel = vllm_config.parallel_config
    cache = vllm_config.cache_config
    device_type = str(getattr(getattr(vllm_config, "device_config", None), "device_type", ""))
    known_as, revision = (name, "") if name else weights(model)
    return ModelSpec(
        model=known_as,
        revision=revision,
        dtype=plain(model.dtype),
        kv_cache_dtype=_cache_dtype(cache.cache_dtype, model.dtype),
        quantization=str(model.quantization or ""),
        rope=rope(model),
        layers=model.get_total_num_hidden_layers(),
        kv_heads=model.get_total_num_kv_heads(),
        head_dim=model.get_head_size(),
        tp_size=parallel.tensor_parallel_size,
        pp_size=parallel.pipeline_parallel_size,
        use_mla=bool(getattr(model, "use_mla", False)),
        prompt_embeds=bool(getattr(model, "enable_prompt_embeds", False)),
        dynamic_kv_scales=bool(getattr(cache, "calculate_kv_scales", False)),
        context_parallel=getattr(parallel, "decode_context_parallel_size", 1)
        * getattr(parallel, "prefill_context_parallel_size", 1),
        sleep_mode=bool(getattr(model, "enable_sleep_mode", False)),
        unnamed_inputs=_unnamed_inputs(model, cache),
        new_weights=getattr(vllm_config, "weight_transfer_config", None) is not None,
        named=bool(name),
        gpu_memory_utilization=_utilization(cache, device_type),
        device_type=device_type,
        block_size=cache.block_size,
        hash_algorithm=text(getattr(cache, "prefix_caching_hash_algo", "")),
        extra=extra(vllm_config),
    )


def describe(
    groups: Groups, kv_caches: Mapping[str, Any], num_blocks: int, kv_axes: str = ""
) -> PagedKV:
    """Describe the geometry of a worker's `kv_caches` by layer: tensors, or the pages of a state.

    num_blocks: as vLLM counts them; 0: unknown. kv_axes: settles doubtful shapes, see
    `PagedKV.describe`. LayoutError if it does not recognise a tensor, or if the blocks are not
    vLLM's."""
    held = [
        {name: kv_caches[name] for name in group.layers if name in kv_caches}
        for group in groups.groups
    ]
    sizes = [group.block_size for group in groups.groups]
    # A pipeline stage may lack a group's layers. The group's blocks are split like the others'.
    whole = zip(sizes, held, strict=True)
    split = max(size // tensor_block_size(size, layers, num_blocks) for size, layers in whole)
    shares = [share._replace(block_size=share.block_size // split) for share in groups.shares]
    every = dict(chain(*map(dict.items, held)))
    for layer, cache in every.items():
        if not isinstance(cache, Tensor):
            raise LayoutError(
                f"KV cache of {layer} is a {type(cache).__name__} and no tensor: vcache shares "
                "attention layers only"
            )
    named = kv_axes or axes(every, shares[0].block_size)
    kv = PagedKV.describe_groups(list(zip(held, shares, strict=True)), axes=named)
    if num_blocks and kv.num_blocks != num_blocks * split:
        have = f"KV caches have {kv.num_blocks} blocks of {kv.block_size} tokens"
        due = f"where vLLM hands out {num_blocks} of {sizes[0]}"
        raise LayoutError(f"{have} {due}; set engine.kv_axes to what each axis of the tensors is")
    # vLLM before 0.32 passes a state's tensors, later releases pass a state's pages.
    states = [
        {
            name: [at] if isinstance(at := kv_caches[name], Tensor) else list(at)
            for name in group.layers
            if name in kv_caches
        }
        for group in groups.states
    ]
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
    """Describe a worker's shard to the scheduler. Runs in that worker, after the model is loaded.

    kv: the geometry of `kv_caches`. chunk_size: in tokens. names: a digest of the layers' names; by
    default of `kv_caches`, in order. LayoutError if a chunk does not consist of whole blocks."""
    return ShardSpec(
        pp_rank=pp_rank,
        tp_rank=tp_rank,
        kv_layout=kv.name,
        dtype=kv.dtype,
        layers=kv.layers,
        page_bytes=kv.page_bytes,
        parts=kv.parts,
        block_size=kv.block_size,
        chunk_bytes=kv.chunk_bytes(chunk_size),
        attention=attention(vllm_config, kv_caches),
        layer_names=names or layer_names(kv_caches),
    )


def layout(
    model: ModelSpec, shards: Sequence[ShardSpec], chunk_size: int, hash_root: bytes
) -> Layout:
    """Make the layout on which two instances must agree to share. shards: of all workers, in any
    order.

    Some fields are the first rank's. So a worker can make a layout for its KV caches from its shard
    alone. With several workers the namespace of that layout is not the instance's. hash_root:
    vLLM's NONE_HASH, which follows from the seed. LayoutError without a shard."""
    if not shards:
        raise LayoutError("no worker has described its KV caches")
    ordered = sorted(shards, key=lambda shard: (shard.pp_rank, shard.tp_rank))
    first = ordered[0]
    fields = model.extra | {
        "integration": "vllm",
        "hash_root": blake2b(hash_root, digest_size=16, person=b"vcache-model-1").hexdigest(),
        "shards": digest([msgspec.structs.asdict(shard) | {"problem": ""} for shard in ordered]),
        "model_layers": str(model.layers),
        "model_dtype": model.dtype,
        "kv_cache_dtype": model.kv_cache_dtype,
        "quantization": model.quantization,
        "mla": str(model.use_mla),
        "context_parallel": str(model.context_parallel),
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


def refusal(model: ModelSpec, hash_seed: str | None) -> str | None:
    """Say why nothing may be cached, in one line with what to change; None if caching is possible.

    hash_seed: see `config.hash_seed`."""
    if reason := next(misfits(model), None):
        return reason
    if model.new_weights and not model.named:
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


def misfits(instance: ModelSpec) -> Iterator[str]:
    """List why neither integration may cache this instance, each reason with what to change."""
    if instance.context_parallel > 1:
        yield (
            "context parallelism splits the tokens of a block among workers: set both "
            "context parallel sizes to 1"
        )
    if instance.dynamic_kv_scales:
        yield (
            "calculate_kv_scales gives each instance FP8 scales of its own: start vLLM "
            "without --calculate-kv-scales"
        )
    if instance.prompt_embeds:
        yield (
            "prompts given as embeddings have no tokens to tell them apart: start vLLM "
            "without --enable-prompt-embeds"
        )
    if instance.kv_cache_dtype.endswith("per_token_head"):
        yield (
            f"vLLM clears the scales of {instance.kv_cache_dtype} when it first runs a layer, "
            "those of loaded chunks with them: "
            "set --kv-cache-dtype fp8 or auto"
        )
    if instance.unnamed_inputs:
        yield (
            "each instance counts images instead of naming them by content: start vLLM "
            "without --mm-processor-cache-gb 0"
        )
    if not (instance.revision or instance.named):
        yield (
            f"nothing tells which weights of {instance.model} vLLM has loaded: they have no "
            "revision, or were written while vLLM started: start it again, or set connector.model "
            "to a name of these weights"
        )


def seed(hash_seed: str | None) -> str | None:
    """Say why instances cannot agree on hashes, given `PYTHONHASHSEED` (see `config.hash_seed`);
    None if they can."""
    if hash_seed and hash_seed != "random":
        return None
    return (
        f"PYTHONHASHSEED is {hash_seed or 'not set'}, so that each process may hash the same "
        "tokens differently: "
        "set PYTHONHASHSEED=0 in the environment of every instance before it starts"
    )


# ---- KV tensors


def tensor_block_size(configured: int, kv_caches: Mapping[str, Any] | None, num_blocks: int) -> int:
    """The tokens of the tensors' blocks. The attention kernel may use smaller blocks than vLLM;
    slots have the same numbers in both."""
    tensor: Any = next(iter(kv_caches.values()), None) if kv_caches else None
    # Blocks are the first axis, or the second behind a pair of K and V.
    sizes = list(tensor.shape[:2]) if num_blocks and hasattr(tensor, "shape") else []
    if num_blocks in sizes:
        return configured
    parts = [size // num_blocks for size in sizes if size > num_blocks and size % num_blocks == 0]
    return next((configured // part for part in parts if configured % part == 0), configured)


def axes(kv_caches: Mapping[str, Any], block_size: int) -> str | None:
    """Name the axes of vLLM's tensors (see `PagedKV.describe`) if in some layer a block has as many
    heads as tokens, so that its shape is ambiguous; else None."""
    for shape in (tuple(tensor.shape) for tensor in kv_caches.values()):
        if len(shape) == 4 and shape[1] == shape[2] == block_size:
            return "block head token dim"
        if len(shape) == 5 and shape[2] == shape[3] == block_size:
            return "part block token head dim" if shape[0] == 2 else "block part token head dim"
    return None


def attention(vllm_config: Any, kv_caches: Mapping[str, Any] | None) -> str:
    """The names of the caching layers' attention backends, which arrange K, V and heads within a
    block. Known in workers only."""
    compilation = getattr(vllm_config, "compilation_config", None)
    names: set[str] = set()
    for name, layer in (getattr(compilation, "static_forward_context", None) or {}).items():
        backend: Any = getattr(layer, "attn_backend", None)
        if hasattr(backend, "get_name") and (not kv_caches or name in kv_caches):
            names.add(str(backend.get_name()))
    return ",".join(sorted(names))


def layer_names(kv_caches: Mapping[str, Any] | None) -> str:
    """A digest of the layers' names, in the order in which a chunk holds them."""
    return digest(list(kv_caches or ()))


# ---- the configuration


def plain(dtype: object) -> str:
    """The name of a torch dtype without `torch.`."""
    return str(dtype).removeprefix("torch.")


def _cache_dtype(name: object, model_dtype: object) -> str:
    """vLLM's `cache_dtype`, with `auto` resolved to the model's dtype and `fp8` to `fp8_e4m3`."""
    named = str(name)
    return {"auto": plain(model_dtype), "fp8": "fp8_e4m3"}.get(named, named)


def _unnamed_inputs(model: Any, cache: Any) -> bool:
    """Whether each process numbers images anew. vLLM does so if neither of its caches needs to
    identify them."""
    multimodal = getattr(model, "multimodal_config", None)
    return multimodal is not None and not (
        multimodal.mm_processor_cache_gb or cache.enable_prefix_caching
    )


def _utilization(cache: Any, device_type: str) -> float | None:
    """vLLM's `gpu_memory_utilization`; None on a CPU, or if `kv_cache_memory_bytes` decides
    instead."""
    if device_type == "cpu" or getattr(cache, "kv_cache_memory_bytes", None):
        return None
    share = getattr(cache, "gpu_memory_utilization", None)
    return float(share) if share is not None else None
