"""The process that sends the requests: apart from the one that looks after the servers, and one for each pair of them.

Started with a `Plan` as JSON in its only argument.
"""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
import time
from typing import Any

import msgspec

from ..processes import answer_commands
from .client import Job, Run
from .sizes import Plan
from .workloads import WORKLOADS, Ceilings, Tokens, ceilings, describe, warm_up

MODEL = "model"
SETTLES = 0.5
"""Seconds after a warm-up round: what it left is stored in the background."""


class Prepared(msgspec.Struct, frozen=True):
    """A workload's requests as (server, body, at)."""

    requests: list[tuple[int, bytes, float | None]]
    what: str
    ceilings: Ceilings


class Load:
    """The commands. Each takes and returns what JSON can say."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._prepared: dict[str, Prepared] = {}
        self._run = Run([])
        self._thread: threading.Thread | None = None

    def prepare(self, workload: str) -> dict[str, Any]:
        """Make a workload's requests, once. How many there are, what they are, and the ceilings of their hit rate."""
        if workload not in self._prepared:
            requests = WORKLOADS[workload](self._plan)
            made = [(each.server, self._body(each.tokens), each.at) for each in requests]
            self._prepared[workload] = Prepared(
                made, describe(workload, self._plan, requests), ceilings(requests, self._plan.block)
            )
            gc.collect()
            gc.freeze()
        prepared = self._prepared[workload]
        return {
            "requests": len(prepared.requests),
            "what": prepared.what,
            "ceilings": msgspec.to_builtins(prepared.ceilings),
        }

    def warm(self, ports: list[int], limit: float) -> dict[str, Any]:
        """Prompts of the warm-up to one server, then to the other, twice: misses, and hits of what the other one stored."""
        prompts = warm_up(self._plan)
        errors: list[str] = []
        for turn in range(4):
            half = prompts[turn // 2 :: 2]
            jobs = [Job(ports[(index + turn) % len(ports)], self._body(tokens)) for index, tokens in enumerate(half)]
            run = Run(jobs)
            asyncio.run(run.go(len(jobs), limit / 4))
            errors += [answer.error for answer in run.answers if answer.error]
            time.sleep(SETTLES)
        return {"errors": errors}

    def start(self, workload: str, ports: list[int], limit: float) -> int:
        """Begin; `progress` and `result` follow. limit: seconds after which it is cut. The number of requests."""
        jobs = [Job(ports[server], body, at) for server, body, at in self._prepared[workload].requests]
        self._run = run = Run(jobs)
        self._thread = threading.Thread(target=lambda: asyncio.run(run.go(self._plan.concurrency, limit)), daemon=True)
        self._thread.start()
        return len(jobs)

    def progress(self) -> dict[str, Any]:
        return {
            "done": self._run.done,
            "errors": self._run.errors,
            "over": self._thread is None or not self._thread.is_alive(),
        }

    def result(self) -> Any:
        """Every answer, by the order of the requests."""
        return msgspec.to_builtins(self._run.answers)

    def _body(self, tokens: Tokens) -> bytes:
        asked = {
            "model": MODEL,
            "prompt": tokens.tolist(),
            "max_tokens": self._plan.output,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        return msgspec.json.encode(asked)


if __name__ == "__main__":
    answer_commands(lambda: Load(msgspec.json.decode(sys.argv[1], type=Plan)))
