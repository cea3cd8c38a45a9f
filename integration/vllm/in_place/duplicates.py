"""Frees duplicates first: chunks that another KV cache holds as well, so that this one can give up
its copy."""

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
long ago as the last request but one that used the duplicate here has ended. Without the duplicate
the next request here must wait for a load; without the other block the next one anywhere must
compute.

So a prefix that nearly all requests begin with stays everywhere, and what one request has just
ended with does not."""
MOST_LOOKED = 512
"""The most duplicates skipped at once that cannot be given up. When an instance is gone, or all are
in use, skipping thousands would delay a step by milliseconds. With 128 a request for 65 chunks
often found none among those in use, and took 65 that nobody else had."""
MOST_YOUNG = 16
"""The most of them that stay because they are young: those behind them are mostly younger."""
MOST_ENDED = 32
"""The most ended requests whose blocks' last use is noted at once."""
MOST_WAITING = 64
"""The most messages with copies that wait for a step. Beyond it the oldest are dropped, and their
chunks leave the cache later."""


_Duplicate = tuple[InstanceId, tuple[int, ...], float, float]
"""An instance, a chunk (`COPY`) that lies there and here, and when the last two requests ended that
used it here since this was heard of."""
UNUSED = -inf


class Duplicates:
    """The chunks of this instance that other instances hold as well. Each instance that is short of
    blocks may give its copy up, as long as the other's is intact. Runs in the scheduler's thread,
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
        """Those that may be given up, by their last block here, in the order in which requests that
        used them here have ended, or in which they were heard of. No more than fit into the KV
        cache."""
        self._in_use: dict[int, _Duplicate] = {}
        """Those that were in use, or lay in pieces, when they were to be given up."""
        self._used = np.full(generations.blocks, monotonic())
        """By block: when the last request ended that used it, without those in `_ended`."""
        self._ended: list[tuple[array[int], float]] = []
        """The blocks of requests that have ended lately, and when."""
        self._ahead = 0
        """A lower bound of the blocks at the head of the free queue that are vacant, or left of
        copies moved there. vLLM puts further vacant blocks before them."""

    @property
    def count(self) -> int:
        """How many chunks may be given up."""
        return len(self._copies)

    def hear(self, copies: list[Copies]) -> None:
        """Note which chunks others hold as well, for the next `learn`. Any thread."""
        self._waiting.append(copies)

    def learn(self) -> bool:
        """Act on the first message that `hear` noted. True if more wait. Never raises."""
        copies, blocks = self._copies, self._generations.blocks
        if self._waiting:
            for news in self._waiting.popleft():
                for copy in COPY.iter_unpack(news.packed):
                    last, generation, first, _, _ = copy
                    if last < blocks and first < blocks:
                        old = copies.pop(last, None)
                        if old is None or old[1][1] != generation:
                            copies[last] = news.instance, copy, UNUSED, UNUSED
                        else:
                            copies[last] = news.instance, copy, *old[2:]
            while len(copies) * self._each > blocks:
                copies.popitem(last=False)
        return bool(self._waiting)

    def finished(self, tracked: Tracked, block_size: int) -> None:
        """Note that a request has ended. block_size: in tokens."""
        row, now = tracked.store.rows[0], monotonic()
        # Some of those that it found here may have been at the head.
        self._ahead = max(0, self._ahead - tracked.local // block_size)
        self._ended.append((row, now))
        if len(self._ended) >= MOST_ENDED:
            self._note_used()
        copies, in_use = self._copies, self._in_use
        # A prefix is given up from its end.
        for last in reversed(row[self._each - 1 :: self._each]) if copies or in_use else ():
            duplicate = copies.pop(last, in_use.pop(last, None))
            if duplicate is not None:
                copies[last] = duplicate[0], duplicate[1], now, duplicate[2]

    def give_way(self, count: int) -> None:
        """Put duplicates at the head of the free queue if vLLM, about to hand out `count` blocks,
        would else take cached blocks.

        No more than these blocks need: what is given up is handed out at once, so the other
        instance sees that its own copy is the last one. Waits for the server only to open another
        instance's table for the first time. Never raises."""
        try:
            short = self._ahead < count and (self._copies or self._waiting)
            # Without a server nothing could be loaded again.
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
        """Note when the blocks of ended requests were last used. Later requests win."""
        for row, ended in self._ended:
            put(self._used, row, ended)
        self._ended.clear()

    def _give_way(self, needed: int, instead: int) -> int:
        """Move `needed` chunks to the head of the free queue that are intact, free, and not
        `YOUNG`. Returns how many were moved; ends after `MOST_LOOKED` others. instead: the
        block that would leave else."""
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
                # Void it first: if the other gives its copy up now, one of both sees that.
                own[last] = VOID
                if instance not in others:
                    others[instance] = self._counters(instance)
                theirs = others[instance]
                # Its last block leaves first, and so tells of the others.
                if block < len(theirs) and theirs[block] == their_generation:
                    pool.to_head(last, first)
                    moved += 1
                    continue
                # Nobody has written it since.
                own[last] = generation
            looks -= 1
        return moved

    def _latest(self, instead: int) -> float:
        """The last use of a duplicate that just leaves before the block `instead`: see `YOUNG`."""
        self._note_used()
        now = monotonic()
        return now - (now - float(self._used[instead])) / YOUNG

    def _counters(self, instance: bytes) -> memoryview[int]:
        """Another instance's generations; of no block if it is gone."""
        view = self._view(instance)
        return memoryview(b"") if view is None or view.dead else view.counters.data
