"""An exception of ours that a test asks for, and what came of it; see injector.py."""

from __future__ import annotations

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

    @property
    def kind(self) -> str:
        if not self.reached:
            return "not reached"
        if self.wrong or not (self.off or self.hit):
            return "wrong"
        return "off, and said" if self.off else "shares again"
