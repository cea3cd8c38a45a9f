"""KV events of the pool: which blocks a router may count on beside those in vLLM's own prefix cache.

A worker says what it stored when the server has acknowledged it; vLLM carries that to the scheduler, which publishes a chunk once
every rank has stored its part. Both come at different steps on different workers, so they are counted until they are complete;
vLLM's own count by step (`KVEventAggregator`) publishes a chunk that one rank alone stored and loses one stored in two steps.

`AllBlocksCleared` is never sent: it names no medium, and a router would forget the blocks in vLLM's prefix cache too.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec
from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVCacheEvent, KVConnectorKVEvents
from vllm.v1.core import kv_cache_utils

log = logging.getLogger(__name__)

MEDIUM = "VCACHE"
"""The `medium` of our events, named as vLLM names its own (MEDIUM_GPU = "GPU", MEDIUM_CPU = "CPU"): by where the bytes lie. The
pool spans the GPUs and the host memory of a node, and where in it a chunk lies may change, so it is none of vLLM's."""
LOCALITY = "LOCAL"
"""vLLM's word for memory of the publisher's own node."""
MAX_EVENTS = 1024
"""Chunks that wait at most: in a worker for its next step (some 10 KB each), in the scheduler for the other ranks (the hashes)."""

_FIELDS = {kind: {item.name for item in msgspec.structs.fields(kind)} for kind in (BlockStored, BlockRemoved)}
_Name = tuple[type[Any], tuple[bytes | int, ...]]


class StoredBlocks(msgspec.Struct, frozen=True, kw_only=True):
    """The blocks of one stored chunk as vLLM names them. Made by the scheduler, sent to the workers, picklable.

    `token_ids` are those of all blocks, `len(block_hashes) * block_size`; `parent` is the hash of the block before the first one,
    None at the start of a prompt. `extra_keys`: for each block what else is in its hash (LoRA, images, salt), None for nothing.
    """

    block_hashes: list[bytes]
    parent: bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    lora_name: str | None = None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    session_id: str | None = None


def stored_blocks(request: Any, start: int, end: int, block_size: int) -> StoredBlocks:
    """The blocks of `request` (vLLM's) for its tokens from `start` to `end`, both multiples of `block_size`, the size whose
    hashes `request.block_hashes` has. Scheduler. Raises ValueError if not all of these blocks have a hash."""
    first, last = start // block_size, end // block_size
    hashes = list(request.block_hashes[first:last])
    if start % block_size or end % block_size or len(hashes) != last - first:
        have = len(request.block_hashes)
        raise ValueError(
            f"tokens {start} to {end} are not whole blocks of {block_size} tokens; the request has {have} such blocks"
        )
    return StoredBlocks(
        block_hashes=hashes,
        parent=request.block_hashes[first - 1] if first else None,
        token_ids=list(request.all_token_ids[start:end]),
        block_size=block_size,
        lora_id=request.lora_request.adapter_id if request.lora_request else None,
        lora_name=request.lora_request.name if request.lora_request else None,
        extra_keys=_extra_keys(request, start, end, block_size),
        session_id=getattr(request, "session_id", None),
    )


def _extra_keys(request: Any, start: int, end: int, block_size: int) -> list[tuple[Any, ...] | None]:
    """One entry for each block, as vLLM publishes them for its own: newer ones hash tagged values and publish them bare."""
    keys: list[tuple[Any, ...] | None] = []
    image = 0
    for at in range(start, end, block_size):
        found, image = kv_cache_utils.generate_block_hash_extra_keys(request, at, at + block_size, image)
        keys.append(found)
    untag = getattr(kv_cache_utils, "to_event_extra_keys", None)
    return untag(keys) if untag else keys


def block_stored(blocks: StoredBlocks) -> BlockStored:
    """vLLM's event for a chunk that is now in the pool. Hashes as vLLM publishes its own: 64-bit numbers, or bytes where
    VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES is 0."""
    return _event(
        BlockStored,
        block_hashes=_published(blocks.block_hashes),
        parent_block_hash=None if blocks.parent is None else kv_cache_utils.maybe_convert_block_hash(blocks.parent),
        token_ids=blocks.token_ids,
        block_size=blocks.block_size,
        lora_id=blocks.lora_id,
        lora_name=blocks.lora_name,
        extra_keys=blocks.extra_keys,
        session_id=blocks.session_id,
    )


def block_removed(block_hashes: Sequence[bytes]) -> BlockRemoved:
    """vLLM's event for a chunk that left the pool by this instance's doing (`consume_once`). Evictions are not announced."""
    return _event(BlockRemoved, block_hashes=_published(block_hashes))


def _published(block_hashes: Sequence[bytes]) -> list[bytes | int]:
    return [kv_cache_utils.maybe_convert_block_hash(block) for block in block_hashes]


def _event(kind: type[Any], **values: Any) -> Any:
    """An event with those of the values that this vLLM's struct has a field for."""
    values |= {"medium": MEDIUM, "group_idx": 0, "locality": LOCALITY}
    return kind(**{name: value for name, value in values.items() if name in _FIELDS[kind]})


def _name(event: Any) -> _Name:
    return type(event), tuple(event.block_hashes)


class VCacheKVEvents(KVConnectorKVEvents):  # type: ignore[misc]
    """Events on their way from workers to the scheduler, in order. vLLM puts those of one step's workers together."""

    def __init__(self, events: Sequence[KVCacheEvent] = ()) -> None:
        self._events = list(events)
        self._workers = 1

    def add_events(self, events: list[KVCacheEvent]) -> None:
        self._events.extend(events)

    def aggregate(self) -> VCacheKVEvents:
        """Keep, once, what as many workers said as were put together here. `CommonEvents` does not use it: see the module."""
        count = Counter(map(_name, self._events))
        self._events = list({_name(event): event for event in self._events if count[_name(event)] >= self._workers}.values())
        self._workers = 1
        return self

    def increment_workers(self, count: int = 1) -> None:
        self._workers += count

    def get_all_events(self) -> list[KVCacheEvent]:
        return list(self._events)

    def get_number_of_workers(self) -> int:
        return self._workers

    def clear_events(self) -> None:
        self._events, self._workers = [], 1

    def __repr__(self) -> str:
        return f"VCacheKVEvents({len(self._events)} events, {self._workers} workers)"


class Events:
    """What one worker did to the pool since it was last asked. Any thread; nothing is kept where events are not enabled."""

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled
        self._lock = threading.Lock()
        self._events: dict[_Name, KVCacheEvent] = {}
        self._told = False

    def stored(self, blocks: StoredBlocks) -> None:
        """This rank's part of a chunk is committed, or was in the pool already."""
        if self.enabled:
            self._add(block_stored(blocks))

    def removed(self, block_hashes: Sequence[bytes]) -> None:
        """This rank removed its part of a chunk: `block_hashes` are those of the chunk's `StoredBlocks`."""
        if self.enabled:
            self._add(block_removed(block_hashes))

    def take(self) -> VCacheKVEvents | None:
        """For `get_kv_connector_kv_cache_events`; None if nothing happened."""
        with self._lock:
            if not self._events:
                return None
            taken, self._events = self._events, {}
        return VCacheKVEvents(list(taken.values()))

    def _add(self, event: Any) -> None:
        name = _name(event)
        with self._lock:
            # Once in an interval, for the scheduler counts, and where it happened last.
            self._events.pop(name, None)
            full = len(self._events) >= MAX_EVENTS
            if not full:
                self._events[name] = event
            tell, self._told = full and not self._told, self._told or full
        if tell:
            log.warning("KV events: more than %d in one step; those beyond are not published", MAX_EVENTS)


class CommonEvents:
    """In the scheduler: what all workers stored and what any worker removed. One thread."""

    def __init__(self, workers: int = 1) -> None:
        """`workers`: how many ranks store a part of every chunk."""
        if workers < 1:
            raise ValueError(f"workers is {workers}; at least one rank stores")
        self._workers = workers
        self._told_by: dict[_Name, int] = {}
        self._ready: dict[_Name, KVCacheEvent] = {}

    def collect(self, events: object) -> None:
        """`KVConnectorOutput.kv_cache_events` of a step, of any number of workers; what is not ours is passed over."""
        if not isinstance(events, VCacheKVEvents):
            return
        for event in events.get_all_events():
            kind, hashes = name = _name(event)
            told = self._told_by.pop(name, 0) + 1
            # Without one rank's part a chunk is no use: it is removed when the first rank says so, stored when the last one does.
            if told == (self._workers if kind is BlockStored else 1):
                self._told_by.pop((BlockRemoved if kind is BlockStored else BlockStored, hashes), None)
                self._ready.pop(name, None)
                self._ready[name] = event
            if told < self._workers:
                self._remember(name, told)

    def take(self) -> list[KVCacheEvent]:
        """For `take_events`: the events that have become complete since the last call, in order."""
        ready, self._ready = self._ready, {}
        return list(ready.values())

    def _remember(self, name: _Name, told: int) -> None:
        """Drops the oldest when full: some rank could not do its part, and a chunk that is not announced is only not counted on."""
        if len(self._told_by) >= MAX_EVENTS:
            del self._told_by[next(iter(self._told_by))]
        self._told_by[name] = told
