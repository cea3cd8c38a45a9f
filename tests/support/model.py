"""Keys, bytes and a clock for the tests of the pool."""

from __future__ import annotations

from vcache_backend.protocol.messages import ChunkKey

ALIGNMENT = 256


def chunk_key(number: int, rank: int = 0, namespace: bytes = b"namespac") -> ChunkKey:
    """A key as `hashing` would make it: namespace, hash, rank."""
    return ChunkKey(namespace + number.to_bytes(16, "big") + rank.to_bytes(2, "big"))


def room_of(nbytes: int) -> int:
    """Bytes a slot takes."""
    return (nbytes + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT


class FakeClock:
    """Seconds that pass only when told."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


def pattern(token: int, nbytes: int) -> bytes:
    return (token.to_bytes(8, "little") * (nbytes // 8 + 1))[:nbytes]
