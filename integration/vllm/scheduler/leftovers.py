"""Finds requests that still use KV from before a reset, because vLLM kept it. What these requests
compute is not stored.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..in_place.block_pool import KVBlocks
from ..model.groups import NULL
from .tracked import Tracked


class Leftovers:
    """Marks outdated requests. Runs in the scheduler's thread; used only for sharing through a
    pool.

    A reset means that the weights change. If vLLM has not cleared its own cache, running requests
    keep old KV, and later requests hit it. `LeftoverState.outdated` marks both, until the request
    is preempted and recomputed. This costs nothing unless vLLM kept blocks."""

    def __init__(self, sizes: Sequence[int]) -> None:
        """sizes: tokens of a block, by block table."""
        self._sizes = sizes
        self._kept = False
        self._resets = 0
        self._right: set[int] = set()
        """Blocks assigned since the last reset that hold no KV from before it."""

    def reset(self, blocks: KVBlocks | None, requests: Iterable[Tracked]) -> None:
        """Note a reset, or a change of the weights' version. blocks: vLLM's pool, which vLLM may
        just have cleared; None if vLLM has not shown it.
        """
        self._kept = blocks is None or not blocks.empty
        self._resets += 1
        self._right.clear()
        for tracked in requests:
            tracked.leftover.outdated = self._kept

    def loads(self, tracked: Tracked) -> None:
        """Note that a load begins: if a reset follows before the load ends, its chunks are old."""
        tracked.leftover.resets = self._resets

    def begin(self, tracked: Tracked, computed: int) -> None:
        """Decide whether the request is outdated as it begins or resumes with `computed` tokens."""
        if not self._kept:
            return
        # Another connector's load, or vLLM's copy of a part of a block, may bring old KV into
        # a new block.
        local = tracked.local
        strange = computed > tracked.supplied or any(local % size for size in self._sizes)
        late = tracked.supplied > local and tracked.leftover.resets != self._resets
        hit = {
            block
            for row, size in zip(tracked.store.rows, self._sizes, strict=False)
            for block in row[: local // size]
        }
        tracked.leftover.outdated = strange or late or not hit - {NULL} <= self._right
        self.more(tracked, tracked.store.rows)

    def more(self, tracked: Tracked, rows: Iterable[Sequence[int]]) -> None:
        """Note more blocks of the request, by block table."""
        if not self._kept:
            return
        for row in rows:
            if tracked.leftover.outdated:
                self._right.difference_update(row)
            else:
                self._right.update(row)
