"""Codecs that lose precision: one byte for each number, and a scale for each head's vector of a token.

Payload: the scales, bfloat16, one for each `head_dim` consecutive numbers, then the bytes. A number x is written as x ÷ scale, where
the vector's largest is at most 127 (int8) or 448 (fp8), and read as byte × scale. Zeros stay zeros, also -0.0, which becomes 0.0 in int8.
Scales are rounded up to bfloat16 before they divide, so that rounding them adds nothing but a grid up to 0.8 % coarser.
"""

from __future__ import annotations

from typing import Final

import torch

from vcache_backend.offload.codecs.base import DTYPES, PIECE_NUMBERS, CodecError, Geometry, checked

INTEGERS: Final = {2: torch.int16, 4: torch.int32}
SCALE_BYTES: Final = 2
LEAST_SCALE: Final = torch.finfo(torch.bfloat16).tiny


class Scaled:
    """What int8 and fp8 have in common. CodecError for KV that is no 16- or 32-bit number, or holds inf or NaN."""

    lossless = False

    def __init__(self, name: str, codec_id: int, largest: float, geometry: Geometry) -> None:
        if geometry.dtype not in DTYPES:
            raise CodecError(f"codec {name} is for {', '.join(DTYPES)}; this KV is {geometry.dtype}, use raw or zstd")
        if geometry.head_dim < 1:
            raise CodecError(f"codec {name} needs a head_dim, got {geometry.head_dim}")
        self.name, self.id = name, codec_id
        self._largest, self._head_dim = largest, geometry.head_dim
        self._dtype = DTYPES[geometry.dtype]
        self._integers = INTEGERS[self._dtype.itemsize]
        # Sign off, two finite numbers compare like the integers of their bits; inf and NaN are the integers from that of inf on.
        self._magnitude = torch.iinfo(self._integers).max
        self._inf = int(torch.tensor(float("inf"), dtype=self._dtype).view(self._integers))

    def bound(self, nbytes: int) -> int:
        return self._vectors(nbytes) * (SCALE_BYTES + self._head_dim)

    def encode(self, chunk: torch.Tensor, out: torch.Tensor) -> int:
        vectors = self._vectors(checked(chunk, "the chunk").numel())
        numbers = chunk.view(self._dtype).view(vectors, self._head_dim)
        scales, codes = self._parts(checked(out, "the payload"), vectors)
        for part in self._pieces(numbers):
            piece = numbers[part]
            largest = (piece.view(self._integers) & self._magnitude).amax(1)
            if int(largest.max()) >= self._inf:
                raise CodecError(f"KV holds inf or NaN, which {self.name} cannot write")
            scale = (largest.view(self._dtype).float() / self._largest).clamp_min_(LEAST_SCALE)
            scales[part] = _rounded_up(scale)
            self._write(piece / scales[part].float()[:, None], codes[part])
        return vectors * (SCALE_BYTES + self._head_dim)

    def decode(self, payload: torch.Tensor, out: torch.Tensor) -> None:
        vectors = self._vectors(checked(out, "the chunk").numel())
        if checked(payload, "the payload").numel() != vectors * (SCALE_BYTES + self._head_dim):
            raise CodecError(
                f"{self.name} payload has {payload.numel():,} B, {vectors * (SCALE_BYTES + self._head_dim):,} are due"
            )
        scales, codes = self._parts(payload, vectors)
        if not bool(scales.isfinite().all()):
            raise CodecError(f"{self.name} payload holds a scale that is no number")
        numbers, limits = out.view(self._dtype).view(vectors, self._head_dim), torch.finfo(self._dtype)
        for part in self._pieces(numbers):
            read = self._read(codes[part]).mul_(scales[part].float()[:, None])
            numbers[part] = read.clamp_(limits.min, limits.max)

    def _write(self, scaled: torch.Tensor, codes: torch.Tensor) -> None:
        raise NotImplementedError

    def _read(self, codes: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def _vectors(self, nbytes: int) -> int:
        vector = self._dtype.itemsize * self._head_dim
        if nbytes <= 0 or nbytes % vector:
            raise CodecError(
                f"{nbytes:,} B are no whole vectors of {self._head_dim} x {self._dtype.itemsize} B, as {self.name} needs"
            )
        return nbytes // vector

    def _parts(self, payload: torch.Tensor, vectors: int) -> tuple[torch.Tensor, torch.Tensor]:
        split = vectors * SCALE_BYTES
        codes = payload[split : split + vectors * self._head_dim].view(vectors, self._head_dim)
        return payload[:split].view(torch.bfloat16), codes

    def _pieces(self, numbers: torch.Tensor) -> list[slice]:
        vectors = len(numbers)
        step = vectors if numbers.is_cuda else max(1, PIECE_NUMBERS // self._head_dim)
        return [slice(start, min(start + step, vectors)) for start in range(0, vectors, step)]


class Int8(Scaled):
    """256 even steps between the vector's largest number and its negative."""

    def __init__(self, geometry: Geometry) -> None:
        super().__init__("int8", 4, 127.0, geometry)

    def _write(self, scaled: torch.Tensor, codes: torch.Tensor) -> None:
        codes.view(torch.int8).copy_(scaled.round_())

    def _read(self, codes: torch.Tensor) -> torch.Tensor:
        return codes.view(torch.int8).float()


class Fp8(Scaled):
    """float8_e4m3fn: steps that grow with the number, so small ones of a vector keep three bits."""

    def __init__(self, geometry: Geometry) -> None:
        super().__init__("fp8", 5, 448.0, geometry)

    def _write(self, scaled: torch.Tensor, codes: torch.Tensor) -> None:
        codes.view(torch.float8_e4m3fn).copy_(scaled)

    def _read(self, codes: torch.Tensor) -> torch.Tensor:
        # The bits in their places of a float16, whose exponent has 8 more of bias: torch's own conversion takes 10 times as long
        # on a CPU. The two codes of NaN become 480.
        bits = codes.view(torch.int8).to(torch.int16)
        half = ((bits & 0x7F) << 7) | (bits & -0x8000)
        return half.view(torch.float16).float().mul_(256.0)


def _rounded_up(scale: torch.Tensor) -> torch.Tensor:
    """The next bfloat16 that is not smaller: its bits are the first half of a float32's."""
    return ((scale.view(torch.int32) + 0xFFFF) >> 16).to(torch.int16).view(torch.bfloat16)
