"""The half of the connector in vLLM's scheduler: what each step loads and stores. It never touches KV."""

from __future__ import annotations

import logging
from dataclasses import replace
from time import perf_counter
from typing import Any

import msgspec

from vcache_backend.config import Config

from . import compat, model_spec, request_params
from .events import CommonEvents, stored_blocks
from .finder import NEVER, Finder, Tracked
from .metadata import Load, StepMetadata, Store, WorkerReport
from .stats import Meter

log = logging.getLogger("vllm.vcache")

MOST_IN_STEP = 65_536
"""Tokens that the loads of one step may bring: 8 GiB of an 8B model, 25 ms from another GPU, a tenth of `GRACE_SECONDS`."""


class SchedulerSide:
    """Answers vLLM's scheduler, in the one thread it has. Nothing here waits longer than one call of the client may."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any, config: Config, loads: bool, stores: bool, meter: Meter) -> None:
        """loads, stores: what the instance's role allows."""
        self._meter, self._settings, self._size = meter, config.connector, config.engine.chunk_size
        self._loads_allowed, self._stores_allowed = loads, stores
        model = model_spec.read_model(vllm_config, config.connector.model)
        self._block = model.block_size
        self._pool_in_host = config.pool.device == "host" or (config.pool.device == "auto" and model.device_type == "cpu")
        self._per_chunk = self._size // self._block
        self._recomputes = compat.recomputes_in_step(vllm_config)
        sure = self._recomputes or not config.engine.checksum
        self._in_step = config.connector.sync_below_tokens if model.pp_size * model.tp_size == 1 and sure else 0
        self._throttled = compat.throttles_prefills(vllm_config)
        self._hash_block = compat.hash_block_size(vllm_config, kv_cache_config)
        refused = compat.refusal(vllm_config, kv_cache_config, model, self._size)
        self.finder = Finder(config, model, self._hash_block, refused, meter)
        self._publishes = compat.publishes_events(vllm_config)
        self.events = CommonEvents(self.finder.ranks)
        self._requests: dict[str, Tracked] = {}
        self._running: set[str] = set()
        self._promised = 0
        self._loads: list[Load] = []
        self._cancelled: set[str] = set()
        self._clearing = self._flush = False

    # ---- vLLM's questions

    def matched(self, request: Any, local: int) -> tuple[int | None, bool]:
        """How many tokens after the first `local`, which vLLM has itself, the pool has; and whether they come between steps. None: ask
        again in the next step."""
        if self.finder.wait():
            return None, False
        started = perf_counter()
        tracked = self._track(request)
        tracked.local = local
        answer = self._matched(tracked, local) if self._may_load(tracked) else (0, False)
        tracked.spent += perf_counter() - started
        return answer

    def allocated(self, request: Any, blocks: Any, external: int) -> None:
        """vLLM has reserved `blocks` for the request: load `external` tokens into them."""
        tracked = self._requests.get(request.request_id)
        if tracked is None or external <= 0:
            return
        started = perf_counter()
        size, first = self._size, tracked.local // self._size
        end = tracked.local + external
        # A block that is to be loaded but for its last token is loaded.
        stop, blocks_end = -(-end // size), -(-end // self._block)
        chosen: list[int] = blocks.get_block_ids()[0]
        asked = tracked.params
        wait = asked.wait_seconds if asked.wait_seconds is not None else self._settings.wait_seconds
        consume = self._consumes(tracked)
        said = []
        if consume and self._publishes:
            hashes, each = request.block_hashes, size // self._hash_block
            said = [list(hashes[chunk * each : (chunk + 1) * each]) for chunk in range(first, stop)]
        load = Load(
            request_id=request.request_id,
            keys=tracked.keys[first:stop],
            blocks=chosen[first * self._per_chunk : blocks_end],
            skip=tracked.local // self._block - first * self._per_chunk,
            stop=blocks_end - first * self._per_chunk,
            wait_seconds=wait if asked.announced else 0.0,
            consume=consume,
            said=said,
            granted=tracked.granted,
        )
        if load.granted is None and not asked.announced and self.finder.reads_below:
            # Also where the pool had it all: it may lose some before it is read.
            promote = self._stores_allowed and asked.store and not consume
            load = replace(load, below=True, promote=promote, prefix=tracked.keys[:first])
        self._loads.append(load)
        tracked.loading, tracked.granted = load.granted is None, None
        # What comes from the pool is there already, unless it was meant for one reader. Of what comes from below only whole chunks
        # will be.
        tracked.stored = max(tracked.stored, end // size if load.promote and tracked.below else stop)
        tracked.spent += perf_counter() - started

    def sources(self, request: Any, external: int) -> dict[Any, int]:
        """Where the `external` tokens lie that `allocated` was told of."""
        tracked = self._requests[request.request_id]
        pooled = min(max(tracked.pooled * self._size - tracked.local, 0), external) if tracked.below else external
        return compat.hit_sources(self._pool_in_host, pooled, external - pooled)

    def begin(self, output: Any) -> StepMetadata:
        """What the workers load in the step that `output` describes."""
        meta = StepMetadata(self._loads, cancelled=self._cancelled, flush=self._flush, idle=not output.total_num_scheduled_tokens)
        meta.introduce = not self.finder.introduced
        self._loads, self._cancelled, self._flush = [], set(), False
        self._running, self._promised = set(output.num_scheduled_tokens), 0
        return meta

    def add_stores(self, output: Any, meta: StepMetadata) -> None:
        """What they store in it, and which blocks get a new owner. After an exception nothing of the requests there are is stored
        any more: nobody knows their blocks."""
        try:
            self._add_stores(output, meta)
        except BaseException:
            meta.stores, meta.opaque = [], True
            for tracked in self._requests.values():
                tracked.params = msgspec.structs.replace(tracked.params, store=False)
            raise

    def _add_stores(self, output: Any, meta: StepMetadata) -> None:
        meta.fresh += [load.blocks for load in meta.loads]
        meta.fresh += [new.block_ids[0] for new in output.scheduled_new_reqs]
        meta.fresh += [added[0] for added in output.scheduled_cached_reqs.new_block_ids if added is not None]
        self.finder.open()
        if not self._stores_allowed or self.finder.refused:
            return
        scheduled = output.num_scheduled_tokens
        for new in output.scheduled_new_reqs:
            tracked = self._requests.get(new.req_id)
            if tracked is not None:
                tracked.blocks = list(new.block_ids[0])
                self._complete(tracked, new.num_computed_tokens + scheduled[new.req_id], meta)
        cached = output.scheduled_cached_reqs
        for request_id, computed, added in zip(cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True):
            tracked = self._requests.get(request_id)
            if tracked is None or (added is None and computed + scheduled[request_id] < (tracked.stored + 1) * self._size):
                continue
            if request_id in cached.resumed_req_ids:
                tracked.blocks = list(added[0]) if added is not None else []
            elif added is not None:
                tracked.blocks += added[0]
            self._complete(tracked, computed + scheduled[request_id], meta)

    def update(self, output: Any) -> None:
        """What the workers said after a step."""
        said = getattr(output, "kv_connector_worker_meta", None)
        if isinstance(said, WorkerReport):
            for request_id in said.failed & self._requests.keys():
                tracked = self._requests[request_id]
                tracked.failed = True
                tracked.stored = tracked.local // self._size
            if said.segments is not None:
                self.finder.readable = said.segments
            self.finder.meet(said.shards)
            self.finder.hear(said.links)
            if said.flushed and self._clearing:
                # Steps of before the reset may have stored since; what they have not committed yet never comes.
                self._clearing = self._flush = not self.finder.clear()
        self.events.collect(getattr(output, "kv_cache_events", None))
        for request_id in output.finished_recving or ():
            if request_id in self._requests:
                self._requests[request_id].loading = False

    def finished(self, request: Any) -> None:
        """The request has ended, one way or another."""
        tracked = self._requests.pop(request.request_id, None)
        if tracked is None:
            return
        if tracked.loading:
            self._cancelled.add(request.request_id)
        self.finder.let_go(tracked)
        self._running.discard(request.request_id)
        self._meter.scheduler_time(tracked.spent)

    def reset(self) -> bool:
        """Forget every chunk of the namespace, those on their way included; False if the server did not answer."""
        # Until the steps under way are over, and what they store is cleared too, nothing is looked up.
        self._flush = self._clearing = True
        for tracked in self._requests.values():
            # Answers of before count no more.
            self.finder.let_go(tracked)
            tracked.looked_at = NEVER
        return self.finder.clear()

    def lost(self, request: Any, blocks: Any, external: int) -> None:
        """vLLM counts on a load that `allocated` could not describe: let the workers say that it failed."""
        tracked = self._requests.get(request.request_id)
        granted = tracked.granted if tracked is not None else None
        chosen: list[int] = blocks.get_block_ids()[0]
        first = tracked.local // self._block if tracked is not None else 0
        stop = min(first - (-external // self._block), len(chosen))
        self._loads.append(Load(request.request_id, [], chosen, first, stop, granted=granted, lost=True))

    def close(self) -> None:
        self.finder.close()

    # ---- inside

    def _track(self, request: Any) -> Tracked:
        tracked = self._requests.get(request.request_id)
        if tracked is None or tracked.request is not request:
            try:
                asked = request_params.read(request.kv_transfer_params)
            except ValueError as error:
                log.warning("request %s is served uncached: %s", request.request_id, error)
                asked = request_params.NOTHING
            tracked = self._requests[request.request_id] = Tracked(request, asked)
        return tracked

    def _may_load(self, tracked: Tracked) -> bool:
        request = tracked.request
        wanted = self._loads_allowed and tracked.params.load and not (tracked.failed or self._clearing)
        if not wanted or getattr(request, "skip_reading_prefix_cache", False):
            return False
        # vLLM gives no log probabilities for prompt tokens it did not compute, but lets a connector hit.
        return getattr(request.sampling_params, "prompt_logprobs", None) is None

    def _matched(self, tracked: Tracked, local: int) -> tuple[int, bool]:
        finder = self.finder
        if not finder.open() or local % self._block:
            return 0, False
        request, size = tracked.request, self._size
        most = self._most(request)
        first, whole = local // size, finder.whole(request)
        if min(whole * size, most) - local < self._settings.min_hit_tokens:
            return 0, False
        if not finder.name(tracked, whole):
            finder.let_go(tracked)
            return 0, False
        tokens = min(whole * size, most) - local
        in_step = self._fits_step(tracked, tokens)
        if not in_step:
            # One of an earlier answer, of other circumstances.
            finder.let_go(tracked)
        if tracked.params.announced:
            return tokens, True
        found = finder.lease(tracked, first, whole) if in_step else finder.look_up(tracked, first, whole)
        external = min(found * size, most) - local
        if tracked.granted is not None:
            # Of a load between steps vLLM takes the last token back itself.
            external = min(external, request.num_tokens - 1 - local)
        if external < self._settings.min_hit_tokens:
            finder.let_go(tracked)
            return 0, False
        if tracked.granted is None:
            return external, True
        self._promised += external
        return external, False

    def _most(self, request: Any) -> int:
        """Tokens that may be loaded: in whole blocks, as from vLLM's own cache, which leaves the one with the last token, since that is
        computed in any case. Who has more than this token to compute may have to wait for its turn, so there all are loaded."""
        tokens = int(request.num_tokens)
        return (tokens if self._throttled else tokens - 1) // self._block * self._block

    def _fits_step(self, tracked: Tracked, tokens: int) -> bool:
        """May the step that runs the request wait for so many of its tokens?

        Others would wait too; and where the load must not fail any more, it has to be over soon: nothing may run before it.
        """
        if not self._in_step or tracked.params.announced or self._consumes(tracked):
            return False
        idle = self._running <= {tracked.request.request_id} and self._promised + tokens <= MOST_IN_STEP
        return idle or (self._recomputes and tokens < self._in_step)

    def _consumes(self, tracked: Tracked) -> bool:
        asked = tracked.params.consume_once
        return self._settings.consume_once if asked is None else asked

    def _complete(self, tracked: Tracked, computed: int, meta: StepMetadata) -> None:
        """Store the chunks that are complete once the step has computed the first `computed` tokens.

        Of those only what is known: tokens guessed ahead may be taken back, and so may what was computed from them.
        """
        if computed < (tracked.stored + 1) * self._size or not tracked.params.store:
            return
        request = tracked.request
        known = request.num_prompt_tokens if self._settings.store == "prompt" else request.num_tokens
        ready = min(min(computed, known) // self._size, self.finder.whole(request), len(tracked.blocks) // self._per_chunk)
        first = tracked.stored
        if ready <= first or not self.finder.name(tracked, ready):
            return
        blocks = tracked.blocks[first * self._per_chunk : ready * self._per_chunk]
        said = []
        if self._publishes:
            bounds = [(chunk * self._size, (chunk + 1) * self._size) for chunk in range(first, ready)]
            said = [stored_blocks(request, start, end, self._hash_block) for start, end in bounds]
        before = tracked.blocks[: first * self._per_chunk] if meta.loads else []
        meta.stores.append(Store(request.request_id, tracked.keys[first:ready], blocks, tracked.keys[:first], before, said))
        tracked.stored = ready
