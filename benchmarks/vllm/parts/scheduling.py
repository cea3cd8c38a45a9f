"""What our connector costs vLLM's scheduler for each request: the time of its scheduler side's
methods, in the engine core. And what it costs a step in which requests only decode."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Iterator

import msgspec

from ...results import Row, percentile, row
from ..fleet import OWNERS, Fleet, Run

SECONDS = 120.0
ALLOWED_US = {"vllm": 500.0, "inplace": 1000.0}
"""By the way of sharing: in place there is a generation to note for every block."""
COUNTS = {"4k": 10, "16k": 5}
"""Prompts of each length, each for hits and for misses, on an idle engine and beside running
requests.
"""
US = 1e6


def scheduler_time(run: Run) -> Iterator[Row]:
    """A row for each length, hits and misses, idle and beside running requests; the row with the
    limit is the worst of them.

    A request's time is that of all calls from its arrival to its end: those about it, and those
    made once a step, in full, also where other requests share the step. The first request of each
    row is left out."""
    fleet, clock, prompts = run.fleet, run.clock, run.prompts
    timed, scale = fleet.instance("timed"), fleet.scale
    file = fleet.folder / "timed.jsonl"
    rows = list[Row]()
    for beside in (0, scale.running):
        running = [prompts.new(scale.decode_prompt) for _ in range(beside)]
        for name, count in COUNTS.items():
            for kind in ("hit", "miss"):
                clock.check(15)
                fleet.pool.clear()
                asked = [prompts.whole(scale.lengths[name]).then for _ in range(count + 1)]
                for prompt in asked if kind == "hit" else ():
                    fleet.compute("a", prompt)
                file.unlink(missing_ok=True)
                extra = {"timed": str(file)}
                cached = timed.ask("beside", SECONDS, others=running, tokens=asked, extra=extra)
                due_tokens = scale.lengths[name] if kind == "hit" else 0
                right = cached.count(due_tokens)
                what = (
                    f"{kind} of {scale.lengths[name]} tokens beside {beside} running "
                    f"requests ({right} of {len(cached)} were)"
                )
                spent = [json.loads(line) for line in file.read_text().splitlines()][1:]
                rows.append(_row(fleet.rows, f"{name}_{kind}_{beside}_running", spent, what))
                yield rows[-1]
    worst = max(rows, key=lambda each: each.value)
    what = f"the scheduler's time in our connector a request, the worst median: {worst.what}"
    limit, ok = f"<= {worst.reference:g} us", worst.value <= worst.reference
    case = f"{fleet.rows}_scheduler_us"
    yield msgspec.structs.replace(worst, case=case, what=what, limit=limit, ok=ok)


def _row(way: str, case: str, spent: list[dict[str, float]], what: str) -> Row:
    """The median of the requests' sums, with the 99th percentile and each method's median in its
    text. spent: by request what `Probe` has written.
    """
    steps = [int(each.pop("steps", 0)) for each in spent]
    # The rest they wait, above all for other threads to leave the interpreter.
    cpu = statistics.median([each.pop("cpu", 0.0) for each in spent] or [0.0])
    spent = [
        {name: took for name, took in each.items() if not name.startswith("worker.")}
        for each in spent
    ]
    sums = [US * sum(each.values()) for each in spent]
    names = {name for each in spent for name in each}
    medians = {
        name: US * statistics.median(each.get(name, 0.0) for each in spent) for name in names
    }
    ordered = sorted(medians.items(), key=lambda each: -each[1])
    listed = ", ".join(f"{name} {median:.1f}" for name, median in ordered)
    text = (
        f"{what}; p99 {percentile(sums, 99):.0f} us, {US * cpu:.0f} us of CPU time; "
        f"{statistics.median(steps):g} steps; medians by method in us: {listed}"
    )
    return row(f"{way}_scheduler_us_{case}", "us", sums, ALLOWED_US[way], what=text)


# ---- requests that decode

ARMS = {"alone": "alone", "inplace": "decodes", "consumer": "consumer"}
"""Instances by what rows call them."""
RUNNING, STEPS, WAITING = (1, 8, 32), 48, 28
"""Requests that decode; steps of a round; requests that wait beside eight."""


def decode_steps(run: Run) -> Iterator[Row]:
    """What vcache costs a step in which requests only decode, on one GPU: instances that are
    asked in turn. The consumer's also beside others that wait for what nobody computes."""
    run.fleet.settle()
    for running in RUNNING:
        run.clock.check(10)
        yield from _decoding(run, running)


def _steps(
    fleet: Fleet,
    name: str,
    prompts: list[list[int]],
    waiting: list[list[int]],
) -> tuple[list[float], dict[str, float]]:
    """How long each step took, in ms, and what our connector's methods took of one, in us."""
    file = fleet.folder / f"{name}-steps.jsonl"
    file.unlink(missing_ok=True)
    asked = {"prompts": prompts, "waiting": waiting, "extra": {"timed": str(file)}}
    seconds = fleet.instance(ARMS[name]).ask("steps", SECONDS, count=STEPS, **asked)
    spent = json.loads(file.read_text()) if file.exists() else {}
    count = spent.pop("steps", 0) or 1
    spent.pop("cpu", None)
    return [1e3 * each for each in seconds], {key: US * spent[key] / count for key in spent}


def _decoding(run: Run, running: int) -> Iterator[Row]:
    """The rows of so many requests."""
    scale, prompts = run.fleet.scale, run.prompts
    # Two thirds of the KV cache, and as much for one request as for one of eight.
    room = OWNERS * scale.kv_bytes // scale.token_bytes * 2 // 3
    length = min(room // max(8, running), scale.max_model_len // 4)
    asked = [prompts.new(length) for _ in range(running)]
    waiting = [prompts.new(length) for _ in range(WAITING if running == 8 else 0)]
    ms, spent = defaultdict[str, list[float]](list), defaultdict[str, list[dict[str, float]]](list)
    for turn in range(run.rounds + 1):
        for name in sorted(ARMS, reverse=turn % 2 == 1):
            for kind, held in {name: [], "waiting": waiting}.items():
                if kind == name or (held and name == "consumer"):
                    took, own = _steps(run.fleet, name, asked, held)
                    ms[kind] += [statistics.median(took)] if turn else []
                    spent[kind] += [own] if turn else []
    what = f"TPOT p50 of {running} requests of {length} tokens that decode, steps of {STEPS}"
    for name, against in (*((arm, "alone") for arm in ARMS), ("waiting", "consumer")):
        if ms[name] and ms[against] and name != against:
            case = f"decode_tpot_{running}" + (f"_{name}" if name != "inplace" else "")
            most = 1.01 if name in ("inplace", "consumer", "waiting") else None
            said = f"{what}: {name}; reference: {against}; {_shares(spent[name])}"
            yield row(case, "ms", ms[name], ms[against], what=said, at_most=most)


def _shares(spent: list[dict[str, float]]) -> str:
    """What the connector's two halves take of a step."""
    named = sorted({name for each in spent for name in each})
    own = {name: statistics.median(each.get(name, 0.0) for each in spent) for name in named}
    worker = sum(took for name, took in own.items() if name.startswith("worker."))
    each = ", ".join(f"{name} {took:.1f}" for name, took in own.items() if took >= 0.5)
    return f"us a step: scheduler {sum(own.values()) - worker:.1f}, worker {worker:.1f} ({each})"
