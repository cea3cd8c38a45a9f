"""Hits that come out of the store below the pool: are they what they should be, and when do they beat computing?

A computes a prompt, and it goes into the pool and below it; then the pool is emptied, as after its eviction, or on another node. What B
says of the prompt can only come from the store: a real Mooncake master and provider on this machine, over loopback TCP.
"""

from __future__ import annotations

import statistics
from collections import defaultdict

from ..results import Row
from .equality import LOGPROBS, SECONDS, Pair, difference, said, soil
from .fleet import Fleet
from .prompts import Hit, Prompts
from .report import Clock, OutOfTime, fraction, recorded

LENGTHS = ("1k", "4k", "16k")
ROUNDS = 5


def equal(fleet: Fleet, clock: Clock, prompts: Prompts) -> list[Row]:
    """`DOOR_below_equal`: tokens and logprobs bit for bit, as in `equality`; and what that rests on.

    Eager instances: kernels that each compiles for itself may differ in the last bit, and then what A computed is not what the
    reference has.
    """
    pair = Pair(fleet, "below_eager_")
    soil(pair.b, fleet, prompts)
    return [*_agreeing(pair, prompts), *_equal(pair, clock, prompts)]


def first_token(fleet: Fleet, clock: Clock, prompts: Prompts) -> list[Row]:
    """`DOOR_below_ms_LENGTH`: time to first token, against computing the prompt."""
    return _first_token(Pair(fleet, "below_"), clock, prompts)


def _agreeing(pair: Pair, prompts: Prompts) -> list[Row]:
    """All three compute alike what nobody has: a salt of each one's own keeps them from hits."""
    scale, same = pair.fleet.scale, []
    for length in scale.few:
        asked = {"tokens": prompts.new(length), "count": scale.answer, "logprobs": LOGPROBS}
        children = {"a": pair.a, "b": pair.b, "reference": pair.alone}
        answers = [child.ask("generate", SECONDS, **asked, salt=name) for name, child in children.items()]
        same.append(len({said(answer) for answer in answers}) == 1 and not any(answer["cached"] for answer in answers))
    what = f"prompts of {scale.few} tokens that three instances compute alike without any cache, bit for bit"
    return [fraction(f"{pair.fleet.door}_below_instances_agree", same, what)]


def _equal(pair: Pair, clock: Clock, prompts: Prompts) -> list[Row]:
    fleet, good = pair.fleet, []
    for hit in prompts.hits(dict.fromkeys(fleet.scale.few, 3), 5):
        try:
            clock.check(10)
        except OutOfTime:
            break
        _only_below(pair, hit)
        expected, got = pair.both(hit)
        good.append(said(expected) == said(got) and got["cached"] == hit.cached)
        if not good[-1]:
            print(f"  {hit.kind}: {difference(expected, got, hit)}", flush=True)
    what = (
        f"prompts of {fleet.scale.few} tokens and partial ones, hits that only the store has: {fleet.scale.answer} greedy tokens and their "
        "logprobs bit for bit as after vLLM's own prefix-cache hit of the same length"
    )
    return [fraction(f"{fleet.door}_below_equal", good, what)]


def _first_token(pair: Pair, clock: Clock, prompts: Prompts) -> list[Row]:
    fleet, rows = pair.fleet, []
    lengths = {name: fleet.scale.lengths[name] for name in LENGTHS}
    samples: dict[tuple[str, str], list[float]] = defaultdict(list)
    for turn in range(ROUNDS + 1):
        if turn > 1 and clock.left < 25:
            break
        for name, length in lengths.items():
            hit = prompts.whole(length)
            computed = pair.alone.ask("generate", SECONDS, tokens=hit.then, count=1)["ttft"]
            _only_below(pair, hit)
            answer = pair.b.ask("generate", SECONDS, tokens=hit.then, count=1)
            # The first round connects, and compiles.
            if turn and answer["cached"] >= fleet.scale.hit(length):
                samples[name, "below"].append(answer["ttft"] * 1e3)
                samples[name, "computed"].append(computed * 1e3)
    for name, length in lengths.items():
        if held := samples[name, "below"]:
            nbytes = length * fleet.scale.token_bytes
            speed = nbytes / statistics.median(held) / 1e6
            what = f"TTFT of {length} tokens that only the store has, {nbytes >> 20} MiB: {speed:.2f} GB/s; reference: computing them"
            rows.append(recorded(f"{fleet.door}_below_ms_{name}", "ms", held, statistics.median(samples[name, "computed"]), what))
    return rows


def _only_below(pair: Pair, hit: Hit) -> None:
    """Let A and the reference compute `first`, and the store alone have it."""
    fleet = pair.fleet
    due = fleet.depot.objects() + len(hit.first) // fleet.scale.chunk
    pair.store(hit)
    if not fleet.below(due):
        print(f"  {hit.kind}: the store holds {fleet.depot.objects()} objects where {due} were due", flush=True)
    fleet.pool.clear()
