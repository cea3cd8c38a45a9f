"""Whatever of ours raises behind LMCache, once, before its work or behind it, at its first or its
third call: every answer is right, vLLM lives, and sharing is back or said to be off.

The functions are found by themselves: those that run in a case (`lmcache_injector`). CI has each
raise once; with `VCACHE_INJECT=all` each raises in every way, and the outcomes are written to the
file that `VCACHE_INJECT_TABLE` names."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import vllm_cases
from processes import eventually
from vllm_cases import Instance, Node, here

__all__ = ["here"]
pytestmark = pytest.mark.skipif(bool(vllm_cases.missing()), reason=vllm_cases.missing() or "here")
ALL = os.environ.get("VCACHE_INJECT") == "all"
WAYS = list(product((1, 3), (False, True)))
"""The number of the call, and whether it raises behind its work."""
FILES = {"integration/lmcache/worker.py", "integration/lmcache/hooks.py"}
FILES |= {"vcache_backend/transfer/load.py", "vcache_backend/protocol/client.py"}
"""Some of whose functions raise."""
SAID = "shares nothing any more", "stepped aside"
Case = tuple[str, int, bool]


def inside(serving: Any, name: str, *given: Any) -> Any:
    import lmcache_injector

    return getattr(lmcache_injector, name)(serving, *given)


def chosen(calls: dict[str, int]) -> Iterator[Case]:
    """calls: how often each function is called in a case."""
    for number, (name, count) in enumerate(sorted(calls.items())):
        ways = [way for way in WAYS if way[0] <= count]
        for call, behind in ways if ALL else [ways[number % len(ways)]]:
            yield name, call, behind


def outcome_of(here: Node, instance: Instance, case: Case) -> str:
    """What came of it; a fault begins with `FAULT`."""
    name, _, behind = case
    raised, wrong, off = instance.ask(inside, "run", case)
    if wrong:
        return f"FAULT: {wrong} wrong answers"
    if not raised:
        return "not reached"
    if not off:
        return "shares again"
    if not any(said in off for said in SAID):
        return f"FAULT: shares nothing, and nobody says so: {off}"
    text = f"{'behind' if behind else 'in'} {name}"
    eventually(lambda: text in str(here.stats().reports))
    return "stepped aside" if SAID[1] in off else "off, and said"


@pytest.mark.timeout(3600)
def test_an_exception_of_ours_behind_lmcache_is_no_wrong_answer_and_no_end(
    here: Node, record_property: Callable[[str, object], None]
) -> None:
    instance = here.start("injected", max_num_batched_tokens=320)
    calls = instance.ask(inside, "count")
    outcomes = dict[Case, str]()
    try:
        for case in chosen(calls):
            outcomes[case] = outcome_of(here, instance, case)
    finally:
        counted = Counter(outcomes.values())
        said = ", ".join(f"{count} {outcome}" for outcome, count in counted.most_common())
        line = f"injector, LMCache: {len(outcomes)} cases of {len(calls)} functions: {said}"
        record_property("summary", line)
        if table := os.environ.get("VCACHE_INJECT_TABLE"):
            rows = [
                f"| {name} | {call} | {'behind' if behind else 'before'} | {outcome} |"
                for (name, call, behind), outcome in outcomes.items()
            ]
            head = ["| function | call | raises | outcome |", "| --- | --- | --- | --- |"]
            Path(table).write_text("\n".join([line, "", *head, *rows, ""]))
    faults = {case: outcome for case, outcome in outcomes.items() if "FAULT" in outcome}
    assert not faults
    assert {name.partition(":")[0] for name, _, _ in outcomes} >= FILES
    # A few depend on the order of threads.
    assert counted["not reached"] <= len(outcomes) // 20
