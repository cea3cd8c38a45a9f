"""Connectors for tests, by the names of their classes. vLLM loads this file."""

from __future__ import annotations

from typing import Any

from vllm.v1.worker.cpu_worker import CPUWorker


class Stage(CPUWorker):  # type: ignore[misc]
    """Of a pipeline. vLLM's own has room for what comes from the stage before only once it has
    warmed up, which it leaves out where nothing is compiled."""

    def compile_or_warm_up_model(self) -> Any:
        runner = self.model_runner
        given = runner.max_num_tokens, runner.model_config.dtype, runner.device
        runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(*given)
        return super().compile_or_warm_up_model()
