"""The connector's worker half: moves chunks between the pool, other instances' KV caches and
vLLM's.

A load runs on a separate stream, and vLLM schedules its request after the load. Stores read
computed blocks on another stream. Only a step that gives such a block to a new owner waits for the
store, on the device."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch

from vcache_backend.config import Config
from vcache_backend.errors import VCacheError
from vcache_backend.protocol.messages import ChunkKey, InstanceId, of_rank
from vcache_backend.transfer.session import Session
from vcache_backend.vram_pool.copies.geometry import PagedKV

from ...around_vllm import beside_vllm
from ..metadata import QUIET, PublicationSpec, StepMetadata, WorkerReport
from ..model import compat, groups
from ..model import spec as model_spec
from ..model.sharing import plan
from ..telemetry import traces
from ..telemetry.stats import Meter
from .in_place import Exporter, InPlace
from .loads import Ends, Loads
from .stores import Attached, Stores

log = logging.getLogger("vllm.vcache")

CLOSE_SECONDS = 5.0


class VCacheWorker:
    """Loads and stores one worker's shard of every chunk. Runs in the worker's main thread, in the
    order of vLLM's steps.

    If a method raises, this worker caches nothing any more: see `Boundary`."""

    in_place: InPlace | None = None
    """None unless KV caches are shared in place."""
    rests = False
    """This worker only publishes in the present step, and no earlier step's work is left."""
    _worker: Attached | None = None
    """None before `register`, and while vLLM sleeps."""
    _asleep: Attached | None = None
    _introduce = False

    def __init__(
        self,
        vllm_config: Any,
        kv_cache_config: Any,
        config: Config,
        pp_rank: int,
        tp_rank: int,
        meter: Meter,
    ) -> None:
        self._vllm, self._kv_config = vllm_config, kv_cache_config
        self._place = pp_rank, tp_rank
        self._model, self._config, self._refused, _ = plan(vllm_config, kv_cache_config, config)
        model = self._model
        if model.device_type == "cpu":
            # A first model run that is small, as after a hit, uses AMX without asking Linux for it.
            torch.cpu._init_amx()
        shards = 1 if model.use_mla else model.tp_size
        self._rank = pp_rank * shards + tp_rank % shards
        self._number = pp_rank * model.tp_size + tp_rank
        """Of this worker among all workers."""
        if self._config.connector.share == "in_place" and not self._refused:
            exporter, shows = Exporter(model.device_type), shards > 1 or not tp_rank
            self.in_place = InPlace(exporter, kv_cache_config.num_blocks, shows)
        self._meta = StepMetadata()
        """The last step's metadata."""
        self._meter = meter
        self.stores = Stores(meter, compat.clears(kv_cache_config))
        self.loads = Loads(
            self._number,
            self.stores,
            meter,
            at_once=compat.loads_at_once(vllm_config, kv_cache_config),
            several=groups.several(kv_cache_config),
            traced=traces.wanted(vllm_config),
            publish=self._publish_loaded,
        )
        self.shard = model_spec.ShardSpec(
            pp_rank=pp_rank, tp_rank=tp_rank, problem="it was given no KV caches"
        )
        """This worker's part of a chunk, for the scheduler."""
        self._echoes = set[int]()
        self._link: tuple[bool, float | None] = True, None
        """The connection to the offload tier as last reported."""
        self._stored = deque[ChunkKey](maxlen=4096)
        """Keys of rank 0 of stored chunks that are not reported yet, if vLLM publishes events."""

    # ---- start

    def register(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Describe vLLM's new KV cache, and join the pool.

        VCacheError (or LayoutError, a kind of it) if this worker cannot cache."""
        if self._refused:
            raise VCacheError(self._refused)
        size, blocks = self._config.engine.chunk_size, self._kv_config.num_blocks
        tables = groups.read(self._kv_config, size, in_place=self.in_place is not None)
        kv = tables.describe(kv_caches, blocks)
        shard = model_spec.read_shard(self._vllm, kv_caches, kv, size, *self._place, tables.layers)
        session = self._session(kv_caches, kv, shard)
        if compat.publishes_events(self._vllm):
            session.on_stored.append(lambda keys: self._stored.extend(of_rank(keys, 0)))
        neighbours = self.in_place.neighbours if self.in_place is not None else None
        self._worker = Attached(session, kv, tables.groups[0].block_size, neighbours)
        self.shard = shard
        does = "shares its KV cache in place, on" if self.in_place else "lends to and reads from"
        chunk = f"{shard.chunk_bytes:,} B a chunk"
        log.info("vcache: worker %d %s %s, %s", self._rank, does, session.device, chunk)

    def _session(
        self, kv_caches: Mapping[str, torch.Tensor], kv: PagedKV, shard: model_spec.ShardSpec
    ) -> Session:
        """Join the pool. VCacheError."""
        session = Session(
            self._config,
            model_spec.layout(self._model, [shard], self._config.engine.chunk_size, b""),
            over_budget=beside_vllm(self._vllm),
            anonymous=True,
            rank=self._rank,
            kv_device=str(kv.device),
        )
        session.stats.listeners.append(self._meter.follow)
        session.counts = not self._number  # ranks that hold the same KV have one rank
        try:
            session.bind(kv_caches, kv)
            if self.in_place is not None:
                self.in_place.open(session, kv, kv_caches)
        except BaseException:
            session.close()
            raise
        return session

    # ---- a step

    def begin(self, meta: StepMetadata) -> None:
        """Begin a step, before its model run is queued."""
        self._meta = meta
        quiet = meta is QUIET or meta.only_publishes
        self.rests = quiet and not (self.loads.busy or self.stores.busy)
        if self.rests:
            return
        self._introduce |= meta.introduce
        self._echoes |= meta.echoes
        worker = self._worker
        if worker is not None and meta.instance and self.in_place is not None:
            self.in_place.show(worker.session, InstanceId(meta.instance))
        self.loads.begin(worker, meta)

    def store(self) -> None:
        """Store the chunks or publish the blocks that the step completes. The whole model run must
        be queued."""
        if (worker := self._worker) is None or self._meta is QUIET:
            return
        self.stores.start(worker, self._meta.stores)
        if self._meta.publications and self.in_place is not None:
            self.in_place.publish(self._meta.publications, worker.session.copier.mark())

    def _publish_loaded(self, publication: PublicationSpec) -> None:
        if self.in_place is not None:
            self.in_place.publish([publication])

    def ends(self) -> Ends:
        """Advance all loads. Returns the loads that are over and not yet reported."""
        victims = self._meta.victims
        self._meta.victims = None
        if victims is not None and self._worker is not None and self.in_place is not None:
            self.in_place.save(self._worker, victims, self.stores)
        return self.loads.ends(self._meta.idle)

    def report(self) -> WorkerReport | None:
        """Return the report to the scheduler since the last call; None if it would be empty, and
        the step ran the model. Of other steps vLLM shows the scheduler's half a report only, and
        there loads are often over."""
        loads, link = self.loads, self._reached()
        if self.rests and link == self._link and not (self._introduce or self._stored):
            return None
        stored = [self._stored.popleft() for _ in range(len(self._stored))]
        report = WorkerReport(
            failed=loads.failed,
            links={self._number: link} if link != self._link else {},
            shards={self._place: self.shard} if self._introduce else {},
            stored={self._rank: stored} if stored else {},
            echoes=self._echoes,
            spans=loads.spans,
        )
        loads.failed, loads.spans = set(), []
        self._introduce, self._echoes, self._link = False, set(), link
        return None if report == WorkerReport() and not self._meta.idle else report

    def _reached(self) -> tuple[bool, float | None]:
        """This worker's connection to the offload tier (`OffloadTier.link`)."""
        worker = self._worker or self._asleep
        if worker is None:
            return self._link
        tier = worker.session.tier
        return tier.link if tier is not None else (False, None)

    # ---- sleep, and the end

    def give_up(self) -> None:
        """This half is out of use: no copy of ours may be writing into blocks that vLLM fills
        itself from now on, or reading blocks that it overwrites. Never raises."""
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            with suppress(Exception):  # the device is lost, and with it the engine
                torch.cuda.synchronize()

    def sleep(self) -> None:
        """End all reads and writes of the KV cache, within `CLOSE_SECONDS`: vLLM takes the memory
        away. Idempotent until `wake`."""
        worker = self._worker
        self._worker = None
        if worker is None:
            return
        self._asleep = worker
        deadline = time.monotonic() + CLOSE_SECONDS
        self.loads.stop(deadline)
        if not worker.session.flush(max(deadline - time.monotonic(), 0.0)):
            early = "vLLM sleeps before its last stores are committed"
            log.warning("vcache: %s: their chunks may be missing in the pool", early)
        if worker.kv.device.type == "cuda":
            # Wait for our copies, since their address tables go with vLLM's memory. vLLM also
            # synchronises before and after this call.
            torch.cuda.synchronize(worker.kv.device)

    def wake(self) -> None:
        """Use the KV cache's memory again, which is back at the same addresses. Does nothing
        without an earlier `sleep`."""
        worker = self._asleep
        self._asleep = None
        self._worker = worker or self._worker

    def close(self) -> None:
        """Leave the pool after copies have ended, within `CLOSE_SECONDS`. The chunks stay in the
        pool."""
        worker = self._worker or self._asleep
        self._worker = None
        self._asleep = None
        if worker is None:
            return
        self.loads.stop(time.monotonic() + CLOSE_SECONDS)
        if self.in_place is not None:
            self.in_place.close()
        worker.session.close()
