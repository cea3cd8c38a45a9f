"""KV events of the pool. They name chunks on which a router may count, beside the blocks in vLLM's
prefix cache.

The scheduler prepares a chunk's event when it orders the chunk's store, or a load after which the
chunk may be stored. Workers report stored chunks. Once every rank has stored a chunk, it is
published as `BlockStored`. Every heartbeat asks the server which published chunks still exist
(`Announcer.check`); missing chunks are published as `BlockRemoved`. When vLLM clears its prefix
cache, it sends `AllBlocksCleared`, which names no medium."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import compress
from typing import Any

from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVCacheEvent
from vllm.v1.core import kv_cache_utils

from vcache_backend.protocol.messages import MAX_KEYS, ChunkKey, of_rank

POOL_MEDIUM = "CPU"
"""The pool's name in events: the name by which vLLM, Dynamo and llm-d know memory behind a load."""
LOCALITY = "LOCAL"
"""vLLM's word for memory of the publisher's own node."""
MOST_WAITING = 4096
"""The most chunks that wait for all ranks (some 10 KB each). Older chunks are never announced, and
routers do not count on them."""


def block_stored(
    request: Any, start: int, end: int, block_size: int, spec_kind: str | None = None
) -> BlockStored:
    """vLLM's event `BlockStored` for a chunk, the tokens [start, end) of vLLM's `request`, in the
    pool: one block of the chunk's size, since a part of a chunk is never found.

    Its hash is that of the chunk's last block in vLLM's prefix cache, and its parent the chunk
    before it. The tokens must be whole blocks with hashes. block_size: tokens of a hash in
    `request.block_hashes`. spec_kind: see `compat.spec_kind`."""
    lora = request.lora_request
    extra, _ = kv_cache_utils.generate_block_hash_extra_keys(request, start, end, 0)
    return BlockStored(
        medium=POOL_MEDIUM,
        group_idx=0,
        locality=LOCALITY,
        block_hashes=[_published(request, end // block_size)],
        parent_block_hash=_published(request, start // block_size) if start else None,
        token_ids=list(request.all_token_ids[start:end]),
        block_size=end - start,
        lora_id=lora.adapter_id if lora else None,
        lora_name=lora.name if lora else None,
        # Without the tags that vLLM adds for hashing.
        extra_keys=kv_cache_utils.to_event_extra_keys([extra]),
        kv_cache_spec_kind=spec_kind,
        session_id=request.session_id,
    )


def _published(request: Any, blocks: int) -> bytes | int:
    """The hash of the request's first `blocks` blocks as vLLM publishes it: a 64-bit number, or
    bytes if VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES is 0."""
    published: bytes | int = kv_cache_utils.maybe_convert_block_hash(
        request.block_hashes[blocks - 1]
    )
    return published


class Announcer:
    """Publishes KV events for chunks that all ranks have stored, and for chunks that are gone. Keys
    are rank 0's.

    Runs in the scheduler's thread, except `check`."""

    def __init__(self, ranks: int) -> None:
        """ranks: the number of ranks that store a part of every chunk."""
        self._ranks = ranks
        self._events: dict[ChunkKey, BlockStored] = {}
        self._reported: dict[ChunkKey, set[int]] = {}
        self._published: dict[ChunkKey, BlockRemoved] = {}
        """The event to send once the chunk is gone. Each publication of a chunk makes a new object.
        """
        self._turns = deque[ChunkKey]()
        """Published keys in the order of their next check, each once. Keys being checked, and keys
        of gone chunks, are not in it."""
        self._gone = deque[tuple[ChunkKey, BlockRemoved]]()
        self._ready: list[KVCacheEvent] = []

    def expect(self, key: ChunkKey, event: BlockStored) -> None:
        """Note that workers may store the chunk, and publish `event` once all ranks have stored
        it."""
        _put(self._events, key, event)

    def note(self, stored: Mapping[int, Sequence[ChunkKey]]) -> None:
        """Note stored chunks, by rank."""
        for rank, keys in stored.items():
            for key in keys:
                reported = self._reported.pop(key, set()) | {rank}
                if len(reported) < self._ranks:
                    _put(self._reported, key, reported)
                elif (event := self._events.pop(key, None)) is not None:
                    self._ready.append(event)
                    if key not in self._published:
                        self._turns.append(key)
                    self._published[key] = BlockRemoved(
                        event.block_hashes, event.medium, group_idx=0, locality=LOCALITY
                    )

    def check(self, contains: Callable[[list[ChunkKey]], list[bool]]) -> None:
        """Check which published chunks still exist, some thousand in turn. Runs in the
        client's background thread.

        contains: asks the server. Its errors go to the caller."""
        # The server takes 4 ms for so many keys.
        left = min(len(self._turns), 16_384 // self._ranks)
        for begin in range(0, left, MAX_KEYS):
            # Each request has its own deadline; a late answer ends the scheduler's connection.
            keys = [self._turns.popleft() for _ in range(min(left - begin, MAX_KEYS))]
            removals, present = [self._published[key] for key in keys], [True] * len(keys)
            try:
                parts = [contains(of_rank(keys, rank)) for rank in range(self._ranks)]
                present = [all(whole) for whole in zip(*parts, strict=True)]
            finally:
                self._turns.extend(compress(keys, present))
            gone = [not exists for exists in present]
            self._gone.extend(compress(zip(keys, removals, strict=True), gone))

    def renewed(self) -> Announcer:
        """Make an announcer for other keys. Its first events take back all that this announcer has
        published."""
        made = Announcer(self._ranks)
        made._ready = [*self.take(), *self._published.values()]
        return made

    def take(self) -> list[KVCacheEvent]:
        """The events since the last call, in order. For vLLM's `take_events`."""
        while self._gone:
            key, event = self._gone.popleft()
            # The chunk may have been stored and published again since the server was asked.
            if self._published.get(key) is event:
                del self._published[key]
                self._ready.append(event)
            else:
                self._turns.append(key)
        ready = self._ready
        self._ready = []
        return ready


def _put(waiting: dict[ChunkKey, Any], key: ChunkKey, value: Any) -> None:
    if len(waiting) >= MOST_WAITING:
        del waiting[next(iter(waiting))]
    waiting[key] = value
