"""Frees duplicates first: chunks that were read in another KV cache lie in both, so the reader can
give up its copy.
"""

from __future__ import annotations

import logging
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from itertools import compress
from typing import NamedTuple

from vcache_backend.resident.generations import Generations, GenerationView

from ..metadata import LoadSpec
from ..scheduler.tracked import Tracked
from .block_pool import KVBlocks
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
        self._copies = deque[Copies]()
        """The oldest first."""
        self.count = 0
        """How many chunks they have, which may be given away."""
        self._most = generations.blocks // each
        """No more can be intact."""
        self._ended = 0
        """How many requests have ended."""
        self._used: dict[int, int] = {}
        """The first blocks of chunks that a request found in vLLM's cache, and `_ended` when that
        request ended. Requests use chunks from the first block on."""
        self._ahead = pool.free
        """A lower bound of the blocks at the head of the free queue that hold nothing, or a copy
        moved there. vLLM puts further empty blocks before them, and caches a block only after it
        was handed out.
        """

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
        if used := row[: tracked.local // block_size : each]:
            self._used.update(dict.fromkeys(used, self._ended))
            # Some of these may have been at the head.
            self._ahead = max(0, self._ahead - len(used) * each)
        runs = within(tracked.copies, 0, len(right) // each)
        copied = sum(run.chunks for run in runs) * each * block_size
        if not copied or (tracked.request.num_tokens - tracked.local - copied) * SHORT > copied:
            return
        # Give a prefix up from its end.
        for run in reversed(runs):
            own = slice(run.first * each, (run.first + run.chunks) * each)
            self._copies.append(Copies(row[own], right[own], run, run.chunks, self._ended))
            self.count += run.chunks
        while self.count > self._most:
            self.count -= self._copies.popleft().chunks

    def give_way(self, count: int) -> None:
        """Put duplicates at the head of the free queue if vLLM, about to hand out `count` blocks,
        would else take cached blocks.

        Never raises.
        """
        try:
            if self._pool.uncached:
                self._ahead = self._pool.free
            self._ahead -= count
            if self._ahead >= 0:
                return
            needed = -(self._ahead // self._each)
            self._ahead = 0
            if self._copies:
                self._give_way(needed)
        except Exception:  # vLLM goes on with the present order
            self._copies.clear()
            self.count = 0
            log.exception("vcache: blocks that other instances have, too, are not evicted first")

    # ---- inside

    def _give_way(self, needed: int) -> None:
        """Move `needed` chunks to the head of the free queue, and some more if these are few."""
        wanted, looks = max(needed, AHEAD_CHUNKS), MOST_LOOKED
        while wanted > 0 and looks > 0 and self._copies:
            copies = self._copies.popleft()
            left = max(copies.chunks - min(looks, wanted), 0)
            if left:
                self._copies.appendleft(copies._replace(chunks=left))
            self.count -= copies.chunks - left
            moved = self._moved(copies, range(left, copies.chunks))
            wanted -= moved
            looks -= copies.chunks - left - moved
            self._ahead += moved * self._each
        self._ahead = max(self._ahead - needed * self._each, 0)

    def _moved(self, copies: Copies, chunks: range) -> int:
        """Put copies at the head of the free queue, and return how many chunks that are. Leaves out
        chunks that were or are used, or that their owner has lost.
        """
        view = self._view(copies.run.instance)
        if view is None:
            return 0
        intact = self._intact(copies, chunks, view)
        # Mostly all of them lie in the queue as the request has left them.
        if all(intact) and self._to_head(copies.blocks, [chunks]):
            return len(chunks)
        single = [range(chunk, chunk + 1) for chunk in compress(chunks, intact)]
        return self._to_head(copies.blocks, single)

    def _to_head(self, blocks: array[int], parts: Sequence[range]) -> int:
        """Put parts of a request's chunks, which have one length, at the head of the free queue.
        Returns how many of them could be moved."""
        if not parts:
            return 0
        # vLLM frees a request from its last block on.
        rows = [
            blocks[part.start * self._each : part.stop * self._each] for part in reversed(parts)
        ]
        whole = self._pool.to_head(
            [row[-1] for row in rows], [row[0] for row in rows], len(rows[0])
        )
        return sum(whole)

    def _intact(self, copies: Copies, chunks: range, view: GenerationView) -> list[bool]:
        """Whether each chunk is unchanged here and in the other KV cache, as far as its last block
        says, which leaves first, and unused since the request ended."""
        here, there, each = self._generations.counters.data, view.counters.data, self._each
        begin, end = chunks.start * each, chunks.stop * each
        last, run = slice(begin + each - 1, end, each), copies.run
        return [
            here[block] == generation
            and there[their] == their_generation
            and self._used.get(first, 0) < copies.at
            for first, block, generation, their, their_generation in zip(
                copies.blocks[begin:end:each],
                copies.blocks[last],
                copies.generations[last],
                # The look-up has checked that these are valid.
                memoryview(run.blocks).cast("I")[last].tolist(),
                memoryview(run.generations).cast("Q")[last].tolist(),
                strict=True,
            )
        ]
