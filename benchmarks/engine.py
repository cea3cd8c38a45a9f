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
        self.flat = torch.empty(
            sum(tensor.nbytes for tensor in self.tensors), dtype=torch.uint8, device=where
        )
        self.slots = (self._blocks[:, None] * BLOCK_SIZE + torch.arange(BLOCK_SIZE)).reshape(-1)

    def engine(self, socket: Path, lends: int) -> VCacheEngine:
        pool = {"device": self.device, "segment_bytes": lends}
        config = from_dict({"server": {"socket": str(socket)}, "pool": pool})
        return VCacheEngine(
            config, Layout.of(self.tensors, BLOCK_SIZE, model="benchmark", chunk_size=CHUNK_TOKENS)
        )

    def holds(self, other: KV) -> bool:
        """Whether every token's KV equals `other`'s."""
        return all(
            torch.equal(mine[:, self._blocks].cpu(), its[:, other._blocks].cpu())
            for mine, its in zip(self.tensors, other.tensors, strict=True)
        )


def run() -> list[Row]:
    """`engine_retrieve_4096` on two GPUs, `engine_retrieve_host` where there are none."""
    gpus = torch.cuda.device_count() > 1
    shape, device = ((32, 8, 128), "cuda") if gpus else ((4, 2, 64), "host")
    stored, into = KV(shape, f"{device}:1", 1), KV(shape, f"{device}:0", 2)
    tokens, ours, plain = torch.arange(TOKENS), list[float](), list[float]()
    with (
        metadata_server() as path,
        stored.engine(path, 2 * stored.flat.nbytes) as writer,
        into.engine(path, 0) as engine,
    ):

        def retrieve() -> None:
            if not engine.retrieve(tokens, None, into.tensors, into.slots).all():
                raise RuntimeError(f"a retrieve() missed: {engine.get_stats()}")

        writer.store(tokens, None, stored.tensors, stored.slots)
        if not writer.flush(30) or engine.lookup(tokens) != len(tokens):
            raise RuntimeError(f"the chunks were not stored: {writer.get_stats()}")
        for tensor in into.tensors:
            tensor.fill_(float("nan"))
        retrieve()
        if not into.holds(stored):
            raise RuntimeError(f"retrieve() brought other bytes: {engine.get_stats()}")
        for _ in range(RUNS):
            plain.append(_copy_ms(into.flat, stored.flat))
            engine.lookup(tokens)  # as vLLM's scheduler does, a moment before
            ours.append(_ms(retrieve))
    what = (
        f"{stored.flat.nbytes >> 20} MiB, retrieve() after a lookup(), wall time; reference: one "
        "contiguous copy"
    )
    name, most = ("engine_retrieve_4096", 1.15) if gpus else ("engine_retrieve_host", None)
    return [row(name, "ms", ours, plain, what=what, at_most=most)]


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
