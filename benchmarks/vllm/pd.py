"""Disaggregated prefill: how long does the decode instance's first token take if another instance
computes the prompt?

Through our own connector, with a kv_producer on GPU 0 and a kv_consumer on GPU 1. Each round sends
a new prompt in each of three ways: to both at the same instant (`together`); to the consumer once
the producer has answered (`in_turn`); to the producer with the pool off (`prefill`). Time to first
token counts from the sending to the answering instance's first token. Tokens after `together` are
compared with the producer's own, after a hit in vLLM's own prefix cache.

Prompts end 8 tokens after their last whole chunk, less than a block, so both compute the same last
tokens in a step of the same shape."""

from __future__ import annotations

import itertools
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

from ..processes import Child
from ..results import Clock, Row, fraction, row
from .environment import peer
from .fleet import Fleet
from .latency import TAIL, allowed, copy_engine
from .prompts import Prompts

LENGTH = "16k"
NEW_TOKENS = 16
WARM_UP = 2
ALLOWED_MS = 5.0
SOON = 0.05
"""Seconds until the instant at which both instances submit the request: enough to receive it."""
ANSWER_SECONDS = 60.0
OFF = {"load": False, "store": False}
COMES = {"announced": True, "wait_seconds": 20.0}


class Pair(NamedTuple):
    producer: Child
    consumer: Child


class Taken(NamedTuple):
    """Seconds to the first token, and the answer it belongs to."""

    seconds: float
    answer: dict[str, Any]


def together(here: Pair, prompt: list[int]) -> Taken:
    """Both are asked at the same instant."""
    when = time.perf_counter() + SOON
    here.consumer.send("at", when=when, tokens=prompt, count=NEW_TOKENS, vcache=COMES)
    here.producer.send("at", when=when, tokens=prompt, count=1, vcache={})
    here.producer.answer(ANSWER_SECONDS)
    answer = here.consumer.answer(ANSWER_SECONDS)
    return Taken(answer["first"] - when, answer)


def in_turn(here: Pair, prompt: list[int]) -> Taken:
    """The consumer is asked once the producer has answered."""
    when = time.perf_counter() + SOON
    here.producer.ask("at", ANSWER_SECONDS, when=when, tokens=prompt, count=1, vcache={})
    answer = here.consumer.ask(
        "at", ANSWER_SECONDS, when=0, tokens=prompt, count=NEW_TOKENS, vcache=COMES
    )
    return Taken(answer["first"] - when, answer)


def prefill(here: Pair, prompt: list[int]) -> Taken:
    """The producer computes the prompt itself, without the pool."""
    when = time.perf_counter() + SOON
    answer = here.producer.ask("at", ANSWER_SECONDS, when=when, tokens=prompt, count=1, vcache=OFF)
    return Taken(answer["first"] - when, answer)


WAYS: dict[str, Callable[[Pair, list[int]], Taken]] = {
    "together": together,
    "in_turn": in_turn,
    "prefill": prefill,
}


class Samples:
    """The rounds' results. seconds: by way. full: whether all whole chunks came from the pool.
    equal: whether the tokens are right."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self.full: list[bool] = []
        self.equal: list[bool] = []

    def add(self, fleet: Fleet, here: Pair, prompts: Prompts, length: int, turn: int) -> None:
        """Run one round. Each round begins with another way."""
        ways = itertools.islice(
            itertools.cycle(WAYS.items()), turn % len(WAYS), turn % len(WAYS) + len(WAYS)
        )
        for name, way in list(ways):
            prompt = prompts.new(length + TAIL)
            taken = way(here, prompt)
            self.seconds[name].append(taken.seconds)
            if name == "prefill":
                continue
            self.full.append(taken.answer["cached"] == length)
            right = here.producer.ask(
                "at", ANSWER_SECONDS, when=0, tokens=prompt, count=NEW_TOKENS, vcache=OFF
            )
            self.equal.append(taken.answer["tokens"] == right["tokens"])
            if not (self.full[-1] and self.equal[-1]):
                same = "equal" if self.equal[-1] else "differ"
                print(
                    (
                        f"  {name}: {taken.answer['cached']} of {length} tokens came from the "
                        f"pool, tokens {same}"
                    ),
                    flush=True,
                )
            if not fleet.in_place:
                fleet.pool.clear()


def first_token(fleet: Fleet, clock: Clock, prompts: Prompts, rounds: int) -> list[Row]:
    """The rows of all rounds, or, if time runs short, of those so far, at least one."""
    length, samples = fleet.scale.lengths[LENGTH], Samples()
    here = Pair(fleet.instance("producer"), fleet.instance("consumer"))
    speed = copy_engine(fleet)
    for turn in range(-WARM_UP, rounds):
        if turn == 0:
            samples = Samples()
        if turn > 0 and clock.left < 10:
            print(f"  the time is up after {turn} of {rounds} rounds", flush=True)
            break
        clock.check(10)
        samples.add(fleet, here, prompts, length, turn)
    return rows(
        samples,
        length,
        length * fleet.scale.token_bytes,
        speed,
        "inplace_" if fleet.in_place else "",
    )


def rows(samples: Samples, length: int, nbytes: int, speed: float, prefix: str = "") -> list[Row]:
    """The rows. length, nbytes: tokens that go through the pool, and their bytes. speed: the copy
    engine's, GB/s. prefix: of row names.
    """
    ms = {name: [1e3 * value for value in values] for name, values in samples.seconds.items()}
    computed = statistics.median(ms["prefill"])
    most, sum_ = allowed(computed, nbytes, speed, "prefill", ALLOWED_MS)
    prompt = f"a prompt of {length} + {TAIL} tokens"
    against = "reference: the producer's prefill with the pool off"
    answers = f"answers of {NEW_TOKENS} tokens by the consumer"
    said = (
        f"from handing {prompt} to both at the same instant until the consumer's first "
        f"token; reference: {sum_}"
    )
    whats = {
        "prefill": f"TTFT of {prompt} at the producer, the pool off",
        "in_turn": f"TTFT, the consumer asked after the producer; {against}",
        "together": f"TTFT, both asked at the same instant; {against}",
    }
    name = f"{prefix}pd"
    return [
        row(
            f"{name}_copy_engine",
            "GB/s",
            speed,
            speed,
            what=f"the copy engine from {peer()} in this run",
        ),
        *(
            row(f"{name}_{way}_ms_16k", "ms", ms[way], computed, what=what)
            for way, what in whats.items()
        ),
        row(f"{name}_ttft_16k", "ms", ms["together"], most, what=said, at_most=1.0),
        fraction(
            f"{name}_full_hits",
            samples.full,
            f"{answers} for which every whole chunk came from the producer",
        ),
        fraction(
            f"{name}_equal",
            samples.equal,
            f"{answers} whose tokens are the producer's from vLLM's own prefix cache",
        ),
    ]
