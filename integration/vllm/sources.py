"""What vLLM must look like where only a GPU, or a fault, would show it: read in its sources, of
which nothing is imported.

`shapes` looks at versions that vcache was not tested with, and a test at the others."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

_WORKER, _CPU_WORKER = "v1/worker/gpu_worker.py", "v1/worker/cpu_worker.py"
_RUNNER = "v1/worker/gpu_model_runner.py"
_RUNNER_V2, _SCHEDULER = "v1/worker/gpu/model_runner.py", "v1/core/sched/scheduler.py"
_CONNECTOR = "v1/worker/gpu/kv_connector.py"
_MIXIN = "v1/worker/kv_connector_model_runner_mixin.py"
_BASE = "distributed/kv_transfer/kv_connector/v1/base.py"
_ALLOCATES = {_RUNNER: "initialize_kv_cache_tensors"}
_ALLOCATES |= {"v1/worker/gpu/attn_utils.py": "init_kv_cache"}
_ALLOCATE = "v1/worker/utils.py", "allocate_kv_cache"
"""The function that makes the KV cache, and who calls it in each of the two model runners."""
_BACKEND = "device_allocator/sleep_mode_backend.py"
_ENGINE, _MANAGER = "v1/engine/core.py", "v1/core/kv_cache_manager.py"
_REPORTED = "get_transfer_results get_block_ids_with_load_errors build_connector_worker_meta"
ORDERS = {
    (_WORKER, "initialize_from_config"): (
        "ensure_kv_transfer_initialized get_mem_pool_context initialize_kv_cache"
    ),
    # Nothing is published before the step that writes it is launched.
    (_RUNNER, "execute_model"): "maybe_get_kv_connector_output _model_forward",
    (_RUNNER_V2, "execute_model"): "pre_forward model",
    (_RUNNER_V2, "sample_tokens"): "post_forward",
    (_CONNECTOR, "post_forward"): _REPORTED,
    (_MIXIN, "_get_kv_connector_output"): f"bind_connector_metadata wait_for_save {_REPORTED}",
    # A block is void before a step is described in which somebody writes to it.
    (_SCHEDULER, "schedule"): "get_num_new_matched_tokens _build_kv_connector_meta",
    (_SCHEDULER, "update_from_output"): (
        "_handle_failed_recving _handle_invalid_blocks _update_from_kv_xfer_finished"
    ),
    (_SCHEDULER, "reset_prefix_cache"): "reset_prefix_cache reset_connector_cache",
    (_SCHEDULER, "_free_request"): "_connector_finished _free_blocks",
}
"""By function: calls, in the order in which each comes first."""
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
    "sleep": "synchronize unregister_kv_caches suspend",
    "wake_up": "resume restore_kv_caches",
    "discard": "unregister_kv_caches discard",
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
    *(_BACKEND, _ENGINE, _MANAGER, _RUNNER_V2, _SCHEDULER, _MIXIN),
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
    asleep = {(_WORKER, name): order for name, order in _SLEEP.items()} if sleeps else {}
    for (path, name), order in (ORDERS | asleep).items():
        calls = dict.fromkeys(_calls(found[path].get(name)))
        if (seen := [call for call in calls if call in order.split()]) != order.split():
            yield f"{path}: {name} calls {seen}, not {order.split()}"
    if "initialize_from_config" in found[_CPU_WORKER]:
        yield f"{_CPU_WORKER} makes its KV cache in another way than GPUs"
    path, name = _ALLOCATE
    makes = [node for node in ast.walk(found[path][name]) if isinstance(node, ast.Call)]
    zeros = [ast.unparse(one) for one in makes if ast.unparse(one.func) == "torch.zeros"]
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


def _functions(path: Path) -> dict[str, ast.FunctionDef]:
    """By name; of several of one name the last."""
    nodes = ast.walk(ast.parse(path.read_text()))
    return {node.name: node for node in nodes if isinstance(node, ast.FunctionDef)}


def _calls(function: ast.FunctionDef | None) -> list[str]:
    """Names of the functions and methods that it calls, in order of line."""
    calls = [node for node in ast.walk(function or ast.Pass()) if isinstance(node, ast.Call)]
    calls.sort(key=lambda call: (call.lineno, call.col_offset))
    return [ast.unparse(call.func).rpartition(".")[2] for call in calls]
