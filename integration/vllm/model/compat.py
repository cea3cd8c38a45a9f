"""Asks vLLM, and hides the differences between the three releases that vcache was tested with."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from typing import Any

from vllm.distributed.aux_output_connector.connector import AuxOutputSchedulerConnector
from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1 import kv_cache_interface
from vllm.v1.core import kv_cache_utils

from . import groups

# ---- what differs


def tells_of_sleep() -> bool:
    """Whether vLLM tells the connector before it takes the KV cache's memory away, and its
    OffloadingConnector waits for its stores before another connector fills their blocks: from 0.33
    on."""
    return hasattr(base.KVConnectorBase_V1, "unregister_kv_caches")


def caps_hits_of_experts() -> bool:
    """Whether vLLM takes a hit for none if it has to return the experts of each token: from 0.33
    on."""
    return hasattr(AuxOutputSchedulerConnector, "cap_external_hit")


def hit_source_of_peers() -> Any:
    """The source in `vllm:prompt_tokens_cached_by_source` of tokens from another instance's KV
    cache. None before vLLM 0.32, which does not ask."""
    try:
        from vllm.v1.metrics.cache_hit_source import CacheHitSource
    except ImportError:
        return None
    return CacheHitSource.P2P


# ---- what vLLM decides


def hash_root(vllm_config: Any) -> bytes:
    """The start value of vLLM's block hashes, in every process with `hash_seed`."""
    function = get_hash_fn_by_name(vllm_config.cache_config.prefix_caching_hash_algo)
    return bytes(function(kv_cache_utils.resolve_none_hash_seed(function)))


def hash_seed(vllm_config: Any) -> str | None:
    """The seed of `hash_root`; None if each process would get another seed, because neither the
    algorithm nor the user fixes the seed."""
    function = get_hash_fn_by_name(vllm_config.cache_config.prefix_caching_hash_algo)
    seed, again = (kv_cache_utils.resolve_none_hash_seed(function) for _ in range(2))
    return str(seed) if seed == again else None


def hash_block_size(vllm_config: Any, kv_cache_config: Any) -> int:
    """The tokens of a hash in a request's `block_hashes`."""
    return int(kv_cache_utils.resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)[1])


def loads_at_once(vllm_config: Any, kv_cache_config: Any) -> bool:
    """Whether a load may begin during the steps under way, since none of them can use its blocks.

    vLLM 0.31 and later hold back the blocks of an ended request until no step under way can write
    to them (`Scheduler.defer_block_free`). But a draft model's last kernels may still run then, a
    step may zero blocks, and blocks that a window has passed are handed out at once, though a step
    under way may still read them."""
    plain = not groups.several(kv_cache_config) and not clears(kv_cache_config)
    return plain and vllm_config.speculative_config is None


def publishes_events(vllm_config: Any) -> bool:
    """Whether vLLM publishes KV events."""
    return bool(getattr(vllm_config.kv_events_config, "enable_kv_cache_events", False))


def clears(kv_cache_config: Any) -> bool:
    """Whether vLLM clears the blocks that it hands out: for states, and for tables with numbers of
    several types. vLLM's scheduler decides by the first layer of each table."""
    seen = kv_cache_utils.generate_scheduler_kv_cache_config([kv_cache_config])
    return bool(seen.needs_kv_cache_zeroing)


def spec_kind(kv_cache_config: Any) -> str | None:
    """vLLM's name, in KV events, for the KV cache of the first group that attends to all tokens, or
    of the first group. None for a model without KV.

    Dynamo ignores events of an unknown group without a kind."""
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    specs = [spec for spec in specs if groups.kind(spec)[0] == "full"] or specs
    return str(kv_cache_interface.get_kv_cache_spec_kind(specs[0]).value) if specs else None


def transfer_results(
    recving: AbstractSet[str] = frozenset(), failed: AbstractSet[str] = frozenset()
) -> Any:
    """Make vLLM's object for finished loads. recving, failed: requests; failed requests need not be
    in `recving`."""
    return base.KVConnectorTransferResults(
        finished_recving={*recving, *failed}, failed_recving={*failed}
    )
