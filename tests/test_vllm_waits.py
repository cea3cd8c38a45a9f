"""Real vLLM on the CPU: what another instance is computing is waited for, in place and through a
pool, and computed at once when it does not come."""

from __future__ import annotations

import time
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


def asks_first(here: Node, owner: Instance, tokens: list[int]) -> None:
    """It gets a request, and the server has its question, before another may ask: of two questions
    that lie there at once the server may take either."""

    def promised() -> int:
        return int(here.stats().counters.get("promised_chunks", 0))

    before = promised()
    owner.add("first", tokens)
    eventually(lambda: promised() > before)


def computes(here: Node, owner: Instance, steps: int) -> None:
    """So many steps, and others can find what they have computed."""
    assert owner.step(steps) == {}
    assert owner.ask("told") if owner.in_place else here.chunks() >= 0


def waited(owner: Instance, reader: Instance, tokens: list[int], chunks: int) -> Answer:
    """The reader's answer, which waits until the owner has computed its request `first`; so many
    chunks come meanwhile."""
    reader.add("second", tokens)
    with counted(reader, "kept", chunks * CHUNK):
        assert reader.step(3) == {}
        owner.finish("first")
        return reader.finish("second")["second"]


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
    tokens = new_tokens(LONG)
    asks_first(here, a, tokens)
    alike(waited(a, b, tokens, 10), 10 * CHUNK, tokens, aside)


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


@once
def test_what_an_owner_does_not_compute_any_more_is_computed_at_once(
    here: Node, a: Instance, b: Instance, aside: Instance
) -> None:
    """It aborts the request, in its queue and in the middle; the reader has what came by then."""
    for steps, came in ((0, 0), (2, 4)):
        tokens = new_tokens(LONG)
        asks_first(here, a, tokens)
        computes(here, a, steps)
        b.add("second", tokens)
        with counted(b, "withdrawn", 0):
            assert b.step(3) == {}
            a.ask("abort", "first")
            a.step(1)
            second = b.finish("second")["second"]
        alike(second, came * CHUNK, tokens, aside)


@once
def test_a_wait_is_over_when_computing_would_have_taken_less(
    here: Node, a: Instance, b: Instance, aside: Instance
) -> None:
    """It is over for good: the request does not wait for the chunks that come later. As nothing
    came, the next request does not wait for that instance at all."""
    tokens, more = new_tokens(LONG), new_tokens(LONG)
    a.add("first", tokens)
    a.add("more", more)
    computes(here, a, 1)
    b.add("second", tokens)
    b.ask("paced", 0.2, 1.5)
    with counted(b, "late", 0):
        second = b.finish("second")["second"]
        again = b.one(more)
    b.ask("paced", 60, 60)
    b.ask("trusts")
    alike(second, 2 * CHUNK, tokens, aside)
    alike(again, 0, more, aside)
    a.finish("first", "more")


@once
def test_chunks_that_take_longer_to_come_than_to_compute_are_computed(
    here: Node, a: Instance, b: Instance, aside: Instance
) -> None:
    """Nobody waits for them, not even for a moment."""
    tokens = new_tokens(LONG)
    a.add("first", tokens)
    computes(here, a, 1)
    b.ask("paced", 0.0001, 60)
    before = b.counter("vllm:vcache_waits")
    second = b.one(tokens)
    b.ask("paced", 60, 60)
    assert b.counter("vllm:vcache_waits") == before
    alike(second, 2 * CHUNK, tokens, aside)
    a.finish("first")


@once
def test_an_owner_is_waited_for_again_after_a_wait_shorter_than_its_step(
    here: Node, a: Instance, b: Instance, aside: Instance
) -> None:
    few, tokens = new_tokens(3 * CHUNK + 5), new_tokens(LONG)
    a.add("first", few)
    computes(here, a, 1)
    b.add("second", few)
    b.ask("paced", 0.2, 60)
    with counted(b, "late", 0):
        second = b.finish("second")["second"]
    alike(second, 2 * CHUNK, few, aside)
    a.finish("first")
    b.ask("paced", 60, 60)
    a.add("first", tokens)
    computes(here, a, 1)
    alike(waited(a, b, tokens, 8), 10 * CHUNK, tokens, aside)


@once
def test_who_announces_a_prefix_says_how_long_its_owner_may_be_quiet(
    here: Node, a: Instance, b: Instance, aside: Instance
) -> None:
    """Longer than a few of its steps, after which nobody else waits for it."""
    tokens = new_tokens(LONG)
    a.add("first", tokens)
    computes(here, a, 1)
    b.ask("paced", 60, 0.001)
    b.add("second", tokens, params={"vcache": {"announced": True, "wait_seconds": 60}})
    with counted(b, "kept", 8 * CHUNK):
        assert b.step(3) == {}
        time.sleep(0.5)
        assert b.step(3) == {}
        a.finish("first")
        second = b.finish("second")["second"]
    b.ask("paced", 60, 60)
    alike(second, 10 * CHUNK, tokens, aside)


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
    assert second.cached <= 6 * CHUNK
    assert second.agrees(aside.one(tokens))
    owner.kill()
    assert again.cached == 0
    assert again.agrees(aside.one(more))
