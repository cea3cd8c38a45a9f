"""Follows the blocks of vLLM's KV cache whose bytes may be wrong. Does not import vLLM."""

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
BlockTables = Sequence[Sequence[int]]
"""A request's blocks, by block table."""
Beginning = tuple[str, int, BlockTables]
"""A request that begins or resumes: name, computed tokens, blocks."""


class UntrustedBlocks:
    """vLLM's untrusted blocks: a load has not filled or may not fill them, they hold KV from before
    a reset, or were computed behind untrusted blocks. Once one block of a request is untrusted, all
    later blocks are, so checking the last one is enough. Runs in the scheduler's thread.

    A block is untrusted until the step with a certain echo has ended, or until vLLM hands the block
    out (`inf` in place of an echo) to a new owner, which writes to it.

    everything: all blocks are untrusted, until the next reset. kept: vLLM held blocks at the last
    reset."""

    def __init__(self) -> None:
        self.pool: KVBlocks | None = None
        """vLLM's block pool; None until vLLM has shown it."""
        self.everything = self.kept = False
        self._until: dict[int, float] = {}
        """By block: an echo or `inf`, see above."""

    def watch(self, pool: KVBlocks) -> None:
        """Note vLLM's pool, which vLLM shows before the first request."""
        self.pool = pool
        pool.on_taken.append(self._forget)

    def reset(self) -> None:
        """Trust no block that vLLM holds. vLLM may just have cleared its prefix cache."""
        self.everything = self.pool is None
        held = self.pool.held if self.pool is not None else ()
        self.add(held)
        self.kept = bool(held)

    def add(self, blocks: Iterable[int], until: float = inf) -> None:
        """Do not trust these blocks, at least until `until`: an echo, or `inf`."""
        for block in blocks:
            if block != NULL:
                self._until[block] = max(until, self._until.get(block, 0))

    def end_steps(self, echoes: Collection[int], invalid: AbstractSet[int]) -> set[int]:
        """End the steps with these echoes. invalid: the blocks that vLLM reports as not filled. If
        one of them is untrusted, returns all untrusted blocks."""
        failed = not self._until.keys().isdisjoint(invalid)
        lost = set(self._until) if failed else set[int]()
        if echoes:
            blocks = self._until.items()
            self._until = {block: until for block, until in blocks if until not in echoes}
        return lost

    def untrusted_until(self, block_tables: BlockTables | None) -> float:
        """Return the step after which a request's blocks are valid: its echo, 0 if they are valid
        now, `inf` if never. block_tables: None if unknown."""
        if self.everything or block_tables is None or not self._until:
            return inf if self.everything or self._until else 0
        return max((self._until.get(table[-1], 0) for table in block_tables if table), default=0)

    def follow(
        self,
        output: Any,
        begun: Sequence[Beginning],
        block_tables: Callable[[str], BlockTables | None],
    ) -> None:
        """Add the blocks that the step `output` computes behind untrusted blocks. begun: see
        `beginning`. block_tables: of a request before the step; None if unknown."""
        if not self._until:
            return
        cached = output.scheduled_cached_reqs
        for name, added in zip(cached.req_ids, cached.new_block_ids, strict=True):
            running = added and name not in cached.resumed_req_ids
            if running and (until := self.untrusted_until(block_tables(name))):
                self.add(chain(*added), until)
        # A request may begin with blocks that another one computes in this step.
        for _ in begun:
            if not sum(self._spread(tables) for _, _, tables in begun):
                break

    def _spread(self, tables: BlockTables) -> bool:
        """Add a request's blocks behind an untrusted block. Returns whether any is new."""
        until = self._until
        places = {block: at for table in tables for at, block in enumerate(table) if block in until}
        if not places:
            return False
        worst = max(map(until.__getitem__, places))
        # Places in several tables are not comparable.
        first = min(places.values()) if len(tables) == 1 else 0
        behind = {*chain(*(table[first:] for table in tables))} - {NULL}
        news = [block for block in behind if until.get(block, 0) < worst]
        self.add(news, worst)
        return bool(news)

    def _forget(self, taken: Sequence[Any]) -> None:
        for block in taken if self._until else ():  # Most often there are none.
            if self._until.get(block.block_id) == inf:
                del self._until[block.block_id]


def beginning(output: Any) -> list[Beginning]:
    """List the requests that begin or resume in the step."""
    new, cached = output.scheduled_new_reqs, output.scheduled_cached_reqs
    known = zip(cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True)
    return [
        *((request.req_id, request.num_computed_tokens, request.block_ids) for request in new),
        *(one for one in known if one[0] in cached.resumed_req_ids and one[2] is not None),
    ]
