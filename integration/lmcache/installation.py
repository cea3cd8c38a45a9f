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


def hash_once(engine: Any) -> None:
    """`engine.retrieve` hashes the prompt again that was hashed to look it up: 4.5 ms for 32k tokens with sha256_cbor. The look-up's
    keys are still at hand then, under the request's id. To be called after `wrap_retrieve`, and idempotent like it."""
    database = engine.token_database
    process = getattr(database.process_tokens, "of_lmcache", database.process_tokens)
    theirs, size = engine.retrieve, database.chunk_size
    known: list[Any] = []

    def process_tokens(
        tokens: Any = None, hashes: Any = None, offsets: Any = None, mask: Any = None, *args: Any, **more: Any
    ) -> Any:
        # The look-up thread comes with hashes; tokens come from the worker's main thread alone, as does `retrieve`.
        if tokens is None or len(known) * size < len(tokens) - len(tokens) % size or not known:
            return process(tokens, hashes, offsets, mask, *args, **more)
        first = 0 if mask is None else mask.numel() - int(mask.sum())
        if first % size:
            return process(tokens, hashes, offsets, mask, *args, **more)
        chunks = range(first // size, len(tokens) // size)
        return [(chunk * size, (chunk + 1) * size, known[chunk]) for chunk in chunks]

    def retrieve(tokens: Any, mask: Any = None, **kwargs: Any) -> torch.Tensor:
        pins = engine.lookup_pins.get(kwargs.get("req_id"))
        # From one tier alone, and so from the first chunk on.
        known[:] = next(iter(pins.values())) if pins is not None and len(pins) == 1 else []
        try:
            retrieved: torch.Tensor = theirs(tokens, mask, **kwargs)
            return retrieved
        finally:
            known.clear()

    process_tokens.of_lmcache = process  # type: ignore[attr-defined]
    retrieve.of_lmcache = theirs.of_lmcache  # type: ignore[attr-defined]
    database.process_tokens, engine.retrieve = process_tokens, retrieve


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
