"""Connectors for tests, by the names of their classes. vLLM loads this file."""

from __future__ import annotations

from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec
from vllm.v1.worker.cpu_worker import CPUWorker

from benchmarks.vllm.extension import Extension


class FailingConnector(ExampleConnector):  # type: ignore[misc]
    """vLLM's own example, to run beside ours under MultiConnector, whose loads, in the step that
    needs them, all fail; it says so behind that."""

    def start_load_kv(self, forward_context: Any, **_: Any) -> None:
        requests = self._get_connector_metadata().requests
        loads = [request.slot_mapping.tolist() for request in requests if not request.is_store]
        self.lost = {slot // self._block_size for slots in loads for slot in slots}

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self.__dict__.pop("lost", set())


class Stage(CPUWorker):  # type: ignore[misc]
    """Of a pipeline. vLLM's own has room for what comes from the stage before only once it has
    warmed up, which it leaves out where nothing is compiled."""

    def compile_or_warm_up_model(self) -> Any:
        runner = self.model_runner
        given = runner.max_num_tokens, runner.model_config.dtype, runner.device
        runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(*given)
        return super().compile_or_warm_up_model()


class Ranks(Extension):
    """Of expert parallel ranks of a server, which is asked by HTTP: `vllm_inside.Serving.meddle`."""

    def meddle(self, place: str, action: str, value: str) -> None:
        from vllm_inside import Serving

        self.meddling = Serving.__new__(Serving)
        self.meddling.touch_nothing()
        self.meddling.meddle(place, action, float(value), 1)

    def leave_alone(self) -> dict[str, int]:
        calls: dict[str, int] = self.meddling.leave_alone()
        return calls


class HostOffloadingSpec(CPUOffloadingSpec):  # type: ignore[misc]
    """Of vLLM's own OffloadingConnector, all of it but the copies, which vLLM makes with CUDA
    alone.
    """

    def get_worker(self, kv_caches: Any) -> HostCopies:
        if self._worker is None:
            self._worker = HostCopies([each.tensor for each in kv_caches.tensors], self.num_chunks)
        return self._worker


class HostCopies(OffloadingWorker):  # type: ignore[misc]
    """Copies of blocks in host memory, made at once."""

    def __init__(self, tensors: list[torch.Tensor], count: int) -> None:
        self._pairs = [(tensor, tensor.new_zeros(count, *tensor.shape[1:])) for tensor in tensors]
        self._done: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        for tensor, kept in self._pairs:
            kept[dst_spec.block_ids] = tensor[src_spec.block_ids]
        self._done.append(TransferResult(job_id, True))
        return True

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        for tensor, kept in self._pairs:
            tensor[dst_spec.block_ids] = kept[src_spec.block_ids]
        self._done.append(TransferResult(job_id, True))
        return True

    def get_finished(self) -> list[TransferResult]:
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: set[int]) -> None:
        return None
