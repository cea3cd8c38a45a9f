"""Runs an in-place campaign: starts its processes, causes mishaps, and collects what they
report.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Thread
from typing import Self

import msgspec

from vcache_backend.config import ByteSize, Config, EngineConfig, PoolConfig, ServerConfig

from ..forked import Forked, Waker, hear
from ..processes import ChildFailed
from ..soak.chaos import QUICK
from ..soak.node import Node
from .instance import BLOCK_SIZE, EACH, Control, Outcomes, Role, Settings
from .levels import CPU, DIED, Level

SERVER_STOP = 1.2
STARVED_SECONDS = 2.0
PROGRESS_SECONDS = 15.0
MOST_ENDED, MOST_AT_FIRST = 20, 3
"""How many processes may end by themselves before a campaign is given up: in all, and before
anything was loaded or answered.
"""
NOWHERE = Path()


class Instance(Forked):
    """An instance's process. `number` stays the same when it is started again."""

    def __init__(
        self, life: Callable[[Settings, Connection], None], settings: Settings, number: int
    ) -> None:
        super().__init__(life, settings, Path(settings.log))
        self.role, self.number = settings.role, number


class Result(msgspec.Struct):
    """The result of one run. ended: how many processes ended by themselves or fell silent."""

    seed: int
    seconds: float
    outcomes: Outcomes
    mishaps: Counter[str]
    stops: int
    ended: int
    wrong: list[str]


class Campaign:
    """All processes of one run; the context manager ends them. One thread."""

    def __init__(self, level: Level, seed: int, shared: Path, control: Control = "") -> None:
        self.outcomes, self.mishaps, self.wrong, self.ended = (
            Outcomes(),
            Counter[str](),
            list[str](),
            0,
        )
        self._level, self._shared = level, str(shared)
        self._seed, self._control, self._starts = seed, control, 0
        self._dice, self._waker = (
            random.Random(f"mishaps {seed}"),
            Waker(str(seed), level.longest_stop),
        )
        self._server_wakes = float("inf")
        with ExitStack() as undo:
            self._folder = Path(
                undo.enter_context(tempfile.TemporaryDirectory(prefix="vcache-inplace-"))
            )
            self._node = Node(self._folder / "node", self._folder / "server.log")
            undo.callback(self._node.kill)
            self._node.restart()
            self._here: list[Instance] = []
            undo.callback(self._kill_all)
            for role, count in level.counts.items():
                self._here += [
                    self._start(role, len(self._here) + number) for number in range(count)
                ]
            self._undo = undo.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def run(self, over: Callable[[Outcomes, float], bool]) -> Result:
        """Run until `over(counts, seconds)` is true."""
        started, pause = time.monotonic(), self._level.pause
        shown, due = started, started + pause
        while not over(self.outcomes, (now := time.monotonic()) - started):
            self._hear()
            self._waker.look([instance.pid for instance in self._here])
            if now > self._server_wakes:
                self._server_wakes = float("inf")
                self._node.signal(signal.SIGCONT)
            self._node.look()
            if now > due and (self.outcomes.answers or not self._level.answers):
                due = now + self._dice.uniform(0, 2 * pause)
                self._mishap()
            if now - shown > PROGRESS_SECONDS:
                shown = now
                self._show(now - started)
        ended, seconds = self.ended + self._node.ended, time.monotonic() - started
        return Result(
            self._seed,
            round(seconds, 1),
            self.outcomes,
            self.mishaps,
            self._waker.stops,
            ended,
            self.wrong,
        )

    def _hear(self) -> None:
        """Collect the reports that have come."""
        for number, told in hear(self._here, self._level.silence):
            if told is not None:
                self.outcomes.add(told.outcomes)
                self.wrong += told.wrong
                for wrong in told.wrong:
                    print(wrong, flush=True)
                continue
            instance, states = self._here[number], self._level.states
            instance.kill()
            if instance.status >= DIED:
                self.mishaps[f"died: {states[instance.status - DIED]}"] += 1
                self._again(number)
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
        elif who == "server" and how == "starved":
            self._starve(self._node.pid)
        elif who == "server":
            self._server_wakes = time.monotonic() + self._dice.uniform(0, SERVER_STOP)
            self._node.signal(signal.SIGSTOP)
        else:
            chosen = self._dice.choice(
                [instance for instance in self._here if instance.role == who]
            )
            if how == "killed":
                self._again(chosen.number)
            elif how == "starved":
                self._starve(chosen.pid)
            else:
                with suppress(ProcessLookupError):
                    os.kill(chosen.pid, signal.SIGSTOP)

    def _starve(self, pid: int) -> None:
        """Let the process run a fifth of the next moments, as where others use its cores."""
        Thread(target=starve, args=(pid, self._dice.uniform(0.2, STARVED_SECONDS))).start()

    def _show(self, seconds: float) -> None:
        seen = self.outcomes
        asked = f"{seen.answers:,} answers, " if seen.answers else ""
        said = (
            f"{asked}{seen.loads:,} loads, {seen.reuse_hits:,} refused by their verdicts, "
            f"{seen.waits.total():,} waits, {seen.overdue} overdue, {seen.wrong} wrong"
        )
        print(
            f"{seconds:5.0f} s: {said}, {self.mishaps.total()} mishaps", file=sys.stderr, flush=True
        )

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
        level = self._level
        settings = Settings(
            config=config,
            role=role,
            seed=seed,
            log=log,
            stops=level.stops,
            control=self._control,
            shared=self._shared,
            number=number,
            pauses=level.pauses,
            lends=level.lends,
        )
        return Instance(self._level.life, settings, number)

    def _again(self, number: int) -> None:
        """Kill the instance, if it lives, and start another one, with another name, in its
        place.
        """
        self._here[number].kill()
        self._here[number] = self._start(self._here[number].role, number)

    def _kill_all(self) -> None:
        for instance in self._here:
            instance.kill()


def starve(pid: int, seconds: float) -> None:
    """Stop and continue the process in turn for so many seconds."""
    until = time.monotonic() + seconds
    with suppress(ProcessLookupError):
        while time.monotonic() < until:
            os.kill(pid, signal.SIGSTOP)
            time.sleep(0.02)
            os.kill(pid, signal.SIGCONT)
            time.sleep(0.005)


def campaign(loads: int, seed: int, level: Level = CPU, shared: Path = NOWHERE) -> Result:
    """Run a campaign until so many loads have brought something, and verdicts have refused as many
    as the level asks for. A level with states takes all of its time.
    """
    with Campaign(level, seed, shared) as made:
        return made.run(
            lambda seen, passed: (
                (
                    seen.loads >= loads
                    and seen.reuse_hits >= level.reuse_hits * loads
                    and seen.pauses >= level.least_pauses
                    and not level.states
                )
                or passed > level.seconds
            )
        )


def caught(control: Control, seen: Outcomes) -> int:
    """How often the campaign saw what this control breaks."""
    return seen.overdue if control == "no bound" else seen.wrong


def run_control(control: Control, seed: int, level: Level = CPU, shared: Path = NOWHERE) -> Result:
    """Run a control until it has gone wrong, and has the level's number of loads; at most for the
    level's time.
    """

    def over(seen: Outcomes, passed: float) -> bool:
        enough = caught(control, seen) > 0 and seen.loads >= level.control_loads
        return enough or passed > level.control_seconds

    with Campaign(level, seed, shared, control) as made:
        return made.run(over)
