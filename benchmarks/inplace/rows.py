"""The result rows of an in-place campaign, each with its limit: the least that must be seen, or the
most that may be wrong.
"""

from __future__ import annotations

import json

import msgspec

from ..results import Row, load, none, row
from .instance import Control
from .levels import CPU, LOADS, Level
from .run import Result, caught

CONTROLS: dict[Control, str] = {
    "no verdict": "control_wrong",
    "counted late": "control_late_wrong",
    "published early": "control_early_wrong",
    "no bound": "control_overdue",
}
"""Rows by what is left out."""


def rows(result: Result, loads: int = LOADS, name: str = "cpu", level: Level = CPU) -> list[Row]:
    """A campaign's rows. loads: how many were asked for."""
    seen, waits = result.outcomes, result.outcomes.waits
    more = dict(sorted(result.mishaps.items())) | {"stops": result.stops, "seed": result.seed}
    what = f"{json.dumps(msgspec.to_builtins(seen) | more)} in {result.seconds:.0f} s; {load()}"
    differed = "" if level.answers else f", {seen.differed:,} of which had read other bytes"
    hits = f"loads refused by their verdict{differed}; before launch: {seen.stale:,}"
    least = level.reuse_hits * loads
    if level.answers:
        wrong = "whose tokens or log probabilities are not those of vLLM alone"
        unit, compared = "answers", seen.answers
    else:
        wrong, unit, compared = "with a wrong byte", "loads", seen.loads
    ended, why = result.ended + seen.raised, "a process ended by itself, or a call raised"
    made = [
        row(_case("loads", name), "loads", seen.loads, loads, what=what, at_least=1),
        none(_case("wrong", name), unit, seen.wrong, wrong, compared),
        none(_case("failed", name), "times", ended, why),
    ]
    if least:
        case = _case("reuse_hits", name)
        made.append(row(case, "loads", seen.reuse_hits, least, what=hits, at_least=1))
    if level.least_pauses:
        what = "readers stopped between a load's launch and its verdict"
        paused, due = seen.pauses, level.least_pauses
        made.append(row(_case("pauses", name), "times", paused, due, what=what, at_least=1))
    if level.states:
        from integration.vllm.telemetry.stats import WAITS

        what = "that waited for what another computed, and longer than their bound"
        made.append(none(_case("overdue", name), "requests", seen.overdue, what, waits.total()))
        states = [seen.by_step[state] for state in level.states]
        states += [result.mishaps[f"died: {state}"] for state in level.states]
        what = f"the rarest state of a promise in which an owner was stopped, or died: {states}"
        made.append(row(_case("states", name), "times", min(states), 1, what=what, at_least=1))
        fewest = min(waits[end] for end in WAITS)
        what = f"the rarest end of a wait: {dict(waits)}"
        made.append(row(_case("waits", name), "times", fewest, 1, what=what, at_least=1))
    if level.answers:
        fewest = min(result.mishaps[what] for what in level.mishaps)
        what = f"the rarest of these: {dict(result.mishaps)}"
        made.append(row(_case("mishaps", name), "times", fewest, 1, what=what, at_least=1))
    return made


def _case(figure: str, name: str) -> str:
    """A row's name. The campaigns of whole vLLMs have their own: `death_engines` are those that
    failed.
    """
    if not name.startswith(("death", "promises")):
        return f"inplace_{figure}_{name}"
    return f"{name}_{'engines' if figure == 'failed' else figure}"


def control_row(control: Control, its: Result, name: str) -> Row:
    """A control's row: how much it saw go wrong."""
    seen, case = its.outcomes, _case(CONTROLS[control], name)
    broken = caught(control, seen)
    loads = f"{seen.wrong_bytes:,} wrong bytes in {seen.loads:,} loads"
    told = json.dumps(msgspec.to_builtins(seen)) if seen.answers else loads
    what = f"{control}; {told} in {its.seconds:.0f} s; seed {its.seed}"
    unit, runs = ("answers", seen.answers) if seen.answers else ("loads", seen.loads)
    return row(case, unit, broken, 1, what=f"{what}; reference 1", at_least=1, runs=runs)
