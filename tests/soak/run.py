"""Runs a level: starts its processes and the mishaps, and collects what the processes report."""

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
from vcache_backend.children import ChildFailed

from .forked import Forked, Waker, hear
from .levels import INPLACE, Level
from .living import Control, Outcomes, Role, Settings
from .memory import CHUNK_TOKENS
from .mishaps import Mishaps, server

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
"""How many processes may end by themselves before a level is given up: in all, and before anything
was loaded or answered.
"""
NOWHERE = Path()


class Result(msgspec.Struct):
    """The result of one run. ended: how many processes ended by themselves or fell silent. before:
    loads that were reported before the first mishap, which prove nothing."""

    seed: int
    outcomes: Outcomes
    mishaps: Counter[str]
    wrong: list[str] = []
    seconds: float = 0.0
    ended: int = 0
    before: int = 0


class Soak:
    """All processes of one run; the context manager ends them. One thread, and one for mishaps."""

    def __init__(self, level: Level, seed: int, shared: Path, control: Control = "") -> None:
        self._level, self._shared, self._seed, self._control = level, str(shared), seed, control
        self._starts, self._waker = 0, Waker(str(seed), level.longest_stop)
        with ExitStack() as undo:
            self._folder = Path(
                undo.enter_context(tempfile.TemporaryDirectory(prefix="vcache-soak-"))
            )
            self._server = undo.enter_context(server(self._folder))
            self._here: list[Forked[Settings]] = []
            undo.callback(self._kill_all)
            for role in [role for role, count in level.counts.items() for _ in range(count)]:
                self._here.append(self._start(role, len(self._here)))
            self._mishaps = Mishaps(self._server, self._pids, seed, level.mishaps)
            undo.callback(self._mishaps.end)
            self.result = Result(seed, Outcomes(), self._mishaps.counts)
            self._undo = undo.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def run(self, over: Callable[[Result, float], bool]) -> Result:
        """Run until `over(result, seconds)` is true. Mishaps begin with the first load or answer."""
        shown = started = time.monotonic()
        while not over(self.result, (now := time.monotonic()) - started):
            self._hear()
            self._waker.look(self._pids())
            seen = self.result.outcomes
            if done := seen.loads + seen.answers:
                self._mishaps.done = done
                self._mishaps.start(self._level.pause)
            if not self._mishaps.counts:
                self.result.before = seen.loads
            self._mishaps.look()
            if now - shown > PROGRESS_SECONDS:
                shown = now
                print(f"{now - started:5.0f} s: {self.result.outcomes}", file=sys.stderr)
        self._mishaps.end()
        self.result.seconds = round(time.monotonic() - started, 1)
        self.result.ended += self._mishaps.ended
        return self.result

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
            if instance.status != -signal.SIGKILL or instance.pid not in self._mishaps.killed:
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

    def _start(self, role: Role, number: int) -> Forked[Settings]:
        """Start an instance with a new name."""
        self._starts += 1
        level = self._level
        pool = {"device": f"host:{number % SEGMENTS}", "segment_bytes": f"{level.lends} B"}
        sections = {"pool": pool, "engine": {"chunk_size": CHUNK_TOKENS}}
        given = config.from_dict(sections | {"server": {"socket": str(self._server.path)}})
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
        )
        return Forked(level.life, settings, Path(settings.log))

    def _pids(self, role: str = "") -> list[int]:
        """The pids of the instances of a role, or of all."""
        return [each.pid for each in self._here if role in ("", each.settings.role)]

    def _kill_all(self) -> None:
        for instance in self._here:
            instance.kill()


def run(seed: int, level: Level = INPLACE, shared: Path = NOWHERE) -> Result:
    """Run a level until, since the first mishap, so many loads have brought something, and as many
    were refused as it asks for.
    """

    def over(result: Result, passed: float) -> bool:
        return passed > level.seconds or not _too_few(result, level)

    with Soak(level, seed, shared) as made:
        return made.run(over)


def run_control(
    control: Control, seed: int, level: Level = INPLACE, shared: Path = NOWHERE
) -> Result:
    """Run a control until what it breaks was seen; at most for the level's time."""
    with Soak(level, seed, shared, control) as made:
        return made.run(
            lambda seen, for_: bool(seen.outcomes.wrong) or for_ > level.control_seconds
        )


def faults(result: Result, level: Level) -> list[str]:
    """What was wrong, and what happened too seldom to prove anything; empty: neither."""
    seen = result.outcomes
    bad = {
        "loads or answers were wrong": seen.wrong,
        "processes ended by themselves": result.ended,
        "calls raised": seen.raised,
    }
    found = [f"{count} {what}" for what, count in bad.items() if count] + _too_few(result, level)
    return found + [f"not once {what}" for what in level.mishaps if not result.mishaps[what]]


def _too_few(result: Result, level: Level) -> list[str]:
    seen, refused = result.outcomes, level.reuse_hits * level.loads
    loads = seen.loads - result.before
    few = [f"{loads} loads of {level.loads}"] if loads < level.loads else []
    return few + [f"{seen.reuse_hits} refused of {refused:g}"] * (seen.reuse_hits < refused)
