"""A whole `retrieve()` (hashing, lease, plan, copy, release) against a mere copy of its bytes by
the copy engine.

Two engines and a real metadata server. The chunks lie on the first engine's GPU; the second one
retrieves them from there into blocks that were overwritten before: the Llama-3.1-8B shape, 4,096
tokens, 512 MiB. It needs two GPUs.
"""

from __future__ import annotations

import statistics
import time
from functools import partial
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
TOKENS, CHUNK_TOKENS, LAYERS = 4096, 256, 32


class KV:
    """A paged KV cache of LAYERS in scattered blocks."""

    def __init__(self, device: str, seed: int) -> None:
        self.device, dice = device, torch.Generator().manual_seed(seed)
        self._blocks = torch.randperm(TOKENS // BLOCK_SIZE, generator=dice)
        size = (2, len(self._blocks), BLOCK_SIZE, 8, 128)
        self.tensors = [
            torch.randint(0, 255, size, generator=dice).to(device, torch.bfloat16)
            for _ in range(LAYERS)
        ]
        nbytes = sum(tensor.nbytes for tensor in self.tensors)
        self.flat = torch.empty(nbytes, dtype=torch.uint8, device=device)
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
    """The row `engine_retrieve_4096`."""
    stored, into = KV("cuda:1", 1), KV("cuda:0", 2)
    tokens, ours, plain = torch.arange(TOKENS), list[float](), list[float]()
    copy = partial(into.flat.copy_, stored.flat, non_blocking=True)
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
            with torch.cuda.device(into.device):
                copies = [1e3 * engine_seconds(copy) for _ in range(3)]
            plain.append(statistics.median(copies))
            engine.lookup(tokens)  # as vLLM's scheduler does, a moment before
            started = time.perf_counter()
            retrieve()
            ours.append(1e3 * (time.perf_counter() - started))
    what = (
        f"{stored.flat.nbytes >> 20} MiB, retrieve() after a lookup(), wall time; reference: one "
        "contiguous copy"
    )
    return [row("engine_retrieve_4096", "ms", ours, plain, what=what, at_most=1.15)]
