"""What each step stores or publishes, and which blocks a load fills. Tracks the requests'
blocks."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain, count
from math import inf
from operator import attrgetter
from typing import Any

from msgspec.structs import replace

from vcache_backend.protocol.messages import BlockRun, ChunkKey, ResidentRun

from .instance import InstanceContext
from .lookups import Lookups
from .metadata import Chunks, LoadSpec, MoreBlocks, PublicationSpec, StepMetadata, StoreSpec
from .model.groups import Span
from .requests import Beginning, Tracked
from .telemetry.events import block_stored

ROW = attrgetter("req_id", "block_ids", "num_computed_tokens")
"""Of vLLM's description of a new request."""


class StorePlanner:
    """Runs in the scheduler's thread."""

    def __init__(self, context: InstanceContext, lookups: Lookups, spec_kind: str | None) -> None:
        """spec_kind: the kind of KV cache, for events."""
        self._context, self._lookups, self._spec_kind = context, lookups, spec_kind
        self._size, self._groups = context.chunk_size, context.groups
        self._publications, self._copies = context.publications, context.copies
        self._load_numbers = count(1)
        self._offered: Mapping[str, list[tuple[int, int, int]]] = {}
        """The states in vLLM's prefix cache, by request, as (group, block, tokens)."""
        self._completed: list[tuple[list[ChunkKey], list[int]]] = []
        """In place: chunks that steps have completed, and their blocks, for `take_completed`."""
        self.trusted = 0
        """The last echo behind which no load of another connector has failed (see `Resets`)."""

    # ---- loads

    def load(self, tracked: Tracked, block_tables: Sequence[list[int]]) -> LoadSpec:
        """Make the load of the tokens [tracked.local, tracked.supplied) that the look-up found, and
        note that its chunks need no store. ValueError if the chunks do not fit vLLM's blocks."""
        size, end, answer = self._size, tracked.supplied, tracked.lookup.answer
        below, groups = self._context.offload, self._groups
        first, stop = tracked.local // size, -(-end // size)
        # Otherwise other KV caches have all of its blocks.
        by_chunks = answer is None or answer.by_chunks or below is not None
        by_chunks &= not self._context.by_ends
        parts = groups.parts if first < stop else 0
        chunks = self._lookups.chunks(tracked, first, stop, parts) if by_chunks else Chunks()
        # Allow the offload tier even if the pool had all chunks: the pool may lose some before the
        # load reads them.
        offload = not groups.states and below is not None and below.usable
        promote = offload and self._context.stores and tracked.params.store
        load = LoadSpec(
            request_id=tracked.request.request_id,
            chunks=chunks,
            offload=offload,
            promote=promote and self._publications is None,
            number=self.load_number(),
            open=tracked.wait.wait is not None,
            **self._blocks(tracked, block_tables, by_chunks),
        )
        # Chunks loaded from the pool are stored already. Only whole chunks of the offload tier are
        # promoted.
        promoted = load.promote and answer is not None and answer.offloaded
        if self._publications is None:
            loaded = end // size if promoted else stop
            self.mark_stored(tracked, max(tracked.store.stored, loaded))
        if promoted:
            self._announce(tracked, first, end // size)
        return load

    def load_number(self) -> int:
        """The next load's."""
        return next(self._load_numbers)

    def more(self, tracked: Tracked, found: bool) -> MoreBlocks:
        """Go on with the request's open load, or end it if the request no longer waits. found: its
        last look-up has found blocks."""
        load, answer, context = tracked.load, tracked.lookup.answer, self._context
        assert load is not None
        runs = list[ResidentRun]()
        if found and answer is not None:
            block = context.groups.block
            span = Span(0, tracked.local // block, 0, len(load.blocks), had=0)
            runs = answer.runs_of(span, answer.first * self._size // block)
        return MoreBlocks(load.number, runs, tracked.wait.wait is None)

    def _blocks(
        self, tracked: Tracked, block_tables: Sequence[list[int]], by_chunks: bool
    ) -> dict[str, Any]:
        """The load of the tokens [tracked.local, tracked.supplied): `blocks`, and in place what
        belongs to them."""
        context, groups, answer = self._context, self._groups, tracked.lookup.answer
        local, end = tracked.local, tracked.supplied
        if self._publications is None:
            return {"blocks": groups.wanted(block_tables, local, end)}
        begin = local // self._size * self._size if by_chunks else local
        blocks, spans = groups.spans(block_tables, begin, local, end)
        runs = list[ResidentRun]()
        if answer is not None:
            for span in spans:
                scale = self._publications.tables[span.table].scale
                runs += answer.runs_of(span, answer.first * context.hashes // scale)
        told = self._published(tracked, blocks, spans)
        return {"blocks": blocks, "tokens": spans[0].length, "residents": runs, "publication": told}

    def _published(
        self, tracked: Tracked, blocks: Sequence[int], spans: Sequence[Span]
    ) -> PublicationSpec | None:
        """The publication of a load's blocks, which have generations from now on. Their worker
        makes it once the load has proved what they hold."""
        own, most = self._publications, self._may_publish(tracked, {})
        if own is None or not most:
            return None
        runs, lacking = list[BlockRun](), 0
        for span in spans:
            lacking += span.length - (span.had or 0)
            if span.had is None:
                # The step after the load publishes them.
                continue
            first, scale = span.first + span.had, own.tables[span.table].scale
            stop = min(span.first + span.length, most // scale)
            if first < stop:
                begin = span.at - span.first
                numbers = blocks[begin + first : begin + stop]
                hashes = self._lookups.hashes(tracked, first, stop, scale)
                runs.append(own.filled(span.table, first, hashes, numbers))
                lacking -= len(numbers)
        if not lacking:
            own.on_load(tracked)
        return PublicationSpec(runs, self._context.news.epoch, later=True) if runs else None

    # ---- steps

    def plan(
        self,
        output: Any,
        requests: Mapping[str, Tracked],
        beginning: Mapping[str, Beginning],
        meta: StepMetadata,
    ) -> None:
        """Plan a step: add stores, publications and newly assigned blocks to `meta`.

        output: vLLM's description of the step. beginning: the requests that begin or resume in it,
        by name."""
        if self._groups.states:
            state = getattr(output, "kv_connector_block_state", None)
            self._offered = getattr(state, "boundary_state_offloads", {})
        scheduled, cached = output.num_scheduled_tokens, output.scheduled_cached_reqs
        rows = zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True)
        # Running requests first: new requests may hit the blocks that they write in this step.
        for name, added, computed in chain(rows, map(ROW, output.scheduled_new_reqs)):
            tracked, reached = requests.get(name), computed + scheduled[name]
            if added is None and (tracked is None or reached < tracked.store.idle_until):
                continue  # in most steps most requests complete neither a block nor a chunk
            if self._copies:
                meta.fresh += added or ()
            if tracked is None:
                continue
            if name in beginning:
                self._begin(beginning[name])
            elif added is not None:
                tracked.store.extend(added)
            self._compute(tracked, computed, reached, meta)
        if self._publications is not None and self._context.stores:
            allowed = partial(self._may_publish, scheduled=scheduled)
            given = requests, allowed, self._lookups, self._context.news.epoch
            meta.publications = self._publications.publish(*given)

    def take_completed(self) -> list[tuple[list[ChunkKey], list[int]]]:
        """In place: the chunks that steps have completed since the last call, and their blocks."""
        completed, self._completed = self._completed, []
        return completed

    def _may_publish(
        self,
        tracked: Tracked,
        seen: dict[tuple[Any, ...], str],
        scheduled: Mapping[str, int] | None = None,
    ) -> int | None:
        """The blocks of how many leading hashes a request may publish. None: not before another
        connector's load is over. seen: see `Lookups.name`. scheduled: the tokens of each request in
        the step being planned: no other step's, however early vLLM names their blocks. None: of a
        load."""
        if not self._may_store(tracked):
            return 0
        if tracked.store.trusted_after > self.trusted:
            return None
        if not self._lookups.name(tracked, seen):
            return 0
        request, size = tracked.request, self._context.hash_block
        hashes = len(request.block_hashes)
        if scheduled is not None:
            reached = request.num_computed_tokens + scheduled.get(request.request_id, 0)
            hashes = min(hashes, reached // size)
        return (
            min(hashes, request.num_prompt_tokens // size) if self._context.prompts_only else hashes
        )

    def stop(self, tracked: Tracked) -> None:
        """Store nothing more of the request, whose blocks may not hold what they should."""
        tracked.params = replace(tracked.params, store=False)
        tracked.store.complete_at = inf
        if self._publications is not None:
            self._publications.stop(tracked)

    def mark_stored(self, tracked: Tracked, chunks: int) -> None:
        """Note that the request's first `chunks` chunks are stored or being stored."""
        store, end = tracked.store, (chunks + 1) * self._size
        store.stored, store.idle_until = chunks, 0.0
        prompt = tracked.request.num_prompt_tokens if self._context.prompts_only else inf
        stores = self._may_store(tracked) and prompt >= end
        store.complete_at = (end if self._copies else sys.maxsize) if stores else inf

    # ---- inside

    def _may_store(self, tracked: Tracked) -> bool:
        return self._context.stores and tracked.params.store and not self._context.refused

    def _begin(self, begins: Beginning) -> None:
        """Note a request's blocks, in place of all earlier ones."""
        tracked, own = begins.tracked, self._publications
        # vLLM's runner adds to these lists.
        tracked.store.block_tables = list(map(list, begins.block_tables))
        if own is not None and self._context.stores:
            blocks, rest = divmod(begins.computed, self._groups.block)
            size = self._context.hash_block
            supplied = blocks * self._groups.block // size
            # vLLM's own hit within a block.
            hit = begins.whole < begins.computed and not own.pool.stale
            own.begin(tracked, tracked.local // size, supplied, rest > 0 and not hit)
            self.mark_stored(tracked, 0)

    def _compute(
        self,
        tracked: Tracked,
        computed: int,
        reached: int,
        meta: StepMetadata,
    ) -> None:
        """Handle a request that computes the tokens [computed, reached) in the step."""
        store = tracked.store
        # Speculative tokens may be taken back.
        store.written = min(reached, tracked.request.num_tokens)
        prompt = tracked.request.num_prompt_tokens
        if computed < prompt <= reached:
            self._publish_tail(tracked)
        if reached < store.idle_until:
            return
        trusted = store.trusted_after <= self.trusted
        if reached >= store.complete_at and trusted:
            self._complete(tracked, computed, meta)
        if not self._groups.states or self._publications is not None:
            ends = prompt if self._context.tails and reached < prompt else inf
            store.idle_until = min(store.complete_at, ends)
        elif trusted:
            self._keep_states(tracked, reached, meta)

    def _publish_tail(self, tracked: Tracked) -> None:
        """Publish the tokens behind a prompt's last whole block, too, if the request wants one
        token: a decode server asked for the prompt."""
        own, request = self._publications, tracked.request
        if own is None or not self._context.tails or request.max_tokens != 1 or request.resumable:
            return
        own.on_prompt(tracked)

    def _complete(self, tracked: Tracked, before: int, meta: StepMetadata) -> None:
        """Store the chunks that the step completes. before: the tokens before the step.

        Speculative tokens do not count: vLLM may take them, and the tokens after them, back."""
        request, size, first = tracked.request, self._size, tracked.store.stored
        tables, groups = tracked.store.block_tables, self._groups
        length = len(tables[0]) * groups.block if groups.plain else groups.length(tables)
        tokens = min(tracked.store.written, length)
        if self._context.prompts_only:
            tokens = min(tokens, request.num_prompt_tokens)
        ready = min(tokens // size, len(request.block_hashes) // self._context.hashes)
        if ready <= first or not self._context.open() or not self._lookups.name(tracked):
            return
        if self._publications is not None:
            self._announce(tracked, first, ready)
            blocks = groups.chunks(tables, first, ready)
            self._completed.append((self._lookups.keys(tracked, first, ready), blocks))
            self.mark_stored(tracked, ready)
            return
        if not groups.plain:
            # Skip chunks behind a window, whose blocks vLLM has freed.
            first = groups.alive_from(tables, before, first, ready)
        self._announce(tracked, first, ready)
        if first < ready:
            chunks = self._lookups.chunks(tracked, first, ready)
            blocks = groups.chunks(tables, first, ready)
            meta.stores.append(StoreSpec(chunks, blocks, self._context.news.epoch))
        self.mark_stored(tracked, ready)

    def _keep_states(
        self,
        tracked: Tracked,
        reached: int,
        meta: StepMetadata,
    ) -> None:
        """Store the layers' states at all ends of chunks in the step, except the loaded state."""
        request, groups = tracked.request, self._groups
        if not self._may_store(tracked):
            return
        limit = request.num_prompt_tokens if self._context.prompts_only else request.num_tokens
        states = self._offered.get(request.request_id, ())
        for tokens, blocks in groups.ended(tracked.store.block_tables, reached, states).items():
            chunks = tokens // self._size
            if (
                tracked.supplied < tokens <= limit
                and chunks <= len(request.block_hashes) // self._context.hashes
                and self._context.open()
                and self._lookups.name(tracked)
            ):
                # Chunks have a fixed size: repeat the state's last block up to the chunk's end.
                blocks = blocks + blocks[-1:] * (groups.parts * groups.blocks - len(blocks))
                state = self._lookups.chunks(tracked, chunks, chunks, groups.parts)
                meta.stores.append(StoreSpec(state, blocks, self._context.news.epoch))

    def _announce(self, tracked: Tracked, first: int, stop: int) -> None:
        """Prepare KV events, if anybody listens, for the request's chunks [first, stop), which may
        be stored."""
        context, size = self._context, self._size
        if context.announcer is None:
            return
        for number, key in enumerate(self._lookups.keys(tracked, first, stop), first):
            tokens = number * size, (number + 1) * size
            event = block_stored(tracked.request, *tokens, context.hash_block, self._spec_kind)
            context.announcer.expect(key, event)
