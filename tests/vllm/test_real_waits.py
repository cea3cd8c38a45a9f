"""Real vLLM on the CPU: what another instance is computing is waited for, in place and through a
pool, and computed at once when it does not come."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import vllm_cases
from processes import eventually
from vllm_cases import (
    CHUNK,
    FOREVER,
    PULL,
    QUICK,
    Answer,
    Instance,
    Node,
    Prompt,
    meddled,
    new_tokens,
)

pytestmark = vllm_cases.needs_vllm
SMALL_STEPS = {"max_num_batched_tokens": 2 * CHUNK, "max_num_seqs": 4}
LONG = 10 * CHUNK + 5
UPDATE = "vcache_backend.integration.vllm.scheduler:VCacheScheduler.update"


def started(here: Node, name: str, share: str) -> Instance:
    """Its first step, in which the workers describe themselves, is over."""
    made = here.connect(name, {"connector": {"share": share}}, **SMALL_STEPS)
    made.one(new_tokens(5))
    return made


@pytest.fixture(scope="module", params=["in_place", "pool"])
def here(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Node]:
    with vllm_cases.node(tmp_path_factory.mktemp("vllm"), QUICK) as made:
        made.a = started(made, "a", request.param)
        made.b = started(made, "b", request.param)
        made.aside = made.alone("aside")
        yield made


once = pytest.mark.parametrize("here", ["in_place"], indirect=True)
"""How a wait is bounded does not depend on where the chunks come from."""


@contextmanager
def counted(instance: Instance, end: str, tokens: int) -> Iterator[None]:
    """One wait ends so, and so many tokens have come during it."""
    before = counts(instance, end)
    yield
    assert counts(instance, end) == (before[0] + 1, before[1] + tokens)


def counts(instance: Instance, end: str) -> tuple[int, int]:
    """How many waits have ended so, and how many tokens have come during all waits."""
    waits = instance.counter("vllm:vcache_waits", end=end)
    return waits, instance.counter("vllm:vcache_awaited_tokens")


def computes(here: Node, owner: Instance, steps: int) -> None:
    """So many steps, and others can find what they have computed."""
    assert owner.step(steps) == {}
    assert owner.ask("told") if owner.in_place else here.chunks() >= 0


def alike(here: Node, answer: Answer, cached: int, tokens: list[int]) -> None:
    assert answer.cached == cached
    assert answer.agrees(here.aside.one(tokens))


def announced(seconds: float) -> dict[str, Any]:
    """A request's parameters: somebody is about to compute its prompt."""
    return {"vcache": {"announced": True, "wait_seconds": seconds}}


def test_a_prefix_is_waited_for_while_another_instance_computes_it(here: Node) -> None:
    """The second computes nothing of it, holds nobody up, and is told when it asks late."""
    tokens, other = new_tokens(LONG), new_tokens(CHUNK + 1)
    here.a.add("first", tokens)
    computes(here, here.a, 2)
    here.b.add("second", tokens)
    with counted(here.b, "kept", 6 * CHUNK):
        assert here.b.step(3) == {}
        here.b.add("beside", other)
        assert here.b.finish("beside").keys() == {"beside"}
        first = here.a.finish("first")["first"]
        second = here.b.finish("second")["second"]
    assert (first.cached, second.cached) == (0, 10 * CHUNK)
    assert second.agrees(first)
    alike(here, second, 10 * CHUNK, tokens)


def test_requests_with_one_prefix_read_it_once(here: Node) -> None:
    """Those that come while the first one waits, and while it loads."""
    tokens = new_tokens(LONG)
    prompts = {name: tokens[: 10 * CHUNK] + new_tokens(5) for name in ("x", "y", "z")}
    here.a.add("first", tokens)
    computes(here, here.a, 1)
    before = here.b.counter("vllm:vcache_loaded_tokens")
    kept = here.b.counter("vllm:vcache_waits", end="kept")
    for name in ("x", "y"):
        here.b.add(name, prompts[name])
    assert here.b.step(3) == {}
    here.a.finish("first")
    with meddled(here.b, PULL, "slow", 60.0, times=1):
        eventually(
            lambda: here.b.step(1) == {} and here.b.counter("vllm:vcache_waits", end="kept") > kept
        )
        here.b.add("z", prompts["z"])
        assert here.b.step(3) == {}
    answers = here.b.finish(*prompts)
    for name, prompt in prompts.items():
        alike(here, answers[name], 10 * CHUNK, prompt)
    assert here.b.counter("vllm:vcache_loaded_tokens") - before == 10 * CHUNK


@once
def test_an_announcement_that_nobody_keeps_holds_up_its_own_request_alone(here: Node) -> None:
    """Others with its prompt do not wait with it, nor one that was announced for a shorter time."""
    for name, params in (("beside", None), ("shorter", announced(0.05))):
        tokens = new_tokens(6 * CHUNK + 1)
        here.b.add("lonely", tokens, params=announced(80))
        assert here.b.step(3) == {}
        here.b.add(name, tokens, params=params)
        done = eventually(lambda: here.b.step(1))
        assert name in done
        here.b.ask("abort", "lonely")
        alike(here, done[name], 0, tokens)


# ---- open loads


def opens(here: Node, owner: Instance, tokens: list[int], chunks: int = 6) -> None:
    """So much is there, more than half, and `b` loads it while it waits for the rest. All that no
    load fills is poisoned.
    """
    here.b.forget()
    here.b.ask("poison")
    owner.add("first", tokens)
    computes(here, owner, chunks // 2)
    here.b.add("second", tokens, params=announced(80))
    # A new owner's KV cache is mapped in the background.
    eventually(lambda: pulls(here.b, 1))


def calls(instance: Instance, place: str, steps: int) -> int:
    """So often this is called in these steps, in which nothing ends."""
    instance.ask("meddle", place, "count", None, FOREVER)
    assert instance.step(steps) == {}
    return int(instance.ask("leave_alone")[place])


def pulls(instance: Instance, steps: int) -> int:
    """So many copies of loads begin."""
    return calls(instance, PULL, steps)


@once
def test_half_of_a_prefix_is_loaded_while_the_rest_is_computed(here: Node) -> None:
    """And further chunks as they come. Others with the prefix follow."""
    tokens, lost = new_tokens(LONG), here.b.counter("vllm:vcache_recomputed_tokens")
    before = here.b.counter("vllm:vcache_loaded_tokens")
    opens(here, here.a, tokens)
    here.b.add("third", tokens)
    assert pulls(here.b, 3) == 0
    computes(here, here.a, 1)
    assert pulls(here.b, 3) == 1
    with counted(here.b, "kept", 4 * CHUNK):
        first = here.a.finish("first")["first"]
        done = here.b.finish("second", "third")
    for answer in done.values():
        assert (answer.cached, answer.agrees(first)) == (10 * CHUNK, True)
    alike(here, done["second"], 10 * CHUNK, tokens)
    assert here.b.counter("vllm:vcache_loaded_tokens") - before == 10 * CHUNK
    assert here.b.counter("vllm:vcache_recomputed_tokens") == lost


@once
def test_every_step_without_a_model_run_is_reported(here: Node) -> None:
    """With asynchronous scheduling reports come a step late. What ends until then is added."""
    tokens = new_tokens(LONG)
    opens(here, here.a, tokens)
    assert calls(here.b, UPDATE, 3) == 3
    here.a.finish("first")
    here.b.finish("second")


@once
def test_what_comes_at_once_is_seen_in_the_step_that_asks(here: Node) -> None:
    known, tokens = (new_tokens(2 * CHUNK + 1) for _ in range(2))
    here.keep(here.a, known)
    # A new owner's KV cache is mapped in the background.
    here.b.one(known)
    here.b.add("second", tokens, params=announced(80))
    assert here.b.step(3) == {}
    here.keep(here.a, tokens)
    assert here.b.step(1) == {}
    alike(here, here.b.step(Prompt(tokens).max_tokens)["second"], 2 * CHUNK, tokens)


@once
@pytest.mark.parametrize("beside", [False, True])
def test_what_comes_last_is_asked_for_copied_and_proved_in_one_step(
    here: Node, beside: bool
) -> None:
    """Also beside a request that computes."""
    tokens = new_tokens(LONG)
    opens(here, here.a, tokens)
    if beside:
        here.b.add("beside", new_tokens(5), max_tokens=20)
    here.a.finish("first")
    assert here.a.ask("told")
    asked = here.asked("Find")
    assert here.b.step(1) == {}
    assert here.asked("Find") == asked + 1
    answer = here.b.step(Prompt(tokens).max_tokens)["second"]
    alike(here, answer, 10 * CHUNK, tokens)
    if beside:
        here.b.finish("beside")


MISHAPS = {"killed": "withdrawn", "stopped": "silent", "given up": "withdrawn"}
MISHAPS |= {"reset there": "withdrawn", "reset here": "withdrawn", "used again": "withdrawn"}
MISHAPS |= {"no server": "withdrawn", "another server": "withdrawn", "aborted": "aborted"}
"""And how the wait ends."""


def happen(here: Node, owner: Instance, mishap: str, tokens: list[int]) -> None:
    """While `second` loads what `first` has computed so far, and waits for the rest."""
    b = here.b
    if mishap == "used again":
        with meddled(b, PULL, "slow", 60.0, times=1):
            assert b.step(3) == {}
            owner.ask("abort", "first")
            for _ in range(5):
                owner.one(new_tokens(1000))
    elif mishap == "killed":
        owner.kill()
    elif mishap == "stopped":
        owner.stop()
    elif mishap == "given up":
        owner.ask("abort", "first")
    elif mishap.endswith("server"):
        here.kill()
        if mishap == "another server":  # it knows no promises
            here.serve_again(stores=False)
    elif mishap == "aborted":
        b.ask("abort", "second")
        b.add("second", tokens)
        owner.finish("first")
    else:
        (owner if mishap == "reset there" else b).ask("reset")


@pytest.mark.parametrize(
    ("here", "mishap"),
    [("in_place", one) for one in MISHAPS]
    + [("pool", one) for one in ("killed", "another server")],
    indirect=["here"],
)
def test_what_does_not_come_is_computed(here: Node, mishap: str) -> None:
    """vLLM keeps what has come. An aborted load ends, and the request's next one holds. A stopped
    owner keeps its connection: it is silent, and nobody waits for its other promises."""
    ends, end, b = mishap in ("killed", "stopped"), MISHAPS[mishap], here.b
    tokens, more = new_tokens(LONG), new_tokens(LONG)
    share = "in_place" if b.in_place else "pool"
    owner = started(here, mishap, share) if ends else here.a
    b.ask("paced", 0.2 if mishap == "stopped" else 60)
    if b.in_place:
        opens(here, owner, tokens)
    else:
        owner.add("first", tokens)
        computes(here, owner, 2)
        b.add("second", tokens)
        assert b.step(3) == {}
    if ends:
        owner.add("more", more)
    computes(here, owner, 1)
    before = counts(b, end)[0]
    if b.in_place and mishap != "used again":
        assert pulls(b, 3) == 1
    happen(here, owner, mishap, tokens)
    second = b.finish("second")["second"]
    others = b.one(more) if ends else None
    if mishap == "no server":
        here.serve_again(stores=False)
    b.ask("paced", 60)
    assert counts(b, end)[0] == before + 1
    assert second.agrees(here.aside.one(tokens))
    if (b.in_place, mishap) == (False, "killed"):
        assert second.cached == 6 * CHUNK, "what had come"
    owner.kill() if ends else owner.ask("abort", "first")
    if others is not None:
        alike(here, others, 0, more)
    assert b.again(tokens).agrees(second)
