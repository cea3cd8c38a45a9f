"""The places in LMCache, and in its vLLM adapter, where the plugin puts itself. Each is an attribute of one instance, but for the
allocator's role, which LMCache decides before anybody can reach the instance."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import torch

from .memory import ChunkObj

log = logging.getLogger(__name__)


def take_allocator_role() -> None:
    """From now on a StorageManager that has a backend of ours allocates from it. Idempotent; others are as before."""
    from lmcache.v1.storage_backend.storage_manager import StorageManager

    theirs = StorageManager._get_allocator_backend
    if getattr(theirs, "of_vcache", False):
        return

    def _get_allocator_backend(self: Any, config: Any) -> Any:
        ours = [backend for backend in self.storage_backends.values() if getattr(backend, "is_vcache", False)]
        return ours[0] if ours else theirs(self, config)

    _get_allocator_backend.of_vcache = True  # type: ignore[attr-defined]
    StorageManager._get_allocator_backend = _get_allocator_backend


def engine_of(metadata: Any) -> Any:
    """The LMCacheEngine that is being built with this metadata; None if there is none."""
    from lmcache.v1.cache_engine import LMCacheEngineBuilder

    return next((engine for engine in LMCacheEngineBuilder._instances.values() if engine.metadata is metadata), None)


def wrap_retrieve(engine: Any, failed_from: Callable[[], int | None], retrieving: Callable[[], None]) -> None:
    """`engine.retrieve` answers False for tokens whose copy failed after LMCache had marked them. `retrieving`: called before."""
    theirs = getattr(engine.retrieve, "of_lmcache", engine.retrieve)

    def retrieve(tokens: Any, mask: Any = None, **kwargs: Any) -> torch.Tensor:
        retrieving()
        retrieved: torch.Tensor = theirs(tokens, mask, **kwargs)
        failed = failed_from()
        if failed is not None:
            with torch.inference_mode():
                retrieved[failed:] = False
        return retrieved

    retrieve.of_lmcache = theirs  # type: ignore[attr-defined]
    engine.retrieve = retrieve


def retrieve_directly(engine: Any, name: Callable[[], str], load: Callable[[list[Any], int, dict[str, Any]], int]) -> None:
    """`engine.retrieve` for prompts whose look-up found everything in our tier, as nearly all are: what LMCache does for each chunk
    (hash its tokens again, a memory object, a look into each table) takes it 2 ms for 32k tokens before the copy can begin.

    To be called after `wrap_retrieve`, and idempotent like it. name: LMCache's for our tier. load: (keys of all chunks, how many of
    them to leave out, LMCache's arguments) to how many were loaded; it does not raise.
    """
    theirs, size = engine.retrieve, engine.token_database.chunk_size

    def retrieve(tokens: Any, mask: Any = None, **kwargs: Any) -> torch.Tensor:
        request = kwargs.get("req_id")
        pins = engine.lookup_pins.get(request) if request is not None else None
        keys = pins.get(name()) if pins is not None and len(pins) == 1 else None
        first = 0 if mask is None else int(mask.numel() - mask.sum())
        usual = not (engine.async_loading or engine.save_only_first_rank or engine.remove_after_retrieve or first % size)
        if not (keys and usual and len(tokens) // size <= len(keys) and engine.is_healthy()):
            answer: torch.Tensor = theirs(tokens, mask, **kwargs)
            return answer
        started = engine.stats_monitor.on_retrieve_request(len(tokens) - first)
        chunks, skipped = len(tokens) // size, first // size
        loaded = load(keys[:chunks], skipped, kwargs) if chunks > skipped else 0
        retrieved = torch.zeros(len(tokens), dtype=torch.bool)
        retrieved[first : first + loaded * size] = True
        # LMCache's own retrievals leave tensors of that mode in its counters, to which this adds.
        with torch.inference_mode():
            engine.stats_monitor.on_retrieve_finished(started, loaded * size)
        log.info("[req_id=%s] retrieved %d of %d tokens from the pool", request, loaded * size, len(tokens) - first)
        return retrieved

    retrieve.of_lmcache = theirs.of_lmcache  # type: ignore[attr-defined]
    engine.retrieve = retrieve


def guard_hot_cache(local_cpu: Any) -> None:
    """LMCache's host tier caches what it gets from others by reference. It must not hold a slot of the pool, which will be reused."""
    theirs = local_cpu.submit_put_task
    if hasattr(theirs, "of_lmcache"):
        return

    def submit_put_task(key: Any, memory_obj: Any, *args: Any, **kwargs: Any) -> Any:
        return None if isinstance(memory_obj, ChunkObj) else theirs(key, memory_obj, *args, **kwargs)

    # The batched call makes one of these of each object.
    submit_put_task.of_lmcache = theirs  # type: ignore[attr-defined]
    local_cpu.submit_put_task = submit_put_task


def load_under_full_graphs(adapter: Any) -> None:
    """Under full CUDA graphs vLLM calls `start_load_kv` without attention metadata. LMCache then loads nothing and reports nothing,
    so that the request would be computed on whatever its blocks hold. It only asks whether the metadata is None."""
    theirs = adapter.start_load_kv
    if hasattr(theirs, "of_lmcache"):
        return

    def start_load_kv(forward_context: Any, **kwargs: Any) -> Any:
        if forward_context.attn_metadata is None:
            requests = getattr(adapter._parent._get_connector_metadata(), "requests", ())
            if any(request.load_spec is not None and request.load_spec.can_load for request in requests):
                forward_context = copy.copy(forward_context)
                forward_context.attn_metadata = {}
        return theirs(forward_context, **kwargs)

    start_load_kv.of_lmcache = theirs  # type: ignore[attr-defined]
    adapter.start_load_kv = start_load_kv


def report_blocks(adapter: Any, settle: Callable[[int], set[int]]) -> None:
    """vLLM asks at the end of a step which blocks could not be loaded. Loads were launched at its beginning; now they must be done."""
    theirs = getattr(adapter.get_block_ids_with_load_errors, "of_lmcache", adapter.get_block_ids_with_load_errors)

    def get_block_ids_with_load_errors() -> set[int]:
        blocks: set[int] = theirs()
        return blocks | settle(adapter._block_size)

    get_block_ids_with_load_errors.of_lmcache = theirs  # type: ignore[attr-defined]
    adapter.get_block_ids_with_load_errors = get_block_ids_with_load_errors


def keep_slot_mappings_on_host(adapter: Any) -> None:
    """LMCache's adapter moves every slot mapping to its `device`, which waits for the forward pass. Copies are planned on the host."""
    adapter.device = torch.device("cpu")
