"""What a release of vLLM must look like for its KV cache to be shared in place, read in its
sources. Nothing of it is imported.
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
_POOL, _SCHEDULER = "v1/core/block_pool.py", "v1/core/sched/scheduler.py"
_QUEUE = "v1/core/kv_cache_utils.py"
_MANAGERS = (
    "v1/core/single_type_kv_cache_manager.py",
    "v1/core/kv_cache_manager.py",
    "v1/core/kv_cache_coordinator.py",
)
_BINDS = {"bind_gpu_block_pool", "bind_kv_cache_manager"}
_BACKEND = "device_allocator/sleep_mode_backend.py"
_ENGINE = "v1/engine/core.py"
_WEIGHTS = "set_weight_version", "collective_rpc"
"""The calls of the engine by which weights change and get a version."""
FILES = (
    *(
        _WORKER,
        _CPU_WORKER,
        _BASE,
        *_RUNNERS,
        *_ALLOCATES,
        _ALLOCATE[0],
        _POOL,
        _SCHEDULER,
        *_MANAGERS,
        _QUEUE,
    ),
    _BACKEND,
    _ENGINE,
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
    yield from _allocation(package)
    yield from _blocks(package)
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


def _blocks(package: Path) -> Iterator[str]:
    """Whether the connector sees every block that gets another owner or another meaning."""
    pool = _functions(package / _POOL)
    yield from (
        f"{_POOL} has no {name}"
        for name in (
            "get_new_blocks",
            "free_blocks",
            "evict_blocks",
            "reset_prefix_cache",
            "get_num_free_blocks",
        )
        if name not in pool
    )
    if "= self.fake_free_list_head.next_free_block" not in ast.unparse(
        _functions(package / _QUEUE)["popleft_n"]
    ):
        yield f"{_QUEUE}: blocks are not handed out from where victims are looked for"
    yield from (
        f"{_QUEUE} has no {name}"
        for name in ("remove", "append")
        if name not in _functions(package / _QUEUE)
    )
    # What the pool and a manager keep for themselves, from the start on, is nobody's cache.
    given = {(_POOL, "get_new_blocks"), (_POOL, "__init__"), (_MANAGERS[0], "__init__")}
    for path in (_POOL, *_MANAGERS):
        for function in (
            node
            for node in ast.walk(ast.parse((package / path).read_text()))
            if isinstance(node, ast.FunctionDef)
        ):
            takes = [
                call
                for call in _nodes(function, ast.Call)
                if "free_block_queue.popleft" in ast.unparse(call.func)
            ]
            if takes and (path, function.name) not in given:
                yield f"{path}: {function.name} hands out blocks beside get_new_blocks"
    binds = _BINDS & set(_calls(_functions(package / _SCHEDULER)["__init__"]))
    for name in binds - {"bind_gpu_block_pool"}:
        if "bind_gpu_block_pool" not in _calls(_functions(package / _BASE)[name]):
            yield f"{_BASE}: {name} does not call bind_gpu_block_pool"
    if not binds:
        yield f"{_SCHEDULER}: the connector does not get the block pool"
    asked = {
        name
        for path in _MANAGERS
        for function in _functions(package / path).values()
        for name in _calls(function)
    }
    yield from (
        f"{_MANAGERS}: nobody calls the pool's {name}"
        for name in ("evict_blocks", "reset_prefix_cache")
        if name not in asked
    )


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
