"""Tokens to chunk keys: a prefix chain of keyed BLAKE2b, one digest a chunk.

key(i) = namespace prefix ‖ h(i) ‖ rank, with h(i) = BLAKE2b-128(h(i-1) ‖ tokens of chunk i) and h(-1) = BLAKE2b-128(salt), both
keyed with the namespace's fingerprint and personalised for their purpose (the `person` of the reference implementation).
Tokens are little-endian uint32; a chunk with one that does not fit is int64 throughout, under a `person` of its own. The chain
makes a key stand for its whole prefix; the fingerprint keeps namespaces apart whatever the tokens are; the salt, which clients
of a tenant may choose, cannot imitate a chain. 128 bits of a cryptographic hash: tokens need not be compared on a hit.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import numpy as np
import numpy.typing as npt

from vcache_backend.metadata_server.messages import RANK_BYTES, ChunkKey
from vcache_backend.transfer.layout import Namespace

HASH_BYTES = 16


def as_tokens(tokens: Sequence[int] | Any) -> npt.NDArray[Any]:
    """A 1-D sequence, numpy array or tensor of 64-bit signed integers (on a GPU: copied to the host). ValueError for anything else."""
    there: Any = tokens
    try:
        ids = np.asarray(there.cpu() if getattr(there, "is_cuda", False) else there)
    except Exception as error:  # whatever a foreign object raises
        raise ValueError(f"tokens are a {type(tokens).__name__} that cannot be read: {type(error).__name__}: {error}") from error
    if ids.ndim != 1 or (len(ids) and ids.dtype.kind not in "iu"):
        raise ValueError(f"tokens have shape {ids.shape} and type {ids.dtype}; expected one dimension of integers")
    if len(ids) and ids.dtype == np.uint64 and int(ids.max()) >= 1 << 63:
        # As int64, which is what is hashed, it would be another token.
        raise ValueError(f"token {ids.max()} does not fit a 64-bit signed integer")
    return ids


class TokenHasher:
    """Keys of the whole chunks of a token sequence, for one namespace, chunk size and rank. Stateless; any thread."""

    def __init__(self, namespace: Namespace, chunk_size: int, rank: int = 0) -> None:
        self.chunk_size = chunk_size
        self._prefix = namespace.prefix
        self._suffix = rank.to_bytes(RANK_BYTES, "big")
        self._root = blake2b(key=namespace.fingerprint, digest_size=HASH_BYTES, person=b"vcache-salt-1")
        self._narrow = blake2b(key=namespace.fingerprint, digest_size=HASH_BYTES, person=b"vcache-chunk-1")
        self._wide = blake2b(key=namespace.fingerprint, digest_size=HASH_BYTES, person=b"vcache-wide-1")

    def keys(self, tokens: Sequence[int] | Any, salt: bytes = b"") -> list[ChunkKey]:
        """One key for each whole chunk of `tokens` (see `as_tokens`); a tail shorter than a chunk has none."""
        ids = as_tokens(tokens)
        root = self._root.copy()
        root.update(salt)
        digest, keys = root.digest(), []
        for template, chunk in self._chunks(ids):
            link = template.copy()
            link.update(digest)
            link.update(chunk)
            digest = link.digest()
            keys.append(ChunkKey(self._prefix + digest + self._suffix))
        return keys

    def _chunks(self, ids: npt.NDArray[Any]) -> list[tuple[blake2b, memoryview]]:
        """The bytes of each whole chunk, narrow if all its tokens fit, and the hash state for their width."""
        size = self.chunk_size
        starts = range(0, len(ids) - size + 1, size)
        narrow = np.ascontiguousarray(ids.astype("<u4", copy=False))
        if np.array_equal(narrow, ids):
            raw = narrow.data.cast("B") if len(narrow) else memoryview(b"")
            return [(self._narrow, raw[4 * start : 4 * (start + size)]) for start in starts]
        wide = np.ascontiguousarray(ids, dtype="<i8")
        chunks = []
        for start in starts:
            part = slice(start, start + size)
            fits = np.array_equal(narrow[part], ids[part])
            chunks.append((self._narrow, narrow[part].data) if fits else (self._wide, wide[part].data))
        return chunks
