"""Reuse under the reader's feet: does a load out of another instance's live KV cache ever bring a wrong byte?

    python -m benchmarks.inplace_campaign [--level cpu|vllm|gpu] [--loads N] [--seed N] [--control WHAT] [--out FILE]

`cpu`: owners whose blocks are handed out and written again all the time, readers that load out of them, some slowly, and out of one
another, and one metadata server: real processes, real memory, each byte compared (`inplace_instance`). They stop themselves at every
step of the protocol, are stopped and killed at any moment and start again under other names; the server is killed and stopped. The seed
throws the same dice again; the processes run as they will.

`vllm`: whole vLLMs on the CPU, each owner and reader at once, with so few KV blocks that they are used again all the time; tokens and
log probabilities of each answer are compared with those of a vLLM that shares nothing (`vllm.campaign`).

`gpu`: owners are live vLLMs on two GPUs, or a tiny one on the CPU; readers are none, and compare sums with what owners told
(`inplace_live`).

Then the same with one rule broken: readers do not look at the generations after a copy; owners change them after they have written,
publish before, or do not look for pins. There wrong bytes must be seen, or loads that are refused though they are pinned, or the zeros
above prove nothing. And vLLMs without any connector, to tell apart what is
wrong in their own prefix caches (vLLM #37164).
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
from contextlib import ExitStack, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple, Self, get_args

import msgspec
import torch

from vcache_backend.config import ByteSize, Config, EngineConfig, PoolConfig, ServerConfig

from .forked import SECONDS, Forked, Waker, hear
from .inplace_instance import EACH, Control, Outcomes, Role, Settings
from .inplace_reader import live
from .kv import BLOCK_SIZE
from .processes import ChildFailed
from .results import Report, Row, load, none, row
from .soak.chaos import QUICK
from .soak.node import Node

LOADS = 100_000
PAUSE = 0.5
"""Seconds between two mishaps, on average."""
STOPS = 0.0005
LONGEST_STOP = 0.6
SERVER_STOP = 1.2
CONTROLS: dict[Control, str] = {
    "no verdict": "control_wrong",
    "counted late": "control_late_wrong",
    "published early": "control_early_wrong",
    "pins unseen": "control_pinned_refused",
    "no connector": "alone_wrong",
}
"""Rows by what is left out. The last one has no limit: nothing of ours is in it."""
PROGRESS_SECONDS = 15.0
SHOWN = 10
MOST_ENDED, MOST_AT_FIRST = 20, 3
"""Processes that end by themselves, until a campaign is given up; and before anything was loaded or answered."""
NOWHERE = Path()


class Level(NamedTuple):
    """What a campaign is made of. counts: of processes by role; mishaps: how often each comes, in shares. stops: as in `Settings`. loads:
    that must bring something, and the share of them to be refused by their verdicts. controls: and how many loads each has at least,
    for how many seconds at most. pinned: of the loads, the share to begin with pins that hold. seconds: what the campaign itself takes
    at most. silence: seconds after which a process that says nothing has ended. prepare: fills the shared folder."""

    life: Callable[[Settings, Connection], None]
    counts: dict[Role, int]
    mishaps: dict[str, int]
    stops: float
    loads: int
    reuse_hits: float
    controls: Sequence[Control]
    control_loads: int
    control_seconds: float
    pinned: float = 0.0
    seconds: float = float("inf")
    silence: float = SECONDS
    prepare: Callable[[Path], None] = lambda folder: None


CPU = Level(
    life=live,
    counts={"owner": 4, "reader": 6},
    mishaps={
        "owner killed": 4,
        "reader killed": 2,
        "owner stopped": 8,
        "reader stopped": 8,
        "server killed": 1,
        "server stopped": 1,
    },
    stops=STOPS,
    loads=LOADS,
    reuse_hits=0.01,
    controls=("no verdict", "counted late", "published early", "pins unseen"),
    control_loads=5000,
    control_seconds=120.0,
    pinned=0.1,
)


def whole_requests() -> Level:
    """Real vLLM on the CPU."""
    from .vllm import campaign as vllm

    vllm.prepare_host()
    return Level(
        life=vllm.live,
        counts={"vllm": 3},
        mishaps={"vllm killed": 1, "vllm stopped": 30, "server killed": 1, "server stopped": 2},
        stops=0.01,
        loads=1000,
        reuse_hits=0.05,
        pinned=0.1,
        controls=("no verdict", "pins unseen", "no connector"),
        control_loads=400,
        control_seconds=240.0,
        seconds=900.0,
        silence=240.0,
        prepare=vllm.prepare,
    )


def live_caches() -> Level:
    """KV caches of live vLLMs, two on two GPUs, one on the CPU, and readers that are none. With a start of vLLM in it."""
    from . import inplace_live as caches

    caches.prepare_host()
    on_gpus = torch.cuda.is_available()
    return Level(
        life=caches.live,
        counts={"owner": 2, "reader": 24} if on_gpus else {"owner": 1, "reader": 2},
        mishaps={
            "owner killed": 1,
            "reader killed": 8,
            "owner stopped": 90,
            "reader stopped": 100,
            "server killed": 5,
            "server stopped": 8,
        },
        stops=0.001,
        loads=20_000,
        reuse_hits=0.05,
        controls=("no verdict",),
        control_loads=1000,
        control_seconds=120.0,
        seconds=450.0,
        silence=300.0,
        prepare=caches.prepare,
    )


LEVELS: dict[str, Callable[[], Level]] = {"cpu": lambda: CPU, "vllm": whole_requests, "gpu": live_caches}


class Instance(Forked):
    """The process of one, in its place: `number` stays when it is started again."""

    def __init__(self, life: Callable[[Settings, Connection], None], settings: Settings, number: int) -> None:
        super().__init__(life, settings, Path(settings.log))
        self.role, self.number = settings.role, number


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

    def __init__(self, level: Level, seed: int, shared: Path, control: Control = "") -> None:
        self.outcomes, self.mishaps, self.wrong, self.ended = Outcomes(), Counter[str](), list[str](), 0
        self._level, self._shared = level, str(shared)
        self._seed, self._control, self._starts = seed, control, 0
        self._dice, self._waker = random.Random(f"mishaps {seed}"), Waker(str(seed), LONGEST_STOP)
        self._server_wakes = float("inf")
        with ExitStack() as undo:
            self._folder = Path(undo.enter_context(tempfile.TemporaryDirectory(prefix="vcache-inplace-")))
            self._node = Node(self._folder / "node", self._folder / "server.log")
            undo.callback(self._node.kill)
            self._node.restart()
            self._here: list[Instance] = []
            undo.callback(self._kill_all)
            for role, count in level.counts.items():
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
        for number, told in hear(self._here, self._level.silence):
            if told is not None:
                self.outcomes.add(told.outcomes)
                self.wrong += told.wrong
                continue
            self.ended += 1
            print(self._here[number].tail(), file=sys.stderr, flush=True)
            most = MOST_ENDED if self.outcomes.loads or self.outcomes.answers else MOST_AT_FIRST
            if self.ended > most:
                raise ChildFailed(f"{self.ended} processes ended by themselves")
            self._again(number)

    def _mishap(self) -> None:
        what = self._dice.choices(list(self._level.mishaps), list(self._level.mishaps.values()))[0]
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
                with suppress(ProcessLookupError):
                    os.kill(chosen.pid, signal.SIGSTOP)

    def _show(self, seconds: float) -> None:
        seen = self.outcomes
        asked = f"{seen.answers:,} answers, " if seen.answers else ""
        said = f"{asked}{seen.loads:,} loads, {seen.reuse_hits:,} refused by their verdicts, {seen.wrong} wrong"
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
        log, seed = str(self._folder / f"{role}{number}.log"), f"{self._seed} {self._starts}"
        settings = Settings(config, role, seed, log, self._level.stops, self._control, self._shared, number)
        return Instance(self._level.life, settings, number)

    def _again(self, number: int) -> None:
        """Kill it, if it lives, and start another one in its place, which has another name."""
        self._here[number].kill()
        self._here[number] = self._start(self._here[number].role, number)

    def _kill_all(self) -> None:
        for instance in self._here:
            instance.kill()


def campaign(loads: int, seed: int, pause: float = PAUSE, level: Level = CPU, shared: Path = NOWHERE) -> Result:
    """loads: those that bring something; and so many are refused by their verdicts as the level says."""
    with Campaign(level, seed, shared) as made:
        return made.run(
            lambda seen, passed: (seen.loads >= loads and seen.reuse_hits >= level.reuse_hits * loads) or passed > level.seconds,
            pause,
        )


def run_control(control: Control, seed: int, level: Level = CPU, shared: Path = NOWHERE) -> Result:
    """Until something is wrong, where it must be, and there are so many loads or five times as many answers, or for as long as the
    level says."""

    def over(seen: Outcomes, passed: float) -> bool:
        least = level.control_loads
        enough = seen.answers >= 5 * least if control == "no connector" else bad(control, seen) > 0 and seen.loads >= least
        return enough or passed > level.control_seconds

    with Campaign(level, seed, shared, control) as made:
        return made.run(over, PAUSE)


def bad(control: Control, seen: Outcomes) -> int:
    """How much went wrong that the control is to show."""
    return seen.pinned_refused if control == "pins unseen" else seen.wrong


def run() -> list[Row]:
    """Some minutes."""
    made: list[Row] = []
    measure("cpu", LOADS, int(time.time()), made.extend)
    return made


def measure(name: str, loads: int, seed: int, add: Callable[[Sequence[Row]], object], control: Control = "") -> list[str]:
    """The campaign of a level and its controls, or one control alone; rows as they come. What is known of wrong loads."""
    level, wrong = LEVELS[name](), list[str]()
    with tempfile.TemporaryDirectory(prefix="vcache-inplace-shared-") as folder:
        level.prepare(shared := Path(folder))
        if not control:
            result = campaign(loads or level.loads, seed, level=level, shared=shared)
            wrong += result.wrong
            add(rows(result, loads or level.loads, name, level))
        for one in [control] if control else level.controls:
            result = run_control(one, seed, level=level, shared=shared)
            wrong += result.wrong if one == "no connector" else []
            add([control_row(one, result, name)])
    return wrong


def rows(result: Result, loads: int = LOADS, name: str = "cpu", level: Level = CPU) -> list[Row]:
    """loads: how many there were to be."""
    seen = result.outcomes
    more = dict(sorted(result.mishaps.items())) | {"stops": result.stops, "seed": result.seed}
    what = f"{json.dumps(msgspec.to_builtins(seen) | more)} in {result.seconds:.0f} s; {load()}"
    refused = "loads refused by their verdict"
    differed = "" if name == "vllm" else f", {seen.differed:,} of which had read other bytes"
    hits = f"{refused}{differed}; before launch: {seen.stale:,}"
    whole = name == "vllm"
    with_what = "whose tokens or log probabilities are not those of vLLM alone" if whole else "with a wrong byte"
    made = [
        row(f"inplace_loads_{name}", "loads", seen.loads, loads, what=what, at_least=1),
        row(f"inplace_reuse_hits_{name}", "loads", seen.reuse_hits, level.reuse_hits * loads, what=hits, at_least=1),
        none(
            f"inplace_wrong_{name}", "answers" if whole else "loads", seen.wrong, with_what, seen.answers if whole else seen.loads
        ),
        none(f"inplace_failed_{name}", "times", result.ended + seen.raised, "a process ended by itself, or a call raised"),
    ]
    if level.pinned:
        what = f"under pins; not whole: {seen.pinned_late:,} that took longer than a pin holds, {seen.pinned_given_up:,} from a table "
        what += (
            f"that was given up, {seen.pinned_forced:,} from an owner without other blocks; {seen.kept:,} pinned blocks were kept"
        )
        made += [
            row(f"inplace_pinned_loads_{name}", "loads", seen.pinned, level.pinned * loads, what=what, at_least=1),
            none(f"inplace_pinned_refused_{name}", "loads", seen.pinned_refused, "not whole though their pins held", seen.pinned),
        ]
    return made


def control_row(control: Control, its: Result, name: str) -> Row:
    """What was wrong in a control."""
    seen, case = its.outcomes, f"inplace_{CONTROLS[control]}_{name}"
    loads = f"{seen.wrong_bytes:,} wrong bytes in {seen.loads:,} loads, {seen.pinned:,} pinned"
    told = json.dumps(msgspec.to_builtins(seen)) if seen.answers else loads
    what = f"{control}; {told} in {its.seconds:.0f} s; seed {its.seed}"
    of_answers = name == "vllm" and control != "pins unseen"
    unit, runs = ("answers", seen.answers) if of_answers else ("loads", seen.loads)
    if control == "no connector":
        return row(case, unit, seen.wrong, 0, what=what, runs=runs)
    return row(case, unit, bad(control, seen), 1, what=f"{what}; reference 1", at_least=1, runs=runs)


def main(arguments: Sequence[str] | None = None) -> int:
    """1 if a row missed its limit."""
    parser = argparse.ArgumentParser(
        prog="benchmarks.inplace_campaign", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--level", choices=LEVELS, default="cpu")
    parser.add_argument("--loads", type=int, default=0, help="that bring something; default: the level's")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="default: the time")
    parser.add_argument("--control", choices=get_args(Control)[1:], default="", help="this control alone")
    parser.add_argument("--out", type=Path, help="result file; one that is there is continued")
    options = parser.parse_args(arguments)
    report = Report(options.out)
    wrong = measure(options.level, options.loads, options.seed, report.add, options.control)
    print("\n".join(wrong[:SHOWN]))
    return int(report.missed)


if __name__ == "__main__":
    raise SystemExit(main())
