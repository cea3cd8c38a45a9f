"""Inside the engine core, between vLLM's scheduler and its KV connector: what calls cost.

A request asks for it with `extra_args`: `{"timed": FILE}`. Every call of the connector's scheduler
side from the request's arrival to its end is timed: those that are about this request, and those
made once a step, whomever they are for. A line of JSON is added to FILE when the request ends:
seconds by method, the steps that took, and as `promise` what its promise to compute cost within
these methods."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

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
LAST = ("request_finished", "request_finished_all_groups")


class Probe:
    """Wraps a connector's methods; all calls come from the scheduler's one thread. connector: None
    where there is none.

    pool: vLLM's `BlockPool`. Where the connector watches it, what that adds to `get_new_blocks`
    counts as a method called once a step."""

    def __init__(self, connector: Any, pool: Any = None) -> None:
        self._timed: dict[str, tuple[Path, dict[str, float]]] = {}
        # Of the two only one is called by vLLM; the other may be called by it.
        inner = "request_finished" if hasattr(connector, "request_finished_all_groups") else ""
        for name in (*OF_A_REQUEST, *OF_A_STEP):
            if hasattr(connector, name) and name != inner:
                setattr(connector, name, self._wrapped(name, getattr(connector, name)))
        promises = getattr(getattr(connector, "_scheduler", None), "_promises", None)
        for name in () if promises is None else ("begun", "ended"):
            setattr(promises, name, self._promise(getattr(promises, name)))
        watcher = getattr(getattr(pool, "get_new_blocks", None), "__self__", pool)
        if watcher is not pool:
            inner_get, inside = watcher._get, [0.0]

            def get(*args: Any) -> Any:
                started = time.perf_counter()
                blocks = inner_get(*args)
                inside[0] += time.perf_counter() - started
                return blocks

            watcher._get = get
            pool.get_new_blocks = self._watched(pool.get_new_blocks, inside)

    def take(self, request: str, asked: dict[str, Any]) -> None:
        """A request has come, with these `extra_args`."""
        if "timed" in asked:
            self._timed[request] = (Path(asked["timed"]), defaultdict(float))

    def _wrapped(self, name: str, method: Any) -> Any:
        """The method, its seconds added to whoever asked; a request's end is taken note of."""

        def called(*args: Any, **kwargs: Any) -> Any:
            if not self._timed:
                return method(*args, **kwargs)
            started = time.perf_counter()
            result = method(*args, **kwargs)
            seconds = time.perf_counter() - started
            if name in OF_A_STEP:
                for _, spent in self._timed.values():
                    spent[name] += seconds
                    spent["steps"] += name == "build_connector_meta"
                return result
            request = args[0].request_id
            if request in self._timed:
                self._timed[request][1][name] += seconds
            if name in LAST:
                self._ended(request)
            return result

        return called

    def _watched(self, get_new_blocks: Any, inside: list[float]) -> Any:
        """`get_new_blocks`, its seconds added to all who asked, but for those `inside` vLLM's
        own.
        """

        def called(*args: Any) -> Any:
            started, inside[0] = time.perf_counter(), 0.0
            blocks = get_new_blocks(*args)
            seconds = time.perf_counter() - started - inside[0]
            for _, spent in self._timed.values():
                spent["get_new_blocks"] += seconds
            return blocks

        return called

    def _promise(self, method: Any) -> Any:
        """A method about a request's promise, its seconds added to the request's."""

        def called(tracked: Any, *args: Any) -> None:
            started = time.perf_counter()
            method(tracked, *args)
            if (timed := self._timed.get(tracked.request.request_id)) is not None:
                timed[1]["promise"] += time.perf_counter() - started

        return called

    def _ended(self, request: str) -> None:
        if request in self._timed:
            path, spent = self._timed.pop(request)
            with path.open("a") as file:
                file.write(json.dumps(spent) + "\n")
