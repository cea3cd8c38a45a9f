"""What our connector costs vLLM's scheduler for each request: the time of its scheduler side's
methods, in the engine core."""

from __future__ import annotations

import json
import statistics

import msgspec

from ...results import Row, percentile, row
from ..fleet import Run

SECONDS = 120.0
ALLOWED_US = {"vllm": 250.0, "inplace": 600.0}
"""By the way of sharing: in place there is a generation to note for every block."""
COUNTS = {"4k": 10, "16k": 5}
"""Prompts of each length, each for hits and for misses, on an idle engine and beside running
requests.
"""
US = 1e6


def scheduler_time(run: Run) -> list[Row]:
    """A row for each length, hits and misses, idle and beside running requests; the row with the
    limit is the worst of them.

    A request's time is that of all calls from its arrival to its end: those about it, and those
    made once a step, in full, also where other requests share the step. The first request of each
    row is left out."""
    fleet, clock, prompts, _ = run
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
    worst = max(rows, key=lambda each: each.value)
    what = f"the scheduler's time in our connector a request, the worst median: {worst.what}"
    limit, ok = f"<= {worst.reference:g} us", worst.value <= worst.reference
    case = f"{fleet.rows}_scheduler_us"
    return [*rows, msgspec.structs.replace(worst, case=case, what=what, limit=limit, ok=ok)]


def _row(way: str, case: str, spent: list[dict[str, float]], what: str) -> Row:
    """The median of the requests' sums, with the 99th percentile and each method's median in its
    text. spent: by request what `Probe` has written.
    """
    steps = [int(each.pop("steps", 0)) for each in spent]
    sums = [US * sum(each.values()) for each in spent]
    names = {name for each in spent for name in each}
    medians = {
        name: US * statistics.median(each.get(name, 0.0) for each in spent) for name in names
    }
    ordered = sorted(medians.items(), key=lambda each: -each[1])
    text = (
        f"{what}; p99 {percentile(sums, 99):.0f} us; {statistics.median(steps):g} steps; medians "
        f"by method in us: {', '.join(f'{name} {median:.1f}' for name, median in ordered)}"
    )
    return row(f"{way}_scheduler_us_{case}", "us", sums, ALLOWED_US[way], what=text)
