"""The bytes of a benchmark's KV caches. They depend on token prefix, layer and position only, so
any worker can check them.

Each block of a prompt has a 64-bit digest of all tokens up to its end. Its bytes in a layer are the
first words of a SplitMix64 stream with the seed mix(digest + layer · odd constant). A wrong prefix,
layer or position gives other bytes."""

from __future__ import annotations

from hashlib import blake2b

import msgspec
import numpy as np
import torch

WORD_BYTES = 8


class Shape(msgspec.Struct, frozen=True):
    """A model's KV cache, bf16: `layers` tensors of (2, blocks, block_size, kv_heads, head_dim)."""

    layers: int
    kv_heads: int
    head_dim: int
    block_size: int = 16

    @property
    def token_bytes(self) -> int:
        """Bytes of one token, all layers, K and V."""
        return self.layers * 2 * self.kv_heads * self.head_dim * 2

    @property
    def row_words(self) -> int:
        """64-bit words of one block of one layer, of K or of V."""
        return self.block_size * self.kv_heads * self.head_dim * 2 // WORD_BYTES


def block_digests(tokens: np.ndarray, block_size: int) -> np.ndarray:
    """One int64 for each block, the last one possibly partial: a chained BLAKE2b of all tokens up
    to the block's end.
    """
    raw = tokens.astype("<i8").tobytes()
    step, digest, digests = block_size * 8, b"", []
    for start in range(0, len(raw), step):
        digest = blake2b(
            digest + raw[start : start + step], digest_size=WORD_BYTES, person=b"vcache-soak"
        ).digest()
        digests.append(digest)
    return np.frombuffer(b"".join(digests), dtype="<i8").copy()


def content(digests: torch.Tensor, layer: int, row_words: int) -> torch.Tensor:
    """The content of the blocks with these digests in one layer: words (2, blocks, row_words), K
    first, on the digests' device.
    """
    seeds = mix(digests + _signed(layer * 0xD1342543DE82EF95))
    counter = torch.arange(
        1, 2 * row_words + 1, dtype=torch.int64, device=digests.device
    ) * _signed(0x9E3779B97F4A7C15)
    return mix(seeds.view(1, -1, 1) + counter.view(2, 1, row_words))


def poison(worker: int) -> int:
    """The word that fills blocks without KV. Each worker has its own, so that poison copied from
    another one is found.
    """
    return int(mix(torch.tensor([~worker]))[0])


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
