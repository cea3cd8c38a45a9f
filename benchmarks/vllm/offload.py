"""Hits that come out of the offload tier: are they what they should be, and when do they beat computing?

A computes a prompt, and it goes into the pool and below it; then the pool is emptied, as after its eviction, or on another node. What B
says of the prompt can only come from the store: a real Mooncake master and provider on this machine, over loopback TCP.
"""

from __future__ import annotations

import statistics
from collections import defaultdict

from ..results import Row
from . import equality
from .equality import SECONDS, Pair
from .fleet import Fleet
from .prompts import Hit, Prompts
from .report import Clock, recorded

LENGTHS = ("1k", "4k", "16k")
ROUNDS = 5
EAGER = "below_eager"


def equal(fleet: Fleet, clock: Clock, prompts: Prompts) -> list[Row]:
    """`DOOR_equal_below_eager`, as `equality.equal`, and the control that it rests on.

    Eager instances: kernels that each compiles for itself may differ in the last bit, and then what A computed is not what the
    reference has.
    """
    hits = prompts.hits(dict.fromkeys(fleet.scale.few, 3), 5)
    rows = equality.agreeing(fleet, prompts, EAGER)
    return [*rows, *equality.equal(fleet, clock, hits, prompts, EAGER, _only_below, "that only the offload tier has")]


def first_token(fleet: Fleet, clock: Clock, prompts: Prompts) -> list[Row]:
    """`DOOR_below_ms_LENGTH`: time to first token, against computing the prompt."""
    pair, rows = Pair(fleet, "below_"), []
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
