"""Reuse under the reader's feet: does a load out of another instance's live KV cache ever bring a wrong byte?

    python -m benchmarks.inplace_campaign [--loads 100000] [--seed N] [--control WHAT] [--out FILE]

Owners whose blocks are handed out and written again all the time, readers that load out of them, some slowly, and out of one another,
and one metadata server: real processes, real memory, each byte compared (`inplace_instance`). They stop themselves at every step of the
protocol, are stopped and killed at any moment and start again under other names; the server is killed and stopped. The seed throws the
same dice again; the processes run as they will.

Then the same with one rule broken: readers do not look at the generations after a copy, owners change them after they have written, or
publish before. There wrong bytes must be seen, or the zero above proves nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from multiprocessing.connection import wait
from pathlib import Path
from typing import Literal, Self, get_args

import msgspec

from vcache_backend.config import ByteSize, Config, EngineConfig, PoolConfig, ServerConfig

from .forked import SECONDS, Forked, Waker
from .inplace_instance import EACH, Control, Outcomes, Settings, Told
from .inplace_reader import live
from .kv import BLOCK_SIZE
from .results import Report, Row, load, none, row
from .soak.chaos import QUICK
from .soak.node import Node

LOADS = 100_000
REUSE_HITS = 0.01
"""Loads to be refused by their verdicts, for each one that brings something."""
PAUSE = 0.5
"""Seconds between two mishaps, on average."""
STOPS = 0.0005
LONGEST_STOP = 0.6
SERVER_STOP = 1.2
MISHAPS = {
    "owner killed": 4,
    "reader killed": 2,
    "owner stopped": 8,
    "reader stopped": 8,
    "server killed": 1,
    "server stopped": 1,
}
"""How often each comes, in shares."""
CONTROLS: dict[Control, str] = {
    "no verdict": "inplace_control_wrong_cpu",
    "counted late": "inplace_control_late_wrong_cpu",
    "published early": "inplace_control_early_wrong_cpu",
}
CONTROL_LOADS = 5000
CONTROL_SECONDS = 120.0
PROGRESS_SECONDS = 15.0
SHOWN = 10

Role = Literal["owner", "reader"]
COUNTS: dict[Role, int] = {"owner": 4, "reader": 6}


class Instance(Forked):
    """The process of one, in its place: `number` stays when it is started again."""

    def __init__(self, settings: Settings, number: int) -> None:
        super().__init__(live, settings, Path(settings.log))
        self.role, self.number = settings.role, number
        self.heard = time.monotonic()


class Result(msgspec.Struct):
    """Of one run. ended: processes that nobody had told to end, or that were silent."""

    seed: int
    seconds: float
    outcomes: Outcomes
    mishaps: Counter[str]
    stops: int
    ended: int
    wrong: list[str]


class Campaign:
    """All processes of one run, which are gone behind the context. One thread."""

    def __init__(self, seed: int, stops: float = STOPS, control: Control = "") -> None:
        self.outcomes, self.mishaps, self.wrong, self.ended = Outcomes(), Counter[str](), list[str](), 0
        self._seed, self._stops, self._control, self._starts = seed, stops, control, 0
        self._dice, self._waker = random.Random(f"mishaps {seed}"), Waker(str(seed), LONGEST_STOP)
        self._server_wakes = float("inf")
        with ExitStack() as undo:
            self._folder = Path(undo.enter_context(tempfile.TemporaryDirectory(prefix="vcache-inplace-")))
            self._node = Node(self._folder / "node", self._folder / "server.log")
            undo.callback(self._node.kill)
            self._node.restart()
            self._here: list[Instance] = []
            undo.callback(self._kill_all)
            for role, count in COUNTS.items():
                self._here += [self._start(role, len(self._here) + number) for number in range(count)]
            self._undo = undo.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def run(self, over: Callable[[Outcomes, float], bool], pause: float) -> Result:
        """Until `over` says so of what was counted, and of the seconds that took. pause: between two mishaps, on average."""
        started = shown = time.monotonic()
        due = started + pause
        while not over(self.outcomes, (now := time.monotonic()) - started):
            self._hear()
            self._waker.look([instance.pid for instance in self._here])
            if now > self._server_wakes:
                self._server_wakes = float("inf")
                self._node.signal(signal.SIGCONT)
            self._node.look()
            if now > due:
                due = now + self._dice.uniform(0, 2 * pause)
                self._mishap()
            if now - shown > PROGRESS_SECONDS:
                shown = now
                self._show(now - started)
        ended, seconds = self.ended + self._node.ended, time.monotonic() - started
        return Result(self._seed, round(seconds, 1), self.outcomes, self.mishaps, self._waker.stops, ended, self.wrong)

    def _hear(self) -> None:
        """What instances have told by now."""
        ready = wait([instance.pipe for instance in self._here], timeout=0.02)
        for number, instance in enumerate(self._here):
            try:
                if instance.pipe in ready:
                    told: Told = instance.pipe.recv()
                    self.outcomes.add(told.outcomes)
                    self.wrong += told.wrong
                    instance.heard = time.monotonic()
                elif time.monotonic() - instance.heard < SECONDS:
                    continue
                else:
                    raise TimeoutError
            except (EOFError, OSError):
                self.ended += 1
                print(instance.tail(), file=sys.stderr, flush=True)
                self._again(number)

    def _mishap(self) -> None:
        what = self._dice.choices(list(MISHAPS), list(MISHAPS.values()))[0]
        self.mishaps[what] += 1
        who, _, how = what.partition(" ")
        if who == "server" and how == "killed":
            self._server_wakes = float("inf")
            self._node.restart()
        elif who == "server":
            self._server_wakes = time.monotonic() + self._dice.uniform(0, SERVER_STOP)
            self._node.signal(signal.SIGSTOP)
        else:
            chosen = self._dice.choice([instance for instance in self._here if instance.role == who])
            if how == "killed":
                self._again(chosen.number)
            else:
                os.kill(chosen.pid, signal.SIGSTOP)

    def _show(self, seconds: float) -> None:
        seen = self.outcomes
        said = f"{seen.loads:,} loads, {seen.reuse_hits:,} refused by their verdicts, {seen.wrong} wrong"
        print(f"{seconds:5.0f} s: {said}, {self.mishaps.total()} mishaps", file=sys.stderr, flush=True)

    # ---- processes

    def _start(self, role: Role, number: int) -> Instance:
        self._starts += 1
        config = Config(
            server=ServerConfig(socket=str(self._node.path)),
            client=QUICK,
            pool=PoolConfig(device="host", segment_bytes=ByteSize(0)),
            engine=EngineConfig(chunk_size=EACH * BLOCK_SIZE),
        )
        log = str(self._folder / f"{role}{number}.log")
        return Instance(Settings(config, role, f"{self._seed} {self._starts}", log, self._stops, self._control), number)

    def _again(self, number: int) -> None:
        """Kill it, if it lives, and start another one in its place, which has another name."""
        self._here[number].kill()
        self._here[number] = self._start(self._here[number].role, number)

    def _kill_all(self) -> None:
        for instance in self._here:
            instance.kill()


def campaign(loads: int = LOADS, seed: int = 1, pause: float = PAUSE, stops: float = STOPS) -> Result:
    """loads: those that bring something; and so many are refused by their verdicts as `REUSE_HITS` says. stops: as in `Settings`."""
    with Campaign(seed, stops) as made:
        return made.run(lambda seen, _: seen.loads >= loads and seen.reuse_hits >= REUSE_HITS * loads, pause)


def run_control(control: Control, seed: int = 1, loads: int = CONTROL_LOADS, stops: float = STOPS) -> Result:
    """Until a byte is wrong and there are so many loads, or for CONTROL_SECONDS."""
    with Campaign(seed, stops, control) as made:
        return made.run(lambda seen, passed: (seen.wrong > 0 and seen.loads >= loads) or passed > CONTROL_SECONDS, PAUSE)


def run() -> list[Row]:
    """Some minutes."""
    seed = int(time.time())
    return rows(campaign(seed=seed), {control: run_control(control, seed) for control in CONTROLS})


def rows(result: Result, controls: dict[Control, Result], loads: int = LOADS) -> list[Row]:
    """loads: how many there were to be."""
    seen = result.outcomes
    more = dict(sorted(result.mishaps.items())) | {"stops": result.stops, "seed": result.seed}
    what = f"{json.dumps(msgspec.to_builtins(seen) | more)} in {result.seconds:.0f} s; {load()}"
    hits = f"loads refused by their verdict, {seen.differed:,} of which had read other bytes; before launch: {seen.stale:,}"
    made = [
        row("inplace_loads_cpu", "loads", seen.loads, loads, what=what, at_least=1),
        row("inplace_reuse_hits_cpu", "loads", seen.reuse_hits, REUSE_HITS * loads, what=hits, at_least=1),
        none("inplace_wrong_cpu", "loads", seen.wrong, "with a wrong byte", seen.loads),
        none("inplace_failed_cpu", "times", result.ended + seen.raised, "a process ended by itself, or a call raised"),
    ]
    for control, its in controls.items():
        what = (
            f"{control}; {its.outcomes.wrong_bytes:,} wrong bytes in {its.outcomes.loads:,} loads; seed {its.seed}; reference 1"
        )
        made.append(row(CONTROLS[control], "loads", its.outcomes.wrong, 1, what=what, at_least=1, runs=its.outcomes.loads))
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """1 if a row missed its limit."""
    parser = argparse.ArgumentParser(
        prog="benchmarks.inplace_campaign", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--loads", type=int, default=LOADS, help="that bring something (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="default: the time")
    parser.add_argument("--control", choices=get_args(Control)[1:], help="this control alone")
    parser.add_argument("--out", type=Path, help="result file")
    options = parser.parse_args(arguments)
    if options.control:
        print(run_control(options.control, options.seed))
        return 0
    result = campaign(options.loads, options.seed)
    report = Report(options.out)
    report.add(rows(result, {control: run_control(control, options.seed) for control in CONTROLS}, options.loads))
    print("\n".join(result.wrong[:SHOWN]))
    return int(report.missed)


if __name__ == "__main__":
    raise SystemExit(main())
