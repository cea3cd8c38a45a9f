"""Compares answers after a hit with answers after a hit in vLLM's own prefix cache: tokens and
logprobs, bit for bit.

For each prompt, `first` is computed by instance A, which stores it, and in a step of the same shape
by a vLLM without a pool, the reference. Then `then` is asked of the reference, whose own prefix
cache has it, and of instance B on the other GPU, which has never computed it, so that B's KV can
only come from the pool. The reference's hit is as long as the pool's (see `scheduler`), so both
compute the same tokens in steps of the same shapes; 64 greedy tokens follow, one request at a time.
B's KV blocks hold other prompts' bytes before. A prompt counts as equal only if B's hit has the
right length and every token and logprob is the same."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec

from ...processes import Child
from ...results import Clock, OutOfTime, Row, fraction
from ..environment import peer
from ..fleet import Fleet
from ..instances import joined
from ..prompts import Hit, Prompts

LOGPROBS = 5
SECONDS = 60.0
POISON = 0x5A
MASKS = (0x01, 0x40, 0xFF)


def said(answer: dict[str, Any]) -> str:
    """The part of an answer that is compared, as text, so that NaN equals NaN."""
    return json.dumps([answer["tokens"], answer["logprobs"]])


def soil(child: Child, fleet: Fleet, prompts: Prompts, extra: dict[str, Any] | None = None) -> None:
    """Fill every KV block of an instance with the KV of prompts that nobody asks for again. extra:
    see `Serving.generate`.
    """
    scale = fleet.scale
    longest, left = max(scale.lengths.values()), scale.kv_bytes // scale.token_bytes + scale.block
    while left > 0:
        child.ask("generate", SECONDS, tokens=prompts.new(min(longest, left)), count=1, extra=extra)
        left -= longest


def ended(fleet: Fleet) -> dict[str, Any]:
    """`extra_args` for the reference, so that its own hit ends where the pool's does (see
    `scheduler`).
    """
    return {"chunk": fleet.scale.chunk, "whole_blocks": fleet.scale.whole_blocks}


def reference(child: Child, fleet: Fleet, hit: Hit) -> dict[str, Any]:
    """The answer to `then` after a hit in vLLM's own prefix cache, once `first` is computed."""
    asked = {"tokens": hit.then, "count": fleet.scale.answer, "logprobs": LOGPROBS}
    answer: dict[str, Any] = child.ask("generate", SECONDS, **asked, extra=ended(fleet))
    if answer["cached"] != hit.cached:
        has = f"{answer['cached']} tokens where {hit.cached} were due"
        raise RuntimeError(f"the reference's hit has {has} ({hit.kind})")
    return answer


class Pair:
    """Instances A, which stores, and B, which hits, and the reference."""

    def __init__(self, fleet: Fleet, kind: str = "") -> None:
        self.fleet, self._writer = fleet, joined(kind, "a")
        self.a, self.b, self.alone = (
            fleet.instance(joined(kind, who)) for who in ("a", "b", "alone")
        )

    def store(self, hit: Hit) -> None:
        """Have A compute and store `first`, and the reference compute it. Empties the pool first if
        it would have to evict.
        """
        self.fleet.make_room(len(hit.first))
        self.fleet.compute(self._writer, hit.first)
        self.alone.ask("generate", SECONDS, tokens=hit.first, count=1)

    def both(self, hit: Hit) -> tuple[dict[str, Any], dict[str, Any]]:
        """The reference's answer and B's, at the same time on their GPUs."""
        self.b.send("generate", tokens=hit.then, count=self.fleet.scale.answer, logprobs=LOGPROBS)
        try:
            expected = reference(self.alone, self.fleet, hit)
        finally:
            got = self.b.answer(SECONDS)
        return expected, got


def equal(
    fleet: Fleet, clock: Clock, hits: Sequence[Hit], prompts: Prompts, kind: str = ""
) -> list[Row]:
    """The row over all `hits`, or over those before the time was up. kind: of the instances."""
    pair = Pair(fleet, kind)
    soil(pair.b, fleet, prompts)
    wrong: Counter[str] = Counter()
    good: list[bool] = []
    for hit in hits:
        try:
            clock.check(10)
        except OutOfTime:
            break
        pair.store(hit)
        expected, got = pair.both(hit)
        same = said(expected) == said(got) and got["cached"] == hit.cached
        good.append(same)
        if not same:
            wrong[hit.kind] += 1
            print(f"  {hit.kind}: {_difference(expected, got, hit)}", flush=True)
        if len(good) % 20 == 0:
            print(f"  {len(good)} of {len(hits)} prompts, {sum(good)} equal", flush=True)
    kinds = Counter("partial" if "+" in hit.kind else hit.kind for hit in hits[: len(good)])
    what = (
        f"{fleet.scale.answer} greedy tokens and {LOGPROBS} logprobs each after a hit stored by an "
        f"instance on {peer()}, bit for bit against vLLM's own prefix-cache hit of the same "
        f"length; prompts by length: {dict(sorted(kinds.items()))}"
    )
    if wrong:
        what += f"; wrong: {dict(wrong)}"
    row = fraction(joined(fleet.rows, "equal", kind), good, what)
    if len(good) < len(hits) and row.ok:
        # Too few to say that all are equal.
        row = msgspec.structs.replace(
            row, ok=None, what=f"{what}; the time was up after {len(good)} of {len(hits)} prompts"
        )
    return [row]


def _difference(expected: dict[str, Any], got: dict[str, Any], hit: Hit) -> str:
    if got["cached"] != hit.cached:
        return f"{got['cached']} tokens cached where {hit.cached} were due"
    pairs = list(zip(expected["logprobs"], got["logprobs"], strict=True))
    first = next((index for index, (one, other) in enumerate(pairs) if one != other), -1)
    tokens = "equal" if expected["tokens"] == got["tokens"] else "differ"
    return f"differs from step {first} on; tokens {tokens}"


def agreeing(fleet: Fleet, prompts: Prompts, kind: str = "") -> list[Row]:
    """The control of `equal`: A, B and the reference compute the same bits from the same prompt.

    They would not if each compiled for itself, since compilation times kernels and keeps the
    faster; so they share one's code (`fleet`)."""
    pair, scale, same = Pair(fleet, kind), fleet.scale, []
    for length in scale.few:
        # A salt of each one's own keeps them from each other's KV, wherever it lies.
        asked = {"tokens": prompts.new(length), "count": scale.answer, "logprobs": LOGPROBS}
        children = {"a": pair.a, "b": pair.b, "reference": pair.alone}
        pairs = children.items()
        answers = [child.ask("generate", SECONDS, **asked, salt=name) for name, child in pairs]
        cached = any(answer["cached"] for answer in answers)
        same.append(len(set(map(said, answers))) == 1 and not cached)
    what = (
        "prompts that three instances compute alike without any cache, bit for bit; "
        f"lengths {scale.few}"
    )
    return [fraction(joined(fleet.rows, "instances_agree", kind), same, what)]


def sensitive(fleet: Fleet, prompts: Prompts, kind: str = "", times: int = 2) -> list[Row]:
    """The control of the other comparisons: an early token changes the output, and the reference
    repeats itself.
    """
    alone, scale = fleet.instance(joined(kind, "alone")), fleet.scale
    changed, repeated, tokens = [], [], 0
    for length in scale.few * times:
        hit = prompts.whole(length)
        alone.ask("generate", SECONDS, tokens=hit.first, count=1)
        one, again = reference(alone, fleet, hit), reference(alone, fleet, hit)
        altered = [hit.first[0] % (prompts.vocabulary - 4) + 3, *hit.first[1:]]
        alone.ask("generate", SECONDS, tokens=altered, count=1)
        other = reference(alone, fleet, Hit(hit.kind, altered, altered, hit.cached))
        changed.append(said(one) != said(other))
        tokens += one["tokens"] != other["tokens"]
        repeated.append(said(one) == said(again))
    lengths = f"lengths {scale.few}"
    what = (
        f"prompts whose logprobs after a prefix-cache hit change with token 0 ({tokens}: "
        f"the greedy tokens too); {lengths}"
    )
    twice = f"vLLM's own prefix-cache hit twice, bit for bit; {lengths}"
    return [
        fraction(joined(fleet.rows, "first_token_matters", kind), changed, what),
        fraction(joined(fleet.rows, "reference_repeats", kind), repeated, twice),
    ]


def flipped(fleet: Fleet, prompts: Prompts) -> list[Row]:
    """Flip one byte of the pool: the comparison must see it, and must see nothing before and after.

    In place, flip a byte of each block of A's KV cache, from which B's answer comes.
    """
    pair, scale = Pair(fleet), fleet.scale
    flips = pair.a if fleet.in_place else fleet.helper()
    hit = prompts.whole(scale.few[-1] if scale.few[-1] < 2048 else scale.few[2])
    fleet.pool.clear()
    # V of a token's first head follows its K.
    byte: dict[str, Any] = {"offset": 2 * scale.model["head_dim"] + 1}
    if fleet.in_place:
        pair.store(hit)
    else:
        flips.ask("fill", value=POISON)
        pair.store(hit)
        segment, first = flips.ask("written", value=POISON)
        # Slots begin on pages.
        byte = {"id_": segment, "offset": first // 4096 * 4096 + byte["offset"]}
    expected, got = pair.both(hit)

    def verdict(answer: dict[str, Any]) -> str:
        if answer["cached"] != hit.cached:
            return "no hit"
        return "equal" if said(answer) == said(expected) else "different"

    def again(mask: int) -> str:
        flips.ask("flip", **byte, mask=mask)
        pair.b.ask("reset")
        return verdict(
            pair.b.ask("generate", SECONDS, tokens=hit.then, count=scale.answer, logprobs=LOGPROBS)
        )

    before, caught, after = verdict(got), "equal", "equal"
    for mask in MASKS:
        caught, after = again(mask), again(mask)
        if caught != "equal" or after != "equal":
            break
    seen = f"{before} before, {caught} with it, {after} once it is undone"
    owners = "a byte of each block of layer 0 in the owner's KV cache"
    which = owners if fleet.in_place else "a byte of layer 0 in the pool"
    what = f"{which} exclusive or 0x{mask:02x}: {seen}"
    unseen = [f"0x{earlier:02x}" for earlier in MASKS[: MASKS.index(mask)]]
    what += f"; not seen: {', '.join(unseen)}" if unseen else ""
    right = (before, caught, after) == ("equal", "different", "equal")
    return [fraction(f"{fleet.rows}_flipped_byte_caught", [right], what)]


def restart(fleet: Fleet, prompts: Prompts) -> list[Row]:
    """Kill B and start it again: its first request must hit what A stored, its second what B itself
    had stored.
    """
    pair, scale = Pair(fleet), fleet.scale
    fleet.pool.clear()
    theirs, own = prompts.whole(scale.few[1]), prompts.whole(scale.few[2])
    expected = []
    for hit, writer in ((theirs, "a"), (own, "b")):
        fleet.compute(writer, hit.first)
        pair.alone.ask("generate", SECONDS, tokens=hit.first, count=1)
        expected.append(reference(pair.alone, fleet, hit))
    fleet.kill("b")
    started = time.monotonic()
    again = fleet.instance("b")
    seconds = time.monotonic() - started
    good, cached = [], []
    for hit, one in zip((theirs, own), expected, strict=True):
        got = again.ask("generate", SECONDS, tokens=hit.then, count=scale.answer, logprobs=LOGPROBS)
        cached.append(got["cached"])
        good.append(got["cached"] == hit.cached and said(got) == said(one))
    what = (
        f"vLLM killed with SIGKILL, ready again after {seconds:.0f} s, pool kept: the first "
        "request hits what the other instance stored, "
        f"the second what it stored itself; cached {cached} of {[theirs.cached, own.cached]} "
        "tokens, equal to the own prefix cache"
    )
    return [fraction(f"{fleet.rows}_restart_hits", good, what)]
