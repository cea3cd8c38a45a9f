"""Frees duplicates first: chunks that were read in another KV cache lie in both, so the reader can
give up its copy.
"""

from __future__ import annotations

import logging
from array import array
from collections import deque
from collections.abc import Callable
from itertools import chain, compress
from typing import NamedTuple

import numpy as np

from vcache_backend.resident.generations import Generations, GenerationView, UInt64s

from ..metadata import LoadSpec
from ..scheduler.tracked import Tracked
from .block_pool import GENERATIONS, NUMBERS, KVBlocks
from .replicas import Run, within

log = logging.getLogger("vllm.vcache")

SHORT = 8
"""A request's copies are kept if it computed more than 1/SHORT as many tokens as it read.

Such a request probably belongs to a conversation, and vLLM would not find the later turns behind a
missing block. In a simulation of the serving benchmark's prefixes this raises the hit rate from
0.774, as measured on two H200s, to 0.808, the highest possible; the hit rate of conversations stays
the same."""

AHEAD_CHUNKS = 8
"""The fewest chunks to move at once: a step that only decodes takes one block at a time."""
MOST_LOOKED = 128
"""The most useless copies skipped at once. When an owner is gone, skipping thousands would delay a
step by 20 ms.
"""


class Copies(NamedTuple):
    """A request's chunks in this and in another KV cache. This cache gives up the last one first.

    blocks, generations: in this KV cache. run: in the other one. chunks: how many leading chunks
    are left. at: the value of `Duplicates._ended` when the request ended."""

    blocks: array[int]
    generations: array[int]
    run: Run
    chunks: int
    at: int


class Duplicates:
    """The chunks of this instance that other instances hold as well. Runs in the scheduler's
    thread.
    """

    def __init__(
        self,
        pool: KVBlocks,
        generations: Generations,
        each: int,
        view: Callable[[bytes], GenerationView | None],
    ) -> None:
        """pool: vLLM's, before it caches a block. each: blocks of a chunk. view: another instance's
        generations; None if it is gone.
        """
        self._pool, self._generations, self._each, self._view = pool, generations, each, view
        self._copies: deque[Copies] = deque(maxlen=max(1, generations.blocks // each))
        """The oldest first. No more can be intact."""
        self._ended = 0
        """How many requests have ended."""
        self._used: dict[int, int] = {}
        """The first and the last block of chunks that a request found in vLLM's cache, and `_ended`
        when that request ended. Requests use chunks from the first block on."""
        # Write the array now: else the first step that writes it waits for the memory.
        self._next: UInt64s = np.full(generations.blocks, 0, dtype=np.uint64)
        """By block: the generation in which the block was moved to the head of the free queue."""
        self._empty = pool.free
        """A lower bound of the empty blocks at the head of the free queue. vLLM puts further empty
        blocks before them, and caches a block only after it was handed out.
        """

    @property
    def count(self) -> int:
        """How many chunks may be given away."""
        return sum(copies.chunks for copies in self._copies)

    def note(self, tracked: Tracked, load: LoadSpec, first: int) -> None:
        """Note which chunks `load` reads in other KV caches. first: the number of the load's first
        chunk.
        """
        each, blocks = self._each, load.blocks
        whole = len(blocks) // each
        # vLLM has the leading blocks itself that the load leaves out.
        start = next((at for at in range(whole) if blocks[at * each] >= 0), whole)
        runs = within(load.residents, start, whole)
        tracked.copies = [run._replace(first=first + start + run.first) for run in runs]

    def finished(self, tracked: Tracked, block_size: int) -> None:
        """Note the duplicates of a request that has ended, unless it looks like a conversation (see
        SHORT). block_size: in tokens.
        """
        each, row, right = self._each, tracked.store.rows[0], tracked.resident.generations
        self._ended += 1
        if used := row[: tracked.local // block_size]:
            ends = chain(used[::each], used[each - 1 :: each])
            self._used.update(dict.fromkeys(ends, self._ended))
            self._next[used] = 0
        runs = within(tracked.copies, 0, len(right) // each)
        copied = sum(run.chunks for run in runs) * each * block_size
        if not copied or (tracked.request.num_tokens - tracked.local - copied) * SHORT > copied:
            return
        # Give a prefix up from its end.
        for run in reversed(runs):
            own = slice(run.first * each, (run.first + run.chunks) * each)
            self._copies.append(Copies(row[own], right[own], run, run.chunks, self._ended))

    def give_way(self, count: int) -> None:
        """Put duplicates at the head of the free queue if vLLM, about to hand out `count` blocks,
        would else take cached blocks.

        Never raises.
        """
        self._empty -= count
        if self._empty >= 0:
            return
        self._empty = 0
        if not self._copies:
            return
        try:
            self._give_way(count)
        except Exception:  # vLLM goes on with the present order
            self._copies.clear()
            log.exception("vcache: blocks that other instances have, too, are not evicted first")

    # ---- inside

    def _give_way(self, count: int) -> None:
        count = min(count, self._pool.free)
        # Reading one number from a memoryview takes half as long as from an array.
        useless = self._pool.useless(count, self._next.data, self._generations.counters.data)
        needed = -(-(count - useless) // self._each)
        wanted = max(needed, AHEAD_CHUNKS)
        looks = MOST_LOOKED
        while needed > 0 and looks > 0 and self._copies:
            copies = self._copies.popleft()
            most = min(looks, wanted, copies.chunks)
            left = copies.chunks - most
            if left:
                self._copies.appendleft(copies._replace(chunks=left))
            moved = self._moved(copies, range(left, copies.chunks))
            needed -= moved
            wanted -= moved
            looks -= most - moved

    def _moved(self, copies: Copies, chunks: range) -> int:
        """Put copies at the head of the free queue, and return how many chunks that are. Leaves out
        chunks that were or are used, or that their owner has lost.
        """
        view = self._view(copies.run.instance)
        if view is None:
            return 0
        each, blocks, generations = self._each, copies.blocks, copies.generations
        # The look-up has checked that all numbers are valid.
        theirs = array(NUMBERS, copies.run.blocks)
        their_generations = array(GENERATIONS, copies.run.generations)
        here, there, used = self._generations.counters.data, view.counters.data, self._used

        def intact(at: int) -> bool:
            block = blocks[at]
            return (
                here[block] == generations[at]
                and there[theirs[at]] == their_generations[at]
                and used.get(block, 0) < copies.at
            )

        ends = [
            (at, at + each - 1)
            for at in range((chunks.stop - 1) * each, chunks.start * each - 1, -each)
            if intact(at) and intact(at + each - 1)
        ]
        # vLLM frees a chunk from its last block on.
        whole = self._pool.to_head(
            [blocks[last] for _, last in ends], [blocks[first] for first, _ in ends], each
        )
        moved = array(NUMBERS)
        for first, last in compress(ends, whole):
            moved += blocks[first : last + 1]
        if moved:
            self._next[moved] = self._generations.counters[moved]
        return sum(whole)
