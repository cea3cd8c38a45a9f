"""Follows the blocks whose bytes may be wrong, for our connector and LMCache's. Imports neither
vLLM nor LMCache."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from collections.abc import Set as AbstractSet
from itertools import chain
from math import inf
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .vllm.in_place.block_pool import KVBlocks

NULL = 0
"""vLLM's null block. It replaces blocks in a block table once a window has passed."""
Rows = Sequence[Sequence[int]]
"""A request's blocks, by block table."""
Beginning = tuple[str, int, Rows]
"""A request that begins or resumes: name, computed tokens, blocks."""


class Doubts:
    """vLLM's doubtful blocks: a load has not filled or may not fill them, they hold KV from before
    a reset, or were computed behind doubtful blocks. A request is doubtful from its first doubtful
    block on, so the last block tells. Runs in the scheduler's thread.

    A doubt ends when the step with a certain echo is over, or when vLLM hands the block out (`inf`
    in place of an echo) to a new owner, which writes to the block.

    everything: all blocks are doubtful, until the next reset. kept: vLLM held blocks at the last
    reset."""

    def __init__(self) -> None:
        self.pool: KVBlocks | None = None
        """vLLM's block pool; None until vLLM has shown it."""
        self.everything = self.kept = False
        self._until: dict[int, float] = {}
        """By block, the end of the doubt."""

    def watch(self, pool: KVBlocks) -> None:
        """Note vLLM's pool, which vLLM shows before the first request."""
        self.pool = pool
        pool.on_taken.append(self._forget)

    def reset(self) -> None:
        """Doubt all blocks that vLLM holds. vLLM may just have cleared its prefix cache."""
        self.everything = self.pool is None
        held = self.pool.held if self.pool is not None else ()
        self.add(held)
        self.kept = bool(held)

    def add(self, blocks: Iterable[int], until: float = inf) -> None:
        """Doubt these blocks at least until `until`: an echo, or `inf`."""
        for block in blocks:
            if block != NULL:
                self._until[block] = max(until, self._until.get(block, 0))

    def over(self, echoes: Collection[int], invalid: AbstractSet[int]) -> set[int]:
        """End the steps with these echoes. invalid: the blocks that vLLM reports as not filled. If
        one of them is doubtful, returns all doubtful blocks."""
        failed = not self._until.keys().isdisjoint(invalid)
        lost = set(self._until) if failed else set[int]()
        if echoes:
            doubts = self._until.items()
            self._until = {block: until for block, until in doubts if until not in echoes}
        return lost

    def until(self, rows: Rows | None) -> float:
        """The end of the doubt about a request with the blocks `rows`; 0: no doubt. rows: None if
        unknown."""
        if self.everything or rows is None or not self._until:
            return inf if self.everything or self._until else 0
        return max((self._until.get(row[-1], 0) for row in rows if row), default=0)

    def follow(
        self, output: Any, begun: Iterable[Beginning], rows_of: Callable[[str], Rows | None]
    ) -> None:
        """Doubt the blocks that the step `output` computes behind doubtful blocks. begun: see
        `beginning`. rows_of: a request's blocks before the step; None if unknown."""
        if not self._until:
            return
        cached = output.scheduled_cached_reqs
        for name, added in zip(cached.req_ids, cached.new_block_ids, strict=True):
            running = added and name not in cached.resumed_req_ids
            if running and (until := self.until(rows_of(name))):
                self.add(chain(*added), until)
        self.spread([rows for _, _, rows in begun])

    def spread(self, requests: Sequence[Rows]) -> None:
        """Doubt these requests' blocks behind doubtful blocks."""
        # A request may begin with blocks that another request computes.
        for _ in requests:
            if not sum(map(self._reaches, requests)):
                break

    def _reaches(self, rows: Rows) -> bool:
        """Doubt the request's blocks behind a doubtful block. Returns whether any doubt is new."""
        places = {block: at for row in rows for at, block in enumerate(row) if block in self._until}
        if not places:
            return False
        worst = max(map(self._until.__getitem__, places))
        # Places in several tables are not comparable.
        first = min(places.values()) if len(rows) == 1 else 0
        behind = {*chain(*(row[first:] for row in rows))} - {NULL}
        news = [block for block in behind if self._until.get(block, 0) < worst]
        self.add(news, worst)
        return bool(news)

    def _forget(self, taken: Sequence[Any]) -> None:
        for block in taken if self._until else ():  # Most often there are none.
            if self._until.get(block.block_id) == inf:
                del self._until[block.block_id]


def beginning(output: Any) -> list[Beginning]:
    """List the requests that begin or resume in the step."""
    new, cached = output.scheduled_new_reqs, output.scheduled_cached_reqs
    rows = zip(cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True)
    return [
        *((request.req_id, request.num_computed_tokens, request.block_ids) for request in new),
        *(row for row in rows if row[0] in cached.resumed_req_ids and row[2] is not None),
    ]
