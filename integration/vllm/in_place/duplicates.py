"""Frees duplicates first: chunks that were read out of another instance's KV cache lie in both, so
the reader can spare its own.
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
"""Copies are kept if their request computed more than 1/SHORT as many tokens as it read: it
probably belongs to a conversation, whose
later turns vLLM could not find behind a missing block. In a simulation of the serving benchmark's
prefixes this raises the hit rate from
0.774, as measured on two H200s, to 0.808, all there is; that of its conversations stays the
same."""

MOST_LOOKED = 128
"""Useless copies skipped at once, at most: thousands of them, when an owner is gone, would hold up
a step for 20 ms.
"""


class Copy(NamedTuple):
    """A chunk that lies here and with another instance: its blocks and their generations, here and
    there.
    """

    blocks: array[int]
    generations: array[int]
    theirs: Replica


class Duplicates:
    """The chunks of one instance that other instances hold as well. In the scheduler's thread."""

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
        # Filled, not only allocated: or the first step to write them would wait for the memory.
        self._marked: UInt64s = np.full(generations.blocks, 0, dtype=np.uint64)
        self._next: UInt64s = np.full(generations.blocks, 0, dtype=np.uint64)
        """By block: the generation in which it became an unused duplicate; and that in which it was
        put at the head of the free queue.
        """

    def note(self, tracked: Tracked, load: LoadSpec, first: int) -> None:
        """Note which of the request's chunks `load` reads in others' KV caches. first: the number
        of the load's first chunk.
        """
        each, blocks = self._each, load.blocks
        tracked.copies = [
            ((first + number) * each, replica)
            for number, replica in load.residents.items()
            if (number + 1) * each <= len(blocks) and blocks[number * each] >= 0
        ]

    def finished(self, tracked: Tracked, block_size: int) -> None:
        """The request has ended: note its duplicates, unless it looks like a conversation (see
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
        # Drop outdated copies here too: if vLLM hands no blocks out, they would pile up.
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
        # A prefix is given away from its end.
        self._copies.extend(reversed(copies))

    def give_way(self, count: int) -> None:
        """vLLM is about to hand out `count` blocks. If some of them are cached, put duplicates
        before them in the free queue.

        Never raises.
        """
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
        """For each copy, whether its blocks are unchanged and unused since."""
        same = (self._marked[blocks] == generations) & (
            self._generations.counters[blocks] == generations
        )
        intact: npt.NDArray[np.bool_] = same.reshape(-1, self._each).all(axis=1)
        return intact

    def _taken(self, some: list[Copy]) -> list[int]:
        """The blocks of these copies, each copy's last block first; without copies that were or are
        used, or that their owner has lost.
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
    """The blocks of these copies, one copy after the other, and their generations."""
    blocks, generations = (
        b"".join([one.blocks for one in some]),
        b"".join([one.generations for one in some]),
    )
    return np.frombuffer(blocks, dtype=np.uint32), np.frombuffer(generations, dtype=np.uint64)
