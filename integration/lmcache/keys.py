"""LMCache's keys to ours.

key = namespace prefix ‖ BLAKE2b-128(tags, chunk hash) ‖ rank, keyed with the namespace's fingerprint and under a `person` of its
own, so that it never equals a key of `vcache_backend.transfer.keys`. LMCache's key says model, dtype and sizes too: those, and what it
leaves out, are in the namespace. Its chunk hash stands for the whole prefix but has 64 bits only; the digest cannot mend that.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any, Protocol

from vcache_backend.metadata_server.messages import RANK_BYTES, ChunkKey
from vcache_backend.transfer.layout import Namespace

from .scope import TAG_NAME

HASH_BYTES = 16
SCOPE_TAG = TAG_NAME
"""The name of our tag: a request's scope (see `scope`)."""

Tags = tuple[tuple[str, Any], ...] | None


class CacheKey(Protocol):
    """What we read of LMCache's `CacheEngineKey`."""

    chunk_hash: int
    tags: Tags


class KeyMaker:
    """Keys of chunks for one namespace and rank. Any thread."""

    def __init__(self, namespace: Namespace, rank: int) -> None:
        self._prefix = namespace.prefix
        self._suffix = rank.to_bytes(RANK_BYTES, "big")
        self._root = blake2b(key=namespace.fingerprint, digest_size=HASH_BYTES, person=b"vcache-lmcache-1")

    def keys(self, keys: Sequence[CacheKey]) -> list[ChunkKey]:
        """One key for each of `keys`. ValueError for a key of a single layer, which is no chunk."""
        if keys and getattr(keys[0], "layer_id", None) is not None:
            raise ValueError("a key of one layer: LMCache runs with use_layerwise, which vcache does not support")
        prefix, suffix = self._prefix, self._suffix
        tags: Tags = None
        start, texts, made = self._tagged(None), True, []
        for key in keys:
            # Equal text is the same text; 1 and True are equal too but are not written alike, so such tags are not kept.
            if not texts or key.tags != tags:
                tags = key.tags
                start, texts = self._tagged(tags), tags is None or all(type(value) is str for _, value in tags)
            digest, number = start.copy(), key.chunk_hash
            digest.update(number.to_bytes((number.bit_length() >> 3) + 1, "big", signed=True))
            made.append(ChunkKey(prefix + digest.digest() + suffix))
        return made

    def _tagged(self, tags: Tags) -> blake2b:
        """The hash state after the tags, in the order of their names; no tags and none at all are the same."""
        state = self._root.copy()
        pairs = sorted((name.encode("utf-8", "surrogatepass"), _canonical(value)) for name, value in tags or ())
        parts = [part for pair in pairs for part in pair]
        state.update(len(parts).to_bytes(4, "big"))
        for part in parts:
            state.update(len(part).to_bytes(4, "big") + part)
        return state


def scoped(key: CacheKey) -> bool:
    """Does the key carry our tag? One without it comes from a scheduler that did not load our hook."""
    return any(name == SCOPE_TAG for name, _ in key.tags or ())


def _canonical(value: object) -> bytes:
    if isinstance(value, str):
        return b"s" + value.encode("utf-8", "surrogatepass")
    return f"o{type(value).__name__} {value!r}".encode("utf-8", "surrogatepass")
