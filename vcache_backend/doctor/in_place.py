"""Checks whether the vLLM that is installed here can share its KV cache in place, without starting
it.
"""

from __future__ import annotations

import importlib.util
import platform
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from vcache_backend import config as settings
from vcache_backend.config import Config
from vcache_backend.doctor import gpus, packages
from vcache_backend.doctor.finding import Finding
from vcache_backend.errors import SegmentError
from vcache_backend.metadata_server.messages import INSTANCE_BYTES
from vcache_backend.vram_pool import devices

_POOL, _BASE = "v1/core/block_pool.py", "distributed/kv_transfer/kv_connector/v1/base.py"
_HOOKS = {
    _POOL: ("get_new_blocks", "evict_blocks", "reset_prefix_cache"),
    _BASE: ("bind_gpu_block_pool", "register_kv_caches"),
}
"""Functions of vLLM that our connector wraps or implements, by file. A patched vLLM may lack
them.
"""
_WAY_OUT = "set connector.share: pool"


def check_in_place(config: Config) -> Iterator[Finding]:
    """One finding: that it can, or the first reason why not. It fails only if this configuration
    caches nothing then.
    """
    share = config.connector.share
    name, version = packages.installed(packages.VLLM.name, *packages.VLLM.builds)
    if not version:
        yield Finding("in place", "ok", "vLLM is not installed, so there is no KV cache to share")
        return
    for reason, advice, pools in islice(_reasons(version), 1):
        if share == "in_place" or (share == "auto" and not pools):
            yield Finding(
                "in place",
                "fail",
                f"{name} {version} caches nothing: {reason}",
                f"{advice}, or {_WAY_OUT}",
            )
        else:
            yield Finding(
                "in place", "ok", f"not possible here, so KV goes through a pool: {reason}", advice
            )
        return
    detail = (
        f"{name} {version} can share its KV cache in place, with prefix caching on and "
        "sleep mode off"
    )
    if share == "pool":
        detail += "; these settings ask for a pool"
    yield Finding(
        "in place", "ok", detail, "connector.share: in_place does it" if share == "pool" else ""
    )


def _reasons(version: str) -> Iterator[tuple[str, str, bool]]:
    """For each obstacle: what it is, what to change, and whether `connector.share: auto` then takes
    a pool.
    """
    known = packages.VLLM
    if not known.low <= packages.numbers(version) < known.high:
        yield (
            f"vcache does not know how vLLM {version} makes its KV cache",
            f"install vllm{known.wanted}",
            True,
        )
    for missing in _missing_hooks():
        yield f"this vLLM has no {missing}", f"install an unchanged vllm{known.wanted}", False
    # Imports numpy, which vLLM brings.
    from vcache_backend.resident.generations import MACHINE, Generations

    try:
        Generations(bytes(INSTANCE_BYTES), 1).close()
    except SegmentError as error:
        yield f"{error}", "run it on x86-64 with Linux 5.4 or later", platform.machine() != MACHINE
    if gpus.has_nvidia():
        yield from _gpu_reasons()


def _missing_hooks() -> Iterator[str]:
    found = importlib.util.find_spec("vllm")
    for folder in (found.submodule_search_locations or ()) if found is not None else ():
        for file, names in _HOOKS.items():
            try:
                source = (Path(folder) / file).read_text("utf-8")
            except OSError:
                source = ""
            yield from (f"{name} in {file}" for name in names if f"def {name}(" not in source)


def _gpu_reasons() -> Iterator[tuple[str, str, bool]]:
    try:
        here = devices.gpus()
    except SegmentError as error:
        yield f"the GPUs cannot be used: {error}", "see nvidia-smi", False
        return
    for gpu in here:
        if not gpu.shares_memory:
            yield (
                f"gpu {gpu.ordinal} has no virtual memory management with POSIX fds",
                "use another GPU",
                False,
            )
        if "none" in gpu.links.values():
            yield (
                f"gpu {gpu.ordinal} does not reach the memory of every other GPU",
                "see `nvidia-smi topo -p2p r`",
                False,
            )
    if settings.expandable_segments():
        yield (
            (
                "expandable_segments does not work with the allocator of a shared KV cache "
                "(pytorch issue 147851)"
            ),
            "take it out of PYTORCH_ALLOC_CONF and PYTORCH_CUDA_ALLOC_CONF",
            True,
        )
