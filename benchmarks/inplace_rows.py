"""The result rows of an in-place campaign, each with its limit: the least that must be seen, or the
most that may be wrong.
"""

from __future__ import annotations

import json

import msgspec

from .inplace_instance import Control
from .inplace_levels import CPU, LOADS, Level
from .inplace_run import Result
from .results import Row, load, none, row

CONTROLS: dict[Control, str] = {
    "no verdict": "control_wrong",
    "counted late": "control_late_wrong",
    "published early": "control_early_wrong",
    "no connector": "alone_wrong",
}
"""Rows by what is left out. The last one has no limit: nothing of ours is in it."""


def rows(result: Result, loads: int = LOADS, name: str = "cpu", level: Level = CPU) -> list[Row]:
    """A campaign's rows. loads: how many were asked for."""
    seen = result.outcomes
    more = dict(sorted(result.mishaps.items())) | {"stops": result.stops, "seed": result.seed}
    what = f"{json.dumps(msgspec.to_builtins(seen) | more)} in {result.seconds:.0f} s; {load()}"
    refused = "loads refused by their verdict"
    differed = "" if name == "vllm" else f", {seen.differed:,} of which had read other bytes"
    hits = f"{refused}{differed}; before launch: {seen.stale:,}"
    whole = name == "vllm"
    with_what = (
        "whose tokens or log probabilities are not those of vLLM alone"
        if whole
        else "with a wrong byte"
    )
    return [
        row(f"inplace_loads_{name}", "loads", seen.loads, loads, what=what, at_least=1),
        row(
            f"inplace_reuse_hits_{name}",
            "loads",
            seen.reuse_hits,
            level.reuse_hits * loads,
            what=hits,
            at_least=1,
        ),
        none(
            f"inplace_wrong_{name}",
            "answers" if whole else "loads",
            seen.wrong,
            with_what,
            seen.answers if whole else seen.loads,
        ),
        none(
            f"inplace_failed_{name}",
            "times",
            result.ended + seen.raised,
            "a process ended by itself, or a call raised",
        ),
    ]


def control_row(control: Control, its: Result, name: str) -> Row:
    """A control's row: how much it saw go wrong."""
    seen, case = its.outcomes, f"inplace_{CONTROLS[control]}_{name}"
    loads = f"{seen.wrong_bytes:,} wrong bytes in {seen.loads:,} loads"
    told = json.dumps(msgspec.to_builtins(seen)) if seen.answers else loads
    what = f"{control}; {told} in {its.seconds:.0f} s; seed {its.seed}"
    of_answers = name == "vllm"
    unit, runs = ("answers", seen.answers) if of_answers else ("loads", seen.loads)
    if control == "no connector":
        return row(case, unit, seen.wrong, 0, what=what, runs=runs)
    return row(case, unit, seen.wrong, 1, what=f"{what}; reference 1", at_least=1, runs=runs)
