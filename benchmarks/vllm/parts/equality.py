"""Compares answers after a hit with answers after a hit in vLLM's own prefix cache: tokens and
logprobs, bit for bit.

For each prompt, `first` is computed by instance A, which stores it, and in a step of the same shape
by a vLLM without a pool, the reference. Then `then` is asked of the reference, whose own prefix
cache has it, and of instance B on the other GPU, which has never computed it, so that B's KV can
only come from the pool, or from A in place. Both hits must be as long (see `prompts`), so both
compute the same tokens in steps of the same shapes; greedy tokens follow, one request at a time.
B's KV blocks hold other prompts' bytes before. A prompt counts as equal only if B's hit has the
right length and every token and logprob is the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec

from vcache_backend.children import Child
from vcache_backend.prove.prompts import (
    ANY,
    EXPONENT,
    LOGPROBS,
    MASK,
    SECONDS,
    STEP,
    Hit,
    Prompts,
    alike,
    ask,
    difference,
    said,
)

from ...results import OutOfTime, Row, fraction
from ..fleet import Fleet, Run
from ..instances import KINDS, joined


def reference(child: Child, fleet: Fleet, hit: Hit) -> dict[str, Any]:
    """The answer to `then` after a hit in vLLM's own prefix cache, once `first` is computed."""
    answer = ask(child, hit.then, fleet.scale.answer)
    if hit.cached not in (ANY, cached := answer["cached"]):
        raise RuntimeError(f"the reference hits {cached} tokens where {hit.cached} were due")
    return answer


class Pair:
    """Instances A, which stores, and B, which hits, and the reference."""

    def __init__(self, fleet: Fleet, kind: str = "") -> None:
        self.fleet, self._writer = fleet, joined(kind, "a")
        self.a, self.b, self.alone = (
            fleet.instance(joined(kind, who)) for who in ("a", "b", "alone")
        )

    def soil(self, prompts: Prompts) -> None:
        """Fill every KV block of B with the KV of prompts that nobody asks for again."""
        scale = self.fleet.scale
        longest = max(scale.lengths.values())
        left = scale.kv_bytes // scale.token_bytes + scale.block
        while left > 0:
            self.b.ask("generate", SECONDS, tokens=prompts.new(min(longest, left)), count=1)
            left -= longest

    def store(self, hit: Hit) -> None:
        """Have A compute and store `first`, and the reference compute it. Empties the pool first if
        it would have to evict.
        """
        first = *hit.before, hit.first
        self.fleet.make_room(sum(map(len, first)))
        for prompt in first:
            self.fleet.compute(self._writer, prompt)
            self.alone.ask("generate", SECONDS, tokens=prompt, count=1)

    def both(self, hit: Hit) -> tuple[dict[str, Any], dict[str, Any]]:
        """The reference's answer and B's, at the same time on their GPUs."""
        self.b.send("generate", tokens=hit.then, count=self.fleet.scale.answer, logprobs=LOGPROBS)
        try:
            expected = ask(self.alone, hit.then, self.fleet.scale.answer)
        finally:
            got = self.b.answer(SECONDS)
        if hit.cached not in (ANY, cached := expected["cached"]):
            raise RuntimeError(
                f"the reference's hit has {cached} tokens where {hit.cached} were due"
            )
        return expected, got


def equal(run: Run, hits: Sequence[Hit], kind: str = "") -> list[Row]:
    """The row over all `hits`, or over those before the time was up. kind: of the instances."""
    fleet, clock, prompts, _ = run
    pair, wrong, good, some = Pair(fleet, kind), Counter[str](), list[bool](), 0
    pair.soil(prompts)
    for hit in hits:
        try:
            clock.check(10)
        except OutOfTime:
            break
        pair.store(hit)
        expected, got = pair.both(hit)
        how, some = difference(expected, got), some + bool(expected["cached"])
        good.append(not how)
        if how:
            wrong[hit.kind] += 1
            repeats = said(expected) == said(reference(pair.alone, fleet, hit))
            # A's own hit reads the KV that B has copied.
            copied = said(got) == said(ask(pair.a, hit.then, fleet.scale.answer))
            more = "" if repeats else "; the reference does not repeat itself"
            more += f"; A's own hit {'is equal' if copied else 'differs, too'}"
            print(f"  {hit.kind}: {how}{more}", flush=True)
    lengths = [len(hit.then) for hit in hits[: len(good)]] or [0]
    what = (
        f"{fleet.scale.answer} greedy tokens and {LOGPROBS} logprobs each after a hit stored by "
        f"another instance, bit for bit against vLLM's own prefix-cache hit of the same "
        f"length; prompts of {min(lengths)} to {max(lengths)} tokens"
    )
    what += f"; {some} of {len(good)} hit something"
    what += f"; wrong: {dict(wrong)}" if wrong else ""
    early = len(good) < len(hits) and all(good)
    what += f"; the time was up after {len(good)} of {len(hits)} prompts" if early else ""
    row = fraction(joined(fleet.rows, "equal", kind), [*good, 2 * some > len(good)], what)
    # Too few do not say that all are equal.
    return [msgspec.structs.replace(row, ok=None) if early else row]


def agreeing(run: Run, kind: str = "") -> list[Row]:
    """The control of `equal`: A, B and the reference compute the same bits from the same prompt.

    They would not if each compiled for itself, since compilation times kernels and keeps the
    faster; so they share one's code (`fleet`)."""
    fleet, prompts = run.fleet, run.prompts
    pair, lengths = Pair(fleet, kind), fleet.of(kind).few
    children = pair.a, pair.b, pair.alone
    # Kernels are compiled at their first use: by all three beside each other.
    for child in children:
        child.send("generate", tokens=prompts.new(lengths[-1]), count=2, salt=child.name)
    for child in children:
        child.answer(2 * SECONDS)
    same = [alike(children, prompt, fleet.scale.answer) for prompt in map(prompts.new, lengths)]
    what = (
        "prompts that three instances compute alike without any cache, bit for bit; "
        f"lengths {lengths}"
    )
    return [fraction(joined(fleet.rows, "instances_agree", kind), same, what)]


def sensitive(run: Run, kind: str = "", times: int = 2) -> list[Row]:
    """The control of the other comparisons: an early token changes the output, and the reference
    repeats itself.
    """
    fleet, prompts = run.fleet, run.prompts
    alone, few = fleet.instance(joined(kind, "alone")), fleet.of(kind).few
    changed, repeated = list[bool](), list[bool]()

    def hits(hit: Hit) -> list[dict[str, Any]]:
        alone.ask("generate", SECONDS, tokens=hit.first, count=1)
        return [reference(alone, fleet, hit) for _ in "12"]

    for length in few * times:
        hit = prompts.whole(length)
        if fleet.in_place:
            hit = hit._replace(cached=ANY)
        one, again = hits(hit)
        altered = prompts.altered(hit.first)
        other, _ = hits(Hit(hit.kind, altered, altered, hit.cached))
        changed.append(said(one) != said(other))
        repeated.append(said(one) == said(again))
    what = f"prompts whose logprobs after a prefix-cache hit change with token 0; lengths {few}"
    twice = f"vLLM's own prefix-cache hit twice, bit for bit; lengths {few}"
    return [
        fraction(joined(fleet.rows, "first_token_matters", kind), changed, what),
        fraction(joined(fleet.rows, "reference_repeats", kind), repeated, twice),
    ]


def flipped(run: Run, kind: str = "") -> list[Row]:
    """Flip bytes of each block of A's KV cache, from which B's answer comes in place: the
    comparison must see it, and must see nothing before and after. Of the plain kind one byte, in
    layer 0; of others some of every page, whichever table it belongs to, and of `Kind.apart`.
    """
    fleet, scale, pair = run.fleet, run.fleet.of(kind), Pair(run.fleet, kind)
    hit = run.prompts.whole(scale.few[-1])._replace(cached=ANY)
    fleet.pool.clear()
    pair.store(hit)
    expected, got = pair.both(hit)
    where = {"offset": EXPONENT, "step": STEP}
    if not kind:
        # V of a token's first head follows its K.
        where = {"offset": 2 * scale.model["head_dim"] + 1}

    def again(ends: str = "") -> str:
        if ends:
            pair.a.ask("flip_layers", mask=MASK, ends=ends, **where)
        else:
            pair.a.ask("flip", mask=MASK, **where)
        pair.b.ask("reset")
        return difference(expected, ask(pair.b, hit.then, scale.answer))

    before, caught, after = difference(expected, got), again(), again()
    what = (
        f"{'bytes' if kind else 'a byte'} of each block in the owner's KV cache exclusive or "
        f"0x{MASK:02x}: {caught or 'equal'}; {before or 'equal'} before, {after or 'equal'} after"
    )
    right = caught.startswith("differs") and not before and not after
    for ends in KINDS[kind].apart:
        caught, after = again(ends), again(ends)
        what += f"; of *{ends} alone: {caught or 'equal'}; {after or 'equal'} after"
        right &= caught.startswith("differs") and not after
    return [fraction(joined(fleet.rows, "flipped_byte_caught", kind), [right], what)]
