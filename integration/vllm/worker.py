"""The half of the connector in a worker of vLLM: it moves chunks between the pool and vLLM's KV cache.

An asynchronous load runs on a stream of its own: the scheduler runs its request when it is over. A synchronous one comes before the
model run of its step. Stores read what a step has computed, on another stream; only a step that gives such a block to somebody else
waits for them, on the device.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
import vllm

from vcache_backend.config import Config
from vcache_backend.errors import VCacheError
from vcache_backend.metadata_server.client import Client
from vcache_backend.metadata_server.messages import InstanceId, of_rank
from vcache_backend.resident.neighbours import Neighbours
from vcache_backend.transfer import load as transfer
from vcache_backend.transfer.leases import FOREIGN, Lease
from vcache_backend.transfer.places import BlockPlaces
from vcache_backend.transfer.resident import ResidentChunk
from vcache_backend.transfer.session import Session
from vcache_backend.vram_pool.copier import Mark
from vcache_backend.vram_pool.paged import PagedKV

from .. import amx, memory_budget, round_trip
from . import compat, exportable, groups, model_spec, sleeping
from .in_place import InPlace
from .metadata import LoadSpan, LoadSpec, Shard, StepMetadata
from .replicas import Replica
from .report import Reporter
from .stats import Meter
from .stores import Stores

log = logging.getLogger("vllm.vcache")

IDLE_SECONDS = 0.002
"""How long a step without a model run waits for a load: as long as one may keep a request that arrives meanwhile waiting."""
SYNCHRONOUS_SECONDS = 30.0
"""How long a step waits for a load that it needs; a copy takes a thousandth of that."""
CLOSE_SECONDS = 5.0


class _Worker(NamedTuple):
    """What loads and stores share, once the KV caches are known."""

    session: Session
    kv: PagedKV
    neighbours: Neighbours | None = None


class Loading(transfer.Load):
    """The load of one request's blocks."""

    def __init__(self, worker: _Worker, spec: LoadSpec, mark: Mark, block_size: int) -> None:
        """mark: a point in the model's stream; who owned these blocks before has no work queued after it."""
        session, held, lease = worker.session, spec.lease, None
        keys = of_rank(spec.keys, session.rank)
        if held is not None:
            own = held.locations[session.rank :: held.ranks][: len(keys)]
            lease = Lease(held.id, keys, own, held.deadline, held.seconds, FOREIGN)
        residents = _unpacked(spec.residents)
        if residents and worker.kv.shares:
            # What of a chunk is not read may hold anything by now.
            rows = np.array(spec.blocks).reshape(len(keys), -1) >= 0
            residents = {number: one.only(rows[number]) for number, one in residents.items()}
        super().__init__(
            session,
            BlockPlaces(worker.kv, session.chunk_size, spec.blocks, block_size, spec.skip, spec.stop),
            keys,
            lease=lease,
            mark=mark,
            wait_seconds=spec.wait_seconds,
            consume=spec.consume,
            offload=spec.offload,
            name=spec.request_id,
            residents=residents,
            neighbours=worker.neighbours,
        )
        self.began = time.time_ns()
        self.spec, self._per_chunk = spec, worker.kv.blocks_in(session.chunk_size) * worker.kv.block_size // block_size
        self.in_place = worker.neighbours is not None

    @property
    def invalid(self) -> list[int]:
        """Once it is over: the blocks that it should have filled and has not, vLLM's numbers."""
        if not self.cause or self.cause == transfer.CANCELLED:
            return []
        missed = self.spec.blocks[max(self.loaded * self._per_chunk, self.spec.skip) : self.spec.stop]
        return [block for block in missed if block >= 0]

    @property
    def failure(self) -> str:
        """The cause, as it is counted."""
        absent = "store" if self.spec.offload else "changed" if self.in_place else "lease_lost"
        return absent if self.cause == transfer.ABSENT else self.cause


class WorkerSide:
    """One worker's shard of every chunk. All methods in the worker's main thread, in the order of vLLM's steps; none raises."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any, config: Config, pp_rank: int, tp_rank: int, meter: Meter) -> None:
        self._vllm, self._kv_config, self._meter = vllm_config, kv_cache_config, meter
        self._pp_rank, self._tp_rank = pp_rank, tp_rank
        self._model = compat.read_model(vllm_config, kv_cache_config, config.connector.model)
        self._config = config = exportable.decide(config, vllm_config, kv_cache_config, self._model)
        if self._model.device_type == "cpu":
            amx.permit()
        shards = 1 if self._model.use_mla else self._model.tp_size
        self._rank = pp_rank * shards + tp_rank % shards
        self._refused = compat.refusal(vllm_config, kv_cache_config, self._model, config)
        self.in_place: InPlace | None = None
        """What it takes to share in place, if that is how."""
        if config.connector.share == "in_place" and not self._refused:
            self._refused = exportable.refusal(vllm_config, kv_cache_config, self._model)
            each, shows = config.engine.chunk_size // self._model.block_size, shards > 1 or not tp_rank
            if not self._refused:
                lead = each
                if groups.several(kv_cache_config):
                    of_chunk = groups.read(kv_cache_config, config.engine.chunk_size)
                    each, lead = of_chunk.blocks, of_chunk.lead
                self.in_place = InPlace(exportable.begin(self._model.device_type, vllm.__version__), each, lead, shows)
        self._worker: _Worker | None = None
        """None too while vLLM sleeps, and has no KV cache."""
        self._asleep: _Worker | None = None
        self._weights = sleeping.Weights()
        self._meta, self._open = StepMetadata(), False
        """Of the last step, and whether it is under way."""
        self._models: tuple[int, int] | None = None
        """The thread that queues model runs, and the stream."""
        self._asynchronous: list[Loading] = []
        self._synchronous: list[Loading] = []
        self._lost: list[LoadSpec] = []
        self._invalid: set[int] = set()
        self._failed: set[str] = set()
        self.several = groups.several(kv_cache_config)
        """Whether a load that fails is told by request: vLLM cannot tell whose blocks they are."""
        self._block_size = self._model.block_size
        self._stores = Stores(meter, groups.keep_states(kv_cache_config))
        number = pp_rank * self._model.tp_size + tp_rank
        self.report = Reporter((pp_rank, tp_rank), number, self._rank, compat.publishes_events(vllm_config))
        self.unsafe = ""
        """Why the tokens of the step that just ran may be wrong, in a way vLLM would not mend."""

    # ---- start

    def register(self, kv_caches: Mapping[str, Any]) -> None:
        """vLLM has made its KV cache: describe it, join the pool, and send bytes there and back.

        Raises VCacheError, LayoutError among them, where nothing can be cached, which is not a fault of ours.
        """
        if self._refused:
            if self._config.connector.share == "in_place" or not self.needless:
                self.refuse(self._refused)
            return
        if self.in_place is not None:
            self.in_place.export(kv_caches)
        size, blocks = self._config.engine.chunk_size, self._kv_config.num_blocks
        if self.several:
            found = groups.read(self._kv_config, size)
            kv = model_spec.describe_groups(found, kv_caches, blocks, size, self._config.engine)
            self._block_size, names = found.groups[0].block_size, found.layers
            # A state has several tensors, one behind the other.
            kv_caches = {name: one if isinstance(one, torch.Tensor) else one[0] for name, one in kv_caches.items()}
        else:
            kv, names = model_spec.describe(self._vllm, dict(kv_caches), blocks, size, self._config.engine), ""
        shard = model_spec.read_shard(self._vllm, dict(kv_caches), kv, size, self._pp_rank, self._tp_rank)
        if names:
            shard = msgspec.structs.replace(shard, layer_names=names)
        session = Session(
            self._config,
            model_spec.layout(self._model, [shard], size, b""),
            over_budget=memory_budget.beside_vllm(self._model.device_type, self._model.gpu_memory_utilization),
            anonymous=True,
            rank=self._rank,
            kv_device=str(kv.device),
        )
        try:
            session.bind(dict(kv_caches), kv)
            wrong = round_trip.through_pool(session, kv)
            if wrong:
                raise VCacheError(wrong)
            if self.in_place is not None:
                self.in_place.open(session, kv)
        except BaseException:
            session.close()
            raise
        self._worker = _Worker(session, kv, self.in_place.neighbours if self.in_place is not None else None)
        self._stores.open(session, kv, self._block_size)
        self.report.open(session, Shard(shard, session.tier is not None), self._worker.neighbours)
        does = "lends to and reads from" if self.in_place is None else "shares its KV cache in place, on"
        log.info("vcache: worker %d %s %s, %s B a chunk", self._rank, does, session.device, f"{shard.chunk_bytes:,}")

    @property
    def needless(self) -> bool:
        """Whether nothing is cached by vLLM's configuration alone, so that the scheduler's half knows it too."""
        return bool(self._refused) and not groups.hidden(self._kv_config)

    def refuse(self, reason: str) -> None:
        """Cache nothing, and let the scheduler know: also after it has begun."""
        self.report.refuse(reason)
        try:
            with Client(self._config.server.path, self._config.client, reconnect=False) as server:
                server.report("error", f"vLLM's worker {self._rank} (pid {os.getpid()}) caches nothing: {reason}")
        except VCacheError as error:
            log.debug("the server was not told: %s", error)

    # ---- a step

    def begin_ahead(self, meta: StepMetadata) -> None:
        """The scheduler's half has planned a step, in this process, with synchronous loads: their copies begin now, while vLLM prepares the
        model run, milliseconds for a long prompt. Not before another step is over, nor where model runs are not queued from here."""
        if not self._open and self._models == self._here():
            self.begin(meta)
            for loading in self._synchronous:
                loading.advance()

    def begin(self, meta: StepMetadata) -> None:
        """A step begins: nothing of its model run is queued yet. Once more for the same step: nothing."""
        if meta is self._meta:
            return
        self._meta, self._open = meta, True
        # None of them must get lost, whatever happens here: vLLM waits for its end, or counts on its bytes.
        self._lost += meta.loads
        self.report.introduce |= meta.introduce
        self.report.read |= {meta.echo} if meta.echo else set()
        self.report.same = self._weights.ask(meta.nap, meta.compare)
        worker = self._worker
        if worker is None:
            return
        if meta.instance and self.in_place is not None:
            self.in_place.show(InstanceId(meta.instance))
        for instance in meta.meet:
            if worker.neighbours is not None:
                worker.neighbours.expects(instance)
        # A step without a model run stores nothing, and older releases do not call `store` in it.
        self.report.flushed |= meta.flush and meta.idle
        self._stores.fence(meta)
        loads = [spec for spec in meta.loads if not spec.lost]
        mark = worker.session.copier.mark() if loads else None
        for spec in loads:
            assert mark is not None
            loading = Loading(worker, spec, mark, self._block_size)
            (self._synchronous if spec.synchronous else self._asynchronous).append(loading)
            self._lost.remove(spec)
        for loading in self._asynchronous:
            if loading.spec.request_id in meta.found:
                loading.found(_unpacked(meta.found[loading.spec.request_id]))
            if loading.spec.request_id in meta.cancelled:
                loading.cancel()

    def load_synchronously(self) -> None:
        """Fill the blocks that this step's model run needs: what is queued from now on comes after it."""
        for loading in self._synchronous:
            # Of what has begun ahead only what is missing: verdicts have time until the model runs.
            if not loading.launched:
                loading.advance()
            loading.follow()
        # Last, since it may raise.
        self._models = self._here()

    def store(self) -> None:
        """Copy out what the step's model run, all of it queued, completes."""
        if self._worker is None or self.unsafe:
            return
        self._settle_synchronous()
        unfilled = self._invalid.union(*(spec.wanted for spec in self._lost))
        self.report.failed |= self._stores.start(self._meta.stores, unfilled)
        if self._meta.publications and self.in_place is not None:
            self.report.failed |= self.in_place.publish(self._meta.publications, unfilled)
        # Nothing is waited for: whatever reservation there is by now, the scheduler's next reset makes it void.
        self.report.flushed |= self._meta.flush

    def finished(self) -> set[str]:
        """Requests whose asynchronous load is over, held or not. Launches what can be launched."""
        self._open = False
        victims, self._meta.victims = self._meta.victims, None
        if victims is not None and self.in_place is not None:
            self.in_place.save(victims, self._stores)
        done = self._advance() | self._give_up()
        began = time.monotonic()
        while self._meta.idle and self._asynchronous and not done:
            first = self._asynchronous[0]
            if time.monotonic() > began + IDLE_SECONDS:
                break
            first.wait(IDLE_SECONDS)
            done = self._advance()
        return done

    def invalid(self) -> set[int]:
        """Blocks that a load should have filled and did not, since the last call. vLLM's numbers. Waits for synchronous loads."""
        self._settle_synchronous()
        found, self._invalid = self._invalid, set()
        return found if not self.several else set()

    def failed(self) -> set[str]:
        """Requests whose asynchronous load failed since the last call, where it is told so."""
        failed, self._failed = self._failed, set()
        return failed

    def measured(self) -> None:
        """Tell the meter what was not stored, and what was offloaded, since the last call."""
        self._stores.measure()
        if self.in_place is not None:
            self.in_place.measure(self._meter)

    def sleep(self) -> None:
        """vLLM takes the KV cache's memory away: end all that reads or writes it. Until `wake` nothing does. May be called again."""
        worker, self._worker = self._worker, None
        if worker is None:
            return
        self._asleep = worker
        self._settle_synchronous()
        deadline = time.monotonic() + CLOSE_SECONDS
        for loading in self._asynchronous:
            loading.cancel()
        for loading in self._asynchronous:
            while not loading.advance() and time.monotonic() < deadline:
                loading.wait(IDLE_SECONDS)
            loading.abandon()
            # vLLM waits for the end of this one, and its bytes are gone in any case.
            self._lost.append(loading.spec)
        self._asynchronous.clear()
        if not worker.session.flush(max(deadline - time.monotonic(), 0.0)):
            log.warning("vcache: what was stored last is not in the pool yet, as vLLM goes to sleep")
        if worker.kv.device.type == "cuda":
            # As vLLM has done before it asked, and does afterwards: our tables go with its own.
            torch.cuda.synchronize(worker.kv.device)
        self._weights.note()

    def wake(self) -> None:
        """The KV cache's memory is back, at the same addresses. May be called again, and without `sleep`."""
        worker, self._asleep = self._asleep, None
        if worker is None:
            return
        self._worker = worker
        if wrong := round_trip.through_pool(worker.session, worker.kv):
            self.close()
            self.refuse(f"after vLLM's sleep {wrong}")

    def close(self) -> None:
        """Let copies end, and leave the pool; the chunks stay there."""
        worker, self._worker, self._asleep = self._worker or self._asleep, None, None
        if self.in_place is not None:
            # vLLM may end before it has made its KV cache.
            self.in_place.exporter.close()
        if worker is None:
            return
        deadline = time.monotonic() + CLOSE_SECONDS
        for loading in self._asynchronous:
            loading.cancel()
        while self._asynchronous and time.monotonic() < deadline:
            self._advance()
        if self.in_place is not None:
            self.in_place.close()
        worker.session.close()

    # ---- inside

    def _here(self) -> tuple[int, int]:
        """This thread, and its current stream; 0 where there are none."""
        return threading.get_ident(), torch.cuda.current_stream().cuda_stream if self._model.device_type == "cuda" else 0

    def _advance(self) -> set[str]:
        over = set()
        for loading in list(self._asynchronous):
            if loading.advance():
                self._asynchronous.remove(loading)
                try:
                    self._note(loading)
                    if loading.spec.promote and not loading.cause and self._worker is not None:
                        self._stores.promote(loading, loading.spec, self._invalid)
                    over.add(loading.spec.request_id)
                except Exception:  # vLLM waits for the end of this one too
                    log.exception("vcache: a load's end could not be noted, so it counts as failed")
                    self._lost.append(loading.spec)
        return over

    def _give_up(self) -> set[str]:
        """Loads that never began."""
        lost, self._lost = self._lost, []
        for spec in lost:
            self.report.failed.add(spec.request_id)
            self._invalid |= set(spec.wanted)
            self._note_failed(spec)
            self._say(spec, None)
            if spec.synchronous:
                self.report.read.add(spec.number)
                self._synchronous_failed(spec)
        return {spec.request_id for spec in lost if not spec.synchronous}

    def _settle_synchronous(self) -> None:
        """Wait for the loads that the step which just ran needed. None is launched any more: the model has read the blocks."""
        deadline = time.monotonic() + SYNCHRONOUS_SECONDS
        while self._synchronous:
            # It stays there until its verdict is noted: after an exception in `store`, which vLLM does not see, `invalid` tries again.
            loading = self._synchronous[0]
            loading.hold()
            while not loading.advance():
                if time.monotonic() > deadline:
                    loading.abandon()
                    break
                loading.wait(IDLE_SECONDS)
            self._note(loading)
            if loading.invalid:
                self._synchronous_failed(loading.spec)
            del self._synchronous[0]

    def _note_failed(self, spec: LoadSpec) -> None:
        if self.several and not spec.synchronous:
            self._failed.add(spec.request_id)

    def _synchronous_failed(self, spec: LoadSpec) -> None:
        if not self._model.recomputes:
            self.unsafe = f"a load of request {spec.request_id} failed that its step had counted on"

    def _note(self, loading: Loading) -> None:
        """A load is over."""
        invalid, name = loading.invalid, loading.spec.request_id
        if loading.spec.synchronous:
            self.report.read.add(loading.spec.number)
        if invalid:
            self.report.failed.add(name)
            self._invalid |= set(invalid)
            self._note_failed(loading.spec)
        self._say(loading.spec, loading)
        with suppress(Exception):  # a number too few
            if loading.stats.tokens.total() or not loading.cause:
                self._meter.loaded(loading.stats)
            if loading.cause and loading.cause != transfer.CANCELLED:
                tokens = len(invalid) * self._model.block_size
                log.warning("%d tokens of request %s are computed, not loaded: %s", tokens, name, loading.failure)
                self._meter.count("failures", 1, loading.failure)
                self._meter.count("recomputed_tokens", tokens)

    def _say(self, spec: LoadSpec, loading: Loading | None) -> None:
        """loading: None if it never began."""
        name, number, now = spec.request_id, self.report.number, time.time_ns()
        if loading is None:
            self.report.spans.append(LoadSpan(name, number, now, now, {}, 0.0, 0.0, "never began"))
            return
        stats = loading.stats
        nbytes = {tier: tokens * stats.token_bytes for tier, tokens in stats.tokens.items()}
        times = stats.metadata_seconds, stats.data_seconds
        self.report.spans.append(LoadSpan(name, number, loading.began, now, nbytes, *times, loading.failure))


def _unpacked(residents: Mapping[int, Replica]) -> dict[int, ResidentChunk]:
    return {chunk: ResidentChunk.unpacked(*replica) for chunk, replica in residents.items()}
