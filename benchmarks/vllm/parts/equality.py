"""Compares answers after a hit with answers after a hit in vLLM's own prefix cache: tokens and
logprobs, bit for bit (see `prove.comparison`), with the controls.

Instance A computes and stores. In steps of the same shape a vLLM without vcache does, the
reference. Instance B on the other GPU has never computed it, so that its KV can only come from the
pool, or from A in place. Its blocks hold other prompts' KV before. A prompt counts as equal only if
B's hit has the right length and every token and logprob is the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import takewhile
from typing import Any

import msgspec

from vcache_backend.children import Child
from vcache_backend.prove.comparison import (
    LOGPROBS,
    OWN,
    SECONDS,
    Comparison,
    Hit,
    alike,
    ask,
    difference,
    said,
    soil,
)
from vcache_backend.prove.model import MASK

from ...results import Row, fraction
from ..fleet import Run
from ..instances import KINDS


class Trio(Comparison):
    """A, B and the reference."""

    def __init__(self, run: Run) -> None:
        self._run = run
        a, b, alone = map(run.instance, ("a", "b", "alone"))
        super().__init__(a, b, alone, run.scale.answer, cuts=not run.kind)

    def compute(self, hit: Hit) -> None:
        for prompt in hit.first:
            self._run.compute(prompt)
            ask(self.reference, prompt, 1)

    def both(self, hit: Hit) -> tuple[dict[str, Any], dict[str, Any]]:
        """Says more of a difference, so that somebody can look for its cause."""
        expected, got = super().both(hit)
        if how := difference(expected, got):
            repeats = said(expected) == said(self.own(hit))
            # A's own hit reads the KV that B has copied.
            copied = said(got) == said(ask(self.writer, hit.then, self.answer))
            more = "" if repeats else "; the reference does not repeat itself"
            more += f"; A's own hit {'is equal' if copied else 'differs, too'}"
            print(f"  {hit.kind}: {how}{more}", flush=True)
        return expected, got


def equal(run: Run, hits: Sequence[Hit] = ()) -> list[Row]:
    """The row over all `hits`, by default the scale's, or over those before the time was up."""
    hits = hits or run.prompts.hits(run.scale.equal)
    scale, trio = run.fleet.scale, Trio(run)
    tokens, longest = scale.kv_bytes // scale.token_bytes, max(scale.lengths.values())
    soil(trio.reader, run.prompts, tokens, longest)
    how, some = trio.differences(takewhile(lambda _: run.clock.left > 10, hits))
    asked = hits[: len(how)]
    wrong = Counter(hit.kind for hit, each in zip(asked, how, strict=True) if each)
    lengths = [len(hit.then) for hit in asked] or [0]
    what = (
        f"{scale.answer} greedy tokens and {LOGPROBS} logprobs each after a hit stored by "
        f"another instance, bit for bit against vLLM's own prefix-cache hit of the same "
        f"length; prompts of {min(lengths)} to {max(lengths)} tokens"
    )
    what += f"; {some} of {len(how)} hit something"
    what += f"; wrong: {dict(wrong)}" if wrong else ""
    early = len(how) < len(hits) and not wrong
    what += f"; the time was up after {len(how)} of {len(hits)} prompts" if early else ""
    good = [*(not each for each in how if each is not None), 2 * some > len(how)]
    row = fraction(run.case("equal"), good, what)
    # Too few do not say that all are equal.
    return [msgspec.structs.replace(row, ok=None) if early else row]


def agreeing(run: Run) -> list[Row]:
    """The control of `equal`: A, B and the reference compute the same bits from the same prompt.

    They would not if each compiled for itself, since compilation times kernels and keeps the
    faster; so they share one's code (`fleet`)."""
    trio, prompts, lengths = Trio(run), run.prompts, run.scale.few
    children = trio.writer, trio.reader, trio.reference
    # Kernels are compiled at their first use, some for each number of tokens, and kept for others:
    # the three begin at different numbers.
    sizes = [prompts.tail, *lengths, *(length + prompts.tail for length in lengths)]
    for turn in range(len(sizes)):
        for number, child in enumerate(children):
            size = sizes[(turn + number * len(sizes) // 3) % len(sizes)]
            child.send("generate", tokens=prompts.new(size), count=2, salt=child.name)
        for child in children:
            child.answer(2 * SECONDS)
    same = [alike(children, prompts.new(length), trio.answer) for length in lengths]
    what = "prompts that three instances compute alike without any cache, bit for bit; "
    return [fraction(run.case("instances_agree"), same, f"{what}lengths {lengths}")]


def sensitive(run: Run) -> list[Row]:
    """The control of the other comparisons: an early token changes the output, and the reference
    repeats itself."""
    alone, few = run.instance("alone"), run.scale.few
    prompts = [run.prompts.whole(length).then for length in few * (1 if run.kind else 2)]
    found = [depends(alone, prompt, run.scale.answer) for prompt in prompts]
    changed, repeated = zip(*found, strict=True)
    what = f"prompts whose logprobs after a prefix-cache hit change with token 0; lengths {few}"
    twice = f"vLLM's own prefix-cache hit twice, bit for bit; lengths {few}"
    return [
        fraction(run.case("first_token_matters"), changed, what),
        fraction(run.case("reference_repeats"), repeated, twice),
    ]


def depends(child: Child, prompt: list[int], count: int) -> tuple[bool, bool]:
    """Whether the answer after a hit changes with the prompt's first token; and whether it is the
    same again. ChildFailed."""
    answers = list[str]()
    for asked in (prompt, [prompt[0] ^ 1, *prompt[1:]]):
        ask(child, asked, 1, extra_args=OWN)
        answers += [said(ask(child, asked, count, extra_args=OWN)) for _ in range(2)]
    return answers[0] != answers[2], answers[0] == answers[1]


def flipped(run: Run) -> list[Row]:
    """Flip bytes of each block of A's KV cache, from which B's answer comes in place: the
    comparison must see it, and must see nothing before and after. Of the plain kind one byte, in
    layer 0; of others some of every page, whichever table it belongs to, and of `Kind.apart`."""
    trio, hit = Trio(run), run.prompts.whole(run.scale.few[-1])
    run.fleet.pool.clear()
    expected, got = trio.both(hit)
    before = difference(expected, got)
    where, many = dict[str, Any](), "bytes"
    if not run.kind:
        # V of a token's first head follows its K.
        where = {"offset": 2 * run.scale.model["head_dim"] + 1, "step": 1 << 30, "layers": 1}
        many = "a byte"
    flips = {"": trio.flips(hit, **where)}
    for ends in KINDS[run.kind].apart:
        flips[f"; of *{ends} alone"] = trio.flips(hit, "flip_layers", ends=ends)
    what = f"{many} of each block in the owner's KV cache exclusive or 0x{MASK:02x}"
    right = not before
    for those, answers in flips.items():
        caught, after = (difference(expected, answer) for answer in answers)
        first = "" if those else f" {before or 'equal'} before,"
        what += f"{those}: {caught or 'equal'};{first} {after or 'equal'} after"
        right &= caught.startswith("differs") and not after
    return [fraction(run.case("flipped_byte_caught"), [right], what)]
