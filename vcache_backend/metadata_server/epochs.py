"""Which epoch each namespace is in. Pure."""

from __future__ import annotations

import secrets

from vcache_backend.metadata_server.messages import NAMESPACE_BYTES, ChunkKey

MAX_EPOCHS = 256
"""Namespaces with an epoch of their own; one more, and all are raised."""
_RANDOM_BITS = 40


class Epochs:
    """Which epoch each namespace is in: a reset raises it, and nothing that was offloaded in an earlier one is found any more.

    0 until the first reset, so that nodes which were never reset share what they offload.

    After that a count and 40 random bits: it grows, and no other node, whose instances may have other weights by then, has the same
    one.
    """

    def __init__(self) -> None:
        self._others = 0
        self._of: dict[bytes, int] = {}

    def of(self, keys: list[ChunkKey]) -> int:
        """The epoch of these keys' namespace, which they have in common."""
        return self._of.get(keys[0][:NAMESPACE_BYTES], self._others) if self._of and keys else self._others

    def advance(self, namespace: bytes) -> None:
        """Raise the epoch of a namespace, or of all with b""."""
        if len(namespace) < NAMESPACE_BYTES or (namespace not in self._of and len(self._of) == MAX_EPOCHS):
            self._others, self._of = _next(max([self._others, *self._of.values()])), {}
        else:
            self._of[namespace] = _next(self._of.get(namespace, self._others))

    def all(self) -> dict[bytes, int]:
        """By namespace; b"": of every one that is not among them."""
        return {b"": self._others} | self._of

    def restore(self, epochs: dict[bytes, int]) -> None:
        """Take over what `all` said."""
        self._of = dict(epochs)
        self._others = self._of.pop(b"", 0)


def _next(epoch: int) -> int:
    return ((epoch >> _RANDOM_BITS) + 1) << _RANDOM_BITS | secrets.randbits(_RANDOM_BITS)
