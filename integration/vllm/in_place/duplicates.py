"""Gives up duplicates first: chunks with a copy in another instance's KV cache. See
docs/adr/0025."""

from __future__ import annotations

import logging
from collections import OrderedDict, deque
from collections.abc import Callable

from vcache_backend.protocol.messages import COPY, Copies, InstanceId
from vcache_backend.vram_pool.generations import VOID, Generations, GenerationView

from ..scheduler.tracked import Tracked
from .block_pool import KVBlocks

log = logging.getLogger("vllm.vcache")

MOST_LOOKED = 512
"""The most duplicates in use or without a copy that are skipped at once: if an instance is gone, or
all duplicates are in use, skipping thousands would delay a step by milliseconds."""
MOST_WAITING = 64
"""The most messages with copies that wait for a step. Older messages are dropped, and their chunks
leave the cache later."""


class Duplicates:
    """The chunks of this instance that other instances hold as well. An instance that is short of
    blocks gives up its copy while the other copy is intact. Runs in the scheduler's thread, except
    `hear`."""

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
        self._copies = OrderedDict[int, tuple[InstanceId, tuple[int, ...]]]()
        """An instance, and the chunk that lies there and here (`COPY`), by the chunk's last block
        here. In the order in which they are given up; no more than fit into the KV cache."""

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
        for news in self._waiting.popleft() if self._waiting else ():
            for copy in COPY.iter_unpack(news.packed):
                last, _, first, _, _ = copy
                if last < blocks and first < blocks:
                    copies[last] = news.instance, copy
        while len(copies) * self._each > blocks:
            copies.popitem(last=False)
        return bool(self._waiting)

    def finished(self, tracked: Tracked) -> None:
        """Note that a request has ended: what was used last is given up last, and a prefix from its
        end."""
        if self._copies:
            for last in reversed(tracked.store.rows[0][self._each - 1 :: self._each]):
                if last in self._copies:
                    self._copies.move_to_end(last)

    def give_way(self, count: int) -> None:
        """Give up duplicates if vLLM, about to hand out `count` blocks, would otherwise take cached
        blocks. No more than needed: vLLM hands the blocks out at once.

        Waits for the server only to open another instance's table for the first time. Never
        raises."""
        try:
            # Without a server a duplicate could not be loaded again.
            if (self._copies or self._waiting) and self._reachable():
                short = count - self._pool.vacant(count)
                if short > 0:
                    # The look-up for these blocks may have brought news.
                    self.learn()
                    self._give_up(-(-short // self._each))
        except Exception:  # vLLM goes on with the present order
            self._copies.clear()
            log.exception("vcache: blocks that others hold, too, are no longer evicted first")

    # ---- inside

    def _give_up(self, needed: int) -> None:
        """Give up `needed` duplicates, or fewer after `MOST_LOOKED` others."""
        copies, own = self._copies, self._generations.counters.data
        views: dict[bytes, memoryview[int]] = {}
        first_one = True
        for _ in range(min(needed + MOST_LOOKED, len(copies))):
            if not needed:
                return
            last, (instance, copy) = copies.popitem(last=False)
            _, generation, first, block, their_generation = copy
            if own[last] != generation:
                continue
            if not self._pool.together(last, first, self._each):
                # In use, or in pieces.
                copies[last] = instance, copy
                continue
            # Void our copy first: if the other instance gives up its copy now, one of both sees
            # that.
            own[last] = VOID
            theirs = views[instance] = views.get(instance) or self._counters(instance)
            # The copy's last block leaves first: if it is intact, all blocks are.
            if block < len(theirs) and theirs[block] == their_generation:
                # Later ones lie before the first: vLLM hands out all of them now, and maybe not all
                # of the first.
                self._pool.give_up(last, first, evict=first_one)
                first_one = False
                needed -= 1
            else:
                # Our copy was not written to since.
                own[last] = generation

    def _counters(self, instance: bytes) -> memoryview[int]:
        """Another instance's generations; empty if the instance is gone."""
        view = self._view(instance)
        return memoryview(b"") if view is None or view.dead else view.counters.data
