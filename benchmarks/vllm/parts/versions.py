"""Weights that change while two instances share: is any answer of other weights than the instance
has?

The instances are updated one after the other and always get the same prompts, so that chunks of two
versions differ in nothing but the version. The reference is an instance without vcache that gets
the same weights. Its answers after a hit in its own prefix cache count, too: a hit computes in
steps of other lengths."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from ...processes import Child
from ...results import Clock, Row, none
from ..fleet import ANSWER_SECONDS, Fleet, Run

KIND = "versions"
UPDATES, WRONGLY_NAMED = 50, 5
PROMPTS, LATE_PROMPTS, TOKENS = 10, 3, 8
"""Prompts that each instance answers after its update, that the second one answers before it, and
tokens of an answer."""
Said = list[tuple[int, ...]]


def measure(run: Run) -> list[Row]:
    """The rows `weights_wrong`, its control, and `weights_hits`."""
    fleet, clock, source, _ = run
    scale = fleet.of(KIND)
    prompts = [source.new((2 + number % 4) * scale.chunk + 1) for number in range(PROMPTS)]
    instances, first = _Instances(fleet, prompts), UPDATES + 1
    right = instances.updates(clock, range(1, first), lambda step: f"step {step}")
    control = instances.updates(clock, range(first, first + WRONGLY_NAMED), lambda _: "always this")
    rows, answers, hits = fleet.rows, right["answers"], right["hits"]
    what = (
        f"of {answers} answers over {UPDATES} updates of two instances, one after the other, "
        f"{hits} with hits: those that an instance of the same weights does not give"
    )
    answered = f"of {control['answers']} answers over {WRONGLY_NAMED} updates with one name for all"
    seen = f"{control['wrong']} {answered} were wrong: 0 if any was"
    unseen, lacking = int(not control["wrong"]), int(hits < answers // 4)
    return [
        none(f"{rows}_weights_wrong", "answers", right["wrong"], what, answers),
        none(f"{rows}_weights_hits", "lacking", lacking, what),
        none(f"{rows}_weights_wrong_control", "unseen", unseen, seen, control["answers"]),
    ]


class _Instances:
    """The two instances, the reference, and what the reference says of each prompt: computed, and
    after a hit of its own."""

    def __init__(self, fleet: Fleet, prompts: list[list[int]]) -> None:
        self._prompts = prompts
        self._alone, self._a, self._b = (
            fleet.instance(f"{KIND}_{name}") for name in ("alone", "a", "b")
        )
        self._said: list[Said] = []

    def updates(self, clock: Clock, steps: range, name: Callable[[int], str]) -> Counter[str]:
        """Counts of the instances' answers: of all, of those that the reference does not give
        (wrong), and of those with tokens of the pool, or of the other one's KV cache (hits).
        """
        counted = Counter[str]()
        for step in steps:
            clock.check(5)
            before, self._said = self._said, self._reference(step)
            self._update(self._a, step, name(step))
            counted += self._ask(self._b, before[:LATE_PROMPTS])
            counted += self._ask(self._a, self._said)
            self._update(self._b, step, name(step))
            counted += self._ask(self._b, self._said)
        return counted

    def _update(self, instance: Child, step: int, name: str) -> None:
        instance.ask("new_weights", ANSWER_SECONDS, seed=step, version=name)

    def _reference(self, step: int) -> list[Said]:
        self._update(self._alone, step, "")
        return [
            [_answer(self._alone, prompt)[0] for _ in ("computed", "hit")]
            for prompt in self._prompts
        ]

    def _ask(self, instance: Child, right: list[Said]) -> Counter[str]:
        counted = Counter[str]()
        for prompt, said in zip(self._prompts, right, strict=False):
            answer, cached = _answer(instance, prompt)
            counted += Counter(answers=1, wrong=int(answer not in said), hits=int(cached > 0))
        return counted


def _answer(instance: Child, prompt: list[int]) -> tuple[tuple[int, ...], int]:
    said = instance.ask("generate", ANSWER_SECONDS, tokens=prompt, count=TOKENS)
    return tuple(said["tokens"]), said["cached"]
