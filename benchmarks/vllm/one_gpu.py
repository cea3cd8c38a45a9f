"""All ranks of a vLLM on one GPU, to check what takes several where there is only one.

NCCL lets ranks share a GPU from 2.30 on, with NCCL_MULTI_RANK_GPU_ENABLE=1 (`environment` sets it);
an older one, such as that of torch 2.11,
refuses ("Duplicate GPU detected"): preload a newer `libnccl.so.2`. vLLM 0.26 gives each rank
a GPU of its own, and its
`--device-ids` refuses a GPU named twice. The ranks take turns on the GPU, so times say nothing.
"""

from __future__ import annotations

import os
from typing import Any


def install() -> None:
    """Make vLLM put all ranks on the first visible GPU. In the process that makes vLLM's
    configuration, before it does.
    """
    from vllm.engine.arg_utils import EngineArgs

    def device_ids(given: Any) -> list[int]:
        gpu = int(os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0])
        return [gpu] * (
            given.tensor_parallel_size * given.pipeline_parallel_size * given.data_parallel_size
        )

    EngineArgs._resolve_device_ids = device_ids
