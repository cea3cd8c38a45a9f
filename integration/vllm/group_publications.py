"""`Publications` for a model with several block tables, some of them of sliding windows.

A chunk is published with those of its blocks that are still there. vLLM hands most of a window's
blocks out again as soon as the window has passed. So the window blocks that a hit needs at likely
ends (where a prompt ends, and where another prompt's hit could have ended) are moved to the end of
vLLM's free queue."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from vcache_backend.errors import VCacheError
from vcache_backend.metadata_server.messages import MAX_PUBLISHED, Found
from vcache_backend.resident.tables import Tables

from .groups import NULL, Groups
from .metadata import PublicationSpec
from .publications import Publications
from .replicas import Replica, choose_with_windows
from .tracked import Tracked

log = logging.getLogger("vllm.vcache")


def begin(
    kv_cache_config: Any, each: int, groups: Groups | None
) -> tuple[Publications | None, str | None]:
    """The publications of a new instance, or why there can be none. each: vLLM's blocks of a chunk,
    if there is one block table.
    """
    blocks = kv_cache_config.num_blocks
    try:
        return Publications(blocks, each) if groups is None else GroupPublications(
            blocks, groups
        ), None
    except VCacheError as error:
        return None, str(error)


class GroupPublications(Publications):
    def __init__(self, blocks: int, groups: Groups) -> None:
        """blocks: of vLLM's pool. SegmentError if there is no memory for the table."""
        super().__init__(blocks, groups.blocks)
        self.lead, self._groups = groups.lead, groups
        self._places = [
            group.block_size // groups.place
            for group in sorted(groups.groups, key=lambda one: one.number)
        ]
        self._published: npt.NDArray[np.uint64] = np.zeros(blocks, dtype=np.uint64)
        """By block: the generation in which it was published; 0: never."""
        self._kept: npt.NDArray[np.uint64] = np.zeros(blocks, dtype=np.uint64)
        """By block: the generation in which it is kept as if vLLM's own cache had it; 0: never."""

    def watch(self, pool: Any) -> None:
        super().watch(pool)
        # No `Duplicates`: `free_blocks` below decides what vLLM gives away first.
        self.duplicates = None
        free = pool.free_blocks

        def free_blocks(ordered_blocks: Iterable[Any], *arguments: Any, **more: Any) -> Any:
            blocks = list(ordered_blocks)
            freed = free(blocks, *arguments, **more)
            try:
                self._keep(pool.free_block_queue, blocks)
            except Exception:  # vLLM goes on with whatever order there is
                self._kept[:] = 0
                log.exception("vcache: the blocks of windows are evicted as early as by vLLM alone")
            return freed

        pool.free_blocks = free_blocks

    def choose(
        self, tracked: Tracked, found: Found, tables: Tables, first: int
    ) -> tuple[int, dict[int, Replica]]:
        hits, reached, chosen = choose_with_windows(found, tables, self._groups)
        if reached > hits:
            # Another prompt begins with the same chunks, but has lost its windows there: keep this
            # request's for the next prompt.
            tracked.junction = first + reached
        return hits, chosen

    def complete(
        self, tracked: Tracked, first: int, ready: int, loaded: bool
    ) -> list[PublicationSpec]:
        """See `Publications.complete`. Earlier chunks are published again if more of their blocks
        can be read now.
        """
        if self._pool is None or self._pool.broken:
            return []
        self._counts(tracked)
        self._fill()
        rows, known = (
            [np.array(row) for row in tracked.rows],
            [np.array(its) for its in tracked.generations],
        )
        ready = min(ready, self._groups.length(tracked.generations) // self._groups.size)
        blocks, generations = (
            self._groups.table(rows, 0, ready),
            self._groups.table(known, 0, ready).astype(np.uint64),
        )
        there = (self.generations.counters[blocks] == generations) & (
            generations & np.uint64(1) == 0
        )
        whole = there[:, : self.lead].all(axis=1)
        right = ready if whole.all() else int(whole.argmin())
        there[right:] = False
        blocks, generations = (
            np.where(there, blocks, NULL),
            np.where(there, generations, np.uint64(0)),
        )
        new = (there & (self._published[blocks] != generations)).any(axis=1)
        leads = (
            (at, (blocks[at, : self.lead].tolist(), generations[at, : self.lead].tolist()))
            for at in range(first, right)
        )
        new[[at for at, _ in self._fresh(tracked, leads)]] = True
        chosen = np.flatnonzero(new)
        self._published[blocks[there]] = generations[there]
        ends = {
            *range(
                max(first + 1, (tracked.request.num_prompt_tokens - 1) // self._groups.size),
                right + 1,
            )
        }
        for end in ends | {tracked.junction} & {*range(first + 1, right + 1)}:
            for numbers, its in zip(
                self._groups.window(rows, end), self._groups.window(known, end), strict=True
            ):
                self._kept[numbers] = its
        self._kept[NULL] = 0
        made = list[PublicationSpec]()
        for some in (
            chosen[at : at + MAX_PUBLISHED] for at in range(0, len(chosen), MAX_PUBLISHED)
        ):
            lies = blocks[some].astype("<u4").tobytes(), generations[some].astype("<u8").tobytes()
            made.append(
                self._spec(tracked, [tracked.keys[chunk] for chunk in some.tolist()], *lies, loaded)
            )
        return made

    def forget(self, tracked: Tracked, first: int) -> None:
        super().forget(tracked, first)
        for row in tracked.rows:
            self._published[row] = 0

    # ---- inside

    def _fill(self) -> None:
        super()._fill()
        # vLLM's null block stands where a window has passed, and holds nobody's tokens.
        self.generations.void([NULL])

    def _right(self, tracked: Tracked) -> bool:
        for group in self._groups.groups:
            row, generations = (
                np.array(tracked.rows[group.number]),
                np.array(tracked.generations[group.number]),
            )
            row = row[: len(generations)]
            lost = generations & np.uint64(1) == 1
            if group.window:
                # Blocks that are null now were passed by the window; all others are read by what is
                # computed from now on.
                lost &= row != NULL
            else:
                lost |= self.generations.counters[row] != generations
            if lost.any():
                return False
        return True

    def _keep(self, queue: Any, blocks: list[Any]) -> None:
        """vLLM has freed these blocks. Move the kept ones that its own cache does not hold, and
        would hand out next, to the queue's end.
        """
        numbers = [block.block_id for block in blocks]
        kept = np.flatnonzero(self._kept[numbers] == self.generations.counters[numbers])
        for block in (blocks[at] for at in kept.tolist()):
            if not block.ref_cnt and block.block_hash is None:
                queue.remove(block)
                queue.append(block)
