"""Whether a vLLM that vcache was not tested with looks as vcache knows it: what we replace or call,
what calls us, and what the hooks rest on. Takes a second, for the sources."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import vllm

from .blocks import KVBlocks
from .sources import differences

_BASE = "distributed.kv_transfer.kv_connector.v1.base"
KNOWN = f"""
{_BASE}:KVConnectorBase_V1
  __init__(vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig)
  requires_kv_delivery -> bool
  bind_connector_metadata(connector_metadata: KVConnectorMetadata) -> None
  bind_gpu_block_pool(gpu_block_pool: BlockPool) -> None
  build_connector_meta(scheduler_output: SchedulerOutput) -> KVConnectorMetadata
  build_connector_worker_meta() -> KVConnectorWorkerMetadata | None
  build_kv_connector_stats(data: dict[str, Any] | None = None) -> KVConnectorStats | None
  build_prom_metrics(vllm_config: VllmConfig, metric_types: dict[type[PromMetric],
    type[PromMetricT]], labelnames: list[str], per_engine_labelvalues: dict[int, list[object]])
    -> KVConnectorPromMetrics | None
  get_block_ids_with_load_errors() -> set[int]
  get_external_cache_hit_sources(request: Request, num_external_tokens: int)
    -> dict[CacheHitSource, int]
  get_handshake_metadata() -> KVConnectorHandshakeMetadata | None
  get_kv_connector_stats() -> KVConnectorStats | None
  get_mem_pool_context() -> AbstractContextManager | None
  get_num_new_matched_tokens(request: Request, num_computed_tokens: int) -> tuple[int | None, bool]
  get_transfer_results(finished_req_ids: set[str]) -> KVConnectorTransferResults
  has_connector_metadata() -> bool
  on_new_request(request: Request) -> None
  register_kv_caches(kv_caches: dict[str, Tensor])
  request_finished(request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]
  reset_cache() -> bool | None
  ?restore_kv_caches() -> None
  save_kv_layer(layer_name: str, kv_layer: Tensor, attn_metadata: AttentionMetadata,
    **kwargs: Any) -> None
  set_xfer_handshake_metadata(metadata: dict[int, KVConnectorHandshakeMetadata]) -> None
  set_xfer_handshake_metadata_pp_aware(metadata: dict[tuple[int, int],
    KVConnectorHandshakeMetadata]) -> None
  shutdown()
  start_load_kv(forward_context: ForwardContext, **kwargs: Any) -> None
  take_events() -> Iterable[KVCacheEvent]
  ?unregister_kv_caches() -> None
  update_connector_output(connector_output: KVConnectorOutput)
  update_state_after_alloc(request: Request, blocks: KVCacheBlocks, num_external_tokens: int)
  wait_for_layer_load(layer_name: str) -> None
  wait_for_save()
{_BASE}:SupportsHMA
  request_finished_all_groups(request: Request, block_ids: tuple[list[int], ...])
    -> tuple[bool, dict[str, Any] | None]
{_BASE}:KVConnectorWorkerMetadata
  aggregate(other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata
{_BASE}:KVConnectorTransferResults
  finished_recving: set[str]
  failed_recving: set[str]
distributed.kv_transfer.kv_connector.v1.metrics:KVConnectorStats
  aggregate(other: KVConnectorStats) -> KVConnectorStats
  is_empty() -> bool
  reduce() -> dict[str, int | float]
  reset()
distributed.kv_transfer.kv_connector.v1.metrics:KVConnectorPromMetrics
  observe(transfer_stats_data: dict[str, Any], engine_idx: int = 0)
distributed.kv_transfer:
  get_kv_transfer_group() -> KVConnectorBase_V1
  has_kv_transfer_group() -> bool
v1.core.block_pool:BlockPool
  get_new_blocks(num_blocks: int) -> list[KVCacheBlock]
  cache_full_blocks(request: Request, blocks: list[KVCacheBlock], num_cached_blocks: int,
    num_full_blocks: int, block_size: int, kv_cache_group_id: int,
    block_mask: list[bool] | None = None) -> None
  cache_partial_block(request: Request, block: KVCacheBlock, num_tokens: int,
    kv_cache_group_id: int, block_size: int, replace_existing_hashes: bool = False)
    -> BlockHashWithGroupId | None
  evict_blocks(block_ids: set[int]) -> None
  reset_prefix_cache() -> bool
  get_num_free_blocks() -> int
  get_cached_block(block_hash: BlockHash, kv_cache_group_ids: list[int])
    -> list[KVCacheBlock] | None
v1.core.kv_cache_manager:KVCacheBlocks
  get_block_ids(allow_none: bool = False, *, group_ids: Sequence[int] | None = None)
    -> tuple[list[int], ...] | None
v1.engine.core:EngineCore
  set_weight_version(weight_version: str) -> None
  collective_rpc(method: str | Callable[..., _R], timeout: float | None = None, args: tuple = (),
    kwargs: dict[str, Any] | None = None) -> list[_R]
  add_lora(lora_request: LoRARequest) -> bool
v1.core.kv_cache_utils:
  resolve_none_hash_seed(hash_fn: Callable[[Any], bytes]) -> str
  resolve_kv_cache_block_sizes(kv_cache_config: KVCacheConfig, vllm_config: VllmConfig)
    -> tuple[int, int]
  generate_scheduler_kv_cache_config(kv_cache_configs: list[KVCacheConfig]) -> KVCacheConfig
  generate_block_hash_extra_keys(request: Request, start_token_idx: int, end_token_idx: int,
    start_mm_idx: int) -> tuple[tuple[Any, ...] | None, int]
  maybe_convert_block_hash(hash_bytes: BlockHash) -> bytes | int
  _gen_lora_extra_hash_keys(request: Request) -> list[tuple[str, str, str]]
utils.hashing:
  get_hash_fn_by_name(hash_fn_name: str) -> Callable[[Any], bytes]
v1.core.sched.output:SchedulerOutput
  scheduled_new_reqs: list[NewRequestData]
  scheduled_cached_reqs: CachedRequestData
  num_scheduled_tokens: dict[str, int]
  total_num_scheduled_tokens: int
  preempted_req_ids: set[str] | None
  kv_cache_block_copies: list[object] | None
  kv_connector_block_state: KVConnectorBlockState | None
v1.core.sched.output:NewRequestData
  req_id: str
  block_ids: tuple[list[int], ...]
  num_computed_tokens: int
v1.core.sched.output:CachedRequestData
  req_ids: list[str]
  resumed_req_ids: set[str]
  new_block_ids: list[tuple[list[int], ...] | None]
  num_computed_tokens: list[int]
v1.outputs:KVConnectorOutput
  finished_recving: set[str] | None
  kv_connector_worker_meta: object | None
  invalid_block_ids: set[int]
v1.kv_cache_interface:KVCacheConfig
  num_blocks: int
  kv_cache_groups: list[KVCacheGroupSpec]
v1.kv_cache_interface:KVCacheGroupSpec
  layer_names: list[str]
  kv_cache_spec: KVCacheSpec
  enable_kv_transfer: bool
  host_resident: bool
"""
"""Functions and attributes, by module and class of vLLM, without `self`. `?`: it may be absent."""
REQUEST = (
    "all_token_ids lora_request kv_transfer_params sampling_params trace_headers resumable "
    "skip_reading_prefix_cache shared_prefix_boundary session_id"
)
"""Attributes of vLLM's requests, beside those that `_unlike` reads."""
NAMED_BY = {
    "popleft_n": "get_new_blocks",
    "free_block_queue": (
        "__init__ free_blocks get_new_blocks get_num_free_blocks touch unpin_blocks"
    ),
    "_insert_block_hash": "cache_full_blocks cache_partial_block move_block_hashes",
    "reset_hash": "_remove_cached_block_hashes reset_prefix_cache",
    "_remove_cached_block_hashes": (
        "_maybe_evict_cached_block cache_full_blocks cache_partial_block move_block_hashes"
    ),
    "_maybe_evict_cached_block": "evict_blocks get_new_blocks _cache_partial_tail_block",
}
"""By function or attribute of vLLM's block pool, those of `vllm.v1.core` that may name it: blocks
are handed out, and get and lose their hashes, where `KVBlocks` sees it, and nowhere else."""


def fault(connector: type[Any]) -> str:
    """In one line, where the installed vLLM has another shape than vcache knows; empty: nowhere.
    connector: our class. Never raises."""
    try:
        for faults in (_unknown(), _abstract(connector), _elsewhere(), _unlike(), _sources()):
            for one in faults:
                return one
    except Exception as error:  # noqa: BLE001 - a vLLM that cannot be looked at is not known
        return f"it cannot be looked at: {type(error).__name__}: {error}"
    return ""


def _unknown() -> Iterator[str]:
    """What of `KNOWN` is another one."""
    owner: Any = None
    for line in re.sub(r"\n    +", " ", KNOWN).strip().splitlines():
        if not line.startswith(" "):
            module, _, kind = line.partition(":")
            owner = importlib.import_module(f"vllm.{module}")
            owner = getattr(owner, kind) if kind else owner
            continue
        may, name, shape = re.findall(r" +(\??)(\w+):? ?(.*)", line)[0]
        seen = _shape(owner, name)
        if seen is None:
            yield from () if may else (f"{owner.__name__} has no {name}",)
        elif _plain(seen) != _plain(shape):
            yield f"{owner.__name__}.{name} is {seen or 'another one'}, not {shape}"


def _shape(owner: Any, name: str) -> str | None:
    """A function's signature without `self`, or the type of an attribute. None: it is not there."""
    found = inspect.getattr_static(owner, name, None)
    if isinstance(found, property) and found.fget is not None:
        return _text(inspect.signature(found.fget)).partition(")")[2]
    found = getattr(found, "__func__", found)
    if isinstance(found, FunctionType):
        return _text(inspect.signature(found))
    for kind in getattr(owner, "__mro__", ()):
        if name in (annotations := vars(kind).get("__annotations__", {})):
            return _text(annotations[name])
    return None


def _text(shape: Any) -> str:
    text = inspect.formatannotation(shape) if isinstance(shape, type) else str(shape)
    return re.sub(r"^\((self|cls)(: \w+)?(, )?", "(", re.sub(r"[\w.]+\.(\w+)|['\"~]", r"\1", text))


def _plain(shape: str) -> str:
    """Equal for equal shapes, however they are written."""
    return re.sub(r"Optional\[(\w+)\]", r"\1|None", shape).replace(" ", "")


def _abstract(connector: type[Any]) -> Iterator[str]:
    """What vLLM's base classes want of a connector beside what ours has."""
    for name in sorted(getattr(connector, "__abstractmethods__", ())):
        yield f"connectors need a {name}, which vcache does not have"


# ---- what the hooks rest on


def _elsewhere() -> Iterator[str]:
    """Who names what only others may: see `NAMED_BY`."""
    for module in [one for name, one in sys.modules.items() if name.startswith("vllm.v1.core.")]:
        # `type`: a look into a module that is loaded lazily would import it.
        kinds = [one for one in vars(module).values() if issubclass(type(one), type)]
        for owner in (module, *kinds):
            for name, function in list(vars(owner).items()):
                if type(function) in (classmethod, staticmethod):
                    function = function.__func__
                if type(function) is FunctionType and function.__module__ == module.__name__:
                    for what in NAMED_BY.keys() & _names(function.__code__):
                        if name not in NAMED_BY[what].split():
                            where = f"{module.__name__}: {name}"
                            yield f"{where} uses {what}, which vcache does not see"


def _names(code: CodeType) -> set[str]:
    inner = [_names(one) for one in code.co_consts if isinstance(one, CodeType)]
    return set(code.co_names).union(*inner)


def _unlike() -> Iterator[str]:
    """How a small block pool of vLLM behaves otherwise than `KVBlocks` takes it to."""
    from vllm.sampling_params import SamplingParams
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.request import Request

    heard, failures = list[Any](), list[str]()
    blocks = KVBlocks(BlockPool(8, True, 4), lambda reason, _: failures.append(reason))
    pool = blocks.pool
    blocks.on_taken.append(lambda taken: heard.append([one.block_id for one in taken]))
    blocks.on_cached.append(lambda *said: heard.append((*said[1:3], said[3][0].block_id)))
    blocks.before_evicted.append(lambda gone: heard.append({*gone}))
    blocks.before_reset.append(lambda: heard.append("reset"))
    blocks.on_emptied.append(lambda: heard.append("emptied"))
    request = Request("vcache", [1] * 9, SamplingParams(max_tokens=1), None)
    request.block_hashes = [b"a" * 32, b"b" * 32]
    sizes = request.num_tokens, request.num_prompt_tokens, request.num_computed_tokens
    taken = pool.get_new_blocks(3)
    pool.cache_full_blocks(request, taken, 0, 2, 4, 0)
    lacking = [name for name in REQUEST.split() if not hasattr(request, name)]
    seen: list[Any] = [lacking, isinstance(taken, list), blocks.cached(request.block_hashes[1])]
    seen += [sizes, blocks.held, blocks.free, blocks.head(2), blocks.vacant(9)]
    pool.free_blocks(reversed(taken))
    seen += [blocks.head(9), blocks.together(5, 7, 3), blocks.vacant(9)]
    blocks.move(6, 7, None)
    seen += [blocks.head(3), [one.block_id for one in pool.get_new_blocks(2)]]
    blocks.evict({2})
    seen += [blocks.cached(request.block_hashes[1]), blocks.cached(request.block_hashes[0])]
    pool.free_blocks([pool.blocks[number] for number in (6, 7)])
    seen += [pool.reset_prefix_cache(), blocks.cached(request.block_hashes[0]), failures]
    due = [[], True, True, (9, 9, 0), {1, 2, 3}, 4, [4, 5], 4]
    due += [[3, 4, 5, 6, 7, 2, 1], True, 5, [6, 7, 3], [6, 7], False, True, True, False, []]
    told = [[1, 2, 3], (0, 0, 1), [6, 7], {2}, "reset", "emptied"]
    if (seen, heard) != (due, told):
        yield f"BlockPool behaves in another way: {seen}, {heard}"


def _sources() -> Iterable[str]:
    return differences(Path(str(vllm.__file__)).parent)
