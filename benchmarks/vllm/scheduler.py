"""vLLM's own scheduler with a `Probe`, for requests that ask what the KV connector costs it."""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from .probe import Probe


class _Probed:
    """Mixed into a scheduler."""

    connector: Any
    kv_cache_manager: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._probe = Probe(self.connector, self.kv_cache_manager.block_pool)

    def add_request(self, request: Any) -> None:
        asked = getattr(request.sampling_params, "extra_args", None) or {}
        self._probe.take(request.request_id, asked)
        super().add_request(request)  # type: ignore[misc]


def probed(vllm_config: Any, **given: Any) -> Any:
    """Called as vLLM calls the class of its scheduler: that which it would have taken, probed."""
    plain = AsyncScheduler if vllm_config.scheduler_config.async_scheduling else Scheduler
    return type("Probed", (_Probed, plain), {})(vllm_config=vllm_config, **given)
