"""What a codec is."""

from __future__ import annotations

from typing import Final, NamedTuple, Protocol

import torch

from vcache_backend.errors import VCacheError

DTYPES: Final = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
PIECE_NUMBERS: Final = 1 << 20
"""On a CPU, at a time: what lies between stays in the cache. Smaller ones wait for the GIL more often."""


class CodecError(VCacheError):
    """These bytes cannot be encoded or decoded by this codec, or this model's KV cannot; says why."""


class Geometry(NamedTuple):
    """What the bytes of a chunk are: numbers of `dtype` (torch's name of it), `head_dim` in a row for each head of a token."""

    dtype: str
    head_dim: int


class Codec(Protocol):
    """Bytes of a chunk to bytes of an object's payload and back. Any number of threads.

    Tensors are contiguous, one dimension of uint8, on 16-byte boundaries, and do not overlap. Host memory for all; those that need
    no zstd take tensors of a GPU, too. Raises CodecError, and nothing else. Whoever decodes has checked that the payload is whole:
    damage is found where it would write elsewhere or crash, and not always where it would give other numbers.
    """

    name: str
    id: int
    """In the header of an object."""
    lossless: bool

    def bound(self, nbytes: int) -> int:
        """At most so many bytes come of `nbytes`. CodecError where no chunk has so many."""
        ...

    def encode(self, chunk: torch.Tensor, out: torch.Tensor) -> int:
        """Write the payload to the beginning of `out`, which has room for `bound`, and return its bytes."""
        ...

    def decode(self, payload: torch.Tensor, out: torch.Tensor) -> None:
        """Fill `out`, which has the length of the chunk. After an error its contents are undefined."""
        ...


def checked(tensor: torch.Tensor, what: str) -> torch.Tensor:
    """The tensor, if it is of the kind that codecs take."""
    if tensor.dtype != torch.uint8 or tensor.ndim != 1 or not tensor.is_contiguous() or tensor.storage_offset() % 16:
        raise CodecError(
            f"{what} must be contiguous uint8 of one dimension on a 16-byte boundary; it is {tensor.dtype}, {tuple(tensor.shape)}, "
            f"strides {tensor.stride()}, offset {tensor.storage_offset()}"
        )
    return tensor
