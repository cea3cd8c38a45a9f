"""One exception of ours ends nothing: each function of ours that runs in a vLLM instance raises
once, in real vLLM on the CPU. Every answer is right, every request ends, the engine lives, and the
instance still shares or says that it does not.

A run without an exception lists the functions and how often each is called; see `injector.py`. A
function raises in one of four ways: before or after its work, at its first or its third call; one
of both modes, in place and through a pool, in one of them; `VCacheMultiConnector`'s, beside another
connector with hits of its own, in all four. With `VCACHE_INJECT=all` each raises in all four in each
mode, and the file `VCACHE_INJECT_TABLE` gets a table."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain

import pytest
import vllm_cases
from injector_cases import ALL, Case, Outcome, outcomes_of, ways
from vllm_cases import CHUNK, IN_PLACE, Instance, Node, Prompt, keep, new_tokens
from vllm_cases import quick as here

__all__ = ["here"]
pytestmark = vllm_cases.needs_vllm

LENGTH = 2 * CHUNK + 9
FILES = {"vllm/connector.py", "vllm/scheduler.py", "vllm/worker/loads.py"}
FILES |= {"transfer/load.py", "protocol/client.py"}
"""Some of whose functions raise in each mode."""


def _injecting(arguments: dict[str, object]) -> object:
    from injector import Injecting

    return Injecting(arguments)


class Mode:
    """An instance in which functions raise, and its neighbour, which has two prompts."""

    def __init__(self, here: Node, share: str, beside: bool = False) -> None:
        settings = IN_PLACE if share == "in_place" else {"pool": {"segment_bytes": "16 MiB"}}
        name = f"{share} beside" if beside else share
        self.share, self.owner = share, here.connect(f"{name} owner", settings)
        transfer, kept = here.transfer(settings), list[Prompt]()
        if beside:
            other = {
                "kv_connector": "KeepingConnector",
                "kv_connector_module_path": "vllm_variants",
            }
            inside = {"connectors": [transfer, other | {"kv_role": "kv_both"}]}
            transfer = {"kv_connector": "VCacheMultiConnector", "kv_role": "kv_both"}
            transfer |= {"kv_connector_extra_config": inside}
            kept = [Prompt(new_tokens(LENGTH), max_tokens=2)]
        arguments = {"kv_transfer_config": transfer, "model": str(here.model)}
        made = Instance(here.folder, f"{name} reader", {}, arguments, make=_injecting)
        self.reader = here.undo.enter_context(made)
        shared, other, fresh = (Prompt(new_tokens(LENGTH), max_tokens=count) for count in (2, 2, 1))
        more = Prompt(fresh.tokens + new_tokens(CHUNK), max_tokens=2)
        for prompt in (shared, other):
            keep(self.owner, prompt.tokens, max_tokens=2)
        self.load = [shared, other, fresh, more, *kept]
        self.answers = here.alone(f"{name} aside").run(shared, fresh, other, more, *kept)
        self.calls = self.called()

    def called(self) -> dict[str, int]:
        """How often each function is called in a run without an exception."""
        calls: dict[str, int] = self.reader.ask("functions", self.load)
        return calls

    def cases(self, other: Mode) -> Iterator[Case]:
        for cases in ways(self.calls):
            name = cases[0].function
            others_turn = sum(name.encode()) % 2 == (self.share == "in_place")
            if ALL or not others_turn or name not in other.calls:
                yield from cases

    def outcome_of(self, case: Case) -> str:
        outcome: Outcome = self.reader.ask("inject", case, self.load, self.answers)
        if outcome.kind == "wrong":
            return f"wrong: {outcome.wrong or 'shares nothing, and does not say so'}"
        return outcome.kind


@pytest.fixture(scope="module")
def modes(here: Node) -> dict[str, Mode]:
    return {share: Mode(here, share) for share in ("in_place", "pool")}


@pytest.mark.timeout(3600 if ALL else 300)
@pytest.mark.parametrize("share", ["in_place", "pool"])
def test_one_exception_of_ours_ends_nothing(
    modes: dict[str, Mode], share: str, record_property: Callable[[str, object], None]
) -> None:
    (other,) = (made for name, made in modes.items() if name != share)
    mode = modes[share]
    cases = mode.cases(other)
    outcomes_of(share, cases, mode.outcome_of, FILES, record_property, mode.called)


@pytest.mark.timeout(600)
def test_what_stands_beside_another_connector_ends_nothing_either(
    here: Node, record_property: Callable[[str, object], None]
) -> None:
    mode = Mode(here, "in_place", beside=True)
    cases = chain.from_iterable(ways(mode.calls, every_way=True))
    of = {"vllm/multi.py", "vllm/longest_hit.py"}
    outcomes_of("beside", cases, mode.outcome_of, of, record_property, mode.called)
