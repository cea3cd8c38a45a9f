"""A whole `retrieve()` (hashing, lease, plan, copy, release) against a mere copy of its bytes by
the copy engine.

Two engines and a real metadata server. The chunks lie on the first engine's device; the second one
retrieves them into blocks that were overwritten before. On GPUs: the Llama-3.1-8B shape, 4,096
tokens, 512 MiB, from a peer. On host memory: a small shape, against a plain copy of the same bytes.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from vcache_backend.config import from_dict
from vcache_backend.engine import VCacheEngine
from vcache_backend.transfer.layout import Layout

from .copies import engine_seconds
from .processes import metadata_server
from .results import Row, row

RUNS = 30
BLOCK_SIZE = 16


class Size(NamedTuple):
    """The shape of a KV cache, and how many chunks of it move. The default: Llama-3.1-8B's, 16
    chunks of 32 MiB.
    """

    layers: int = 32
    heads: int = 8
    dim: int = 128
    chunks: int = 16
    chunk_tokens: int = 256

    @property
    def tokens(self) -> int:
        return self.chunks * self.chunk_tokens

    @property
    def chunk_bytes(self) -> int:
        return self.chunk_tokens * self.layers * 2 * self.heads * self.dim * 2

    @property
    def nbytes(self) -> int:
        return self.chunks * self.chunk_bytes


class KV:
    """A paged KV cache of `size` in scattered blocks, whose contents follow from their places.
    device: `host`, `cuda:0` and so on.
    """

    def __init__(self, size: Size, seed: int = 0, device: str = "host") -> None:
        self.size, self.device, dice = size, device, torch.Generator().manual_seed(seed)
        self._blocks = torch.randperm(size.tokens // BLOCK_SIZE, generator=dice)
        shape = (2, len(self._blocks), BLOCK_SIZE, size.heads, size.dim)
        where = device if device.startswith("cuda") else "cpu"
        self.tensors = [
            torch.randint(0, 255, shape, generator=dice).to(where, torch.bfloat16)
            for _ in range(size.layers)
        ]
        self.slots = (self._blocks[:, None] * BLOCK_SIZE + torch.arange(BLOCK_SIZE)).reshape(-1)
        self.layout = Layout.of(
            self.tensors, BLOCK_SIZE, model="benchmark", chunk_size=size.chunk_tokens
        )

    def poison(self) -> None:
        for tensor in self.tensors:
            tensor.fill_(float("nan"))

    def holds(self, other: KV) -> bool:
        """Whether every token's KV equals `other`'s."""
        return all(
            torch.equal(mine[:, self._blocks].cpu(), its[:, other._blocks].cpu())
            for mine, its in zip(self.tensors, other.tensors, strict=True)
        )


_prompts = itertools.count(1)


def prompt(tokens: int) -> torch.Tensor:
    """A new prompt of random tokens."""
    return torch.arange(tokens) + next(_prompts) * 1_000_000


def timed(call: Callable[[], Any]) -> float:
    """Seconds that the call takes."""
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def run() -> list[Row]:
    """`engine_retrieve_4096` on two GPUs, `engine_retrieve_host` where there are none."""
    if torch.cuda.device_count() > 1:
        return [
            _measure(
                "engine_retrieve_4096",
                KV(Size(), 1, "cuda:1"),
                KV(Size(), 2, "cuda:0"),
                at_most=1.15,
            )
        ]
    small = Size(layers=4, heads=2, dim=64)
    return [
        _measure(
            "engine_retrieve_host", KV(small, 1, "host:1"), KV(small, 2, "host:0"), at_most=None
        )
    ]


def _measure(name: str, stored: KV, into: KV, at_most: float | None) -> Row:
    nbytes, tokens = stored.size.nbytes, prompt(stored.size.tokens)
    with (
        metadata_server() as path,
        _engine(path, stored, 2 * nbytes) as writer,
        _engine(path, into, 0) as engine,
    ):
        writer.store(tokens, None, stored.tensors, stored.slots)
        if not writer.flush(30) or engine.lookup(tokens) != len(tokens):
            raise RuntimeError(f"the chunks were not stored: {writer.get_stats()}")
        into.poison()
        if not bool(
            engine.retrieve(tokens, None, into.tensors, into.slots).all()
        ) or not into.holds(stored):
            raise RuntimeError(
                "retrieve() did not bring what was stored; nothing is measured: "
                f"{engine.get_stats()}"
            )
        ours, plain, masks = [], [], list[torch.Tensor]()
        flat = torch.empty(nbytes, dtype=torch.uint8, device=into.tensors[0].device)
        source = torch.empty(nbytes, dtype=torch.uint8, device=stored.tensors[0].device)
        for _ in range(RUNS):
            plain.append(_copy_ms(flat, source))
            engine.lookup(tokens)  # as vLLM's scheduler does, a moment before
            ours.append(
                1e3
                * timed(
                    lambda: masks.append(engine.retrieve(tokens, None, into.tensors, into.slots))
                )
            )
        if not all(bool(mask.all()) for mask in masks):
            raise RuntimeError(f"a retrieve() missed: {engine.get_stats()}")
    what = (
        f"{nbytes >> 20} MiB, retrieve() after a lookup(), wall time; reference: one "
        "contiguous copy"
    )
    return row(name, "ms", ours, plain, what=what, at_most=at_most)


def _engine(socket: Path, kv: KV, pool_bytes: int) -> VCacheEngine:
    return VCacheEngine(
        from_dict(
            {
                "server": {"socket": str(socket)},
                "pool": {"device": kv.device, "segment_bytes": pool_bytes},
            }
        ),
        kv.layout,
    )


def _copy_ms(target: torch.Tensor, source: torch.Tensor) -> float:
    """Milliseconds of one contiguous copy, by CUDA events on a GPU and by the host's clock
    elsewhere.
    """
    if not target.is_cuda:
        return 1e3 * timed(lambda: target.copy_(source))
    with torch.cuda.device(target.device):
        return 1e3 * statistics.median(
            engine_seconds(lambda: target.copy_(source, non_blocking=True)) for _ in range(3)
        )
