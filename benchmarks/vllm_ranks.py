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
import json
import signal
import statistics
import sys
import tempfile
import traceback
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from .options import end_in_time, names_of, parser
from .processes import HOST, ChildFailed, until
from .results import Clock, Report, Row, fraction, row
from .serving.client import Answer, complete
from .serving.servers import Servers
from .serving.systems import MODEL, SIZES, Sizes
from .vllm.instances import KINDS
from .vllm.parts.groups import Ended
from .vllm.prompts import Hit
from .vllm.weights import write_model

SHAPES = {"v3": "inplace_dp", "oss20b": "vcache_dp"}
"""The system each is shared by."""
RANKS = 2
COUNTS = {"1k": 6, "4k": 4, "16k": 2}
"""How many hits of each length are compared."""
CONTROLS = 4
"""How many prompts each control has, the first ones."""
LONG, WARM = "16k", 2
ALLOWED = 0.2
"""TTFT of a hit ÷ of computing."""
TOKENS, LOGPROBS = 32, 5
ANSWER_SECONDS, SHARED_SECONDS = 60.0, 5.0
NEEDED_SECONDS = 50.0
"""What a shape takes once it is up: so long before the end its server has to be."""
LEAST_SECONDS = 15.0
"""With less left nothing more is begun."""


class Said(NamedTuple):
    """An answer. steps: of each token the log probabilities, as the server writes them."""

    tokens: list[int]
    steps: list[dict[str, float]]
    cached: int


class Pair:
    """The ranks of one server."""

    def __init__(self, shape: str, sizes: Sizes, servers: Servers) -> None:
        self.shape, self.scale, self.servers = shape, sizes.scale, servers
        self.prompts = Ended(
            msgspec.structs.replace(sizes.scale, whole_blocks=True), seed=list(SHAPES).index(shape)
        )

    def ask(self, rank: int, tokens: list[int], salt: str, count: int = TOKENS) -> Said:
        """Have a rank answer. salt: requests with another one, or none, share nothing with it."""
        asked = {
            "model": MODEL,
            "prompt": tokens,
            "max_tokens": count,
            "temperature": 0,
            "ignore_eos": True,
            **({"cache_salt": salt} if salt else {}),
            "logprobs": LOGPROBS,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
        }
        headers = {"Content-Type": "application/json", "X-data-parallel-rank": str(rank)}
        url = f"http://{HOST}:{self.servers.ports[0]}/v1/completions"
        request = urllib.request.Request(url, json.dumps(asked).encode(), headers)
        try:
            with urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as reply:
                answer: dict[str, Any] = json.load(reply)
        except urllib.error.HTTPError as error:
            said = error.read(2000).decode(errors="replace")
            raise ChildFailed(f"rank {rank}: {error}: {said}") from error
        (choice,) = answer["choices"]
        details = answer["usage"]["prompt_tokens_details"] or {}
        steps = choice["logprobs"]["top_logprobs"]
        return Said(choice["token_ids"], steps, details.get("cached_tokens") or 0)

    def timed(self, rank: int, tokens: list[int]) -> Answer:
        """Have a rank answer with one token, and take the time until it comes."""
        body = {"model": MODEL, "prompt": tokens, "max_tokens": 1, "temperature": 0}
        body |= {"ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
        answer = Answer()
        asked = complete(self.servers.ports[0], msgspec.json.encode(body), answer, rank)
        asyncio.run(asyncio.wait_for(asked, ANSWER_SECONDS))
        return answer

    def reset(self) -> None:
        """Empty all caches. Through a pool a reset is over after a rank's next step; and a rank
        shares nothing before its first one, in which its worker describes itself.
        """
        self.servers.reset()
        for rank in (*range(RANKS), *range(RANKS)):
            self.ask(rank, self.prompts.new(self.scale.block), "", 1)

    def came(self, before: int, tokens: list[int]) -> None:
        """Wait until the chunks of a prompt that a rank has just computed can be read by the other.
        before: chunks that could be by then. ChildFailed if no further one can be.
        """
        due = before + len(tokens) // self.scale.chunk
        if not until(lambda: self.servers.shared() >= due, SHARED_SECONDS):
            shared = self.servers.shared()
            said = f"{shared} chunks can be read where {due} were due; {self.servers.said()}"
            if shared <= before:
                raise ChildFailed(said)
            print(f"  {said}", flush=True)

    def computed(self, rank: int, tokens: list[int], salt: str) -> None:
        """Have a rank compute a prompt that the other can read then."""
        before = self.servers.shared()
        self.ask(rank, tokens, salt, 1)
        self.came(before, tokens)

    def rows(self, name: str, good: Sequence[bool], what: str) -> list[Row]:
        return [fraction(f"ep_dp_{name}_{self.shape}", good, what)]


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
        good.append(own == got and got.cached == hit.cached)
        if not good[-1]:
            print(f"  {hit.kind}, rank {reader}: {_difference(own, got, hit)}", flush=True)
        if number < CONTROLS:
            there = pair.ask(owner, hit.first, "owner's")
            same.append(there == first and not there.cached)
            repeated.append(pair.ask(reader, hit.then, "own") == own)
            altered = [hit.first[0] % (pair.prompts.vocabulary - 4) + 3, *hit.first[1:]]
            pair.computed(owner, altered, "shared")
            changed.append(pair.ask(reader, altered, "shared").steps != got.steps)
    if not good:
        raise ChildFailed("there was no time to compare anything")
    kinds = Counter(hit.kind for hit in hits[: len(good)])
    what = (
        f"{TOKENS} greedy tokens and {LOGPROBS} logprobs each after a hit of what the other rank "
        f"of one server has computed, bit for bit against the rank's own prefix-cache hit; prompts "
        f"by length: {dict(sorted(kinds.items()))}"
    )
    return [
        *pair.rows("hit_equal", good, what),
        *pair.rows("ranks_agree", same, "prompts that both ranks compute alike without any cache"),
        *pair.rows("own_repeats", repeated, "a rank's own prefix-cache hit twice, bit for bit"),
        *pair.rows("first_token_matters", changed, "hits whose logprobs change with token 0"),
    ]


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
        *pair.rows("hits", whole, "timed prompts that were whole hits"),
    ]


def _difference(own: Said, got: Said, hit: Hit) -> str:
    if (own.cached, got.cached) != (hit.cached, hit.cached):
        return f"{got.cached} tokens cached, {own.cached} by itself, where {hit.cached} were due"
    pairs = enumerate(zip(own.steps, got.steps, strict=True))
    first = next((number for number, (one, other) in pairs if one != other), -1)
    tokens = "equal" if own.tokens == got.tokens else "differ"
    return f"differs from step {first} on; tokens {tokens}"


def main(arguments: Sequence[str] | None = None) -> int:
    """See the module's text. 1 if a row missed its limit or a shape failed."""
    options = _options(arguments)
    report, clock = Report(options.out, options.commit), Clock(options.seconds)
    end_in_time(options.seconds)
    folder = options.logs or Path(tempfile.mkdtemp(prefix="vcache-ranks-logs-"))
    folder.mkdir(parents=True, exist_ok=True)
    print(f"logs in {folder}", flush=True)
    failed = dict[str, str]()
    with ExitStack() as undo:
        started = [_start(shape, options, folder / shape, undo, failed) for shape in options.shapes]
        for number, pair in enumerate(pairs := list(filter(None, started))):
            try:
                reserved = NEEDED_SECONDS * (len(pairs) - number)
                took = pair.servers.wait(max(1.0, options.seconds - reserved))
                pair.servers.call("scale_weights")
                print(f"{pair.shape}: up after {took:.0f} s, {clock.spent:.0f} s", flush=True)
                report.add(equal(pair, clock))
                clock.check(LEAST_SECONDS)
                report.add(first_token(pair, clock, options.rounds))
                print(f"{pair.shape}: {pair.servers.counters()}; {clock.spent:.0f} s", flush=True)
            except Exception as error:  # noqa: BLE001 - the other shapes' rows count
                _note(pair.shape, error, failed)
                print(f"{pair.shape}: FAILED first: {pair.servers.causes()}", flush=True)
            pair.servers.close()
    signal.alarm(0)
    print(report.table())
    print(f"{clock.spent:.0f} s{'; failed: ' + ', '.join(failed) if failed else ''}", flush=True)
    return int(bool(failed) or report.missed)


def _start(
    shape: str, options: argparse.Namespace, folder: Path, undo: ExitStack, failed: dict[str, str]
) -> Pair | None:
    """The ranks of a shape, which are not up yet. None if they do not start."""
    try:
        sizes = _sizes(shape, options)
        folder.mkdir(parents=True, exist_ok=True)
        model = write_model(options.cache / f"model_{shape}_{sizes.scale.name}", sizes.scale)
        more = {"connector.share": "auto", **dict(options.set)}
        servers = Servers(SHAPES[shape], sizes, options.gpus, model, folder, options.cache, more)
        return Pair(shape, sizes, undo.enter_context(servers))
    except Exception as error:  # noqa: BLE001 - the other shapes' rows count
        _note(shape, error, failed)
        return None


def _note(shape: str, error: Exception, failed: dict[str, str]) -> None:
    failed[shape] = str(error)
    traceback.print_exc()
    print(f"{shape}: FAILED: {type(error).__name__}: {error}", flush=True)


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
    options = made.parse_args(arguments)
    options.gpus = list(range(RANKS))
    return options


if __name__ == "__main__":
    sys.exit(main())
