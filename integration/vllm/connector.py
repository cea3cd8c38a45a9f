"""The connector class that vLLM loads. Passes each call to the scheduler's or the worker's half,
and no error to vLLM.

A failure is logged and counts as a miss. Only the constructor raises, and only for bad settings
(ConfigError)."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any
from weakref import WeakValueDictionary

import torch
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)

from vcache_backend.config import Config
from vcache_backend.errors import VCacheError
from vcache_backend.metadata_server import start

from .. import logs
from ..guard import answers
from . import settings
from .ends import LoadEnds
from .metadata import QUIET, StepMetadata
from .model import compat, versions
from .model.decision import decide
from .scheduler.side import SchedulerSide
from .telemetry import stats
from .worker.side import WorkerSide

log = logging.getLogger("vllm.vcache")

_workers: WeakValueDictionary[str, VCacheConnector] = WeakValueDictionary()
"""By vLLM's name of the engine, the worker's half of each instance whose only worker runs in the
scheduler's process. Workers of data parallel ranks have their own processes."""


class VCacheConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """One half of vcache in vLLM: the scheduler's or a worker's, by `role`. See scheduler/side.py
    and worker/side.py.

    A refused scheduler's half is set to None. Then each call gives vLLM's default answer."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        """ConfigError for unknown or impossible settings in `kv_connector_extra_config`."""
        super().__init__(vllm_config, role, kv_cache_config)
        logs.join_vllm()
        transfer = vllm_config.kv_transfer_config
        config = settings.read(transfer.kv_connector_extra_config)
        if config.connector.start_server:
            start.try_ensure(config)
        self.failures: set[str] = set()
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        self._undo = ExitStack()
        """For `shutdown`, also after a half was refused."""
        self._engine = str(transfer.engine_id)
        self._thread = 0
        """The thread in which vLLM runs the worker."""
        try:
            if role == KVConnectorRole.SCHEDULER:
                self._begin_scheduler(vllm_config, kv_cache_config, config)
            else:
                self._begin_worker(vllm_config, kv_cache_config, config)
        except Exception:  # vLLM serves without
            log.exception("vcache caches nothing here")

    def _begin_scheduler(self, vllm_config: Any, kv_cache_config: Any, config: Config) -> None:
        transfer = vllm_config.kv_transfer_config
        # vLLM's scheduler reads the policy after the constructor has run.
        transfer.kv_load_failure_policy = config.connector.kv_load_failure_policy
        self._meter = stats.Meter()
        self._ends = LoadEnds(vllm_config.parallel_config.world_size)
        self._undo.callback(self._ends.close)
        versions.watch()
        loads, stores = transfer.is_kv_consumer, transfer.is_kv_producer
        decision = decide(vllm_config, kv_cache_config, config)
        try:
            if decision.refused:
                raise VCacheError(decision.refused)
            side = SchedulerSide(vllm_config, kv_cache_config, decision, loads, stores, self._meter)
        except VCacheError as error:
            log.error("vcache caches nothing: %s. vLLM serves without it", error)
            self._undo.close()
            return
        self._scheduler = side
        self._undo.callback(side.close)
        if side.publications is not None and side.victims is None:
            self._cache_hit_source = compat.hit_source_of_peers()

    def _begin_worker(self, vllm_config: Any, kv_cache_config: Any, config: Config) -> None:
        from vllm.distributed.parallel_state import get_pp_group, get_tp_group

        ranks = get_pp_group().rank_in_group, get_tp_group().rank_in_group
        # All workers move the same tokens: only the first counts them.
        self._meter = stats.Meter(counts_tokens=ranks == (0, 0))
        self._policy = config.connector.kv_load_failure_policy if ranks == (0, 0) else ""
        self._worker = WorkerSide(vllm_config, kv_cache_config, config, *ranks, self._meter)
        self._undo.callback(self._worker.close)
        if vllm_config.parallel_config.world_size == 1:
            _workers[self._engine] = self

    def note_failure(self, name: str, error: Exception) -> None:
        """Log a failure with its traceback, once for each call and type of exception."""
        kind = f"{name}: {type(error).__name__}"
        if kind not in self.failures:
            self.failures.add(kind)
            log.error("vcache: %s failed, which counts as a miss", name, exc_info=error)

    @answers(None)
    def shutdown(self) -> None:
        self._undo.close()

    # ---- in the scheduler

    @answers(None)
    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        if self._scheduler is not None:
            self._scheduler.watch(gpu_block_pool)

    @answers(None)
    def on_new_request(self, request: Any) -> None:
        if self._scheduler is not None:
            self._scheduler.arrived(request)

    @property
    def requires_kv_delivery(self) -> bool:
        """Whether another instance waits for this instance's chunks. Otherwise an unstored chunk is
        only a later miss."""
        return bool(self._kv_transfer_config.kv_role == "kv_producer")

    @answers((0, False))
    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        side = self._scheduler
        if side is None or side.instance.refused:
            return 0, False
        return side.matched(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        side = self._scheduler
        if side is None or not num_external_tokens:
            return
        try:
            side.allocated(request, blocks, num_external_tokens)
        except Exception as error:  # noqa: BLE001 - the outermost line of ours
            self.note_failure("update_state_after_alloc", error)
            side.lost(request)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        side = self._scheduler
        if side is None:
            return QUIET
        meta = None
        try:
            if side.quiet(scheduler_output):
                return QUIET
            meta = side.begin()
            if meta.loads:
                self._ends.expect(meta.loads)
                meta.ends = self._ends.address
            elif side.instance.refused:
                self._scheduler = None
                return QUIET
            side.plan(scheduler_output, meta)
        except Exception as error:  # noqa: BLE001 - the outermost line of ours
            self.note_failure("build_connector_meta", error)
            meta = meta or side.begin()
            self._stop_stores(side, meta)
        return meta

    @answers(None)
    def _stop_stores(self, scheduler: SchedulerSide, meta: StepMetadata) -> None:
        scheduler.stop_stores(meta)

    @answers(None)
    def update_connector_output(self, connector_output: Any) -> None:
        if self._ends.waiting or connector_output.finished_recving:
            self._hasten(connector_output)
        if self._scheduler is not None:
            self._scheduler.update(connector_output)

    @answers(None)
    def _hasten(self, connector_output: Any) -> None:
        """Add finished loads to the report of a step, so that their requests run a step earlier.
        Remove loads that were added before. A worker in this thread checks its loads once more."""
        reported = self._ends.reported(connector_output.finished_recving or ())
        connector_output.finished_recving = reported
        if not self._ends.waiting:
            return
        half = _workers.get(self._engine)
        if half is not None and half._worker and half._thread == threading.get_ident():
            half._worker.loads.advance()
        connector_output.finished_recving = reported | self._ends.over()

    @answers((False, None))
    def request_finished(
        self, request: Any, block_ids: object
    ) -> tuple[bool, dict[str, Any] | None]:
        # vLLM may free the blocks at once: a step that hands a block out again waits for its
        # store, on the device (`Stores.fence`).
        if self._scheduler is not None:
            self._scheduler.finished(request)
        return False, None

    request_finished_all_groups = request_finished

    @answers(False)
    def reset_cache(self) -> bool:
        return self._scheduler.resets.reset() if self._scheduler is not None else True

    @answers(None)
    def weights_change(self) -> None:
        """vLLM is about to change the weights."""
        if self._scheduler is not None:
            self._scheduler.resets.leave_version()

    @answers(None)
    def weights_are(self, name: object) -> None:
        """vLLM's weights are of the version `name` from now on."""
        if self._scheduler is not None and self._scheduler.instance.versions:
            log.info("vcache: the weights have version %.80r", name)
            self._scheduler.resets.change_version(versions.digest(name))

    # ---- in a worker

    @answers(None)
    def get_mem_pool_context(self) -> Any:
        """Return the context in which vLLM allocates a KV cache that other processes can map. None:
        vLLM allocates as usual."""
        in_place = self._worker.in_place if self._worker is not None else None
        return in_place.exporter.context() if in_place is not None else None

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        if self._worker is None:
            return
        self._look_outside()
        try:
            self._worker.register(kv_caches)
        except VCacheError as error:
            self._worker.refuse(str(error))
        except Exception as error:
            log.exception("vcache caches nothing here")
            self._worker.refuse(f"{type(error).__name__}: {error}")

    @answers(None)
    def unregister_kv_caches(self) -> None:
        """Stop using the KV cache: vLLM goes to sleep and takes its memory away. vLLM 0.33 and
        later call it."""
        if self._worker is not None:
            self._worker.sleep()

    @answers(None)
    def restore_kv_caches(self) -> None:
        """Use the KV cache again, whose empty memory is back at the same addresses. vLLM 0.33 and
        later call it."""
        if self._worker is not None:
            self._worker.wake()

    @answers(None)
    def _look_outside(self) -> None:
        """Under an enclosing connector (MultiConnector), whose settings vLLM follows, make loads
        wait for the steps under way: vLLM may not hold blocks back. Warn if the enclosing connector
        has another `kv_load_failure_policy`, which this connector cannot change."""
        outermost, wanted = get_kv_transfer_group(), self._policy
        if outermost is self or self._worker is None:
            return
        self._worker.loads.at_once = False
        policy = outermost._kv_transfer_config.kv_load_failure_policy
        if wanted and policy != wanted:
            log.warning(
                'vcache: a request whose load fails %s: put "kv_load_failure_policy":"%s" beside '
                '"kv_connector":"%s" in --kv-transfer-config; vLLM reads it there alone, where it '
                "is %s",
                "fails, too" if policy == "fail" else "is computed",
                *(wanted, outermost._kv_transfer_config.kv_connector, policy),
            )

    @answers(None)
    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        if self._worker is not None and isinstance(connector_metadata, StepMetadata):
            self._thread = threading.get_ident()
            self._worker.begin(connector_metadata)

    def has_connector_metadata(self) -> bool:
        """False, so that vLLM leaves out the two calls for each layer below, which do nothing."""
        return False

    def start_load_kv(self, *_: Any, **__: Any) -> None:
        """Do nothing: loads begin in `bind_connector_metadata`, or in `get_transfer_results`, once
        the step's model run is queued. No step waits for a load; all layers are stored at once."""

    wait_for_layer_load = save_kv_layer = start_load_kv

    @answers(None)
    def wait_for_save(self) -> None:
        if self._worker is not None:
            self._worker.store()

    @answers(compat.transfer_results)
    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        worker = self._worker
        if worker is None:
            return compat.transfer_results()
        return compat.transfer_results(worker.finished(), worker.loads.failed())

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the blocks (vLLM's numbers) that loads have failed to fill since the last call.

        Not guarded, since it cannot raise: without an answer vLLM would count blocks as filled."""
        return self._worker.loads.invalid() if self._worker is not None else set()

    @answers(None)
    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        return self._worker.report.take() if self._worker is not None else None

    # ---- in both

    @answers(None)
    def get_kv_connector_stats(self) -> Any:
        """This process's counts since the last call."""
        if self._worker is not None:
            self._worker.measure()
        return self._meter.take()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> Any:
        return stats.build_stats(data)

    @classmethod
    def build_prom_metrics(cls, *given: Any, **more: Any) -> Any:
        return stats.VCachePromMetrics(*given, **more)

    @answers(())
    def take_events(self) -> Iterable[Any]:
        announcer = self._scheduler.instance.announcer if self._scheduler is not None else None
        return announcer.take() if announcer is not None else ()
