"""The scheduler's half of sharing in place: the generations of this instance's blocks, and the
chunks published in them.
"""

from __future__ import annotations

import secrets
from array import array
from collections.abc import Callable, Iterator
from itertools import groupby

import numpy as np

from vcache_backend.metadata_server.messages import (
    INSTANCE_BYTES,
    ChunkKey,
    Found,
    Heard,
    InstanceId,
)
from vcache_backend.resident.generations import (
    Generations,
    GenerationView,
    first_odd,
    packed,
)

from ..metadata import PublicationSpec
from ..scheduler.tracked import NEVER, Tracked
from .block_pool import GENERATIONS, NUMBERS, KVBlocks, ResidentPool
from .duplicates import Duplicates, Ends


class Publications:
    """Tracks which chunks may be published, and where. Runs in the scheduler's thread, except
    `hear`.

    instance: a random name, new at each start of the engine. each: vLLM's blocks of a chunk.
    sequence: the number of the next publication; a reset voids all lower numbers. epoch: the epoch
    of everything published. heard: the namespace's epoch as the server last said. news: `learn` has
    something to do."""

    def __init__(self, blocks: int, each: int, loads: bool) -> None:
        """blocks: how many blocks vLLM's pool has. each: vLLM's blocks of a chunk. loads: the
        instance's role allows loads. SegmentError if memory for the table is lacking.
        """
        self._loads = loads
        self.instance = InstanceId(secrets.token_bytes(INSTANCE_BYTES))
        self.blocks, self.each, self.sequence = blocks, each, 1
        self.epoch = self.heard = 0
        self.news = False
        self.generations = Generations(self.instance, blocks)
        self.retract: Callable[[int], None] = lambda sequence: None
        """Called on a reset: voids publications with a lower sequence."""
        self._told: dict[ChunkKey, Ends] = {}
        """By chunk, the place where it was published last and others look for it."""
        self._filling = array(NUMBERS)
        """Blocks that the step being planned fills, and that the table does not show as
        filled yet.
        """
        self._pool: ResidentPool | None = None
        self.duplicates: Duplicates | None = None
        """Made when vLLM has shown its pool, if the instance could load again what it gives up."""
        self.reachable: Callable[[], bool] = lambda: False
        """Whether the server can be asked where chunks are."""
        self.view: Callable[[bytes], GenerationView | None] = lambda instance: None
        """Returns another instance's generations; None if the instance is gone, or no server is
        known yet.
        """

    @property
    def watches(self) -> bool:
        """Whether vLLM has shown its block pool. Without the pool the blocks' contents
        are unknown.
        """
        return self._pool is not None

    def watch(self, pool: KVBlocks) -> None:
        """Watch vLLM's pool, which vLLM shows before the first request. ValueError if its size
        differs from the KV cache's.
        """
        if pool.count != self.blocks:
            raise ValueError(f"vLLM's pool has {pool.count} blocks, its KV cache {self.blocks}")
        if self._loads:
            self.duplicates = Duplicates(
                pool,
                self.generations,
                self.each,
                lambda instance: self.view(instance),
                self._told.get,
                lambda: self.reachable(),
            )
        give_way = self.duplicates.give_way if self.duplicates is not None else None
        self._pool = ResidentPool(pool.pool, self.generations, self._reset, give_way)

    def reset(self) -> None:
        """Void all that was published, and all that the steps under way compute."""
        self._void_all()
        self._reset()

    def hear(self, reply: Found | Heard) -> None:
        """Note for the next `learn` what the server says of the namespace's epoch, and which chunks
        others hold as well. Any thread."""
        if self.duplicates is not None and reply.copies:
            self.duplicates.hear(reply.copies)
        # An answer about no keys does not know the epoch.
        self.heard = reply.epoch if isinstance(reply, Heard) else max(self.heard, reply.epoch)
        if reply.copies or self.heard != self.epoch:
            self.news = True

    def learn(self) -> bool:
        """Act on the next message that `hear` noted. True if the namespace was reset.

        After a reset others no longer find chunks from before, though vLLM's own cache may still
        hit them."""
        # First: another thread may hear more from now on.
        self.news = False
        if self.duplicates is not None and self.duplicates.learn():
            self.news = True
        heard = self.heard
        if heard == self.epoch:
            return False
        self._void_all()
        self.epoch = heard
        return True

    def loads(self, tracked: Tracked, first: int) -> None:
        """Note that a load will fill the request's blocks from number `first` on. The request has
        all its blocks.
        """
        if self._pool is not None:
            tracked.resident.loaded = first
            tracked.resident.resets = self._pool.resets

    def matched(self, tracked: Tracked) -> None:
        """Forget an earlier load: vLLM looks for the request's tokens anew."""
        tracked.resident.loaded = NEVER

    def stop(self, tracked: Tracked) -> None:
        """Publish no more chunks of the request in its present blocks."""
        tracked.resident.filled = NEVER

    def begin(self, tracked: Tracked, computed: int) -> None:
        """Note the first step with these blocks of the request.

        computed: how many blocks hold its tokens already, from a hit in vLLM's cache or a load.
        vLLM's cache may also name blocks that no step has filled: these stay void, and no chunk
        behind them is published."""
        if self._pool is None:
            return
        loaded = tracked.resident.loaded
        tracked.resident.loaded = NEVER
        late = loaded < NEVER and tracked.resident.resets != self._pool.resets
        tracked.resident.resets = self._pool.resets
        tracked.resident.evicted = self._pool.evicted
        tracked.resident.filled = min(loaded, computed)
        leading = tracked.store.rows[0][: tracked.resident.filled]
        tracked.resident.generations = right = self._leading(leading)
        if late or len(right) < len(leading):
            tracked.resident.filled = NEVER

    def fill(self, tracked: Tracked, blocks: int) -> None:
        """Note that the step being planned fills the request's blocks up to number `blocks`."""
        if self._pool is None or not self._counts(tracked):
            return
        filled = tracked.store.rows[0][tracked.resident.filled : blocks]
        tracked.resident.generations += array(GENERATIONS, [self.generations.coming]) * len(filled)
        self._filling += filled
        tracked.resident.filled = blocks

    def show(self) -> None:
        """Show others the blocks that the step fills. They have new owners for good: vLLM has
        planned the step.
        """
        if self._filling:
            self.generations.filled(self._filling)
            self._filling = array(NUMBERS)

    def complete(
        self, tracked: Tracked, first: int, ready: int, loaded: bool
    ) -> list[PublicationSpec]:
        """Make the publications of the request's chunks [first, ready), which the step completes.

        Leaves out chunks that are published already, and chunks behind a block that was handed out
        or voided since the request got it. loaded: the request loaded or hit all of these chunks.
        """
        if self._pool is None or self._pool.broken:
            return []
        self._counts(tracked)
        state, each = tracked.resident, self.each
        stop = min(ready, len(state.generations) // each)
        if stop <= first:
            return []
        if len(self._told) * each > 4 * self.blocks:
            self._forget_gone()
        keys = tracked.lookup.keys[first:stop]
        if self._told.keys().isdisjoint(keys):
            return [self._tell(tracked, first, stop, loaded)]
        places = zip(keys, self._ends(tracked, first, stop), strict=True)
        lie = enumerate((self._told.get(key) == ends for key, ends in places), first)
        fresh = [number for number, told in lie if not told]
        # Chunks that follow each other are all as far from their places among the fresh ones.
        runs = groupby(enumerate(fresh), lambda placed: placed[1] - placed[0])
        ends = [[number for _, number in run] for _, run in runs]
        return [self._tell(tracked, run[0], run[-1] + 1, loaded) for run in ends]

    def forget(self, tracked: Tracked, first: int) -> None:
        """Forget the request's publications, so that all chunks are published again: vLLM
        recomputes blocks from number `first` on.
        """
        for key in tracked.lookup.keys:
            self._told.pop(key, None)
        if first < tracked.resident.filled < NEVER:
            del tracked.resident.generations[first:]
            tracked.resident.filled = first

    def close(self) -> None:
        """Idempotent."""
        self.generations.close()

    # ---- inside

    def _forget_gone(self) -> None:
        """Forget chunks of which the last block, which leaves first, holds something else now."""
        self.show()
        counters, told = self.generations.counters.data, self._told
        gone = [key for key, (last, generation, _) in told.items() if counters[last] != generation]
        for key in gone:
            del told[key]

    def _leading(self, blocks: array[int]) -> array[int]:
        """The generations of these blocks, up to the first void block."""
        if not blocks:
            return array(GENERATIONS)
        self.show()
        right = packed(self.generations.counters, blocks)
        void = first_odd(right)
        return array(GENERATIONS, right)[: void if void >= 0 else None]

    def _counts(self, tracked: Tracked) -> bool:
        """Whether the request's new chunks can be published: not after a reset, nor behind an
        evicted block.
        """
        assert self._pool is not None
        if tracked.resident.resets != self._pool.resets:
            tracked.resident.generations = array(GENERATIONS)
            tracked.resident.filled = NEVER
        elif tracked.resident.evicted != self._pool.evicted:
            self.show()
            tracked.resident.evicted = self._pool.evicted
            if not self._right(tracked):
                tracked.resident.filled = NEVER
        return tracked.resident.filled < NEVER

    def _right(self, tracked: Tracked) -> bool:
        """Whether the request's leading blocks are unchanged. Forgets the first changed block and
        all behind it.
        """
        generations = tracked.resident.generations
        expected = np.frombuffer(generations, np.uint64)
        row = tracked.store.rows[0][: len(expected)]
        present = np.frombuffer(packed(self.generations.counters, row), np.uint64)
        lost = np.flatnonzero((present != expected) | (expected & np.uint64(1) == 1))
        # No array may view what is cut.
        del expected
        if len(lost):
            del generations[int(lost[0]) :]
        return not len(lost)

    def _ends(self, tracked: Tracked, first: int, stop: int) -> Iterator[Ends]:
        """The places of the request's chunks [first, stop)."""
        row, generations, each = tracked.store.rows[0], tracked.resident.generations, self.each
        begin, end = first * each, stop * each
        lasts = slice(begin + each - 1, end, each)
        return zip(row[lasts], generations[lasts], row[begin:end:each], strict=True)

    def _tell(self, tracked: Tracked, first: int, stop: int, loaded: bool) -> PublicationSpec:
        """Make a publication of the request's chunks [first, stop), and note where they lie."""
        keys, begin, end = tracked.lookup.keys[first:stop], first * self.each, stop * self.each
        blocks = tracked.store.rows[0][begin:end].tobytes()
        generations = tracked.resident.generations[begin:end].tobytes()
        self._told.update(zip(keys, self._ends(tracked, first, stop), strict=True))
        self.sequence += 1
        name, sequence = tracked.request.request_id, self.sequence - 1
        return PublicationSpec(name, keys, blocks, generations, sequence, self.epoch, loaded)

    def _void_all(self) -> None:
        (self.generations if self._pool is None else self._pool).void_all()

    def _reset(self) -> None:
        self.retract(self.sequence)
