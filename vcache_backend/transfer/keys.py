"""Makes all chunk keys. Only this module decides on the hashed content of a key.

key = namespace prefix (8 bytes) ‖ digest (16 bytes) ‖ rank (2 bytes, big-endian)

The namespace is BLAKE2b-256 of the layout (see `layout`): model, revision, dtype, geometry, sizes
of chunks and parallel groups, and an integration's additions. Digests of different kinds cannot
collide: each kind has its own `person` or namespace. Most are BLAKE2b-128, keyed with the
namespace's fingerprint:

- the engine's, of chunk i (`vcache-chunk-1`): h(i-1), then the tokens of chunk i as little-endian
  uint32; h(-1) is the digest of the salt (`vcache-salt-1`)
- LMCache's (`vcache-lmcache-1`): the count of tag names and values, then the sorted names and
  values, each after its length, then LMCache's hash, signed
- vLLM's: the first 16 bytes of vLLM's hash of the chunk's last block, unchanged
- what stands for vLLM's hash of the tokens behind a prompt's last block: see `tail_hash`
- vLLM's, with a version of the weights, an adapter, or both: those 16 bytes, exclusive or with the
  digest of the version's and the adapter's digests (not keyed, `vcache-mask-1`)
- of a version (256 bits, not keyed, `vcache-weights-1`): its name
- of an adapter (256 bits, not keyed, `vcache-lora-2`): name, path and content, each after its
  length
- of a state's part i (not keyed, `vcache-state-1`): the digest of its chunk, then i, one byte

Through the engine's chain a key stands for its whole prefix. The fingerprint keeps namespaces apart
for all tokens. The salt, which clients may choose, cannot imitate a chain. vLLM's block
hash is a chain, too, and covers the salt, the adapter's name and the multimodal inputs; the chain's
root is in the namespace. LMCache's chunk hash stands for the whole prefix but has only 64 bits, and
a second hash adds no bits. The other digests have 128 bits of a cryptographic hash, so tokens need
not be compared on a hit."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from contextlib import suppress
from hashlib import blake2b
from typing import Any

import numpy as np
import numpy.typing as npt

from vcache_backend.protocol.messages import (
    HASH_BYTES,
    NAMESPACE_BYTES,
    RANK_BYTES,
    ChunkKey,
)
from vcache_backend.transfer.layout import Namespace

Tokens = npt.NDArray[np.uint32]


# ---- the engine's


def as_tokens(tokens: Sequence[int] | Any) -> Tokens:
    """Tokens as a 1-D uint32 array on the host, from a sequence, numpy array or tensor.

    ValueError unless `tokens` has one dimension and holds integers from 0 to 2^32 - 1."""
    if isinstance(tokens, list) and tokens:
        with suppress(TypeError, OverflowError):
            # Takes half of the time of numpy, which looks for a type first.
            return np.frombuffer(array("I", tokens), dtype=np.uint32)
    source: Any = tokens
    try:
        # `Tensor.numpy` takes a third of the time of `np.asarray` of a tensor.
        if hasattr(source, "is_cuda"):
            source = (source.cpu() if source.is_cuda else source).numpy()
        ids = np.asarray(source)
    except Exception as error:  # whatever a foreign object raises
        given, why = type(tokens).__name__, f"{type(error).__name__}: {error}"
        raise ValueError(f"tokens are a {given} that cannot be read: {why}") from error
    if ids.ndim != 1 or (len(ids) and ids.dtype.kind not in "iu"):
        given = f"shape {ids.shape} and type {ids.dtype}"
        raise ValueError(f"tokens have {given}; expected one dimension of integers")
    # One pass finds any bit above 32 bits, and a sign, too.
    if len(ids) and ids.dtype != np.uint32 and int(np.bitwise_or.reduce(ids)) >> 32:
        raise ValueError(f"tokens are {ids.min()} to {ids.max()}; expected 0 to {(1 << 32) - 1}")
    return ids.astype(np.uint32, copy=False)


class TokenHasher:
    """Makes the keys of one rank for the whole chunks of a token sequence, for one namespace and
    chunk size. Any thread.

    The beginning of the previous sequence is not hashed again: a look-up, a retrieve and a store
    hash their prompt once."""

    def __init__(self, namespace: Namespace, chunk_size: int, rank: int = 0) -> None:
        self.chunk_size, self._step = chunk_size, 4 * chunk_size
        self._prefix, self._suffix = namespace.prefix, rank.to_bytes(RANK_BYTES, "big")
        self._root = blake2b(
            key=namespace.fingerprint, digest_size=HASH_BYTES, person=b"vcache-salt-1"
        )
        self._chunk = blake2b(
            key=namespace.fingerprint, digest_size=HASH_BYTES, person=b"vcache-chunk-1"
        )
        self._last: tuple[bytes, bytes, list[ChunkKey]] = b"", b"", []
        """The last sequence's whole chunks, salt and keys."""

    def keys(self, tokens: Sequence[int] | Any, salt: bytes = b"") -> list[ChunkKey]:
        """Make a key for each whole chunk of `tokens` (see `as_tokens`)."""
        ids, size, step = as_tokens(tokens), self.chunk_size, self._step
        known, known_salt, known_keys = self._last
        # Copy, since the caller may write into the array.
        raw = ids[: len(ids) // size * size].astype("<u4", copy=False).tobytes()
        if salt == known_salt and known.startswith(raw):
            return known_keys[: len(raw) // step]
        root, view, keys = self._root.copy(), memoryview(raw), list[ChunkKey]()
        root.update(salt)
        digest = root.digest()
        for start in range(0, len(raw), step):
            link = self._chunk.copy()
            link.update(digest)
            link.update(view[start : start + step])
            digest = link.digest()
            keys.append(ChunkKey(self._prefix + digest + self._suffix))
        self._last = raw, salt, keys
        return list(keys)


# ---- vLLM's


def block_hashes(hashes: Sequence[bytes], *computed_with: bytes) -> bytes:
    """Make the hashes of blocks, `HASH_BYTES` each. hashes: vLLM's, SHA-256. computed_with: digests
    of 32 bytes, for example `adapter_digest`; empty digests do not count."""
    if len(hashes) < 256:  # numpy takes longer, of which little is in the CPU's caches
        made = b"".join([one[:HASH_BYTES] for one in hashes])
    else:
        made = np.frombuffer(b"".join(hashes), dtype=f"V{HASH_BYTES}")[::2].tobytes()
    if not any(computed_with):
        return made
    mask = np.frombuffer(_mask(*filter(None, computed_with)), dtype="<u8")
    masked: npt.NDArray[np.uint64] = np.frombuffer(made, dtype="<u8").reshape(-1, 2) ^ mask
    return masked.tobytes()


def tail_hash(last: bytes, tokens: Sequence[int]) -> bytes:
    """Make what stands for a hash of vLLM's for a prompt's tokens behind its last whole block.
    last: vLLM's hash of this block, SHA-256. tokens: all behind it but the prompt's last one."""
    said = last + array("q", tokens).tobytes()
    return blake2b(said, digest_size=32, person=b"vcache-tail-1").digest()


def _mask(*digests: bytes) -> bytes:
    """What the digests add to each hash of a request, by exclusive or: hashes of different digests
    are as hard to make equal as two hashes of one digest."""
    mask = blake2b(digest_size=HASH_BYTES, person=b"vcache-mask-1")
    for digest in digests:
        mask.update(digest)
    return mask.digest()


def state_keys(keys: Sequence[ChunkKey], parts: int) -> list[ChunkKey]:
    """Make the keys of the states after these chunks' last tokens, `parts` for each chunk, chunk by
    chunk. keys: of rank 0."""
    made = list[ChunkKey]()
    for key in keys:
        for part in range(parts):
            hashed = key[NAMESPACE_BYTES:-RANK_BYTES] + bytes([part])
            digest = blake2b(hashed, digest_size=HASH_BYTES, person=b"vcache-state-1").digest()
            made.append(ChunkKey(key[:NAMESPACE_BYTES] + digest + key[-RANK_BYTES:]))
    return made


def adapter_digest(lora_request: Any, content: str) -> bytes:
    """Make 32 bytes that identify a LoRA adapter by its name, its path and `content` (see
    `Adapters.content`).

    vLLM's block hashes cover at most name and path: enough within one process, but chunks outlive
    the process."""
    digest = blake2b(digest_size=32, person=b"vcache-lora-2")
    for part in (str(lora_request.lora_name), str(lora_request.lora_path), content):
        data = part.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.digest()


# ---- LMCache's

Tags = tuple[tuple[str, Any], ...] | None


class TaggedHashKeys:
    """Makes keys from LMCache's chunk hashes and tags, for one namespace and rank. Any thread. The
    namespace covers the other fields of LMCache's own keys."""

    def __init__(self, namespace: Namespace, rank: int) -> None:
        self._prefix = namespace.prefix
        self._suffix = rank.to_bytes(RANK_BYTES, "big")
        self._root = blake2b(
            key=namespace.fingerprint, digest_size=HASH_BYTES, person=b"vcache-lmcache-1"
        )

    def of_request(self, hashes: Sequence[int], tags: Tags) -> list[ChunkKey]:
        """Make a key for each hash, all with the same tags."""
        prefix, suffix, start, made = self._prefix, self._suffix, self._tagged(tags), []
        for number in hashes:
            digest = start.copy()
            digest.update(number.to_bytes((number.bit_length() >> 3) + 1, "big", signed=True))
            made.append(ChunkKey(prefix + digest.digest() + suffix))
        return made

    def _tagged(self, tags: Tags) -> blake2b:
        """Hash the tags, sorted by name. Empty tags count as None."""
        state = self._root.copy()
        pairs = sorted(
            (name.encode("utf-8", "surrogatepass"), _canonical(value)) for name, value in tags or ()
        )
        parts = [part for pair in pairs for part in pair]
        state.update(len(parts).to_bytes(4, "big"))
        for part in parts:
            state.update(len(part).to_bytes(4, "big") + part)
        return state


def _canonical(value: object) -> bytes:
    if isinstance(value, str):
        return b"s" + value.encode("utf-8", "surrogatepass")
    return f"o{type(value).__name__} {value!r}".encode("utf-8", "surrogatepass")
