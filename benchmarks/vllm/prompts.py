"""Prompts that nobody has seen: random tokens from a seed."""

from __future__ import annotations

import random
from typing import NamedTuple

from .scale import Scale


class Hit(NamedTuple):
    """first: what an instance computes and stores; then: what is asked after it, of which `cached`
    tokens are known by then.
    """

    kind: str
    first: list[int]
    then: list[int]
    cached: int


class Prompts:
    """A source of them. Two runs have the same; within one no two share a chunk unless they are
    meant to.

    tail: whole prompts go on for so many tokens behind their last chunk; 0: they have the length
    that was asked for.
    """

    def __init__(self, scale: Scale, seed: int = 0, tail: int = 0) -> None:
        self.seed, self._tail = seed, tail
        self._scale, self._random = scale, random.Random(seed)

    def new(self, length: int) -> list[int]:
        return [self._random.randrange(3, self._scale.vocabulary) for _ in range(length)]

    def altered(self, prompt: list[int]) -> list[int]:
        """The prompt with another first token."""
        return [prompt[0] % (self._scale.vocabulary - 4) + 3, *prompt[1:]]

    def whole(self, length: int) -> Hit:
        """The same prompt again."""
        whole = max(length // self._scale.chunk, 1) * self._scale.chunk
        prompt = self.new(whole + self._tail if self._tail else length)
        return Hit(f"{length}", prompt, prompt, self._scale.hit(len(prompt)))

    def partial(self, index: int) -> Hit:
        """A shared prefix, then something else: of odd lengths, one token past a chunk, short of
        one, at its edge, in a long prompt.
        """
        chunk = self._scale.chunk
        shared = (2 * chunk + 1, 3 * chunk - 1, 2 * chunk, 5 * chunk + chunk // 3, chunk)[index % 5]
        tail = (1, chunk // 2 + 7, 2 * chunk, chunk - 1, 3 * chunk + 5)[index // 5 % 5]
        prefix = self.new(shared)
        first, then = prefix + self.new(tail), prefix + self.new(tail)
        return Hit(f"{shared}+{tail}", first, then, shared - shared % chunk)

    def hits(self, whole: dict[int, int], partial: int) -> list[Hit]:
        """So many of each length and so many partial ones, mixed: a run that ends early has some of
        each.
        """
        hits = [self.partial(index) for index in range(partial)]
        hits += [self.whole(length) for length, count in whole.items() for _ in range(count)]
        self._random.shuffle(hits)
        return hits
