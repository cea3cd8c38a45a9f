"""Describes the serving instance around the plugin, and makes its layout.

Under vLLM the description comes from vLLM's configuration (`..vllm.model.spec`), else from
LMCache's metadata and our settings. Imports neither vLLM nor LMCache."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from vcache_backend.config import Config
from vcache_backend.errors import ConfigError, LayoutError
from vcache_backend.transfer.arguments import KVCaches
from vcache_backend.transfer.layout import Layout
from vcache_backend.vram_pool.paged import PagedKV

from ..vllm.model import groups
from ..vllm.model import spec as model_spec
from ..vllm.model.spec import ModelSpec
from .settings import Settings


@dataclass(frozen=True, kw_only=True)
class Instance:
    """One worker of a serving instance.

    model: without vLLM, this worker's part of the model. rank, ranks: the number of this worker's
    shard of a chunk, of how many, within a pipeline stage; 0 of 1 with MLA, where all ranks hold
    the same KV. kv_groups: groups of layers with separate block tables. windowed: vLLM frees some
    of a request's blocks while it runs. num_blocks: as vLLM counts them; 0 if unknown. kvcaches: by
    layer; None until vLLM has registered them. adapter: LMCache's adapter in vLLM. adapter,
    vllm_config: None without vLLM."""

    model: ModelSpec
    rank: int = 0
    ranks: int = 1
    pp_rank: int = 0
    kv_groups: int = 1
    windowed: bool = False
    num_blocks: int = 0
    load_failure_policy: str = ""
    kvcaches: dict[str, Any] | None = field(default=None, compare=False, repr=False)
    adapter: Any = field(default=None, compare=False, repr=False)
    vllm_config: Any = field(default=None, compare=False, repr=False)

    def describe(self, kvcaches: KVCaches, config: Config) -> tuple[PagedKV, Config]:
        """Describe this worker's KV caches. Returns their geometry, and `config` with the matching
        `engine.kv_axes`. LayoutError."""
        engine, tensors = config.engine, by_layer(kvcaches)
        if self.vllm_config is None:
            kv = PagedKV.describe(kvcaches, self.model.block_size, axes=engine.kv_axes or None)
        else:
            table = groups.LayerGroup(0, self.model.block_size, 0, tuple(tensors))
            tables = groups.Groups([table], engine.chunk_size)
            kv = model_spec.describe(tables, tensors, self.num_blocks, engine.kv_axes)
        if kv.others:
            raise LayoutError(
                f"the layers' pages have several sizes ({kv.name}), which is not supported "
                "through LMCache: give vLLM vcache's own connector instead of LMCache's"
            )
        if self.vllm_config is None:
            return kv, config
        axes = engine.kv_axes or model_spec.axes(tensors, kv.block_size) or ""
        return kv, msgspec.structs.replace(
            config, engine=msgspec.structs.replace(engine, kv_axes=axes)
        )

    def layout(
        self, kvcaches: KVCaches, kv: PagedKV, chunk_size: int, hash_probe: str, hash_algorithm: str
    ) -> Layout:
        """Make the layout on which two instances must agree to share. LMCache's own key covers only
        the model, the dtype and the number of workers.

        chunk_size: in tokens. hash_probe: see `hash_probe`. hash_algorithm: LMCache's
        `pre_caching_hash_algorithm`. All ranks of a pipeline stage get the same layout."""
        layers = kvcaches if isinstance(kvcaches, Mapping) else {}
        shard = model_spec.read_shard(self.vllm_config, layers, kv, chunk_size, self.pp_rank, 0)
        made = model_spec.layout(self.model, [shard], chunk_size, hash_probe.encode())
        return msgspec.structs.replace(
            made, hash_algorithm=hash_algorithm, extra=made.extra | {"integration": "lmcache"}
        )


def by_layer(kvcaches: KVCaches) -> dict[str, Any]:
    """Name the KV caches by layer, or by number if LMCache passes a list."""
    if isinstance(kvcaches, Mapping):
        return dict(kvcaches)
    return {str(number): tensor for number, tensor in enumerate(kvcaches)}


def discover(metadata: Any, settings: Settings) -> Instance:
    """Describe the instance that LMCache's `metadata` belongs to. ConfigError if the block size is
    unknown, or contradicts `settings`."""
    group = _transfer_group()
    adapter = _adapter(group)
    if adapter is not None:
        return _under_vllm(metadata, settings, group, adapter)
    if not settings.block_size:
        raise ConfigError(
            "no vLLM to ask for the block size: set vcache.block_size in LMCache's extra_config"
        )
    ranks = 1 if metadata.use_mla else metadata.world_size
    dtype = model_spec.plain(metadata.kv_dtype)
    model = ModelSpec(
        model=settings.model or metadata.model_name,
        dtype=dtype,
        kv_cache_dtype=dtype,
        layers=metadata.kv_shape[0],
        kv_heads=metadata.kv_shape[3],
        head_dim=metadata.kv_shape[4],
        tp_size=metadata.world_size,
        use_mla=metadata.use_mla,
        block_size=settings.block_size,
    )
    return Instance(model=model, rank=metadata.worker_id % ranks, ranks=ranks)


def hash_probe(token_database: Any) -> str:
    """Hash a fixed chunk with LMCache: tells its algorithm, seed and chunk size apart."""
    tokens = list(range(1, token_database.chunk_size + 1))
    _, _, chunk_hash = next(iter(token_database.process_tokens(tokens, make_key=False)))
    return str(chunk_hash)


def _transfer_group() -> Any:
    """vLLM's KV connector in this worker; None unless vLLM has made one."""
    module = sys.modules.get("vllm.distributed.kv_transfer")
    has = module is not None and module.has_kv_transfer_group()
    return module.get_kv_transfer_group() if module is not None and has else None


def _adapter(group: Any) -> Any:
    """Find LMCache's adapter (`LMCacheConnectorV1Impl`) in vLLM's connector, which may contain
    several connectors (`MultiConnector`)."""
    for connector in (group, *getattr(group, "_connectors", ())):
        adapter = getattr(connector, "_lmcache_engine", None)
        if hasattr(adapter, "_vllm_config"):
            return adapter
    return None


def _under_vllm(metadata: Any, settings: Settings, group: Any, adapter: Any) -> Instance:
    vllm = adapter._vllm_config
    model = model_spec.read_model(vllm, settings.model)
    if settings.block_size and settings.block_size != model.block_size:
        raise ConfigError(
            f"vcache.block_size is {settings.block_size} but vLLM's block size is "
            f"{model.block_size}: leave ours out"
        )
    stage = model.tp_size * getattr(vllm.parallel_config, "prefill_context_parallel_size", 1)
    ranks = 1 if metadata.use_mla else stage
    kv_config = getattr(group, "_kv_cache_config", None)
    tables = getattr(kv_config, "kv_cache_groups", ())
    return Instance(
        model=model,
        rank=metadata.worker_id % ranks,
        ranks=ranks,
        pp_rank=metadata.worker_id // stage % model.pp_size,
        kv_groups=max(1, len(tables)),
        windowed=bool(tables) and groups.several(kv_config),
        num_blocks=getattr(kv_config, "num_blocks", 0),
        load_failure_policy=str(getattr(vllm.kv_transfer_config, "kv_load_failure_policy", "")),
        kvcaches=getattr(adapter, "kv_caches", None) or None,
        adapter=adapter,
        vllm_config=vllm,
    )
