"""vLLM's sleep mode where its own does nothing: on the CPU.

The engine's half is vLLM's. A worker does here what `gpu_worker.py` of 0.33 does, in its order, in the thread that calls it: the weights'
memory loses its bytes and gets them back (level 1) or does not (level 2), the KV cache's holds something else afterwards.
"""

from __future__ import annotations

import ctypes
from typing import Any

SOILED = 0x7B
WEIGHTS, KV_CACHE = "weights", "kv_cache"


def install() -> None:
    """For this process's worker, before it loads its model."""
    from vllm.v1.worker.cpu_worker import CPUWorker

    CPUWorker.sleep, CPUWorker.wake_up = sleep, wake_up


def sleep(worker: Any, level: int = 1) -> None:
    from vllm.device_allocator.cumem import CuMemAllocator
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    if CuMemAllocator.instance is None:
        CuMemAllocator.instance = CuMemAllocator()
        CuMemAllocator.instance.pointer_to_data |= dict(_held(worker))
    if has_kv_transfer_group():
        get_kv_transfer_group().unregister_kv_caches()
    for address, data in CuMemAllocator.instance.pointer_to_data.items():
        data.cpu_backup_tensor = ctypes.string_at(address, data.handle[1]) if (data.tag, level) == (WEIGHTS, 1) else None
        ctypes.memset(address, SOILED, data.handle[1])
        data.is_asleep = True


def wake_up(worker: Any, tags: list[str] | None = None) -> None:
    from vllm.device_allocator.cumem import CuMemAllocator
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    for address, data in CuMemAllocator.instance.pointer_to_data.items():
        if data.is_asleep and (tags is None or data.tag in tags):
            data.is_asleep = False
            if data.cpu_backup_tensor is not None:
                ctypes.memmove(address, data.cpu_backup_tensor, data.handle[1])
    if has_kv_transfer_group() and (tags is None or KV_CACHE in tags):
        get_kv_transfer_group().restore_kv_caches()


def _held(worker: Any) -> Any:
    """What sleep mode's allocator would have allocated, by address; but not what vLLM has packed for this CPU."""
    from vllm.device_allocator import AllocationData

    runner = worker.model_runner
    for tag, tensors in ((WEIGHTS, runner.model.parameters()), (KV_CACHE, runner.kv_caches)):
        for tensor in tensors:
            memory = tensor.untyped_storage()
            size = memory.nbytes() // 8 * 8
            if size:
                yield memory.data_ptr(), AllocationData((0, size, memory.data_ptr(), 0), tag)
