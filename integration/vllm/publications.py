"""Sharing in place: the generations of this instance's blocks, and the blocks that it publishes.

What vLLM puts into its own prefix cache is published, block by block, so other instances find what
this instance would find."""

from __future__ import annotations

import secrets
from array import array
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from operator import is_
from typing import TYPE_CHECKING, Any

import msgspec

from vcache_backend.protocol.messages import (
    GENERATION_BYTES,
    INSTANCE_BYTES,
    BlockRun,
    BlockTable,
    InstanceId,
)
from vcache_backend.vram_pool.generations import VOID, Generations

from .blocks import NUMBERS, TrackedBlockPool, hashes_of
from .metadata import PublicationSpec
from .requests import BEGINS, LATER, UNLOADED, Tracked

if TYPE_CHECKING:
    from .lookups import Lookups


class CachedRun(msgspec.Struct, frozen=True):
    """Blocks that vLLM has put into its prefix cache: consecutive blocks of a request's block
    table, from number `first` on. table: its place in `Publications.tables`. hashes: vLLM's of
    each, with the table; empty if vLLM takes none of these blocks from a running request.
    preemptions, evicted: of the request, and of vLLM's pool, by then."""

    request: Any
    table: int
    first: int
    blocks: list[Any]
    hashes: list[Any]
    preemptions: int
    evicted: int

    def kept(self, evicted: int) -> bool:
        """Whether the blocks still have these hashes. vLLM may have taken the step from the
        request, and the blocks with it. evicted: of vLLM's pool, now."""
        if self.hashes:
            return all(map(is_, hashes_of(self.blocks), self.hashes))
        # To look at each block takes long.
        return self.preemptions == self.request.num_preemptions and (
            self.evicted == evicted or None not in hashes_of(self.blocks)
        )


class Publications:
    """Tracks which blocks may be published. Runs in the scheduler's thread."""

    def __init__(self, blocks: int, tables: Mapping[int, BlockTable]) -> None:
        """blocks: the number of blocks in vLLM's pool. tables: the block tables that a hit needs,
        by vLLM's number. SegmentError if memory for the table is lacking."""
        self.instance = InstanceId(secrets.token_bytes(INSTANCE_BYTES))
        """A random name, new at each start of the engine."""
        self.tables = list(tables.values())
        self._numbers = list(tables)
        """For each of `tables`, vLLM's number."""
        self.attends_to_all = any(table.kind == "full" for table in self.tables)
        """The model has a table of full attention, whose blocks vLLM all keeps."""
        self.generations = Generations(self.instance, blocks)
        self._cached: list[CachedRun] = []
        """Since the last `publish`, and runs of requests that are not trusted yet."""
        self._begun: list[tuple[Tracked, int]] = []
        """Requests that begin in the step being planned, and how many hashes' blocks vLLM's own
        cache supplies."""
        self._tails: list[Tracked] = []
        """Requests whose prompts the step being planned completes, for other instances."""
        self.pool = TrackedBlockPool(self.generations)

    def filled(self, table: int, first: int, hashes: bytes, numbers: Sequence[int]) -> BlockRun:
        """Give blocks of the table, from number `first` on, a generation. Returns them as a run to
        be published once they are written."""
        generation = self.generations.filled(numbers).to_bytes(GENERATION_BYTES, "little")
        packs = array(NUMBERS, numbers).tobytes(), generation * len(numbers)
        return BlockRun(first, *packs, table, hashes)

    def on_load(self, tracked: Tracked) -> None:
        """Note that all blocks of a load have generations."""
        tracked.in_place.loaded = self.pool.resets, self.pool.evicted

    def on_failed(self, tracked: Tracked, left: Sequence[int]) -> None:
        """Note that a load has not filled the blocks `left`, into which vLLM may compute. The
        request may begin with other blocks than those of the load."""
        tracked.in_place.loaded = UNLOADED
        self.generations.void(left)

    def on_prompt(self, tracked: Tracked) -> None:
        """Note that the step being planned computes a prompt's last tokens for another instance."""
        self._tails.append(tracked)

    def on_cached(
        self,
        request: Any,
        table: int,
        first: int,
        blocks: list[Any],
        mask: Sequence[bool] | None = None,
    ) -> None:
        """Note what vLLM puts into its prefix cache (`KVBlocks.on_cached`)."""
        # Without a bound runs that wait for another connector's load could fill the memory.
        if table not in self._numbers or len(self._cached) >= 1 << 16:
            return
        place, turn = self._numbers.index(table), (request.num_preemptions, self.pool.evicted)
        if self.tables[place].kind == "full" and mask is None:
            self._cached.append(CachedRun(request, place, first, blocks, [], *turn))
            return
        wanted = mask if mask is not None else [True] * len(blocks)
        cached = [has and not block.is_null for has, block in zip(wanted, blocks, strict=True)]
        at = 0
        for has, group in groupby(cached):
            begin, at = at, at + len(list(group))
            if has:
                run, hashes = blocks[begin:at], hashes_of(blocks[begin:at])
                self._cached.append(CachedRun(request, place, first + begin, run, hashes, *turn))

    def stop(self, tracked: Tracked) -> None:
        """Publish no more of the request in its present blocks, nor of a session's next turn if the
        turn completes one of them."""
        tracked.in_place.publishes, tracked.in_place.resets = False, None

    def begin(self, tracked: Tracked, hit: int, computed: int, partial: bool) -> None:
        """Note the first step of a request, or of a session's turn, with its present blocks.

        hit: how many hashes' blocks vLLM's own cache supplies; computed: the same, and those of a
        load. These blocks may be void: vLLM keeps blocks over a reset that it refuses. partial: the
        block behind them holds tokens, too, from the session's last turn or another connector's
        load."""
        state = tracked.in_place
        state.publishes = not partial or state.resets == self.pool.resets
        state.resets, state.supplied, state.evicted = self.pool.resets, computed, BEGINS
        state.filled = {}
        # Nobody has voided a block that the request has since its load.
        whole = state.loaded == (self.pool.resets, self.pool.evicted)
        state.had, state.loaded = hit if whole else computed, UNLOADED
        self._begun.append((tracked, hit))

    def publish(
        self,
        requests: Mapping[str, Tracked],
        allowed: Callable[[Tracked, dict[tuple[Any, ...], str]], int | None],
        lookups: Lookups,
        epoch: int,
    ) -> list[PublicationSpec]:
        """Make the publications of a step that has been planned: of all blocks that vLLM has cached
        since the last call.

        allowed: the blocks of how many leading hashes a request may publish; None: not yet.
        lookups: names the blocks; what builds on a void one stays void. epoch: the namespace's."""
        if not (self._cached or self._begun or self._tails):
            return []
        seen = dict[tuple[Any, ...], str]()
        soon, later, kept = list[BlockRun](), list[BlockRun](), list[CachedRun]()
        for run in self._cached:
            tracked = requests.get(run.request.request_id)
            if tracked is None or tracked.request is not run.request:
                continue
            # Those of a load of ours are published by its worker.
            loaded = not self.generations.counters.data[run.blocks[0].block_id] & VOID
            if loaded or not run.kept(self.pool.evicted):
                continue
            state = tracked.in_place
            most = None if state.publishes and state.resets is None else allowed(tracked, seen)
            if most is None:
                kept.append(run)
            elif self._builds_on_right(tracked):
                numbers = [block.block_id for block in run.blocks]
                scale, length = self.tables[run.table].scale, len(numbers)
                count = min(length, max(0, most // scale - run.first))
                stop = run.first + count
                named = lookups.hashes(tracked, run.first, stop, scale) if count else b""
                made = self.filled(run.table, run.first, named, numbers)
                state.filled[run.table] = run.first + length
                if count:
                    # Another connector's load, or an answer.
                    waits = run.request.num_output_tokens > 0 or stop * scale <= state.supplied
                    told = later if waits else soon
                    told.append(made if count == length else made.cut(run.first, run.first + count))
        self._cached = kept
        while self._tails:
            tracked = self._tails.pop()
            if allowed(tracked, seen) and self._builds_on_right(tracked):
                number, name = lookups.tail(tracked, tracked.request.num_prompt_tokens)
                if name:
                    block = tracked.store.block_tables[self._numbers[0]][number : number + 1]
                    soon.append(self.filled(0, number, name, block))
                    self.pool.keep(block[0])
        while self._begun:
            # Now: later a window may have passed, and its blocks be somebody else's.
            tracked, hit = self._begun.pop()
            if tracked.in_place.publishes and tracked.in_place.evicted == BEGINS:
                if allowed(tracked, seen) is None:
                    tracked.in_place.evicted = LATER
                    self._check(tracked, hit, full=False)
                else:
                    self._builds_on_right(tracked)
        specs = (soon, False), (later, True)
        return [PublicationSpec(runs, epoch, waits) for runs, waits in specs if runs]

    def close(self) -> None:
        """Idempotent."""
        self.generations.close()

    # ---- inside

    def _builds_on_right(self, tracked: Tracked) -> bool:
        """Whether all that the request has computed builds on blocks that are not void. Other
        requests may have computed them in the same step, and were noted before."""
        state = tracked.in_place
        if state.publishes and state.resets != self.pool.resets:
            state.publishes = False
        if state.publishes and state.evicted != self.pool.evicted:
            begins, state.evicted = state.evicted == BEGINS, self.pool.evicted
            had = state.had if begins else state.supplied
            self._check(tracked, had, windows=begins or not self.attends_to_all)
        return state.publishes

    def _check(self, tracked: Tracked, had: int, full: bool = True, windows: bool = True) -> None:
        """Publish nothing more of the request if a block that it has built on is void. had: how
        many hashes' blocks it has not computed. full, windows: look at tables of full attention,
        and at others, whose blocks may be another request's after its first step."""
        state = tracked.in_place
        for at, (number, table) in enumerate(zip(self._numbers, self.tables, strict=True)):
            stop, attends_to_all = had // table.scale, table.kind == "full"
            if not (full if attends_to_all else windows):
                continue
            if attends_to_all:
                stop = max(stop, state.filled.get(at, 0))
            blocks: Sequence[int] = tracked.store.block_tables[number][:stop]
            if not attends_to_all:
                blocks = [block for block in blocks if block]
            if blocks and self.generations.has_void(blocks):
                state.publishes = False
