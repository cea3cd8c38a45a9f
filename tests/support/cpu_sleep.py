"""vLLM's sleep mode on the CPU, where vLLM's own does nothing.

The engine's half is vLLM's. A worker does what `gpu_worker.py` of 0.33 does, in the same order and
thread: weights lose their bytes, and get them back (level 1) or not (level 2); the KV cache has
other contents afterwards."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

SOILED = 0x7B
WEIGHTS, KV_CACHE = "weights", "kv_cache"
_saved: dict[int, bytes] = {}


def install() -> None:
    """For this process's worker."""
    from vllm.v1.worker.cpu_worker import CPUWorker

    CPUWorker.sleep, CPUWorker.wake_up, CPUWorker.discard = sleep, wake_up, discard


def sleep(self: Any, level: int = 1) -> None:
    _connector("unregister_kv_caches")
    _saved.clear()
    for address, nbytes in _memory(self.model_runner.get_model().parameters()):
        if level == 1:
            _saved[address] = ctypes.string_at(address, nbytes)
        ctypes.memset(address, SOILED, nbytes)
    _soil(self)


def discard(self: Any, tags: tuple[str, ...]) -> None:
    if KV_CACHE in tags:
        _connector("unregister_kv_caches")
        _soil(self)


def wake_up(self: Any, tags: list[str] | None = None) -> None:
    if tags is None or WEIGHTS in tags:
        for address, there in _saved.items():
            ctypes.memmove(address, there, len(there))
        _saved.clear()
    if tags is None or KV_CACHE in tags:
        _connector("restore_kv_caches")


def _connector(hook: str) -> None:
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    if has_kv_transfer_group():
        getattr(get_kv_transfer_group(), hook)()


def _soil(worker: Any) -> None:
    for address, nbytes in _memory(worker.model_runner.kv_caches):
        ctypes.memset(address, SOILED, nbytes)


def _memory(tensors: Any) -> Iterator[tuple[int, int]]:
    """The tensors' memory, as (address, bytes), without weights that vLLM has packed for this
    CPU.
    """
    memories = (tensor.untyped_storage() for tensor in tensors)
    return ((memory.data_ptr(), memory.nbytes()) for memory in memories)
