"""Times to first token on a hit and on a miss, and what sharing costs short requests.

On otherwise idle GPUs, one request at a time unless said otherwise.

Prompts of hits end some tokens after their last whole chunk, fewer than a block, as almost all
prompts do: see `Prompts.whole`. If a prompt ended with a chunk, vLLM and our connector would
compute the last block, but LMCache only the last token. vLLM treats that as a decode: one whole
CUDA graph, where the others launch one for each layer and wait for the host."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import cache
from multiprocessing import get_context
from typing import Any

from ...copies import peer_speed
from ...results import Row, row
from ..fleet import Run
from ..instances import KINDS, joined

MS = 1e3
ALLOWED_MS = 4.0
"""A load takes a step of vLLM's more than a hit in its own prefix cache."""
ALLOWED_COPY, ALLOWED_SEVERAL = 1.15, 1.1
MISS, MISS_IN_PLACE = {"4k": 1.01, "16k": 1.01}, {"16k": 1.003}
"""Limits for the ratio of a miss."""
MISSES = {"1k": 25, "4k": 31, "16k": 11}

SHORT, SHORT_REQUESTS, AT_ONCE, SLICES = 600, 3000, 128, 10
"""Of `short_tax`: tokens, how many requests, how many of them at a time, and in how many slices."""

VARIANTS = ("recompute", "prefix", "vcache")
Samples = dict[tuple[str, str], list[float]]


@cache
def copy_engine() -> float:
    """GB/s of the copy engine between the GPUs, measured once in a run, in a process that ends
    then.
    """
    with get_context("spawn").Pool(1) as process:
        return process.apply_async(peer_speed, (1 << 30,)).get(90.0)


def first_token(run: Run) -> list[Row]:
    """TTFT, by length, of recomputing, of vLLM's own prefix cache, and of vcache. One warm-up round
    does not count. If time runs short, the rounds so far count."""
    run.fleet.settle()
    speed = 1.0 if run.scale.cpu else copy_engine()
    samples: Samples = defaultdict(list)
    partial: list[str] = []
    for turn in range(run.rounds + 1):
        if turn > 2 and run.clock.left < 25:
            break
        run.clock.check(15)
        for name in run.scale.lengths:
            # The host takes most of a hit's time, and its times vary.
            for _ in range(1 if name == "32k" else 3):
                _round(run, name, samples if turn else defaultdict(list), partial)
        print(f"  round {turn} of {run.rounds}: {run.clock.spent:.0f} s into the run", flush=True)
    return _rows(run, samples, speed, partial)


def _round(run: Run, name: str, samples: Samples, partial: list[str]) -> None:
    """Ask one prompt without a cache, through vcache and from vLLM's own cache. Before every hit
    its instance was idle for as long as others took to compute the prompt."""
    due, alone = run.scale.lengths[name], run.instance("alone")
    prompt = run.prompts.whole(due).then
    samples["recompute", name].append(_ttft(alone, prompt)[0])
    run.compute(prompt)
    seconds, cached = _ttft(run.instance("b"), prompt)
    if due - run.scale.chunk < cached:
        samples["vcache", name].append(seconds)
    else:
        partial.append(f"{name}: {cached} of {due}")
    samples["prefix", name].append(_ttft(alone, prompt)[0])


def _ttft(child: Any, prompt: list[int]) -> tuple[float, int]:
    answer = child.ask("generate", 60.0, tokens=prompt, count=1)
    return answer["ttft"], answer["cached"]


def _rows(run: Run, samples: Samples, speed: float, partial: Sequence[str]) -> list[Row]:
    """A row for each length and variant, and those with limits."""
    scale, tail, rows = run.scale, run.prompts.tail, list[Row]()
    begin = joined(run.fleet.rows, run.kind)
    if not scale.cpu:
        what = "the copy engine between the GPUs in this run"
        rows.append(row(f"{begin}_copy_engine", "GB/s", speed, speed, what=what))
    missed = f"; not full hits, left out: {', '.join(partial)}" if partial else ""
    for name, length in scale.lengths.items():
        held = {each: [MS * value for value in samples[each, name]] for each in VARIANTS}
        floor = statistics.median(held["prefix"] or [0.0])
        what = f"TTFT of {length + tail} tokens; reference: vLLM's own prefix-cache hit{missed}"
        for variant, values in held.items():
            if values and floor:
                rows.append(row(f"{begin}_{variant}_ms_{name}", "ms", values, floor, what=what))
        if ours := held["vcache"] if floor else []:
            nbytes = scale.hit_bytes(length) // KINDS[run.kind].ranks
            most = floor + nbytes / speed / 1e9 * ALLOWED_COPY * MS + ALLOWED_MS
            what = (
                f"TTFT of a hit on the peer GPU; reference: own prefix-cache hit {floor:.2f} ms + "
                f"{nbytes >> 20} MiB / {speed:.0f} GB/s x {ALLOWED_COPY} + {ALLOWED_MS:g} ms"
            )
            case = f"{begin}_{'ttft' if run.fleet.lmcache else 'async_ttft'}_{name}"
            limit = ALLOWED_SEVERAL if run.kind else 1.0
            rows.append(row(case, "ms", ours, most, what=what + missed, at_most=limit))
    return rows


def miss(run: Run) -> Iterator[Row]:
    """TTFT of a miss with vcache and without, in turn on one GPU, on which a pool also stores
    it.
    """
    fleet, clock, prompts = run.fleet, run.clock, run.prompts
    fleet.settle()
    children = {"with": run.instance("a"), "without": run.instance("alone")}
    how = "with its KV cache shared in place" if fleet.in_place else "with the pool on"
    for name, count in MISSES.items():
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
        limit = (MISS_IN_PLACE if fleet.in_place else MISS).get(name)
        case = f"{fleet.rows}_miss_{'' if fleet.in_place else 'overhead_'}{name}"
        yield row(case, "ms", samples["with"], samples["without"], what=what, at_most=limit)


def short_tax(run: Run) -> list[Row]:
    """Short requests that share nothing, with the connector and without, in turn on one GPU:
    requests a second. Nothing is hit, so the connector only costs.
    """
    fleet, clock, prompts = run.fleet, run.clock, run.prompts
    fleet.settle()
    children = {name: run.instance(name) for name in ("a", "alone")}
    length = min(SHORT, run.scale.max_model_len // 4)
    count = 4 if run.scale.cpu else SHORT_REQUESTS // SLICES
    speeds: dict[str, list[float]] = {name: [] for name in children}
    for turn in range(SLICES + 1):
        if turn > 2 and clock.left < 30:
            break
        clock.check(20)
        for name in sorted(children, reverse=turn % 2 == 1):
            asked = [prompts.new(length) for _ in range(count)]
            seconds = children[name].ask("burst", 120.0, prompts=asked, count=8, at_once=AT_ONCE)
            if turn:
                speeds[name].append(count / seconds)
    what = (
        f"{count * len(speeds['a']):,} requests of {length} tokens that share nothing, "
        f"{AT_ONCE} at a time, with; reference: without"
    )
    with_, without = speeds["a"], speeds["alone"]
    name = f"{fleet.rows}_short_tax"
    return [row(name, "requests/s", with_, without, what=what, at_least=0.99)]
