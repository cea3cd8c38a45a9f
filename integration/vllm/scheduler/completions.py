"""Finds the chunks that each step completes, for workers to store or publish after the step. Tracks
the requests' blocks."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from math import inf
from typing import Any

from vcache_backend.config import Config
from vcache_backend.transfer.keys import state_keys

from ...doubts import UntrustedBlocks
from ..in_place.block_pool import NUMBERS
from ..metadata import StepMetadata, StoreSpec
from ..model.groups import Groups
from ..telemetry.events import block_stored
from .introduction import Introduction
from .lookups import Lookups
from .tracked import Tracked


class Completions:
    """In the scheduler's thread."""

    def __init__(
        self,
        config: Config,
        stores: bool,
        groups: Groups,
        hash_block: int,
        spec_kind: str | None,
        instance: Introduction,
        lookups: Lookups,
        untrusted: UntrustedBlocks,
    ) -> None:
        """stores: the instance's role allows stores. hash_block: tokens of a vLLM hash. spec_kind:
        the kind of KV cache, for events."""
        self._size, self._block = config.engine.chunk_size, groups.block
        self._hash_block, self._hashes = hash_block, config.engine.chunk_size // hash_block
        self._spec_kind = spec_kind
        self._prompts_only = config.connector.store == "prompt"
        self._stores_allowed = stores
        self._groups = groups
        self._instance = instance
        self._lookups = lookups
        self._publications = instance.publications
        self._untrusted = untrusted
        self._offered: Mapping[str, list[tuple[int, int, int]]] = {}
        """For the step being planned: the states in vLLM's prefix cache, by request, as (group,
        block, tokens)."""
        self._watched = set[str]()
        self._spare = 0.0
        """Requests that continued in the last planned step, and the tokens that each of them may
        still compute before its `Tracked.due`."""
        self._still = False
        """The last result of `quiet`, for the step being planned."""

    def quiet(self, cached: Any, scheduled: Mapping[str, int]) -> bool:
        """Whether the requests that continue in a step, `cached`, get no blocks, and none reaches
        its `Tracked.due`. Call once a step, before `plan`. scheduled: the step's tokens by
        request."""
        names = cached.req_ids
        self._spare -= max(map(scheduled.__getitem__, names), default=0)
        self._still = (
            self._spare > 0
            and self._watched.issuperset(names)
            and not any(cached.new_block_ids)
            and not cached.resumed_req_ids
        )
        return self._still

    def plan(self, output: Any, requests: Mapping[str, Tracked], meta: StepMetadata) -> None:
        """Plan a step: add stores, publications and newly assigned blocks to `meta`.

        output: vLLM's description of the step. Chunks of a doubtful request wait for a later step,
        after the doubt has ended."""
        if self._groups.states:
            state = getattr(output, "kv_connector_block_state", None)
            self._offered = getattr(state, "boundary_state_offloads", {})
        # Running requests first: new requests may hit the blocks that they write in this step.
        if not self._still:
            self._plan_running(output, requests, meta)
        for new in output.scheduled_new_reqs:
            meta.fresh += new.block_ids
            tracked = requests.get(new.req_id)
            if tracked is not None:
                self.own(tracked, new.block_ids, anew=True)
                computed = new.num_computed_tokens
                self._begin(tracked, computed)
                reached = computed + output.num_scheduled_tokens[new.req_id]
                self._computes(tracked, computed, reached, meta)

    def stop(self, requests: Iterable[Tracked]) -> None:
        """Store no more chunks of these requests, whose blocks are now unknown."""
        for tracked in requests:
            tracked.store.complete_at = inf
            if self._publications is not None:
                self._publications.stop(tracked)

    def own(self, tracked: Tracked, rows: Sequence[Sequence[int]], anew: bool) -> None:
        """Note blocks that vLLM assigned to the request, by block table. anew: replace all earlier
        blocks."""
        if anew:
            tracked.store.rows = [array(NUMBERS, row) for row in rows]
        else:
            for own, row in zip(tracked.store.rows, rows, strict=True):
                own.extend(row)

    def stored(self, tracked: Tracked, chunks: int) -> None:
        """Note that the request's first `chunks` chunks are stored or being stored."""
        tracked.store.stored = chunks
        tracked.due = 0
        self._watched.discard(tracked.request.request_id)
        stores = self._stores_allowed and tracked.params.store and not self._instance.refused
        if stores and self._prompts_only:
            stores = tracked.request.num_prompt_tokens >= (chunks + 1) * self._size
        tracked.store.complete_at = (chunks + 1) * self._size if stores else inf

    def expect(self, tracked: Tracked, first: int, stop: int) -> None:
        """Prepare KV events, if anybody listens, for the request's chunks [first, stop), which may
        be stored."""
        announcer, size = self._instance.announcer, self._size
        if announcer is None:
            return
        for number in range(first, stop):
            tokens = number * size, (number + 1) * size
            event = block_stored(tracked.request, *tokens, self._hash_block, self._spec_kind)
            announcer.expect(tracked.lookup.keys[number], event)

    # ---- inside

    def _plan_running(
        self, output: Any, requests: Mapping[str, Tracked], meta: StepMetadata
    ) -> None:
        """Plan the step of requests that ran before. Every request passes here: keep it short."""
        scheduled, cached = output.num_scheduled_tokens, output.scheduled_cached_reqs
        names, resumed = cached.req_ids, cached.resumed_req_ids
        self._spare = 0.0
        spare = inf
        all_tracked, tokens = map(requests.get, names), map(scheduled.__getitem__, names)
        steps = zip(
            all_tracked, cached.num_computed_tokens, tokens, cached.new_block_ids, strict=True
        )
        for tracked, computed, count, added in steps:
            if added is not None:
                meta.fresh += added
            if tracked is None:
                continue
            reached = computed + count
            # Most steps of a running request complete neither a block nor a chunk.
            if added is None and reached < tracked.due and not resumed:
                if tracked.due - reached < spare:
                    spare = tracked.due - reached
                continue
            if tracked.request.request_id in resumed:
                rows = added if added is not None else [[] for _ in tracked.store.rows]
                self.own(tracked, rows, anew=True)
                self._begin(tracked, computed)
            elif added is not None:
                self.own(tracked, added, anew=False)
            self._computes(tracked, computed, reached, meta)
            spare = min(spare, tracked.due - reached)
        self._watched = set(names)
        self._spare = spare

    def _begin(self, tracked: Tracked, computed: int) -> None:
        if self._publications is not None:
            blocks, rest = divmod(computed, self._block)
            self._publications.begin(tracked, blocks, rest > 0)
            self.stored(tracked, 0)

    def _computes(self, tracked: Tracked, computed: int, reached: int, meta: StepMetadata) -> None:
        """Handle a request that computes the tokens [computed, reached) in the step."""
        store, block = tracked.store, self._block
        # Speculative tokens may be taken back.
        store.written = min(reached, tracked.request.num_tokens)
        if reached < tracked.due:
            return
        if self._publications is not None and reached >= (tracked.resident.filled + 1) * block:
            # As vLLM counts them: speculative tokens do not count.
            filled = min(store.written // block, len(store.rows[0]))
            if filled > tracked.resident.filled:
                self._publications.fill(tracked, filled)
        sure = not self._untrusted.untrusted_until(store.rows)
        if reached >= store.complete_at and sure:
            self._complete(tracked, computed, meta)
        if self._groups.states:
            if sure:
                self._keep_states(tracked, reached, meta)
        elif self._publications is None:
            tracked.due = store.complete_at
        else:
            tracked.due = min(store.complete_at, (tracked.resident.filled + 1) * block)

    def _keep_states(self, tracked: Tracked, reached: int, meta: StepMetadata) -> None:
        """Store the layers' states at all ends of chunks in the step, except the loaded state."""
        request, groups = tracked.request, self._groups
        ends = groups.ended(tracked.store.rows, reached, self._offered.get(request.request_id, ()))
        limit = request.num_prompt_tokens if self._prompts_only else request.num_tokens
        stores = self._stores_allowed and tracked.params.store and not self._instance.refused
        for tokens, blocks in ends.items():
            chunks = tokens // self._size
            if not stores or not tracked.supplied < tokens <= limit:
                continue
            if (
                chunks <= len(request.block_hashes) // self._hashes
                and self._instance.open()
                and self._lookups.name(tracked, chunks)
            ):
                # Chunks have a fixed size: repeat the state's last block up to the chunk's end.
                blocks = blocks + blocks[-1:] * (groups.parts * groups.blocks - len(blocks))
                keys = state_keys(tracked.lookup.keys[chunks - 1 : chunks], groups.parts)
                before = tracked.lookup.keys[:chunks]
                meta.stores.append(StoreSpec(keys, blocks, before))

    def _complete(self, tracked: Tracked, before: int, meta: StepMetadata) -> None:
        """Store or publish the chunks that the step completes. before: the tokens before the step.

        Speculative tokens do not count: vLLM may take them, and the tokens after them, back."""
        request, size, first = tracked.request, self._size, tracked.store.stored
        rows, groups = tracked.store.rows, self._groups
        length = len(rows[0]) * groups.block if groups.plain else groups.length(rows)
        tokens = min(tracked.store.written, length)
        if self._prompts_only:
            tokens = min(tokens, request.num_prompt_tokens)
        ready = min(tokens // size, len(request.block_hashes) // self._hashes)
        if ready <= first or not self._instance.open() or not self._lookups.name(tracked, ready):
            return
        if not groups.plain:
            # Skip chunks behind a window, whose blocks vLLM has freed.
            first = groups.alive_from(rows, before, first, ready)
        if self._instance.announcer is not None:
            self.expect(tracked, first, ready)
        if self._publications is not None:
            loaded = ready * size <= tracked.supplied
            meta.publications += self._publications.complete(tracked, first, ready, loaded)
            self.stored(tracked, ready)
            return
        if keys := tracked.lookup.keys[first:ready]:
            blocks = groups.chunks(rows, first, ready)
            prefix = tracked.lookup.keys[:first]
            meta.stores.append(StoreSpec(keys, blocks, prefix))
        self.stored(tracked, ready)
