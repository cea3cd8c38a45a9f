"""The differences between vLLM's releases 0.26 to 0.33 that matter to the connector. Other modules
use what all releases have.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import vllm
from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.v1 import kv_cache_interface
from vllm.v1.core import kv_cache_utils

from vcache_backend import config
from vcache_backend.errors import ConfigError, LayoutError

from . import groups, model_spec


def hash_root() -> bytes:
    """The value that vLLM's block hashes start from. Known once the engine runs."""
    return bytes(kv_cache_utils.NONE_HASH)


def hash_seed(vllm_config: Any) -> str | None:
    """The seed of `hash_root`; None if another process would have another one. From 0.31 on some
    algorithms have a fixed seed.
    """
    resolve = getattr(kv_cache_utils, "resolve_none_hash_seed", None)
    if resolve is None:
        return config.hash_seed()
    from vllm.utils.hashing import get_hash_fn_by_name

    function = get_hash_fn_by_name(vllm_config.cache_config.prefix_caching_hash_algo)
    seed, again = resolve(function), resolve(function)
    return str(seed) if seed == again else None


def hash_block_size(vllm_config: Any, kv_cache_config: Any) -> int:
    """Tokens that one of a request's `block_hashes` covers."""
    return int(kv_cache_utils.resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)[1])


def hit_sources(tokens: Mapping[str, int], external: int) -> dict[Any, int]:
    """`tokens` of a hit, by where they lay, under the names of vLLM 0.32 and later. The rest of the
    `external` tokens is "unspecified".
    """
    from vllm.v1.metrics.cache_hit_source import CacheHitSource

    named = {CacheHitSource(name): count for name, count in tokens.items() if count}
    rest = external - sum(named.values())
    return named | ({CacheHitSource.EXTERNAL_UNSPECIFIED: rest} if rest else {})


def publishes_events(vllm_config: Any) -> bool:
    """Whether vLLM publishes KV events."""
    return bool(getattr(vllm_config.kv_events_config, "enable_kv_cache_events", False))


def spec_kind(kv_cache_config: Any) -> str | None:
    """The kind of the first group whose layers attend to all tokens (or of the first group), as
    newer vLLMs' KV events name it.

    Without it Dynamo ignores events of a group that it does not know yet. None in older vLLMs.
    """
    find = getattr(kv_cache_interface, "get_kv_cache_spec_kind", None)
    found = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    found = [spec for spec in found if groups.is_full(type(spec).__name__)] or found
    return str(find(found[0]).value) if find and found else None


def refusal(
    vllm_config: Any, kv_cache_config: Any, model: model_spec.ModelSpec, settings: config.Config
) -> str | None:
    """Why this instance must not cache, in one line with what to change; None if it may. All of its
    processes find the same.
    """
    size = settings.engine.chunk_size
    reason = model_spec.refusal(model, size, hash_seed(vllm_config))
    if model.sleep_mode:
        reason = reason or _sleep_refusal(vllm_config.model_config)
    try:
        if groups.read(kv_cache_config, size).states and not fails_by_request():
            reason = (
                reason
                or "layers that keep a state need asynchronous loads that may fail: take vLLM 0.30 or a later one"
            )
    except LayoutError as error:
        return reason or str(error)
    return reason


def _sleep_refusal(model_config: Any) -> str | None:
    """Why an instance with sleep mode must not cache, in one line with what to change; None if it
    may.
    """
    if not hasattr(base.KVConnectorBase_V1, "unregister_kv_caches"):
        return (
            "vLLM before 0.33 frees the KV cache for its sleep while copies may still run: start vLLM without --enable-sleep-mode, "
            "or take vLLM 0.33"
        )
    backend = str(getattr(model_config, "sleep_mode_backend", "cumem"))
    return (
        None
        if backend == "cumem"
        else f"sleep mode's backend {backend} is not known: set --sleep-mode-backend cumem"
    )


def check_states(vllm_config: Any, kv_cache_config: Any) -> None:
    """ConfigError if vLLM 0.26 would give wrong tokens with any connector, as it does for several
    groups of which some keep states.

    It takes the longest prefix that its own cache has of one group for what it has of all (its
    scheduler.py, `max(per_group_hits)`)."""
    old = tuple(int(number) for number in vllm.__version__.split(".")[:2] if number.isdigit()) == (
        0,
        26,
    )
    if (
        old
        and groups.keep_states(kv_cache_config)
        and len(kv_cache_config.kv_cache_groups) > 1
        and vllm_config.cache_config.enable_prefix_caching
    ):
        raise ConfigError(
            "vLLM 0.26 with any connector gives wrong tokens for models that keep states (Mamba, gated delta nets), where its own "
            "prefix cache is on: start it without --kv-transfer-config, or with --no-enable-prefix-caching, or take vLLM 0.27"
        )


def read_model(vllm_config: Any, kv_cache_config: Any, name: str) -> model_spec.ModelSpec:
    """`model_spec.read_model`, adapted to models with several groups."""
    model = model_spec.read_model(vllm_config, name)
    if not groups.several(kv_cache_config):
        return model
    try:
        found = groups.read(kv_cache_config, 0)
    except LayoutError:
        return model
    # MLA's ranks hold equal latents, but each has states of its own.
    mla = model.use_mla and not found.states
    return msgspec.structs.replace(model, use_mla=mla, extra=model.extra | {"groups": found.text})


def fails_by_request() -> bool:
    """Whether vLLM takes failed asynchronous loads by request, and so can recompute them with
    several groups: from 0.30 on.
    """
    return _results is not None


def transfer_results(
    recving: set[str] | frozenset[str] = frozenset(),
    failed: set[str] | frozenset[str] = frozenset(),
) -> Any:
    """vLLM's (0.30 and later) object for loads that are over. recving, failed: requests; failed
    ones need not be in `recving`.
    """
    return _results(finished_recving={*recving, *failed}, failed_recving={*failed})


_results: Any = getattr(base, "KVConnectorTransferResults", None)
