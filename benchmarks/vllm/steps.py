"""Where the time to first token goes in the engine core: steps and their parts, with any connector
or none.

    VCACHE_STEPS=/tmp/with.jsonl vllm serve … --scheduler-cls benchmarks.vllm.steps.stepped
    python -m benchmarks.vllm.steps /tmp/alone.jsonl /tmp/with.jsonl

A line of JSON for each step and for each request's first token."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from vllm.v1.executor.uniproc_executor import AsyncOutputFuture, UniProcExecutor

from .probe import OF_A_REQUEST, OF_A_STEP
from .scheduler import with_

PARTS = ("schedule", "connector", "launch", "result", "update")
"""Of a step, in the engine core's thread: vLLM's scheduler, our part of it, the worker's launch of
the model, the wait for its result, and what the scheduler does with it."""


class _Stepped:
    """Mixed into a scheduler."""

    connector: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._file = Path(os.environ["VCACHE_STEPS"]).open("a", buffering=1)  # noqa: SIM115
        self._step, self._began, self._spent = 0, perf_counter(), dict.fromkeys(PARTS, 0.0)
        self._came: dict[str, tuple[int, float]] = {}
        self._scheduled: dict[str, tuple[int, float]] = {}
        for name in (*OF_A_REQUEST, *OF_A_STEP) if self.connector is not None else ():
            if hasattr(self.connector, name):
                timed = self._timed("connector", getattr(self.connector, name))
                setattr(self.connector, name, timed)
        for kind, name, part in (
            (UniProcExecutor, "execute_model", "launch"),
            (UniProcExecutor, "sample_tokens", "launch"),
            (AsyncOutputFuture, "result", "result"),
        ):
            setattr(kind, name, self._timed(part, getattr(kind, name)))

    def _timed(self, part: str, method: Any) -> Any:
        def called(*args: Any, **kwargs: Any) -> Any:
            started = perf_counter()
            result = method(*args, **kwargs)
            self._spent[part] += perf_counter() - started
            return result

        return called

    def add_request(self, request: Any) -> None:
        self._came[request.request_id] = self._step, perf_counter()
        super().add_request(request)  # type: ignore[misc]

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        started = perf_counter()
        us = {part: round(1e6 * seconds) for part, seconds in self._spent.items()}
        self._write(step=self._step, ms=1e3 * (started - self._began), us=us)
        self._step, self._began, self._spent = self._step + 1, started, dict.fromkeys(PARTS, 0.0)
        output = super().schedule(*args, **kwargs)  # type: ignore[misc]
        for new in output.scheduled_new_reqs:
            self._scheduled.setdefault(new.req_id, (self._step, perf_counter()))
        self._spent["schedule"] = perf_counter() - started
        return output

    def update_from_output(self, scheduled: Any, output: Any) -> Any:
        started = perf_counter()
        result = super().update_from_output(scheduled, output)  # type: ignore[misc]
        now = perf_counter()
        self._spent["update"] += now - started
        for name, tokens in zip(output.req_ids, output.sampled_token_ids, strict=False):
            if tokens and name in self._scheduled:
                step, at = self._scheduled.pop(name)
                came, when = self._came.pop(name, (step, at))
                times = {"wait_ms": 1e3 * (at - when), "core_ttft_ms": 1e3 * (now - when)}
                self._write(waited=step - came, ran=self._step - step, **times)
        return result

    def _write(self, **values: Any) -> None:
        self._file.write(json.dumps(values) + "\n")


stepped = with_(_Stepped)


def main(files: list[str]) -> None:
    """Print the percentiles of each file."""
    for file in files:
        rows = [json.loads(line) for line in Path(file).read_text().splitlines()]
        firsts = [row for row in rows if "waited" in row]
        steps = [row for row in rows if "us" in row and row["ms"] < 100.0]
        print(f"{file}: {len(firsts)} requests, {len(steps)} steps")
        for name in ("waited", "ran"):
            counts = sorted(Counter(row[name] for row in firsts).items())
            print(f"  steps {name}: " + ", ".join(f"{many} x {step}" for step, many in counts))
        shown = {name: [row[name] for row in firsts] for name in ("wait_ms", "core_ttft_ms")}
        shown["step_ms"] = [row["ms"] for row in steps]
        shown |= {f"{part}_us": [row["us"][part] for row in steps] for part in PARTS}
        for name, values in shown.items():
            p10, p50, p90, p99 = np.percentile(values, [10, 50, 90, 99])
            print(f"  {name:14} p10 {p10:9.2f}  p50 {p50:9.2f}  p90 {p90:9.2f}  p99 {p99:9.2f}")


if __name__ == "__main__":
    main(sys.argv[1:])
