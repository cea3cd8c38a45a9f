"""`vcache plan`: how much memory a pool for a model takes."""

from __future__ import annotations

import math
from collections.abc import Iterator

from vcache_backend.config import ByteSize, Config
from vcache_backend.doctor import model as models
from vcache_backend.doctor.finding import Finding
from vcache_backend.doctor.model import GIB
from vcache_backend.vram_pool.memory_budget import most_utilization

LEAST_UTILIZATION = 0.5
"""If less of a GPU is left for vLLM, the plan warns."""


def plan(
    name: str, config: Config, gpus: int, tokens: int = 0, gpu_bytes: int = 0
) -> Iterator[Finding]:
    """What each of `gpus` GPUs must lend for a pool of so many `tokens`; 0: how many tokens a pool
    holds as it is configured.

    gpu_bytes: the memory of one GPU, for a finding about what is left for vLLM; 0: none. If the
    model is not cached, the only finding is why."""
    try:
        model = models.ask(name, config)
    except models.UnknownModel as error:
        yield models.unknown(name, error)
        return
    yield models.cached(name, model)
    if model.refused:
        return
    size, chunk = config.engine.chunk_size, model.chunk_bytes
    yield models.chunks(model, size)
    # A chunk lies on one GPU.
    chunks = math.ceil(math.ceil(tokens / size) / gpus)
    segment = ByteSize(math.ceil(chunks * chunk / GIB) * GIB) if tokens else config.pool.lent
    held = segment // chunk * gpus
    detail = f"{gpus} GPUs that lend {segment} each hold {held:,} chunks, {held * size:,} tokens"
    if segment and not held:
        yield Finding(
            "pool",
            "fail",
            detail,
            f"a chunk takes {ByteSize(chunk)}: set pool.segment_bytes to that or more",
        )
        return
    yield Finding("pool", "ok", detail, f"pool.segment_bytes: {segment}")
    if gpu_bytes:
        left = most_utilization(gpu_bytes, segment)
        enough = left >= LEAST_UTILIZATION
        less = "lend less, or on more GPUs, or keep the pool in host memory (pool.device: host)"
        advice = f"--gpu-memory-utilization {left:.2f}" if enough else less
        detail = (
            f"that leaves vLLM {left:.0%} of {ByteSize(gpu_bytes).about} for weights and "
            "its own KV cache"
        )
        yield Finding("vllm", "ok" if enough else "warn" if left > 0 else "fail", detail, advice)
