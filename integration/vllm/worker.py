"""The half of the connector in a worker of vLLM: it moves chunks between the pool and vLLM's KV cache.

Loads run beside the model, on a stream of their own: the scheduler runs their request when they are over. Stores read what a step
has computed, on another stream; only a step that gives such a block to somebody else waits for them, on the device.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from time import perf_counter
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch

from vcache_backend.config import Config
from vcache_backend.errors import VCacheError
from vcache_backend.metadata_server.client import Client
from vcache_backend.metadata_server.messages import ChunkKey, SegmentId
from vcache_backend.transfer import load as transfer
from vcache_backend.transfer.keys import of_rank
from vcache_backend.transfer.load_stats import LoadStats
from vcache_backend.transfer.places import BlockPlaces, Places
from vcache_backend.transfer.session import FOREIGN, Lease, Session
from vcache_backend.transfer.store import store as store_chunks
from vcache_backend.vram_pool.copier import Completion, Mark
from vcache_backend.vram_pool.paged import PagedKV

from .. import amx, memory_budget, round_trip
from . import compat, model_spec, offload
from .compat import refusal
from .events import Events, StoredBlocks
from .metadata import Link, Load, Shard, StepMetadata, Store, WorkerReport
from .stats import Meter

log = logging.getLogger("vllm.vcache")

IDLE_SECONDS = 0.002
"""How long a step without a model run waits for a load: as long as one may keep a request that arrives meanwhile waiting."""
IN_STEP_SECONDS = 30.0
"""How long a step waits for a load that it needs; a copy takes a thousandth of that."""
MAX_TO_SAY = 4096
"""Chunks whose store routers are to be told of; some of them are never stored."""
CLOSE_SECONDS = 5.0


class _Context(NamedTuple):
    """What loads and stores share, once the KV caches are known."""

    session: Session
    kv: PagedKV


class _Gather(NamedTuple):
    """A store under way: which of vLLM's blocks it reads. seconds: what launching it took."""

    copy: Completion
    blocks: list[int]
    tokens: int
    nbytes: int
    seconds: float


class Loading(transfer.Load):
    """The load of one request's blocks. invalid: those that are not filled, once it is over, vLLM's numbers."""

    def __init__(self, context: _Context, load: Load, mark: Mark | None, rank: int, block_size: int) -> None:
        """mark: a point in the model's stream; who owned these blocks before has no work queued after it."""
        session, granted = context.session, load.granted
        keys, lease = of_rank(load.keys, rank), None
        if granted is not None:
            lease = Lease(granted.lease, keys, granted.locations, granted.deadline, granted.seconds, FOREIGN)
        places = BlockPlaces(context.kv, session.chunk_size, load.blocks, block_size, load.skip, load.stop)
        super().__init__(
            session,
            places,
            keys,
            lease=lease,
            mark=None if granted is not None else mark,
            wait_seconds=load.wait_seconds,
            consume=load.consume,
            offload=load.below and granted is None,
            name=load.request_id,
        )
        self.load, self.per_chunk = load, session.chunk_size // block_size

    @property
    def invalid(self) -> list[int]:
        if not self.cause or self.cause == transfer.CANCELLED:
            return []
        return self.load.blocks[max(self.loaded * self.per_chunk, self.load.skip) : self.load.stop]

    @property
    def failure(self) -> str:
        """The cause, as it is counted."""
        return ("store" if self.load.below else "lease_lost") if self.cause == transfer.ABSENT else self.cause

    def blocks_of(self, chunks: list[int]) -> list[int]:
        each = self.per_chunk
        return [block for chunk in chunks for block in self.load.blocks[chunk * each : (chunk + 1) * each]]


class WorkerSide:
    """One worker's shard of every chunk. All methods in the worker's main thread, in the order of vLLM's steps; none raises."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any, config: Config, pp_rank: int, tp_rank: int, meter: Meter) -> None:
        self._vllm, self._kv_config, self._config, self._meter = vllm_config, kv_cache_config, config, meter
        self._pp_rank, self._tp_rank = pp_rank, tp_rank
        self._model = model_spec.read_model(vllm_config, config.connector.model)
        if self._model.device_type == "cpu":
            amx.permit()
        shards = 1 if self._model.use_mla else self._model.tp_size
        self._rank = pp_rank * shards + tp_rank % shards
        self._number = pp_rank * self._model.tp_size + tp_rank
        self._context: _Context | None = None
        self._meta = StepMetadata()
        self._loads: list[Loading] = []
        self._in_step: list[Loading] = []
        self._lost: list[Load] = []
        self._recomputes_in_step = compat.recomputes_in_step(vllm_config)
        self._readable: frozenset[SegmentId] = frozenset()
        self._link = Link()
        self._gathers: list[_Gather] = []
        self._not_stored: dict[str, int] = {}
        self._counted_below: dict[str, int] = {}
        self.events = Events(compat.publishes_events(vllm_config))
        self._to_say: dict[ChunkKey, StoredBlocks] = {}
        self._invalid: set[int] = set()
        self._failed: set[str] = set()
        self._flushed = False
        self._shard = Shard(model_spec.ShardSpec(pp_rank=pp_rank, tp_rank=tp_rank, problem="it was given no KV caches"))
        self._refused = refusal(vllm_config, kv_cache_config, self._model, config.engine.chunk_size)
        self.unsafe = ""
        """Why the tokens of the step that just ran may be wrong, in a way vLLM would not mend."""

    # ---- start

    def register(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """vLLM has made its KV cache: describe it, join the pool, and send bytes there and back.

        Raises VCacheError, LayoutError among them, where nothing can be cached, which is not a fault of ours.
        """
        if self._refused:
            return
        size, blocks = self._config.engine.chunk_size, self._kv_config.num_blocks
        kv = model_spec.describe(self._vllm, dict(kv_caches), blocks, size, self._config.engine)
        shard = model_spec.read_shard(self._vllm, dict(kv_caches), kv, size, self._pp_rank, self._tp_rank)
        session = Session(
            _on_device_of(kv, self._config),
            model_spec.layout(self._model, [shard], size, b""),
            over_budget=memory_budget.beside_vllm(self._model.device_type, self._model.gpu_memory_utilization),
            anonymous=True,
            rank=self._rank,
        )
        try:
            session.bind(dict(kv_caches))
            wrong = round_trip.through_pool(session, kv)
            if wrong:
                raise VCacheError(wrong)
        except BaseException:
            session.close()
            raise
        session.on_stored.append(self._published)
        self._context = _Context(session, kv)
        self._readable = self._segments(session)
        self._shard = Shard(shard, session.offload_link() is not None)
        where = session.device
        log.info("vcache: worker %d lends to and reads from %s, %s B a chunk", self._rank, where, f"{shard.chunk_bytes:,}")

    def refuse(self, reason: str) -> None:
        """Cache nothing, and let the scheduler know."""
        self._shard = Shard(model_spec.ShardSpec(pp_rank=self._pp_rank, tp_rank=self._tp_rank, problem=reason))
        try:
            with Client(self._config.server.path, self._config.client, reconnect=False) as server:
                server.report("error", f"vLLM's worker {self._rank} (pid {os.getpid()}) caches nothing: {reason}")
        except VCacheError as error:
            log.debug("the server was not told: %s", error)

    # ---- a step

    def begin(self, meta: StepMetadata) -> None:
        """A step begins: nothing of its model run is queued yet."""
        self._meta = meta
        # None of them must get lost, whatever happens here: vLLM waits for its end, or counts on its bytes.
        self._lost += meta.loads
        context = self._context
        if context is None:
            return
        # A step without a model run stores nothing, and older releases do not call `store` in it.
        self._flushed |= meta.flush and meta.idle
        self._fence(context, meta)
        mark = context.session.mark() if meta.loads else None
        for load in [load for load in meta.loads if not load.lost]:
            loading = Loading(context, load, mark, self._rank, self._model.block_size)
            (self._loads if load.granted is None else self._in_step).append(loading)
            self._lost.remove(load)
        for loading in self._loads:
            if loading.load.request_id in meta.cancelled:
                loading.cancel()

    def load_in_step(self) -> None:
        """Fill the blocks that this step's model run needs: what is queued from now on comes after it."""
        for loading in self._in_step:
            loading.advance()

    def store(self) -> None:
        """Copy out what the step's model run, all of it queued, completes."""
        context, stores = self._context, self._meta.stores
        if context is None:
            return
        for store in self._sound(stores):
            keys, prefix = of_rank(store.keys, self._rank), of_rank(store.prefix, self._rank)
            try:
                if store.said:
                    self._to_say = {} if len(self._to_say) > MAX_TO_SAY else self._to_say
                    self._to_say |= dict(zip(keys, store.said, strict=True))
                places = BlockPlaces(context.kv, context.session.chunk_size, store.blocks, self._model.block_size)
                self._gather(context, places, keys, list(range(len(keys))), prefix, store.blocks)
            except Exception as error:  # noqa: BLE001 - a store that fails is a store that did not happen
                context.session.miss("store", error)
                self._meter.failed("store")
        if self._meta.flush:
            # Nothing is waited for: whatever reservation there is by now, the scheduler's next reset makes it void.
            self._flushed = True

    def finished(self) -> set[str]:
        """Requests whose load is over, held or not. Launches what can be launched."""
        done = self._advance() | self._give_up()
        until = time.monotonic() + IDLE_SECONDS
        while self._meta.idle and self._loads and not done and time.monotonic() < until:
            self._loads[0].wait(IDLE_SECONDS)
            done = self._advance()
        return done

    def invalid(self) -> set[int]:
        """Blocks that a load should have filled and did not, since the last call. vLLM's numbers. Waits for the step's own loads."""
        self._settle_step()
        found, self._invalid = self._invalid, set()
        return found

    def said(self) -> WorkerReport | None:
        """What the scheduler must know of this step."""
        readable = self._segments(self._context.session) if self._context is not None else self._readable
        introduce = self._meta.introduce
        changed = introduce or readable != self._readable
        link = offload.link(self._context.session, self._link) if self._context is not None else self._link
        if not (self._failed or self._flushed or changed or link != self._link):
            return None
        links = {self._number: link} if link != self._link else {}
        shards = {(self._pp_rank, self._tp_rank): self._shard} if introduce else {}
        said = WorkerReport(self._failed, self._flushed, readable if changed else None, links, shards)
        self._failed, self._flushed, self._readable, self._link = set(), False, readable, link
        return said

    def measured(self) -> None:
        """Tell the meter what was not stored, and what was written below, since the last call."""
        if self._context is None:
            return
        self._measure_below(self._context.session)
        counts = self._context.session.stats.not_stored()
        if counts != self._not_stored:
            for cause, count in counts.items():
                self._meter.not_stored(cause, count - self._not_stored.get(cause, 0))
            self._not_stored = counts

    def close(self) -> None:
        """Let copies end, and leave the pool; the chunks stay there."""
        if self._context is None:
            return
        deadline = time.monotonic() + CLOSE_SECONDS
        while self._loads and time.monotonic() < deadline:
            for loading in self._loads:
                loading.cancel()
            self._advance()
        self._context.session.close()
        self._context = None

    # ---- inside

    def _sound(self, stores: list[Store]) -> list[Store]:
        """Without those that were computed from a block which a load of this step has not filled, whosever: vLLM gives a request's blocks
        to others before they are."""
        self._settle_step()
        unfilled = self._invalid.union(*(load.blocks[load.skip : load.stop] for load in self._lost))
        if not unfilled:
            return stores
        spoiled = {store.request_id for store in stores if not unfilled.isdisjoint(store.before + store.blocks)}
        self._failed |= spoiled
        return [store for store in stores if store.request_id not in spoiled]

    def _gather(
        self,
        context: _Context,
        places: Places,
        keys: list[ChunkKey],
        chunks: list[int],
        prefix: list[ChunkKey],
        blocks: list[int],
        fetched_in: int | None = None,
    ) -> None:
        """Store chunks out of `blocks`, vLLM's numbers, which get no new owner before they are read."""
        started = perf_counter()
        pending = store_chunks(context.session, places, keys, chunks, prefix, beside=True, fetched_in=fetched_in)
        if pending is not None:
            seconds = perf_counter() - started
            self._gathers.append(_Gather(pending.completion, blocks, pending.tokens, pending.nbytes, seconds))

    def _promote(self, context: _Context, loading: Loading) -> None:
        """Store what a load has brought from the offload tier in the pool again."""
        try:
            chunks = loading.to_promote() if loading.load.promote and not loading.cause else []
            blocks = loading.blocks_of(chunks)
            if chunks and self._invalid.isdisjoint(blocks):
                prefix = of_rank(loading.load.prefix, self._rank)
                self._gather(context, loading.places, loading.keys, chunks, prefix, blocks, fetched_in=loading.epoch)
        except Exception as error:  # noqa: BLE001 - a store that fails is a store that did not happen
            context.session.miss("promote", error)
            with suppress(Exception):  # a number too few
                self._meter.failed("store")

    def _measure_below(self, session: Session) -> None:
        if session.offload_link() is None:
            return
        stats = session.stats
        counts = stats.counted("offload_") | {"bytes": stats.counted("bytes_").get("offload_written", 0)}
        if counts != self._counted_below:
            more = {name: count - self._counted_below.get(name, 0) for name, count in counts.items()}
            dropped = {name.removeprefix("dropped_"): count for name, count in more.items() if name.startswith("dropped_")}
            self._meter.written_offloaded(more.get("written", 0), more["bytes"], dropped)
            self._counted_below = counts

    def _advance(self) -> set[str]:
        over = set()
        for loading in list(self._loads):
            if loading.advance():
                self._loads.remove(loading)
                try:
                    self._note(loading)
                    if self._context is not None:
                        self._promote(self._context, loading)
                    over.add(loading.load.request_id)
                except Exception:  # vLLM waits for the end of this one too
                    log.exception("vcache: a load's end could not be noted, so it counts as failed")
                    self._lost.append(loading.load)
        return over

    def _give_up(self) -> set[str]:
        """Loads that never began."""
        lost, self._lost = self._lost, []
        for load in lost:
            self._failed.add(load.request_id)
            self._invalid |= set(load.blocks[load.skip : load.stop])
            if load.granted is not None:
                self._step_failed(load)
        return {load.request_id for load in lost if load.granted is None}

    def _settle_step(self) -> None:
        """Wait for the loads that the step which just ran needed. None is launched any more: the model has read the blocks."""
        loads, self._in_step = self._in_step, []
        deadline = time.monotonic() + IN_STEP_SECONDS
        for loading in loads:
            loading.hold()
            while not loading.advance():
                if time.monotonic() > deadline:
                    loading.abandon()
                    break
                loading.wait(IDLE_SECONDS)
            self._note(loading)
            if loading.invalid:
                self._step_failed(loading.load)

    def _step_failed(self, load: Load) -> None:
        if not self._recomputes_in_step:
            self.unsafe = f"a load of request {load.request_id} failed that its step had counted on"

    def _published(self, keys: list[ChunkKey]) -> None:
        """In the commit thread."""
        for key in keys:
            blocks = self._to_say.pop(key, None)
            if blocks is not None:
                self.events.stored(blocks)

    def _segments(self, session: Session) -> frozenset[SegmentId]:
        try:
            return session.segments()
        except Exception as error:  # noqa: BLE001 - the rest of what a step has to say must get through
            session.miss("segments", error)
            return self._readable

    def _note(self, loading: Loading) -> None:
        """A load is over."""
        invalid, load = loading.invalid, loading.load
        if invalid:
            self._failed.add(load.request_id)
            self._invalid |= set(invalid)
        with suppress(Exception):  # a number too few
            tokens = len(invalid) * self._model.block_size
            self._measure(loading.stats, always=not loading.cause)
            for chunk in loading.consumed if load.said else []:
                self.events.removed(load.said[chunk])
            if loading.cause and loading.cause != transfer.CANCELLED:
                log.warning("%d tokens of request %s are computed, not loaded: %s", tokens, load.request_id, loading.failure)
                self._meter.failed(loading.failure)
            if invalid:
                self._meter.recomputed(tokens)

    def _measure(self, stats: LoadStats, always: bool) -> None:
        tokens = {tier: count for tier, count in stats.tokens.items() if count}
        if tokens or always:
            nbytes = {tier: count * stats.token_bytes for tier, count in tokens.items()}
            self._meter.loaded(tokens, nbytes, stats.metadata_seconds, stats.data_seconds)

    def _fence(self, context: _Context, meta: StepMetadata) -> None:
        """Let this step's work come after the stores that still read a block which somebody gets now."""
        if not self._gathers:
            return
        self._gathers = under_way = [gather for gather in self._gathers if not self._over(gather)]
        if not under_way or not (meta.fresh or meta.opaque):
            return
        given = np.concatenate([np.array(blocks, dtype=np.int64) for blocks in meta.fresh or [[]]])
        for gather in under_way:
            if meta.opaque or np.isin(given, gather.blocks).any():
                context.session.fence(gather.copy)

    def _over(self, gather: _Gather) -> bool:
        """Has the store read its blocks? One that failed reads nothing, and is not committed."""
        try:
            if not gather.copy.done():
                return False
        except VCacheError as error:
            log.debug("a store failed: %s", error)
            return True
        with suppress(Exception):  # a number too few
            self._meter.stored(gather.tokens, gather.nbytes, gather.seconds, gather.copy.seconds or 0.0)
        return True


def _on_device_of(kv: PagedKV, config: Config) -> Config:
    """`auto` is the device of the KV cache."""
    if config.pool.device != "auto":
        return config
    device = "host" if kv.device.type == "cpu" else str(kv.device)
    return msgspec.structs.replace(config, pool=msgspec.structs.replace(config.pool, device=device))
