"""Which chunks leave vLLM's KV cache first, and which are saved in the pool before they leave."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import chain, islice
from time import monotonic
from typing import Any

import numpy as np
import numpy.typing as npt

from vcache_backend.protocol.messages import COPY, ChunkKey, InstanceId
from vcache_backend.vram_pool.generations import VOID

from .blocks import KVBlocks
from .instance import InstanceContext
from .metadata import SavedChunks, StepMetadata
from .publications import Publications
from .requests import Tracked

log = logging.getLogger("vllm.vcache")

MOST_LOOKED = 512
"""The most duplicates in use or without a copy that are skipped at once: if an instance is gone, or
all duplicates are in use, skipping thousands would delay a step by milliseconds."""
MOST_SAVED = 256
"""The most chunks that one step saves."""
LOOK_PLANS = 4
"""How often blocks in use are examined while few blocks are free: once in so many plans."""
PUBLISHED_PLANS, PUBLISHED_SECONDS = 3, 0.15
"""A worker saves only what it has published. After so many further plans, and so long, it has
published what a step completes: answers are published 0.1 s late (`Publisher`)."""


class Duplicates:
    """The chunks of this instance that other instances hold as well. An instance that is short of
    blocks gives up its copy while the other copy is intact. Runs in the scheduler's thread. See
    docs/adr/0025."""

    def __init__(
        self, blocks: KVBlocks, context: InstanceContext, publications: Publications, each: int
    ) -> None:
        """each: blocks of a chunk."""
        self._blocks, self._context = blocks, context
        self._own, self._each = publications.generations, each
        self._copies = OrderedDict[int, tuple[InstanceId, tuple[int, ...]]]()
        """An instance, and the chunk that lies there and here (`COPY`), by the chunk's last block
        here. In the order in which they are given up; no more than fit into the KV cache."""
        blocks.before_taken.append(self.give_way)

    @property
    def count(self) -> int:
        """How many chunks may be given up."""
        return len(self._copies)

    def learn(self) -> None:
        """Note the copies of the oldest message that `ServerNews` has heard. Never raises."""
        copies, blocks, told = self._copies, self._own.blocks, self._context.news.copies
        for news in told.popleft() if told else ():
            for copy in COPY.iter_unpack(news.packed):
                last, _, first, _, _ = copy
                if last < blocks and first < blocks:
                    copies[last] = news.instance, copy
        while len(copies) * self._each > blocks:
            copies.popitem(last=False)

    def finished(self, tracked: Tracked) -> None:
        """Note that a request has ended: what was used last is given up last, and a prefix from its
        end."""
        if self._copies and (tables := tracked.store.block_tables):
            for last in reversed(tables[0][self._each - 1 :: self._each]):
                if last in self._copies:
                    self._copies.move_to_end(last)

    def give_way(self, count: int) -> None:
        """Give up duplicates if vLLM, about to hand out `count` blocks, would otherwise take cached
        blocks. No more than needed: vLLM hands the blocks out at once.

        Waits for the server only to open another instance's table for the first time. Never
        raises."""
        try:
            if self._copies or self._context.news.copies:
                short = count - self._blocks.vacant(count)
                # Without a server a duplicate could not be loaded again.
                if short > 0 and self._context.connected:
                    # The look-up for these blocks may have brought news.
                    self.learn()
                    self._give_up(-(-short // self._each))
        except Exception:  # vLLM goes on with the present order
            self._copies.clear()
            log.exception("vcache: blocks that others hold, too, are no longer evicted first")

    # ---- inside

    def _give_up(self, needed: int) -> None:
        """Give up `needed` duplicates, or fewer after `MOST_LOOKED` others."""
        copies, own, blocks, each = self._copies, self._own.counters.data, self._blocks, self._each
        instance, theirs, given = b"", memoryview(b""), None
        for _ in range(min(needed + MOST_LOOKED, len(copies))):
            if not needed:
                return
            last, found = copies.popitem(last=False)
            holder, (_, generation, first, block, their_generation) = found
            if own[last] != generation:
                continue
            if not blocks.together(last, first, each):
                # In use, or in pieces.
                copies[last] = found
                continue
            # Void our copy first: if the other instance gives up its copy now, one of both sees
            # that.
            own[last] = VOID
            if holder != instance:
                instance, theirs = holder, self._counters(holder)
            # The copy's last block leaves first: if it is intact, all blocks are.
            if block < len(theirs) and theirs[block] == their_generation:
                given = blocks.move(last, first, given)
                needed -= 1
            else:
                # Our copy was not written to since.
                own[last] = generation

    def _counters(self, instance: bytes) -> memoryview[int]:
        """Another instance's generations; empty if the instance is gone."""
        view = self._context.view(instance)
        return memoryview(b"") if view is None or view.dead else view.counters.data


Completed = tuple[list[ChunkKey], list[int]]
"""Chunks, and their blocks in order."""


class Victims:
    """Saves published chunks that vLLM will soon overwrite: see `plan`. Runs in the scheduler's
    thread.

    The free queue is examined again only when a fifth of the examined blocks may be gone; other
    steps cost next to nothing, unless few blocks are free."""

    def __init__(
        self,
        blocks: KVBlocks,
        context: InstanceContext,
        publications: Publications,
        each: int,
        step_blocks: int,
    ) -> None:
        """each: blocks of a chunk. step_blocks: the most blocks that one step fills."""
        self._blocks, self._context = blocks, context
        self._own, self._each = publications.generations, each
        count = self._own.blocks
        # A step's saves are copied after the step. By then vLLM has planned the next step, with
        # asynchronous scheduling the next two. A load takes more blocks than a step computes.
        self._need = max(3 * step_blocks, count // 8)
        self._keys: dict[int, ChunkKey] = {}
        self._rows: npt.NDArray[np.uint32] = np.zeros((count, self._each), dtype=np.uint32)
        """By a chunk's first block: all of its blocks."""
        self._first: npt.NDArray[np.intp] = np.zeros(count, dtype=np.intp)
        self._published: npt.NDArray[np.uint64] = np.zeros(count, dtype=np.uint64)
        """By block: the first block of the chunk (`_first`), and its generation in the chunk."""
        self._saved: npt.NDArray[np.uint64] = np.zeros(count, dtype=np.uint64)
        """By a chunk's first block: the generation in which the chunk was saved, plus 1 if the
        worker may not have published it by then; 0 once a block of the chunk was handed out or hit
        again. (Block 0 is vLLM's null block and in no chunk.)"""
        self._left = 0
        """The least number of examined blocks that are still in the queue."""
        self._plans = self._looked = 0
        """All plans; the last one that examined blocks."""
        self._since: npt.NDArray[np.int64] = np.zeros(count, dtype=np.int64)
        self._at: npt.NDArray[np.float64] = np.zeros(count, dtype=np.float64)
        """By a chunk's first block: the plan that completed it, and when (time.monotonic)."""

    def plan(
        self, meta: StepMetadata, completed: Sequence[Completed], used: Iterable[list[int]] = ()
    ) -> None:
        """Add to `meta` the chunks that the step saves because a later step may overwrite them. The
        step must have all its blocks, and its publications must have been made. completed: chunks
        that the step completes, and their blocks. used: the block tables of all requests, the
        oldest request first.

        vLLM takes blocks from its free queue. If the queue is short, it takes those of a request
        that ends at once, before they could be saved. So chunks of the oldest requests, which will
        probably end first, are saved as if they stood behind the queue. Of one request only a part:
        others end before one that goes on for long. Not all that is in use: in the pool it would
        grow old.

        A chunk is saved once, and again after another use: the pool may have lost the chunk
        meanwhile."""
        self._note(meta, completed)
        free, need, each = self._blocks.free, self._need, self._each
        due = free < need and self._plans >= self._looked + LOOK_PLANS
        if due or self._left < min(need, free):
            self._looked, head = self._plans, self._blocks.head(need + need // 4)
            most, part = -(-max(0, need - free) // each), max(1, need // 4 // each)
            # vLLM frees a request's last block first.
            firsts = chain.from_iterable(table[::each][-part:][::-1] for table in used)
            self._look(meta, head, [*islice(firsts, most)])

    # ---- inside

    def _note(self, meta: StepMetadata, completed: Sequence[Completed]) -> None:
        self._plans += 1
        fresh = np.fromiter(chain.from_iterable(meta.fresh), dtype=np.intp)
        fresh = fresh[fresh >= 0]  # -1: a block that a load leaves out
        self._left -= len(fresh)
        self._saved[self._first[fresh]] = 0
        for keys, blocks in completed:
            rows = np.array(blocks, dtype=np.uint32).reshape(-1, self._each)
            generations = self._own.counters[rows]
            # A block that is void now is never equal.
            self._published[rows] = np.where(generations & 1, 0, generations)
            self._first[rows] = rows[:, :1]
            self._rows[rows[:, 0]] = rows
            self._since[rows[:, 0]], self._at[rows[:, 0]] = self._plans, monotonic()
            self._keys.update(zip(rows[:, 0].tolist(), keys, strict=True))

    def _look(self, meta: StepMetadata, head: list[int], used: list[int]) -> None:
        """Choose the chunks to save. head: the next blocks that vLLM will hand out. used: first
        blocks of chunks in use that it may hand out behind them."""
        blocks, now = np.array(head + used, dtype=np.intp), self._own.counters
        self._left, of = len(head), self._first[blocks]
        held = np.flatnonzero(
            (self._published[blocks] == now[blocks]) & (self._saved[of] != now[of])
        )
        first, at = np.unique(of[held], return_index=True)
        order = np.argsort(at)
        first, at = first[order], held[at[order]]
        rows = self._rows[first]
        held_by = (self._first[rows] == first[:, None]) & (self._published[rows] == now[rows])
        free, ready = at < self._left, self._ready(first)
        # What is free cannot wait. If the worker has not published it, it is saved once more.
        due = ready | (free & (self._saved[first] <= now[first]))
        new = np.flatnonzero(held_by.all(axis=1) & due)
        if len(new) > MOST_SAVED:
            # The next step saves the rest.
            self._left = min(self._left, int(at[new[MOST_SAVED]]))
            new = new[:MOST_SAVED]
        if len(new):
            # vLLM frees a request's last chunk first: save the first chunk first.
            chosen = first[new][::-1]
            self._saved[chosen] = now[chosen] + ~ready[new][::-1]
            rows = self._rows[chosen]
            keys = [self._keys[first_block] for first_block in chosen.tolist()]
            packed = rows.astype("<u4").tobytes(), now[rows].astype("<u8").tobytes()
            # A valid generation belongs to the present epoch, as far as the scheduler knows.
            meta.victims = SavedChunks(keys, *packed, self._context.news.epoch)

    def _ready(self, first: npt.NDArray[np.intp]) -> Any:
        """Which chunks, named by their first blocks, the worker has published by now."""
        long = self._at[first] <= monotonic() - PUBLISHED_SECONDS
        return long & (self._since[first] <= self._plans - PUBLISHED_PLANS)
