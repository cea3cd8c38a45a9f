"""Frees duplicates first: chunks that were read in another KV cache lie in both, so the reader can
give up its copy.
"""

from __future__ import annotations

import logging
from array import array
from collections import deque
from collections.abc import Callable
from itertools import islice
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from vcache_backend.resident.generations import Generations, GenerationView, UInt32s, UInt64s
from vcache_backend.transfer.resident import ResidentChunk

from ..metadata import LoadSpec
from ..scheduler.tracked import Tracked
from .block_pool import KVBlocks
from .replicas import Replica

log = logging.getLogger("vllm.vcache")

SHORT = 8
"""A request's copies are kept if it computed more than 1/SHORT as many tokens as it read.

Such a request probably belongs to a conversation, and vLLM would not find the later turns behind a
missing block. In a simulation of the serving benchmark's prefixes this raises the hit rate from
0.774, as measured on two H200s, to 0.808, the highest possible; the hit rate of conversations stays
the same."""

MOST_LOOKED = 128
"""The most useless copies skipped at once. When an owner is gone, skipping thousands would delay a
step by 20 ms.
"""


class Copy(NamedTuple):
    """A chunk in this and in another KV cache. blocks, generations: here. theirs: in the other KV
    cache.
    """

    blocks: array[int]
    generations: array[int]
    theirs: Replica


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
        """each: blocks of a chunk. view: another instance's generations;
        None if it is gone.
        """
        self._pool, self._generations, self._each, self._view = pool, generations, each, view
        self._copies: deque[Copy] = deque()
        """The oldest first."""
        # Write the arrays now: else the first step that writes them waits for the memory.
        self._marked: UInt64s = np.full(generations.blocks, 0, dtype=np.uint64)
        self._next: UInt64s = np.full(generations.blocks, 0, dtype=np.uint64)
        """By block: the generation in which the block became an unused duplicate (`_marked`), and
        the generation in which it was moved to the head of the free queue (`_next`).
        """

    def note(self, tracked: Tracked, load: LoadSpec, first: int) -> None:
        """Note which chunks `load` reads in other KV caches. first: the number of the load's first
        chunk.
        """
        each, blocks = self._each, load.blocks
        tracked.copies = [
            ((first + number) * each, replica)
            for number, replica in load.residents.items()
            if (number + 1) * each <= len(blocks) and blocks[number * each] >= 0
        ]

    def finished(self, tracked: Tracked, block_size: int) -> None:
        """Note the duplicates of a request that has ended, unless it looks like a conversation (see
        SHORT). block_size: in tokens.
        """
        each, row, right = self._each, tracked.store.rows[0], tracked.resident.generations
        if used := row[: tracked.local // block_size]:
            self._marked[used] = self._next[used] = 0
        copies = [
            Copy(row[start : start + each], right[start : start + each], replica)
            for start, replica in tracked.copies
            if start + each <= len(right)
        ]
        copied = len(copies) * each * block_size
        if not copied or (tracked.request.num_tokens - tracked.local - copied) * SHORT > copied:
            return
        # Drop outdated copies: they pile up while vLLM hands no blocks out.
        looked = 1
        while (
            self._copies
            and not (intact := self._intact(*_lie(list(islice(self._copies, looked)))))[0]
        ):
            for _ in range(int(intact.argmax()) or len(intact)):
                self._copies.popleft()
            looked = MOST_LOOKED
        blocks, generations = _lie(copies)
        self._marked[blocks] = generations
        # Give a prefix up from its end.
        self._copies.extend(reversed(copies))

    def give_way(self, count: int) -> None:
        """Put duplicates at the head of the free queue if vLLM, about to hand out `count` blocks,
        would else take cached blocks.

        Never raises."""
        if not self._copies:
            return
        try:
            self._give_way(count)
        except Exception:  # vLLM goes on with whatever order there is
            self._copies.clear()
            log.exception("vcache: blocks that other instances have, too, are not evicted first")

    # ---- inside

    def _give_way(self, count: int) -> None:
        counters = self._generations.counters
        count = min(count, self._pool.free)
        # Reading one number from a memoryview takes half as long as from an array.
        useless = self._pool.useless(count, self._next.data, counters.data)
        needed, chosen = count - useless, list[int]()
        looks = min(MOST_LOOKED + needed // self._each, len(self._copies))
        while len(chosen) < needed and looks:
            most = min(looks, -(-(needed - len(chosen)) // self._each))
            chosen += self._taken([self._copies.popleft() for _ in range(most)])
            looks -= most
        if chosen:
            # Often they lie there already.
            self._pool.to_head(chosen, useless)
            self._next[chosen] = counters[chosen]

    def _intact(self, blocks: UInt32s, generations: UInt64s) -> npt.NDArray[np.bool_]:
        """Whether each copy's blocks are unchanged, and unused since its request ended."""
        same = (self._marked[blocks] == generations) & (
            self._generations.counters[blocks] == generations
        )
        intact: npt.NDArray[np.bool_] = same.reshape(-1, self._each).all(axis=1)
        return intact

    def _taken(self, some: list[Copy]) -> list[int]:
        """List the blocks of these copies, each copy's last block first. Leaves out copies that
        were or are used, or that their owner has lost.
        """
        (blocks, generations), each = _lie(some), self._each
        right = self._intact(blocks, generations)
        for owner in {one.theirs[0] for one in some}:
            numbers, view = (
                [number for number, one in enumerate(some) if one.theirs[0] == owner],
                self._view(owner),
            )
            theirs = ResidentChunk.unpacked(
                owner,
                *(b"".join([some[number].theirs[part] for number in numbers]) for part in (1, 2)),
            )
            whole = (
                view is not None
                and len(theirs.blocks) == len(theirs.generations) == len(numbers) * each
            )
            if view is None or not whole:
                right[numbers] = False
            else:
                right[numbers] &= (
                    view.right(theirs.blocks, theirs.generations).reshape(-1, each).all(axis=1)
                )
        taken: list[int] = blocks.reshape(-1, each)[right, ::-1].reshape(-1).tolist()
        used = self._pool.used(taken)
        if not any(used):
            return taken
        chunks = range(0, len(taken), each)
        return [
            block
            for at in chunks
            if not any(used[at : at + each])
            for block in taken[at : at + each]
        ]


def _lie(some: list[Copy]) -> tuple[UInt32s, UInt64s]:
    """Join the copies' blocks, one copy after the other, and their generations."""
    blocks, generations = (
        b"".join([one.blocks for one in some]),
        b"".join([one.generations for one in some]),
    )
    return np.frombuffer(blocks, dtype=np.uint32), np.frombuffer(generations, dtype=np.uint64)
