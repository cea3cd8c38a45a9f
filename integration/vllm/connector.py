"""The connector class that vLLM loads. Passes each call to the scheduler's or the worker's half,
and no error to vLLM: see boundary.py.

Only the constructor raises, and only for bad settings (ConfigError)."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)

from vcache_backend.config import Config, over_file
from vcache_backend.errors import ConfigError, VCacheError
from vcache_backend.metadata_server import start
from vcache_backend.protocol.client import Client

from .. import around_vllm
from .boundary import Boundary, answer, guarded
from .ends import AwaitedLoads, LoadEnds, WorkerLoads
from .metadata import MoreBlocks, StepMetadata, WorkerReport
from .model import compat, versions
from .model.sharing import plan
from .model.spec import ShardSpec
from .scheduler import VCacheScheduler
from .telemetry import stats
from .worker.loads import Ends
from .worker.worker import VCacheWorker

log = logging.getLogger("vllm.vcache")


@dataclass
class Handshake(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """A worker's answer to vLLM's question at the start: its shard, or why it caches nothing."""

    shard: ShardSpec


class VCacheConnector(Boundary, KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """One half of vcache in vLLM: the scheduler's or a worker's, by `role`. See scheduler.py
    and worker/worker.py. Once the half is out of use (`Boundary.off`), each call gives vLLM's
    default answer."""

    _half: VCacheScheduler | VCacheWorker | None = None
    """None if it could not be made."""
    _scheduler: VCacheScheduler
    _worker: VCacheWorker
    """One of both, the same: a half that could not be made is out of use, and vLLM makes no call
    of the other half."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        """ConfigError for unknown or impossible settings in `kv_connector_extra_config`."""
        KVConnectorBase_V1.__init__(self, vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        plans = role == KVConnectorRole.SCHEDULER
        name = f"vLLM's {'scheduler' if plans else 'worker'} (pid {os.getpid()})"
        Boundary.__init__(self, name, says=plans)
        self._awaited, self._running = AwaitedLoads(), WorkerLoads()
        self._engine = str(transfer.engine_id)
        self._meter: stats.Meter | None = None
        self._thread = 0
        """The thread in which vLLM runs the worker."""
        self._alone = vllm_config.parallel_config.world_size == 1
        """The instance has one worker."""
        self._said_off = False
        self._invalid = set[int]()
        """Blocks that loads have failed to fill, until vLLM asks."""
        self._place = 0, 0
        """Pipeline and tensor rank of a worker."""
        try:
            around_vllm.join_log()
            config = self.config = over_file(transfer.kv_connector_extra_config)
            if config.connector.start_server:
                start.try_ensure(config)
            if plans:
                self._begin_scheduler(vllm_config, kv_cache_config, config)
            else:
                self._begin_worker(vllm_config, kv_cache_config, config)
        except ConfigError:
            raise
        except VCacheError as error:
            self.fail(str(error))
        except Exception as error:  # noqa: BLE001 - vLLM serves without
            self.fail(f"{type(error).__name__}: {error}", error)

    def _begin_scheduler(self, vllm_config: Any, kv_cache_config: Any, config: Config) -> None:
        """VCacheError if this instance cannot cache."""
        transfer = vllm_config.kv_transfer_config
        # vLLM's scheduler reads the policy after the constructor has run.
        transfer.kv_load_failure_policy = config.connector.kv_load_failure_policy
        self._ends = LoadEnds(vllm_config.parallel_config.world_size)
        self.on_close(self._ends.close)
        versions.watch()
        loads, stores = transfer.is_kv_consumer, transfer.is_kv_producer
        decision = plan(vllm_config, kv_cache_config, config)
        if decision.refused:
            raise VCacheError(decision.refused)
        meter = self._meter = stats.Meter()
        half = VCacheScheduler(vllm_config, kv_cache_config, decision, loads, stores, meter)
        self._half = self._scheduler = half
        self.on_close(half.close)
        if half.publications is not None and not decision.settings.pool.lent:
            self._cache_hit_source = compat.hit_source_of_peers()

    def _begin_worker(self, vllm_config: Any, kv_cache_config: Any, config: Config) -> None:
        from vllm.distributed.parallel_state import get_pp_group, get_tp_group

        self._place = ranks = get_pp_group().rank_in_group, get_tp_group().rank_in_group
        # All workers move the same tokens: only the first counts them.
        meter = self._meter = stats.Meter(counts_tokens=ranks == (0, 0))
        self._policy = config.connector.kv_load_failure_policy if ranks == (0, 0) else ""
        self._half = self._worker = VCacheWorker(
            vllm_config, kv_cache_config, config, *ranks, meter
        )
        self.on_close(self._worker.close)

    def stop(self) -> None:
        """See `Boundary.stop`."""
        if self._meter is not None:
            with suppress(Exception):
                self._meter.count("failures", 1, "internal")
        if self._half is not None:
            self._half.give_up()

    def shutdown(self) -> None:
        self.close()

    @property
    def in_place(self) -> bool:
        """Whether this half shares the instance's KV cache in place."""
        half = self._half
        shares = half.publications if isinstance(half, VCacheScheduler) else half and half.in_place
        return shares is not None

    # ---- in the scheduler

    @guarded(answer(None))
    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        self._scheduler.watch(gpu_block_pool, self.fail)

    @guarded(answer(None))
    def set_xfer_handshake_metadata(self, metadata: Mapping[Any, Any]) -> None:
        """Take the workers' shards at vLLM's start. Under MultiConnector they come with the first
        step instead: vLLM passes on the handshake of one of its connectors only."""
        given = [one.shard for one in metadata.values() if isinstance(one, Handshake)]
        if given:
            self._scheduler.introduce(given)
            self._check_refusal()

    set_xfer_handshake_metadata_pp_aware = set_xfer_handshake_metadata

    def _check_refusal(self) -> None:
        """A worker that caches nothing, or never introduces itself, puts the instance out of
        use."""
        if refused := self._scheduler.context.refused:
            self.fail(refused)

    @guarded(answer(None))
    def open_nothing(self) -> None:
        """Have no open loads: beside other connectors, only what is there counts as a hit."""
        self._scheduler.waits.open_nothing()

    @guarded(answer(None))
    def on_new_request(self, request: Any) -> None:
        self._scheduler.arrived(request)

    @property
    def requires_kv_delivery(self) -> bool:
        """Whether another instance waits for this instance's chunks. Otherwise an unstored chunk is
        only a later miss."""
        return bool(self._kv_transfer_config.kv_role == "kv_producer")

    @guarded(answer((0, False)))
    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        half = self._scheduler
        return (0, False) if half.context.refused else half.matched(request, num_computed_tokens)

    @guarded(lambda self, request, _, external: self._awaited.expect(request, external))
    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._awaited.expect(request, num_external_tokens)
        self._scheduler.allocated(request, blocks, num_external_tokens)

    @guarded(lambda self, _: self._awaited.stop())
    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        meta = self._scheduler.describe(scheduler_output)
        self._check_refusal()
        if self.off:
            return self._awaited.stop()
        if meta.loads:
            meta.ends = self._ends.address
            self._awaited.sent(meta.loads)
        return meta

    @guarded(answer(0))
    def awaits(self, request_id: str) -> int:
        """Have vLLM hear of another connector's load as soon as of ours. Returns the load's number
        for `put_end`; 0: this half is out of use."""
        number = self._scheduler.load_number()
        self._awaited.waiting[request_id] = number
        return number

    @guarded(answer(False))
    def unreported(self, request_id: str) -> bool:
        """Whether workers are still to report a load of this request of which vLLM has heard, ours
        or one of `awaits`."""
        return self._awaited.unreported(request_id)

    @property
    def ends_address(self) -> tuple[str, str]:
        """See `StepMetadata.ends`."""
        return self._ends.address

    @guarded(lambda self, output: self._awaited.settle(output))
    def update_connector_output(self, connector_output: Any) -> None:
        if connector_output.finished_recving:
            self._awaited.settle(connector_output)
        if self._awaited.waiting:
            self._hasten(connector_output)
        self._scheduler.update(connector_output)

    def _hasten(self, connector_output: Any) -> None:
        """Add finished loads to the report of a step, so that their requests run a step earlier. A
        worker in this thread checks its loads once more, and goes on with what has come."""
        if self._alone and (worker := _worker_here(self._engine)) is not None:
            worker._advance_loads(self._scheduler.further())
        self._awaited.tell(connector_output, self._ends.in_all)

    @guarded(answer((False, None)))
    def request_finished(
        self, request: Any, block_ids: object
    ) -> tuple[bool, dict[str, Any] | None]:
        # vLLM may free the blocks at once: a step that hands a block out again waits for its
        # store, on the device (`Stores.fence`).
        self._scheduler.finished(request)
        return False, None

    request_finished_all_groups = request_finished

    @guarded(lambda self: self._clear())
    def reset_cache(self) -> bool:
        """False if KV from before the reset may still be found, in the pool."""
        return self._scheduler.resets.reset()

    def _clear(self) -> bool:
        """Reset the namespace over a connection of its own, once this half is out of use."""
        instance = self._half.context if isinstance(self._half, VCacheScheduler) else None
        if instance is None or instance.versions or not instance.prefix or self.config is None:
            return True
        try:
            with Client(self.config.server.path, self.config.client, reconnect=False) as server:
                server.clear(instance.prefix, reset=True)
        except Exception as error:  # noqa: BLE001 - nothing of ours raises into vLLM
            log.warning("vcache: the pool was not cleared: %s", error)
            return False
        return True

    @guarded(answer(None))
    def weights_change(self) -> None:
        """vLLM is about to change the weights."""
        self._scheduler.resets.leave_version()

    @guarded(answer(None))
    def weights_are(self, name: object) -> None:
        """vLLM's weights are of the version `name` from now on."""
        if self._scheduler.context.versions:
            log.info("vcache: the weights have version %.80r", name)
            self._scheduler.resets.change_version(versions.digest(name))

    # ---- in a worker

    @guarded(answer(None))
    def get_mem_pool_context(self) -> Any:
        """Return the context in which vLLM allocates a KV cache that other processes can map. None:
        vLLM allocates as usual."""
        in_place = self._worker.in_place
        return in_place.exporter.context() if in_place is not None else None

    @guarded(answer(None))
    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._look_outside()
        try:
            self._worker.register(kv_caches)
        except VCacheError as error:  # no mistake of ours: it names what to change
            self.fail(str(error))

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return self._handshake() if get_kv_transfer_group() is self else None

    @guarded(lambda self: Handshake(self._no_shard()))
    def _handshake(self) -> Handshake:
        return Handshake(self._worker.shard)

    def _no_shard(self) -> ShardSpec:
        return ShardSpec(pp_rank=self._place[0], tp_rank=self._place[1], problem=self.off)

    @guarded(answer(None))
    def unregister_kv_caches(self) -> None:
        """Stop using the KV cache: vLLM goes to sleep and takes its memory away. vLLM 0.33 and
        later call it."""
        self._worker.sleep()

    @guarded(answer(None))
    def restore_kv_caches(self) -> None:
        """Use the KV cache again, whose empty memory is back at the same addresses. vLLM 0.33 and
        later call it."""
        self._worker.wake()

    @guarded(answer(None))
    def _look_outside(self) -> None:
        """Under an enclosing connector (MultiConnector), whose settings vLLM follows, make loads
        wait for the steps under way unless vLLM is known to hold blocks back. Warn if the enclosing
        connector has another `kv_load_failure_policy`, which this connector cannot change."""
        outermost, wanted = get_kv_transfer_group(), self._policy
        if outermost is self:
            return
        loads = self._worker.loads
        loads.at_once &= getattr(outermost, "holds_back", False)
        loads.by_request |= hasattr(outermost, "holds_back")
        policy = outermost._kv_transfer_config.kv_load_failure_policy
        if wanted and policy != wanted:
            log.warning(
                'vcache: a request whose load fails %s: put "kv_load_failure_policy":"%s" beside '
                '"kv_connector":"%s" in --kv-transfer-config; vLLM reads it there alone, where it '
                "is %s",
                "fails, too" if policy == "fail" else "is computed",
                *(wanted, outermost._kv_transfer_config.kv_connector, policy),
            )

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        if isinstance(connector_metadata, StepMetadata):
            if connector_metadata.loads:
                self._running.expect(connector_metadata.loads)
            if connector_metadata.stop:
                self.fail("the scheduler's half is out of use")
            self._begin(connector_metadata)

    @guarded(answer(None))
    def _begin(self, meta: StepMetadata) -> None:
        self._thread = threading.get_ident()
        self._worker.begin(meta)

    @guarded(answer(None))
    def open_ends(self, address: tuple[str, str]) -> None:
        """Before `put_end`."""
        self._worker.loads.ring.open(address)

    def put_end(self, number: int) -> None:
        """Another connector's load of this number has succeeded. In any thread."""
        if not self.off:
            self._worker.loads.ring.put(number)

    @property
    def loads_wait(self) -> bool:
        """Whether another connector's loads of this step must wait, too: see `Loads.waits`."""
        return bool(self.off or self._worker.loads.waits)

    def has_connector_metadata(self) -> bool:
        """False, so that vLLM leaves out the two calls for each layer below, which do nothing."""
        return False

    def start_load_kv(self, *_: Any, **__: Any) -> None:
        """Do nothing: loads begin in `bind_connector_metadata`, or in `get_transfer_results`, once
        the step's model run is queued. No step waits for a load; all layers are stored at once."""

    wait_for_layer_load = save_kv_layer = start_load_kv

    @guarded(answer(None))
    def wait_for_save(self) -> None:
        self._worker.store()

    @guarded(answer(None))
    def _advance_loads(self, more: Sequence[MoreBlocks]) -> None:
        self._worker.loads.advance(more)

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        advanced = self._advance()
        if advanced is None:
            return compat.transfer_results(failed=self._running.fail())
        ends, results = advanced
        if ends is not None:
            self._running.over(ends.over)
            self._invalid = ends.invalid
        return results

    @guarded(answer(None))
    def _advance(self) -> tuple[Ends | None, Any] | None:
        if self._worker.rests:
            return None, compat.transfer_results()
        ends = self._worker.ends()
        return ends, compat.transfer_results(ends.over, ends.failed)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the blocks (vLLM's numbers) that the loads reported with this step have failed to
        fill."""
        invalid, self._invalid = self._invalid, set()
        return invalid

    @guarded(lambda self: self._say_off())
    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        return self._worker.report()

    def _say_off(self) -> WorkerReport | None:
        """Tell the scheduler once that this worker is out of use."""
        if self._said_off:
            return None
        self._said_off = True
        return WorkerReport(shards={self._place: self._no_shard()})

    # ---- in both

    def get_kv_connector_stats(self) -> Any:
        """This process's counts since the last call, also once this half is out of use."""
        try:
            return self._meter.take() if self._meter is not None else None
        except Exception:  # noqa: BLE001 - `suppress` is three calls in each step
            return None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> Any:
        try:
            return stats.build_stats(data)
        except Exception:
            log.exception("vcache: stats of an interval are lost")
            return stats.VCacheStats()

    @classmethod
    def build_prom_metrics(cls, *given: Any, **more: Any) -> Any:
        # Never None: under MultiConnector vLLM would end at the first statistics.
        return stats.VCachePromMetrics(*given, **more)

    @guarded(answer(()))
    def take_events(self) -> Iterable[Any]:
        announcer = self._scheduler.context.announcer
        return announcer.take() if announcer is not None else ()


def _worker_here(engine: str) -> VCacheConnector | None:
    """The worker's half of this engine, if vLLM runs the worker in this thread."""
    group = get_kv_transfer_group() if has_kv_transfer_group() else None
    for half in (group, *getattr(group, "_connectors", ())):
        if isinstance(half, VCacheConnector) and half._engine == engine:
            return half if half._thread == threading.get_ident() else None
    return None
