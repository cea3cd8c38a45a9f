"""Frees duplicates first: chunks that another KV cache holds as well, so that this one can give up
its copy.
"""

from __future__ import annotations

import logging
from array import array
from collections import deque
from collections.abc import Callable
from itertools import islice
from time import monotonic
from typing import NamedTuple

import numpy as np

from vcache_backend.metadata_server.messages import ChunkKey, Copy
from vcache_backend.resident.generations import Generations, GenerationView

from ..scheduler.tracked import Tracked
from .block_pool import NUMBERS, KVBlocks

log = logging.getLogger("vllm.vcache")

FAILED = "vcache: blocks that other instances have, too, are not evicted first"

YOUNG = 32
"""A duplicate stays if the block that would leave instead was last used more than `YOUNG` times as
long ago. Without the duplicate the next request here must wait for a load; without the other block
the next one anywhere must compute.

So a prefix that nearly all requests begin with stays everywhere. In a simulation of the serving
benchmark's workloads the hit rate falls by at most 0.006 for it."""
MOST_LOOKED = 128
"""The most useless duplicates skipped at once. When an instance is gone, skipping thousands would
delay a step by 20 ms."""
MOST_WAITING = 64
"""The most messages with copies that wait for a step. Beyond it the oldest are dropped, and their
chunks leave the cache later."""


class Duplicate(NamedTuple):
    """A chunk in this and in another KV cache.

    blocks: here. generation: of the last one. instance, block, their_generation: the other KV cache
    and the last block there."""

    blocks: array[int]
    generation: int
    instance: bytes
    block: int
    their_generation: int


class Duplicates:
    """The chunks of this instance that other instances hold as well. Each instance that is short of
    blocks may give its copy up, as long as the other's is intact. Runs in the scheduler's thread,
    except `hear`.
    """

    def __init__(
        self,
        pool: KVBlocks,
        generations: Generations,
        each: int,
        view: Callable[[bytes], GenerationView | None],
        place: Callable[[ChunkKey], tuple[bytes, bytes] | None],
    ) -> None:
        """pool: vLLM's. each: blocks of a chunk. view: another instance's
        generations; None if it is gone. place: the blocks and generations with which this instance
        has published a chunk last, packed; None if it has not.
        """
        self._pool, self._generations, self._each = pool, generations, each
        self._view, self._place = view, place
        self._waiting = deque[list[Copy]](maxlen=MOST_WAITING)
        self._known: dict[int, Duplicate] = {}
        """By the chunk's last block here."""
        self._order: dict[int, None] = {}
        """The last blocks of those that may be given up, the first one first: in the order in which
        the requests ended that used them. Those in use may be missing."""
        self._used = np.zeros(generations.blocks)
        """By block: when the last request ended that used it (`monotonic`)."""
        self._ahead = 0
        """A lower bound of the blocks at the head of the free queue that are vacant, or left of
        copies moved there. vLLM puts further vacant blocks before them."""

    @property
    def count(self) -> int:
        """How many chunks may be given up."""
        return len(self._order)

    def hear(self, copies: list[Copy]) -> None:
        """Note which chunks others hold as well, for the next `learn`. Any thread."""
        if copies:
            self._waiting.append(copies)

    def learn(self) -> None:
        """Act on what `hear` noted, a message at a time. Never raises."""
        if not self._waiting:
            return
        try:
            for copy in self._waiting.popleft():
                self._note(copy)
        except Exception:  # vLLM goes on with the present order
            self._forget()
            log.exception(FAILED)

    def finished(self, tracked: Tracked, block_size: int) -> None:
        """Note that a request has ended. block_size: in tokens."""
        row = tracked.store.rows[0]
        # Some of those that it found here may have been at the head.
        self._ahead = max(0, self._ahead - tracked.local // block_size)
        self._used[np.frombuffer(row, np.uint32)] = monotonic()
        # A prefix is given up from its end.
        for last in row[self._each - 1 :: self._each][::-1]:
            if last in self._known:
                self._order.pop(last, None)
                self._order[last] = None

    def give_way(self, count: int) -> None:
        """Put duplicates at the head of the free queue if vLLM, about to hand out `count` blocks,
        would else take cached blocks.

        No more than these blocks need: what is given up is handed out at once, so the other
        instance sees that its own copy is the last one. Never raises.
        """
        try:
            if self._ahead < count:
                self._ahead = max(self._ahead, self._pool.vacant(count))
            if self._ahead < count:
                # The look-up for these blocks may have brought news.
                self.learn()
                if self._order:
                    needed = -((self._ahead - count) // self._each)
                    self._ahead += self._each * self._give_way(needed)
            self._ahead = max(self._ahead - count, 0)
        except Exception:  # vLLM goes on with the present order
            self._forget()
            log.exception(FAILED)

    # ---- inside

    def _note(self, copy: Copy) -> None:
        place = self._place(copy.key)
        if place is None:
            return
        blocks, generations = array(NUMBERS, place[0]), memoryview(place[1]).cast("Q")
        last = blocks[-1]
        self._known[last] = Duplicate(
            blocks, generations[-1], copy.instance, copy.block, copy.generation
        )
        self._order.pop(last, None)
        self._order[last] = None

    def _give_way(self, needed: int) -> int:
        """Move `needed` chunks to the head of the free queue. Returns how many were moved."""
        moved, left, now = 0, MOST_LOOKED + needed, monotonic()
        oldest = float(self._used[self._pool.head(1)].max(initial=0.0))
        latest = now - (now - oldest) / YOUNG
        views: dict[bytes, GenerationView | None] = {}
        while moved < needed and left > 0:
            chosen, looked = list[Duplicate](), list(islice(self._order, min(needed - moved, left)))
            for last in looked:
                if self._used[last] > latest:
                    left = 0
                    break
                del self._order[last]
                duplicate = self._known[last]
                if self._intact(last, duplicate, views):
                    chosen.append(duplicate)
                else:
                    del self._known[last]
            left = left - len(looked) if looked else 0
            # vLLM frees a request from its last block on. Leaves out what is in use.
            first = [duplicate.blocks[-1] for duplicate in chosen]
            then = [duplicate.blocks[0] for duplicate in chosen]
            moved += sum(self._pool.to_head(first, then, self._each))
        return moved

    def _intact(
        self, last: int, duplicate: Duplicate, views: dict[bytes, GenerationView | None]
    ) -> bool:
        """Whether a chunk is unchanged here and in the other KV cache, as far as its last block
        says, which leaves first. views: those looked at so far."""
        instance = duplicate.instance
        if instance not in views:
            view = self._view(instance)
            views[instance] = view if view is None or not view.dead else None
        view, block = views[instance], duplicate.block
        return (
            view is not None
            and block < view.blocks
            and view.counters.data[block] == duplicate.their_generation
            and self._generations.counters.data[last] == duplicate.generation
        )

    def _forget(self) -> None:
        self._known.clear()
        self._order.clear()
