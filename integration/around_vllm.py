"""What both integrations need of the vLLM around them: its log, its address, its GPU's memory."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import Any

import torch

from vcache_backend.vram_pool import memory_budget
from vcache_backend.vram_pool.memory_budget import Shortfall


def join_log() -> None:
    """Give the package's logger vLLM's handlers and level, unless it has handlers of its own.

    vLLM configures only its own loggers: otherwise our warnings would lack time and process, and
    lower levels would not appear."""
    ours, theirs = logging.getLogger("vcache_backend"), logging.getLogger("vllm")
    if theirs.handlers and not ours.handlers:
        ours.handlers = list(theirs.handlers)
        ours.setLevel(theirs.level)


def served_at(vllm_config: Any) -> str:
    """The port of vLLM's API server, such as `:8000`, or `:8000 rank 1` for a data parallel rank;
    empty without a port on the command line, which the engine's processes inherit."""
    words, parallel = sys.argv, vllm_config.parallel_config
    # Under these the API server may have another port, or none.
    elsewhere = "--config", "--headless", "--uds"
    served = bool(words) and (words[0].endswith("api_server.py") or "serve" in words[1:2])
    port = "8000" if served and not any(word.startswith(elsewhere) for word in words) else ""
    for word, following in zip(words, [*words[1:], ""], strict=True):
        if word == "--port" or word.startswith("--port="):
            port = following if word == "--port" else word.partition("=")[2]
    rank = f" rank {parallel.data_parallel_rank}" if parallel.data_parallel_size > 1 else ""
    return f":{port}{rank}" if port.isdigit() else ""


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
