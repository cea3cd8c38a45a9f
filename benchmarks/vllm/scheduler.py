"""vLLM's schedulers with additions for requests that ask for them. All else, and every request that
does not ask, is vLLM's own.

`in_chunks`: a request may ask that its hit in vLLM's own prefix cache end where the pool's would,
for bit-for-bit comparisons need steps of the same shapes: other shapes run other kernels and may
differ in the last bit. vLLM's own hits are whole blocks (16 tokens). `extra_args={"chunk": 256}`:
as LMCache's, whole chunks, and of a prompt that is whole chunks all but the last token; for that
vLLM copies the block the hit ends in, as it does for any partial hit. With `"whole_blocks": True`
too: as our connector's, whole chunks, and of such a prompt all but the last block, as vLLM itself.

`probed`: a request may ask what the KV connector costs the scheduler (`probe`).

Both are functions that vLLM calls as it would the class; they take the scheduler that vLLM would
have taken."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from .probe import Probe


def _asked(request: Any) -> dict[str, Any]:
    """A request's `extra_args`."""
    return getattr(request.sampling_params, "extra_args", None) or {}


class _InChunks:
    """Mixed into a scheduler."""

    kv_cache_manager: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._plain = self.kv_cache_manager.get_computed_blocks
        self.kv_cache_manager.get_computed_blocks = self._computed

    def _computed(self, request: Any, *most_tokens: int | None) -> Any:
        """As `KVCacheManager.get_computed_blocks`: blocks, their tokens, and the boundary only
        hybrid models have. vLLM 0.33 has a bound of its own, which requests that ask are not
        given."""
        asked = _asked(request)
        chunk = asked.get("chunk")
        if not chunk:
            return self._plain(request, *most_tokens)
        manager = self.kv_cache_manager
        blocks, tokens = manager.coordinator.find_longest_cache_hit(
            request.block_hashes, request.num_tokens
        )[:2]
        tokens -= tokens % chunk
        size = manager.kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
        most = request.num_tokens - 1
        if asked.get("whole_blocks"):
            tokens = min(tokens, most // size * size)
        cut = manager.create_kv_cache_blocks(tuple(group[: tokens // size] for group in blocks))
        return cut, min(tokens, most), 0


class _Probed:
    """Mixed into a scheduler."""

    connector: Any
    kv_cache_manager: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._probe = Probe(self.connector, self.kv_cache_manager.block_pool)

    def add_request(self, request: Any) -> None:
        self._probe.take(request.request_id, _asked(request))
        super().add_request(request)  # type: ignore[misc]


def _with(addition: type) -> Callable[..., Any]:
    """vLLM's own scheduler with this mixed in, asynchronous or not as the instance's is; called as
    vLLM calls the class.
    """

    def make(vllm_config: Any, **given: Any) -> Any:
        plain = AsyncScheduler if vllm_config.scheduler_config.async_scheduling else Scheduler
        return type(addition.__name__, (addition, plain), {})(vllm_config=vllm_config, **given)

    return make


in_chunks, probed = _with(_InChunks), _with(_Probed)
