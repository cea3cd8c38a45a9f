"""The format of an object in the store: a header that identifies the bytes, then the chunk's bytes
in a codec's form.

The header has 128 bytes, little-endian: magic `VCKV`, format version, codec, decoded and encoded
length, xxh3-64 of the payload, chunk key, fingerprint, and at the end xxh3-64 of all earlier
fields. Stores are shared, lose power, and contain objects of other versions, so an object counts
only if this version would write the same header, bit by bit. xxh3 finds damage but not forgery: the
store must be trusted."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final

import numpy as np
import numpy.typing as npt

from vcache_backend.errors import ConfigError, VCacheError
from vcache_backend.metadata_server.messages import KEY_BYTES, NAMESPACE_BYTES, ChunkKey

Buffer = npt.NDArray[np.uint8]
"""Contiguous host memory, 1-D."""

HEADER_BYTES: Final = 128
MAGIC: Final = b"VCKV"
VERSION: Final = 1
NAME_PREFIX: Final = f"vcache{VERSION}/"
FINGERPRINT_BYTES: Final = 32

_FIELDS = struct.Struct(f"<4sHHQQQ{KEY_BYTES}s6x{FINGERPRINT_BYTES}s24x")
_DIGEST = struct.Struct("<Q")
_PAYLOAD_DIGEST_AT: Final = 24
assert _FIELDS.size + _DIGEST.size == HEADER_BYTES


class BadObject(VCacheError):
    """The object is not the requested one, or not whole."""


def name(key: ChunkKey, epoch: int = 0) -> str:
    """Name the object of a chunk stored in `epoch`.

    A reset raises the epoch. Nobody asks for objects of a process that missed the reset."""
    namespace, rest = key[:NAMESPACE_BYTES].hex(), key[NAMESPACE_BYTES:].hex()
    return f"{NAME_PREFIX}{namespace}.{epoch:x}/{rest}"


def digest(data: Buffer | bytes) -> int:
    """xxh3-64, computed without the GIL: 41 GB/s on the development machine for 32 MiB in the
    cache. ConfigError if xxhash is missing."""
    try:
        from xxhash import xxh3_64_intdigest
    except ImportError as cause:
        raise ConfigError(
            "the offload tier needs xxhash: pip install 'vcache-backend[mooncake]'"
        ) from cause
    value: int = xxh3_64_intdigest(data if isinstance(data, bytes) else data.data)
    return value


@dataclass(frozen=True)
class Format:
    """The format of one namespace's objects. payload_bytes: the size of an encoded chunk of
    `chunk_bytes` bytes."""

    fingerprint: bytes
    codec_id: int
    chunk_bytes: int
    payload_bytes: int

    @property
    def object_bytes(self) -> int:
        return HEADER_BYTES + self.payload_bytes

    def seal(self, buffer: Buffer, key: ChunkKey, epoch: int) -> None:
        """Write the header of the payload at `buffer[HEADER_BYTES:]`. Reads the payload once."""
        payload_digest = digest(buffer[HEADER_BYTES : self.object_bytes])
        buffer[:HEADER_BYTES] = np.frombuffer(self._header(key, epoch, payload_digest), np.uint8)

    def check(self, buffer: Buffer, got_bytes: int, key: ChunkKey, epoch: int) -> None:
        """Raise BadObject unless the first `got_bytes` bytes are exactly this object. Reads the
        payload once, and nothing beyond `got_bytes`."""
        if got_bytes != self.object_bytes:
            raise BadObject(f"object of {key.hex()} has {got_bytes:,} B, not {self.object_bytes:,}")
        header = buffer[:HEADER_BYTES].tobytes()
        (stored,) = _DIGEST.unpack_from(header, _PAYLOAD_DIGEST_AT)
        if header != self._header(key, epoch, stored):
            why = "damaged, or another chunk's, model's, codec's or version's"
            raise BadObject(f"object of {key.hex()}: {why}: {header.hex()}")
        if digest(buffer[HEADER_BYTES:got_bytes]) != stored:
            why = f"the checksum of its {self.payload_bytes:,} B does not match"
            raise BadObject(f"object of {key.hex()}: {why}")

    def _header(self, key: ChunkKey, epoch: int, payload_digest: int) -> bytes:
        sizes = self.chunk_bytes, self.payload_bytes
        fields = _FIELDS.pack(
            MAGIC, VERSION, self.codec_id, *sizes, payload_digest, key, self._in_epoch(epoch)
        )
        return fields + _DIGEST.pack(digest(fields))

    def _in_epoch(self, epoch: int) -> bytes:
        """The fingerprint in the headers of objects of `epoch`."""
        if not epoch:
            return self.fingerprint
        number = epoch.to_bytes(8, "big")
        return blake2b(
            number, key=self.fingerprint, digest_size=FINGERPRINT_BYTES, person=b"vcache-epoch-1"
        ).digest()
