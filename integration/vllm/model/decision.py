"""Decides whether an instance of vLLM caches, and whether it shares in place or through a pool."""

from __future__ import annotations

import logging
import platform
from collections.abc import Iterator
from typing import Any, NamedTuple

import vllm
from vllm.distributed.aux_output_connector.connector import AuxOutputSchedulerConnector
from vllm.distributed.kv_transfer.kv_connector.v1 import base

from vcache_backend import config
from vcache_backend.config import Config
from vcache_backend.errors import LayoutError
from vcache_backend.supported import VLLM
from vcache_backend.vram_pool.generations import MACHINE

from . import compat, groups
from . import spec as model_spec
from .spec import ModelSpec

log = logging.getLogger("vllm.vcache")


class Decision(NamedTuple):
    """How an instance caches. settings: with `connector.share` decided. refused: a line that says
    why the instance caches nothing, and what to change; empty if it caches."""

    model: ModelSpec
    settings: Config
    refused: str


def decide(vllm_config: Any, kv_cache_config: Any, settings: Config) -> Decision:
    """Decide for this instance. All processes of the instance get the same answer."""
    model = compat.read_model(vllm_config, kv_cache_config, settings.connector)
    hindrance = hinders(vllm_config, kv_cache_config)
    if settings.connector.share == "auto":
        if hindrance:
            log.info("vcache: KV goes through a pool (connector.share: auto): %s", hindrance)
        settings = config.sharing(settings, "pool" if hindrance else "in_place")
    refused = next(_refusals(vllm_config, kv_cache_config, model, settings), "")
    if hindrance and settings.connector.share == "in_place" and not refused:
        also = ":" if groups.several(kv_cache_config) else "; or"
        refused = f"{hindrance}{also} set {groups.POOL}"
    return Decision(model, settings, refused)


def hinders(vllm_config: Any, kv_cache_config: Any) -> str:
    """Say why this instance's KV cache cannot be shared in place; empty if it can. Names a setting
    besides `connector.share` to change, if one helps."""
    if groups.several(kv_cache_config):
        return (
            "a model with several block tables, or with one of a sliding window, is shared "
            "through a pool only"
        )
    if platform.machine() != MACHINE:
        return (
            "it relies on the order in which x86-64 makes writes visible, and this machine "
            f"is {platform.machine()}"
        )
    if not vllm_config.cache_config.enable_prefix_caching:
        return (
            "without prefix caching vLLM's KV cache keeps nothing to share: take out "
            "--no-enable-prefix-caching"
        )
    given = vllm_config.model_config
    if given.enable_sleep_mode or given.enable_cumem_allocator:
        # Our allocator would replace sleep mode's for the KV cache.
        return (
            "sleep mode frees nothing of a KV cache that others can map: start vLLM without "
            "--enable-sleep-mode"
        )
    if vllm_config.device_config.device_type == "cuda" and config.expandable_segments():
        return (
            "expandable_segments does not work with the allocator of a shared KV cache "
            "(pytorch issue 147851): take it out of PYTORCH_ALLOC_CONF and PYTORCH_CUDA_ALLOC_CONF"
        )
    return ""


def _refusals(
    vllm_config: Any, kv_cache_config: Any, model: ModelSpec, settings: Config
) -> Iterator[str]:
    """List the reasons why this instance must not cache, each with the change to make."""
    if not VLLM.supports(vllm.__version__):
        yield f"vLLM {vllm.__version__} is not supported: install {VLLM.name}{VLLM.wanted}"
    if reason := model_spec.refusal(vllm_config, model, compat.hash_seed(vllm_config)):
        yield reason
    given = vllm_config.model_config
    if given.enable_sleep_mode and not hasattr(base.KVConnectorBase_V1, "unregister_kv_caches"):
        yield (
            "vLLM before 0.33 frees the KV cache for its sleep while copies may still run: "
            "start vLLM without --enable-sleep-mode, or use vLLM 0.33"
        )
    backend = given.sleep_mode_backend
    if given.enable_sleep_mode and backend != "cumem":
        yield f"sleep mode's backend {backend} is not known: set --sleep-mode-backend cumem"
    try:
        groups.read(kv_cache_config, settings.engine.chunk_size)
    except LayoutError as error:
        yield str(error)
    size, longest = settings.engine.chunk_size, given.max_model_len
    if size > longest:
        few = f"no request has more than {longest} tokens (max_model_len)"
        yield f"engine.chunk_size is {size}, and {few}: set it to a fraction of that"
    if not given.is_prefix_caching_supported:
        yield (
            "the model's pooling needs every token of a prompt computed: set a pooling type of the "
            "last token in --pooler-config, if the model allows that"
        )
    caps = hasattr(AuxOutputSchedulerConnector, "cap_external_hit")
    if vllm_config.aux_output_config.enabled and not caps:
        yield (
            "vLLM before 0.33 ends on a hit if it has to return the routed experts: "
            "start it without --enable-return-routed-experts, or use vLLM 0.33"
        )
