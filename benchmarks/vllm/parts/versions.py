"""Weights that change while two instances share: is any answer of other weights than the instance
has?

The instances are updated one after the other and always get the same prompts, so that chunks of two
versions differ in nothing but the version. The reference is an instance without vcache that gets
the same weights. Its answers after a hit in its own prefix cache count, too: a hit computes in
steps of other lengths."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from ...processes import Child
from ...results import Clock, Row, none
from ..fleet import ANSWER_SECONDS, Fleet
from ..prompts import Prompts

KIND = "versions"
UPDATES, WRONGLY_NAMED = 50, 5
PROMPTS, LATE_PROMPTS, TOKENS = 10, 3, 8
"""Prompts that each instance answers after its update, that the second one answers before it, and
tokens of an answer."""
Said = list[tuple[int, ...]]


class Counted(NamedTuple):
    """answers: of instances that share. wrong: those that the reference does not give. hits: those
    with tokens of the pool, or of the other one's KV cache."""

    answers: int = 0
    wrong: int = 0
    hits: int = 0

    def plus(self, others: Iterable[Counted]) -> Counted:
        return Counted(*map(sum, zip(self, *others, strict=True)))


def measure(fleet: Fleet, clock: Clock, source: Prompts) -> list[Row]:
    """The rows `weights_wrong`, its control, and `weights_hits`."""
    scale = fleet.of(KIND)
    prompts = [source.new((2 + number % 4) * scale.chunk + 1) for number in range(PROMPTS)]
    run = _Run(fleet, prompts)
    right = run.updates(clock, range(1, UPDATES + 1), lambda step: f"step {step}")
    first = UPDATES + 1
    control = run.updates(clock, range(first, first + WRONGLY_NAMED), lambda _: "always this")
    rows = fleet.rows
    what = (
        f"of {right.answers} answers over {UPDATES} updates of two instances, one after the other, "
        f"{right.hits} with hits: those that an instance of the same weights does not give"
    )
    of = f"of {control.answers} answers over {WRONGLY_NAMED} updates with one name for all"
    unseen, seen = int(not control.wrong), f"{control.wrong} {of} were wrong: 0 if any was"
    return [
        none(f"{rows}_weights_wrong", "answers", right.wrong, what, right.answers),
        none(f"{rows}_weights_hits", "lacking", int(right.hits < right.answers // 4), what),
        none(f"{rows}_weights_wrong_control", "unseen", unseen, seen, control.answers),
    ]


class _Run:
    """The two instances, the reference, and what the reference says of each prompt: computed, and
    after a hit of its own."""

    def __init__(self, fleet: Fleet, prompts: list[list[int]]) -> None:
        self._prompts = prompts
        self._alone, self._a, self._b = (
            fleet.instance(f"{KIND}_{name}") for name in ("alone", "a", "b")
        )
        self._said: list[Said] = []

    def updates(self, clock: Clock, steps: range, name: Callable[[int], str]) -> Counted:
        counted = Counted()
        for step in steps:
            clock.check(5)
            called, before, now = name(step), self._said, self._reference(step)
            self._update(self._a, step, called)
            late = self._ask(self._b, before[:LATE_PROMPTS])
            first = self._ask(self._a, now)
            self._update(self._b, step, called)
            counted = counted.plus([late, first, self._ask(self._b, now)])
            self._said = now
        return counted

    def _update(self, instance: Child, step: int, name: str) -> None:
        instance.ask("new_weights", ANSWER_SECONDS, seed=step, version=name)

    def _reference(self, step: int) -> list[Said]:
        self._alone.ask("new_weights", ANSWER_SECONDS, seed=step, version="")
        return [
            [self._answer(self._alone, prompt)[0] for _ in ("computed", "hit")]
            for prompt in self._prompts
        ]

    def _ask(self, instance: Child, right: list[Said]) -> Counted:
        counted = Counted()
        for prompt, said in zip(self._prompts, right, strict=False):
            answer, cached = self._answer(instance, prompt)
            counted = counted.plus([Counted(1, answer not in said, cached > 0)])
        return counted

    def _answer(self, instance: Child, prompt: list[int]) -> tuple[tuple[int, ...], int]:
        said = instance.ask("generate", ANSWER_SECONDS, tokens=prompt, count=TOKENS)
        return tuple(said["tokens"]), said["cached"]
