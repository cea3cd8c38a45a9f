"""The connector's half in vLLM's scheduler: decides what each step loads and stores.

A request's way: `arrived` asks the server for its chunks, `matched` decides by the answer whether
the request loads, computes or waits, `allocated` makes the load, `describe` tells the workers of a
step's loads and stores, `update` hears their reports, `finished` forgets the request."""

from __future__ import annotations

import logging
from bisect import bisect
from collections.abc import Callable, Iterable
from collections.abc import Set as AbstractSet
from itertools import chain, count
from math import inf
from typing import Any

from msgspec.structs import replace

from vcache_backend.errors import MAX_LINE_CHARS, printable

from .blocks import KVBlocks
from .consumers import Unserved
from .duplicates import Duplicates
from .instance import InstanceContext
from .lookups import Lookups
from .metadata import QUIET, MoreBlocks, StepMetadata, WorkerReport
from .model import compat
from .model.sharing import Plan
from .model.spec import ShardSpec
from .promises import PromiseSender
from .requests import DEFAULT, UNCACHED, Answer, Beginning, RequestParams, Tracked, read_params
from .resets import Resets
from .stores import ROW, StorePlanner
from .telemetry import traces
from .telemetry.stats import Meter
from .victims import Victims
from .waits import AGAIN, MISS, LookupDecision, Waits

log = logging.getLogger("vllm.vcache")


class VCacheScheduler:
    """Answers vLLM's scheduler, in the scheduler's thread.

    Only these wait: `arrived` and `matched` for the server, see `Lookups`; a reset for two calls,
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
        scheduling = vllm_config.scheduler_config
        self.context = context = InstanceContext(
            vllm_config, kv_cache_config, decision, loads, stores
        )
        self.publications = context.publications
        self._requests: dict[str, Tracked] = {}
        self.lookups, self.waits = Lookups(context, meter), Waits(context, meter)
        self._promises = PromiseSender(context, self.lookups)
        self._planner = StorePlanner(context, self.lookups, compat.spec_kind(kv_cache_config))
        parts = self.lookups, self.waits, self._promises, self._planner
        self.resets = Resets(context, self._requests, *parts)
        self.duplicates: Duplicates | None = None
        """None until vLLM has shown its block pool, and unless KV caches are shared in place and
        this instance may load chunks again."""
        self.victims: Victims | None = None
        """None until vLLM has shown its block pool, and unless a pool stands beside KV caches
        shared in place."""
        self._unserved = Unserved(context, meter) if loads and not stores else None
        self._spans = traces.begin(vllm_config)
        self._step_blocks = scheduling.max_num_batched_tokens // context.groups.block
        self._steps_are_taken = scheduling.policy == "priority"
        """vLLM may take the step being planned from a request."""
        self._guesses = bool(getattr(vllm_config, "num_speculative_tokens", True))
        self._promise_numbers = count(1)
        self._next = StepMetadata()
        """For the next step: loads that begin, and requests that have ended during their loads."""
        self._open: dict[str, Tracked] = {}
        """Requests with open loads, by name."""
        self._given: dict[str, Any] = {}
        """The blocks of requests for which this connector loads nothing, for the next step."""
        self._idle = False
        """The last step runs no model, so there is time to wait for an answer of the server."""
        self._named = False
        """The workers know the instance's name, under which they show their KV caches."""

    # ---- the start and the end

    def watch(self, pool: Any, fail: Callable[[str, Exception], None]) -> None:
        """Note vLLM's `BlockPool`, which vLLM shows before the first request. fail: see
        `KVBlocks`."""
        own, config = self.publications, self.context.config
        blocks = KVBlocks(pool, fail, in_place=own is not None)
        self.context.watch(blocks)
        each = self.context.groups.blocks
        if own is not None:
            # The blocks that requests go on to compute stay void.
            blocks.before_reset.append(lambda: self._promises.withdraw_all(self._requests.values()))
        if own is not None and self.context.loads and not self.context.by_ends:
            self.duplicates = Duplicates(blocks, self.context, own, each)
        if own is not None and config.pool.lent:
            self.victims = Victims(blocks, self.context, own, each, self._step_blocks)

    def introduce(self, shards: Iterable[ShardSpec]) -> None:
        """Note the workers' shards, all known at vLLM's start, and connect to the server."""
        self.context.note({(one.pp_rank, one.tp_rank): one for one in shards}, {})
        self.context.open()

    def give_up(self) -> None:
        """This half is out of use: other instances read nothing of this KV cache any more, and
        vLLM's block pool does without us. Never raises."""
        if self.publications is not None:
            self.publications.generations.give_up()
        if self.context.blocks is not None:
            self.context.blocks.failed = True

    def close(self) -> None:
        """Idempotent."""
        self.context.close()

    # ---- a request

    def arrived(self, request: Any) -> None:
        """Ask the server for a new request's chunks now, so that the answer has arrived when vLLM
        schedules the request."""
        if not self.context.prefix and not self.context.open():
            return
        tracked, size = self._track(request), self.context.chunk_size
        tokens = self.context.measure(tracked)
        lacking = tokens - self.context.config.connector.min_hit_tokens
        if lacking < 0 or not tracked.may_load or self.resets.clearing:
            return
        ends, first = range(size - 1, tokens, size), 0
        # Mostly vLLM's cache lacks even the first chunk.
        if self._is_cached(request, min(lacking, size - 1)):
            if self._is_cached(request, lacking):
                return
            first = bisect(ends, False, lo=1, key=lambda end: not self._is_cached(request, end))
        if self.lookups.name(tracked):
            self.lookups.send(tracked, first)

    def matched(self, request: Any, local: int) -> tuple[int | None, bool]:
        """Return how many tokens can be loaded after the first `local`, which vLLM has, and whether
        there are any: all loads are asynchronous.

        None in place of a number: ask again in the next step."""
        if not self.context.prefix and self.context.waits():
            return AGAIN.matched
        tracked = self._track(request)
        tracked.local = tracked.supplied = local
        self._learn()
        # A request that waits in front is not kept waiting for the answer of the last step.
        ahead = self._idle and next(iter(self.waits.waiting), "") == request.request_id
        decision = self._decided(tracked, ask=ahead)
        if self._spans is not None and not decision.again:
            self._spans.looked_up(tracked, local, decision.tokens)
        return decision.matched

    def _decided(self, tracked: Tracked, ask: bool) -> LookupDecision:
        """`_decide`. ask: read the answer to a question asked now, too, if there is none before."""
        decision = self._decide(tracked)
        if ask and decision.again and tracked.lookup.question is not None:
            decision = self._decide(tracked)
        return decision

    def _decide(self, tracked: Tracked) -> LookupDecision:
        """Look the request up, and decide what becomes of it."""
        context, lookups, waits, local = self.context, self.lookups, self.waits, tracked.local
        if (
            not tracked.may_load
            or self.resets.clearing
            or local % context.groups.block
            or (not context.prefix and not context.open())
        ):
            return MISS
        least = context.config.connector.min_hit_tokens
        if context.measure(tracked) - local < least or not lookups.name(tracked):
            return MISS
        wait, opened = tracked.wait.wait, tracked.load is not None
        first = wait.probes if wait and opened else local // context.chunk_size
        if not opened and waits.follows(tracked, first):
            return AGAIN
        if wait is not None:
            probed = lookups.probed(tracked)
            if probed is not None and not waits.goes_on(tracked, probed):
                if probed is not tracked.lookup.answer:
                    lookups.forget(tracked)
            elif tracked.lookup.question is not None:
                if probed is not None:
                    return AGAIN
            elif not waits.is_due(tracked) or lookups.probe(tracked, wait.probes):
                # Without a server no question is sent, and the look-up ends the wait.
                return AGAIN
        answer = lookups.find(tracked, first)
        if answer.found:
            self._keep_junction(tracked, answer)
        return waits.decide(tracked, answer)

    def _keep_junction(self, tracked: Tracked, answer: Answer) -> None:
        """Have vLLM keep windows and states where the request leaves a prompt of another instance,
        as if that prompt had been computed here: the next request that leaves it there finds them.
        """
        request, tokens = tracked.request, max(answer.tokens, tracked.local)
        if answer.found > max(tokens, getattr(request, "shared_prefix_boundary", inf)):
            request.shared_prefix_boundary = answer.found

    def allocated(self, request: Any, blocks: Any, external: int) -> None:
        """Prepare the load of `external` tokens into `blocks`, reserved for the request. Without
        any, another connector may load into them before the request's first step: not before our
        stores have read them."""
        if not external:
            if self.publications is None:
                self._given[request.request_id] = blocks
            return
        tracked = self._requests[request.request_id]
        tracked.supplied = tracked.local + external
        self.waits.on_load(tracked)
        tracked.load = self._planner.load(tracked, blocks.get_block_ids())
        self._promises.on_load(tracked)
        self._next.loads.append(tracked.load)
        self._next.fresh.append(tracked.load.blocks)
        if tracked.load.open:
            self._open[request.request_id] = tracked

    def load_number(self) -> int:
        """For another connector's load."""
        return self._planner.load_number()

    def finished(self, request: Any) -> None:
        """Forget a request that has ended for any reason."""
        name = request.request_id
        tracked = self._requests.pop(name, None)
        self._open.pop(name, None)
        if self._spans is not None:
            self._spans.finished(name)
        if self.context.blocks is not None:
            self.context.blocks.kept_out.discard(name)
        if tracked is not None:
            self._promises.withdraw(tracked)
            self.waits.over(tracked)
            if tracked.load is not None:
                self._next.cancelled.add(name)
            elif self.duplicates is not None:
                self.duplicates.finished(tracked)

    # ---- a step

    def describe(self, output: Any) -> StepMetadata:
        """Describe the step `output` for the workers: loads, stores, and blocks with a new
        owner."""
        if self._promises.rate.measured is not None:
            self._promises.rate.look()
        self._learn()
        meta = self._next
        meta.idle = self._idle = not output.total_num_scheduled_tokens
        if self._open:
            # A step that runs no model has the time to wait for the answers.
            meta.more = self._further(ask=self._idle)
        if self._given:
            for name in self._given.keys() - output.num_scheduled_tokens.keys():
                meta.fresh += self._given[name].get_block_ids()
            self._given.clear()
        if not (self._named and self.context.prefix):
            self._introduce(meta)
        for name in output.preempted_req_ids or ():
            if (tracked := self._requests.get(name)) is not None:
                self._promises.withdraw(tracked)
                if self._steps_are_taken:
                    self._evict_unwritten(tracked)
        begins = output.scheduled_new_reqs or output.scheduled_cached_reqs.resumed_req_ids
        beginning = self._beginning(output) if begins else {}
        self.resets.on_step(beginning.values(), meta)
        if not meta.idle:
            self._planner.plan(output, self._requests, beginning, meta)
        for one in beginning.values():
            self.waits.over(one.tracked)
            self._promises.on_start(one.tracked, one.whole)
            if self._unserved is not None:
                self._unserved.began(one.tracked, one.whole)
        if self.victims is not None:
            # Models with such a pool have one block table.
            used = (tracked.store.block_tables for tracked in self._requests.values())
            self.victims.plan(meta, self._planner.take_completed(), chain.from_iterable(used))
        if meta == _NOTHING:
            return QUIET
        self._next = StepMetadata()
        return meta

    def _beginning(self, output: Any) -> dict[str, Beginning]:
        """The requests that begin or resume in a step, by name."""
        cached, block = output.scheduled_cached_reqs, self.context.groups.block
        # With vLLM's hits within a block, a request goes on in a copy of the hit's last block.
        copies = getattr(output, "kv_cache_block_copies", None)
        copied = {copy.dst_block_id for copy in copies} if copies else set[int]()
        begins = list(map(ROW, output.scheduled_new_reqs))
        if resumed := cached.resumed_req_ids:
            known = cached.req_ids, cached.new_block_ids, cached.num_computed_tokens
            begins += [one for one in zip(*known, strict=True) if one[0] in resumed]
        found = dict[str, Beginning]()
        for name, tables, computed in begins:
            if (tracked := self._requests.get(name)) is not None:
                tables = tables or [[] for _ in tracked.store.block_tables]
                own = copied and not all(map(copied.isdisjoint, tables))
                whole = computed // block * block if own else computed
                found[name] = Beginning(tracked, tables, computed, whole)
                if self._guesses:
                    self._stop_turn(tracked)
        return found

    def _further(self, ask: bool) -> list[MoreBlocks]:
        """What has come for open loads. Those whose requests no longer wait end. ask: see
        `_decided`."""
        told = list[MoreBlocks]()
        for name, tracked in list(self._open.items()):
            decision = self._decided(tracked, ask) if tracked.wait.wait else MISS
            if decision.again:
                continue
            if decision.wait is None:
                if tracked.wait.wait:
                    self.waits.over(tracked, "withdrawn")
                del self._open[name]
            told.append(self._planner.more(tracked, decision.tokens > 0))
        return told

    def _introduce(self, meta: StepMetadata) -> None:
        """Tell the workers the instance's name, and ask for their shards, until they are known."""
        if self.publications is not None and not self._named:
            meta.instance = self.publications.instance
        meta.introduce, self._named = not self.context.introduced, True

    def further(self) -> list[MoreBlocks]:
        """What has come for open loads by now, asked between two steps. The worker must have the
        loads of all steps."""
        if not self._open or self._next.loads:
            return []
        self._learn()
        return self._further(ask=True)

    def update(self, output: Any) -> None:
        """Handle the workers' reports after a step."""
        report = getattr(output, "kv_connector_worker_meta", None)
        if report is not None and isinstance(report, WorkerReport):
            self._note(report, getattr(output, "invalid_block_ids", None) or frozenset())
            if self._spans is not None:
                self._spans.loaded(report.spans)
        for tracked in self.waits.waiting.values():
            wait = tracked.wait.wait
            if wait and tracked.lookup.question is None and self.waits.is_due(tracked):
                # Shortly before vLLM schedules: by then the answer has come.
                self.lookups.probe(tracked, wait.probes)
        for name in output.finished_recving or ():
            # Otherwise a later request of this name would be cancelled.
            self._next.cancelled.discard(name)
            if (loaded := self._requests.get(name)) is not None:
                loaded.load = None
                if self._open.pop(name, None) is not None:
                    # Its blocks have changed.
                    self.waits.over(loaded, "withdrawn")

    # ---- inside

    def _learn(self) -> None:
        """Act on reads and resets by other instances, as the server reported them."""
        if self.context.news.waiting:
            if self.context.news.learn():
                self.resets.on_reset_elsewhere()
            if self.duplicates is not None:
                self.duplicates.learn()

    def _is_cached(self, request: Any, token: int) -> bool:
        """Whether vLLM's prefix cache has the block with this token, and therefore all blocks
        before it."""
        context, blocks = self.context, self.context.blocks
        block = context.groups.block
        if blocks is None or block != context.hash_block or not context.groups.plain:
            return False
        hashes, at = request.block_hashes, token // block
        return at < len(hashes) and blocks.cached(hashes[at])

    def _track(self, request: Any) -> Tracked:
        tracked = self._requests.get(request.request_id)
        if tracked is not None and tracked.request is request:
            return tracked
        params = self._params(request) if request.kv_transfer_params is not None else DEFAULT
        adapter = request.lora_request
        if adapter is not None and not self.lookups.identifies(adapter):
            params = UNCACHED
        # vLLM has no log probabilities for loaded prompt tokens, but lets connectors load them.
        rated = getattr(request.sampling_params, "prompt_logprobs", None) is not None
        if rated or getattr(request, "skip_reading_prefix_cache", False):
            params = replace(params, load=False)
        loads = self.context.loads and params.load
        tracked = self._requests[request.request_id] = Tracked(request, params, loads)
        self._planner.mark_stored(tracked, 0)
        if tracked.store.complete_at < inf:
            # Another instance computes an announced prompt.
            tracked.promise.number = next(self._promise_numbers)
            tracked.promise.early = not params.announced
        return tracked

    def _params(self, request: Any) -> RequestParams:
        try:
            return read_params(request.kv_transfer_params)
        except ValueError as error:
            name = printable(request.request_id, MAX_LINE_CHARS)  # a client may have chosen it
            log.warning("request %s is served uncached: %s", name, error)
            return UNCACHED

    def _note(self, report: WorkerReport, invalid: AbstractSet[int]) -> None:
        """Act on the workers' report about a step. invalid: blocks that loads did not fill."""
        self.resets.note(report, invalid)
        for name in report.failed & self._requests.keys():
            # vLLM may compute the request from the start.
            tracked = self._requests[name]
            tracked.may_load = False
            self._planner.mark_stored(tracked, 0)
            if self.publications is not None and tracked.load is not None:
                # vLLM computes into the same blocks.
                left = [block for block in tracked.load.blocks if block in invalid]
                self.publications.on_failed(tracked, left)
        self.context.note(report.shards, report.links)
        if self.context.announcer is not None:
            self.context.announcer.note(report.stored)

    def _stop_turn(self, tracked: Tracked) -> None:
        """Store nothing more of a request that begins if it is a session's next turn.

        vLLM counts all accepted guesses as computed tokens of the new turn, even guesses behind the
        last turn's end, where other tokens stand now."""
        if tracked.store.block_tables and getattr(tracked.request, "resumable", False):
            self._planner.stop(tracked)
            self._evict_unwritten(tracked)

    def _evict_unwritten(self, tracked: Tracked) -> None:
        """Evict blocks that a preempted request may not have computed from vLLM's prefix cache.

        vLLM caches blocks when it plans the step that writes them. If vLLM then takes the step from
        the request, later requests would compute from unwritten blocks. No request does so in this
        step, in which vLLM lets no request begin."""
        if self.context.blocks is not None:
            written = tracked.store.written // self.context.hash_block
            hashes = tracked.request.block_hashes[written:]
            self.context.blocks.evict_hashed(hashes, len(self.context.groups.sizes))


_NOTHING = StepMetadata()
