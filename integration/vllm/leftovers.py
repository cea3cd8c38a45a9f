"""KV of before a reset that vLLM itself did not make, as requests ran: what is computed from it is not stored."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from .groups import NULL, Groups
from .tracked import Tracked


class Leftovers:
    """In the scheduler's thread, where the pool is what is shared. Whoever resets changes the weights, whatever vLLM says of its own cache:
    requests go on with what they have, and others find that there. `Tracked.outdated` says of which this is so; of one that is preempted,
    and computed again, it is not. Nothing is looked at unless vLLM kept something."""

    def __init__(self, groups: Groups | None, block: int) -> None:
        """groups: None where all layers look at all tokens by one block table, of blocks of so many tokens."""
        tables = {0: block} if groups is None else {one.number: one.block_size for one in [*groups.groups, *groups.states]}
        self._sizes = [tables[number] for number in sorted(tables)]
        self._kept = False
        self._resets = 0
        self._right: set[int] = set()
        """Blocks that requests got since the last reset which have nothing of before it."""

    def reset(self, pool: Any, requests: Iterable[Tracked]) -> None:
        """The namespace is reset. pool: vLLM's `BlockPool`, which it may have reset just before; None if it was not shown."""
        self._kept = pool is None or pool.get_num_free_blocks() < pool.num_gpu_blocks - 1
        self._resets += 1
        self._right.clear()
        for tracked in requests:
            tracked.outdated = self._kept

    def loads(self, tracked: Tracked) -> None:
        """A load of the request's begins; one of before a reset brings what was there before."""
        tracked.resets = self._resets

    def begin(self, tracked: Tracked, computed: int) -> None:
        """The request, of which so many tokens are computed, has got all of its blocks."""
        if not self._kept:
            return
        # What another connector brings, or vLLM copies of a part of a block, may be of before, whoever had the block since.
        local = tracked.local
        strange = computed > tracked.supplied or any(local % size for size in self._sizes)
        late = tracked.supplied > local and tracked.resets != self._resets
        found = {block for row, size in zip(tracked.rows, self._sizes, strict=False) for block in row[: local // size]}
        tracked.outdated = strange or late or not found - {NULL} <= self._right
        self.more(tracked, tracked.rows)

    def more(self, tracked: Tracked, rows: Iterable[Sequence[int]]) -> None:
        """The request has got these, too."""
        if not self._kept:
            return
        for row in rows:
            if tracked.outdated:
                self._right.difference_update(row)
            else:
                self._right.update(row)
