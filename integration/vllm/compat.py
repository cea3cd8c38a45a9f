"""Where vLLM's releases 0.26 to 0.33 differ, as far as the connector looks at them. Everything else uses what all of them have."""

from __future__ import annotations

from typing import Any

from vllm.v1 import kv_cache_interface
from vllm.v1.core import kv_cache_utils

from vcache_backend import config

from . import model_spec


def hash_root() -> bytes:
    """What vLLM's block hashes start from; known once the engine runs."""
    return bytes(kv_cache_utils.NONE_HASH)


def hash_seed(vllm_config: Any) -> str | None:
    """The seed of `hash_root`, None if another process would have another one. From 0.31 on some algorithms have a fixed seed."""
    resolve = getattr(kv_cache_utils, "resolve_none_hash_seed", None)
    if resolve is None:
        return config.hash_seed()
    from vllm.utils.hashing import get_hash_fn_by_name

    function = get_hash_fn_by_name(vllm_config.cache_config.prefix_caching_hash_algo)
    seed, again = resolve(function), resolve(function)
    return str(seed) if seed == again else None


def hash_block_size(vllm_config: Any, kv_cache_config: Any) -> int:
    """Tokens that one of a request's `block_hashes` stands for."""
    return int(kv_cache_utils.resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)[1])


def hit_source(in_host: bool) -> Any:
    """Where hits lie that vLLM counts by source, from 0.32 on, in its words; None before. The pool's word counts for the offload tier."""
    try:
        from vllm.v1.metrics.cache_hit_source import CacheHitSource
    except ImportError:
        return None
    return CacheHitSource.HOST if in_host else CacheHitSource.P2P


def publishes_events(vllm_config: Any) -> bool:
    """Whether anybody wants to know which blocks are where."""
    return bool(getattr(vllm_config.kv_events_config, "enable_kv_cache_events", False))


def spec_kind(kv_cache_config: Any) -> str | None:
    """What kind of layers the first group's are, as newer vLLM's KV events say: without it Dynamo takes no event of a group of
    which it has heard nothing yet. None in others."""
    find = getattr(kv_cache_interface, "get_kv_cache_spec_kind", None)
    return str(find(kv_cache_config.kv_cache_groups[0].kv_cache_spec).value) if find and kv_cache_config.kv_cache_groups else None


def refusal(vllm_config: Any, kv_cache_config: Any, model: model_spec.ModelSpec, chunk_size: int) -> str | None:
    """Why nothing of this instance may be cached, None if it may. All of its processes find the same."""
    groups = kv_cache_config.kv_cache_groups
    reason = model_spec.refusal(model, chunk_size, len(groups), hash_seed(vllm_config))
    kinds = {type(group.kv_cache_spec).__name__ for group in groups}
    if reason is None and not kinds <= _WHOLE_PREFIX:
        # Blocks of layers that look at a window only, or keep a state, are given back while their request runs.
        return f"the KV cache is {', '.join(sorted(kinds))}, whose blocks do not hold the whole prefix"
    return reason


_WHOLE_PREFIX = {"FullAttentionSpec", "MLAAttentionSpec"}
