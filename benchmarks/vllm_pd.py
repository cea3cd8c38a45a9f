"""Disaggregated prefill on two GPUs: how long until the decode instance's first token, when another instance computes the prompt?

    python3 -m benchmarks.vllm_pd --out FILE [--scale full|tiny] [--rounds N]

A kv_producer computes on GPU 0 and a kv_consumer on GPU 1, through our own connector. Each round has a new prompt for each of: handed
to both at the same instant (`together`); to the consumer once the producer has answered (`in turn`); to the producer with the pool
off (`prefill`); to the consumer with the pool off (`alone`). Time to first token runs from that instant to the token of whoever
answers. What comes out after `together` is compared with what the producer says of the same prompt from vLLM's own prefix cache.

Prompts end 8 tokens after their last whole chunk, fewer than a block: so both compute the same last tokens in a step of the same shape.
Model and instances as in `vllm_ttft`. `--scale tiny` runs the same on the CPU, for the sake of the script.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from .results import Row, row
from .vllm import child
from .vllm.fleet import CPU_ENVIRONMENT, ENVIRONMENT, START_SECONDS, Fleet, port, visible
from .vllm.instances import Spec
from .vllm.latency import copy_engine
from .vllm.process import Child
from .vllm.prompts import Prompts
from .vllm.report import Clock, Report, fraction, recorded
from .vllm.scale import SCALES
from .vllm.settings import Door, arguments
from .vllm.weights import write_model

LENGTH = "16k"
TAIL = 8
NEW_TOKENS = 16
WARM_UP = 2
ALLOWED_MS = 5.0
ALLOWED_COPY = 1.15
SOON = 0.05
"""Seconds until the instant at which instances hand in what they were sent: enough to read it."""
ANSWER_SECONDS = 60.0
WAIT_SECONDS = 20.0
GRACE = 20
OFF = {"load": False, "store": False}
COMES = {"announced": True, "wait_seconds": WAIT_SECONDS, "consume_once": True}
INSTANCES = {"producer": 0, "consumer": 1}
"""Their roles, and the GPU each computes on."""


class Timed(child.Serving):
    """An instance that hands in a request at an instant of the clock that all processes share, and says when its tokens came."""

    _handed = 0.0

    def at(self, when: float, tokens: list[int], count: int, vcache: dict[str, Any]) -> dict[str, Any]:
        """when: of `time.perf_counter`, 0: now. first: when the first token came, by the same clock. vcache: the request's
        `kv_transfer_params` of ours."""
        while time.perf_counter() < when:
            pass
        answer = self.generate(tokens, count, extra={"kv_transfer_params": {"vcache": vcache}})
        return {"tokens": answer["tokens"], "cached": answer["cached"], "first": self._handed + answer["ttft"]}

    def _add(self, *request: Any) -> tuple[str, float]:
        name, self._handed = super()._add(*request)
        return name, self._handed


class Pair(NamedTuple):
    """Both instances, ready, on one pool."""

    fleet: Fleet
    producer: Child
    consumer: Child


@contextmanager
def pair(fleet: Fleet, cache: Path, more: dict[str, str]) -> Iterator[Pair]:
    """Start them beside each other, and end them. more: of vcache's configuration, see `Door`."""
    assert fleet.pool.connected
    model = write_model(fleet.folder / "model", fleet.scale)
    started = time.monotonic()
    with ExitStack() as undo:
        both = {}
        for number, (role, gpu) in enumerate(INSTANCES.items()):
            given = arguments(
                fleet.scale, Spec(variant="vcache", gpu=gpu), model, Door(name="vllm", socket=fleet.socket, more=more)
            )
            given["kv_transfer_config"] |= {"kv_role": f"kv_{role}"}
            if role == "consumer":
                given["kv_transfer_config"]["kv_connector_extra_config"]["pool"] |= {"segment_bytes": 0}
            settings = json.dumps({"arguments": given, "dummy": given.get("load_format") == "dummy"})
            command = [sys.executable, "-m", f"{__package__}.vllm_pd", "--child", settings]
            environment = {**os.environ, **ENVIRONMENT, "VLLM_CACHE_ROOT": str(cache / role)}
            environment |= CPU_ENVIRONMENT if fleet.scale.cpu else {"CUDA_VISIBLE_DEVICES": visible(gpu)}
            environment["VLLM_PORT"] = str(port() + 1500 + 200 * number)
            both[role] = undo.enter_context(Child(role, command, environment, fleet.folder / f"{role}.log"))
        for role, instance in both.items():
            instance.answer(START_SECONDS)
            print(f"  {role} ready after {time.monotonic() - started:.0f} s: {instance.ask('about')}", flush=True)
        yield Pair(fleet, both["producer"], both["consumer"])


# ---- a round


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
    answer = here.consumer.ask("at", ANSWER_SECONDS, when=0, tokens=prompt, count=NEW_TOKENS, vcache=COMES)
    return Taken(answer["first"] - when, answer)


def prefill(here: Pair, prompt: list[int]) -> Taken:
    return _off(here.producer, prompt)


def alone(here: Pair, prompt: list[int]) -> Taken:
    return _off(here.consumer, prompt)


def _off(instance: Child, prompt: list[int]) -> Taken:
    """One instance computes the prompt itself, and the pool has no part in it."""
    when = time.perf_counter() + SOON
    answer = instance.ask("at", ANSWER_SECONDS, when=when, tokens=prompt, count=1, vcache=OFF)
    return Taken(answer["first"] - when, answer)


WAYS: dict[str, Callable[[Pair, list[int]], Taken]] = {
    "together": together,
    "in_turn": in_turn,
    "prefill": prefill,
    "alone": alone,
}


class Samples:
    """What the rounds gave. seconds: by way. full: did all whole chunks come from the pool? equal: the right tokens? left: chunks
    in the pool that `consume_once` should have taken out."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self.full: list[bool] = []
        self.equal: list[bool] = []
        self.left: list[int] = []

    def add(self, here: Pair, prompts: Prompts, length: int, turn: int) -> None:
        """One round, each time beginning with another way."""
        ways = itertools.islice(itertools.cycle(WAYS.items()), turn % len(WAYS), turn % len(WAYS) + len(WAYS))
        for name, way in list(ways):
            prompt = prompts.new(length + TAIL)
            taken = way(here, prompt)
            self.seconds[name].append(taken.seconds)
            if name not in ("together", "in_turn"):
                continue
            self.full.append(taken.answer["cached"] == length)
            right = here.producer.ask("at", ANSWER_SECONDS, when=0, tokens=prompt, count=NEW_TOKENS, vcache=OFF)
            self.equal.append(taken.answer["tokens"] == right["tokens"])
            if not (self.full[-1] and self.equal[-1]):
                same = "equal" if self.equal[-1] else "differ"
                print(f"  {name}: {taken.answer['cached']} of {length} tokens came from the pool, tokens {same}", flush=True)
            self.left.append(here.fleet.chunks())
            if self.left[-1]:
                here.fleet.pool.clear()


def measure(here: Pair, clock: Clock, prompts: Prompts, rounds: int) -> list[Row]:
    """The rows; what there is by then when time runs short, after at least one round."""
    length, samples = here.fleet.scale.lengths[LENGTH], Samples()
    speed = copy_engine(here.fleet)
    for turn in range(-WARM_UP, rounds):
        if turn == 0:
            samples = Samples()
        if turn > 0 and clock.left < 10:
            print(f"  the time is up after {turn} of {rounds} rounds", flush=True)
            break
        clock.check(10)
        samples.add(here, prompts, length, turn)
    return rows(samples, length, length * here.fleet.scale.token_bytes, speed)


def rows(samples: Samples, length: int, nbytes: int, speed: float) -> list[Row]:
    """length: tokens that go through the pool, `nbytes` of KV. speed: the copy engine's, in GB/s."""
    ms = {name: [1e3 * value for value in values] for name, values in samples.seconds.items()}
    computed = statistics.median(ms["prefill"])
    allowed = computed + nbytes / speed / 1e6 * ALLOWED_COPY + ALLOWED_MS
    sum_ = f"prefill {computed:.2f} ms + {nbytes >> 20} MiB / {speed:.0f} GB/s x {ALLOWED_COPY} + {ALLOWED_MS:g} ms"
    prompt = f"a prompt of {length} + {TAIL} tokens"
    against = "reference: the producer's prefill with the pool off"
    answers = f"answers of {NEW_TOKENS} tokens by the consumer"
    return [
        Row("pd_copy_engine", speed, "GB/s", speed, 1.0, 1, 0.0, "the copy engine between the two GPUs in this run"),
        Row("pd_bytes_16k", nbytes / 2**20, "MiB", nbytes / 2**20, 1.0, 1, 0.0, f"KV of the {length} tokens that move"),
        recorded("pd_prefill_ms_16k", "ms", ms["prefill"], computed, f"TTFT of {prompt} at the producer, the pool off"),
        recorded("pd_alone_ms_16k", "ms", ms["alone"], computed, f"TTFT of {prompt} at the consumer, the pool off; {against}"),
        recorded("pd_in_turn_ms_16k", "ms", ms["in_turn"], computed, f"TTFT, the consumer asked after the producer; {against}"),
        recorded("pd_together_ms_16k", "ms", ms["together"], computed, f"TTFT, both asked at the same instant; {against}"),
        row(
            "pd_ttft_16k",
            "ms",
            ms["together"],
            allowed,
            what=f"from handing {prompt} to producer and consumer until the consumer's first token; reference: {sum_}",
            at_most=1.0,
        ),
        fraction("pd_full_hits", samples.full, f"{answers} for which every whole chunk came from the pool"),
        fraction("pd_equal", samples.equal, f"{answers} whose tokens are the producer's from vLLM's own prefix cache"),
        fraction("pd_consumed", [not left for left in samples.left], "requests with consume_once that left no chunk in the pool"),
    ]


# ---- the command


def main(given: Sequence[str] | None = None) -> int:
    """See the module's text. 1 if a row missed its limit."""
    options = _options(given)
    signal.signal(signal.SIGTERM, _end)
    signal.signal(signal.SIGALRM, _end)
    signal.alarm(int(options.seconds) + GRACE)
    scale = SCALES[options.scale]
    clock, report = Clock(options.seconds), Report(options.out, options.commit)
    more = dict(setting.split("=", 1) for setting in options.set)
    folder = options.logs or Path(tempfile.mkdtemp(prefix="vcache-vllm-pd-"))
    with Fleet(scale, folder, options.cache, door="vllm") as fleet, pair(fleet, options.cache, more) as here:
        print(f"logs in {folder}", flush=True)
        report.add(measure(here, clock, Prompts(scale, seed=options.seed), options.rounds))
    signal.alarm(0)
    print(f"{clock.spent:.0f} s", flush=True)
    return 1 if any(each.ok is False for each in report.rows.values()) else 0


def _end(number: int, frame: object) -> NoReturn:
    """A signal becomes an exception, so that children are killed on the way out."""
    sys.exit(128 + number)


def _options(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="vllm_pd", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="result file; one that is there is continued")
    parser.add_argument("--scale", choices=SCALES, default="full")
    parser.add_argument("--rounds", type=int, default=11, help="prompts of each kind (11)")
    parser.add_argument("--seconds", type=float, default=400.0, help="when to stop, whatever is left (400)")
    parser.add_argument("--seed", type=int, default=0, help="other prompts")
    parser.add_argument("--commit", default="", help="the commit measured, where git cannot tell")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="of vcache, such as vcache.pool.max_ctas=32"
    )
    parser.add_argument("--logs", type=Path, help="where logs and settings go; default: a new folder")
    parser.add_argument(
        "--cache", type=Path, default=Path("/tmp/vcache-vllm-cache"), help="vLLM's compiled code, for the next run"
    )
    return parser.parse_args(given)


def _serve(settings: str) -> None:
    """Become an instance. Its answers are `Timed`'s."""
    child.Serving = Timed  # type: ignore[misc]
    sys.argv[1:] = [settings]
    child.main()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        _serve(sys.argv[2])
    sys.exit(main())
