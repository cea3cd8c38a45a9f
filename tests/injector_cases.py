"""An exception of ours that a test asks for, and what came of it; see injector.py."""

from __future__ import annotations

import json
import os
from collections import Counter
from typing import NamedTuple


class Case(NamedTuple):
    """One exception. after: at the function's return. call: at its first, second, … call."""

    function: str
    after: bool
    call: int

    def __str__(self) -> str:
        return f"{self.function} {'after' if self.after else 'before'} its work, call {self.call}"


class Outcome(NamedTuple):
    """reached: the function was called as often. wrong: what must not be: an answer that differs, a
    request that hangs, an exception in vLLM. off: why the scheduler's half is out of use. hit:
    tokens that a last request has loaded."""

    reached: bool
    wrong: str
    off: str
    hit: int

    def __str__(self) -> str:
        if not self.reached:
            return "not reached"
        return self.wrong or (f"off: {self.off}" if self.off else f"shares, {self.hit} tokens hit")


counts = Counter[tuple[str, str]]()
"""For the summary: by mode and outcome, the cases of this process."""


def note(mode: str, case: Case, outcome: Outcome) -> None:
    """Count a case, and add it to the table in the file `VCACHE_INJECT_TABLE`, if one is named."""
    counts[mode, str(outcome).partition(":")[0].partition(",")[0]] += 1
    if file := os.environ.get("VCACHE_INJECT_TABLE"):
        with open(file, "a", encoding="utf-8") as table:
            table.write(json.dumps([mode, *case, str(outcome)]) + "\n")
