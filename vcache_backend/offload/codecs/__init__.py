"""How the bytes of a chunk are written in the store: as they are, smaller without loss, or smaller with loss. See docs/codecs.md."""

from __future__ import annotations

from vcache_backend.offload.codecs.base import Codec, CodecError, Geometry
from vcache_backend.offload.codecs.lossless import Planes, Raw, Zstd
from vcache_backend.offload.codecs.scaled import Fp8, Int8

__all__ = ["NAMES", "Codec", "CodecError", "Geometry", "make"]

NAMES = ("raw", "zstd", "planes", "int8", "fp8")


def make(name: str, geometry: Geometry) -> Codec:
    """The codec of that name (of `NAMES`) for such KV. CodecError where it cannot be for this KV, or its library is missing."""
    match name:
        case "raw":
            return Raw()
        case "zstd":
            return Zstd()
        case "planes":
            return Planes(geometry)
        case "int8":
            return Int8(geometry)
        case "fp8":
            return Fp8(geometry)
        case _:
            raise CodecError(f"no codec {name!r}; there are {', '.join(NAMES)}")
