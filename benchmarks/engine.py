"""A whole `retrieve()` (hashing, lease, plan, copy, release) against a mere copy of its bytes by
the copy engine.

Two engines and a real metadata server. The chunks lie on the first engine's device; the second one
retrieves them into blocks that were overwritten before. On GPUs: the Llama-3.1-8B shape, 4,096
tokens, 512 MiB, from a peer. On host memory: a small shape, against a plain copy of the same bytes.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from vcache_backend.config import from_dict
from vcache_backend.engine import VCacheEngine
from vcache_backend.transfer.layout import Layout

from .copies import engine_seconds
from .processes import metadata_server
from .results import Row, row

RUNS = 30
BLOCK_SIZE = 16
TOKENS, CHUNK_TOKENS = 4096, 256


class KV:
    """A paged KV cache in scattered blocks. shape: layers, KV heads, size of a head. device:
    `host:0`, `cuda:0` and so on.
    """

    def __init__(self, shape: tuple[int, int, int], device: str, seed: int) -> None:
        layers, heads, dim = shape
        self.device, dice = device, torch.Generator().manual_seed(seed)
        self._blocks = torch.randperm(TOKENS // BLOCK_SIZE, generator=dice)
        size = (2, len(self._blocks), BLOCK_SIZE, heads, dim)
        where = device if device.startswith("cuda") else "cpu"
        self.tensors = [
            torch.randint(0, 255, size, generator=dice).to(where, torch.bfloat16)
            for _ in range(layers)
        ]
        self.nbytes = sum(tensor.nbytes for tensor in self.tensors)
        self.slots = (self._blocks[:, None] * BLOCK_SIZE + torch.arange(BLOCK_SIZE)).reshape(-1)
        self.layout = Layout.of(
            self.tensors, BLOCK_SIZE, model="benchmark", chunk_size=CHUNK_TOKENS
        )

    def engine(self, socket: Path, lends: int) -> VCacheEngine:
        pool = {"device": self.device, "segment_bytes": lends}
        return VCacheEngine(
            from_dict({"server": {"socket": str(socket)}, "pool": pool}), self.layout
        )

    def holds(self, other: KV) -> bool:
        """Whether every token's KV equals `other`'s."""
        return all(
            torch.equal(mine[:, self._blocks].cpu(), its[:, other._blocks].cpu())
            for mine, its in zip(self.tensors, other.tensors, strict=True)
        )


def run() -> list[Row]:
    """`engine_retrieve_4096` on two GPUs, `engine_retrieve_host` where there are none."""
    if torch.cuda.device_count() > 1:
        shape = (32, 8, 128)
        stored, into = KV(shape, "cuda:1", 1), KV(shape, "cuda:0", 2)
        return [_measure("engine_retrieve_4096", stored, into, at_most=1.15)]
    small = (4, 2, 64)
    stored, into = KV(small, "host:1", 1), KV(small, "host:0", 2)
    return [_measure("engine_retrieve_host", stored, into, at_most=None)]


def _measure(name: str, stored: KV, into: KV, at_most: float | None) -> Row:
    tokens = torch.arange(TOKENS)
    with (
        metadata_server() as path,
        stored.engine(path, 2 * stored.nbytes) as writer,
        into.engine(path, 0) as engine,
    ):

        def retrieve() -> bool:
            return bool(engine.retrieve(tokens, None, into.tensors, into.slots).all())

        writer.store(tokens, None, stored.tensors, stored.slots)
        if not writer.flush(30) or engine.lookup(tokens) != len(tokens):
            raise RuntimeError(f"the chunks were not stored: {writer.get_stats()}")
        for tensor in into.tensors:
            tensor.fill_(float("nan"))
        if not retrieve() or not into.holds(stored):
            raise RuntimeError(f"retrieve() brought other bytes: {engine.get_stats()}")
        ours, plain, whole = [], [], list[bool]()
        flat, source = (
            torch.empty(kv.nbytes, dtype=torch.uint8, device=kv.tensors[0].device)
            for kv in (into, stored)
        )
        for _ in range(RUNS):
            plain.append(_copy_ms(flat, source))
            engine.lookup(tokens)  # as vLLM's scheduler does, a moment before
            ours.append(_ms(lambda: whole.append(retrieve())))
        if not all(whole):
            raise RuntimeError(f"a retrieve() missed: {engine.get_stats()}")
    what = (
        f"{stored.nbytes >> 20} MiB, retrieve() after a lookup(), wall time; reference: one "
        "contiguous copy"
    )
    return row(name, "ms", ours, plain, what=what, at_most=at_most)


def _ms(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return 1e3 * (time.perf_counter() - started)


def _copy_ms(target: torch.Tensor, source: torch.Tensor) -> float:
    """Milliseconds of one contiguous copy, by CUDA events on a GPU and by the host's clock
    elsewhere.
    """
    if not target.is_cuda:
        return _ms(lambda: target.copy_(source))
    with torch.cuda.device(target.device):
        return 1e3 * statistics.median(
            engine_seconds(lambda: target.copy_(source, non_blocking=True)) for _ in range(3)
        )
