"""One system after another on a pair of GPUs: start, warm up, load, figures; the report after every workload."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec

from ..processes import Child, module
from ..results import Clock, OutOfTime, Report, Row, write
from ..vllm.fleet import ENVIRONMENT
from .client import Answer
from .servers import START_SECONDS, Servers
from .sizes import Sizes
from .summary import Figures, compared, figures, raw_rows
from .systems import memory
from .workloads import Ceilings

WARM_SECONDS = 60.0
LOAD_SECONDS = 120.0
"""When a workload is cut; what is not answered by then is an error."""
PREPARE_SECONDS = 120.0
LOOK_SECONDS = 5.0
LEAST_SECONDS = 20.0
"""With less left of the run's time than this, no workload is begun."""


class Bench(msgspec.Struct, frozen=True, kw_only=True):
    """What all pairs of GPUs have in common. model: its folder. more: settings of vcache. lock: of `report`."""

    sizes: Sizes
    model: Path
    folder: Path
    cache: Path
    more: dict[str, str]
    workloads: Sequence[str]
    report: Report
    clock: Clock
    lock: Any = msgspec.field(default_factory=threading.Lock)


class Pair:
    """Two GPUs, and the process that sends requests to whatever runs on them. Used by one thread, but for `stop`."""

    def __init__(self, bench: Bench, gpus: Sequence[int]) -> None:
        self._bench, self._gpus = bench, gpus
        self._servers: Servers | None = None
        plan = msgspec.json.encode(bench.sizes.plan).decode()
        log = bench.folder / f"load_{gpus[0]}.log"
        self._load = Child("load", module(f"{__package__}.load", plan), log, {**os.environ, **ENVIRONMENT})
        self._load.answer(PREPARE_SECONDS)

    def __enter__(self) -> Pair:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def stop(self) -> None:
        """End all processes of the pair; whoever waits for one of them gets ChildFailed. From any thread."""
        self._load.kill()
        if self._servers is not None:
            self._servers.close()

    def run(self, system: str) -> None:
        """Raises ChildFailed for servers that do not start or end, OutOfTime; rows of workloads before that stay."""
        bench = self._bench
        bench.clock.check(LEAST_SECONDS)
        self._say(system, f"GPUs {self._gpus}: {memory(system, bench.sizes)}")
        with Servers(system, bench.sizes, self._gpus, bench.model, bench.folder, bench.cache, bench.more) as servers:
            self._servers = servers
            prepared = {name: self._load.ask("prepare", PREPARE_SECONDS, workload=name) for name in bench.workloads}
            took = servers.wait(min(START_SECONDS, bench.clock.left))
            self._say(system, f"two servers up after {took:.0f} s")
            warm = self._load.ask("warm", WARM_SECONDS + 20, ports=servers.ports, limit=WARM_SECONDS)
            for error in warm["errors"][:3]:
                self._say(system, f"warm-up: {error}")
            for name in bench.workloads:
                bench.clock.check(LEAST_SECONDS)
                self._workload(system, name, servers, prepared[name])

    def _workload(self, system: str, name: str, servers: Servers, prepared: dict[str, Any]) -> None:
        bench = self._bench
        ceilings = msgspec.convert(prepared["ceilings"], Ceilings)
        before = servers.counters()
        count = self._load.ask("start", ports=servers.ports, workload=name, limit=min(LOAD_SECONDS, bench.clock.left))
        self._watch(system, name, count)
        answers = msgspec.convert(self._load.ask("result"), list[Answer])
        write(bench.folder / f"answers_{system}_{name}.json", {"answers": msgspec.to_builtins(answers)})
        for error in sorted({answer.error for answer in answers if answer.error})[:3]:
            self._say(system, f"{name}: {error}")
        after = servers.counters()
        found = figures(answers, before, after)
        self._say(system, f"{name}: {_line(found, ceilings)}; {after['preemptions'] - before['preemptions']:.0f} preemptions")
        self._report(raw_rows(system, name, found, ceilings, prepared["what"], memory(system, bench.sizes)), name)

    def _report(self, rows: list[Row], workload: str) -> None:
        report = self._bench.report
        with self._bench.lock:
            report.add(rows)
            if both := compared(report.rows, workload):
                report.add(both)

    def _watch(self, system: str, name: str, count: int) -> None:
        started, told = time.monotonic(), 0.0
        while not (state := self._load.ask("progress"))["over"]:
            if time.monotonic() - started - told > LOOK_SECONDS:
                told = time.monotonic() - started
                self._say(system, f"{name}: {state['done']} of {count} after {told:.0f} s, {state['errors']} errors")
            time.sleep(0.2)

    def _say(self, system: str, text: str) -> None:
        print(f"{self._bench.clock.spent:4.0f} s  {system:8} {text}", flush=True)


def _line(found: Figures, ceilings: Ceilings) -> str:
    return (
        f"{found.throughput:.2f} requests/s in {found.duration:.1f} s, {found.errors} errors, hit rate {found.hit_rate:.3f} "
        f"(ceiling {ceilings.shared:.3f}, one a server {ceilings.single:.3f}, {ceilings.unique:,} tokens in all)"
    )


def run_all(bench: Bench, systems: Sequence[str], gpus: Sequence[Sequence[int]]) -> list[str]:
    """Every system once, on whichever pair of GPUs is free next; one that fails costs no other its rows. The systems that failed."""
    waiting, failed = list(systems), list[str]()

    def work(pair: Pair) -> None:
        while True:
            with bench.lock:
                system = waiting.pop(0) if waiting else None
            if system is None:
                return
            try:
                pair.run(system)
            except OutOfTime as error:
                failed.append(system)
                print(f"{system}: left out, {error}", flush=True)
            except Exception as error:  # noqa: BLE001 - the other systems' rows count
                failed.append(system)
                print(f"{system}: FAILED: {type(error).__name__}: {error}", flush=True)

    with ExitStack() as undo:
        pairs = [undo.enter_context(Pair(bench, each)) for each in gpus]
        # What ends this process early must not wait for them: the pairs are stopped, and the threads fail.
        threads = [threading.Thread(target=work, args=(pair,), daemon=True) for pair in pairs]
        undo.callback(waiting.clear)
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return failed
