"""One exception of ours ends nothing: each function of ours that runs in a vLLM instance raises
once, in real vLLM on the CPU. Every answer is right, every request ends, the engine lives, and the
instance still shares or says that it does not.

A run without an exception lists the functions and how often each is called; see `injector.py`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest
import vllm_cases
from vllm_cases import CHUNK, IN_PLACE, Answer, Instance, Node, Prompt, keep, new_tokens
from vllm_cases import quick as here

__all__ = ["here"]
pytestmark = vllm_cases.needs_vllm

LENGTH = 2 * CHUNK + 9


def _injecting(arguments: dict[str, object]) -> object:
    from injector import Injecting

    return Injecting(arguments)


@pytest.fixture(scope="module", params=["in_place", "pool"])
def reader(here: Node, request: pytest.FixtureRequest) -> Iterator[Instance]:
    settings = {"connector": {"share": request.param}, "pool": {"segment_bytes": "1 MiB"}}
    if request.param == "in_place":
        settings = IN_PLACE
    transfer = here.transfer(settings)
    owner = here.connect(f"{request.param} owner", settings)
    arguments = {"kv_transfer_config": transfer, "model": str(here.model)}
    reader = Instance(here.folder, f"{request.param} reader", {}, arguments, make=_injecting)
    reader.owner = owner
    with reader:
        yield reader


def test_one_exception_of_ours_ends_nothing(here: Node, reader: Instance) -> None:
    owner, aside = reader.owner, here.alone("aside")
    shared, other, fresh = (Prompt(new_tokens(LENGTH), max_tokens=3) for _ in range(3))
    more = Prompt(fresh.tokens + new_tokens(CHUNK), max_tokens=3)
    for prompt in (shared, other):
        keep(owner, prompt.tokens, max_tokens=3)
    load = [shared, other, fresh, more]
    answers = aside.run(shared, fresh, other, more)
    import time
    began = time.time()
    calls = reader.ask("functions", load)
    print(len(calls), time.time() - began, flush=True)
    outcomes = Counter()
    from injector_cases import Case
    for name, count in sorted(calls.items()):
        for after in (False, True):
            for call in (1, 3):
                if call > count: continue
                began = time.time()
                try:
                    out = reader.ask("inject", Case(name, after, call), load, answers)
                except Exception as error:
                    print("DEAD", name, after, call, error, flush=True)
                    raise
                took = time.time() - began
                print(f"{name} {after} {call} {took:.2f} {out}", flush=True)
                outcomes[bool(out.wrong), bool(out.off), out.hit] += 1
    print(outcomes, flush=True)
