"""A whole `retrieve()`: hashing, lease, plan, copy, release, against nothing but its bytes at copy-engine speed.

Two engines and a real metadata server. The chunks lie on the first engine's device; the second one retrieves them into blocks
that were overwritten before. On GPUs: the Llama-3.1-8B shape, 4,096 tokens, 512 MiB, from a peer. On host memory: a small shape,
against a plain copy of the same bytes.
"""

from __future__ import annotations

import statistics
import time

import numpy as np
import torch

from vcache_backend.config import Config, from_dict
from vcache_backend.engine import VCacheEngine
from vcache_backend.transfer.layout import Layout
from vcache_backend.vram_pool.paged import PagedKV

from .copies import event
from .metadata import server
from .results import Row, row

TOKENS = 4096
BLOCK_SIZE = 16
RUNS = 30


def run() -> list[Row]:
    """`engine_retrieve_4096` on two GPUs, `engine_retrieve_host` where there are none."""
    if torch.cuda.device_count() > 1:
        return [_measure("engine_retrieve_4096", "cuda:1", "cuda:0", layers=32, heads=8, dim=128, at_most=1.15)]
    return [_measure("engine_retrieve_host", "host:1", "host:0", layers=4, heads=2, dim=64, at_most=None)]


def _measure(name: str, owner: str, reader: str, *, layers: int, heads: int, dim: int, at_most: float | None) -> Row:
    stored = _caches(owner, layers, heads, dim)
    into = _caches(reader, layers, heads, dim)
    layout = _layout(stored, layers, heads, dim)
    tokens = torch.randint(0, 128_000, (TOKENS,))
    nbytes = sum(cache.numel() * cache.element_size() for cache in stored) * TOKENS // (_blocks() * BLOCK_SIZE)
    with server() as path:
        pool_bytes = 2 * nbytes
        with (
            VCacheEngine(_config(str(path), owner, pool_bytes), layout) as writer,
            VCacheEngine(_config(str(path), reader, 0), layout) as engine,
        ):
            here, there = _slots(1), _slots(2)
            writer.store(tokens, None, stored, here)
            if not writer.flush(30) or engine.lookup(tokens) != TOKENS:
                raise RuntimeError(f"the chunks were not stored: {writer.get_stats()}")
            _check(engine, tokens, stored, here, into, there)
            ours, plain = [], []
            flat = torch.empty(nbytes, dtype=torch.uint8, device=into[0].device)
            source = torch.empty(nbytes, dtype=torch.uint8, device=stored[0].device)
            for _ in range(RUNS):
                plain.append(_copy_ms(flat, source))
                engine.lookup(tokens)  # as vLLM's scheduler does, a moment before
                ours.append(_retrieve_ms(engine, tokens, into, there))
            parts = {part: engine.get_stats()[part]["p50_us"] for part in ("acquire", "plan", "retrieve_copy", "release")}
    what = f"{nbytes >> 20} MiB, retrieve() after a lookup(), wall time; reference: one contiguous copy; us: {parts}"
    return row(name, "ms", ours, plain, what=what, at_most=at_most)


def _check(
    engine: VCacheEngine,
    tokens: torch.Tensor,
    stored: list[torch.Tensor],
    here: torch.Tensor,
    into: list[torch.Tensor],
    there: torch.Tensor,
) -> None:
    """One retrieve into poisoned blocks gives the stored bytes."""
    for cache in into:
        cache.fill_(float("nan"))
    if not bool(engine.retrieve(tokens, None, into, there).all()):
        raise RuntimeError(f"not everything was retrieved: {engine.get_stats()}")
    take, give = here[::BLOCK_SIZE] // BLOCK_SIZE, there[::BLOCK_SIZE] // BLOCK_SIZE
    for source, target in zip(stored, into, strict=True):
        if not torch.equal(source[:, take.to(source.device)].cpu(), target[:, give.to(target.device)].cpu()):
            raise RuntimeError("retrieve() gave wrong bytes; nothing is measured")


def _retrieve_ms(engine: VCacheEngine, tokens: torch.Tensor, into: list[torch.Tensor], slots: torch.Tensor) -> float:
    started = time.perf_counter()
    got = engine.retrieve(tokens, None, into, slots)
    seconds = time.perf_counter() - started
    assert int(got.sum()) == TOKENS
    return seconds * 1e3


def _copy_ms(target: torch.Tensor, source: torch.Tensor) -> float:
    """One contiguous copy, timed with events on the GPU, with the host's clock elsewhere."""
    if not target.is_cuda:
        started = time.perf_counter()
        target.copy_(source)
        return (time.perf_counter() - started) * 1e3
    times = []
    with torch.cuda.device(target.device):
        for _ in range(3):
            start, end = event(), event()
            start.record()
            target.copy_(source, non_blocking=True)
            end.record()
            end.synchronize()
            times.append(float(start.elapsed_time(end)))
    return statistics.median(times)


def _blocks() -> int:
    return TOKENS // BLOCK_SIZE + 32


def _caches(device: str, layers: int, heads: int, dim: int) -> list[torch.Tensor]:
    where = torch.device(device if device.startswith("cuda") else "cpu")
    shape = (2, _blocks(), BLOCK_SIZE, heads, dim)
    return [torch.randn(shape, device=where).to(torch.bfloat16) for _ in range(layers)]


def _slots(seed: int) -> torch.Tensor:
    blocks = np.random.default_rng(seed).permutation(_blocks())[: TOKENS // BLOCK_SIZE]
    return torch.from_numpy((blocks[:, None] * BLOCK_SIZE + np.arange(BLOCK_SIZE)).reshape(-1))


def _layout(caches: list[torch.Tensor], layers: int, heads: int, dim: int) -> Layout:
    name = PagedKV.describe(caches, BLOCK_SIZE).name
    return Layout(
        model="benchmark", dtype="bfloat16", layers=layers, kv_heads=heads, head_dim=dim, block_size=BLOCK_SIZE, kv_layout=name
    )


def _config(socket: str, device: str, pool_bytes: int) -> Config:
    return from_dict({"server": {"socket": socket}, "pool": {"device": device, "segment_bytes": pool_bytes}})
