"""Whether a vLLM that vcache was not tested with looks as vcache knows it, wherever a difference
would be silent. What raises is caught where it raises, and `vcache prove` meets it.

Looks at what calls us, at what calls the functions that we replace, at how a small block pool
behaves, and at names and the order of calls in vLLM's sources. Takes a second, for the sources."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

OWN = {"awaits", "ends_address", "in_place", "loads_wait", "open_ends", "open_nothing", "put_end"}
OWN |= {"stop", "unreported", "weights_are", "weights_change"}
"""Public attributes of our connector that are not vLLM's."""
MAY_LACK = {"restore_kv_caches", "unregister_kv_caches"}
"""Methods that vLLM's connectors have from 0.33 on: without them `sharing` refuses sleep mode."""
REPLACED = (
    *("get_new_blocks", "cache_full_blocks", "cache_partial_block", "evict_blocks"),
    "reset_prefix_cache",
)
"""The functions of vLLM's block pool that `KVBlocks` replaces."""
REQUEST = (
    "all_token_ids lora_request kv_transfer_params sampling_params trace_headers resumable "
    "skip_reading_prefix_cache shared_prefix_boundary session_id"
)
"""Attributes of vLLM's requests, beside those that `_unlike` reads."""
FIELDS = {
    "KVConnectorOutput": "kv_connector_worker_meta invalid_block_ids finished_recving",
    "SchedulerOutput": "kv_cache_block_copies preempted_req_ids",
}
"""Fields of vLLM's descriptions of a step and of what it did."""
NAMED_BY = {
    "popleft_n": "get_new_blocks",
    "free_block_queue": (
        "__init__ free_blocks get_new_blocks get_num_free_blocks touch unpin_blocks"
    ),
    "_insert_block_hash": "cache_full_blocks cache_partial_block move_block_hashes",
    "reset_hash": "_remove_cached_block_hashes reset_prefix_cache",
    "_remove_cached_block_hashes": (
        "_maybe_evict_cached_block cache_full_blocks cache_partial_block move_block_hashes"
    ),
    "_maybe_evict_cached_block": "evict_blocks get_new_blocks _cache_partial_tail_block",
}
"""By function or attribute of vLLM's block pool, those of `vllm.v1.core` that may name it: blocks
are handed out, and get and lose their hashes, where `KVBlocks` sees it, and nowhere else."""
_REPORTED = "get_transfer_results( get_block_ids_with_load_errors( build_connector_worker_meta("
ORDERS = {
    "v1/worker/gpu_worker.py": {
        "initialize_from_config": (
            "ensure_kv_transfer_initialized( get_mem_pool_context( initialize_kv_cache("
        ),
    },
    # The KV cache is made in the context that the connector gave, in both model runners.
    "v1/worker/utils.py": {"allocate_kv_cache": "torch.zeros( dtype=torch.int8 device="},
    "v1/worker/gpu/attn_utils.py": {"init_kv_cache": "allocation_context: allocate_kv_cache("},
    "v1/worker/gpu_model_runner.py": {
        "initialize_kv_cache_tensors": "allocation_context: allocate_kv_cache(",
        "initialize_kv_cache": "register_kv_caches(",
        # Nothing is published before the step that writes it is launched.
        "execute_model": "maybe_get_kv_connector_output( _model_forward(",
    },
    "v1/worker/gpu/model_runner.py": {
        "execute_model": "pre_forward( model(",
        "sample_tokens": "post_forward(",
    },
    "v1/worker/gpu/kv_connector.py": {
        "__init__": "register_kv_caches(",
        "post_forward": _REPORTED,
    },
    "v1/worker/kv_connector_model_runner_mixin.py": {
        "_get_kv_connector_output": f"bind_connector_metadata( wait_for_save( {_REPORTED}",
    },
    # A block is void before a step is described in which somebody writes to it.
    "v1/core/sched/scheduler.py": {
        "schedule": "get_num_new_matched_tokens( _build_kv_connector_meta(",
        "update_from_output": (
            "_handle_failed_recving( _handle_invalid_blocks( _update_from_kv_xfer_finished("
        ),
        "reset_prefix_cache": "reset_prefix_cache( reset_connector_cache(",
        "_free_request": "_connector_finished( _free_blocks(",
    },
    # After a load that failed.
    "v1/core/kv_cache_manager.py": {"evict_blocks": "block_pool.evict_blocks("},
}
"""By file and function of vLLM: what it says, in the order in which each comes first."""
ASLEEP = {
    "v1/worker/gpu_worker.py": {
        "sleep": "synchronize( unregister_kv_caches( suspend(",
        "wake_up": "resume( restore_kv_caches(",
        "discard": "unregister_kv_caches( discard(",
        # Otherwise sleep loses what is allocated while the KV cache is registered.
        "initialize_from_config": "tag='runtime' initialize_kv_cache(",
    },
    "device_allocator/sleep_mode_backend.py": {"suspend": "'runtime'"},
}
"""The same, of a vLLM that tells connectors of sleep."""
_BASE = "distributed/kv_transfer/kv_connector/v1/base.py"
FILES = {_BASE, *ORDERS, *ASLEEP}
"""All whose sources are read."""


def fault(connector: type[Any]) -> str:
    """In one line, where the installed vLLM has another shape than vcache knows; empty: nowhere.
    connector: our class. Never raises."""
    import vllm
    from vllm.v1.core.block_pool import BlockPool

    try:
        package = Path(str(vllm.__file__)).parent
        sources = elsewhere(package), differences(package)
        for faults in (_called(connector), _replaced(BlockPool), _unlike(), *sources):
            for one in faults:
                return one
    except Exception as error:  # noqa: BLE001 - a vLLM that cannot be looked at is not known
        return f"it cannot be looked at: {type(error).__name__}: {error}"
    return ""


def _called(connector: type[Any]) -> Iterator[str]:
    """What vLLM calls otherwise than our connector takes it, or not at all."""
    for name in sorted(getattr(connector, "__abstractmethods__", ())):
        yield f"connectors need a {name}, which vcache does not have"
    theirs = [one for one in connector.__mro__ if one.__module__.startswith("vllm.")]
    for name, ours in vars(connector).items():
        if name in OWN or (name.startswith("_") and name != "__init__"):
            continue
        found = next((vars(one)[name] for one in theirs if name in vars(one)), None)
        if found is None:
            yield from () if name in MAY_LACK else (f"connectors have no {name}",)
        elif isinstance(found, property) or isinstance(ours, property):
            if type(found) is not type(ours):
                yield f"{name} of connectors is {found}"
        elif not _takes(_signature(ours), _signature(found)):
            yield f"{name} of connectors is {_signature(found)}"


def _signature(function: Any) -> inspect.Signature:
    return inspect.signature(getattr(function, "__func__", function))


def _takes(ours: inspect.Signature, theirs: inspect.Signature) -> bool:
    """Whether the parameters are the same, up to those that ours takes whatever they are, and all
    types of which ours says something."""
    given = ours.parameters
    named = [
        name for name, one in given.items() if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
    ]
    same = named == [*theirs.parameters][: None if len(named) == len(given) else len(named)]
    pairs = [(one.annotation, theirs.parameters.get(name)) for name, one in given.items()]
    types = [(ours, their.annotation) for ours, their in pairs if their is not None]
    types.append((ours.return_annotation, theirs.return_annotation))
    return same and all(_agree(*map(_text, pair)) for pair in types)


def _agree(ours: str, theirs: str) -> bool:
    return "Any" in ours or ours in ("None", "object") or ours in theirs


def _text(annotation: Any) -> str:
    """A type, however it is written."""
    return re.sub(r"[\w.]+\.(\w+)|['\"~ ]", r"\1", inspect.formatannotation(annotation))


def _replaced(pool: type[Any]) -> Iterator[str]:
    from .blocks import KVBlocks

    for name in REPLACED:
        found, ours = getattr(pool, name, None), getattr(KVBlocks, f"_{name}")
        if found is None or not _takes(_signature(ours), _signature(found)):
            yield f"{pool.__name__}.{name} is {found and _signature(found)}"


def elsewhere(package: Path) -> Iterator[str]:
    """Who names what only others may (`NAMED_BY`), in vLLM's sources in the folder `package`: in
    a loaded function a decorator would hide it."""
    for file in sorted((package / "v1/core").rglob("*.py")):
        text = file.read_text()
        if not any(what in text for what in NAMED_BY):
            continue
        for name, used in _used(ast.parse(text)):
            for what in sorted(NAMED_BY.keys() & used):
                if name not in NAMED_BY[what].split():
                    where = f"{file.relative_to(package)}: {name}"
                    yield f"{where} uses {what}, which vcache does not see"


def _used(tree: ast.AST) -> Iterator[tuple[str, set[str]]]:
    """Each function's name, and what it and the functions in it name, as text too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            inside = list(ast.walk(node))
            used = {one.attr for one in inside if isinstance(one, ast.Attribute)}
            used |= {one.id for one in inside if isinstance(one, ast.Name)}
            texts = (one.value for one in inside if isinstance(one, ast.Constant))
            used |= {one for one in texts if isinstance(one, str)}
            yield getattr(node, "name", "a lambda"), used


def _unlike() -> Iterator[str]:
    """How a small block pool of vLLM behaves otherwise than `KVBlocks` takes it to."""
    from vllm.sampling_params import SamplingParams
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from .blocks import KVBlocks

    heard, failures = list[Any](), list[str]()
    blocks = KVBlocks(BlockPool(8, True, 4), lambda reason, _: failures.append(reason))
    pool = blocks.pool
    blocks.on_taken.append(lambda taken: heard.append([one.block_id for one in taken]))
    blocks.on_cached.append(lambda *said: heard.append((*said[1:3], said[3][0].block_id)))
    blocks.before_evicted.append(lambda gone: heard.append({*gone}))
    blocks.before_reset.append(lambda: heard.append("reset"))
    blocks.on_emptied.append(lambda: heard.append("emptied"))
    request = Request("vcache", [1] * 9, SamplingParams(max_tokens=1), None)
    request.block_hashes = [b"a" * 32, b"b" * 32]
    sizes = request.num_tokens, request.num_prompt_tokens, request.num_computed_tokens
    taken = pool.get_new_blocks(3)
    pool.cache_full_blocks(request, taken, 0, 2, 4, 0)
    lacking = [name for name in REQUEST.split() if not hasattr(request, name)]
    for kind in (KVConnectorOutput, SchedulerOutput):
        known = kind.__dataclass_fields__
        lacking += [name for name in FIELDS[kind.__name__].split() if name not in known]
    seen: list[Any] = [lacking, isinstance(taken, list), blocks.cached(request.block_hashes[1])]
    seen += [sizes, blocks.held, blocks.free, blocks.head(2), blocks.vacant(9)]
    pool.free_blocks(reversed(taken))
    seen += [blocks.head(9), blocks.together(5, 7, 3), blocks.vacant(9)]
    blocks.move(6, 7, None)
    seen += [blocks.head(3), [one.block_id for one in pool.get_new_blocks(2)]]
    blocks.evict({2})
    seen += [blocks.cached(request.block_hashes[1]), blocks.cached(request.block_hashes[0])]
    pool.free_blocks([pool.blocks[number] for number in (6, 7)])
    seen += [pool.reset_prefix_cache(), blocks.cached(request.block_hashes[0]), failures]
    due = [[], True, True, (9, 9, 0), {1, 2, 3}, 4, [4, 5], 4]
    due += [[3, 4, 5, 6, 7, 2, 1], True, 5, [6, 7, 3], [6, 7], False, True, True, False, []]
    told = [[1, 2, 3], (0, 0, 1), [6, 7], {2}, "reset", "emptied"]
    if (seen, heard) != (due, told):
        yield f"BlockPool behaves in another way: {seen}, {heard}"


def differences(package: Path) -> Iterator[str]:
    """Where vLLM's sources in the folder `package` do not say what `ORDERS` has. Imports
    nothing of them."""
    found = {path: _functions(package / path) for path in FILES}
    tells_of_sleep = "unregister_kv_caches" in found[_BASE]
    for orders in (ORDERS, ASLEEP) if tells_of_sleep else (ORDERS,):
        for path, functions in orders.items():
            for name, order in functions.items():
                text = found[path].get(name, "")
                seen = [re.search(rf"(?<!\w){re.escape(part)}", text) for part in order.split()]
                places = [one.start() if one is not None else -1 for one in seen]
                if -1 in places or places != sorted(places):
                    yield f"{path}: {name} does not say {order}, in this order"


def _functions(path: Path) -> dict[str, str]:
    """What each function does, as text; of several of one name the last."""
    nodes = ast.walk(ast.parse(path.read_text()))
    return {
        node.name: "\n".join(map(ast.unparse, node.body))
        for node in nodes
        if isinstance(node, ast.FunctionDef)
    }
