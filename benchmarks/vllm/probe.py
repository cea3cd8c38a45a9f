"""Inside the engine core, between vLLM's scheduler and its KV connector: what calls cost, and a
promise broken on purpose.

A request asks for it with `extra_args`:

`{"timed": FILE}`: every call of the connector's scheduler side from the request's arrival to its
end is timed: those that are about this request, and those made once a step, whomever they are for.
With `"worker": True` those of the worker too, which without tensor parallelism lives in this
process. A line of JSON is added to FILE when the request ends: seconds by method, and the steps
that took.

`{"lose": {"how": "clear" | "kill", "socket": PATH, "pid": SERVER, "note": FILE}}`: once the
connector has promised tokens for the request, after the step is scheduled and before it is
executed, all chunks are removed from the pool, or the metadata server is killed. FILE says then how
many tokens had been promised."""

from __future__ import annotations

import json
import os
import signal
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from vcache_backend.metadata_server.client import Client

from ..processes import PATIENT

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
    "bind_connector_metadata",
    "start_load_kv",
    "wait_for_save",
    "get_finished",
    "get_block_ids_with_load_errors",
    "build_connector_worker_meta",
    "clear_connector_metadata",
)
"""Made once a step as well. (Both halves have `get_kv_connector_stats`; one of them counts.)"""
LAST = ("request_finished", "request_finished_all_groups")


class Probe:
    """Wraps a connector's methods; all calls come from the scheduler's one thread. connector: None
    where there is none.

    pool: vLLM's `BlockPool`. Where the connector watches it, what that adds to `get_new_blocks`
    counts as a method called once a step."""

    def __init__(self, connector: Any, pool: Any = None) -> None:
        self._timed: dict[str, tuple[Path, dict[str, float]]] = {}
        self._lose: dict[str, dict[str, Any]] = {}
        self._due: list[tuple[dict[str, Any], int]] = []
        self._worker: Any = None
        # Of the two only one is called by vLLM; the other may be called by it.
        inner = "request_finished" if hasattr(connector, "request_finished_all_groups") else ""
        for name in (*OF_A_REQUEST, *OF_A_STEP):
            if hasattr(connector, name) and name != inner:
                setattr(connector, name, self._wrapped(name, getattr(connector, name)))
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
        if asked.get("worker") and self._worker is None:
            self._wrap_worker()
        if "timed" in asked:
            self._timed[request] = (Path(asked["timed"]), defaultdict(float))
        if "lose" in asked:
            self._lose[request] = asked["lose"]

    def _wrap_worker(self) -> None:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        self._worker = get_kv_transfer_group()
        for name in OF_A_WORKER:
            setattr(self._worker, name, self._wrapped(name, getattr(self._worker, name)))

    def scheduled(self) -> None:
        """The step is scheduled, and nothing of it has been executed."""
        for what, tokens in self._due:
            if what["how"] == "kill":
                os.kill(what["pid"], signal.SIGKILL)
            else:
                with Client(Path(what["socket"]), PATIENT, reconnect=False) as client:
                    client.clear()
            Path(what["note"]).write_text(json.dumps({"promised": tokens}))
        self._due.clear()

    def _wrapped(self, name: str, method: Any) -> Any:
        """The method, its seconds added to whoever asked; a promise and a request's end are taken
        note of.
        """

        def called(*args: Any, **kwargs: Any) -> Any:
            if not self._timed and not self._lose:
                return method(*args, **kwargs)
            started = time.perf_counter()
            result = method(*args, **kwargs)
            seconds = time.perf_counter() - started
            if name in OF_A_STEP or name in OF_A_WORKER:
                for _, spent in self._timed.values():
                    spent[name] += seconds
                    spent["steps"] += name == "build_connector_meta"
                return result
            request = args[0].request_id
            if request in self._timed:
                self._timed[request][1][name] += seconds
            if name == "update_state_after_alloc" and args[2] > 0 and request in self._lose:
                self._due.append((self._lose.pop(request), args[2]))
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

    def _ended(self, request: str) -> None:
        self._lose.pop(request, None)
        if request in self._timed:
            path, spent = self._timed.pop(request)
            with path.open("a") as file:
                file.write(json.dumps(spent) + "\n")
