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
from injector_cases import Case, Outcome
from processes import eventually
from vllm_cases import Instance, Node, here

__all__ = ["here"]
pytestmark = pytest.mark.skipif(bool(vllm_cases.missing()), reason=vllm_cases.missing() or "here")
ALL = os.environ.get("VCACHE_INJECT") == "all"
WAYS = list(product((1, 3), (False, True)))
"""The number of the call, and whether it raises behind its work."""
FILES = {"lmcache/worker.py", "lmcache/hooks.py", "transfer/load.py", "protocol/client.py"}
"""Some of whose functions raise."""
SAID = "shares nothing any more", "stepped aside"


def inside(serving: Any, name: str, *given: Any) -> Any:
    import lmcache_injector

    return getattr(lmcache_injector, name)(serving, *given)


def chosen(calls: dict[str, int]) -> Iterator[Case]:
    """calls: how often each function is called in a case."""
    for number, (name, count) in enumerate(sorted(calls.items())):
        ways = [way for way in WAYS if way[0] <= count]
        for call, behind in ways if ALL else [ways[number % len(ways)]]:
            yield Case(name, behind, call)


def outcome_of(here: Node, instance: Instance, case: Case) -> str:
    """What came of it; a fault begins with `FAULT`."""
    outcome: Outcome = instance.ask(inside, "run", case)
    if outcome.kind == "wrong":
        return f"FAULT: {outcome.wrong or 'shares nothing, and nobody says so'}"
    if outcome.kind == "off, and said":
        if not any(said in outcome.off for said in SAID):
            return f"FAULT: shares nothing, and nobody says why: {outcome.off}"
        eventually(lambda: str(case) in str(here.stats().reports))
    return "stepped aside" if SAID[1] in outcome.off else outcome.kind


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
            rows = [f"| {case} | {outcome} |" for case, outcome in outcomes.items()]
            Path(table).write_text("\n".join([line, "", *rows, ""]))
    faults = {case: outcome for case, outcome in outcomes.items() if "FAULT" in outcome}
    assert not faults
    assert {case.function.partition(":")[0] for case in outcomes} >= FILES
    # A few depend on the order of threads.
    assert counted["not reached"] <= len(outcomes) // 20
