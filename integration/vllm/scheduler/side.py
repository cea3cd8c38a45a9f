"""The connector's scheduler half: decides what each step loads and stores. It never touches KV."""

from __future__ import annotations

import logging
from array import array
from bisect import bisect
from collections.abc import Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from itertools import chain, count
from math import inf
from time import monotonic
from typing import Any

import msgspec

from vcache_backend.config import Config
from vcache_backend.errors import MAX_LINE_CHARS, printable

from ...doubts import Beginning, BlockTables, UntrustedBlocks, beginning
from ...served_at import served_at
from ..in_place.block_pool import NUMBERS, KVBlocks
from ..in_place.publications import Publications
from ..in_place.victims import Victims
from ..metadata import QUIET, LoadSpec, StepMetadata, WorkerReport
from ..model import compat, groups
from ..model.sharing import Plan
from ..model.spec import ShardSpec
from ..telemetry import traces
from ..telemetry.events import Announcer
from ..telemetry.stats import Meter
from . import request_params
from .completions import Completions
from .decide import FOLLOW, MISS, RETRY, Asked, LookupDecision, Rules, decide
from .introduction import Introduction
from .load_specs import LoadSpecs
from .lookups import Lookups
from .own_promises import OwnPromises
from .resets import Resets
from .tracked import StoreState, Tracked
from .waits import Waits

log = logging.getLogger("vllm.vcache")


class SchedulerSide:
    """Answers vLLM's scheduler, in the scheduler's thread.

    Only these wait: `arrived` and `matched` for the server, see `Lookups`; `reset` for two calls,
    of which one may take `client.control_seconds`; the step in which the namespace becomes known,
    for the connection; `close` for its threads; vLLM's allocation of blocks, to open another
    instance's table for the first time."""

    def __init__(
        self,
        vllm_config: Any,
        kv_cache_config: Any,
        decision: Plan,
        loads: bool,
        stores: bool,
        meter: Meter,
    ) -> None:
        """decision: to cache. loads, stores: the instance's role allows loads, stores. SegmentError
        if memory is lacking."""
        model, config, _ = decision
        self._loads_allowed = loads
        self._size = config.engine.chunk_size
        self._least = config.connector.min_hit_tokens
        self._hash_block = compat.hash_block_size(vllm_config, kv_cache_config)
        self._hashes = self._size // self._hash_block
        self.blocks: KVBlocks | None = None
        """vLLM's block pool; None until vLLM has shown it."""
        self._untrusted = UntrustedBlocks()
        self.publications: Publications | None = None
        """This instance's publications; None with `connector.share: pool`."""
        self.victims: Victims | None = None
        """Saves chunks in the pool before they leave the KV cache; None unless a pool stands beside
        KV caches shared in place."""
        self._requests: dict[str, Tracked] = {}
        self._loads: list[LoadSpec] = []
        self._named = False
        """Whether the workers know the instance's name, under which they show their KV caches."""
        self._cancelled: set[str] = set()
        self._groups = groups.read(kv_cache_config, self._size)
        if config.connector.share == "in_place":
            count, each = kv_cache_config.num_blocks, self._groups.blocks
            self.publications = Publications(count, each, loads)
            if config.pool.lent:
                step_tokens = vllm_config.scheduler_config.max_num_batched_tokens
                self.victims = Victims(self.publications, step_tokens // self._groups.block)
        name = served_at(vllm_config)
        root = compat.hash_root(vllm_config)
        self.instance = Introduction(config, model, self._hash_block, root, self.publications, name)
        self._make_parts(vllm_config, kv_cache_config, config, stores, meter)

    def _make_parts(
        self,
        vllm_config: Any,
        kv_cache_config: Any,
        config: Config,
        stores: bool,
        meter: Meter,
    ) -> None:
        """Make the parts that need `instance`. stores: see the constructor."""
        instance = self.instance
        # Chunks shared in place need no events of ours: vLLM announces its own KV cache.
        if compat.publishes_events(vllm_config) and (
            config.connector.share != "in_place" or self.victims is not None
        ):
            instance.announcer = Announcer(instance.ranks)
        self.lookups = Lookups(instance, self._size, meter, self._groups.parts)
        self._specs = LoadSpecs(config, stores, self._groups, instance)
        scheduling = vllm_config.scheduler_config
        self._numbers = count(1)
        self._steps_are_taken = scheduling.policy == "priority"
        """vLLM may take the step being planned from a request."""
        self._guesses = bool(getattr(vllm_config, "num_speculative_tokens", True))
        self._promises = OwnPromises(config, instance, self.lookups, self._untrusted, self._hashes)
        self._rules = Rules(
            self._size, self._least, config.connector.wait_factor, bool(self._groups.parts)
        )
        self._waits = Waits(instance, self.lookups, self._size, meter)
        self.resets = Resets(
            instance, self._numbers, self._drop_answers, self._doubt_all, self._rename
        )
        kind, parts = compat.spec_kind(kv_cache_config), (instance, self.lookups, self._untrusted)
        self._completions = Completions(
            config, stores, self._groups, self._hash_block, kind, *parts
        )
        self._spans = traces.begin(vllm_config)

    # ---- vLLM's questions

    def introduce(self, shards: Iterable[ShardSpec]) -> None:
        """Note the workers' shards, all known at vLLM's start, and connect to the server."""
        self.instance.note({(one.pp_rank, one.tp_rank): one for one in shards}, {})
        self.instance.open()

    def give_up(self) -> None:
        """This half is out of use: other instances read nothing of this KV cache any more, and
        vLLM's block pool does without us. Never raises."""
        if self.publications is not None:
            self.publications.generations.give_up()
        if self.blocks is not None:
            self.blocks.failed = True

    def watch(self, pool: Any, fail: Callable[[str, Exception], None]) -> None:
        """Note vLLM's `BlockPool`, which vLLM shows before the first request. fail: see
        `KVBlocks`."""
        self.blocks = blocks = KVBlocks(pool, fail)
        self._untrusted.watch(blocks)
        if self.publications is not None:
            self.publications.watch(blocks)
        if self.victims is not None:
            self.victims.watch(blocks)

    def arrived(self, request: Any) -> None:
        """Ask the server for a new request's chunks now, so that the answer has arrived when vLLM
        schedules the request."""
        if self.instance.keys is None and not self.instance.open():
            return
        tracked, (tokens, chunks) = self._track(request), self._loadable(request)
        lacking = tokens - self._least
        if lacking < 0 or not tracked.may_load or self.resets.clearing:
            return
        ends, first = range(self._size - 1, tokens, self._size), 0
        # Mostly vLLM's cache lacks even the first chunk.
        if self._has(request, min(lacking, self._size - 1)):
            if self._has(request, lacking):
                return
            first = bisect(ends, False, lo=1, key=lambda token: not self._has(request, token))
        if self.lookups.name(tracked, chunks):
            self.lookups.send(tracked, first, chunks)

    def matched(self, request: Any, local: int) -> tuple[int | None, bool]:
        """Return how many tokens can be loaded after the first `local`, which vLLM has, and whether
        there are any: all loads are asynchronous.

        None in place of a number: ask again in the next step."""
        if self.instance.keys is None and self.instance.waits():
            return RETRY.matched
        self.resets.learn()
        tracked = self._track(request)
        tracked.local = tracked.supplied = local
        decision = self._decide(tracked, local)
        if self._spans is not None and not decision.result.again:
            self._spans.looked_up(tracked, local, decision.tokens)
        return decision.matched

    def allocated(self, request: Any, blocks: Any, external: int) -> None:
        """Prepare the load of `external` tokens into `blocks`, reserved for the request."""
        tracked, rows = self._requests[request.request_id], blocks.get_block_ids()
        tracked.supplied = tracked.local + external
        load, first = self._specs.of(tracked, rows), tracked.local // self._size
        self._stands(tracked, load, first, rows)
        self._promises.on_load(tracked)
        self._loads.append(load)
        tracked.loading = True

    def describe(self, output: Any) -> StepMetadata:
        """Describe the step `output` for the workers: loads, stores, and blocks with a new
        owner."""
        if self.quiet(output):
            return QUIET
        meta = StepMetadata(self._loads)
        self._loads = []
        self.plan(output, meta)
        return meta

    def quiet(self, output: Any) -> bool:
        """Note that the step `output` is planned. Returns whether the workers have nothing to do in
        it, as in most steps: then `plan` is not called for the step."""
        # Every step passes here: keep it short.
        scheduled, cached = output.num_scheduled_tokens, output.scheduled_cached_reqs
        publications = self.publications
        self._promises.rate.look()
        return self._completions.quiet(cached, scheduled) and not (
            not scheduled
            or output.scheduled_new_reqs
            or self._loads
            or self._cancelled
            or output.preempted_req_ids
            or self.instance.keys is None
            or not self._named
            or self.resets.clearing
            or self.victims is not None
            or (publications is not None and publications.news)
        )

    def plan(self, output: Any, meta: StepMetadata) -> None:
        """Complete `meta` for the step `output`: stores, and blocks with a new owner."""
        requests, cached = self._requests, output.scheduled_cached_reqs
        publications = self.publications
        begun: list[Beginning] = []
        if self._cancelled:
            meta.cancelled = self._cancelled
            self._cancelled = set()
        if meta.loads:
            meta.fresh = [load.blocks for load in meta.loads]
        meta.idle = not output.total_num_scheduled_tokens
        if self.instance.keys is None:
            meta.introduce = not self.instance.over
        if not self._named and publications is not None:
            meta.instance = publications.instance
        self._named = True
        if self.resets.clearing:
            meta.echoes.add(self.resets.number)
        self.resets.learn()
        for request_id in output.preempted_req_ids or ():
            if request_id in requests:
                self._promises.ended(requests[request_id])
            if self._steps_are_taken:
                self._evict_unwritten(requests.get(request_id))
        if output.scheduled_new_reqs or cached.resumed_req_ids:
            begun = beginning(output)
            if self._guesses:
                self._distrust_turns([name for name, _, _ in begun])
            self._doubt_loads(begun, meta)
        self._untrusted.follow(output, begun, self._rows)
        self.resets.last &= meta.idle and not meta.loads
        self.resets.begun = True
        if not meta.idle:
            self._completions.plan(output, requests, meta)
        for request_id, computed, _ in begun:
            if request_id in requests:
                self._waits.over(requests[request_id])
                self._promises.begun(requests[request_id], computed)
        if self.victims is not None:
            self.victims.plan(meta)

    def update(self, output: Any) -> None:
        """Handle the workers' reports after a step."""
        report = getattr(output, "kv_connector_worker_meta", None)
        if report is not None and isinstance(report, WorkerReport):
            self._note(report, getattr(output, "invalid_block_ids", None) or frozenset())
            if self._spans is not None:
                self._spans.loaded(report.spans)
        for request_id in output.finished_recving or ():
            # Otherwise a later request of this name would be cancelled.
            self._cancelled.discard(request_id)
            if request_id in self._requests:
                self._requests[request_id].loading = False

    def finished(self, request: Any) -> None:
        """Forget a request that has ended for any reason."""
        tracked = self._requests.pop(request.request_id, None)
        if self._spans is not None:
            self._spans.finished(request.request_id)
        if tracked is not None:
            self._promises.ended(tracked)
            self._waits.over(tracked)
            if tracked.loading:
                tracked.loading = False
                self._cancelled.add(request.request_id)
            elif self.publications is not None and self.publications.duplicates is not None:
                self.publications.duplicates.finished(tracked)

    def close(self) -> None:
        """Idempotent."""
        self._promises.close()
        if self.publications is not None:
            self.publications.close()
        self.instance.close()

    # ---- inside

    def _drop_answers(self) -> None:
        for tracked in self._requests.values():
            self.lookups.forget(tracked)

    def _rename(self) -> None:
        """Forget the requests' keys, and withdraw the promises and announcements of these keys."""
        # First for all requests: nothing may be stored under a key of other weights.
        for tracked in self._requests.values():
            self.lookups.rename(tracked)
        for tracked in self._requests.values():
            self._promises.ended(tracked)
            # The awaited chunks have other keys now.
            self._waits.over(tracked, "withdrawn")
        if self.instance.announcer is not None:
            self.instance.announcer = self.instance.announcer.renewed()

    def _doubt_all(self) -> None:
        """Store nothing that builds on vLLM's present KV. In place, blocks are void or unfilled."""
        if self.publications is None:
            self._untrusted.reset()
            for tracked in self._requests.values():
                self._completions.stored(tracked, 0)

    def _has(self, request: Any, token: int) -> bool:
        """Whether vLLM's prefix cache has the block with this token, and therefore all blocks
        before it."""
        blocks, block = self.blocks, self._groups.block
        if blocks is None or block != self._hash_block or not self._groups.plain:
            return False
        return blocks.cached(request.block_hashes[token // block])

    def _track(self, request: Any) -> Tracked:
        tracked = self._requests.get(request.request_id)
        if tracked is not None and tracked.request is request:
            return tracked
        asked = (
            self._asked(request)
            if request.kv_transfer_params is not None
            else request_params.DEFAULT
        )
        # vLLM has no log probabilities for loaded prompt tokens, but lets connectors load them.
        rated = getattr(request.sampling_params, "prompt_logprobs", None) is not None
        computes = rated or getattr(request, "skip_reading_prefix_cache", False)
        adapter = request.lora_request
        if adapter is not None and not self.lookups.knows(adapter):
            asked = request_params.NOTHING
        blocks = StoreState([array(NUMBERS) for _ in self._groups.sizes])
        loads = self._loads_allowed and asked.load and not computes
        tracked = Tracked(request, asked, loads, store=blocks)
        self._requests[request.request_id] = tracked
        self._completions.stored(tracked, 0)
        if tracked.store.complete_at < inf:
            # Another instance computes an announced prompt.
            tracked.promise.number = next(self._numbers)
            tracked.promise.early = not asked.announced
        return tracked

    def _asked(self, request: Any) -> request_params.RequestParams:
        try:
            return request_params.read(request.kv_transfer_params)
        except ValueError as error:
            name = printable(request.request_id, MAX_LINE_CHARS)  # a client may have chosen it
            log.warning("request %s is served uncached: %s", name, error)
            return request_params.NOTHING

    def _decide(self, tracked: Tracked, local: int) -> LookupDecision:
        """Look the request up, and decide what becomes of it."""
        if (
            not tracked.may_load
            or self.resets.clearing
            or local % self._groups.block
            or (self.instance.keys is None and not self.instance.open())
        ):
            return MISS
        most, chunks = self._loadable(tracked.request)
        if most - local < self._least or not self.lookups.name(tracked, chunks):
            return MISS
        first, waits, params = local // self._size, self._waits, tracked.params
        if waits.follows(tracked, first) or waits.pauses(tracked, first, chunks):
            return FOLLOW
        answer = self.lookups.find(tracked, first, chunks)
        bound = params.wait_seconds if params.announced else None
        may_wait = waits.may_begin(tracked)
        asked = Asked(local, most, chunks, bound, may_wait, tracked.wait.present)
        decision = decide(self._rules, asked, answer, monotonic())
        waits.note(tracked, decision, answer.hits)
        return decision

    def _stands(
        self, tracked: Tracked, load: LoadSpec, first: int, rows: Sequence[Sequence[int]]
    ) -> None:
        """Mark the load's chunks, which need no store. first: the number of the load's first chunk.
        rows: the request's blocks, by block table."""
        end, stop = tracked.supplied // self._size, -(-tracked.supplied // self._size)
        self._waits.on_load(tracked)
        # Chunks loaded from the pool are stored already. Only whole chunks of the offload tier are
        # promoted.
        partial = (
            load.promote and tracked.lookup.answer is not None and tracked.lookup.answer.offloaded
        )
        if self.publications is None:
            self._completions.stored(tracked, max(tracked.store.stored, end if partial else stop))
        else:
            # Once loaded, these chunks are published as if computed here.
            size = self._groups.block
            loaded = slice(tracked.local // size, tracked.supplied // size)
            self.publications.on_load(rows[0][loaded])
        if partial:
            self._completions.expect(tracked, first, end)

    def _loadable(self, request: Any) -> tuple[int, int]:
        """Return how many of the request's tokens may be loaded, and how many chunks hold them.
        vLLM always computes the last token."""
        size, whole = self._size, self._groups.whole
        tokens = (request.num_tokens - 1) // whole * whole
        chunks = min(len(request.block_hashes) // self._hashes, -(-tokens // size))
        return min(tokens, chunks * size), chunks

    def _note(self, report: WorkerReport, invalid: AbstractSet[int]) -> None:
        lost = self._untrusted.end_steps(report.echoes, invalid)
        for request_id in report.failed & self._requests.keys():
            tracked = self._requests[request_id]
            tracked.may_load = False
            # vLLM may compute the request from the start.
            self._completions.stored(tracked, 0)
        if lost and self.blocks is not None:
            # vLLM recomputes lost blocks, unless their request ends or is preempted first, but does
            # not cache them again. So the next request with this prompt computes them, too.
            self.blocks.evict(lost)
            free = (lost & invalid).isdisjoint
            rows = [request.store.rows for request in self._requests.values()]
            if sum(not all(map(free, row)) for row in rows) > 1:
                # If several requests have a lost block, a further step may have computed tokens
                # behind it, which vLLM may compute again for one request only.
                self._untrusted.add(lost)
        self.instance.note(report.shards, report.links)
        if self.instance.announcer is not None:
            self.instance.announcer.note(report.stored)
        self.resets.note(report)

    def _doubt_loads(self, begun: Iterable[Beginning], meta: StepMetadata) -> None:
        """Doubt blocks that another connector loads in a step (under MultiConnector) until all
        workers report the step; doubt blocks that may be from before a reset for good.

        Another connector loads if a request begins with more tokens than vLLM's cache and vcache
        supply. If this load fails, vLLM computes tokens again that the step would store."""
        echo = next(self._numbers)
        for request_id, computed, rows in begun:
            tracked = self._requests.get(request_id)
            if tracked is None:
                continue
            foreign = computed > tracked.supplied
            # vLLM may have copied a part of a block into another block.
            copied = self._untrusted.kept and any(
                tracked.local % size for size in self._groups.sizes
            )
            if foreign:
                meta.echoes.add(echo)
            if foreign or copied:
                self._untrusted.add(chain(*rows), inf if self._untrusted.kept else echo)

    def _rows(self, request_id: str) -> BlockTables | None:
        tracked = self._requests.get(request_id)
        return tracked.store.rows if tracked is not None else None

    def _distrust_turns(self, names: Iterable[str]) -> None:
        """Store nothing more of sessions that continue with another turn.

        vLLM counts all accepted guesses as computed tokens of the new turn, even guesses behind the
        last turn's end, where other tokens stand now. names: of the requests that begin."""
        for name in names:
            tracked = self._requests.get(name)
            if tracked and tracked.store.rows[0] and getattr(tracked.request, "resumable", False):
                tracked.params = msgspec.structs.replace(tracked.params, store=False)
                self._completions.stop([tracked])
                self._evict_unwritten(tracked)

    def _evict_unwritten(self, tracked: Tracked | None) -> None:
        """Evict blocks that a preempted request may not have computed from vLLM's prefix cache.

        vLLM caches blocks when it plans the step that writes them. If vLLM then takes the step from
        the request, later requests would compute from unwritten blocks. No request does so in this
        step, in which vLLM lets no request begin."""
        if tracked is not None and self.blocks is not None:
            hashes = tracked.request.block_hashes[tracked.store.written // self._hash_block :]
            self.blocks.evict_hashed(hashes, len(self._groups.sizes))
