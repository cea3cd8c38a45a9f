"""Which chunks leave vLLM's KV cache first: those that another instance holds, too."""

from __future__ import annotations

import logging
from collections import OrderedDict

from vcache_backend.protocol.messages import COPY, InstanceId
from vcache_backend.vram_pool.generations import VOID

from .blocks import KVBlocks
from .instance import InstanceContext
from .publications import Publications
from .requests import Tracked

log = logging.getLogger("vllm.vcache")

MOST_LOOKED = 512
"""The most duplicates in use or without a copy that are skipped at once: if an instance is gone, or
all duplicates are in use, skipping thousands would delay a step by milliseconds."""


class Duplicates:
    """The chunks of this instance that other instances hold as well. An instance that is short of
    blocks gives up its copy while the other copy is intact. Runs in the scheduler's thread. See
    docs/adr/0025."""

    def __init__(
        self, blocks: KVBlocks, context: InstanceContext, publications: Publications, each: int
    ) -> None:
        """each: blocks of a chunk."""
        self._blocks, self._context = blocks, context
        self._own, self._each = publications.generations, each
        self._copies = OrderedDict[int, tuple[InstanceId, tuple[int, ...]]]()
        """An instance, and the chunk that lies there and here (`COPY`), by the chunk's last block
        here. In the order in which they are given up; no more than fit into the KV cache."""
        blocks.before_taken.append(self.give_way)

    @property
    def count(self) -> int:
        """How many chunks may be given up."""
        return len(self._copies)

    def learn(self) -> None:
        """Note the copies of the oldest message that `ServerNews` has heard. Never raises."""
        copies, blocks, told = self._copies, self._own.blocks, self._context.news.copies
        for news in told.popleft() if told else ():
            for copy in COPY.iter_unpack(news.packed):
                last, _, first, _, _ = copy
                if last < blocks and first < blocks:
                    copies[last] = news.instance, copy
        while len(copies) * self._each > blocks:
            copies.popitem(last=False)

    def finished(self, tracked: Tracked) -> None:
        """Note that a request has ended: what was used last is given up last, and a prefix from its
        end."""
        if self._copies and (tables := tracked.store.block_tables):
            for last in reversed(tables[0][self._each - 1 :: self._each]):
                if last in self._copies:
                    self._copies.move_to_end(last)

    def give_way(self, count: int) -> None:
        """Give up duplicates if vLLM, about to hand out `count` blocks, would otherwise take cached
        blocks. No more than needed: vLLM hands the blocks out at once.

        Waits for the server only to open another instance's table for the first time. Never
        raises."""
        try:
            if self._copies or self._context.news.copies:
                short = count - self._blocks.vacant(count)
                # Without a server a duplicate could not be loaded again.
                if short > 0 and self._context.connected:
                    # The look-up for these blocks may have brought news.
                    self.learn()
                    self._give_up(-(-short // self._each))
        except Exception:  # vLLM goes on with the present order
            self._copies.clear()
            log.exception("vcache: blocks that others hold, too, are no longer evicted first")

    # ---- inside

    def _give_up(self, needed: int) -> None:
        """Give up `needed` duplicates, or fewer after `MOST_LOOKED` others."""
        copies, own, blocks, each = self._copies, self._own.counters.data, self._blocks, self._each
        instance, theirs, given = b"", memoryview(b""), None
        for _ in range(min(needed + MOST_LOOKED, len(copies))):
            if not needed:
                return
            last, found = copies.popitem(last=False)
            holder, (_, generation, first, block, their_generation) = found
            if own[last] != generation:
                continue
            if not blocks.together(last, first, each):
                # In use, or in pieces.
                copies[last] = found
                continue
            # Void our copy first: if the other instance gives up its copy now, one of both sees
            # that.
            own[last] = VOID
            if holder != instance:
                instance, theirs = holder, self._counters(holder)
            # The copy's last block leaves first: if it is intact, all blocks are.
            if block < len(theirs) and theirs[block] == their_generation:
                given = blocks.move(last, first, given)
                needed -= 1
            else:
                # Our copy was not written to since.
                own[last] = generation

    def _counters(self, instance: bytes) -> memoryview[int]:
        """Another instance's generations; empty if the instance is gone."""
        view = self._context.view(instance)
        return memoryview(b"") if view is None or view.dead else view.counters.data
