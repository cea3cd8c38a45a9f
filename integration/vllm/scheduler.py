"""The half of the connector in vLLM's scheduler: what is there, what each step loads and stores. It never touches KV."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from time import monotonic, perf_counter
from typing import Any

import msgspec

from vcache_backend.chunk_io import checked_layout
from vcache_backend.committer import Committer
from vcache_backend.config import Config
from vcache_backend.errors import VCacheError
from vcache_backend.metadata_server.client import Client
from vcache_backend.metadata_server.messages import ChunkKey, SegmentId
from vcache_backend.stats import EngineStats

from . import compat, facts, wants
from .events import CommonEvents, stored_blocks
from .keys import KeyMaker, adapter_digest
from .metadata import Granted, Load, Said, Shard, StepMetadata, Store
from .stats import Meter

log = logging.getLogger("vllm.vcache")

MOST_IN_STEP = 65_536
"""Tokens that the loads of one step may bring: 8 GiB of an 8B model, 25 ms from another GPU, a tenth of `GRACE_SECONDS`."""
FRESH_SECONDS = 0.5
"""How long the answer of a look-up counts for a request that vLLM could not schedule at once."""


@dataclass(slots=True)
class _Tracked:
    """One request. stored: chunks from its start that are in the pool or on their way. hits: how many leading chunks there were at
    the time `looked_at`. granted: the lease on those after the first `granted_from`. local: its tokens in vLLM's own cache when it
    was matched. spent: seconds this module took for it."""

    request: Any
    wants: wants.Wants
    keys: list[ChunkKey] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    stored: int = 0
    hits: int = 0
    looked_at: float = -1.0
    granted: Granted | None = None
    granted_from: int = 0
    local: int = 0
    failed: bool = False
    loading: bool = False
    spent: float = 0.0


class SchedulerSide:
    """Answers vLLM's scheduler, in the one thread it has. Nothing here waits longer than one call of the client may."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any, config: Config, loads: bool, stores: bool, meter: Meter) -> None:
        """loads, stores: what the instance's role allows."""
        self._vllm, self._config, self._meter = vllm_config, config, meter
        self._settings, self._size = config.connector, config.engine.chunk_size
        self._loads_allowed, self._stores_allowed = loads, stores
        self._model = facts.read_model(vllm_config, config.connector.model)
        self._block = self._model.block_size
        self._per_chunk = self._size // self._block
        alone = self._model.pp_size * self._model.tp_size == 1
        self._recomputes = compat.recomputes_in_step(vllm_config)
        sure = self._recomputes or not config.engine.checksum
        self._in_step = config.connector.sync_below_tokens if alone and sure else 0
        self._hash_block = compat.hash_block_size(vllm_config, kv_cache_config)
        self._shards: dict[tuple[int, int], facts.ShardFacts] = {}
        self._client: Client | None = None
        self._namer: KeyMaker | None = None
        self._prefix = b""
        self._ranks = self._model.pp_size * (1 if self._model.use_mla else self._model.tp_size)
        self._publishes = compat.publishes_events(vllm_config)
        self.events = CommonEvents(self._ranks)
        self._requests: dict[str, _Tracked] = {}
        self._running: set[str] = set()
        self._promised = 0
        self._readable: frozenset[SegmentId] = frozenset()
        self._releaser: Committer | None = None
        self._loads: list[Load] = []
        self._cancelled: set[str] = set()
        self._clearing = self._flush = False
        self._refused = compat.refusal(vllm_config, kv_cache_config, self._model, self._size)
        if self._refused:
            log.error("vcache caches nothing: %s. vLLM serves all the same", self._refused)

    def meet(self, shards: Mapping[tuple[int, int], Any]) -> None:
        """What every worker holds, by (pipeline rank, tensor rank)."""
        self._shards = {rank: shard.facts for rank, shard in shards.items() if isinstance(shard, Shard)}
        self._readable = frozenset().union(*(shard.segments for shard in shards.values() if isinstance(shard, Shard)))
        wanted = self._model.pp_size * self._model.tp_size
        problems = sorted({shard.problem for shard in self._shards.values() if shard.problem})
        if len(self._shards) != wanted:
            problems.append(f"{len(self._shards)} of {wanted} workers said what they hold")
        if problems and not self._refused:
            self._refused = "; ".join(problems)
            log.error("vcache caches nothing: %s. vLLM serves all the same", self._refused)

    # ---- vLLM's questions

    def matched(self, request: Any, local: int) -> tuple[int, bool]:
        """How many tokens after the first `local`, which vLLM has itself, the pool has; and whether they come between steps."""
        started = perf_counter()
        tracked = self._track(request)
        tracked.local = local
        answer = self._matched(tracked, local) if self._may_load(tracked) else (0, False)
        tracked.spent += perf_counter() - started
        return answer

    def allocated(self, request: Any, blocks: Any, external: int) -> None:
        """vLLM has reserved `blocks` for the request: load `external` tokens into them."""
        tracked = self._requests.get(request.request_id)
        if tracked is None or external <= 0 or self._namer is None:
            return
        started = perf_counter()
        size, first = self._size, tracked.local // self._size
        end = tracked.local + external
        stop = -(-end // size)
        chosen: list[int] = blocks.get_block_ids()[0]
        asked = tracked.wants
        wait = asked.wait_seconds if asked.wait_seconds is not None else self._settings.wait_seconds
        consume = self._consumes(tracked)
        said = []
        if consume and self._publishes:
            hashes, each = request.block_hashes, size // self._hash_block
            said = [list(hashes[chunk * each : (chunk + 1) * each]) for chunk in range(first, stop)]
        load = Load(
            request_id=request.request_id,
            keys=tracked.keys[first:stop],
            blocks=chosen[first * self._per_chunk : end // self._block],
            skip=tracked.local // self._block - first * self._per_chunk,
            stop=end // self._block - first * self._per_chunk,
            wait_seconds=wait if asked.announced else 0.0,
            consume=consume,
            said=said,
            granted=tracked.granted,
        )
        self._loads.append(load)
        tracked.loading, tracked.granted = load.granted is None, None
        # What comes from the pool is there already, unless it was meant for one reader.
        tracked.stored = max(tracked.stored, stop)
        tracked.spent += perf_counter() - started

    def begin(self, output: Any) -> StepMetadata:
        """What the workers load in the step that `output` describes."""
        meta = StepMetadata(self._loads, cancelled=self._cancelled, flush=self._flush, idle=not output.total_num_scheduled_tokens)
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
                tracked.wants = msgspec.structs.replace(tracked.wants, store=False)
            raise

    def _add_stores(self, output: Any, meta: StepMetadata) -> None:
        meta.fresh += [load.blocks for load in meta.loads]
        meta.fresh += [new.block_ids[0] for new in output.scheduled_new_reqs]
        meta.fresh += [added[0] for added in output.scheduled_cached_reqs.new_block_ids if added is not None]
        if not self._stores_allowed or self._open() is None:
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
        if isinstance(said, Said):
            for request_id in said.failed & self._requests.keys():
                tracked = self._requests[request_id]
                tracked.failed = True
                tracked.stored = tracked.local // self._size
            if said.segments is not None:
                self._readable = said.segments
            if said.flushed and self._clearing:
                # What steps before the reset had still under way is in the pool by now.
                self._clearing = self._flush = not self._cleared()
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
        self._let_go(tracked)
        self._running.discard(request.request_id)
        self._meter.scheduler_time(tracked.spent)

    def reset(self) -> bool:
        """Forget every chunk of the namespace, those on their way included; False if the server did not answer."""
        if self._client is None:
            return True
        # Until the stores under way are over, and cleared too, nothing is looked up.
        self._flush = self._clearing = True
        return self._cleared()

    def lost(self, request: Any, blocks: Any, external: int) -> None:
        """vLLM counts on a load that `allocated` could not describe: let the workers say that it failed."""
        tracked = self._requests.get(request.request_id)
        granted = tracked.granted if tracked is not None else None
        chosen: list[int] = blocks.get_block_ids()[0]
        first = tracked.local // self._block if tracked is not None else 0
        stop = min(first + external // self._block, len(chosen))
        self._loads.append(Load(request.request_id, [], chosen, first, stop, granted=granted, lost=True))

    def close(self) -> None:
        if self._releaser is not None:
            self._releaser.close()
        if self._client is not None:
            self._client.close()

    # ---- inside

    def _track(self, request: Any) -> _Tracked:
        tracked = self._requests.get(request.request_id)
        if tracked is None or tracked.request is not request:
            try:
                asked = wants.read(request.kv_transfer_params)
            except ValueError as error:
                log.warning("request %s is served uncached: %s", request.request_id, error)
                asked = wants.NOTHING
            tracked = self._requests[request.request_id] = _Tracked(request, asked)
        return tracked

    def _may_load(self, tracked: _Tracked) -> bool:
        request = tracked.request
        wanted = self._loads_allowed and tracked.wants.load and not (tracked.failed or self._clearing)
        if not wanted or getattr(request, "skip_reading_prefix_cache", False):
            return False
        # vLLM gives no log probabilities for prompt tokens it did not compute, but lets a connector hit.
        return getattr(request.sampling_params, "prompt_logprobs", None) is None

    def _matched(self, tracked: _Tracked, local: int) -> tuple[int, bool]:
        namer = self._open()
        if namer is None or local % self._block:
            return 0, False
        request, size = tracked.request, self._size
        # The last token is computed in any case, and vLLM computes whole blocks.
        most = (request.num_tokens - 1) // self._block * self._block
        first, whole = local // size, namer.whole(request.block_hashes)
        if min(whole * size, most) - local < self._settings.min_hit_tokens:
            return 0, False
        self._name(tracked, whole)
        tokens = min(whole * size, most) - local
        in_step = self._fits_step(tracked, tokens)
        if not in_step:
            # One of an earlier answer, of other circumstances.
            self._let_go(tracked)
        if tracked.wants.announced:
            return tokens, True
        found = self._lease(tracked, first, whole) if in_step else self._look_up(tracked, first, whole)
        external = min(found * size, most) - local
        if external < self._settings.min_hit_tokens:
            self._let_go(tracked)
            return 0, False
        return external, tracked.granted is None

    def _fits_step(self, tracked: _Tracked, tokens: int) -> bool:
        """May the step that runs the request wait for so many of its tokens?

        Others would wait too; and where the load must not fail any more, it has to be over soon: nothing may run before it.
        """
        if not self._in_step or tracked.wants.announced or self._consumes(tracked):
            return False
        idle = self._running <= {tracked.request.request_id} and self._promised + tokens <= MOST_IN_STEP
        return idle or (self._recomputes and tokens < self._in_step)

    def _consumes(self, tracked: _Tracked) -> bool:
        asked = tracked.wants.consume_once
        return self._settings.consume_once if asked is None else asked

    def _lease(self, tracked: _Tracked, first: int, whole: int) -> int:
        """`_look_up` for a load that is part of the step: under a lease from here on, since vLLM counts on it.

        Without one, where the worker cannot read all of it.
        """
        client, now = self._client, monotonic()
        granted = tracked.granted
        if granted is not None:
            if tracked.granted_from == first and granted.deadline - now > granted.seconds / 2:
                return min(first + len(granted.locations), whole)
            self._let_go(tracked)
        if client is None or not client.connected:
            return first
        started = perf_counter()
        try:
            leased = client.acquire(tracked.keys[first:whole])
        except VCacheError as error:
            log.debug("look-up: %s", error)
            self._meter.failed("server")
            return first
        found = len(leased.locations)
        self._looked_up(tracked, whole - first, found, perf_counter() - started)
        if leased.lease:
            tracked.granted = Granted(leased.lease, leased.locations, now + leased.seconds, leased.seconds)
            tracked.granted_from = first
            self._promised += found * self._size
            if not {location.segment for location in leased.locations} <= self._readable:
                self._let_go(tracked)
        return first + found

    def _let_go(self, tracked: _Tracked) -> None:
        """End a lease that nobody reads under, in the background."""
        if tracked.granted is not None and self._releaser is not None:
            self._releaser.release(tracked.granted.lease)
        tracked.granted = None

    def _cleared(self) -> bool:
        try:
            if self._client is not None:
                self._client.clear(self._prefix)
        except VCacheError as error:
            log.warning("the pool was not cleared, so nothing is read from it: %s", error)
            return False
        return True

    def _look_up(self, tracked: _Tracked, first: int, whole: int) -> int:
        """How many leading chunks all workers can load, given that the first `first` are not needed."""
        now = monotonic()
        if tracked.looked_at + FRESH_SECONDS > now and tracked.hits >= first:
            return min(tracked.hits, whole)
        client = self._client
        if client is None or not client.connected:
            return first
        started = perf_counter()
        try:
            found = client.lookup(tracked.keys[first:whole], self._ranks)
        except VCacheError as error:
            log.debug("look-up: %s", error)
            self._meter.failed("server")
            return first
        self._looked_up(tracked, whole - first, found, perf_counter() - started)
        tracked.hits, tracked.looked_at = first + found, now
        return first + found

    def _looked_up(self, tracked: _Tracked, asked: int, found: int, seconds: float) -> None:
        self._meter.looked_up(asked * self._size, found * self._size, seconds)
        if log.isEnabledFor(logging.DEBUG):
            log.debug("look-up %s: %d of %d chunks, %.0f us", tracked.request.request_id, found, asked, 1e6 * seconds)

    def _name(self, tracked: _Tracked, whole: int) -> None:
        """Make the keys of the first `whole` chunks known."""
        assert self._namer is not None
        if len(tracked.keys) < whole:
            request = tracked.request
            adapter = adapter_digest(request.lora_request) if request.lora_request is not None else b""
            tracked.keys += self._namer.keys(request.block_hashes, len(tracked.keys), whole, adapter)

    def _complete(self, tracked: _Tracked, computed: int, meta: StepMetadata) -> None:
        """Store the chunks that are complete once the step has computed the first `computed` tokens.

        Of those only what is known: tokens guessed ahead may be taken back, and so may what was computed from them.
        """
        if computed < (tracked.stored + 1) * self._size or self._namer is None or not tracked.wants.store:
            return
        request = tracked.request
        known = request.num_prompt_tokens if self._settings.store == "prompt" else request.num_tokens
        ready = min(
            min(computed, known) // self._size, self._namer.whole(request.block_hashes), len(tracked.blocks) // self._per_chunk
        )
        first = tracked.stored
        if ready <= first:
            return
        self._name(tracked, ready)
        blocks = tracked.blocks[first * self._per_chunk : ready * self._per_chunk]
        said = []
        if self._publishes:
            bounds = [(chunk * self._size, (chunk + 1) * self._size) for chunk in range(first, ready)]
            said = [stored_blocks(request, start, end, self._hash_block) for start, end in bounds]
        meta.stores.append(Store(request.request_id, tracked.keys[first:ready], blocks, tracked.keys[:first], said))
        tracked.stored = ready

    def _open(self) -> KeyMaker | None:
        """Names of chunks, once everything they depend on is known: the engine runs, and every worker has said what it holds."""
        if self._namer is not None or self._refused:
            return self._namer
        if not self._shards:
            self._refused = "no worker said what it holds: this vLLM does not pass a connector's handshake on"
            log.error("vcache caches nothing: %s", self._refused)
            return None
        shards = [self._shards[rank] for rank in sorted(self._shards)]
        layout = checked_layout(self._config, facts.layout(self._model, shards, self._size, compat.hash_root()))
        namespace = layout.namespace()
        self._client = Client(
            self._config.server.path, self._config.client, layout=layout.fields() | {"namespace": str(namespace)}
        )
        self._prefix = namespace.prefix
        self._releaser = Committer(self._client, EngineStats(), 1)
        self._namer = KeyMaker(namespace, self._size // self._hash_block)
        if not self._client.connected:
            log.warning("no metadata server at %s: everything is computed until there is one", self._config.server.path)
        log.info("vcache: namespace %s, chunks of %d tokens, %d shards", namespace, self._size, self._ranks)
        return self._namer
