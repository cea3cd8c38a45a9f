"""Real vLLM on the CPU: what another instance is computing is waited for, in place and through a
pool, and computed at once when it does not come."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from processes import eventually
from vllm_cases import (
    CHUNK,
    IN_PLACE,
    PULL,
    SCATTER,
    Answer,
    Instance,
    Node,
    meddled,
    needs_vllm,
    new_tokens,
)
from vllm_cases import quick as here

__all__ = ["here"]
pytestmark = needs_vllm
SMALL_STEPS = {"max_num_batched_tokens": 2 * CHUNK, "max_num_seqs": 4}
LONG = 10 * CHUNK + 5


def warm(instance: Instance) -> Instance:
    """Its first step, in which the workers describe themselves, is over."""
    instance.one(new_tokens(5))
    return instance


@pytest.fixture(scope="module", params=["in_place", "pool"])
def settings(request: pytest.FixtureRequest) -> dict[str, Any]:
    return IN_PLACE if request.param == "in_place" else {}


once = pytest.mark.parametrize("settings", ["in_place"], indirect=True)
"""How a wait is bounded does not depend on where the chunks come from."""


@pytest.fixture(scope="module")
def a(here: Node, settings: dict[str, Any]) -> Instance:
    return warm(here.connect(f"a{len(settings)}", settings, **SMALL_STEPS))


@pytest.fixture(scope="module")
def b(here: Node, settings: dict[str, Any]) -> Instance:
    return warm(here.connect(f"b{len(settings)}", settings, **SMALL_STEPS))


@pytest.fixture(scope="module")
def aside(here: Node) -> Instance:
    return here.alone("aside")


@contextmanager
def counted(instance: Instance, end: str, tokens: int) -> Iterator[None]:
    """One wait ends so, and so many tokens have come during it."""

    def counts() -> tuple[int, int]:
        waits = instance.counter("vllm:vcache_waits", end=end)
        return waits, instance.counter("vllm:vcache_awaited_tokens")

    before = counts()
    yield
    assert counts() == (before[0] + 1, before[1] + tokens)


def computes(here: Node, owner: Instance, steps: int) -> None:
    """So many steps, and others can find what they have computed."""
    assert owner.step(steps) == {}
    assert owner.ask("told") if owner.in_place else here.chunks() >= 0


def alike(answer: Answer, cached: int, tokens: list[int], aside: Instance) -> None:
    assert answer.cached == cached
    assert answer.agrees(aside.one(tokens))


def test_a_prefix_is_waited_for_while_another_instance_computes_it(
    here: Node, a: Instance, b: Instance, aside: Instance
) -> None:
    """The second computes nothing of it, holds nobody up, and is told when it asks late."""
    tokens, other = new_tokens(LONG), new_tokens(CHUNK + 1)
    a.add("first", tokens)
    computes(here, a, 2)
    b.add("second", tokens)
    with counted(b, "kept", 6 * CHUNK):
        assert b.step(3) == {}
        b.add("beside", other)
        assert b.finish("beside").keys() == {"beside"}
        first = a.finish("first")["first"]
        second = b.finish("second")["second"]
    assert (first.cached, second.cached) == (0, 10 * CHUNK)
    assert second.agrees(first)
    alike(second, 10 * CHUNK, tokens, aside)


@once
def test_of_two_that_begin_together_one_waits_before_either_has_computed_anything(
    here: Node, a: Instance, b: Instance, aside: Instance
) -> None:
    """The second asks once the server has the first one's question: of two that lie there at once
    the server may take either."""

    def promised() -> int:
        return int(here.stats().counters.get("promised_chunks", 0))

    tokens, before = new_tokens(LONG), promised()
    a.add("first", tokens)
    eventually(lambda: promised() > before)
    b.add("second", tokens)
    with counted(b, "kept", 10 * CHUNK):
        assert b.step(3) == {}
        a.finish("first")
        second = b.finish("second")["second"]
    alike(second, 10 * CHUNK, tokens, aside)


def test_requests_with_one_prefix_read_it_once(
    here: Node, a: Instance, b: Instance, aside: Instance
) -> None:
    """Those that come while the first one waits, and while it loads."""
    tokens = new_tokens(LONG)
    prompts = {name: tokens[: 10 * CHUNK] + new_tokens(5) for name in ("x", "y", "z")}
    a.add("first", tokens)
    computes(here, a, 1)
    before = b.counter("vllm:vcache_loaded_tokens")
    kept = b.counter("vllm:vcache_waits", end="kept")
    for name in ("x", "y"):
        b.add(name, prompts[name])
    assert b.step(3) == {}
    a.finish("first")
    with meddled(b, PULL if b.in_place else SCATTER, "slow", 60.0, times=1):
        eventually(lambda: b.step(1) == {} and b.counter("vllm:vcache_waits", end="kept") > kept)
        b.add("z", prompts["z"])
        assert b.step(3) == {}
    answers = b.finish(*prompts)
    for name, prompt in prompts.items():
        alike(answers[name], 10 * CHUNK, prompt, aside)
    assert b.counter("vllm:vcache_loaded_tokens") - before == 10 * CHUNK


@pytest.mark.parametrize("back", [False, True], ids=["gone", "back"])
def test_without_the_server_that_knew_the_promise_nobody_waits(
    here: Node, a: Instance, b: Instance, aside: Instance, back: bool
) -> None:
    """The next server knows no promises. It may know the chunks that had come."""
    if not (back or b.in_place):
        pytest.skip("once is enough")
    tokens = new_tokens(LONG)
    a.add("first", tokens)
    computes(here, a, 1)
    b.add("second", tokens)
    with counted(b, "withdrawn", 0):
        assert b.step(3) == {}
        here.kill()
        if back:
            here.serve_again(stores=False)
        second = b.finish("second")["second"]
    if not back:
        here.serve_again(stores=False)
    assert second.cached <= (2 * CHUNK if back else 0)
    assert second.agrees(aside.one(tokens))
    a.finish("first")


@pytest.mark.parametrize("mishap", ["killed", "stopped"])
def test_an_owner_killed_or_stopped_in_the_middle_costs_no_token(
    here: Node, settings: dict[str, Any], b: Instance, aside: Instance, mishap: str
) -> None:
    """A stopped one keeps its connection: it is silent, and nobody waits for it again for a while."""
    if mishap == "stopped" and not b.in_place:
        pytest.skip("once is enough")
    owner = warm(here.connect(f"{mishap}{len(settings)}", settings, **SMALL_STEPS))
    tokens, more = new_tokens(LONG), new_tokens(LONG)
    owner.add("first", tokens)
    owner.add("more", more)
    computes(here, owner, 3)
    b.add("second", tokens)
    with counted(b, "withdrawn" if mishap == "killed" else "silent", 0):
        assert b.step(3) == {}
        if mishap == "killed":
            owner.kill()
        else:
            owner.stop()
            b.ask("paced", 60, 0.1)
        second = b.finish("second")["second"]
        again = b.one(more)
    b.ask("paced", 60, 60)
    came = 6 * CHUNK
    assert second.cached <= came if b.in_place else second.cached == came
    assert second.agrees(aside.one(tokens))
    owner.kill()
    assert again.cached == 0
    assert again.agrees(aside.one(more))
