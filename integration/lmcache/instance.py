"""What the plugin knows of the serving instance it runs in, and the layout that follows from it.

Under vLLM its own configuration says it; without vLLM LMCache's metadata and our settings do. Everything that changes the bytes of
a chunk, or what they mean, goes into the `Layout`; nothing else does. vLLM and LMCache are never imported here: whoever calls has
loaded what there is.

Under vLLM the weights go by what `..vllm.weights` finds out, unless `vcache.model` in LMCache's extra_config names them.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vcache_backend.errors import ConfigError
from vcache_backend.transfer.layout import Layout
from vcache_backend.vram_pool.paged import PagedKV

from ..vllm import model_spec
from .settings import Settings


@dataclass(frozen=True, kw_only=True)
class Instance:
    """One worker of a serving instance.

    dtype, kv_cache_dtype: of the computation, and of what is cached (`auto` resolved). layers, kv_heads, head_dim: as one worker
    holds them, draft layers included. block_size: tokens a block of the KV cache tensors. worker_id: among all of the instance's
    workers. rank, ranks: which shard of a chunk this worker holds, of how many, within its pipeline stage; 0 of 1 with MLA, where
    all hold the same. rope: canonical text. spec: what else the bytes depend on, by name. gpu_memory_utilization: None where it
    is unknown or does not apply. kv_groups: groups of layers with block tables of their own. kvcaches: by layer, None while vLLM
    has not registered them. connector: LMCache's adapter in vLLM, None without vLLM. recomputes: are tokens computed rightly whose
    load failed in the step that had counted on it? vLLM's second model runner does not, nor does asynchronous scheduling (vLLM issue
    #49250).
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
    spec: Mapping[str, str] = field(default_factory=dict)
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
    recomputes: bool = True
    kvcaches: dict[str, Any] | None = field(default=None, compare=False, repr=False)
    connector: Any = field(default=None, compare=False, repr=False)

    @property
    def whole_blocks_only(self) -> bool:
        """Single tokens of a block must not be moved (see `model_spec.whole_blocks_only`)."""
        return self.under_vllm and model_spec.whole_blocks_only(self.device_type)

    @property
    def kv_axes(self) -> str | None:
        """What the axes of vLLM's tensors are, where shapes leave a doubt (see `model_spec.axes`)."""
        return model_spec.axes(self.kvcaches, self.block_size) if self.under_vllm and self.kvcaches else None


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
        dtype=model_spec.plain(metadata.kv_dtype),
        kv_cache_dtype=model_spec.plain(metadata.kv_dtype),
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
        **instance.spec,
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
    model = model_spec.read_model(vllm, settings.model)
    transfer, parallel = vllm.kv_transfer_config, vllm.parallel_config
    kvcaches = getattr(connector, "kv_caches", None) or None
    kv_config = getattr(group, "_kv_cache_config", None)
    if settings.block_size and settings.block_size != model.block_size:
        raise ConfigError(
            f"vcache.block_size is {settings.block_size} but vLLM's block size is {model.block_size}: leave ours out"
        )
    stage = model.tp_size * getattr(parallel, "prefill_context_parallel_size", 1)
    ranks = 1 if metadata.use_mla else stage
    of_this_worker = {
        "attention": model_spec.attention(vllm, kvcaches),
        "layer_names": model_spec.layer_names(kvcaches),
    }
    return Instance(
        model=model.model,
        revision=model.revision,
        dtype=model.dtype,
        kv_cache_dtype=model.kv_cache_dtype,
        layers=metadata.kv_shape[0],
        kv_heads=metadata.kv_shape[3],
        head_dim=metadata.kv_shape[4],
        block_size=model_spec.tensor_block_size(model.block_size, kvcaches, getattr(kv_config, "num_blocks", 0)),
        tp_size=model.tp_size,
        pp_size=model.pp_size,
        pp_rank=metadata.worker_id // stage % model.pp_size,
        worker_id=metadata.worker_id,
        rank=metadata.worker_id % ranks,
        ranks=ranks,
        use_mla=metadata.use_mla,
        rope=model.rope,
        quantization=model.quantization,
        spec=model.extra | {name: value for name, value in of_this_worker.items() if value},
        lora_enabled=model.lora_enabled,
        prompt_embeds=model.prompt_embeds,
        dynamic_kv_scales=model.dynamic_kv_scales,
        context_parallel=model.context_parallel,
        kv_groups=max(1, len(getattr(kv_config, "kv_cache_groups", ()))),
        gpu_memory_utilization=model.gpu_memory_utilization,
        device_type=model.device_type,
        under_vllm=True,
        load_failure_policy=str(getattr(transfer, "kv_load_failure_policy", "")),
        kv_role=str(getattr(transfer, "kv_role", "") or ""),
        recomputes=not (getattr(vllm, "use_v2_model_runner", True) or model.async_scheduling),
        kvcaches=kvcaches,
        connector=connector,
    )
