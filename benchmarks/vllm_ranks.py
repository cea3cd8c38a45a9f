"""Expert and data parallel ranks of one `vllm serve`: are hits of what another rank has computed
right, and how fast are they?

    python3 -m benchmarks.vllm_ranks --out FILE [--shapes v3,oss20b] [--scale full|tiny]

`v3`: six layers of DeepSeek V3's widths with 64 experts, in place. `oss20b`: all of gpt-oss-20b,
through a pool, since it has several block tables. vcache is not told which (`connector.share:
auto`). Weights are dummy ones, each rank has half of the experts, all take part in every step.

The servers of all shapes start together; their ranks do nothing while another shape is measured.
Each shape writes its rows as soon as it has them, and the others go on if it fails. `--scale tiny`
runs the same on the CPU, to check the script; Mixtral is in DeepSeek's place there."""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path

import msgspec

from .options import Measurement, names_of, parser
from .processes import ChildFailed
from .results import Clock, Row, fraction, row
from .serving.client import Answer
from .serving.ranks import LOGPROBS, RANKS, TOKENS, Pair
from .serving.servers import Servers
from .serving.systems import SIZES, Sizes
from .vllm.instances import KINDS
from .vllm.parts.equality import difference
from .vllm.prompts import Hit
from .vllm.weights import write_model

SHAPES = {"v3": "inplace_dp", "oss20b": "vcache_dp"}
"""The system each is shared by."""
COUNTS = {"1k": 6, "4k": 4, "16k": 2}
"""How many hits of each length are compared."""
CONTROLS = 4
"""How many prompts each control has, the first ones."""
LONG, WARM = "16k", 2
ALLOWED = 0.2
"""TTFT of a hit ÷ of computing."""
BESIDE, BESIDE_ROUNDS, ALLOWED_BESIDE = 4, 4, 1.05
"""Prompts that a rank loads while the other one's tokens are timed, and how often; and by how much
they may take longer."""
NEEDED_SECONDS = 50.0
"""What a shape takes once it is up: so long before the end its server has to be."""
LEAST_SECONDS = 15.0
"""With less left nothing more is begun."""


def equal(pair: Pair, clock: Clock) -> list[Row]:
    """Hits of what the other rank has computed against the rank's own hits of the same length, and
    the controls.

    A salt keeps what a rank computes for the reference from the other one."""
    scale, good = pair.scale, list[bool]()
    same, changed, repeated = list[bool](), list[bool](), list[bool]()
    counts = {scale.lengths[name]: RANKS if scale.cpu else many for name, many in COUNTS.items()}
    for number, hit in enumerate(hits := pair.prompts.hits(counts, 0)):
        if clock.left < LEAST_SECONDS:
            break
        reader, owner = number % RANKS, (number + 1) % RANKS
        pair.reset()
        first = pair.ask(reader, hit.first, "own")
        own = pair.ask(reader, hit.then, "own")
        pair.computed(owner, hit.first, "shared")
        got = pair.ask(reader, hit.then, "shared")
        how = difference(own, got, hit) or difference(got, own, hit)
        good.append(not how)
        if how:
            print(f"  {hit.kind}, rank {reader}: {how}", flush=True)
        if number < CONTROLS:
            there = pair.ask(owner, hit.first, "owner's")
            same.append(there == first and not there["cached"])
            repeated.append(pair.ask(reader, hit.then, "own") == own)
            altered = pair.prompts.altered(hit.first)
            pair.computed(owner, altered, "shared")
            changed.append(pair.ask(reader, altered, "shared")["logprobs"] != got["logprobs"])
    if not good:
        raise ChildFailed("there was no time to compare anything")
    kinds = Counter(hit.kind for hit in hits[: len(good)])
    what = (
        f"{TOKENS} greedy tokens and {LOGPROBS} logprobs each after a hit of what the other rank "
        f"of one server has computed, bit for bit against the rank's own prefix-cache hit; prompts "
        f"by length: {dict(sorted(kinds.items()))}"
    )
    rows = {
        "hit_equal": (good, what),
        "ranks_agree": (same, "prompts that both ranks compute alike without any cache"),
        "own_repeats": (repeated, "a rank's own prefix-cache hit twice, bit for bit"),
        "first_token_matters": (changed, "hits whose logprobs change with token 0"),
    }
    return [fraction(f"ep_dp_{name}_{pair.shape}", *each) for name, each in rows.items()]


def first_token(pair: Pair, clock: Clock, rounds: int) -> list[Row]:
    """TTFT of a hit of what the other rank has computed, against computing it."""
    computed, hits, own, whole = list[float](), list[float](), list[float](), list[bool]()
    prompts = [pair.prompts.whole(pair.scale.lengths[LONG]) for _ in range(rounds + WARM)]
    pair.reset()
    for turn, hit in enumerate(prompts):
        if hits and clock.left < LEAST_SECONDS:
            break
        owner = turn % RANKS
        before = pair.servers.shared()
        first = pair.timed(owner, hit.first)
        pair.came(before, hit.first)
        second, third = (pair.timed(1 - owner, hit.then) for _ in "12")
        if turn >= WARM:
            for times, answer in ((computed, first), (hits, second), (own, third)):
                times.append(1e3 * (answer.first - answer.sent))
            whole.append(first.cached == 0 and second.cached == third.cached == hit.cached)
    what = (
        f"TTFT over HTTP of {len(prompts[0].then)} tokens that the other rank of one server has "
        f"computed; reference: computed (in the own prefix cache {statistics.median(own):.1f} ms)"
    )
    most = None if pair.scale.cpu else ALLOWED
    return [
        row(f"ep_dp_ttft_{LONG}_{pair.shape}", "ms", hits, computed, what=what, at_most=most),
        fraction(f"ep_dp_hits_{pair.shape}", whole, "timed prompts that were whole hits"),
    ]


def beside(pair: Pair, clock: Clock) -> list[Row]:
    """The time between tokens of one rank while the other loads one prompt after the other,
    against while that one has them in its own cache.
    """
    loads, own = list[float](), list[float]()
    for turn in range(BESIDE_ROUNDS + 1):
        if loads and clock.left < LEAST_SECONDS:
            break
        pair.reset()
        hits = [pair.prompts.whole(pair.scale.lengths[LONG]) for _ in range(BESIDE)]
        for hit in hits:
            pair.computed(0, hit.first)
        for times in (loads, own):
            gaps = asyncio.run(_gaps(pair, hits))
            # In the first round kernels are compiled.
            times += [1e3 * statistics.mean(gaps)] if turn else []
    what = (
        f"ms between tokens of a request of one rank, while the other loads {BESIDE} prompts of "
        f"{pair.scale.lengths[LONG]} tokens in turn; reference: while it has them itself"
    )
    most = None if pair.scale.cpu else ALLOWED_BESIDE
    return [row(f"ep_dp_beside_{pair.shape}", "ms", loads, own, what=what, at_most=most)]


async def _gaps(pair: Pair, hits: Sequence[Hit]) -> list[float]:
    """The seconds between tokens of rank 0 while rank 1 is asked."""
    running, room = Answer(), pair.scale.max_model_len // 2
    task = asyncio.ensure_future(pair.stream(0, pair.prompts.new(pair.scale.block), room, running))
    while not running.times and not task.done():
        await asyncio.sleep(0.001)
    begun = len(running.times)
    for hit in hits:
        await pair.stream(1, hit.then, 1, Answer())
    times = running.times[begun - 1 :]
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    return [later - earlier for earlier, later in pairwise(times)]


def main(arguments: Sequence[str] | None = None) -> int:
    """See the module's text. 1 if a row missed its limit or a shape failed."""
    options = _options(arguments)
    made, pairs = Measurement(options), list[Pair]()
    clock, report = made.clock, made.report
    with ExitStack() as undo:
        for shape in options.shapes:
            with made.part(shape):
                pairs.append(undo.enter_context(_start(shape, options, made.folder / shape)))
        for number, pair in enumerate(pairs):
            with made.part(pair.shape), pair:
                reserved = NEEDED_SECONDS * (len(pairs) - number)
                took = pair.servers.wait(max(1.0, options.seconds - reserved))
                pair.servers.call("scale_weights")
                print(f"{pair.shape}: up after {took:.0f} s, {clock.spent:.0f} s", flush=True)
                report.add(equal(pair, clock))
                clock.check(LEAST_SECONDS)
                report.add(first_token(pair, clock, options.rounds))
                clock.check(LEAST_SECONDS)
                report.add(beside(pair, clock))
                print(f"{pair.shape}: {pair.servers.counters()}; {clock.spent:.0f} s", flush=True)
    return made.end()


def _start(shape: str, options: argparse.Namespace, folder: Path) -> Pair:
    """The ranks of a shape, which are not up yet."""
    sizes = _sizes(shape, options)
    folder.mkdir(parents=True, exist_ok=True)
    model = write_model(options.cache / f"model_{shape}_{sizes.scale.name}", sizes.scale)
    more = {"connector.share": "auto", **dict(options.set)}
    gpus = list(range(RANKS))
    servers = Servers(SHAPES[shape], sizes, gpus, model, folder, options.cache, more)
    return Pair(shape, list(SHAPES).index(shape), sizes, servers)


def _sizes(shape: str, options: argparse.Namespace) -> Sizes:
    sizes = SIZES[options.scale]
    if options.scale == "full":
        # 80,000 tokens of KV cache, and for gpt-oss 8 GiB of each GPU in the pool.
        sizes = msgspec.structs.replace(sizes, kv_bytes=10 << 30, pool_bytes=22 << 30)
    return msgspec.structs.replace(sizes.of(KINDS[shape]), instances=RANKS)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    made = parser("vllm_ranks", __doc__, 290.0)
    option = made.add_argument
    option("--shapes", type=names_of(SHAPES), default=list(SHAPES), help=f"of {', '.join(SHAPES)}")
    option("--scale", choices=SIZES, default="full")
    option("--rounds", type=int, default=7, help="prompts whose TTFT is taken")
    return made.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
