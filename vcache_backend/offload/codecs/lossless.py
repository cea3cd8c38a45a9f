"""Codecs that give back every bit, whatever the bytes are: raw, zstd, and planes before zstd."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any, Final

import torch

from vcache_backend.offload.codecs.base import PIECE_NUMBERS, CodecError, Geometry, checked

MAX_WINDOW_BYTES: Final = 8 << 20
"""No frame of ours refers further back; what says it does is damaged, and would cost memory."""


class Raw:
    """The bytes as they are."""

    name = "raw"
    id = 1
    lossless = True

    def bound(self, nbytes: int) -> int:
        return nbytes

    def encode(self, chunk: torch.Tensor, out: torch.Tensor) -> int:
        checked(out, "the payload")[: chunk.numel()].copy_(checked(chunk, "the chunk"))
        return chunk.numel()

    def decode(self, payload: torch.Tensor, out: torch.Tensor) -> None:
        if payload.numel() != out.numel():
            raise CodecError(f"raw payload has {payload.numel():,} B, the chunk {out.numel():,}")
        checked(out, "the chunk").copy_(checked(payload, "the payload"))


class Zstd:
    """One zstd frame, or the bytes themselves where that is not shorter."""

    name = "zstd"
    id = 2
    lossless = True

    def __init__(self, level: int = 1) -> None:
        self._frames = _Frames({"compression_level": level})

    def bound(self, nbytes: int) -> int:
        return nbytes

    def encode(self, chunk: torch.Tensor, out: torch.Tensor) -> int:
        return self._frames.write(checked(chunk, "the chunk"), checked(out, "the payload"))

    def decode(self, payload: torch.Tensor, out: torch.Tensor) -> None:
        self._frames.read(checked(payload, "the payload"), checked(out, "the chunk"))


class Planes:
    """16-bit numbers in two planes: the low bytes as they are, then the high ones, sign and exponent, as a zstd frame.

    Low bytes of KV do not compress (1.000 in what was measured). Exponents have 2.9 bits of information and hardly a repetition, so
    zstd is told to look for next to none (`hash_log`): 2.78 instead of 2.67 of level 1's, in a third of the time. Taking the sign
    from between them, differences along the tokens, and channels in the place of tokens gave -2 to +1 % of the whole.
    """

    name = "planes"
    id = 3
    lossless = True

    def __init__(self, geometry: Geometry) -> None:
        if geometry.dtype not in ("bfloat16", "float16"):
            raise CodecError(f"codec planes is for bfloat16 and float16; this KV is {geometry.dtype}, use raw or zstd")
        self._own = threading.local()
        self._frames = _Frames({"compression_level": 1, "strategy": 1, "min_match": 7, "window_log": 17, "hash_log": 6})

    def bound(self, nbytes: int) -> int:
        if nbytes <= 0 or nbytes % 2:
            raise CodecError(f"{nbytes:,} B are no 16-bit numbers, as planes needs")
        return nbytes

    def encode(self, chunk: torch.Tensor, out: torch.Tensor) -> int:
        half = self.bound(checked(chunk, "the chunk").numel()) // 2
        numbers, low, high = chunk.view(torch.int16), checked(out, "the payload")[:half], self._high(half)
        for part in _pieces(half):
            low[part] = numbers[part]
            high[part] = numbers[part] >> 8
        return half + self._frames.write(high, out[half:])

    def decode(self, payload: torch.Tensor, out: torch.Tensor) -> None:
        half = self.bound(checked(out, "the chunk").numel()) // 2
        if checked(payload, "the payload").numel() < half:
            raise CodecError(f"planes payload has {payload.numel():,} B, the low plane alone {half:,}")
        high, numbers = self._high(half), out.view(torch.int16)
        self._frames.read(payload[half:], high)
        for part in _pieces(half):
            numbers[part].copy_(high[part]).bitwise_left_shift_(8).bitwise_or_(payload[:half][part])

    def _high(self, half: int) -> torch.Tensor:
        """This thread's plane of high bytes. Kept, since fresh memory costs as long as the split."""
        if not hasattr(self._own, "high") or self._own.high.numel() != half:
            self._own.high = torch.empty(half, dtype=torch.uint8)
        high: torch.Tensor = self._own.high
        return high


class _Frames:
    """zstd on host tensors: a frame, or the bytes as they are, which their length tells. Contexts are kept, one a thread."""

    def __init__(self, parameters: dict[str, int]) -> None:
        try:
            import zstandard
        except ImportError as cause:
            raise CodecError("codecs zstd and planes need zstandard: pip install 'vcache-backend[mooncake]'") from cause
        self._zstd: Any = zstandard
        self._parameters = zstandard.ZstdCompressionParameters(write_content_size=True, **parameters)
        self._own = threading.local()

    def write(self, data: torch.Tensor, out: torch.Tensor) -> int:
        """The bytes that `data` took in `out`: no more than its own."""
        if data.is_cuda:
            raise CodecError("zstd runs on the CPU: copy the chunk to host memory first")
        if not hasattr(self._own, "compressor"):
            self._own.compressor = self._zstd.ZstdCompressor(compression_params=self._parameters)
        frame = self._own.compressor.compress(data.numpy())
        if len(frame) >= data.numel():
            out[: data.numel()].copy_(data)
            return data.numel()
        out[: len(frame)].numpy()[:] = memoryview(frame)
        return len(frame)

    def read(self, data: torch.Tensor, out: torch.Tensor) -> None:
        """Fill `out`."""
        if data.is_cuda or out.is_cuda:
            raise CodecError("zstd runs on the CPU: decode in host memory first")
        if data.numel() == out.numel():
            out.copy_(data)
            return
        if not hasattr(self._own, "decompressor"):
            self._own.decompressor = self._zstd.ZstdDecompressor(max_window_size=MAX_WINDOW_BYTES)
        try:
            filled = _fill(self._own.decompressor.stream_reader(data.numpy()), out)
        except self._zstd.ZstdError as cause:
            raise CodecError(f"no zstd frame: {cause}") from cause
        if filled != out.numel():
            raise CodecError(f"zstd frame of {data.numel():,} B ends after {filled:,} of {out.numel():,}")


def _pieces(count: int) -> Iterator[slice]:
    for start in range(0, count, PIECE_NUMBERS):
        yield slice(start, start + PIECE_NUMBERS)


def _fill(reader: Any, out: torch.Tensor) -> int:
    """The bytes read; one more than fit if there are more."""
    memory, filled = out.numpy().data, 0
    while filled < len(memory):
        got = reader.readinto(memory[filled:])
        if not got:
            return filled
        filled += got
    return filled + len(reader.read(1))
