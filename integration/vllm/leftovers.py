"""Finds requests that go on with KV from before a reset, because vLLM kept it. What they compute is
not stored.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .groups import NULL
from .resident_pool import KVBlocks
from .tracked import Tracked


class Leftovers:
    """In the scheduler's thread; only for sharing through a pool.

    A reset means that the weights change, even if vLLM could not clear its own cache: running
    requests go on with old KV, and later ones hit it there. `Tracked.outdated` marks both; it is
    cleared for a request that is preempted and recomputed. It costs nothing unless vLLM kept
    blocks."""

    def __init__(self, sizes: Sequence[int]) -> None:
        """sizes: tokens of a block, by block table."""
        self._sizes = sizes
        self._kept = False
        self._resets = 0
        self._right: set[int] = set()
        """Blocks that requests got since the last reset and that hold nothing from before it."""

    def reset(self, blocks: KVBlocks | None, requests: Iterable[Tracked]) -> None:
        """The namespace is reset. blocks: vLLM may just have reset them; None if vLLM has not shown
        them.
        """
        self._kept = blocks is None or blocks.free < blocks.count - 1
        self._resets += 1
        self._right.clear()
        for tracked in requests:
            tracked.leftover.outdated = self._kept

    def loads(self, tracked: Tracked) -> None:
        """A load of the request begins. If a reset comes before its end, it brings old chunks."""
        tracked.leftover.resets = self._resets

    def begin(self, tracked: Tracked, computed: int) -> None:
        """The request begins, or resumes, with all of its blocks and `computed` tokens: decide
        whether it is outdated.
        """
        if not self._kept:
            return
        # What another connector loads, or vLLM copies out of a part of a block, may be old,
        # whichever block it is in.
        local = tracked.local
        strange = computed > tracked.supplied or any(local % size for size in self._sizes)
        late = tracked.supplied > local and tracked.leftover.resets != self._resets
        found = {
            block
            for row, size in zip(tracked.store.rows, self._sizes, strict=False)
            for block in row[: local // size]
        }
        tracked.leftover.outdated = strange or late or not found - {NULL} <= self._right
        self.more(tracked, tracked.store.rows)

    def more(self, tracked: Tracked, rows: Iterable[Sequence[int]]) -> None:
        """The request has got more blocks, by block table."""
        if not self._kept:
            return
        for row in rows:
            if tracked.leftover.outdated:
                self._right.difference_update(row)
            else:
                self._right.update(row)
