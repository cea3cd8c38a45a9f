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

_OURS = 'start vLLM with "kv_connector":"VCacheConnector"'
NO_TIER = f"vcache: there is no offload tier behind LMCache, and nothing is offloaded: {_OURS}"
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


def _unsupported(lm_config: Any) -> Iterator[str]:
    extra = getattr(lm_config, "extra_config", None) or {}
    set_ones = [name for name in _REPLACED if getattr(lm_config, name, None)]
    for name in set_ones + ["audit_backend_enabled"] * bool(extra.get("audit_backend_enabled")):
        yield f"{name} replaces parts of LMCache that vcache needs: remove {name}"
    ours = our_names(lm_config) or ["vcache"]
    for name in ("retrieve_locations", "store_location"):
        given = getattr(lm_config, name, None) or ours
        if set(ours).isdisjoint([given] if isinstance(given, str) else given):
            yield f"{name} is {given}, not vcache's own tier: add {ours[0]}, or remove {name}"


def _instance_reasons(lm_config: Any, instance: Instance) -> Iterator[str]:
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
    extra = getattr(lm_config, "extra_config", None) or {}
    if model.use_mla and model.tp_size > 1 and extra.get("save_only_first_rank", True):
        yield "every rank reads MLA chunks itself: set save_only_first_rank: false in extra_config"
