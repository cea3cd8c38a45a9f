"""Inside the engine core, between vLLM's scheduler and its KV connector: what calls cost.

A request asks for it with `extra_args`: `{"timed": FILE}`. Every call of the connector's scheduler
side from the request's arrival to its end is timed: those that are about this request, and those
made once a step, whomever they are for. A line of JSON is added to FILE when the request ends:
seconds by method, and the steps that took."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

OF_A_REQUEST = (
    "on_new_request",
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "request_finished",
    "request_finished_all_groups",
)
"""Methods whose first argument is the request."""
OF_A_STEP = (
    "build_connector_meta",
    "update_connector_output",
    "get_kv_connector_stats",
    "take_events",
)
OF_A_WORKER = (
    "handle_preemptions",
    "bind_connector_metadata",
    "start_load_kv",
    "wait_for_save",
    "get_transfer_results",
    "get_finished",
    "get_block_ids_with_load_errors",
    "get_kv_connector_stats",
    "get_kv_connector_kv_cache_events",
    "build_connector_worker_meta",
    "clear_connector_metadata",
)
"""Of the worker's connector, if it is in this process; named `worker.` in what is written."""
LAST = ("request_finished", "request_finished_all_groups")


class Probe:
    """Times a connector's methods; all calls come from the scheduler's one thread. connector: None
    where there is none.

    pool: vLLM's `BlockPool`. Where the connector watches it, what that adds to `get_new_blocks`
    counts as a method called once a step."""

    def __init__(self, connector: Any, pool: Any = None) -> None:
        self._asked: dict[str, tuple[Path, dict[str, float]]] = {}
        # Of the two only one is called by vLLM; the other may be called by it.
        inner = "request_finished" if hasattr(connector, "request_finished_all_groups") else ""
        for name in (*OF_A_REQUEST, *OF_A_STEP):
            if hasattr(connector, name) and name != inner:
                _timed(connector, name, partial(self._called, name))
        worker = get_kv_transfer_group() if has_kv_transfer_group() else None
        for name in OF_A_WORKER:
            if hasattr(worker, name):
                _timed(worker, name, partial(self._called, f"worker.{name}"))
        self._inside = self._inside_cpu = 0.0
        watcher = getattr(getattr(pool, "get_new_blocks", None), "__self__", pool)
        if watcher is not pool:
            _timed(watcher, "_get", self._got_inside)
            _timed(pool, "get_new_blocks", self._got)

    def take(self, request: str, asked: dict[str, Any]) -> None:
        """A request has come, with these `extra_args`."""
        if "timed" in asked:
            self._asked[request] = (Path(asked["timed"]), defaultdict(float))

    def _called(self, name: str, seconds: float, cpu: float, *given: Any) -> None:
        """Add a method's seconds to whoever asked. Take note of a request's end."""
        if name in OF_A_STEP or name.startswith("worker."):
            for _, spent in self._asked.values():
                spent[name] += seconds
                spent["cpu"] += 0.0 if name.startswith("worker.") else cpu
                spent["steps"] += name == "build_connector_meta"
        elif (request := given[0].request_id) in self._asked:
            path, spent = self._asked[request]
            spent[name] += seconds
            spent["cpu"] += cpu
            if name in LAST:
                del self._asked[request]
                with path.open("a") as file:
                    file.write(json.dumps(spent) + "\n")

    def _got_inside(self, seconds: float, cpu: float, *given: Any) -> None:
        self._inside, self._inside_cpu = self._inside + seconds, self._inside_cpu + cpu

    def _got(self, seconds: float, cpu: float, *given: Any) -> None:
        for _, spent in self._asked.values():
            spent["get_new_blocks"] += seconds - self._inside
            spent["cpu"] += cpu - self._inside_cpu
        self._inside = self._inside_cpu = 0.0


def _timed(owner: Any, name: str, note: Callable[..., None]) -> None:
    """Tell `note` how many seconds each call of this method took, of them on the CPU, and its
    arguments."""
    method = getattr(owner, name)

    def called(*args: Any, **kwargs: Any) -> Any:
        started, cpu = time.perf_counter(), time.thread_time()
        result = method(*args, **kwargs)
        note(time.perf_counter() - started, time.thread_time() - cpu, *args)
        return result

    setattr(owner, name, called)


class _Probed:
    """Mixed into a scheduler."""

    connector: Any
    kv_cache_manager: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._probe = Probe(self.connector, self.kv_cache_manager.block_pool)

    def add_request(self, request: Any) -> None:
        asked = getattr(request.sampling_params, "extra_args", None) or {}
        self._probe.take(request.request_id, asked)
        super().add_request(request)  # type: ignore[misc]


def probed(vllm_config: Any, **given: Any) -> Any:
    """Called as vLLM calls the class of its scheduler: that which it would have taken, probed."""
    plain = AsyncScheduler if vllm_config.scheduler_config.async_scheduling else Scheduler
    return type("Probed", (_Probed, plain), {})(vllm_config=vllm_config, **given)
