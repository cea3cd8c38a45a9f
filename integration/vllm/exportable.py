"""Makes vLLM allocate its KV cache in memory that other instances can map; and decides whether an
instance shares in place.

It relies on the order of a worker's start: the connector, then the KV cache, then
`register_kv_caches`, in one thread. The sources of vLLM 0.26 to 0.33 were read for it
(`tests/outside/releases.py`). From 0.31 on vLLM asks the connector for a context around exactly
that allocation. All of these releases have run so on a CPU except 0.33, which has no CPU build."""

from __future__ import annotations

import functools
import logging
import platform
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch

from vcache_backend import config
from vcache_backend.config import Config
from vcache_backend.errors import LayoutError, SegmentError, VCacheError
from vcache_backend.resident.generations import MACHINE
from vcache_backend.vram_pool.cuda_exportable import CudaExportable
from vcache_backend.vram_pool.exportable import Exportable, Region
from vcache_backend.vram_pool.host_exportable import HostExportable

from .groups import is_full, several
from .model_spec import ModelSpec

log = logging.getLogger("vllm.vcache")


KNOWN = {(0, minor): minor >= 31 for minor in range(26, 34)}
"""vLLM's releases, and whether each asks for a context (`get_mem_pool_context`). If not, all memory
that the worker allocates between its connector's constructor and `register_kv_caches` is
exportable."""
_POOL = "connector.share: pool"


class Exporter:
    """The memory of one worker's KV cache. Made by `begin`; all methods run in the worker's main
    thread, where vLLM makes its KV cache.

    Regions and their descriptors belong to vLLM's tensors and live as long as these: the caller
    does not close them."""

    def __init__(self, memory: Exportable | None, asks: bool, problem: str = "") -> None:
        """asks: whether vLLM will ask for the context. problem: why there is no memory."""
        self._memory, self._asks, self._undo = memory, asks, ExitStack()
        self._problems = [problem] if problem else []
        if memory is not None and not asks:
            self._undo.enter_context(_exportable(memory, self._problems))

    def context(self) -> AbstractContextManager[None] | None:
        """For `get_mem_pool_context`: the context in which vLLM makes its KV cache. None if it does
        not ask, or there is no such memory.
        """
        return (
            _exportable(self._memory, self._problems)
            if self._memory is not None and self._asks
            else None
        )

    def regions(self, kv_caches: Mapping[str, torch.Tensor]) -> list[Region]:
        """The exportable allocations that hold `kv_caches`, as vLLM registers them: each once, by
        address. Later ones are ordinary again.

        LayoutError if a tensor lies elsewhere, SegmentError if there is no exportable memory.
        """
        self.close()
        if self._memory is None or self._problems:
            raise SegmentError(
                f"vLLM's KV cache cannot be shared in place: {'; '.join(self._problems)}; or set {_POOL}"
            )
        found = sorted(self._memory.allocations(), key=lambda one: one.address)
        used = {
            self._holder(self._memory, found, name, tensor) for name, tensor in kv_caches.items()
        }
        return [found[at] for at in sorted(used)]

    def close(self) -> None:
        """Make later allocations ordinary again. Idempotent. Also called when vLLM fails to
        start.
        """
        self._undo.close()

    @staticmethod
    def _holder(
        memory: Exportable, found: Sequence[Region], name: str, tensor: torch.Tensor
    ) -> int:
        storage = tensor.untyped_storage()
        first, end = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
        for at, one in enumerate(found):
            if one.address <= first and end <= one.address + one.nbytes:
                return at
        why = memory.problem or "another connector or allocator has made it"
        raise LayoutError(
            f"vLLM's KV cache cannot be shared in place: {name}, {storage.nbytes():,} B on {tensor.device}, "
            f"lies in none of the {len(found)} exportable allocations ({why}); or set {_POOL}"
        )


@contextmanager
def _exportable(memory: Exportable, problems: list[str]) -> Iterator[None]:
    """`memory`'s context. Never raises, since vLLM enters and leaves it; failures are added to
    `problems`.
    """
    undo = ExitStack()
    with _noting_failure(problems):
        undo.enter_context(memory.context())
    try:
        yield
    finally:
        with _noting_failure(problems):
            undo.close()


@contextmanager
def _noting_failure(problems: list[str]) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # vLLM goes on with its own memory, and `Exporter.regions` says why
        log.exception(
            "vcache: the KV cache lies in memory that other processes cannot map, so it is not shared in place"
        )
        problems.append(f"{type(error).__name__}: {error}")


def begin(device_type: str, vllm_version: str) -> Exporter:
    """The exporter of this process. Called by the constructor of a worker's half, on its device.
    device_type: vLLM's, `cuda` or `cpu`.

    Never raises: if there can be no such memory, `Exporter.regions` says why.
    """
    asks = KNOWN.get(_release(vllm_version))
    if asks is None:
        return Exporter(None, False, _unknown(vllm_version))
    try:
        return Exporter(_memory(device_type), asks)
    except VCacheError as error:
        return Exporter(None, asks, str(error))
    except Exception as error:
        log.exception(
            "vcache: the KV cache lies in memory that other processes cannot map, so it is not shared in place"
        )
        return Exporter(None, asks, f"{type(error).__name__}: {error}")


def refusal(vllm_config: Any, kv_cache_config: Any, model: ModelSpec) -> str | None:
    """Why this instance's KV cache cannot be shared in place, in one line with what to change; None
    if it can.

    All of its processes find the same. Callers ask `compat.refusal` first.
    """
    reason = next(_refusals(vllm_config, kv_cache_config, model), None)
    return f"{reason}; or set {_POOL}" if reason else None


def decide(settings: Config, vllm_config: Any, kv_cache_config: Any, model: ModelSpec) -> Config:
    """`settings` with `connector.share: auto` resolved: `in_place` if that is possible and the
    better choice, else `pool`.

    All processes of an instance find the same.
    """
    if settings.connector.share != "auto":
        return settings
    why = next(_refusals(vllm_config, kv_cache_config, model), None)
    if several(kv_cache_config):
        why = (
            why
            or "the model has several block tables, and a pool keeps blocks behind windows, which a KV cache does not"
        )
    elif model.tp_size * model.pp_size > 1:
        why = (
            why
            or "the instance has several workers, for which sharing in place has to be asked for: it has not been run across GPUs"
        )
    if why:
        log.info("vcache: KV goes through a pool (connector.share: auto): %s", why)
    return config.sharing(settings, "pool" if why else "in_place")


def _refusals(vllm_config: Any, kv_cache_config: Any, model: ModelSpec) -> Iterator[str]:
    """Each reason against sharing in place, with what else than `connector.share` to change, if
    anything.
    """
    import vllm

    groups = kv_cache_config.kv_cache_groups
    kinds = sorted({kind for group in groups for kind in _kinds(group.kv_cache_spec)})
    if _release(vllm.__version__) not in KNOWN:
        yield _unknown(vllm.__version__)
    if platform.machine() != MACHINE:
        yield f"it relies on the order in which x86-64 makes writes visible, and this machine is {platform.machine()}"
    if not vllm_config.cache_config.enable_prefix_caching:
        yield "without prefix caching vLLM's KV cache keeps nothing to share: take out --no-enable-prefix-caching"
    if any("Mamba" in kind for kind in kinds):
        yield f"the KV cache is {', '.join(kinds)}, and Mamba's blocks are rewritten without being allocated anew"
    if not any(is_full(kind) for kind in kinds) and several(kv_cache_config):
        yield "all layers have windows, and vLLM soon uses blocks behind a window again"
    if model.sleep_mode or getattr(vllm_config.model_config, "enable_cumem_allocator", False):
        # Our allocator would replace sleep mode's for the KV cache.
        yield "sleep mode frees nothing of a KV cache that others can map: start vLLM without --enable-sleep-mode"
    if model.device_type == "cuda" and config.expandable_segments():
        why = "expandable_segments does not work with the allocator of a shared KV cache (pytorch issue 147851)"
        yield f"{why}: take it out of PYTORCH_ALLOC_CONF and PYTORCH_CUDA_ALLOC_CONF"


def _kinds(spec: Any) -> Iterator[str]:
    """The names of a group's specification types: its own, and those of its layers where it holds
    one for each.
    """
    yield type(spec).__name__
    for one in getattr(spec, "kv_cache_specs", {}).values():
        yield type(one).__name__


def _release(version: str) -> tuple[int, int]:
    found = re.match(r"(\d+)\.(\d+)(\.|$)", version)
    return (int(found[1]), int(found[2])) if found else (-1, -1)


def _unknown(version: str) -> str:
    known = sorted(KNOWN)
    first, last = (".".join(map(str, known[at])) for at in (0, -1))
    return f"vcache does not know how vLLM {version} makes its KV cache (known: {first} to {last})"


def _memory(device_type: str) -> Exportable:
    if device_type == "cpu":
        return HostExportable()
    if device_type == "cuda" and torch.cuda.is_available():
        return _gpu(torch.cuda.current_device())
    raise SegmentError(
        f"a KV cache on {device_type!r} cannot be mapped by other processes, only one on a CPU or a CUDA GPU"
    )


@functools.cache
def _gpu(ordinal: int) -> CudaExportable:
    """One for each GPU, kept for good: torch may free memory of it until the process ends."""
    return CudaExportable(ordinal)
