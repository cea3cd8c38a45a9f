"""Whether this GPU has room for a segment beside vLLM."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from vcache_backend.vram_pool import memory_budget
from vcache_backend.vram_pool.memory_budget import Shortfall


def beside_vllm(vllm_config: Any) -> Callable[[int, int], Shortfall | None]:
    """A function that `Pool` asks before it lends memory: maps the bytes in all and the new bytes
    to the reason why the GPU has no room, and to what fits, or to None.

    The GPU is the current one."""
    cache = vllm_config.cache_config
    # vLLM uses one of both settings.
    utilization = None if cache.kv_cache_memory_bytes else float(cache.gpu_memory_utilization)
    on_gpu = vllm_config.device_config.device_type != "cpu" and torch.cuda.is_available()
    # Fixed now: `Pool` also asks from its client's thread, in which another GPU may be current.
    device = torch.cuda.current_device() if on_gpu else None

    def over_budget(whole: int, new: int) -> Shortfall | None:
        if device is None:
            return None
        free, total = torch.cuda.mem_get_info(device)
        return memory_budget.shortfall(total, free, whole, new, utilization)

    return over_budget
