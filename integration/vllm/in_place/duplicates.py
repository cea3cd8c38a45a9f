"""Frees duplicates first: chunks that another KV cache holds as well, so that this one can give up
its copy.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator
from itertools import compress, islice
from operator import not_
from time import monotonic
from typing import NamedTuple

import numpy as np

from vcache_backend.metadata_server.messages import ChunkKey, Copy
from vcache_backend.resident.generations import Generations, GenerationView

from ..scheduler.tracked import Tracked
from .block_pool import KVBlocks

log = logging.getLogger("vllm.vcache")

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
    """A chunk in this and in another KV cache. blocks: here, packed. generation: of the last one.
    copy: the other one."""

    blocks: bytes
    generation: int
    copy: Copy

    @property
    def ends(self) -> tuple[int, int]:
        """Its last and its first block: vLLM frees the last one first."""
        numbers = memoryview(self.blocks).cast("I")
        return numbers[-1], numbers[0]


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
        """pool: vLLM's. each: blocks of a chunk. view: another instance's generations; None if it
        is gone. place: the blocks and generations with which this instance has published a chunk
        last, packed; None if it has not.
        """
        self._pool, self._generations, self._each = pool, generations, each
        self._view, self._place = view, place
        self._waiting = deque[list[Copy]](maxlen=MOST_WAITING)
        self._copies: dict[ChunkKey, tuple[Copy, float]] = {}
        """Those that may be given up, the first one first, and when each came to its place in this
        order."""
        self._in_use: dict[int, Copy] = {}
        """Those that were in use when they were to be given up, by their last block here."""
        self._used = np.zeros(generations.blocks)
        """By block: when the last request ended that used it (`monotonic`)."""
        self._ahead = 0
        """A lower bound of the blocks at the head of the free queue that are vacant, or left of
        copies moved there. vLLM puts further vacant blocks before them."""

    @property
    def count(self) -> int:
        """How many chunks may be given up."""
        return len(self._copies)

    def hear(self, copies: list[Copy]) -> None:
        """Note which chunks others hold as well, for the next `learn`. Any thread."""
        if copies:
            self._waiting.append(copies)

    def learn(self) -> None:
        """Act on what `hear` noted, a message at a time. Never raises."""
        if self._waiting:
            now = monotonic()
            for copy in self._waiting.popleft():
                self._add(copy, now)

    def finished(self, tracked: Tracked, block_size: int) -> None:
        """Note that a request has ended. block_size: in tokens."""
        row, now = tracked.store.rows[0], monotonic()
        # Some of those that it found here may have been at the head.
        self._ahead = max(0, self._ahead - tracked.local // block_size)
        self._used[np.frombuffer(row, np.uint32)] = now
        if self._in_use:
            # A prefix is given up from its end.
            for last in row[self._each - 1 :: self._each][::-1]:
                if last in self._in_use:
                    self._add(self._in_use.pop(last), now)

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
                if self._copies:
                    needed = -((self._ahead - count) // self._each)
                    self._ahead += self._each * self._give_way(needed)
            self._ahead = max(self._ahead - count, 0)
        except Exception:  # vLLM goes on with the present order
            self._copies.clear()
            self._in_use.clear()
            log.exception("vcache: blocks that other instances have, too, are not evicted first")

    # ---- inside

    def _add(self, copy: Copy, now: float) -> None:
        self._copies.pop(copy.key, None)
        self._copies[copy.key] = copy, now

    def _give_way(self, needed: int) -> int:
        """Move `needed` chunks to the head of the free queue. Returns how many were moved."""
        now = monotonic()
        oldest = float(self._used[self._pool.head(1)].max(initial=0.0))
        latest = now - (now - oldest) / YOUNG
        moved, look = 0, self._look(latest)
        while chosen := list(islice(look, needed - moved)):
            first, then = zip(*[duplicate.ends for duplicate in chosen], strict=True)
            whole = self._pool.to_head(first, then, self._each)
            moved += sum(whole)
            for duplicate in compress(chosen, map(not_, whole)):
                self._in_use[duplicate.ends[0]] = duplicate.copy
        return moved

    def _look(self, latest: float) -> Iterator[Duplicate]:
        """Take duplicates that are intact and were not used after `latest`. Ends after
        `MOST_LOOKED` others."""
        copies, looks = self._copies, MOST_LOOKED
        views: dict[bytes, GenerationView | None] = {}
        while copies and looks > 0:
            key, (copy, since) = next(iter(copies.items()))
            place = self._place(key)
            duplicate = self._intact(copy, place, views) if place is not None else None
            used = float(self._used[duplicate.ends[0]]) if duplicate is not None else 0.0
            if used > latest:
                return
            del copies[key]
            if duplicate is not None and used <= since:
                yield duplicate
                continue
            looks -= 1
            if duplicate is not None:
                copies[key] = copy, used

    def _intact(
        self, copy: Copy, place: tuple[bytes, bytes], views: dict[bytes, GenerationView | None]
    ) -> Duplicate | None:
        """The chunk if it is unchanged at `place`, here, and in the other KV cache, as far as its
        last block says, which leaves first. views: those looked at so far."""
        if copy.instance not in views:
            view = self._view(copy.instance)
            views[copy.instance] = view if view is None or not view.dead else None
        view = views[copy.instance]
        generation = memoryview(place[1]).cast("Q")[-1]
        duplicate = Duplicate(place[0], generation, copy)
        intact = (
            view is not None
            and copy.block < view.blocks
            and view.counters.data[copy.block] == copy.generation
            and self._generations.counters.data[duplicate.ends[0]] == generation
        )
        return duplicate if intact else None
