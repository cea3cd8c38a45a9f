"""Which chunks are saved in the pool before they leave vLLM's KV cache."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain, islice
from time import monotonic
from typing import Any

import numpy as np
import numpy.typing as npt

from vcache_backend.protocol.messages import ChunkKey

from .blocks import KVBlocks
from .instance import InstanceContext
from .metadata import SavedChunks, StepMetadata
from .publications import Publications

MOST_SAVED = 256
"""The most chunks that one step saves."""
LOOK_PLANS = 4
"""How often blocks in use are examined while few blocks are free: once in so many plans."""
PUBLISHED_PLANS, PUBLISHED_SECONDS = 3, 0.15
"""A worker saves only what it has published. After so many further plans, and so long, it has
published what a step completes: answers are published 0.1 s late (`Publisher`)."""
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
        self, meta: StepMetadata, completed: Sequence[Completed], used: Iterable[list[int]]
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
