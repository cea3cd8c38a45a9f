"""Whatever of ours raises behind LMCache, once, before its work or behind it, at its first or its
third call: every answer is right, vLLM lives, and sharing is back or said to be off.

The functions are found by themselves: those that run in a case (`lmcache_injector`). How often each
raises: see test_injector."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any

import pytest
import vllm_cases
from injector_cases import Case, Outcome, outcomes_of, ways
from processes import eventually
from vllm_cases import Node, here

__all__ = ["here"]
pytestmark = pytest.mark.skipif(bool(vllm_cases.missing()), reason=vllm_cases.missing() or "here")
FILES = {"lmcache/worker.py", "lmcache/hooks.py", "transfer/load.py", "protocol/client.py"}
"""Some of whose functions raise."""
SAID = "vcache caches nothing: "


def inside(serving: Any, name: str, *given: Any) -> Any:
    import lmcache_injector

    return getattr(lmcache_injector, name)(serving, *given)


@pytest.mark.timeout(3600)
def test_an_exception_of_ours_behind_lmcache_is_no_wrong_answer_and_no_end(
    here: Node, record_property: Callable[[str, object], None]
) -> None:
    instance = here.start("injected", max_num_batched_tokens=320)
    cases = chain.from_iterable(ways(instance.ask(inside, "count")))

    def outcome_of(case: Case) -> str:
        outcome: Outcome = instance.ask(inside, "run", case)
        if outcome.kind == "wrong":
            return f"wrong: {outcome.wrong or 'shares nothing, and nobody says so'}"
        if outcome.kind == "off, and said":
            if SAID not in outcome.off:
                return f"wrong: shares nothing, and nobody says why: {outcome.off}"
            eventually(lambda: str(case) in str(here.stats().reports))
        return outcome.kind

    outcomes_of("LMCache", cases, outcome_of, FILES, record_property)
