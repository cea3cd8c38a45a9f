"""Describes the serving instance around the plugin, from vLLM's configuration
(`..vllm.model.spec`), makes the instance's layout, and says why the plugin must not work in it.

Imports neither vLLM nor LMCache."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
from torch import Tensor

from vcache_backend.errors import ConfigError, LayoutError
from vcache_backend.transfer.layout import Layout
from vcache_backend.vram_pool.copies.geometry import PagedKV

from ..vllm.model import groups
from ..vllm.model import spec as model_spec
from ..vllm.model.spec import ModelSpec
from .hooks import our_names


@dataclass(frozen=True, kw_only=True)
class Instance:
    """One worker of a serving instance.

    rank, ranks: this worker's shard of a chunk, and the number of shards, within a pipeline stage;
    0 of 1 with MLA, since all ranks hold the same KV. first: of the instance's workers. several:
    the model has several block tables, or a table of a sliding window. num_blocks: vLLM's
    number. kvcaches: by layer. adapter: LMCache's adapter in vLLM."""

    model: ModelSpec
    rank: int
    ranks: int
    pp_rank: int
    first: bool
    several: bool
    num_blocks: int
    kvcaches: Mapping[str, Tensor] = field(compare=False, repr=False)
    adapter: Any = field(compare=False, repr=False)
    vllm_config: Any = field(compare=False, repr=False)

    def describe(self, chunk_size: int) -> PagedKV:
        """Describe this worker's KV caches. LayoutError."""
        table = groups.LayerGroup(0, self.model.block_size, tuple(self.kvcaches))
        tables = groups.Groups([table], chunk_size)
        kv = tables.describe(self.kvcaches, self.num_blocks)
        if kv.others:
            raise LayoutError(
                f"the layers' pages have several sizes ({kv.name}), which is not supported "
                "through LMCache: give vLLM vcache's own connector instead of LMCache's"
            )
        return kv

    def layout(self, kv: PagedKV, chunk_size: int, hash_probe: str, hash_algorithm: str) -> Layout:
        """Make the layout, which must be equal in instances that share. LMCache's own key covers
        only the model, the dtype and the number of workers.

        chunk_size: in tokens. hash_probe: see `hash_probe`. hash_algorithm: LMCache's
        `pre_caching_hash_algorithm`. All ranks of a pipeline stage get the same layout."""
        shard = model_spec.read_shard(
            self.vllm_config, self.kvcaches, kv, chunk_size, self.pp_rank, 0
        )
        made = model_spec.layout(self.model, [shard], chunk_size, hash_probe.encode())
        return msgspec.structs.replace(
            made, hash_algorithm=hash_algorithm, extra=made.extra | {"integration": "lmcache"}
        )


def discover(metadata: Any, name: str) -> Instance:
    """Describe the vLLM instance of LMCache's `metadata`. name: the user's name for the weights.
    ConfigError without such an instance."""
    vllm: Any = sys.modules.get("vllm.distributed.kv_transfer")
    has = vllm is not None and vllm.has_kv_transfer_group()
    group: Any = vllm.get_kv_transfer_group() if has else None
    # vLLM's connector, or those within a MultiConnector.
    connectors = group, *getattr(group, "_connectors", ())
    adapters = [getattr(connector, "_lmcache_engine", None) for connector in connectors]
    adapter: Any = next((one for one in adapters if hasattr(one, "_vllm_config")), None)
    if adapter is None or not adapter.kv_caches:
        raise ConfigError("found no vLLM here with LMCacheConnectorV1 and KV caches")
    model, kv_config = model_spec.read_model(adapter._vllm_config, name), group._kv_cache_config
    ranks = 1 if metadata.use_mla else model.tp_size
    return Instance(
        model=model,
        rank=metadata.worker_id % ranks,
        ranks=ranks,
        pp_rank=metadata.worker_id // model.tp_size % model.pp_size,
        first=metadata.worker_id % (model.tp_size * model.pp_size) == 0,
        several=groups.several(kv_config),
        num_blocks=kv_config.num_blocks,
        kvcaches=adapter.kv_caches,
        adapter=adapter,
        vllm_config=adapter._vllm_config,
    )


def hash_probe(token_database: Any) -> str:
    """Hash a fixed chunk with LMCache: tells its algorithm, seed and chunk size apart."""
    tokens = list(range(1, token_database.chunk_size + 1))
    _, _, chunk_hash = next(iter(token_database.process_tokens(tokens, make_key=False)))
    return str(chunk_hash)


# ---- where the plugin must not work

_OURS = 'start vLLM with "kv_connector":"VCacheConnector"'
_REPLACED = (
    "use_layerwise",
    "enable_blending",
    "enable_pd",
    "enable_p2p",
    "enable_async_loading",
    "external_lookup_client",
    "enable_scheduler_bypass_lookup",
)
"""Settings of LMCache that replace parts which the plugin needs."""


def refusal(lm_config: Any, instance: Instance) -> str:
    """Name the first setting of LMCache or the instance with which the plugin does not work, and
    the change to make. Empty if all settings fit."""
    return next(_misfits(lm_config, instance), "")


def _misfits(lm_config: Any, instance: Instance) -> Iterator[str]:
    extra = getattr(lm_config, "extra_config", None) or {}
    set_ones = [name for name in _REPLACED if getattr(lm_config, name, None)]
    for name in set_ones + ["audit_backend_enabled"] * bool(extra.get("audit_backend_enabled")):
        yield f"{name} replaces parts of LMCache that vcache needs: remove {name}"
    ours = our_names(lm_config) or ["vcache"]
    for name in ("retrieve_locations", "store_location"):
        given = getattr(lm_config, name, None) or ours
        if set(ours).isdisjoint([given] if isinstance(given, str) else given):
            yield f"{name} is {given}, not vcache's own tier: add {ours[0]}, or remove {name}"
    vllm, model = instance.vllm_config, instance.model
    yield from model_spec.misfits(vllm, model)
    if vllm.weight_transfer_config is not None:
        yield f"LMCache does not hear of new weights: drop --weight-transfer-config, or {_OURS}"
    if vllm.scheduler_config.policy == "priority":
        yield (
            "vLLM may cancel a request's step, and its prefix cache then names blocks that were "
            f"never written: start it without --scheduling-policy priority, or {_OURS}"
        )
    if instance.several:
        yield f"the model has several block tables, or one of a sliding window: {_OURS}"
    if model.use_mla and model.tp_size > 1 and extra.get("save_only_first_rank", True):
        yield "every rank reads MLA chunks itself: set save_only_first_rank: false in extra_config"
