"""Sharing in place: the generations of this instance's blocks, and the chunks published in them."""

from __future__ import annotations

import secrets
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from operator import eq
from typing import Any

from vcache_backend.protocol.messages import (
    INSTANCE_BYTES,
    ChunkKey,
    Copies,
    Found,
    Heard,
    InstanceId,
    Publish,
    Reply,
)
from vcache_backend.vram_pool.generations import VOID, Generations, first_odd, packed

from .blocks import GENERATIONS, KVBlocks
from .metadata import PublicationSpec
from .requests import Tracked

MOST_HEARD = 64
"""The most messages with copies that wait for a step. Older messages are dropped, and their chunks
leave the cache later."""


class Publications:
    """Tracks which chunks may be published, and where. Runs in the scheduler's thread, except
    `hear`."""

    def __init__(self, retract: Callable[[int], None], blocks: int, each: int, loads: bool) -> None:
        """retract: has the server void publications with a lower sequence number. blocks: the
        number of blocks in vLLM's pool. each: vLLM's blocks of a chunk. loads: the instance's role
        allows loads. SegmentError if memory for the table is lacking."""
        self._retract = retract
        self.instance = InstanceId(secrets.token_bytes(INSTANCE_BYTES))
        """A random name, new at each start of the engine."""
        self.blocks, self.each = blocks, each
        self.generations = Generations(self.instance, blocks)
        self.sequence = 1
        """The number of the next publication. A reset voids all lower numbers."""
        self.epoch = self.heard = 0
        """The epoch of all publications, and the namespace's epoch in the server's last message."""
        self.copies: deque[list[Copies]] = deque(maxlen=MOST_HEARD if loads else 0)
        """Chunks in other instances, too, as the server has told of them. Empty if this instance
        could not load them again."""
        self.news = False
        """Messages wait for `learn`."""
        self._told: dict[ChunkKey, tuple[int, int, int]] = {}
        """By chunk, the last published place: the chunk's last block, which leaves first, the last
        block's generation, and the first block."""
        self.resets = self.evicted = 0
        """How often all blocks were voided, and how often vLLM has evicted blocks."""
        # The null block included: a block holds a request's bytes only after it was handed out and
        # written.
        self.generations.void_all()

    def watch(self, blocks: KVBlocks) -> None:
        """Watch vLLM's pool, which vLLM shows before the first request. ValueError if pool and KV
        cache differ in size."""
        if blocks.count != self.blocks:
            raise ValueError(f"vLLM's pool has {blocks.count} blocks, its KV cache {self.blocks}")
        blocks.on_taken.append(self._void_taken)
        blocks.before_evicted.append(self._void_evicted)
        blocks.before_reset.append(self.reset)

    def reset(self) -> None:
        """Void all publications, and all chunks that the steps under way compute: the bytes stay,
        but their meaning changes."""
        self._void_all()
        self._retract(self.sequence)

    def hear(self, reply: Reply) -> None:
        """Note the namespace's epoch, and copies in other instances, for the next `learn`. Any
        thread."""
        if not isinstance(reply, Found | Heard):
            return
        if reply.copies:
            self.copies.append(reply.copies)
        # An answer about no keys has no epoch.
        self.heard = reply.epoch if isinstance(reply, Heard) else max(self.heard, reply.epoch)
        if reply.copies or self.heard != self.epoch:
            self.news = True

    def learn(self) -> bool:
        """Act on the epoch that `hear` noted. True if the namespace was reset.

        After a reset other instances find no earlier chunks, though vLLM's own cache may still hit
        them."""
        # First: another thread may note more messages from now on.
        self.news = len(self.copies) > 1
        if (heard := self.heard) == self.epoch:
            return False
        self._void_all()
        self.epoch = heard
        return True

    def on_load(self, blocks: Sequence[int]) -> None:
        """Note that a load will fill these blocks. vLLM caches them only if the load succeeds."""
        self.generations.filled(blocks)

    def stop(self, tracked: Tracked) -> None:
        """Publish no more chunks of the request in its present blocks, nor of a session's next turn
        if the turn completes one of them."""
        tracked.in_place.publishes, tracked.in_place.resets = False, None

    def begin(self, tracked: Tracked, computed: int, partial: bool) -> None:
        """Note the first step of a request, or of a session's turn, with its present blocks.

        computed: how many blocks hold tokens already, from a hit in vLLM's cache or a load. Some of
        these blocks may be void: vLLM keeps blocks over a reset that it refuses. partial: the next
        block holds tokens, too, from the session's last turn or another connector's load."""
        state = tracked.in_place
        state.publishes = not partial or state.resets == self.resets
        state.filled, state.resets = computed, self.resets
        self._read(tracked, computed)

    def fill(self, tracked: Tracked, blocks: int) -> None:
        """Note that the step being planned fills the request's blocks up to number `blocks`. vLLM
        has planned the step, so the blocks are the request's for good."""
        state = tracked.in_place
        if state.resets != self.resets:
            state.publishes = False
        elif state.evicted != self.evicted:
            self._read(tracked, len(state.generations))
        if state.publishes and state.filled < blocks:
            number = self.generations.filled(tracked.store.block_tables[0][state.filled : blocks])
            state.generations += array(GENERATIONS, [number]) * (blocks - state.filled)
            state.filled = blocks

    def complete(
        self, tracked: Tracked, first: int, ready: int, loaded: bool
    ) -> list[PublicationSpec]:
        """Make the publications of the request's chunks [first, ready), which the step completes.

        Leaves out chunks that are published already, and chunks behind a block that was void when
        the request got the block. Readers refuse blocks that were voided later, by the table.
        loaded: the request loaded or hit all of these chunks."""
        each, state, row = self.each, tracked.in_place, tracked.store.block_tables[0]
        stop = min(ready, len(state.generations) // each)
        if stop <= first:
            return []
        if len(self._told) * each > 4 * self.blocks:
            self._forget_gone()
        begin, end = first * each, stop * each
        lasts = slice(begin + each - 1, end, each)
        lie = list(zip(row[lasts], state.generations[lasts], row[begin:end:each], strict=True))
        keys = tracked.lookup.keys[first:stop]
        told = list(map(eq, map(self._told.get, keys), lie))
        self._told.update(zip(keys, lie, strict=True))
        if not any(told):
            return [self._tell(tracked, first, stop, loaded)]
        runs = groupby(range(stop - first), told.__getitem__)
        fresh = [[first + place for place in run] for known, run in runs if not known]
        return [self._tell(tracked, run[0], run[-1] + 1, loaded) for run in fresh]

    def close(self) -> None:
        """Idempotent."""
        self.generations.close()

    # ---- inside

    def _read(self, tracked: Tracked, blocks: int) -> None:
        """Read the generations of the request's first `blocks` blocks. If one of these is void,
        leave all further blocks void."""
        state = tracked.in_place
        state.evicted = self.evicted
        right = packed(self.generations.counters, tracked.store.block_tables[0][:blocks])
        state.generations = array(GENERATIONS, right)
        void = first_odd(right)
        if void >= 0:
            state.publishes = False
            del state.generations[void:]

    def _forget_gone(self) -> None:
        """Forget chunks whose last block, which leaves first, has changed."""
        counters, told = self.generations.counters.data, self._told
        gone = [key for key, (last, generation, _) in told.items() if counters[last] != generation]
        for key in gone:
            del told[key]

    def _tell(self, tracked: Tracked, first: int, stop: int, loaded: bool) -> PublicationSpec:
        """Make a publication of the request's chunks [first, stop)."""
        keys, blocks = tracked.lookup.keys[first:stop], slice(first * self.each, stop * self.each)
        row, generations = tracked.store.block_tables[0], tracked.in_place.generations
        packs = row[blocks].tobytes(), generations[blocks].tobytes()
        publish = Publish(self.instance, self.sequence, keys, *packs, self.epoch)
        self.sequence += 1
        return PublicationSpec(publish, loaded)

    def _void_all(self) -> None:
        self.resets += 1
        self.generations.void_all()

    def _void_taken(self, blocks: Sequence[Any]) -> None:
        counters = self.generations.counters.data
        for block in blocks:
            counters[block.block_id] = VOID

    def _void_evicted(self, blocks: Iterable[int]) -> None:
        """After a failed load vLLM computes into these blocks without handing them out again."""
        self.evicted += 1
        self.generations.void(list(blocks))
