"""The result rows of a campaign, each with its limit: the least that must be seen, or the most that
may be wrong.
"""

from __future__ import annotations

import json

import msgspec

from ..results import Row, load, none, row
from .levels import Level
from .living import Control
from .run import Result, caught

CONTROLS: dict[Control, str] = {
    "no verdict": "control_wrong",
    "counted late": "control_late_wrong",
    "published early": "control_early_wrong",
    "no bound": "control_overdue",
}
"""Rows by what is left out."""


def rows(result: Result, loads: int, name: str, level: Level) -> list[Row]:
    """A campaign's rows. loads: how many were asked for."""
    seen, waits = result.outcomes, result.outcomes.waits

    def least(figure: str, unit: str, count: float, due: float, what: str) -> Row:
        return row(_case(figure, name), unit, count, due, what=what, at_least=1)

    more = dict(sorted(result.mishaps.items())) | {"stops": result.stops, "seed": result.seed}
    what = f"{json.dumps(msgspec.to_builtins(seen) | more)} in {result.seconds:.0f} s; {load()}"
    wrong, unit, compared = "with a wrong byte", "loads", seen.loads
    if level.answers:
        wrong = "whose tokens or log probabilities are not those of vLLM alone"
        unit, compared = "answers", seen.answers
    ended, why = result.ended + seen.raised, "a process ended by itself, or a call raised"
    made = [
        least("loads", "loads", seen.loads, loads, what),
        none(_case("wrong", name), unit, seen.wrong, wrong, compared),
        none(_case("failed", name), "times", ended, why),
    ]
    if level.reuse_hits:
        hits = "loads refused by their verdict"
        made.append(least("reuse_hits", "loads", seen.reuse_hits, level.reuse_hits * loads, hits))
    if level.least_pauses:
        what = "readers stopped between a load's launch and its verdict"
        made.append(least("pauses", "times", seen.pauses, level.least_pauses, what))
    if level.states:
        from integration.vllm.telemetry.stats import WAITS

        what = "that waited for what another computed, and longer than their bound"
        made.append(none(_case("overdue", name), "requests", seen.overdue, what, waits.total()))
        states = [seen.by_step[state] for state in level.states]
        states += [result.mishaps[f"died: {state}"] for state in level.states]
        what = f"the rarest state of a promise in which an owner was stopped, or died: {states}"
        made.append(least("states", "times", min(states), 1, what))
        what = f"the rarest end of a wait: {dict(waits)}"
        made.append(least("waits", "times", min(waits[end] for end in WAITS), 1, what))
    fewest = min(result.mishaps[what] for what in level.mishaps)
    made.append(
        least("mishaps", "times", fewest, 1, f"the rarest of these: {dict(result.mishaps)}")
    )
    return made


def _case(figure: str, name: str) -> str:
    """A row's name. `death_engines` and `promises_engines` are the engines that failed."""
    if name == "cpu":
        return f"inplace_{figure}_{name}"
    return f"{name}_{'engines' if figure == 'failed' and name != 'soak' else figure}"


def control_row(control: Control, its: Result, name: str) -> Row:
    """A control's row: how much it saw go wrong."""
    seen, case = its.outcomes, _case(CONTROLS[control], name)
    told = json.dumps(msgspec.to_builtins(seen))
    what = f"{control}; {told} in {its.seconds:.0f} s; seed {its.seed}; reference 1"
    unit, runs = ("answers", seen.answers) if seen.answers else ("loads", seen.loads)
    return row(case, unit, caught(control, seen), 1, what=what, at_least=1, runs=runs)
