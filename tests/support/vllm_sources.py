"""What a release of vLLM must look like for its KV cache to be shared in place, where no CPU runs
it: read in its sources, of which nothing is imported.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

_WORKER, _CPU_WORKER = "v1/worker/gpu_worker.py", "v1/worker/cpu_worker.py"
_RUNNER = "v1/worker/gpu_model_runner.py"
_CONNECTOR = "v1/worker/gpu/kv_connector.py"
_BASE = "distributed/kv_transfer/kv_connector/v1/base.py"
_ALLOCATES = {_RUNNER: "initialize_kv_cache_tensors"}
_ALLOCATES |= {"v1/worker/gpu/attn_utils.py": "init_kv_cache"}
_ALLOCATE = "v1/worker/utils.py", "allocate_kv_cache"
"""The function that makes the KV cache, and who calls it in each of the two model runners."""
_BACKEND = "device_allocator/sleep_mode_backend.py"
_ENGINE, _MANAGER = "v1/engine/core.py", "v1/core/kv_cache_manager.py"
_ORDER = ("ensure_kv_transfer_initialized", "get_mem_pool_context", "initialize_kv_cache")
_HAVE = (
    (_WORKER, "initialize_from_config", ""),
    (_BASE, "get_mem_pool_context", ""),
    (_RUNNER, "initialize_kv_cache", ".register_kv_caches("),
    (_CONNECTOR, "__init__", ".register_kv_caches("),
    # The calls of the engine by which weights change and get a version.
    (_ENGINE, "set_weight_version", ""),
    (_ENGINE, "collective_rpc", ""),
    # After a load that failed.
    (_MANAGER, "evict_blocks", "block_pool.evict_blocks("),
)
"""Functions, and what they say."""
_SLEEP = {
    "sleep": ["synchronize", "unregister_kv_caches", "suspend"],
    "wake_up": ["resume", "restore_kv_caches"],
    "discard": ["unregister_kv_caches", "discard"],
}
"""In which order a worker that sleeps frees memory and tells the connector."""
_HAVE_ASLEEP = (
    *((_WORKER, name, "") for name in _SLEEP),
    # Otherwise sleep loses what was allocated as the KV cache was registered.
    (_BACKEND, "suspend", "'runtime'"),
    (_WORKER, "initialize_from_config", "_maybe_get_memory_pool_context(tag='runtime')"),
)
FILES = (
    *(_WORKER, _CPU_WORKER, _BASE, _CONNECTOR, *_ALLOCATES, _ALLOCATE[0]),
    *(_BACKEND, _ENGINE, _MANAGER),
)
"""All that are read."""


def differences(package: Path) -> list[str]:
    """Where the sources in the folder `package` are not as they should be."""
    found = {path: _functions(package / path) for path in FILES}
    sleeps = "unregister_kv_caches" in found[_BASE]
    lacking = [
        f"{path}: {name} is not there, or without {said!r}"
        for path, name, said in (*_HAVE, *(_HAVE_ASLEEP if sleeps else ()))
        if name not in found[path] or said not in ast.unparse(found[path][name])
    ]
    return lacking or list(_differences(found, sleeps))


def _differences(found: dict[str, dict[str, ast.FunctionDef]], sleeps: bool) -> Iterator[str]:
    worker = found[_WORKER]
    order = [name for name in _calls(worker["initialize_from_config"]) if name in _ORDER]
    if order != list(_ORDER):
        yield f"{_WORKER}: initialize_from_config calls {order}, not {list(_ORDER)}"
    if "initialize_from_config" in found[_CPU_WORKER]:
        yield f"{_CPU_WORKER} makes its KV cache in another way than GPUs"
    path, name = _ALLOCATE
    calls = [node for node in ast.walk(found[path][name]) if isinstance(node, ast.Call)]
    zeros = [ast.unparse(one) for one in calls if ast.unparse(one.func) == "torch.zeros"]
    if not zeros or not all("dtype=torch.int8" in call and "device=" in call for call in zeros):
        yield f"{path}: the KV cache is made by {zeros}"
    for where, caller in _ALLOCATES.items():
        within = [
            ast.unparse(node)
            for node in ast.walk(found[where][caller])
            if isinstance(node, ast.With) and "allocation_context" in ast.unparse(node.items[0])
        ]
        if not any(name in text for text in within):
            yield f"{where}: {caller} does not call {name} in the context it was given"
    for name, expected in _SLEEP.items() if sleeps else ():
        order = [called for called in dict.fromkeys(_calls(worker[name])) if called in expected]
        if order != expected:
            yield f"{_WORKER}: {name} calls {order}, not {expected}"


@functools.cache
def _functions(path: Path) -> dict[str, ast.FunctionDef]:
    """By name; of several of one name the last."""
    nodes = ast.walk(ast.parse(path.read_text()))
    return {node.name: node for node in nodes if isinstance(node, ast.FunctionDef)}


def _calls(function: ast.FunctionDef) -> list[str]:
    """Names of the functions and methods that it calls, in order of line."""
    calls = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
    calls.sort(key=lambda call: call.lineno)
    return [ast.unparse(call.func).rpartition(".")[2] for call in calls]
