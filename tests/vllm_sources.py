"""What a release of vLLM must look like for its KV cache to be shared in place, where no CPU runs
it: read in its sources, of which nothing is imported.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

_Node = TypeVar("_Node", bound=ast.AST)
_WORKER, _CPU_WORKER = "v1/worker/gpu_worker.py", "v1/worker/cpu_worker.py"
_ORDER = ("ensure_kv_transfer_initialized", "get_mem_pool_context", "initialize_kv_cache")
_BASE = "distributed/kv_transfer/kv_connector/v1/base.py"
_RUNNERS = {
    "v1/worker/gpu_model_runner.py": "initialize_kv_cache",
    "v1/worker/gpu/kv_connector.py": "__init__",
}
"""The two model runners, and who calls `register_kv_caches` there."""
_ALLOCATES = {
    "v1/worker/gpu_model_runner.py": "initialize_kv_cache_tensors",
    "v1/worker/gpu/attn_utils.py": "init_kv_cache",
}
_ALLOCATE = "v1/worker/utils.py", "allocate_kv_cache"
"""The function that makes the KV cache, and who calls it in each model runner."""
_BACKEND = "device_allocator/sleep_mode_backend.py"
_ENGINE, _MANAGER = "v1/engine/core.py", "v1/core/kv_cache_manager.py"
_WEIGHTS = "set_weight_version", "collective_rpc"
"""The calls of the engine by which weights change and get a version."""
FILES = (
    *(_WORKER, _CPU_WORKER, _BASE, *_RUNNERS, *_ALLOCATES, _ALLOCATE[0]),
    *(_BACKEND, _ENGINE, _MANAGER),
)
"""All that are read."""


def differences(package: Path) -> list[str]:
    """Where the sources in the folder `package` are not as they should be."""
    return list(_differences(package))


def _differences(package: Path) -> Iterator[str]:
    start = _functions(package / _WORKER).get("initialize_from_config")
    if start is None:
        yield f"{_WORKER} has no initialize_from_config"
        return
    order = [name for name in _calls(start) if name in _ORDER]
    if order != list(_ORDER):
        yield f"{_WORKER}: initialize_from_config calls {order}, not {list(_ORDER)}"
    if "initialize_from_config" in _functions(package / _CPU_WORKER):
        yield f"{_CPU_WORKER} makes its KV cache in another way than GPUs"
    if "get_mem_pool_context" not in _functions(package / _BASE):
        yield f"{_BASE} has no get_mem_pool_context"
    for path, name in _RUNNERS.items():
        if "register_kv_caches" not in _calls(_functions(package / path)[name]):
            yield f"{path}: {name} does not call register_kv_caches"
    for name in _WEIGHTS:
        if name not in _functions(package / _ENGINE):
            yield f"{_ENGINE} has no {name}"
    if "block_pool.evict_blocks(" not in ast.unparse(
        _functions(package / _MANAGER)["evict_blocks"]
    ):
        yield f"{_MANAGER}: nobody calls the pool's evict_blocks after a load that failed"
    yield from _allocation(package)
    if "unregister_kv_caches" in _functions(package / _BASE):
        yield from _sleeping(package)


def _allocation(package: Path) -> Iterator[str]:
    path, name = _ALLOCATE
    makes = _functions(package / path)[name]
    zeros = [
        ast.unparse(call)
        for call in _nodes(makes, ast.Call)
        if ast.unparse(call.func) == "torch.zeros"
    ]
    if not zeros or not all("dtype=torch.int8" in call and "device=" in call for call in zeros):
        yield f"{path}: the KV cache is made by {zeros}"
    for where, caller in _ALLOCATES.items():
        within = [
            node
            for node in _nodes(_functions(package / where)[caller], ast.With)
            if "allocation_context" in ast.unparse(node.items[0])
        ]
        if not any(name in ast.unparse(node) for node in within):
            yield f"{where}: {caller} does not call {name} in the context it was given"


def _sleeping(package: Path) -> Iterator[str]:
    """In which order a worker frees memory and tells the connector."""
    worker = _functions(package / _WORKER)
    orders = {
        "sleep": ["synchronize", "unregister_kv_caches", "suspend"],
        "wake_up": ["resume", "restore_kv_caches"],
        "discard": ["unregister_kv_caches", "discard"],
    }
    for name, expected in orders.items():
        order = [called for called in dict.fromkeys(_calls(worker[name])) if called in expected]
        if order != expected:
            yield f"{_WORKER}: {name} calls {order}, not {expected}"
    if "'runtime'" not in ast.unparse(_functions(package / _BACKEND)["suspend"]):
        yield f"{_BACKEND}: sleep loses what was allocated as the KV cache was registered"
    start = ast.unparse(_functions(package / _WORKER)["initialize_from_config"])
    if "_maybe_get_memory_pool_context(tag='runtime')" not in start:
        yield f"{_WORKER}: what the connector allocates is not of the tag runtime"


@functools.cache
def _functions(path: Path) -> dict[str, ast.FunctionDef]:
    """By name; of several of one name the last."""
    return {
        node.name: node
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef)
    }


def _nodes(function: ast.FunctionDef, kind: type[_Node]) -> Iterator[_Node]:
    return (node for node in ast.walk(function) if isinstance(node, kind))


def _calls(function: ast.FunctionDef) -> list[str]:
    """Names of the functions and methods that it calls, in order of line."""
    calls = sorted(_nodes(function, ast.Call), key=lambda call: call.lineno)
    return [ast.unparse(call.func).rpartition(".")[2] for call in calls]
