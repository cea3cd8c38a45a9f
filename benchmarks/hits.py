"""Does a request find on another instance exactly what it would find on the owner?

    python3 -m benchmarks.hits --out FILE [--only dense,window,state,local] [--pairs 500]

Real schedulers of vLLM with the connector's half, a real metadata server, and no model: see
`vllm.planning`. An owner computes prompts that begin alike, more than its blocks can hold. Of each
question two answers are compared: how many tokens the owner's own prefix cache finds, and how many
another instance, which has nothing, finds. It needs vLLM, for GPUs or for the CPU."""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from vcache_backend.children import MetadataServer

from .options import Measurement, names_of, parser
from .results import Row
from .vllm.planning import CHUNK, Instance, Place, Tables, full, local, place, state, window

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
    def row(self) -> Row:
        """found ÷ own; right if they are equal for each question, and many find something."""
        _, own, found = (sum(column) for column in zip(*self.pairs, strict=True))
        some = sum(bool(one[1]) for one in self.pairs)
        inside = sum(bool(one[1] % CHUNK) for one in self.pairs)
        what = (
            f"tokens that {len(self.pairs)} questions find in another instance; reference: in the "
            f"owner's own cache; {len(self.wrong)} questions where these differ; {some} find "
            f"something, {inside} of them no multiple of {CHUNK} tokens"
        )
        right = not self.wrong and 4 * some > len(self.pairs)
        case, ratio = f"end_equal_own_{self.kind}", found / own if own else 0.0
        runs = len(self.pairs)
        return Row(case, found, "tokens", own, ratio, runs, 0.0, what, "each equal", right)


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


def main(arguments: Sequence[str] | None = None) -> int:
    """See the module's docstring. 1 if a question had two answers."""
    options = _options(arguments)
    made = Measurement(options)
    with tempfile.TemporaryDirectory(prefix="vcache-hits-") as folder, ExitStack() as undo:
        socket = Path(folder, "vcache.sock")
        undo.enter_context(MetadataServer(socket, made.folder / "server.log"))
        where = undo.enter_context(place(socket, Path(folder)))
        for kind in options.only or KINDS:
            with made.part(kind):
                result = measured(where, kind, options.pairs)
                print("".join(f"  {one}\n" for one in result.wrong[:20]), end="", flush=True)
                made.report.add([result.row])
    return made.end()


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    made = parser("hits", __doc__, 300.0)
    made.add_argument("--only", type=names_of(KINDS), help=f"of {', '.join(KINDS)}")
    made.add_argument("--pairs", type=int, default=500, help="questions for each kind")
    return made.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
