"""What is replayed on what: the requests, their chunks' keys, the workers' devices, the size of the pool."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import torch

from vcache_backend.demo import simulation
from vcache_backend.demo.content import Shape, block_digests
from vcache_backend.demo.trace import Request, tokens
from vcache_backend.errors import ConfigError, SegmentError
from vcache_backend.vram_pool.devices import Gpu, gpus

HOST_SHAPE = Shape(layers=4, kv_heads=2, head_dim=64)
"""2 KiB a token: two slow cores write, check and copy it fast enough."""
GPU_SHAPE = Shape(layers=16, kv_heads=8, head_dim=64)
"""Llama-3.2-1B: 32 KiB a token, so the largest request moves 256 MiB."""
POOL_SHARE = 3
"""The pool holds one chunk in so many of the working set."""
MAX_WORKERS = 8


class Plan(msgspec.Struct, frozen=True):
    """`prompts`: by request its chunks' keys, made here without the engine. `devices`: one a worker. `segment_chunks`: of each worker."""

    requests: list[Request]
    prompts: list[list[int]]
    devices: list[str]
    shape: Shape
    chunk_size: int
    segment_chunks: int

    @property
    def chunk_bytes(self) -> int:
        return self.chunk_size * self.shape.token_bytes


def make_plan(requests: Sequence[Request], chunk_size: int, devices: list[str]) -> Plan:
    """Size the pool so that evictions happen. Raises ConfigError: a chunk size the blocks do not fill."""
    shape = GPU_SHAPE if devices[0].startswith("cuda") else HOST_SHAPE
    blocks, odd = divmod(chunk_size, shape.block_size)
    if odd:
        raise ConfigError(f"engine.chunk_size: {chunk_size} is not a multiple of the demo's block size, {shape.block_size}")
    prompts = []
    for request in requests:
        digests = block_digests(tokens(request), shape.block_size)[: request.input_length // chunk_size * blocks]
        prompts.append([int(digest) for digest in digests[blocks - 1 :: blocks]])
    per_worker = -(-simulation.unique(prompts) // (POOL_SHARE * len(devices)))
    return Plan(list(requests), prompts, devices, shape, chunk_size, max(per_worker, 1))


def choose_devices() -> list[str]:
    """One worker a GPU where at least two GPUs can read each other's memory, else two in host memory."""
    try:
        found = gpus() if torch.cuda.is_available() else []
    except SegmentError:
        found = []
    usable: list[Gpu] = []
    for gpu in found:
        if gpu.shares_memory and all("none" not in (gpu.links[peer.uuid], peer.links[gpu.uuid]) for peer in usable):
            usable.append(gpu)
    if len(usable) < 2:
        return ["host:0", "host:1"]
    return [f"cuda:{gpu.ordinal}" for gpu in usable[:MAX_WORKERS]]
