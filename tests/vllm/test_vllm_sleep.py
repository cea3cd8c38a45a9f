"""Sleep mode, in real vLLM on the CPU: a sleep resets the namespace, and the instance caches again
when it is awake.

The engine's half of it is vLLM's own. Its worker for CPUs has none; `cpu_sleep` does what that for
GPUs does in 0.33, and `sources` checks in what order. `a` and `b` are instances of one
namespace."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import cpu_sleep
import pytest
from vllm_cases import CHUNK, PULL, Instance, Node, here, meddled, needs_vllm, new_tokens

__all__ = ["here"]
pytestmark = needs_vllm


def instance(here: Node, name: str, **connector: Any) -> Instance:
    made = here.connect(name, {"connector": connector})
    made.ask(prepare)
    return made


@pytest.fixture(scope="module")
def a(here: Node) -> Instance:
    return instance(here, "a")


@pytest.fixture
def once(here: Node) -> Iterator[Instance]:
    """For what cannot be undone."""
    with instance(here, "once") as made:
        yield made


@pytest.fixture(scope="module")
def b(here: Node) -> Instance:
    return instance(here, "b")


# ---- in an instance


def prepare(serving: Any) -> None:
    cpu_sleep.install()


def patience(serving: Any, seconds: float) -> None:
    """For what never ends, which a test need not wait for as long as a user may."""
    from vcache_backend.integration.vllm.worker import worker

    worker.CLOSE_SECONDS = seconds


def sleep(serving: Any, level: int = 1) -> None:
    serving.llm.sleep(level=level)


def wake(serving: Any, *tags: str) -> None:
    serving.llm.wake_up(list(tags) or None)


def below_the_engine(serving: Any, what: str, *arguments: Any) -> None:
    """A worker's part alone, as if vLLM had not waited for what is under way."""
    worker = serving.llm.llm_engine.model_executor.driver_worker.worker
    getattr(cpu_sleep, what)(worker, *arguments)


# ---- what a sleep does


def test_a_sleep_empties_the_pool_and_what_comes_is_hit(here: Node, a: Instance) -> None:
    """New weights may come while vLLM sleeps, and nobody need say so."""
    tokens = new_tokens(4 * CHUNK + 1)
    computed = here.keep(a, tokens)
    a.ask(sleep)
    assert here.chunks() == 0
    a.ask(wake)
    again = a.one(tokens)
    assert (again.cached, again.agrees(computed)) == (0, True)
    assert a.again(tokens).agrees(computed)


def test_a_load_fails_and_is_computed_where_vllm_did_not_wait(here: Node, b: Instance) -> None:
    """Its bytes are gone with the KV cache; vLLM must not take what lies there now for them."""
    first, tokens = new_tokens(2 * CHUNK + 1), new_tokens(4 * CHUNK + 1)
    here.keep(b, first)
    computed = here.keep(b, tokens)
    with instance(here, "later") as later:
        assert later.one(first, max_tokens=1).cached == 2 * CHUNK
        later.ask(patience, 0.1)
        with meddled(later, PULL, "slow", 60.0):
            later.add("one", tokens)
            assert later.step(2) == {}
            later.ask(below_the_engine, "sleep")
        later.ask(below_the_engine, "wake_up")
        assert later.finish("one")["one"].agrees(computed)
