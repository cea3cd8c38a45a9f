"""The epoch of each namespace. Pure."""

from __future__ import annotations

import secrets

from vcache_backend.metadata_server.records import MAX_EPOCHS
from vcache_backend.protocol.messages import NAMESPACE_BYTES, ChunkKey

_RANDOM_BITS = 40


class Epochs:
    """The epoch of each namespace. After a reset, which raises the epoch, earlier offloaded chunks
    are not found.

    An epoch is 0 until the first reset, so nodes without resets share offloaded chunks. Later
    epochs consist of a count and 40 random bits. Epochs grow, and no two nodes, whose weights may
    differ after resets, have the same epoch."""

    def __init__(self) -> None:
        self._others = 0
        self._of: dict[bytes, int] = {}

    def of(self, keys: list[ChunkKey]) -> int:
        """The epoch of the keys' namespace. All keys must have the same namespace."""
        namespace = keys[0][:NAMESPACE_BYTES] if keys else b""
        return self._of.get(namespace, self._others)

    def advance(self, namespace: bytes) -> None:
        """Raise the epoch of a namespace, or of all namespaces with b""."""
        if len(namespace) < NAMESPACE_BYTES or (
            namespace not in self._of and len(self._of) >= MAX_EPOCHS
        ):
            self._others = _next(max([self._others, *self._of.values()]))
            self._of = {}
        else:
            self._of[namespace] = _next(self._of.get(namespace, self._others))

    def all(self) -> dict[bytes, int]:
        """All epochs by namespace. b"" stands for every namespace that is not listed."""
        return {b"": self._others} | self._of

    def restore(self, epochs: dict[bytes, int]) -> None:
        self._of = dict(epochs)
        self._others = self._of.pop(b"", 0)


def _next(epoch: int) -> int:
    return ((epoch >> _RANDOM_BITS) + 1) << _RANDOM_BITS | secrets.randbits(_RANDOM_BITS)
