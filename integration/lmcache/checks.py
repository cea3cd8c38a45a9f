"""Checks that must pass before the plugin works. Each returns None, or a sentence with the fault
and the change to make.

Imports neither LMCache nor vLLM."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

from vcache_backend.supported import LMCACHE

from ..vllm.model import spec as model_spec
from .instance import Instance
from .patches import WANTED, our_names


def version() -> str | None:
    """Say why the plugin does not work with this version of LMCache, or None."""
    _, installed = LMCACHE.installed()
    if LMCACHE.supports(installed):
        return None
    wrong = f"{installed} is not one that vcache works with" if installed else "is not installed"
    return f"LMCache {wrong}: pip install '{WANTED}'"


def refusal(lm_config: Any, instance: Instance) -> str | None:
    """Name the first setting of LMCache or the instance with which the plugin does not work, and
    the change to make. None if all settings fit."""
    return next(chain(_unsupported(lm_config), _instance_reasons(lm_config, instance)), None)


_REPLACED = {
    "use_layerwise": "vcache moves all layers of a chunk in one launch: set use_layerwise: false",
    "enable_blending": (
        "vcache shares prefixes, which blended chunks are not: set enable_blending: false"
    ),
    "enable_pd": "prefill-decode transfer has an allocator of its own: set enable_pd: false",
    "enable_p2p": (
        "LMCache's peer-to-peer tier needs its host allocator: set enable_p2p: false; "
        "vcache shares within the node"
    ),
    "enable_async_loading": (
        "vcache leases chunks in the look-up, which takes no time: set enable_async_loading: false"
    ),
    "external_lookup_client": "look-ups would not ask vcache: remove external_lookup_client",
    "enable_scheduler_bypass_lookup": (
        "vcache answers look-ups in the workers: set enable_scheduler_bypass_lookup: false"
    ),
}


def _unsupported(lm_config: Any) -> Iterator[str]:
    yield from (reason for name, reason in _REPLACED.items() if getattr(lm_config, name, None))
    if (getattr(lm_config, "extra_config", None) or {}).get("audit_backend_enabled"):
        yield (
            "the audit wraps every backend, and an allocator cannot be wrapped: remove "
            "audit_backend_enabled from extra_config"
        )
    wanted = getattr(lm_config, "retrieve_locations", None)
    ours = our_names(lm_config) or ["vcache"]
    if wanted and not set(wanted) & set(ours):
        yield f"retrieve_locations {wanted} leaves vcache out: add {ours[0]} to it, or remove it"
    location = getattr(lm_config, "store_location", None)
    if location and location not in ours:
        yield (
            f"store_location is {location}, and vcache fills no other tier than its own: "
            f"set store_location: {ours[0]}"
        )


def _instance_reasons(lm_config: Any, instance: Instance) -> Iterator[str]:
    yield from model_spec.misfits(instance.vllm_config, instance.model)
    if instance.vllm_config.weight_transfer_config is not None:
        yield (
            "--weight-transfer-config brings new weights, and LMCache does not hear of them: "
            "start vLLM without it, or with "
            '"kv_connector":"VCacheConnector"'
        )
    if instance.vllm_config.scheduler_config.policy == "priority":
        yield (
            "vLLM may cancel a request's step, and its prefix cache then names blocks that were "
            "never written: start it without --scheduling-policy priority, or with "
            '"kv_connector":"VCacheConnector"'
        )
    if instance.several:
        yield (
            "the model has several block tables, or one of a sliding window, and LMCache would "
            'store blocks that vLLM has freed: start vLLM with "kv_connector":"VCacheConnector"'
        )
    extra = getattr(lm_config, "extra_config", None) or {}
    mla_ranks = instance.model.use_mla and instance.model.tp_size > 1
    if mla_ranks and extra.get("save_only_first_rank", True):
        yield (
            "LMCache's first rank would read MLA chunks and broadcast them: set "
            "save_only_first_rank: false in extra_config, and every "
            "rank reads the pool itself; chunks are stored once all the same"
        )


def remarks(lm_config: Any, instance: Instance) -> Iterator[str]:
    """Warn of settings with which the plugin may work in an unexpected way."""
    if getattr(lm_config, "save_unfull_chunk", False):
        yield ("vcache keeps whole chunks only: set save_unfull_chunk: false")
    if (host := getattr(lm_config, "max_local_cpu_size", 0)) > 0:
        yield (
            f"LMCache takes {host:g} GiB of host memory, which nothing uses: set local_cpu: "
            "false and max_local_cpu_size: 0"
        )
    if getattr(lm_config, "pre_caching_hash_algorithm", "builtin") == "builtin":
        yield ("Python's hash can be made to collide: set pre_caching_hash_algorithm: sha256")
    if instance.vllm_config.kv_transfer_config.kv_load_failure_policy == "fail":
        yield (
            "kv_load_failure_policy is fail, so that a chunk lost between look-up and load "
            "fails its request: "
            'put "kv_load_failure_policy":"recompute" into --kv-transfer-config'
        )
