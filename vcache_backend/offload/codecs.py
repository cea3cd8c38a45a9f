"""Encodes chunks for the offload tier: raw, or with one byte for each number, which loses
precision.

Payload of int8 and fp8: first the scales, bfloat16, one for each vector of `head_dim` consecutive
numbers (one head of a token), then the bytes. A number x is written as x / scale and read as byte *
scale. The scale makes the vector's largest number at most 127 (int8) or 448 (fp8). Zeros stay
zeros. Scales are rounded up to bfloat16 before the division, so rounding only makes the grid up to
0.8 % coarser.

Chunks are encoded and decoded on their device: 89 to 123 GB/s on an H200, some 60 times less on a
CPU core. See docs/mooncake.md."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import torch

from vcache_backend.errors import VCacheError

RAW_ID: Final = 1
KINDS: Final = {"int8": (4, torch.int8, 127.0), "fp8": (5, torch.float8_e4m3fn, 448.0)}
"""By name: id (stored in objects: never change one), type and largest number of a byte."""
DTYPES: Final = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
SCALE_BYTES: Final = 2
LEAST_SCALE: Final = torch.finfo(torch.bfloat16).tiny
PIECE_NUMBERS: Final = 1 << 20
"""How many numbers a CPU processes at once, to keep them in the CPU's cache. A GPU processes
GPU_PIECES times as many, which bounds the memory."""
GPU_PIECES: Final = 8


class CodecError(VCacheError):
    """This codec cannot write this model's KV; the message says why."""


class Codec:
    """Encodes and decodes chunks as int8 or fp8. Any number of threads. Tensors are contiguous,
    1-D, uint8, and all on the same device. Work runs on the current stream; `encode` waits."""

    def __init__(self, name: str, dtype: str, head_dim: int) -> None:
        """dtype: torch's name of the numbers' type. CodecError unless it has 16 or 32 bits."""
        if dtype not in DTYPES:
            raise CodecError(f"codec {name} is for {', '.join(DTYPES)}; KV is {dtype}, use raw")
        if head_dim < 1:
            raise CodecError(f"codec {name} needs a head_dim, got {head_dim}")
        self.name, self._dtype, self._head_dim = name, DTYPES[dtype], head_dim
        self.id, self._code, self._largest = KINDS[name]

    def payload_bytes(self, chunk_bytes: int) -> int:
        """The payload size of a chunk of `chunk_bytes` bytes. CodecError for an impossible size."""
        vector = self._dtype.itemsize * self._head_dim
        if chunk_bytes <= 0 or chunk_bytes % vector:
            size = f"{self._head_dim} x {self._dtype.itemsize} B"
            raise CodecError(f"{chunk_bytes:,} B are not whole vectors of {size} for {self.name}")
        return chunk_bytes // vector * (SCALE_BYTES + self._head_dim)

    def encode(self, chunk: torch.Tensor, payload: torch.Tensor) -> None:
        """Encode `chunk` into `payload`. CodecError for inf or NaN; `payload` is then undefined."""
        finite = torch.ones((), dtype=torch.bool, device=chunk.device)
        for numbers, scales, codes in self._pieces(chunk, payload):
            largest = numbers.abs().amax(1).float()
            finite &= largest.isfinite().all()
            # Divide by a tensor, so that GPU and CPU give the same quotient: a GPU would multiply
            # by the reciprocal of a number.
            share = largest / torch.full((), self._largest, device=chunk.device)
            scales.copy_(_rounded_up(share.clamp_min_(LEAST_SCALE)))
            scaled = numbers / scales.float()[:, None]
            codes.copy_(scaled if self._code.is_floating_point else scaled.round_())
        if not bool(finite):
            raise CodecError(f"KV holds inf or NaN, which {self.name} cannot write")

    def decode(self, payload: torch.Tensor, chunk: torch.Tensor) -> None:
        """Decode `payload`, which the caller has checked to be whole, into `chunk`."""
        limits = torch.finfo(self._dtype)
        for numbers, scales, codes in self._pieces(chunk, payload):
            read = codes.float() if self.name == "int8" else _from_fp8(codes)
            numbers.copy_(read.mul_(scales.float()[:, None]).clamp_(limits.min, limits.max))

    def _pieces(
        self, chunk: torch.Tensor, payload: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Yield views of the numbers, scales and codes, some vectors at a time."""
        numbers = chunk.view(self._dtype).view(-1, self._head_dim)
        split = SCALE_BYTES * len(numbers)
        scales = payload[:split].view(torch.bfloat16)
        codes = payload[split:].view(self._code).view(len(numbers), self._head_dim)
        step = max(1, PIECE_NUMBERS * (GPU_PIECES if chunk.is_cuda else 1) // self._head_dim)
        for start in range(0, len(numbers), step):
            part = slice(start, start + step)
            yield numbers[part], scales[part], codes[part]


def make(name: str, dtype: str, head_dim: int) -> Codec | None:
    """Make the codec of this name; None for raw. Raises CodecError if it does not fit the KV."""
    return None if name == "raw" else Codec(name, dtype, head_dim)


def _rounded_up(scale: torch.Tensor) -> torch.Tensor:
    return ((scale.view(torch.int32) + 0xFFFF) >> 16).to(torch.int16).view(torch.bfloat16)


def _from_fp8(codes: torch.Tensor) -> torch.Tensor:
    """Convert through float16's bits, with an exponent bias larger by 8. Torch's conversion takes
    10 times as long on a CPU. The two codes of NaN, which are never written, become 480."""
    bits = codes.view(torch.int8).to(torch.int16)
    return (((bits & 0x7F) << 7) | (bits & -0x8000)).view(torch.float16).float().mul_(256.0)
