"""Our connector in real vLLM on the CPU: what a request costs, what it may wish, resets.

Every answer is compared with vLLM's own. Instance `a` stores; instance `b`, another process, has
never computed what it is asked and so can only have it from the pool; `aside` is vLLM alone.
`test_real_hits` has what LMCache does too, `test_real_waits` prefixes that others compute."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import vllm_cases
from processes import eventually
from vllm_cases import BLOCK, CHUNK, Node, Prompt, Router, needs_vllm, new_tokens

pytestmark = needs_vllm


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Router:
    """Of `a`."""
    return Router(tmp_path_factory.mktemp("router"), "a")


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory, router: Router) -> Iterator[Node]:
    with vllm_cases.node(tmp_path_factory.mktemp("vllm")) as made:
        made.a = made.connect("a", **router.settings)
        made.b = made.connect("b", {"connector": {"min_hit_tokens": 2 * CHUNK}})
        made.aside = made.alone("aside")
        yield made


def vcache(**wishes: Any) -> dict[str, Any]:
    return {"vcache": wishes}


# ---- what it costs, and who asks for nothing


def test_a_hit_on_an_idle_engine_takes_a_step_more_than_one_in_vllms_own_cache(here: Node) -> None:
    """The step that launches the copy also sees its end, and the next one computes."""
    tokens = new_tokens(6 * CHUNK + 1)
    here.keep(here.a, tokens)
    # Its first step runs no model: the worker says what it holds.
    here.b.one(new_tokens(5))
    here.b.add("alone", tokens, max_tokens=1)
    assert here.b.step(1) == {}
    assert here.b.step(1)["alone"].cached == 6 * CHUNK
    here.b.add("own", tokens, max_tokens=1)
    assert here.b.step(1)["own"].cached == 6 * CHUNK


def test_a_request_costs_one_look_up_and_a_hit_one_pin(here: Node) -> None:
    hit, miss = new_tokens(6 * CHUNK + 1), new_tokens(6 * CHUNK + 1)
    here.keep(here.a, hit)
    before = here.asked()
    assert here.b.one(hit, max_tokens=CHUNK // 4).cached == 6 * CHUNK
    assert here.asked() == before + 2
    here.b.one(miss, max_tokens=CHUNK // 4, params=vcache(store=False))
    assert here.asked() == before + 3


def test_what_cannot_be_worth_a_load_costs_nothing(here: Node) -> None:
    """`b` wants at least two chunks beyond what it has itself."""
    cases = (2 * CHUNK - 1, 0), (2 * CHUNK, 0), (6 * CHUNK, 6 * CHUNK), (6 * CHUNK, 4 * CHUNK + 1)
    for count, own in cases:
        tokens = new_tokens(count)
        if own:
            here.b.one(tokens[:own])
        before = here.asked()
        here.b.one(tokens)
        assert here.asked() == before, (count, own)


def test_requests_that_are_computed_whatever_is_there(here: Node) -> None:
    """Their prompt's own log probabilities are wanted, or they say so."""
    for wish in ({"rate": True}, {"fresh": True}, {"params": vcache(load=False)}):
        tokens = new_tokens(3 * CHUNK + 5)
        here.keep(here.a, tokens)
        before = here.asked()
        computed = here.b.one(tokens, **wish)
        assert (computed.cached, here.asked()) == (0, before)
        assert computed.said == here.aside.one(tokens, **wish).said
        assert here.b.again(tokens).cached == 3 * CHUNK


def test_wishes_we_do_not_understand_are_served_uncached(here: Node) -> None:
    """Which those are, test_settings says. Clients choose the names of their requests."""
    tokens, name = new_tokens(3 * CHUNK + 5), "mine\n\x1b[2J"
    computed = here.keep(here.a, tokens)
    before, chunks, said = here.asked(), here.chunks(), len(here.b.log)
    here.b.ask("add", name, Prompt(tokens + new_tokens(CHUNK), params=vcache(anounced=True)))
    answer = here.b.ask("finish", [name])[name]
    assert (answer.cached, here.asked(), here.chunks()) == (0, before, chunks)
    uncached = "is served uncached: kv_transfer_params: vcache: "
    lines = [line for line in here.b.log[said:].splitlines() if uncached in line]
    assert len(lines) == 1
    assert r"request mine\n\x1b[2J" in lines[0]
    assert here.b.again(tokens, params={"another": 1}).agrees(computed)


# ---- routers


def test_a_router_predicts_from_events_what_the_pool_serves(here: Node, router: Router) -> None:
    """A prompt that leaves a stored one within a chunk does not get that chunk: a chunk is
    found as a whole or not at all (vLLM #57159).
    """
    stored = new_tokens(6 * CHUNK + 1)
    here.keep(here.a, stored)
    eventually(lambda: here.a.one(new_tokens(5)) and router.predicts("CPU", stored) == 6 * CHUNK)
    for shared in (3 * CHUNK - 1, 2 * CHUNK + BLOCK, CHUNK - BLOCK):
        prompt = stored[:shared] + new_tokens(4 * CHUNK)
        served = here.b.again(prompt, params=vcache(store=False)).cached
        assert (router.predicts("CPU", prompt), served) == (shared // CHUNK * CHUNK,) * 2


# ---- resets


def test_resetting_the_cache_empties_the_pool_too(here: Node, router: Router) -> None:
    """A weight update makes every chunk wrong, those under way to the pool as well; and routers
    hear of it.
    """
    tokens = new_tokens(6 * CHUNK + 1)
    here.keep(here.a, tokens)
    here.a.forget()
    assert here.chunks() > 0
    assert here.a.ask("reset")
    assert here.chunks() == 0
    assert here.b.again(tokens).cached == 0
    for _ in range(3):
        fresh = new_tokens(6 * CHUNK + 1)
        here.a.ask("run_and_reset", Prompt(fresh))
        here.a.one(new_tokens(5))
        here.a.one(new_tokens(5))
        assert here.b.again(fresh, params=vcache(store=False)).cached == 0
    short = new_tokens(5)
    here.a.one(short, max_tokens=1)
    eventually(lambda: not router.finds()["GPU"])
    again = here.keep(here.a, new_tokens(3 * CHUNK))
    assert again.cached == 0
    eventually(lambda: here.a.one(short, max_tokens=1) and len(router.finds()["CPU"]) == 3)
