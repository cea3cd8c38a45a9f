"""Whether this GPU has room for a segment beside vLLM."""

from __future__ import annotations

from collections.abc import Callable

import torch

from vcache_backend.vram_pool import memory_budget


def beside_vllm(device_type: str, utilization: float | None) -> Callable[[int, int], str | None]:
    """What `Pool` asks before it lends memory: why the current GPU has no room for so many bytes in all, so many of them new.

    device_type: vLLM's. utilization: its gpu_memory_utilization, None where that does not apply.
    """
    # `Pool` also asks from its client's thread, in which another GPU is the current one.
    device = torch.cuda.current_device() if device_type != "cpu" and torch.cuda.is_available() else None

    def over_budget(whole: int, new: int) -> str | None:
        if device is None:
            return None
        free, total = torch.cuda.mem_get_info(device)
        return memory_budget.shortfall(total, free, whole, new, utilization)

    return over_budget
