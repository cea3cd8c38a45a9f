"""Times to first token on a hit and on a miss, and times between the tokens of running requests
while another one loads.

On otherwise idle GPUs, one request at a time unless said otherwise.

Prompts of hits end `TAIL` tokens after their last whole chunk, as almost all prompts do. Then a hit
in vLLM's own prefix cache, through our connector and through LMCache leaves the same tokens to
compute. If a prompt ended with a chunk, vLLM and our connector would compute the last block, but
LMCache only the last token. vLLM 0.26 treats that as a decode: one whole CUDA graph, where the
others launch one for each layer and wait for the host."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import msgspec

from ...results import Clock, Row, percentile, row
from ..environment import peer
from ..fleet import Fleet
from ..instances import KINDS, joined
from ..prompts import Prompts

SECONDS = 60.0
MS = 1e3
ALLOWED_MS = 4.0
"""A load takes a step of vLLM's more than a hit in its own prefix cache."""
ALLOWED_COPY = 1.15
VS_RECOMPUTE = {"4k": 4.0, "16k": 15.0, "32k": 30.0}
TPOT = {"lmcache": 1.10, "vllm": 1.05, "inplace": 1.03}
MISS = {"16k": 1.003}
"""Limits for the ratio of a miss in place; else 1.01 for lengths in `VS_RECOMPUTE`."""
LOAD = "16k"
EVERY = 1.0
OFTEN = 0.1
TAIL = 8
"""Tokens after the last whole chunk: fewer than a block."""
REPEATS = {"1k": 3, "4k": 3}
"""How often a round asks short prompts; all others once. The host takes most of their time, and its
times vary.
"""

SHORT, SHORT_REQUESTS, AT_ONCE, SLICES = 600, 3000, 128, 10
"""Of `short_tax`: tokens, how many requests, how many of them at a time, and in how many slices."""
SHORT_ANSWER = 8
SHORT_TAX, SHORT_SECONDS = 0.99, 120.0

VARIANTS = ("recompute", "prefix", "vcache")
Samples = dict[tuple[str, str], list[float]]


def copy_engine(fleet: Fleet) -> float:
    """GB/s of the copy engine between the GPUs, measured now. Meaningless on the CPU."""
    if fleet.scale.cpu:
        return 1.0
    speeds: list[float] = fleet.helper().ask("copy_speed", 90.0, nbytes=1 << 30)
    return statistics.median(speeds)


def allowed(
    floor: float,
    nbytes: int,
    speed: float,
    base: str = "own prefix-cache hit",
    more: float = ALLOWED_MS,
) -> tuple[float, str]:
    """How many ms a hit may take, and that sum in words: `floor` ms, `nbytes` at the copy engine's
    `speed` (GB/s), and `more` ms.
    """
    said = (
        f"{base} {floor:.2f} ms + {nbytes >> 20} MiB / {speed:.0f} GB/s x {ALLOWED_COPY} + "
        f"{more:g} ms"
    )
    return floor + nbytes / speed / 1e9 * ALLOWED_COPY * MS + more, said


def first_token(
    fleet: Fleet, clock: Clock, prompts: Prompts, rounds: int, kind: str = "", only: str = ""
) -> list[Row]:
    """TTFT, by length, of recomputing, of vLLM's own prefix cache, and of vcache. One warm-up round
    does not count.

    If time runs short, the rounds so far count. kind: the prefix of the instances' names. only:
    this length alone."""
    fleet.settle()
    speed = copy_engine(fleet)
    samples: Samples = defaultdict(list)
    partial: list[str] = []
    for turn in range(rounds + 1):
        if turn > 2 and clock.left < 25:
            break
        clock.check(15)
        for name, length in _lengths(fleet, kind).items():
            for _ in range(REPEATS.get(name, 1) if only in ("", name) else 0):
                into = samples if turn else defaultdict(list)
                _round(fleet, prompts.new(length), name, into, partial, kind)
        print(f"  round {turn} of {rounds}: {clock.spent:.0f} s into the run", flush=True)
    return _rows(fleet, samples, speed, partial, kind)


def _lengths(fleet: Fleet, kind: str = "") -> dict[str, int]:
    """The prompts' lengths by their names in rows, rounded to whole chunks, which are larger for
    models with states.
    """
    scale = fleet.of(kind)
    size, lengths = scale.chunk, scale.lengths.items()
    return {name: max(length // size, 1) * size + TAIL for name, length in lengths}


def _round(
    fleet: Fleet, prompt: list[int], name: str, samples: Samples, partial: list[str], kind: str
) -> None:
    """Ask one prompt without a cache, through vcache and from vLLM's own cache. Before every hit
    its instance was idle for as long as others took to compute the prompt.
    """
    scale = fleet.of(kind)
    due, alone = scale.hit(len(prompt)), fleet.instance(joined(kind, "alone"))
    samples["recompute", name].append(_ttft(alone, prompt)[0])
    fleet.make_room(len(prompt))
    fleet.compute(joined(kind, "a"), prompt)
    seconds, cached = _ttft(fleet.instance(joined(kind, "b")), prompt)
    if due - scale.chunk < cached:
        samples["vcache", name].append(seconds)
    else:
        partial.append(f"{name}: {cached} of {due}")
    samples["prefix", name].append(_ttft(alone, prompt)[0])


def _ttft(child: Any, prompt: list[int]) -> tuple[float, int]:
    answer = child.ask("generate", SECONDS, tokens=prompt, count=1)
    return answer["ttft"], answer["cached"]


def _rows(
    fleet: Fleet, samples: Samples, speed: float, partial: Sequence[str], kind: str = ""
) -> list[Row]:
    rows, begin = [], joined(fleet.rows, kind)
    if not fleet.scale.cpu:
        what = f"the copy engine from {peer()} in this run"
        rows.append(row(f"{begin}_copy_engine", "GB/s", speed, speed, what=what))
    missed = f"; not full hits, left out: {', '.join(partial)}" if partial else ""
    for name, length in _lengths(fleet, kind).items():
        held = {variant: samples.get((variant, name), []) for variant in VARIANTS}
        held = {variant: [MS * value for value in values] for variant, values in held.items()}
        if not held["prefix"]:
            continue
        floor = statistics.median(held["prefix"])
        for variant, values in held.items():
            if values:
                what = f"TTFT of {length} tokens; reference: vLLM's own prefix-cache hit{missed}"
                rows.append(row(f"{begin}_{variant}_ms_{name}", "ms", values, floor, what=what))
        # The limits do not apply to a pool in host memory, which is read over PCIe.
        if held["vcache"] and fleet.more.get("pool.device") != "host":
            rows += _judged(fleet, name, held, floor, speed, missed, kind)
    return rows


def _judged(
    fleet: Fleet,
    name: str,
    held: dict[str, list[float]],
    floor: float,
    speed: float,
    missed: str,
    kind: str,
) -> list[Row]:
    """The rows with limits. The GPUs of an instance copy their parts at the same time."""
    begin = joined(fleet.rows, kind)
    gpus, length = KINDS[kind].ranks, _lengths(fleet, kind)[name] - TAIL
    most, sum_ = allowed(floor, fleet.of(kind).read_bytes(length) // gpus, speed)
    where = f"{gpus} peer GPUs" if gpus > 1 else peer()
    which = "ttft" if fleet.integration == "lmcache" else "async_ttft"
    hit = f"TTFT of a hit on {where}; reference: {sum_}{missed}"
    how = "in place" if fleet.in_place else "through the pool"
    computed = f"TTFT recomputing; reference: a hit on {peer()} {how}"
    least = None if kind else VS_RECOMPUTE.get(name)
    recompute, ours = held["recompute"], held["vcache"]
    return [
        row(f"{begin}_{which}_{name}", "ms", ours, most, what=hit, at_most=1.0),
        row(f"{begin}_vs_recompute_{name}", "ms", recompute, ours, what=computed, at_least=least),
    ]


def miss(fleet: Fleet, clock: Clock, prompts: Prompts, counts: dict[str, int]) -> list[Row]:
    """TTFT of a miss with the pool and without, in turn on one GPU, on which the pool also stores
    it. The lengths with a limit have one row more for the worst of them, except in place.
    """
    fleet.settle()
    children = {"with": fleet.instance("a"), "without": fleet.instance("alone")}
    how = "with its KV cache shared in place" if fleet.in_place else "with the pool on"
    rows: list[Row] = []
    for name, count in counts.items():
        length = fleet.scale.lengths[name]
        samples: dict[str, list[float]] = {"with": [], "without": []}
        for turn in range(count + 1):
            clock.check(10)
            fleet.make_room(length)
            for which in sorted(children, reverse=turn % 2 == 0):
                seconds, cached = _ttft(children[which], prompts.new(length))
                if turn and not cached:
                    samples[which].append(seconds * MS)
        what = f"TTFT of a miss of {length} tokens {how}; reference: vLLM alone"
        most = 1.01 if name in VS_RECOMPUTE else None
        limit = MISS.get(name) if fleet.in_place else most
        case = f"{fleet.rows}_miss_{'' if fleet.in_place else 'overhead_'}{name}"
        rows.append(row(case, "ms", samples["with"], samples["without"], what=what, at_most=limit))
    judged = [each for each in rows if each.ok is not None]
    if judged and not fleet.in_place:
        worst = max(judged, key=lambda each: each.ratio)
        what = f"the worst of {[each.case for each in judged]}: {worst.what}"
        rows.append(msgspec.structs.replace(worst, case=f"{fleet.rows}_miss_overhead", what=what))
    return rows


def short_tax(fleet: Fleet, clock: Clock, prompts: Prompts) -> list[Row]:
    """Short requests that share nothing, with the connector and without, in turn on one GPU:
    requests a second. Nothing is hit, so the connector only costs.
    """
    fleet.settle()
    scale = fleet.of("busy")
    children = {name: fleet.instance(f"busy_{name}") for name in ("a", "alone")}
    length = min(SHORT, scale.max_model_len // 4)
    count = 4 if scale.cpu else SHORT_REQUESTS // SLICES
    speeds: dict[str, list[float]] = {name: [] for name in children}
    for turn in range(SLICES + 1):
        if turn > 2 and clock.left < 30:
            break
        clock.check(20)
        for name in sorted(children, reverse=turn % 2 == 1):
            asked = [prompts.new(length) for _ in range(count)]
            seconds = children[name].ask(
                "burst", SHORT_SECONDS, prompts=asked, count=SHORT_ANSWER, at_once=AT_ONCE
            )
            if turn:
                speeds[name].append(count / seconds)
    what = (
        f"{count * len(speeds['a']):,} requests of {length} tokens that share nothing, "
        f"{AT_ONCE} at a time, with; reference: without"
    )
    with_, without = speeds["a"], speeds["alone"]
    name = f"{fleet.rows}_short_tax"
    return [row(name, "requests/s", with_, without, what=what, at_least=SHORT_TAX)]


def decoding(fleet: Fleet, clock: Clock, prompts: Prompts) -> list[Row]:
    """Gaps between the tokens of running requests on B while requests load 16k tokens from A's GPU,
    one a second; and in place those of A.

    LMCache loads before a step, on the worker's main thread, so in one step for each load every
    running request waits for the copy. Our connector loads beside the steps; only the step that
    computes the loading request's last tokens is longer. Windows with and without loads alternate.
    The loads cycle through more prompts than B's own prefix cache can keep."""
    fleet.settle()
    scale, b = fleet.scale, fleet.instance("b")
    length, seconds = scale.lengths[LOAD], scale.decode_seconds
    loads = _held_by_a(fleet, clock, prompts, length)
    # Contexts, and so steps, grow by a tenth meanwhile: this order spreads each kind of window
    # evenly.
    order = [0.0, EVERY, OFTEN, OFTEN, EVERY, 0.0] * 2
    windows = [{"seconds": seconds, "every": min(every, seconds / 2)} for every in order]
    results = b.ask(
        "decode", 60 + 20 * seconds, windows=windows, loads=loads, **_asked(fleet, prompts)
    )
    gaps: dict[float, list[float]] = defaultdict(list)
    done: list[int] = []
    for every, result in zip(order, results, strict=True):
        gaps[every] += [MS * gap for gap in result["gaps"]]
        done += result["loads"] if every == EVERY else []
    full = done.count(scale.hit(length))
    who = f"{_who(fleet)} while another loads from {peer()}"
    said = f"{who} once a second: {len(done)} loads of {length} tokens ({full} full hits)"
    name = f"{fleet.rows}_tpot_p99"
    calm, often = gaps[0.0], f"{who} ten times a second"
    reader = f"{name}_reader" if fleet.in_place else name
    rows = [
        _judged_gaps(reader, gaps[EVERY], calm, said, TPOT[fleet.rows]),
        _judged_gaps(f"{name}_10_loads_a_second", gaps[OFTEN], calm, often, None),
    ]
    return [*rows, _owner(fleet, clock, prompts, loads, ["b"])] if fleet.in_place else rows


def three_readers(fleet: Fleet, clock: Clock, prompts: Prompts) -> list[Row]:
    """Gaps between the tokens of A's running requests while B, C and D read out of A's GPU at the
    same moment, each once a second.
    """
    fleet.settle()
    loads = _held_by_a(fleet, clock, prompts, fleet.scale.lengths[LOAD])
    return [_owner(fleet, clock, prompts, loads, ["b", "c", "d"])]


def _asked(fleet: Fleet, prompts: Prompts) -> dict[str, Any]:
    """The running requests of a window: prompts, and tokens of each answer."""
    scale = fleet.scale
    running = [prompts.new(scale.decode_prompt) for _ in range(scale.running)]
    return {"prompts": running, "count": scale.max_model_len - scale.decode_prompt - 1}


def _who(fleet: Fleet) -> str:
    return f"p99 of gaps between tokens of {fleet.scale.running} running requests"


def _judged_gaps(
    name: str, gaps: list[float], calm: list[float], what: str, most: float | None
) -> Row:
    value, reference = percentile(gaps, 99), percentile(calm, 99)
    text = f"{what}; reference: none loads"
    return row(name, "ms", value, reference, what=text, at_most=most, runs=len(gaps))


def _held_by_a(fleet: Fleet, clock: Clock, prompts: Prompts, length: int) -> list[list[int]]:
    """More prompts than B's own prefix cache can keep, which A has computed and stored."""
    scale = fleet.scale
    fleet.pool.clear()
    loads = [prompts.new(length) for _ in range(scale.kv_bytes // scale.token_bytes // length + 2)]
    for prompt in loads:
        clock.check(40)
        fleet.compute("a", prompt)
    return loads


def _owner(
    fleet: Fleet, clock: Clock, prompts: Prompts, loads: Sequence[list[int]], names: Sequence[str]
) -> Row:
    """Gaps between the tokens of A's running requests while each of the instances `names` reads
    `loads` from A's GPU, one a second and all at once, and while nobody does.
    """
    scale, a = fleet.scale, fleet.instance("a")
    readers = [fleet.instance(name) for name in names]
    windows = [{"seconds": scale.decode_seconds, "every": 0.0}]
    gaps: dict[bool, list[float]] = {False: [], True: []}
    cached: list[int] = []
    turns = 0
    for turn in range(8):
        reads = turn % 4 in (1, 2)
        clock.check(20)
        a.send("decode", windows=windows, loads=[], **_asked(fleet, prompts))
        until = time.monotonic() + scale.decode_seconds
        while reads and (due := time.monotonic()) < until:
            for reader in readers:
                reader.send("generate", tokens=loads[turns % len(loads)], count=1)
            cached += [reader.answer(SECONDS)["cached"] for reader in readers]
            turns += 1
            time.sleep(max(0.0, min(due + EVERY, until) - time.monotonic()))
        (window,) = a.answer(60 + 20 * scale.decode_seconds)
        gaps[reads] += [MS * gap for gap in window["gaps"]]
    full = sum(count == scale.hit(len(loads[0])) for count in cached)
    others = "another instance reads" if len(names) == 1 else f"{len(names)} instances read"
    what = (
        f"{_who(fleet)} while {others} from this one's GPU once a second: "
        f"{len(cached)} reads of {len(loads[0])} tokens ({full} full hits)"
    )
    name = f"{fleet.rows}_tpot_p99_owner" + (f"_{len(names)}_readers" if names[1:] else "")
    return _judged_gaps(name, gaps[True], gaps[False], what, TPOT[fleet.rows])
