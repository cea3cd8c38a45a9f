"""A connector and a worker for tests, by the names of their classes. vLLM loads this file."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector
from vllm.v1.worker.cpu_worker import CPUWorker


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
