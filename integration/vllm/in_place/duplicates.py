"""Frees duplicates first: chunks with a copy in another instance's KV cache."""

from __future__ import annotations

import logging
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable
from math import inf
from time import monotonic

import numpy as np

from vcache_backend.metadata_server.messages import COPY, Copies, InstanceId
from vcache_backend.resident.generations import VOID, Generations, GenerationView, put

from ..scheduler.tracked import Tracked
from .block_pool import KVBlocks

log = logging.getLogger("vllm.vcache")

YOUNG = 32
"""A duplicate stays if the block that would leave instead was last used more than `YOUNG` times as
long ago as the end of the last request but one that used the duplicate here. Without the duplicate,
the next request here must wait for a load; without the other block, the next request anywhere must
compute.

So a prefix of nearly all requests stays everywhere, and the end of a single request does not."""
MOST_LOOKED = 512
"""The most duplicates in use or without a copy that are skipped at once: if an instance is gone, or
all duplicates are in use, skipping thousands would delay a step by milliseconds. With 128, a
request for 65 chunks often found only duplicates in use, and took 65 unique chunks instead."""
MOST_YOUNG = 16
"""The most skipped duplicates that stay because they are young: later ones are mostly younger."""
MOST_ENDED = 8
"""After this many ended requests, their blocks' last use is noted."""
MOST_WAITING = 64
"""The most messages with copies that wait for a step. Older messages are dropped, and their chunks
leave the cache later."""


_Duplicate = tuple[InstanceId, tuple[int, ...], float, float]
"""An instance, a chunk (`COPY`) that lies there and here, and when the last two requests ended that
have used the chunk here since the copy was reported. A named tuple takes 0.3 us longer to make."""
UNUSED = -inf


class Duplicates:
    """The chunks of this instance that other instances hold as well. An instance that is short of
    blocks may give up its copy while the other copy is intact. Runs in the scheduler's thread,
    except `hear`."""

    def __init__(
        self,
        pool: KVBlocks,
        generations: Generations,
        each: int,
        view: Callable[[bytes], GenerationView | None],
        reachable: Callable[[], bool],
    ) -> None:
        """pool: vLLM's. each: blocks of a chunk. view: another instance's generations; None if it
        is gone. reachable: whether the server can be asked where chunks are."""
        self._pool, self._generations, self._each = pool, generations, each
        self._view, self._reachable = view, reachable
        self._waiting = deque[list[Copies]](maxlen=MOST_WAITING)
        self._copies = OrderedDict[int, _Duplicate]()
        """Duplicates that may be given up, by their last block here, in the order in which their
        last requests here ended, or copies were reported. No more than fit into the KV cache."""
        self._in_use: dict[int, _Duplicate] = {}
        """Duplicates that were in use, or lay in pieces, when their turn came."""
        self._used = np.full(generations.blocks, monotonic())
        """By block: when its last request ended, without requests in `_ended`."""
        self._ended: list[tuple[array[int], float]] = []
        """The blocks of requests that have ended lately, and when."""
        self._ahead = 0
        """A lower bound of the blocks at the head of the free queue that are vacant, or of copies
        moved there. vLLM puts further vacant blocks before them."""

    @property
    def count(self) -> int:
        """How many chunks may be given up."""
        return len(self._copies)

    def hear(self, copies: list[Copies]) -> None:
        """Note copies in other instances for the next `learn`. Any thread."""
        self._waiting.append(copies)

    def learn(self) -> bool:
        """Act on the first message that `hear` noted. True if more messages wait. Never raises."""
        copies, blocks = self._copies, self._generations.blocks
        if self._waiting:
            for news in self._waiting.popleft():
                for copy in COPY.iter_unpack(news.packed):
                    last, generation, first, _, _ = copy
                    if last < blocks and first < blocks:
                        old = copies.pop(last, None)
                        used = before = UNUSED
                        if old is not None:
                            _, (_, old_generation, *_), old_used, old_before = old
                            if old_generation == generation:
                                used, before = old_used, old_before
                        copies[last] = news.instance, copy, used, before
            while len(copies) * self._each > blocks:
                copies.popitem(last=False)
        return bool(self._waiting)

    def finished(self, tracked: Tracked, block_size: int) -> None:
        """Note that a request has ended. block_size: in tokens."""
        row, now = tracked.store.rows[0], monotonic()
        # Some blocks of the request's hit may have been at the head.
        self._ahead = max(0, self._ahead - tracked.local // block_size)
        self._ended.append((row, now))
        if len(self._ended) >= MOST_ENDED:
            self._note_used()
        copies, in_use = self._copies, self._in_use
        # A prefix is given up from its end.
        for last in reversed(row[self._each - 1 :: self._each]) if copies or in_use else ():
            duplicate = copies.pop(last, in_use.pop(last, None))
            if duplicate is not None:
                instance, copy, used, _ = duplicate
                copies[last] = instance, copy, now, used

    def give_way(self, count: int) -> None:
        """Put duplicates at the head of the free queue if vLLM, about to hand out `count` blocks,
        would otherwise take cached blocks.

        Puts no more than needed: vLLM hands the blocks out at once, so the other instance sees that
        its copy is the last copy. Waits for the server only to open another instance's table for
        the first time. Never raises."""
        try:
            short = self._ahead < count and (self._copies or self._waiting)
            # Without a server a duplicate could not be loaded again.
            if short and self._reachable():
                vacant, instead = self._pool.vacant(count)
                self._ahead = max(self._ahead, vacant)
                if self._ahead < count:
                    # The look-up for these blocks may have brought news.
                    self.learn()
                    if self._copies and instead >= 0:
                        needed = -((self._ahead - count) // self._each)
                        self._ahead += self._each * self._give_way(needed, instead)
            self._ahead = max(self._ahead - count, 0)
        except Exception:  # vLLM goes on with the present order
            self._copies.clear()
            self._in_use.clear()
            log.exception("vcache: blocks that others hold, too, are no longer evicted first")

    # ---- inside

    def _note_used(self) -> None:
        """Note the last use of the blocks of ended requests. Later requests win."""
        for row, ended in self._ended:
            put(self._used, row, ended)
        self._ended.clear()

    def _give_way(self, needed: int, instead: int) -> int:
        """Move `needed` duplicates that are free and not `YOUNG` to the head of the free queue.
        Returns how many were moved; ends after `MOST_LOOKED` others. instead: the block that would
        leave otherwise."""
        latest = 0.0
        copies, pool, each = self._copies, self._pool, self._each
        own = self._generations.counters.data
        others: dict[bytes, memoryview[int]] = {}
        moved, looks, young = 0, MOST_LOOKED, MOST_YOUNG
        while moved < needed and copies and looks and young:
            last, duplicate = copies.popitem(last=False)
            instance, (_, generation, first, block, their_generation), _, before = duplicate
            if own[last] != generation:
                pass
            elif not pool.together(last, first, each):
                self._in_use[last] = duplicate
            elif before > 0 and before > (latest := latest or self._latest(instead)):
                copies[last] = duplicate
                young -= 1
            else:
                # Void our copy first: if the other instance gives up its copy now, one of both sees
                # that.
                own[last] = VOID
                if instance not in others:
                    others[instance] = self._counters(instance)
                theirs = others[instance]
                # The copy's last block leaves first: if it is intact, all blocks are.
                if block < len(theirs) and theirs[block] == their_generation:
                    pool.to_head(last, first)
                    moved += 1
                    continue
                # Our copy was not written to since.
                own[last] = generation
            looks -= 1
        return moved

    def _latest(self, instead: int) -> float:
        """The latest use of a duplicate that leaves before the block `instead`: see `YOUNG`."""
        self._note_used()
        now = monotonic()
        return now - (now - float(self._used[instead])) / YOUNG

    def _counters(self, instance: bytes) -> memoryview[int]:
        """Another instance's generations; empty if the instance is gone."""
        view = self._view(instance)
        return memoryview(b"") if view is None or view.dead else view.counters.data
