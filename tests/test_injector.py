"""One exception of ours ends nothing: each function of ours that runs in a vLLM instance raises
once, in real vLLM on the CPU. Every answer is right, every request ends, the engine lives, and the
instance still shares or says that it does not.

A run without an exception lists the functions and how often each is called; see `injector.py`. By
default each function raises before its work at its first call and after its work at its third or
last one; with `VCACHE_INJECT=all` in the environment also the other way round."""

from __future__ import annotations

import os
from collections.abc import Iterator

import injector_cases
import pytest
import vllm_cases
from injector_cases import Case, Outcome
from vllm_cases import CHUNK, IN_PLACE, Instance, Node, Prompt, keep, new_tokens
from vllm_cases import quick as here

__all__ = ["here"]
pytestmark = vllm_cases.needs_vllm

LENGTH = 2 * CHUNK + 9
ALL = os.environ.get("VCACHE_INJECT") == "all"


def _injecting(arguments: dict[str, object]) -> object:
    from injector import Injecting

    return Injecting(arguments)


class Mode:
    """An instance in which functions raise, and its neighbour, which has two prompts."""

    def __init__(self, here: Node, share: str) -> None:
        settings = IN_PLACE if share == "in_place" else {"pool": {"segment_bytes": "16 MiB"}}
        self.share, self.owner = share, here.connect(f"{share} owner", settings)
        arguments = {"kv_transfer_config": here.transfer(settings), "model": str(here.model)}
        made = Instance(here.folder, f"{share} reader", {}, arguments, make=_injecting)
        self.reader = here.undo.enter_context(made)
        shared, other, fresh = (Prompt(new_tokens(LENGTH), max_tokens=3) for _ in range(3))
        more = Prompt(fresh.tokens + new_tokens(CHUNK), max_tokens=3)
        for prompt in (shared, other):
            keep(self.owner, prompt.tokens, max_tokens=3)
        self.load = [shared, other, fresh, more]
        self.answers = here.alone("aside").run(shared, fresh, other, more)

    def cases(self) -> Iterator[Case]:
        calls = self.reader.ask("functions", self.load)
        for name, count in sorted(calls.items()):
            third = min(3, count)
            every = [Case(name, False, 1), Case(name, True, third)]
            if ALL:
                every += [Case(name, False, third), Case(name, True, 1)]
            yield from dict.fromkeys(every)

    def outcome(self, case: Case) -> Outcome:
        outcome: Outcome = self.reader.ask("inject", case, self.load, self.answers)
        return outcome


@pytest.mark.timeout(1800 if ALL else 300)
@pytest.mark.parametrize("share", ["in_place", "pool"])
def test_one_exception_of_ours_ends_nothing(here: Node, share: str) -> None:
    mode, wrong = Mode(here, share), list[str]()
    for case in mode.cases():
        outcome = mode.outcome(case)
        injector_cases.note(share, case, outcome)
        if outcome.wrong:
            wrong.append(f"{case}: {outcome.wrong}")
        elif outcome.reached and outcome.hit != 2 * CHUNK and not outcome.off:
            wrong.append(f"{case}: shares nothing, and does not say so")
    assert not wrong, "\n".join([f"{len(wrong)} cases", *wrong[:20]])
