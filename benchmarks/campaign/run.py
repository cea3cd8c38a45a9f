"""Runs a campaign: starts its processes and the mishaps, and collects what the processes report."""

from __future__ import annotations

import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Self

import msgspec

from vcache_backend import config

from ..processes import ChildFailed
from .forked import Forked, Waker, hear
from .levels import CPU, DIED, Level
from .living import Control, Outcomes, Role, Settings
from .memory import CHUNK_TOKENS
from .mishaps import Mishaps
from .node import Node

QUICK = config.ClientConfig(
    connect_seconds=0.5,
    request_seconds=0.5,
    control_seconds=1.0,
    heartbeat_seconds=0.2,
    retry_seconds=0.05,
)
SEGMENTS = 3
"""Devices that lend to the pool; further instances share one with an earlier one."""
PROGRESS_SECONDS = 15.0
MOST_ENDED, MOST_AT_FIRST = 20, 3
"""How many processes may end by themselves before a campaign is given up: in all, and before
anything was loaded or answered.
"""
NOWHERE = Path()


class Result(msgspec.Struct):
    """The result of one run. ended: how many processes ended by themselves or fell silent."""

    seed: int
    outcomes: Outcomes
    mishaps: Counter[str]
    wrong: list[str] = []
    seconds: float = 0.0
    stops: int = 0
    ended: int = 0


class Campaign:
    """All processes of one run; the context manager ends them. One thread, and one for mishaps."""

    def __init__(self, level: Level, seed: int, shared: Path, control: Control = "") -> None:
        self._level, self._shared, self._seed, self._control = level, str(shared), seed, control
        self._starts, self._waker = 0, Waker(str(seed), level.longest_stop)
        with ExitStack() as undo:
            folder = tempfile.TemporaryDirectory(prefix="vcache-campaign-")
            self._folder = Path(undo.enter_context(folder))
            self._node = Node(self._folder / "node", self._folder / "server.log")
            undo.callback(self._node.kill)
            self._node.restart()
            self._here: list[Forked[Settings]] = []
            undo.callback(self._kill_all)
            for role in [role for role, count in level.counts.items() for _ in range(count)]:
                self._here.append(self._start(role, len(self._here)))
            self._mishaps = Mishaps(self._node, self._pids, seed, level.mishaps)
            undo.callback(self._mishaps.end)
            self.result = Result(seed, Outcomes(), self._mishaps.counts)
            self._undo = undo.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def run(self, over: Callable[[Outcomes, float], bool]) -> Result:
        """Run until `over(counts, seconds)` is true. Mishaps begin with the first answer, where
        answers are compared."""
        shown = started = time.monotonic()
        while not over(self.result.outcomes, (now := time.monotonic()) - started):
            self._hear()
            self._waker.look(self._pids())
            if self.result.outcomes.answers or not self._level.answers:
                self._mishaps.start(self._level.pause)
            if self._mishaps.error is not None:
                raise self._mishaps.error
            if now - shown > PROGRESS_SECONDS:
                shown = now
                self._show(now - started)
        self._mishaps.end()
        result = self.result
        result.seconds = round(time.monotonic() - started, 1)
        result.stops = self._waker.stops
        result.ended += self._node.ended
        return result

    def _hear(self) -> None:
        """Collect the reports that have come, and replace the processes that have ended. A process
        whose end was no SIGKILL ended by itself, also if a mishap was about to kill it.
        """
        for number, told in hear(self._here, self._level.silence):
            if told is not None:
                self.result.outcomes.add(told.outcomes)
                for wrong in told.wrong:
                    self.result.wrong.append(f"{wrong}; after {', '.join(self._mishaps.recent)}")
                    print(self.result.wrong[-1], flush=True)
                continue
            instance = self._here[number]
            instance.kill()
            if instance.status >= DIED:
                state = self._level.states[instance.status - DIED]
                self._mishaps.counts[f"died: {state}"] += 1
            elif instance.status != -signal.SIGKILL or instance.pid not in self._mishaps.killed:
                self._has_ended(instance)
            self._here[number] = self._start(instance.settings.role, number)

    def _has_ended(self, instance: Forked[Settings]) -> None:
        """A process ended by itself. Raises ChildFailed if that were too many."""
        result = self.result
        result.ended += 1
        print(instance.tail(), file=sys.stderr, flush=True)
        most = MOST_ENDED if result.outcomes.loads or result.outcomes.answers else MOST_AT_FIRST
        if result.ended > most:
            raise ChildFailed(f"{result.ended} processes ended by themselves")

    def _show(self, seconds: float) -> None:
        seen = self.result.outcomes
        asked = f"{seen.answers:,} answers, " if seen.answers else ""
        said = (
            f"{asked}{seen.loads:,} loads, {seen.reuse_hits:,} refused by their verdicts, "
            f"{seen.waits.total():,} waits, {seen.overdue} overdue, {seen.wrong} wrong, "
            f"{self._mishaps.counts.total()} mishaps"
        )
        print(f"{seconds:5.0f} s: {said}", file=sys.stderr, flush=True)

    # ---- processes

    def _start(self, role: Role, number: int) -> Forked[Settings]:
        """Start an instance with a new name."""
        self._starts += 1
        level = self._level
        pool = {"device": f"host:{number % SEGMENTS}", "segment_bytes": f"{level.lends} B"}
        sections = {"pool": pool, "engine": {"chunk_size": CHUNK_TOKENS}}
        given = config.from_dict(sections | {"server": {"socket": str(self._node.path)}})
        settings = Settings(
            msgspec.structs.replace(given, client=QUICK),
            role,
            seed=f"{self._seed} {self._starts}",
            log=str(self._folder / f"{role}{number}.log"),
            stops=level.stops,
            pauses=level.pauses,
            control=self._control,
            shared=self._shared,
            number=number,
            start=self._starts,
        )
        return Forked(level.life, settings, Path(settings.log))

    def _pids(self, role: str = "") -> list[int]:
        """The pids of the instances of a role, or of all."""
        return [each.pid for each in self._here if role in ("", each.settings.role)]

    def _kill_all(self) -> None:
        for instance in self._here:
            instance.kill()


def campaign(loads: int, seed: int, level: Level = CPU, shared: Path = NOWHERE) -> Result:
    """Run a campaign until so many loads have brought something, and verdicts have refused as many
    as the level asks for. A level with states takes all of its time.
    """

    def over(seen: Outcomes, passed: float) -> bool:
        enough = (
            seen.loads >= loads
            and seen.reuse_hits >= level.reuse_hits * loads
            and seen.pauses >= level.least_pauses
        )
        return passed > level.seconds or (enough and not level.states)

    with Campaign(level, seed, shared) as made:
        return made.run(over)


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
