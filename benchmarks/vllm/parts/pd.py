"""Disaggregated prefill: how long does the decode instance's first token take if another instance
computes the prompt?

Through our own connector, with a kv_producer on GPU 0 and a kv_consumer on GPU 1. Each round sends
a new prompt to both at the same instant, and another one to the producer with the pool off. Time to
first token counts from the sending to the answering instance's first token. The consumer's tokens
are compared with the producer's own, after a hit in vLLM's own prefix cache.

Prompts end 8 tokens after their last whole chunk, less than a block, so both compute the same last
tokens in a step of the same shape."""

from __future__ import annotations

import statistics
import time
from typing import Any, NamedTuple

from ...processes import Child
from ...results import Clock, Row, fraction, row
from ..environment import peer
from ..fleet import Fleet
from ..prompts import Prompts
from .latency import TAIL, allowed, copy_engine

LENGTH = "16k"
NEW_TOKENS = 16
WARM_UP = 2
ALLOWED_MS = 5.0
SOON = 0.05
"""Seconds until the instant at which both instances submit the request: enough to receive it."""
ANSWER_SECONDS = 60.0
OFF = {"load": False, "store": False}
COMES = {"announced": True, "wait_seconds": 20.0}


class Round(NamedTuple):
    """Milliseconds to the first token, both asked at once, and with the pool off. full: all whole
    chunks came from the producer. equal: the tokens are right.
    """

    together: float
    alone: float
    full: bool
    equal: bool


def _round(fleet: Fleet, producer: Child, consumer: Child, prompts: Prompts) -> Round:
    length = fleet.scale.lengths[LENGTH]
    prompt, when = prompts.new(length + TAIL), time.perf_counter() + SOON
    consumer.send("at", when=when, tokens=prompt, count=NEW_TOKENS, vcache=COMES)
    producer.send("at", when=when, tokens=prompt, count=1, vcache={})
    producer.answer(ANSWER_SECONDS)
    answer = consumer.answer(ANSWER_SECONDS)

    def by_producer(tokens: list[int], count: int, at: float) -> dict[str, Any]:
        said: dict[str, Any] = producer.ask(
            "at", ANSWER_SECONDS, when=at, tokens=tokens, count=count, vcache=OFF
        )
        return said

    right = by_producer(prompt, NEW_TOKENS, 0)
    full, equal = answer["cached"] == length, answer["tokens"] == right["tokens"]
    if not (full and equal):
        same = "equal" if equal else "differ"
        print(f"  {answer['cached']} of {length} tokens were read, tokens {same}", flush=True)
    if not fleet.in_place:
        fleet.pool.clear()
    begun = time.perf_counter() + SOON
    alone = by_producer(prompts.new(length + TAIL), 1, begun)
    return Round(1e3 * (answer["first"] - when), 1e3 * (alone["first"] - begun), full, equal)


def first_token(fleet: Fleet, clock: Clock, prompts: Prompts, rounds: int) -> list[Row]:
    """The rows of all rounds, or, if time runs short, of those so far, at least one."""
    producer, consumer = fleet.instance("producer"), fleet.instance("consumer")
    speed, made = copy_engine(fleet), list[Round]()
    for turn in range(-WARM_UP, rounds):
        if turn > 0 and clock.left < 10:
            print(f"  the time is up after {turn} of {rounds} rounds", flush=True)
            break
        clock.check(10)
        each = _round(fleet, producer, consumer, prompts)
        made += [each] if turn >= 0 else []
    length = fleet.scale.lengths[LENGTH]
    computed, together = [each.alone for each in made], [each.together for each in made]
    floor = statistics.median(computed)
    most, sum_ = allowed(floor, length * fleet.scale.token_bytes, speed, "prefill", ALLOWED_MS)
    prompt = f"a prompt of {length} + {TAIL} tokens"
    engine = f"the copy engine from {peer()} in this run"
    off = f"TTFT of {prompt} at the producer, the pool off"
    both = f"TTFT at the consumer, {prompt} handed to both at the same instant; reference: {sum_}"
    answers = f"answers of {NEW_TOKENS} tokens by the consumer"
    full = f"{answers} for which every whole chunk came from the producer"
    equal = f"{answers} whose tokens are the producer's from vLLM's own prefix cache"
    name = f"{'inplace_' if fleet.in_place else ''}pd"
    return [
        row(f"{name}_copy_engine", "GB/s", speed, speed, what=engine),
        row(f"{name}_prefill_ms_16k", "ms", computed, floor, what=off),
        row(f"{name}_ttft_16k", "ms", together, most, what=both, at_most=1.0),
        fraction(f"{name}_full_hits", [each.full for each in made], full),
        fraction(f"{name}_equal", [each.equal for each in made], equal),
    ]
