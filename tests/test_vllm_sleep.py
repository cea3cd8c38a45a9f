"""Sleep mode, in real vLLM on the CPU: what is hit after waking, and what must not be.

The engine's half of it is vLLM's own. Its worker for CPUs has none; `benchmarks.vllm.cpu_sleep` does what that for GPUs does in 0.33, and
`vllm_sources` checks in what order. `a` and `b` are instances of one namespace.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from vllm_cases import CHUNK, OURS, SCATTER, Instance, Node, Prompt, meddled, missing, new_tokens, node

from benchmarks.vllm import cpu_sleep

pytestmark = [pytest.mark.skipif(bool(missing(())), reason=missing(()) or "vLLM is here"), pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    with node(tmp_path_factory.mktemp("sleep")) as made:
        yield made


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


GATHER, UNSTORED = SCATTER.replace("scatter", "gather"), {"vcache": {"store": False}}


# ---- in an instance


def prepare(serving: Any) -> None:
    cpu_sleep.install()


def patience(serving: Any, seconds: float) -> None:
    """For what never ends, which a test need not wait for as long as a user may."""
    from vcache_backend.integration.vllm import sleeping, worker

    sleeping.CONFIRM_SECONDS = worker.CLOSE_SECONDS = seconds


def sleep(serving: Any, level: int = 1) -> None:
    serving.llm.sleep(level=level)


def wake(serving: Any, *tags: str) -> None:
    serving.llm.wake_up(list(tags) or None)


def run_and_sleep(serving: Any, prompt: Prompt) -> Any:
    """At once: what the request stores is still on its way to the pool."""
    (answer,) = serving.run([prompt], together=False)
    sleep(serving)
    return answer


def below_the_engine(serving: Any, what: str, *arguments: Any) -> None:
    """A worker's part alone, as if vLLM had not waited for what is under way."""
    worker = serving.llm.llm_engine.model_executor.driver_worker.worker
    getattr(cpu_sleep, what)(worker, *arguments)


def overwrite(serving: Any) -> None:
    """Other weights; once more: the old ones."""
    serving.llm.apply_model(_overwrite)


def replace(serving: Any) -> None:
    """Others in another place, and what was there stays as it is; once more: the old ones."""
    serving.llm.apply_model(_replace)


def remember(serving: Any) -> None:
    serving.llm.apply_model(_remember)


def reload(serving: Any) -> None:
    """What was remembered, to where it was."""
    serving.llm.apply_model(_reload)


def _remember(model: Any) -> None:
    model.remembered = {name: one.clone() for name, one in model.named_parameters()}


def _reload(model: Any) -> None:
    for name, one in model.named_parameters():
        one.data.copy_(model.remembered[name])


def _overwrite(model: Any) -> None:
    model.model.norm.weight.data.neg_()


def _replace(model: Any) -> None:
    weight = model.model.norm.weight
    weight.data, model.others = getattr(model, "others", -weight.data), weight.data


@contextmanager
def new_weights(one: Instance, change: Any = overwrite) -> Iterator[None]:
    one.ask(change)
    try:
        yield
    finally:
        one.ask(change)
        one.forget()


def release(serving: Any) -> None:
    """The KV cache's memory alone, with the weights where they are."""
    core = serving.llm.llm_engine.engine_core.engine_core
    while core.scheduler.has_requests():
        serving.step(1)
    core.sleep(level=0)
    core.release_kv_cache_memory()


def hook(serving: Any, name: str) -> None:
    cpu_sleep._connector(name)


def silent(serving: Any) -> bool:
    return type(serving.llm.llm_engine.engine_core.engine_core.scheduler.connector).__name__ == "SilentConnector"


# ---- the same weights


def test_what_was_stored_before_a_sleep_is_hit_after_it(here: Node, a: Instance) -> None:
    """Whichever way it wakes up; all its blocks hold something else by then."""
    for tags in ((), ("weights", "kv_cache"), ("kv_cache", "weights")):
        tokens = new_tokens(4 * CHUNK + 1)
        computed = here.keep(a, tokens)
        a.ask(sleep)
        for tag in tags or ((),):
            a.ask(wake, *([tag] if tag else []))
        again = a.one(tokens)
        assert again.cached == 4 * CHUNK
        assert again.agrees(computed)


def test_the_kv_cache_may_be_given_away_alone(here: Node, a: Instance) -> None:
    tokens = new_tokens(4 * CHUNK + 1)
    computed = here.keep(a, tokens)
    a.ask(release)
    a.ask(wake, "kv_cache")
    again = a.one(tokens)
    assert (again.cached, again.agrees(computed)) == (4 * CHUNK, True)


def test_others_read_and_store_while_it_sleeps(here: Node, a: Instance, b: Instance) -> None:
    tokens, others = new_tokens(3 * CHUNK + 1), new_tokens(3 * CHUNK + 1)
    computed = here.keep(a, tokens)
    a.ask(sleep)
    read = b.one(tokens)
    assert (read.cached, read.agrees(computed)) == (3 * CHUNK, True)
    theirs = here.keep(b, others)
    a.ask(wake)
    mine = a.one(others)
    assert (mine.cached, mine.agrees(theirs)) == (3 * CHUNK, True)


def test_what_was_computed_just_before_is_in_the_pool_when_it_sleeps(here: Node, a: Instance) -> None:
    tokens, before = new_tokens(4 * CHUNK + 1), here.chunks()
    with meddled(a, GATHER, "slow", 0.2):
        computed = a.ask(run_and_sleep, Prompt(tokens))
    assert here.chunks() == before + 4
    a.ask(wake)
    again = a.one(tokens)
    assert (again.cached, again.agrees(computed)) == (4 * CHUNK, True)


def test_hooks_that_come_twice_or_alone_change_nothing(here: Node, a: Instance, b: Instance) -> None:
    tokens = new_tokens(3 * CHUNK + 1)
    computed = here.keep(b, tokens)
    a.ask(hook, "restore_kv_caches")
    a.ask(sleep)
    a.ask(sleep)
    a.ask(hook, "unregister_kv_caches")
    a.ask(wake)
    a.ask(hook, "restore_kv_caches")
    read = a.one(tokens)
    assert (read.cached, read.agrees(computed)) == (3 * CHUNK, True)


def test_a_load_under_way_fails_and_is_computed_where_vllm_did_not_wait_for_it(here: Node, b: Instance) -> None:
    """Its bytes are gone with the KV cache; vLLM must not take what lies there now for them."""
    first, tokens = new_tokens(2 * CHUNK + 1), new_tokens(4 * CHUNK + 1)
    here.keep(b, first)
    computed = here.keep(b, tokens)
    with instance(here, "later", sync_below_tokens=0) as later:
        # What its worker holds, and that its weights are the same, comes in one step.
        later.ask(sleep)
        later.ask(wake)
        assert later.one(first, max_tokens=1).cached == 2 * CHUNK
        later.ask(patience, 0.1)
        with meddled(later, SCATTER, "slow", 60.0):
            later.add("one", tokens)
            assert later.step(2) == {}
            later.ask(below_the_engine, "sleep")
        later.ask(below_the_engine, "wake_up")
        assert later.finish("one")["one"].agrees(computed)


def test_a_store_that_does_not_end_is_given_up_or_right(here: Node, once: Instance, b: Instance) -> None:
    tokens = new_tokens(4 * CHUNK + 1)
    once.ask(patience, 0.1)
    with meddled(once, GATHER, "slow", 60.0):
        computed = once.ask(run_and_sleep, Prompt(tokens))
        assert b.one(tokens, params=UNSTORED).cached == 0
    once.ask(wake)
    assert once.one(tokens).agrees(computed)
    assert b.again(tokens).agrees(computed)


# ---- other weights


@pytest.mark.parametrize("change", [overwrite, replace], ids=lambda change: change.__name__)
def test_new_weights_since_the_sleep_find_nothing_of_the_old_ones(here: Node, a: Instance, b: Instance, change: Any) -> None:
    """Nor does anybody else: who had them may have stored what the new ones are not to find."""
    tokens = new_tokens(4 * CHUNK + 1)
    here.keep(a, tokens)
    a.ask(sleep)
    a.ask(wake)
    with new_weights(a, change):
        assert a.one(tokens, params=UNSTORED).cached == 0
        assert here.chunks() == 0
        assert b.again(tokens, params=UNSTORED).cached == 0


def test_new_weights_between_the_two_halves_of_a_waking_find_nothing(here: Node, a: Instance) -> None:
    """As a trainer does it."""
    tokens = new_tokens(4 * CHUNK + 1)
    here.keep(a, tokens)
    a.ask(sleep)
    a.ask(wake, "weights")
    with new_weights(a):
        a.ask(wake, "kv_cache")
        assert a.one(tokens, params=UNSTORED).cached == 0


def test_new_weights_before_a_second_sleep_find_nothing_after_it(here: Node, a: Instance) -> None:
    """No request came in between, so that nobody has compared them yet."""
    tokens = new_tokens(4 * CHUNK + 1)
    here.keep(a, tokens)
    a.ask(sleep)
    a.ask(wake)
    with new_weights(a):
        a.ask(sleep)
        a.ask(wake)
        assert a.one(tokens, params=UNSTORED).cached == 0


def test_what_was_said_of_the_weights_after_one_sleep_counts_for_no_other(here: Node, a: Instance) -> None:
    """A request that went away had them compared, and no step came behind that before they were changed."""
    tokens = new_tokens(4 * CHUNK + 1)
    here.keep(a, tokens)
    a.ask(sleep)
    a.ask(wake)
    a.add("leaves", tokens)
    a.step(1)
    a.ask("abort", "leaves")
    with new_weights(a):
        a.ask(sleep)
        a.ask(wake)
        assert a.one(tokens, params=UNSTORED).cached == 0


def test_a_request_that_came_during_a_sleep_and_left_has_nothing_compared(here: Node, a: Instance) -> None:
    """vLLM runs a step for it, without any model: the weights may be away, or new ones on their way."""
    tokens = new_tokens(4 * CHUNK + 1)
    here.keep(a, tokens)
    a.ask(sleep)
    a.add("leaves", tokens)
    a.ask("abort", "leaves")
    a.step(1)
    a.ask(wake)
    assert a.one(tokens).cached == 4 * CHUNK
    a.ask(sleep)
    a.add("leaves too", tokens)
    a.ask("abort", "leaves too")
    a.ask(wake)
    a.step(1)
    with new_weights(a):
        assert a.one(tokens, params=UNSTORED).cached == 0


def test_a_pause_and_a_reset_during_a_sleep_empty_the_pool_at_once(here: Node, a: Instance) -> None:
    for act in ("pause", "reset"):
        here.keep(a, new_tokens(4 * CHUNK + 1))
        a.ask(sleep)
        assert here.chunks() > 0
        a.ask(act)
        assert here.chunks() == 0
        a.ask(wake)


def test_a_sleep_that_loses_the_weights_empties_the_pool_at_once(here: Node, once: Instance) -> None:
    tokens = new_tokens(4 * CHUNK + 1)
    here.keep(once, tokens)
    once.ask(sleep, 2)
    assert here.chunks() == 0
    once.ask(wake)
    assert once.one(tokens).cached == 0


def test_weights_of_before_a_sleep_that_lost_them_are_compared_with_nothing_later(here: Node, once: Instance) -> None:
    """What was computed since is of others, though they come back."""
    tokens = new_tokens(4 * CHUNK + 1)
    once.ask(remember)
    once.ask(sleep, 2)
    once.ask(wake)
    once.ask(reload)
    with new_weights(once):
        here.keep(once, tokens)
        once.ask(sleep)
        once.ask(wake)
    assert once.one(tokens).cached == 0


def test_where_nobody_says_how_the_weights_are_the_pool_is_emptied_in_time(here: Node, once: Instance) -> None:
    tokens = new_tokens(4 * CHUNK + 1)
    computed = here.keep(once, tokens)
    once.ask(patience, 0.1)
    once.ask(sleep)
    once.ask(wake)
    with meddled(once, f"{OURS}.report:Reporter.take", "raise"):
        again = once.one(tokens, params=UNSTORED)
    assert (again.cached, again.agrees(computed)) == (0, True)
    assert here.chunks() == 0


def test_who_cannot_move_a_byte_rightly_after_its_sleep_caches_nothing_any_more(here: Node, once: Instance) -> None:
    """The round trip of every start is made on waking too."""
    tokens = new_tokens(4 * CHUNK + 1)
    computed = here.keep(once, tokens)
    once.ask(sleep)
    with meddled(once, SCATTER, "raise"):
        once.ask(wake)
    again = once.one(tokens)
    assert (again.cached, again.agrees(computed)) == (0, True)
    assert once.ask(silent)
    reports = here.stats().reports
    assert any("caches nothing: after vLLM's sleep the byte round trip" in one.text for one in reports)


# ---- by itself


def test_of_all_resets_only_that_of_a_sleep_which_keeps_the_weights_is_put_off(b: Instance) -> None:
    """Whether the engine has to wait for requests before it sleeps, or not."""
    put_off = {"sleep 1": True, "sleep 2": False, "pause": False, "release": True, "reset": False}
    found = b.ask(resets)
    assert found == {"EngineCore": put_off, "EngineCoreProc": put_off, "EngineCoreProc busy": put_off}


def resets(serving: Any) -> dict[str, dict[str, bool]]:
    """What is said of each reset, in vLLM's own code of its engine."""
    from vllm.v1.core.sched.interface import PauseState
    from vllm.v1.engine.core import EngineCore, EngineCoreProc

    from vcache_backend.integration.vllm import sleeping

    acts: dict[str, Any] = {
        "sleep 1": lambda core: core.sleep(1),
        "sleep 2": lambda core: core.sleep(2),
        "pause": lambda core: core.pause_scheduler(),
        "release": lambda core: core.release_kv_cache_memory(),
        "reset": lambda core: core.reset_prefix_cache(reset_connector=True),
    }
    found: dict[str, dict[str, bool]] = {}
    for kind, busy in ((EngineCore, False), (EngineCoreProc, False), (EngineCoreProc, True)):
        said = found[f"{kind.__name__}{' busy' * busy}"] = {}
        for name, act in acts.items():
            core, heard, state = object.__new__(kind), list[bool](), {"busy": busy and name != "release"}
            core.scheduler = SimpleNamespace(
                finish_requests=lambda *_: [],
                set_pause_state=lambda _: None,
                pause_state=PauseState.PAUSED_NEW,
                has_requests=lambda state=state: state["busy"],
                reset_prefix_cache=lambda *_, heard=heard: heard.append(sleeping.keeps_weights()) or True,
            )
            nothing: Any = lambda *_, **__: None  # noqa: E731
            core.model_executor = SimpleNamespace(
                collective_rpc=nothing, sleep=nothing, discard=nothing, reset_mm_cache=nothing, is_sleeping=False
            )
            core.reset_mm_cache = core.reset_encoder_cache = nothing
            core.batch_queue, core.engines_running, core._idle_state_callbacks = None, False, []
            act(core)
            state["busy"] = False
            for callback in core._idle_state_callbacks:
                callback(core)
            (said[name],) = heard
    return found


def test_weights_count_as_they_were_once_all_workers_say_so_and_as_others_once_one_does(b: Instance) -> None:
    before, once, again = b.ask(naps)
    assert before == (None, 0)
    assert once == (None, 1, None, True, 0)
    assert again == (None, 3, False, 0)


def naps(serving: Any) -> list[tuple[bool | None, ...]]:
    """What follows from what two workers say: without a sleep, after one, and after two."""
    from vcache_backend.integration.vllm.sleeping import Nap

    nap = Nap(2)
    found: list[tuple[bool | None, ...]] = [(nap.note({0: (0, True)}), nap.due)]
    nap.begin()
    found.append((nap.note({0: (1, True)}), nap.due, nap.note({0: (1, True)}), nap.note({1: (1, True)}), nap.due))
    nap.begin()
    nap.note({0: (2, True)})
    nap.begin()
    found.append((nap.note({0: (2, False), 1: (3, True)}), nap.due, nap.note({0: (3, False)}), nap.due))
    return found


def test_sleep_mode_is_refused_before_vllm_tells_of_it_with_backends_that_nobody_knows_and_unless_asked_for(b: Instance) -> None:
    told, untold, strange, unasked = b.ask(refusals)
    assert told is None
    assert unasked.endswith("set connector.sleep: true")
    assert untold.endswith("start vLLM without --enable-sleep-mode, or take vLLM 0.33")
    assert strange.endswith("set --sleep-mode-backend cumem")


def refusals(serving: Any) -> list[str | None]:
    from vllm.distributed.kv_transfer.kv_connector.v1 import base

    from vcache_backend.integration.vllm import sleeping

    class Told:
        unregister_kv_caches = None

    class Untold:
        pass

    found, kept = [], base.KVConnectorBase_V1
    try:
        for kind, backend, wanted in (
            (Told, "cumem", True),
            (Untold, "cumem", True),
            (Told, "criu", True),
            (Told, "cumem", False),
        ):
            base.KVConnectorBase_V1 = kind
            found.append(sleeping.refusal(SimpleNamespace(sleep_mode_backend=backend), wanted))
    finally:
        base.KVConnectorBase_V1 = kept
    return found
