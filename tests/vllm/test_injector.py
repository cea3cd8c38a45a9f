"""One exception of ours ends nothing: each function of ours that runs in a vLLM instance raises
once, in real vLLM on the CPU. Every answer is right, every request ends, the engine lives, and the
instance still shares or says that it does not.

A run without an exception lists the functions and how often each is called; see `injector.py`. A
function raises in one of four ways: before or after its work, at its first or its third call; one
of both modes, in place and through a pool, in one of them. With `VCACHE_INJECT=all` it raises in all
four in each mode, and the file `VCACHE_INJECT_TABLE` gets a table."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import vllm_cases
from injector_cases import Case, Outcome
from vllm_cases import CHUNK, IN_PLACE, Instance, Node, Prompt, keep, new_tokens
from vllm_cases import quick as here

__all__ = ["here"]
pytestmark = vllm_cases.needs_vllm

LENGTH = 2 * CHUNK + 9
ALL = os.environ.get("VCACHE_INJECT") == "all"
FILES = {"vllm/connector.py", "vllm/scheduler.py", "vllm/worker/loads.py"}
FILES |= {"transfer/load.py", "protocol/client.py"}
"""Some of whose functions raise in each mode."""


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
        self.answers = here.alone(f"{share} aside").run(shared, fresh, other, more)
        self.calls: dict[str, int] = self.reader.ask("functions", self.load)

    def cases(self, other: Mode) -> Iterator[Case]:
        for number, (name, count) in enumerate(sorted(self.calls.items())):
            others_turn = sum(name.encode()) % 2 == (self.share == "in_place")
            if others_turn and name in other.calls and not ALL:
                continue
            ways = [
                Case(name, after, call) for call in (1, min(3, count)) for after in (False, True)
            ]
            yield from dict.fromkeys(ways if ALL else [ways[number % len(ways)]])


@pytest.fixture(scope="module")
def modes(here: Node) -> dict[str, Mode]:
    return {share: Mode(here, share) for share in ("in_place", "pool")}


@pytest.mark.timeout(3600 if ALL else 300)
@pytest.mark.parametrize("share", ["in_place", "pool"])
def test_one_exception_of_ours_ends_nothing(
    modes: dict[str, Mode], share: str, record_property: Callable[[str, object], None]
) -> None:
    mode, outcomes = modes[share], dict[Case, Outcome]()
    (other,) = (made for made in modes.values() if made is not mode)
    try:
        for case in mode.cases(other):
            for _ in range(2):  # a few functions are called in some orders of threads only
                outcomes[case] = mode.reader.ask("inject", case, mode.load, mode.answers)
                if outcomes[case].reached:
                    break
    finally:
        kinds = Counter(outcome.kind for outcome in outcomes.values())
        said = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
        functions = len({case.function for case in outcomes})
        line = f"injector, {share}: {len(outcomes)} cases of {functions} functions: {said}"
        record_property("summary", line)
        if file := os.environ.get("VCACHE_INJECT_TABLE"):
            rows = [f"| {case} | {outcome.kind} |" for case, outcome in outcomes.items()]
            Path(f"{file}.{share}").write_text("\n".join([line, "", *rows, ""]))
    wrong = [
        f"{case}: {outcome.wrong or 'shares nothing, and does not say so'}"
        for case, outcome in outcomes.items()
        if outcome.kind == "wrong"
    ]
    assert not wrong, "\n".join([f"{len(wrong)} cases", *wrong[:20]])
    assert {case.function.partition(":")[0] for case in outcomes} >= FILES
    assert kinds["not reached"] <= len(outcomes) // 20
