"""The scheduler's half of sharing in place: the generations of this instance's blocks, and the
chunks published in them."""

from __future__ import annotations

import secrets
from array import array
from collections.abc import Callable, Sequence
from itertools import groupby
from operator import eq

from vcache_backend.protocol.messages import (
    INSTANCE_BYTES,
    ChunkKey,
    Found,
    Heard,
    InstanceId,
    Publish,
)
from vcache_backend.vram_pool.generations import (
    Generations,
    GenerationView,
    first_odd,
    packed,
)

from ..metadata import PublicationSpec
from ..scheduler.tracked import NEVER, Tracked
from .block_pool import GENERATIONS, KVBlocks, ResidentPool
from .duplicates import Duplicates


class Publications:
    """Tracks which chunks may be published, and where. Runs in the scheduler's thread, except
    `hear`.

    instance: a random name, new at each start of the engine. each: vLLM's blocks of a chunk.
    sequence: the number of the next publication; a reset voids all lower numbers. epoch: the epoch
    of all publications. heard: the namespace's epoch in the server's last message. news: messages
    wait for `learn`."""

    def __init__(self, blocks: int, each: int, loads: bool) -> None:
        """blocks: the number of blocks in vLLM's pool. each: vLLM's blocks of a chunk. loads: the
        instance's role allows loads. SegmentError if memory for the table is lacking."""
        self._loads = loads
        self.instance = InstanceId(secrets.token_bytes(INSTANCE_BYTES))
        self.blocks, self.each, self.sequence = blocks, each, 1
        self.epoch = self.heard = 0
        self.news = False
        self.generations = Generations(self.instance, blocks)
        self.retract: Callable[[int], None] = lambda sequence: None
        """Called on a reset: voids publications with a lower sequence."""
        self._told: dict[ChunkKey, tuple[int, int, int]] = {}
        """By chunk, the last published place: the chunk's last block, which leaves first, the last
        block's generation, and the first block."""
        self._pool: ResidentPool | None = None
        self.duplicates: Duplicates | None = None
        """Made when vLLM has shown its pool, if the instance may load chunks again."""
        self.reachable: Callable[[], bool] = lambda: False
        """Whether the server can be asked where chunks are."""
        self.view: Callable[[bytes], GenerationView | None] = lambda instance: None
        """Returns another instance's generations; None if the instance is gone, or without a
        server."""

    @property
    def watches(self) -> bool:
        """Whether vLLM has shown its block pool. Without the pool, the blocks' contents are
        unknown."""
        return self._pool is not None

    def watch(self, pool: KVBlocks) -> None:
        """Watch vLLM's pool, which vLLM shows before the first request. ValueError if pool and KV
        cache differ in size."""
        if pool.count != self.blocks:
            raise ValueError(f"vLLM's pool has {pool.count} blocks, its KV cache {self.blocks}")
        if self._loads:
            self.duplicates = Duplicates(
                pool,
                self.generations,
                self.each,
                lambda instance: self.view(instance),
                lambda: self.reachable(),
            )
            pool.give_way = self.duplicates.give_way
        self._pool = ResidentPool(pool, self.generations, self._reset)

    def reset(self) -> None:
        """Void all publications, and all chunks that the steps under way compute."""
        self._void_all()
        self._reset()

    def hear(self, reply: Found | Heard) -> None:
        """Note the namespace's epoch, and copies in other instances, for the next `learn`. Any
        thread."""
        if self.duplicates is not None and reply.copies:
            self.duplicates.hear(reply.copies)
        # An answer about no keys has no epoch.
        self.heard = reply.epoch if isinstance(reply, Heard) else max(self.heard, reply.epoch)
        if reply.copies or self.heard != self.epoch:
            self.news = True

    def learn(self) -> bool:
        """Act on the next message that `hear` noted. True if the namespace was reset.

        After a reset other instances find no earlier chunks, though vLLM's own cache may still hit
        them."""
        # First: another thread may note more messages from now on.
        self.news = False
        if self.duplicates is not None and self.duplicates.learn():
            self.news = True
        heard = self.heard
        if heard == self.epoch:
            return False
        self._void_all()
        self.epoch = heard
        return True

    def on_load(self, blocks: Sequence[int]) -> None:
        """Note that a load will fill these blocks. vLLM caches them only if the load succeeds."""
        if self._pool is not None:
            self.generations.filled(blocks)

    def stop(self, tracked: Tracked) -> None:
        """Publish no more chunks of the request in its present blocks, nor of a session's next turn
        if the turn completes one of them."""
        tracked.resident.filled, tracked.resident.resets = NEVER, -1

    def begin(self, tracked: Tracked, computed: int, partial: bool) -> None:
        """Note the first step of a request, or of a session's turn, with its present blocks.

        computed: how many blocks hold tokens already, from a hit in vLLM's cache or a load. Some of
        these blocks may be void: vLLM keeps blocks over a reset that it refuses. partial: the next
        block holds tokens, too, from the session's last turn or another connector's load."""
        if self._pool is None:
            return
        state = tracked.resident
        strange = partial and state.resets != self._pool.resets
        state.filled, state.resets = NEVER if strange else computed, self._pool.resets
        self._read(tracked, computed)

    def fill(self, tracked: Tracked, blocks: int) -> None:
        """Note that the step being planned fills the request's blocks up to number `blocks`. vLLM
        has planned the step, so the blocks are the request's for good."""
        if self._pool is None:
            return
        state = tracked.resident
        if state.resets != self._pool.resets:
            state.filled = NEVER
        elif state.evicted != self._pool.evicted:
            self._read(tracked, len(state.generations))
        if state.filled < blocks:
            number = self.generations.filled(tracked.store.rows[0][state.filled : blocks])
            state.generations += array(GENERATIONS, [number]) * (blocks - state.filled)
            state.filled = blocks

    def complete(
        self, tracked: Tracked, first: int, ready: int, loaded: bool
    ) -> list[PublicationSpec]:
        """Make the publications of the request's chunks [first, ready), which the step completes.

        Leaves out chunks that are published already, and chunks behind a block that was void when
        the request got the block. Readers refuse blocks that were voided later, by the table.
        loaded: the request loaded or hit all of these chunks."""
        if self._pool is None:
            return []
        each, row, generations = self.each, tracked.store.rows[0], tracked.resident.generations
        stop = min(ready, len(generations) // each)
        if stop <= first:
            return []
        if len(self._told) * each > 4 * self.blocks:
            self._forget_gone()
        begin, end = first * each, stop * each
        lasts = slice(begin + each - 1, end, each)
        lie = list(zip(row[lasts], generations[lasts], row[begin:end:each], strict=True))
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
        assert self._pool is not None
        state = tracked.resident
        state.evicted = self._pool.evicted
        if not blocks:
            state.generations = array(GENERATIONS)
            return
        right = packed(self.generations.counters, tracked.store.rows[0][:blocks])
        state.generations = array(GENERATIONS, right)
        void = first_odd(right)
        if void >= 0:
            state.filled = NEVER
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
        row, generations = tracked.store.rows[0], tracked.resident.generations
        packs = row[blocks].tobytes(), generations[blocks].tobytes()
        publish = Publish(self.instance, self.sequence, keys, *packs, self.epoch)
        self.sequence += 1
        return PublicationSpec(publish, loaded)

    def _void_all(self) -> None:
        (self.generations if self._pool is None else self._pool).void_all()

    def _reset(self) -> None:
        self.retract(self.sequence)
