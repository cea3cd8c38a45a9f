"""What the instances of all levels have in common: their settings, their reports, how they stop
themselves, and the copies that they slow down."""

from __future__ import annotations

import os
import random
import signal
import time
import traceback
from collections import Counter
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

import msgspec

from vcache_backend.config import Config
from vcache_backend.transfer.sources import MemoryPart
from vcache_backend.vram_pool.copies.copier import Completion, Copier, CopyJob, Mark

from .forked import begin

Role = Literal["owner", "reader", "worker", "vllm"]
Control = Literal["", "no comparison", "counted late", "published early"]
REPORT_SECONDS = 0.2


class Settings(msgspec.Struct, frozen=True):
    """stops: share of the steps at which the instance stops itself. pauses: the same of the steps
    between a load's launch and the comparison; 0: as elsewhere. control: the rule of the protocol
    that is broken, see `__main__`; empty: none. shared: a folder that all instances use. number:
    the instance's place among them."""

    config: Config
    role: Role
    seed: str
    log: str
    stops: float
    pauses: float
    control: Control
    shared: str
    number: int


class Outcomes(msgspec.Struct):
    """Counts of events.

    loads: loads that brought something, all of it compared; with whole vLLMs, requests for which
    something was loaded. reuse_hits: loads of which some chunks did not count, since a block or slot
    changed between launch and comparison. raised: calls. wrong: loads, or answers. answers:
    vLLM's, to whole requests. steps: how often a process stopped itself, by the step of the protocol.
    causes: why loads brought less."""

    loads: int = 0
    reuse_hits: int = 0
    raised: int = 0
    wrong: int = 0
    answers: int = 0
    steps: Counter[str] = msgspec.field(default_factory=Counter)
    causes: Counter[str] = msgspec.field(default_factory=Counter)

    def add(self, more: Self) -> None:
        for name in self.__struct_fields__:
            setattr(self, name, getattr(self, name) + getattr(more, name))


class Told(NamedTuple):
    """An instance's report. wrong: a description of each load with a wrong byte."""

    outcomes: Outcomes
    wrong: list[str]


class Living:
    """An instance of a soak, in its own process. One thread.

    over: the instance must no longer be believed; another one takes its place in this process."""

    def __init__(self, settings: Settings, dice: random.Random) -> None:
        self.settings, self.dice, self.over = settings, dice, False
        self.told = Told(Outcomes(), [])
        if settings.control == "no comparison":
            _believe_copies()

    def round(self) -> None:
        """Handle one request."""
        raise NotImplementedError

    def step(self, name: str, often: int = 1) -> None:
        """A step of the protocol, at which the process may stop itself. often: how many times as
        often as elsewhere.
        """
        pauses = self.settings.pauses if name == "copied" else 0.0
        if self.dice.random() < (pauses or often * self.settings.stops):
            stop_self()
            self.told.outcomes.steps[name] += 1

    def loaded_wrong(self, what: str) -> None:
        """A load brought wrong bytes."""
        self.told.outcomes.wrong += 1
        self.told.wrong.append(f"process {os.getpid()}: {what}")

    def close(self) -> None:
        """Release everything, before another instance takes this one's place."""


def stop_self() -> None:
    """Stop this process, as if it were swapped out or in a debugger; the parent wakes it."""
    os.kill(os.getpid(), signal.SIGSTOP)


def live_as(
    kind: Callable[[Settings, random.Random], Living], settings: Settings, pipe: Connection
) -> None:
    """Run instances of `kind`, and report what happened, until the process is killed. A wrong byte
    is reported at once.
    """
    begin(settings.log)
    dice = random.Random(settings.seed)
    instance = kind(settings, dice)
    while True:
        until = time.monotonic() + REPORT_SECONDS
        while time.monotonic() < until and not (instance.told.wrong or instance.over):
            try:
                instance.round()
            except Exception as error:  # noqa: BLE001 - none may come, and the parent counts it
                traceback.print_exc()
                instance.told.outcomes.raised += 1
                where = traceback.extract_tb(error.__traceback__)[-1]
                said = (
                    f"{Path(where.filename).name}:{where.lineno}: {type(error).__name__}: {error}"
                )
                instance.told.outcomes.causes[said[:150]] += 1
        pipe.send(instance.told)
        instance.told = Told(Outcomes(), [])
        if instance.over:
            instance.close()
            instance = kind(settings, dice)


class Slowly:
    """A copier at whose steps the instance may stop itself. It makes a share of its loads block by
    block, in the caller's thread, with pauses of at most `seconds` in all.
    """

    def __init__(self, inner: Copier, instance: Living, share: float, seconds: float) -> None:
        self._inner, self._instance, self._share, self._seconds = inner, instance, share, seconds
        self._kept: list[Completion] = []
        """The completions of the last slow copy; each keeps alive what its kernel reads."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def copy(self, job: CopyJob, after: Mark | None = None) -> Completion:
        """A store stops before the reserved slots are written, and before the commit."""
        instance, rows = self._instance, job.rows
        if job.to_origin:
            instance.step("reserved")
        elif len(rows) > 1 and instance.dice.random() < self._share:
            self._kept = []
            for at in range(len(rows) - 1):
                part = job._replace(rows=rows[at : at + 1])
                self._kept.append(self._inner.copy(part, after))
                instance.step("copying")
                time.sleep(instance.dice.uniform(0, self._seconds / len(rows)))
            job = job._replace(rows=rows[-1:])
        copy = self._inner.copy(job, after)
        instance.step("stored" if job.to_origin else "copied")
        return copy


def _believe_copies() -> None:
    """For a control: count every copy as right, whatever the generations say after it."""
    MemoryPart.settle = _believed(MemoryPart.settle)  # type: ignore[method-assign, assignment]


def _believed(settle: Callable[[Any], tuple[int, str]]) -> Callable[[Any], tuple[int, str]]:
    def settled(part: Any) -> tuple[int, str]:
        settle(part)
        return part.stop - part.first, ""

    return settled
