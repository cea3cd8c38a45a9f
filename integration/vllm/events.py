"""KV events of the pool: which blocks a router may count on beside those in vLLM's own prefix cache.

The scheduler remembers what a chunk is called when it orders the chunk's store, or a load that takes it out of the pool; workers
report what came of it (`metadata.Change`). A chunk is published once every rank has stored its part, in whatever steps, and withdrawn
when the first one has removed its own. `AllBlocksCleared` is never sent: it names no medium, and a router would forget the blocks
in vLLM's prefix cache too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVCacheEvent
from vllm.v1.core import kv_cache_utils

from vcache_backend.metadata_server.messages import ChunkKey

from .metadata import Change

MEDIUM = "VCACHE"
"""The `medium` of our events, named as vLLM names its own (MEDIUM_GPU = "GPU", MEDIUM_CPU = "CPU"): by where the bytes lie. The
pool spans the GPUs and the host memory of a node, and where in it a chunk lies may change, so it is none of vLLM's."""
LOCALITY = "LOCAL"
"""vLLM's word for memory of the publisher's own node."""
MOST_WAITING = 4096
"""Chunks that wait for their ranks (some 10 KB each); the oldest are dropped. What is not announced is only not counted on."""

_FIELDS = {kind: {item.name for item in msgspec.structs.fields(kind)} for kind in (BlockStored, BlockRemoved)}


def block_stored(request: Any, start: int, end: int, block_size: int) -> BlockStored:
    """vLLM's event for the blocks of `request` (vLLM's) that are its tokens from `start` to `end`, both multiples of `block_size`, the
    size whose hashes `request.block_hashes` has. Raises ValueError if not all of these blocks have a hash."""
    first, last = start // block_size, end // block_size
    hashes = list(request.block_hashes[first:last])
    if start % block_size or end % block_size or len(hashes) != last - first:
        have = len(request.block_hashes)
        raise ValueError(
            f"tokens {start} to {end} are not whole blocks of {block_size} tokens; the request has {have} such blocks"
        )
    lora = request.lora_request
    return _event(
        BlockStored,
        block_hashes=_published(hashes),
        parent_block_hash=_published(request.block_hashes[first - 1 : first])[0] if first else None,
        token_ids=list(request.all_token_ids[start:end]),
        block_size=block_size,
        lora_id=lora.adapter_id if lora else None,
        lora_name=lora.name if lora else None,
        extra_keys=_extra_keys(request, start, end, block_size),
        session_id=getattr(request, "session_id", None),
    )


def block_removed(block_hashes: Sequence[bytes]) -> BlockRemoved:
    """vLLM's event for a chunk that left the pool by this instance's doing (`consume_once`). Evictions are not announced."""
    return _event(BlockRemoved, block_hashes=_published(block_hashes))


def _published(block_hashes: Sequence[bytes]) -> list[bytes | int]:
    """As vLLM publishes its own: 64-bit numbers, or bytes where VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES is 0."""
    return [kv_cache_utils.maybe_convert_block_hash(block) for block in block_hashes]


def _extra_keys(request: Any, start: int, end: int, block_size: int) -> list[tuple[Any, ...] | None]:
    """One entry for each block, as vLLM publishes them for its own: newer ones hash tagged values and publish them bare."""
    keys: list[tuple[Any, ...] | None] = []
    image = 0
    for at in range(start, end, block_size):
        found, image = kv_cache_utils.generate_block_hash_extra_keys(request, at, at + block_size, image)
        keys.append(found)
    untag = getattr(kv_cache_utils, "to_event_extra_keys", None)
    return untag(keys) if untag else keys


def _event(kind: type[Any], **values: Any) -> Any:
    """An event with those of the values that this vLLM's struct has a field for."""
    values |= {"medium": MEDIUM, "group_idx": 0, "locality": LOCALITY}
    return kind(**{name: value for name, value in values.items() if name in _FIELDS[kind]})


class Announcer:
    """What all ranks stored and what any rank removed. In the scheduler, one thread."""

    def __init__(self, ranks: int) -> None:
        """ranks: how many store a part of every chunk."""
        self._ranks = ranks
        self._events: dict[Change, KVCacheEvent] = {}
        self._reported: dict[Change, set[int]] = {}
        self._ready: list[KVCacheEvent] = []

    def expect(self, key: ChunkKey, event: BlockStored | BlockRemoved) -> None:
        """Workers are asked to store or remove the chunk: this is what to publish when they have. key: of rank 0."""
        _put(self._events, Change(key, isinstance(event, BlockStored)), event)

    def note(self, changes: Mapping[int, Sequence[Change]]) -> None:
        """What workers did, by rank, in order."""
        for rank, of_rank in changes.items():
            for change in of_rank:
                reported = self._reported.pop(change, set()) | {rank}
                if len(reported) == (self._ranks if change.stored else 1):
                    self._reported.pop(Change(change.key, not change.stored), None)
                    event = self._events.pop(change, None)
                    self._ready += [event] if event is not None else []
                if len(reported) < self._ranks:
                    _put(self._reported, change, reported)

    def take(self) -> list[KVCacheEvent]:
        """For `take_events`: the events that have become complete since the last call, in order."""
        ready, self._ready = self._ready, []
        return ready


def _put(waiting: dict[Change, Any], change: Change, value: Any) -> None:
    if len(waiting) >= MOST_WAITING:
        del waiting[next(iter(waiting))]
    waiting[change] = value
