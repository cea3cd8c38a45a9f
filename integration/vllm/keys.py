"""vLLM's block hashes to chunk keys.

key = namespace prefix ‖ the first 16 bytes of vLLM's hash of the chunk's last block ‖ rank. A block hash chains over everything
before it, and has the salt, the LoRA adapter and the multimodal inputs in it; the root of the chain is in the namespace. So the
128 bits stand for the whole prefix with a cryptographic `prefix_caching_hash_algo` (sha256, the default).

Of an adapter vLLM hashes name and path, older releases the name only, which is enough in one process; chunks outlive it. So with an
adapter the 16 bytes are a BLAKE2b of vLLM's hash and of the adapter's name, path and content.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

from vcache_backend.errors import ConfigError
from vcache_backend.metadata_server.messages import KEY_BYTES, RANK_BYTES, ChunkKey
from vcache_backend.transfer.layout import Namespace

HASH_BYTES = 16
_HEAD = KEY_BYTES - RANK_BYTES


class KeyMaker:
    """Keys of rank 0 for one namespace. hashes_per_chunk: how many of vLLM's block hashes a chunk spans."""

    def __init__(self, namespace: Namespace, hashes_per_chunk: int) -> None:
        self._prefix, self._each = namespace.prefix, hashes_per_chunk
        self._suffix = bytes(RANK_BYTES)

    def whole(self, hashes: Sequence[bytes]) -> int:
        """How many whole chunks these blocks are."""
        return len(hashes) // self._each

    def keys(self, hashes: Sequence[bytes], first: int, stop: int, adapter: bytes = b"") -> list[ChunkKey]:
        """Of the chunks [first, stop); `adapter`: see `adapter_digest`. ConfigError for hashes too short to stand for a prefix."""
        each, prefix, suffix = self._each, self._prefix, self._suffix
        made = [prefix + hashes[at][:HASH_BYTES] + suffix for at in range((first + 1) * each - 1, stop * each, each)]
        if made and len(made[-1]) != KEY_BYTES:
            raise ConfigError(
                f"a block hash has {len(hashes[each - 1])} B, {HASH_BYTES} are needed: set --prefix-caching-hash-algo sha256"
            )
        if adapter:
            made = [prefix + blake2b(key, key=adapter, digest_size=HASH_BYTES).digest() + suffix for key in made]
        return [ChunkKey(key) for key in made]


def adapter_digest(lora_request: Any, content: str) -> bytes:
    """32 bytes for an adapter, by its name, its path and what lies there (see `adapters`)."""
    digest = blake2b(digest_size=32, person=b"vcache-lora-2")
    for part in (str(lora_request.lora_name), str(lora_request.lora_path), content):
        data = part.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.digest()


def of_rank(keys: Sequence[ChunkKey], rank: int) -> list[ChunkKey]:
    """The keys of another shard of the same chunks."""
    suffix = rank.to_bytes(RANK_BYTES, "big")
    return [ChunkKey(key[:_HEAD] + suffix) for key in keys]
