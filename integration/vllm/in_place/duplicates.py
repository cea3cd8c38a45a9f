"""Frees duplicates first: chunks that were read in another KV cache lie in both, so the reader can
give up its copy.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from vcache_backend.resident.generations import Generations, GenerationView, UInt32s, UInt64s

from ..metadata import LoadSpec
from ..scheduler.tracked import Tracked
from .block_pool import KVBlocks
from .replicas import within

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
    """Chunks in this and in another KV cache, in the order in which this cache gives them up. One
    row for each chunk, its last block first, as they lie in vLLM's free queue.

    blocks, generations: in this KV cache. theirs, their_generations: in the KV cache of `owner`."""

    blocks: UInt32s
    generations: UInt64s
    owner: bytes
    theirs: UInt32s
    their_generations: UInt64s

    def cut(self, start: int, stop: int | None = None) -> Copies:
        """Cut out the chunks [start, stop)."""
        part = slice(start, stop)
        return Copies(
            self.blocks[part],
            self.generations[part],
            self.owner,
            self.theirs[part],
            self.their_generations[part],
        )


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
        self._copies: deque[Copies] = deque()
        """The oldest first."""
        self._most = max(1, generations.blocks // each)
        """So many can be intact at most."""
        # Write the arrays now: else the first step that writes them waits for the memory.
        self._marked: UInt64s = np.full(generations.blocks, 0, dtype=np.uint64)
        self._next: UInt64s = np.full(generations.blocks, 0, dtype=np.uint64)
        """By block: the generation in which the block became an unused duplicate (`_marked`), and
        the generation in which it was moved to the head of the free queue (`_next`).
        """
        self._empty = pool.free
        """A lower bound of the empty blocks at the head of the free queue. vLLM puts further empty
        blocks before them, and caches a block only after it was handed out.
        """

    @property
    def count(self) -> int:
        """How many chunks may be given away."""
        return sum(len(copies.blocks) for copies in self._copies)

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
        if used := row[: tracked.local // block_size]:
            self._marked[used] = self._next[used] = 0
        runs = within(tracked.copies, 0, len(right) // each)
        copied = sum(run.chunks for run in runs) * each * block_size
        if not copied or (tracked.request.num_tokens - tracked.local - copied) * SHORT > copied:
            return
        if len(self._copies) > self._most:
            # vLLM handed few blocks out, and the oldest copies were used or reset.
            self._copies = deque(copies for copies in self._copies if self._intact(copies).any())
        # Give a prefix up from its end.
        for run in reversed(runs):
            own = slice(run.first * each, (run.first + run.chunks) * each)
            copies = Copies(
                self._rows(row[own], np.dtype(np.uint32)),
                self._rows(right[own], np.dtype(np.uint64)),
                run.instance,
                self._rows(run.blocks, np.dtype("<u4")),
                self._rows(run.generations, np.dtype("<u8")),
            )
            self._marked[copies.blocks] = copies.generations
            self._copies.append(copies)

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

    def _rows(self, packed: Any, kind: np.dtype[Any]) -> npt.NDArray[Any]:
        """The numbers of consecutive chunks, as `Copies` has them."""
        return np.frombuffer(packed, dtype=kind)[::-1].reshape(-1, self._each)

    def _give_way(self, count: int) -> None:
        count = min(count, self._pool.free)
        # Reading one number from a memoryview takes half as long as from an array.
        useless = self._pool.useless(count, self._next.data, self._generations.counters.data)
        needed = -(-(count - useless) // self._each)
        wanted = max(needed, AHEAD_CHUNKS)
        looks = MOST_LOOKED
        while needed > 0 and looks > 0 and self._copies:
            copies = self._copies.popleft()
            most = min(looks, wanted)
            if len(copies.blocks) > most:
                self._copies.appendleft(copies.cut(most))
                copies = copies.cut(0, most)
            moved = self._moved(copies)
            needed -= moved
            wanted -= moved
            looks -= len(copies.blocks) - moved

    def _intact(self, copies: Copies) -> npt.NDArray[np.bool_]:
        """Whether each chunk's blocks are unchanged, and unused since the request ended."""
        blocks, generations = copies.blocks, copies.generations
        same = self._marked[blocks] == generations
        same &= self._generations.counters[blocks] == generations
        intact: npt.NDArray[np.bool_] = same.all(axis=1)
        return intact

    def _moved(self, copies: Copies) -> int:
        """Put copies at the head of the free queue, and return how many chunks that are. Leaves out
        chunks that were or are used, or that their owner has lost.
        """
        view = self._view(copies.owner)
        if view is None:
            return 0
        right = self._intact(copies)
        # The look-up has checked that these numbers are valid.
        right &= (view.counters[copies.theirs] == copies.their_generations).all(axis=1)
        rows, generations = copies.blocks[right], copies.generations[right]
        moved = self._pool.to_head(rows[:, 0].tolist(), rows[:, -1].tolist(), self._each)
        if not all(moved):
            rows, generations = rows[moved], generations[moved]
        self._next[rows] = generations
        return len(rows)
