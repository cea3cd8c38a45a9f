"""Makes vLLM allocate its KV cache in memory that other instances can map, and decides whether an
instance shares in place.

vLLM asks the connector for a context around exactly that allocation. This relies on the sources of
the supported releases (`tests/outside/releases.py`)."""

from __future__ import annotations

import functools
import logging
import platform
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch

from vcache_backend import config
from vcache_backend.config import Config
from vcache_backend.errors import LayoutError, SegmentError, VCacheError
from vcache_backend.resident.generations import MACHINE
from vcache_backend.vram_pool.exports.cuda_memory import CudaExportable
from vcache_backend.vram_pool.exports.host_memory import HostExportable
from vcache_backend.vram_pool.exports.memory import Region

from ..model.groups import several
from ..model.spec import ModelSpec

log = logging.getLogger("vllm.vcache")

Exportable = CudaExportable | HostExportable
_POOL = "connector.share: pool"
_SEVERAL = (
    "a model with several block tables, or with one of a sliding window, is shared "
    "through a pool only"
)


class Exporter:
    """The memory of one worker's KV cache. All methods run in the worker's main thread, where vLLM
    makes its KV cache.

    The region and its descriptor belong to vLLM's tensors and live as long as these: callers do not
    close them."""

    def __init__(self, device_type: str) -> None:
        """On the worker's device. device_type: vLLM's, `cuda` or `cpu`. Never raises: without
        exportable memory `region` says why."""
        self._memory: Exportable | None = None
        self._problems: list[str] = []
        with self._noting_failure():
            self._memory = _memory(device_type)

    def context(self) -> AbstractContextManager[None] | None:
        """Return the context in which vLLM makes its KV cache, for `get_mem_pool_context`. None
        without exportable memory.
        """
        return self._around(self._memory) if self._memory is not None else None

    def region(self, kv_caches: Mapping[str, torch.Tensor]) -> Region:
        """Return the exportable allocation that holds `kv_caches`. vLLM makes one for all layers.

        LayoutError if they lie elsewhere, SegmentError without exportable memory."""
        memory = self._memory
        if memory is None or self._problems:
            raise SegmentError(
                f"vLLM's KV cache cannot be shared in place: {'; '.join(self._problems)}; or "
                f"set {_POOL}"
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
            f"or set {_POOL}"
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
        """Turn an error into a problem: vLLM uses its own memory, and `region` says why."""
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


def refusal(vllm_config: Any, kv_cache_config: Any, model: ModelSpec) -> str | None:
    """Say why this instance's KV cache cannot be shared in place, in one line with what to change;
    None if it can.

    All of its processes get the same answer. Callers ask `compat.refusal` first."""
    if several(kv_cache_config):
        return f"{_SEVERAL}: set {_POOL}"
    reason = next(_refusals(vllm_config, model), None)
    return f"{reason}; or set {_POOL}" if reason else None


def decide(settings: Config, vllm_config: Any, kv_cache_config: Any, model: ModelSpec) -> Config:
    """Resolve `connector.share: auto` in `settings`: to `in_place` if possible and better, else to
    `pool`.

    All processes of an instance get the same answer."""
    if settings.connector.share != "auto":
        return settings
    why = _SEVERAL if several(kv_cache_config) else next(_refusals(vllm_config, model), None)
    if why:
        log.info("vcache: KV goes through a pool (connector.share: auto): %s", why)
    return config.sharing(settings, "pool" if why else "in_place")


def _refusals(vllm_config: Any, model: ModelSpec) -> Iterator[str]:
    """List the reasons against sharing a KV cache with one block table in place. Each names another
    setting to change than `connector.share`, if any helps.
    """
    if platform.machine() != MACHINE:
        yield (
            "it relies on the order in which x86-64 makes writes visible, and this machine "
            f"is {platform.machine()}"
        )
    if not vllm_config.cache_config.enable_prefix_caching:
        yield (
            "without prefix caching vLLM's KV cache keeps nothing to share: take out "
            "--no-enable-prefix-caching"
        )
    if model.sleep_mode or getattr(vllm_config.model_config, "enable_cumem_allocator", False):
        # Our allocator would replace sleep mode's for the KV cache.
        yield (
            "sleep mode frees nothing of a KV cache that others can map: start vLLM without "
            "--enable-sleep-mode"
        )
    if model.device_type == "cuda" and config.expandable_segments():
        why = (
            "expandable_segments does not work with the allocator of a shared KV cache "
            "(pytorch issue 147851)"
        )
        yield f"{why}: take it out of PYTORCH_ALLOC_CONF and PYTORCH_CUDA_ALLOC_CONF"


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
    """Make the exporter's memory for one GPU. It is never freed: torch may free tensors in it until
    the process ends.
    """
    return CudaExportable(ordinal)
