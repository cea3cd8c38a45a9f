"""Makes vLLM allocate the KV cache in memory that other instances can map.

vLLM asks the connector for a context around exactly this allocation, in all supported releases
(`tests/outside/releases.py`)."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager

import torch

from vcache_backend.errors import LayoutError, SegmentError, VCacheError
from vcache_backend.vram_pool.exports import CudaExportable, HostExportable, Region

from ..model.sharing import POOL

log = logging.getLogger("vllm.vcache")

Exportable = CudaExportable | HostExportable


class Exporter:
    """The memory of one worker's KV cache. All methods run in the worker's main thread, in which
    vLLM makes its KV cache.

    The region and its descriptor belong to vLLM's tensors and live as long as these: callers do not
    close them."""

    def __init__(self, device_type: str) -> None:
        """device_type: vLLM's, `cuda` or `cpu`. Never raises: without exportable memory `region`
        raises the reason."""
        self._memory: Exportable | None = None
        self._problems: list[str] = []
        with self._noting_failure():
            self._memory = _memory(device_type)

    def context(self) -> AbstractContextManager[None] | None:
        """Return the context in which vLLM makes its KV cache, for `get_mem_pool_context`. None
        without exportable memory."""
        return self._around(self._memory) if self._memory is not None else None

    def region(self, kv_caches: Mapping[str, torch.Tensor]) -> Region:
        """Return the exportable allocation that holds `kv_caches`. vLLM makes one for all layers.

        LayoutError if the KV caches lie elsewhere, SegmentError without exportable memory."""
        memory = self._memory
        if memory is None or self._problems:
            raise SegmentError(
                f"vLLM's KV cache cannot be shared in place: {'; '.join(self._problems)}; or "
                f"set {POOL}"
            )
        storage = next(iter(kv_caches.values())).untyped_storage()
        first, end = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
        regions = memory.allocations()
        for region in regions:
            if region.address <= first and end <= region.address + region.nbytes:
                return region
        why = memory.problem or "another connector or allocator has made it"
        raise LayoutError(
            f"vLLM's KV cache cannot be shared in place: {storage.nbytes():,} B on "
            f"{storage.device} lie in none of the {len(regions)} exportable allocations ({why}); "
            f"or set {POOL}"
        )

    @contextmanager
    def _around(self, memory: Exportable) -> Iterator[None]:
        """Enter `memory`'s context. Never raises, since vLLM enters and leaves it."""
        undo = ExitStack()
        with self._noting_failure():
            undo.enter_context(memory.context())
        try:
            yield
        finally:
            with self._noting_failure():
                undo.close()

    @contextmanager
    def _noting_failure(self) -> Iterator[None]:
        """Turn an error into a problem for `region` to raise: vLLM uses its own memory."""
        try:
            yield
        except VCacheError as error:
            self._problems.append(str(error))
        except Exception as error:
            log.exception(
                "vcache: the KV cache lies in memory that other processes cannot map, so it is not "
                "shared in place"
            )
            self._problems.append(f"{type(error).__name__}: {error}")


def _memory(device_type: str) -> Exportable:
    if device_type == "cpu":
        return HostExportable()
    if device_type == "cuda" and torch.cuda.is_available():
        return _gpu(torch.cuda.current_device())
    raise SegmentError(
        f"a KV cache on {device_type!r} cannot be mapped by other processes, only one on a CPU "
        "or a CUDA GPU"
    )


@functools.cache
def _gpu(ordinal: int) -> CudaExportable:
    """Make the exporter's memory for one GPU. Never freed: torch may free tensors in it until the
    process ends."""
    return CudaExportable(ordinal)
