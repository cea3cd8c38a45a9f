"""A paged KV cache to move, as an engine sees it."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from vcache_backend.transfer.layout import Layout

BLOCK_SIZE = 16
GIB = 1 << 30


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
    """A KV cache of `size` in scattered blocks, whose contents follow from their places. device:
    `host`, `cuda:0` and so on.
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


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Let torch use so many threads within the context. More than there are idle cores make a copy
    many times slower.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    yield
    torch.set_num_threads(before)
