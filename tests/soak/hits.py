"""Does a request find on another instance exactly what it would find on the owner?

Real schedulers of vLLM with the connector's half, a real metadata server, and no model: see
`scheduling`. An owner computes prompts that begin alike, more than its blocks can hold. Of each
question two answers are compared: how many tokens the owner's own prefix cache finds, and how many
another instance, which has nothing, finds."""

from __future__ import annotations

import random
import time
from contextlib import ExitStack
from typing import Any, NamedTuple

from .scheduling import CHUNK, Instance, Place, Tables, full, local, serving, state, window

INTERVALS = (0, 2048, None)
"""vLLM's `prefix_cache_retention_interval`: it keeps windows and states at prompts' ends, and also
every so many tokens, or at each block."""
KINDS: dict[str, list[Tables]] = {
    "dense": [Tables([full(block)]) for block in (16, 32, 64)],
    "window": [
        Tables([full(), window(128)]),  # gpt-oss
        *(Tables([full(), *[window(512)] * 5], kept) for kept in INTERVALS),  # Gemma 3
        Tables([window(128), full(32)]),  # MiMo V2
        Tables([full(32), window(512), *[window(4, 4)] * 2]),  # Inkling
        Tables([window(128, 64), full(256), window(128, 8), window(8, 4)]),  # DeepSeek V4
        Tables([full(), window(200, 64), window(33)], None),
        Tables([window(96)]),
    ],
    "state": [
        *(Tables([full(32), *[state(32)] * 3], kept) for kept in INTERVALS),  # LFM 2
        Tables([state(64, checkpoints=True), full(64)]),  # Qwen3-Next
        *(Tables([*[state(576, True)] * 2, full(576)], kept) for kept in (0, None)),
        Tables([state(64), full(64), window(128, 64)]),
    ],
    "local": [Tables([full(), local(chunk)]) for chunk in (64, 512)],  # Llama 4
}
"""Models by their block tables."""
LONGEST, SHORTEST = 2600, 20
ROOM = 1.6
"""The owner's blocks: for so many of the longest prompts."""
MOST_KNOWN = 6
"""How many earlier prompts further ones, and questions, begin like."""
Seen = tuple[int, int, int]
"""Of a question: its tokens, and how many of them the owner and the other instance find."""


class Conversation:
    """What is asked of one owner: prompts that begin like earlier ones, and those again."""

    def __init__(self, where: Place, tables: Tables, undo: ExitStack, seed: str) -> None:
        self._choice, self._known = random.Random(seed), list[list[int]]()
        self._edges = sorted({16, CHUNK, *(one.block_size for one in tables.specs)})
        dense = sum(LONGEST // one.block_size for one in tables.specs)
        # Where steps end is where states are.
        steps = {"max_num_batched_tokens": self._choice.choice([256, 1024])}
        self.owner = Instance(where, undo, tables, int(ROOM * dense), steps)
        self.reader = Instance(where, undo, tables)

    def pair(self) -> Seen:
        """The owner computes one or two prompts. A question after it."""
        asked = list[Any]()
        for _ in range(self._choice.choice([1, 1, 2])):
            answer = self._choice.choice([1, 1, 40])
            asked.append(self.owner.add(self._prompt(), answer, load=False))
            # The next one may begin like it.
            self._known.append(list(asked[-1].all_token_ids))
        self.owner.finish(*asked)
        del self._known[: -MOST_KNOWN - len(asked)]
        self._known[-len(asked) :] = [list(one.all_token_ids) for one in asked]
        tokens = self._prompt()
        return len(tokens), self.owner.own(tokens), self.reader.found(tokens)

    def _prompt(self) -> list[int]:
        """Begins like an earlier one, up to any token, and often up to a block's or a chunk's end,
        or one before or after it."""
        choice = self._choice
        tokens = list(choice.choice(self._known[-3:] + self._known)) if self._known else []
        if choice.random() < 0.1:
            tokens = []
        common = choice.randrange(len(tokens) + 1)
        if choice.random() < 0.5:
            edge = choice.choice(self._edges)
            common = max(0, common // edge * edge + choice.choice([-1, 0, 0, 1]))
        if choice.random() < 0.4:
            common = len(tokens)
        tail = choice.choice([0, 1, choice.randrange(64), choice.randrange(LONGEST)])
        tokens = tokens[:common] + self._some(tail)
        tokens = tokens[: LONGEST - choice.randrange(64)]
        return tokens + self._some(max(SHORTEST - len(tokens), 0))

    def _some(self, count: int) -> list[int]:
        return self._choice.choices(range(3, 1000), k=count)


class Result(NamedTuple):
    """Of one kind."""

    kind: str
    pairs: list[Seen]
    wrong: list[str]

    @property
    def found_some(self) -> int:
        """Questions that the owner's own cache has something of."""
        return sum(bool(own) for _, own, _ in self.pairs)

    def __str__(self) -> str:
        inside = sum(bool(own % CHUNK) for _, own, _ in self.pairs)
        return (
            f"{self.kind}: {len(self.pairs)} questions, {self.found_some} find something, {inside} "
            f"of them no multiple of {CHUNK} tokens; two answers: {self.wrong or 'none'}"
        )


def measured(where: Place, kind: str, pairs: int, seed: int = 1) -> Result:
    """So many questions about models of a kind, in equal parts."""
    result, shapes = Result(kind, [], []), KINDS[kind]
    for number, tables in enumerate(shapes):
        with ExitStack() as undo:
            asked = Conversation(where, tables, undo, f"{seed} {kind} {number}")
            for turn in range(pairs // len(shapes) + (number < pairs % len(shapes))):
                tokens, own, found = seen = asked.pair()
                result.pairs.append(seen)
                if own != found:
                    result.wrong.append(
                        f"{kind} {number}, question {turn} of {tokens} tokens: the owner finds "
                        f"{own}, another instance {found}"
                    )
    return result


def main(seconds: float, seed: int) -> int:
    """The level: 500 questions about each kind, while there is time. 1 if one had two answers."""
    end, wrong = time.monotonic() + seconds, list[str]()
    with serving() as where:
        for kind in KINDS:
            if time.monotonic() < end:
                print(result := measured(where, kind, 500, seed), flush=True)
                wrong += result.wrong
    return int(bool(wrong))
