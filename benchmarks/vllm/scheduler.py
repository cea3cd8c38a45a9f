"""vLLM's scheduler with one addition: a request may ask that its hit in vLLM's own prefix cache end where LMCache's would.

LMCache's hits are whole chunks (256 tokens), and of a prompt that is whole chunks it computes the last token alone. vLLM's own
hits are whole blocks (16 tokens), and of such a prompt it computes the last block. A step over 1 token and one over 16 run other
kernels and may differ in the last bit, so a comparison bit for bit needs the same shapes. `extra_args={"chunk": 256}` makes a hit
as long as LMCache's; for the last case vLLM copies the block that the hit ends in, as it does for any partial hit. Everything
else, and every request without it, is vLLM's own.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler


class _InChunks:
    """Mixed into a scheduler."""

    kv_cache_manager: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._plain = self.kv_cache_manager.get_computed_blocks
        self.kv_cache_manager.get_computed_blocks = self._computed

    def _computed(self, request: Any) -> Any:
        """As `KVCacheManager.get_computed_blocks`: blocks, their tokens, and the boundary only hybrid models have."""
        chunk = (getattr(request.sampling_params, "extra_args", None) or {}).get("chunk")
        if not chunk:
            return self._plain(request)
        manager = self.kv_cache_manager
        blocks, tokens = manager.coordinator.find_longest_cache_hit(request.block_hashes, request.num_tokens)[:2]
        tokens -= tokens % chunk
        size = manager.kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
        cut = manager.create_kv_cache_blocks(tuple(group[: tokens // size] for group in blocks))
        return cut, min(tokens, request.num_tokens - 1), 0


class ChunkScheduler(_InChunks, Scheduler):  # type: ignore[misc]
    """For platforms without asynchronous scheduling (the CPU)."""


class AsyncChunkScheduler(_InChunks, AsyncScheduler):  # type: ignore[misc]
    """For GPUs."""
