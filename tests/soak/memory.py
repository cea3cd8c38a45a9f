"""The paged KV cache of an instance that does not run vLLM, and the bytes that its blocks must
hold.

These follow from a chunk's key, its namespace's epoch, the layer and the position alone, so any
instance can check what it has loaded. They are words of a SplitMix64 stream: a wrong chunk, layer
or position gives other bytes, as does a chunk of before a reset."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from vcache_backend.protocol.messages import HASH_BYTES, NAMESPACE_BYTES, ChunkKey
from vcache_backend.transfer.keys import TokenHasher
from vcache_backend.transfer.layout import Layout

BLOCK_SIZE = 16
LAYERS, HEADS, DIM = 2, 2, 16
PLANES = 2 * LAYERS
WORDS = BLOCK_SIZE * HEADS * DIM * 2 // 8
"""64-bit words of a page."""
EACH = 2
"""Blocks of a chunk."""
CHUNK_TOKENS = EACH * BLOCK_SIZE
CHUNK_BYTES = PLANES * EACH * WORDS * 8
MOST_CHUNKS = 6
FAMILIES = 12
"""Families of prompts. Prompts of one family are prefixes of one another."""
POISON = 0x5A5A5A5A5A5A5A5A
"""The word that fills blocks without KV."""


class Memory:
    """KV tensors as vLLM has them, one a layer. words: the same memory, shape (PLANES, blocks,
    WORDS)."""

    def __init__(self, blocks: int) -> None:
        memory = torch.zeros(PLANES * blocks * WORDS * 8, dtype=torch.int8)
        self.words: npt.NDArray[np.int64] = (
            memory.numpy().view(np.int64).reshape(PLANES, blocks, WORDS)
        )
        shape = (LAYERS, 2, blocks, BLOCK_SIZE, HEADS, DIM)
        self.tensors = list(memory.view(torch.bfloat16).view(shape))
        self.layout = Layout.of(self.tensors, BLOCK_SIZE, model="soak", chunk_size=CHUNK_TOKENS)

    def wrong(self, blocks: Sequence[int], keys: Sequence[ChunkKey], epoch: int) -> int:
        """How many bytes in these blocks are wrong: they must be the first ones of these chunks."""
        want = contents(keys[: -(-len(blocks) // EACH)], epoch)
        return differing(self.words[:, blocks], want[:, : len(blocks)])


def differing(got: npt.NDArray[np.int64], want: npt.NDArray[np.int64]) -> int:
    """How many bytes differ."""
    if np.array_equal(got, want):
        return 0
    return int((got.view(np.uint8) != want.view(np.uint8)).sum())


def prompt(family: int, chunks: int = MOST_CHUNKS) -> npt.NDArray[np.int64]:
    """The tokens of a family's prompt of so many chunks."""
    return np.arange(chunks * CHUNK_TOKENS) + family * 1_000_000


@functools.cache
def keys_of(hasher: TokenHasher, family: int) -> list[ChunkKey]:
    """The keys of the chunks of a family's longest prompt."""
    return hasher.keys(prompt(family))


def hashes_of(keys: Sequence[ChunkKey]) -> bytes:
    """The hashes of these chunks' blocks; the last one of a chunk is in its key."""
    names = [key[NAMESPACE_BYTES : NAMESPACE_BYTES + HASH_BYTES] for key in keys]
    places = range(EACH - 1, -1, -1)
    return b"".join(bytes([name[0] ^ place]) + name[1:] for name in names for place in places)


def contents(keys: Sequence[ChunkKey], epoch: int = 0) -> npt.NDArray[np.int64]:
    """What the blocks of these chunks must hold, shape (PLANES, blocks, WORDS)."""
    chunks = [content(key, epoch) for key in keys]
    return np.concatenate([np.zeros((PLANES, 0, WORDS), np.int64), *chunks], axis=1)


@functools.cache
def content(key: ChunkKey, epoch: int) -> npt.NDArray[np.int64]:
    """What a chunk's blocks must hold, shape (PLANES, EACH, WORDS): other words in each page."""
    digest = int.from_bytes(key[8:16], "little", signed=True) ^ epoch
    seeds = mix(torch.tensor([digest]) + torch.arange(PLANES * EACH))
    counter = torch.arange(1, WORDS + 1) * _signed(0x9E3779B97F4A7C15)
    return mix(seeds[:, None] + counter).numpy().reshape(PLANES, EACH, WORDS)


def mix(words: torch.Tensor) -> torch.Tensor:
    """SplitMix64's finalizer on int64 tensors, modulo 2^64."""
    words = (words ^ _shift(words, 30)).mul_(_signed(0xBF58476D1CE4E5B9))
    words.bitwise_xor_(_shift(words, 27)).mul_(_signed(0x94D049BB133111EB))
    return words.bitwise_xor_(_shift(words, 31))


def _shift(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical right shift; torch's is arithmetic."""
    return (words >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def _signed(constant: int) -> int:
    """The int64 with the same 64 bits."""
    return (constant + (1 << 63)) % (1 << 64) - (1 << 63)
