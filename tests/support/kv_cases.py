"""KV caches with known content: the content of a token's KV is a function of (token, layer) and
nothing else, so any process can check any byte. Caches are filled and checked through their axes as
vLLM names them, never through the code under test."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from soak.memory import mix

from vcache_backend.transfer.layout import Layout
from vcache_backend.vram_pool.copies.geometry import PagedKV

CHUNK = 32
POISON = 0xA5


class Sizes(NamedTuple):
    """How large a KV cache is; small by default."""

    layers: int = 3
    heads: int = 4
    dim: int = 16
    blocks: int = 24
    block_size: int = 16


SMALL = Sizes()


class Arrangement(NamedTuple):
    """A KV layout of vLLM. axes: of the tensor. memory: the same axes, outermost first, where
    strides differ from shapes.

    packed: K and V lie in one row of `dim`.
    """

    name: str
    axes: str
    memory: str = ""
    dtype: torch.dtype = torch.bfloat16
    packed: bool = False


FLASH = Arrangement("flash", "part block token head dim")
MLA = Arrangement("mla", "block token dim")
PACKED = Arrangement("packed-nhd", "block head token dim", "block token head dim", packed=True)
PACKED_HND = Arrangement("packed-hnd", "block head token dim", packed=True)
ARRANGEMENTS = [
    FLASH,
    Arrangement("flash-hnd", "part block token head dim", "part block head token dim"),
    Arrangement("flashinfer", "block part token head dim"),
    Arrangement("flashinfer-hnd", "block part token head dim", "block part head token dim"),
    Arrangement("triton-hnd", "block part head token dim"),
    Arrangement("part-first-hnd", "part block head token dim"),
    PACKED,
    PACKED_HND,
    Arrangement("heads-last", "block token head dim"),
    MLA,
    Arrangement("flash-fp16", "part block token head dim", dtype=torch.float16),
    Arrangement("flash-fp8", "part block token head dim", dtype=torch.float8_e4m3fn),
    Arrangement("mla-fp8", "block token dim", dtype=torch.uint8),
]


def content(tokens: torch.Tensor, layer: int, width: int) -> torch.Tensor:
    """The bytes (tokens, width) that one layer of a KV cache holds for these tokens; every bit
    depends on token, layer and place.
    """
    words = -(-width // 8)
    place = torch.arange(words, device=tokens.device)
    seeds = mix(tokens[:, None] * 0x9E3779B1 + layer * 0x85EBCA77)
    return mix(seeds + place * 0xC2B2AE3D + 1).view(torch.uint8)[:, :width]


def prompt(count: int, family: int = 1) -> torch.Tensor:
    """`count` tokens; prompts of one family are prefixes of one another, and no token is in two
    families.
    """
    return torch.arange(count) + family * 1_000_000


def places(sizes: Sizes, count: int, seed: int = 0) -> torch.Tensor:
    """Slots of `count` tokens in blocks that lie anywhere, the last one possibly partial."""
    blocks = list(range(sizes.blocks))
    random.Random(seed).shuffle(blocks)
    taken = torch.tensor(blocks[: -(-count // sizes.block_size)], dtype=torch.int64)
    return (taken[:, None] * sizes.block_size + torch.arange(sizes.block_size)).reshape(-1)[:count]


class Cache:
    """A paged KV cache, poisoned when new. `tensors` is what the engine gets: one a layer."""

    def __init__(
        self, arrangement: Arrangement = FLASH, sizes: Sizes = SMALL, device: str = "cpu"
    ) -> None:
        self.arrangement, self.sizes = arrangement, sizes
        axes = arrangement.axes.split()
        memory = (arrangement.memory or arrangement.axes).split()
        item = arrangement.dtype.itemsize
        length = {"part": 2, "block": sizes.blocks, "token": sizes.block_size, "head": sizes.heads}
        length["dim"] = sizes.dim * item * (2 if arrangement.packed else 1)
        where = torch.device(device if device.startswith("cuda") else "cpu")
        lengths = [length[axis] for axis in memory]
        self.memory = [self._allocated(lengths, where) for _ in range(sizes.layers)]
        order = [memory.index(axis) for axis in axes]
        self.tensors = [raw.view(arrangement.dtype).permute(order) for raw in self.memory]
        first = [memory.index("block"), memory.index("token")]
        order = first + [axis for axis in range(len(memory)) if axis not in first]
        self.rows = [raw.permute(order) for raw in self.memory]
        self.poison()

    def _allocated(self, shape: list[int], device: torch.device) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.uint8, device=device)

    def copy(self) -> Cache:
        """The bytes as they are now, that is as the current stream's next kernel sees them."""
        other = Cache(self.arrangement, self.sizes, str(self.memory[0].device))
        for mine, theirs in zip(self.memory, other.memory, strict=True):
            theirs.copy_(mine)
        return other

    @property
    def token_bytes(self) -> int:
        """Of all layers."""
        return self.sizes.layers * math.prod(self.rows[0].shape[2:])

    @property
    def chunk_bytes(self) -> int:
        return CHUNK * self.token_bytes

    def poison(self) -> None:
        for raw in self.memory:
            raw.fill_(POISON)

    def fill(self, tokens: torch.Tensor, slots: torch.Tensor) -> None:
        """What prefill does: the KV of `tokens` is in their slots afterwards."""
        tokens, slots = self.here(tokens), self.here(slots)
        for layer, rows in enumerate(self.rows):
            rest = rows.shape[2:]
            kv = content(tokens, layer, math.prod(rest))
            block, at = slots // self.sizes.block_size, slots % self.sizes.block_size
            rows[block, at] = kv.view(len(tokens), *rest)

    def wrong(self, tokens: torch.Tensor, slots: torch.Tensor) -> int:
        """How many bytes in `slots` are not the KV of `tokens`."""
        tokens = self.here(tokens)
        count = torch.zeros((), dtype=torch.int64, device=tokens.device)
        for layer, rows in enumerate(self.at(slots)):
            count += (rows != content(tokens, layer, rows.shape[1])).sum()
        return int(count)

    def holds_only(self, tokens: torch.Tensor, slots: torch.Tensor) -> bool:
        """Every byte of the whole cache: the KV of `tokens` in `slots`, poison everywhere else."""
        expected = Cache(self.arrangement, self.sizes, str(self.memory[0].device))
        expected.fill(tokens, slots)
        pairs = zip(self.memory, expected.memory, strict=True)
        return all(torch.equal(mine, theirs) for mine, theirs in pairs)

    def at(self, slots: torch.Tensor) -> Iterator[torch.Tensor]:
        slots = self.here(slots)
        for rows in self.rows:
            yield rows[slots // self.sizes.block_size, slots % self.sizes.block_size].flatten(1)

    def here(self, tensor: torch.Tensor) -> torch.Tensor:
        """On the cache's device."""
        return tensor.to(self.memory[0].device)


def layout_of(cache: Cache, chunk_size: int = CHUNK, **changes: Any) -> Layout:
    """The layout that fits `cache`, but for `changes`."""
    sizes, dtype = cache.sizes, str(cache.arrangement.dtype).removeprefix("torch.")
    fields: dict[str, Any] = {"model": "test", "dtype": dtype, "layers": sizes.layers}
    fields |= {"kv_heads": sizes.heads, "head_dim": sizes.dim, "block_size": sizes.block_size}
    fields |= {"kv_layout": PagedKV.describe(cache.tensors, sizes.block_size).name}
    fields |= {"chunk_size": chunk_size}
    return Layout(**fields | changes)
