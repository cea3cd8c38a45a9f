"""Weights that change while vLLM runs, and whose version the user names: real vLLM on the CPU, whose
own calls bring other weights. See docs/adr/0024.

`a` and `b` are instances of one namespace. A `fresh` answer uses no cache at all. vLLM's worker for
CPUs does not sleep: `cpu_sleep` does what that for GPUs does, and `sources` checks in what order."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import cpu_sleep
import pytest
import vllm_cases
from processes import eventually
from vllm_cases import CHUNK, PULL, Answer, Instance, Node, Prompt, keep, meddled, new_tokens
from vllm_cases import quick as here
from vllm_models import write_model

pytest.importorskip("vllm.v1.engine.core", reason="vLLM is not installed")

from vcache_backend.integration.vllm.model import versions

__all__ = ["here"]
pytestmark = vllm_cases.needs_vllm

_numbers = count()


class Two(NamedTuple):
    """Two instances with the first of `models`, folders of one model's weights of two seeds;
    both are of the version `old`, and nobody is of `new`."""

    a: Instance
    b: Instance
    models: list[Path]
    old: str
    new: str


@pytest.fixture(scope="module", params=["pool", "in_place"])
def pair(here: Node, request: pytest.FixtureRequest) -> Iterator[list[Instance]]:
    settings = {"connector": {"share": request.param, "weights": "v0", "min_hit_tokens": CHUNK}}
    with ExitStack() as undo:
        names = f"a-{request.param}", f"b-{request.param}"
        begun = (here.connect(name, settings, refits=True) for name in names)
        made = list(map(undo.enter_context, begun))
        for one in made:
            one.ask(prepare)
        yield made


@pytest.fixture(scope="module")
def models(here: Node) -> list[Path]:
    return [here.model, write_model(here.folder / "other", seed=2)]


@pytest.fixture
def two(pair: list[Instance], models: list[Path]) -> Two:
    made = Two(*pair, models, f"v{next(_numbers)}", f"v{next(_numbers)}")
    for one in pair:
        one.ask(update, models[0], made.old)
    return made


pooled = pytest.mark.parametrize("pair", ["pool"], indirect=True)
"""Once is enough, or sleep needs a pool."""


# ---- in an instance


def prepare(serving: Any) -> None:
    """vLLM's own weight updates, by an engine that takes weights from a file; no other one runs
    without a GPU."""
    from dataclasses import dataclass

    from safetensors import safe_open
    from vllm.distributed.weight_transfer.base import WeightTransferEngine

    @dataclass
    class Source:
        path: str
        fails: bool = False

    class Files(WeightTransferEngine[Any, Any]):
        init_info_cls = update_info_cls = Source

        def init_transfer_engine(self, init_info: Any) -> None: ...

        def start_weight_update(self) -> None: ...

        def finish_weight_update(self) -> None: ...

        def shutdown(self) -> None: ...

        def update_weights(self, update_info: dict[str, Any]) -> None:
            self.receive_weights(self.parse_update_info(update_info))

        def receive_weights(self, update_info: Any) -> None:
            with safe_open(f"{update_info.path}/model.safetensors", "pt") as file:
                names = list(file.keys())
                for number, name in enumerate(names):
                    if update_info.fails and number > len(names) // 2:
                        raise RuntimeError("half of the weights came")
                    self.model.load_weights([(name, file.get_tensor(name))])

    cpu_sleep.install()
    worker = serving.llm.llm_engine.model_executor.driver_worker.worker
    given = worker.vllm_config, worker.device, worker.model_runner.get_model()
    worker.weight_transfer_engine = Files(None, *given)


def core(serving: Any) -> Any:
    return serving.llm.llm_engine.engine_core.engine_core


def load(serving: Any, model: Path, fails: bool = False) -> None:
    """New weights, by the three calls of a trainer, without a name and without a pause."""
    serving.llm.start_weight_update()
    serving.llm.update_weights({"update_info": {"path": str(model), "fails": fails}})
    serving.llm.finish_weight_update()


def update(serving: Any, model: Path, name: Any) -> None:
    """As a trainer does it: nothing runs meanwhile, and the version is named."""
    core(serving).pause_scheduler()
    load(serving, model)
    serving.llm.update_weight_version(name)
    core(serving).resume_scheduler()


def fail(serving: Any, model: Path) -> bool:
    try:
        load(serving, model, fails=True)
    except RuntimeError as error:
        return "half of the weights" in str(error)
    return False


def name_version(serving: Any, name: Any) -> None:
    serving.llm.update_weight_version(name)


def pause(serving: Any, mode: str, clear: bool) -> str:
    """What vLLM answers to a pause, and how the engine goes on."""
    try:
        core(serving).pause_scheduler(mode, clear)
    except RuntimeError as error:
        return str(error)
    return ""


def resume(serving: Any) -> None:
    core(serving).resume_scheduler()


def patience(serving: Any, seconds: float) -> None:
    """For what never ends, which a test need not wait for as long as a user may."""
    from vcache_backend.integration.vllm.worker import worker

    worker.CLOSE_SECONDS = seconds


def below_the_engine(serving: Any, what: str, *arguments: Any) -> None:
    """A worker's part alone, as if vLLM had not waited for what is under way."""
    worker = serving.llm.llm_engine.model_executor.driver_worker.worker
    getattr(cpu_sleep, what)(worker, *arguments)


def sleep(serving: Any) -> None:
    serving.llm.sleep(level=1)
    serving.llm.wake_up()


# ---- without versions


@pytest.mark.parametrize("share", ["pool", "in_place"])
def test_new_weights_share_nothing_until_reset(here: Node, models: list[Path], share: str) -> None:
    """Others still have the old ones. A pause may come before, and is a reset."""
    settings = {"connector": {"share": share, "min_hit_tokens": CHUNK}}
    tokens, later, last = (new_tokens(4 * CHUNK + 1) for _ in range(3))
    with ExitStack() as undo:
        made = (here.connect(f"{x}-{share}-plain", settings, refits=True) for x in "ab")
        a, b = map(undo.enter_context, made)
        for one in a, b:
            one.ask(prepare)
        keep(a, tokens)
        a.ask(load, models[1])
        keep(a, later)
        for one, known in ((a, tokens), (b, later)):
            found = one.again(known)
            assert (found.cached, found.agrees(fresh(one, known))) == (0, True)
        b.ask(pause, "abort", True)
        b.ask(load, models[1])
        b.ask(resume)
        assert a.ask("reset")
        for one in a, b:
            # The first step after a reset says that earlier ones have stored.
            keep(one, new_tokens(CHUNK))
        computed = keep(a, last)
        hit = b.one(last)
        assert (hit.cached, hit.agrees(computed)) == (4 * CHUNK, True)
        # They may also come while vLLM sleeps, and nobody need say so.
        b.ask(sleep)
        assert a.again(last).cached == 0
        for one in b, a:
            keep(one, new_tokens(CHUNK))
        computed = keep(b, tokens)
        hit = a.one(tokens)
        assert (hit.cached, hit.agrees(computed)) == (4 * CHUNK, True)


@pytest.mark.skipif(bool(vllm_cases.missing()), reason="no LMCache")
def test_with_lmcache_new_weights_share_nothing_until_reset(here: Node, models: list[Path]) -> None:
    """Nor is stored what a request goes on to compute, before the reset or after it. A pause is a
    reset."""
    tokens, later, last = (new_tokens(4 * CHUNK + 1) for _ in range(3))
    goes_on, stays = new_tokens(CHUNK // 2), new_tokens(CHUNK // 2)
    told = {"lmcache": {"save_decode_cache": True}, "refits": True}
    with here.start("lmcache-a", **told) as a, here.start("lmcache-b", **told) as b:
        for one in a, b:
            one.ask(prepare)
        here.keep(a, tokens)
        a.add("goes on", goes_on, max_tokens=2 * CHUNK)
        a.step(2)
        a.ask(load, models[1])
        goes_on += a.finish("goes on")["goes on"].tokens
        for one, known in ((a, tokens), (a, later), (b, later), (b, goes_on)):
            found = one.again(known)
            assert (found.cached, found.agrees(fresh(one, known))) == (0, True)
        assert b.again(tokens).cached == 4 * CHUNK
        b.ask(load, models[1])
        b.ask(pause, "abort", True)
        b.ask(resume)
        a.add("stays", stays, max_tokens=2 * CHUNK)
        a.step(2)
        assert not a.ask("reset"), "vLLM keeps its own cache while a request runs"
        stays += a.finish("stays")["stays"].tokens
        computed = here.keep(a, last)
        hit = b.one(last)
        assert (hit.cached, hit.agrees(computed)) == (4 * CHUNK, True)
        for known in tokens, stays:
            assert b.again(known).cached == 0
        assert a.ask("reset"), "of the whole namespace"
        assert b.again(last).cached == 0


# ---- what a version is


def test_any_name_is_a_version_or_none() -> None:
    """What is no text names nothing. Half of a surrogate pair comes out of JSON."""
    for name in ("x" * 1_000_000, "v\udc80é\0\n\x1b[31m", "../../v0", "", None, 7, b"v"):
        shared = isinstance(name, str) and bool(name)
        assert (versions.digest(name) == versions.digest(name)) == shared


def fresh(instance: Instance, tokens: list[int]) -> Answer:
    return instance.one(tokens, fresh=True, params={"vcache": {"store": False}})


def test_instances_updated_in_turn_share_within_a_version_and_never_across(two: Two) -> None:
    tokens, more = new_tokens(4 * CHUNK + 1), new_tokens(4 * CHUNK + 1)
    old = keep(two.a, tokens)
    hit = two.b.one(tokens)
    assert (hit.cached, hit.agrees(old)) == (4 * CHUNK, True)
    two.b.ask(update, two.models[1], two.new)
    new = keep(two.b, tokens)
    assert (new.cached, new.agrees(fresh(two.b, tokens))) == (0, True)
    assert not new.agrees(old), "other weights give another answer"
    keep(two.a, more)
    assert two.b.one(more).cached == 0, "an old instance stores into the old version"
    again = two.a.one(tokens)
    assert (again.cached, again.agrees(old)) == (4 * CHUNK, True)
    two.a.ask(update, two.models[1], two.new)
    hit = two.a.one(tokens)
    assert (hit.cached, hit.agrees(new)) == (4 * CHUNK, True)


def test_what_runs_over_an_update_goes_into_no_version(two: Two) -> None:
    """Nothing was paused, and vLLM's own cache was not emptied. Nobody finds what a request has
    computed with old weights, or behind them; what is computed anew may be found."""
    old, new = new_tokens(4 * CHUNK + 1), new_tokens(4 * CHUNK + 1)
    keep(two.a, old)
    two.a.add("over", new[: 2 * CHUNK + 1], max_tokens=2 * CHUNK)
    assert two.a.step(3) == {}
    two.a.ask(load, two.models[1])
    assert two.a.step(3) == {}
    two.a.ask(name_version, two.new)
    answer = two.a.finish("over")["over"]
    whole = new[: 2 * CHUNK + 1] + answer.tokens
    longer = old + new_tokens(2 * CHUNK)
    two.b.ask(update, two.models[1], two.new)
    finds_nothing(two.a, two.b, whole, longer)
    # Of vLLM's own cache: in place it keeps what is old, and nothing behind it is shared.
    computed = two.a.run(Prompt(longer), Prompt(whole))
    if two.a.in_place:
        finds_nothing(two.a, two.b, whole, longer)
    else:
        assert [one.cached for one in computed] == [0, 0]
    assert two.a.ask("told")
    for tokens in (whole, longer):
        found = two.b.one(tokens)
        assert (found.cached > 0, found.agrees(fresh(two.b, tokens))) == (not two.a.in_place, True)
    assert two.b.ask("told")
    two.a.forget()
    hit = two.a.one(longer)
    assert (hit.cached, hit.agrees(fresh(two.b, longer))) == (6 * CHUNK, True)


def finds_nothing(there: Instance, reader: Instance, *prompts: list[int]) -> None:
    """Whether `reader`, of the same version, finds nothing of these prompts, though all that
    `there` has computed is known."""
    assert there.ask("told")
    for tokens in prompts:
        found = reader.one(tokens, params={"vcache": {"store": False}})
        assert (found.cached, found.agrees(fresh(reader, tokens))) == (0, True)
        reader.forget()


def test_a_session_that_waits_over_an_update_goes_into_no_version(two: Two) -> None:
    """Its first turn fills a part of a block, which the second one completes with new weights."""
    first, second = new_tokens(20), new_tokens(4 * CHUNK)
    said = two.a.ask("turn", Prompt(first, max_tokens=2))
    two.a.ask(load, two.models[1])
    two.a.ask(name_version, two.new)
    said_then = two.a.ask("turn", Prompt(second, max_tokens=2))
    two.a.ask("hang_up")
    assert two.a.ask("told")
    two.b.ask(update, two.models[1], two.new)
    # vLLM drops a turn's last token, which no step has computed.
    whole = first + said[:-1] + second
    found = two.b.one(whole)
    assert (found.cached, found.agrees(fresh(two.b, whole))) == (0, True)
    assert found.tokens[:2] != said_then, "the session builds on the old weights"


def test_what_an_update_that_fails_halfway_leaves_is_shared_with_nobody(two: Two) -> None:
    """Nobody has named it, and a reset does not either. Others' chunks stay where they are."""
    tokens, later = new_tokens(4 * CHUNK + 1), new_tokens(4 * CHUNK + 1)
    old = keep(two.a, tokens)
    assert two.b.ask(fail, two.models[1])
    two.b.forget()
    broken = keep(two.b, tokens)
    assert broken.cached == 0
    assert not broken.agrees(old), "some of the weights are other ones"
    keep(two.b, later)
    found = two.a.one(later)
    assert (found.cached, found.agrees(fresh(two.a, later))) == (0, True)
    assert two.b.ask("reset")
    assert two.b.one(later).cached == 0
    two.b.ask(load, two.models[0])
    two.b.ask(name_version, two.old)
    two.b.forget()
    hit = two.b.one(tokens)
    assert (hit.cached, hit.agrees(old)) == (4 * CHUNK, True)


@pytest.mark.parametrize("mode", ["abort", "keep"])
def test_a_load_under_way_over_an_update(two: Two, mode: str) -> None:
    """Of a request that vLLM keeps, the prefix is the old one, as vLLM's own hit would be; nobody
    finds what it computes, but what is computed anew may be found."""
    tokens, first = new_tokens(4 * CHUNK + 1), new_tokens(2 * CHUNK + 1)
    keep(two.a, tokens)
    keep(two.a, first)
    assert two.b.one(first).cached == 2 * CHUNK
    copy = PULL
    with meddled(two.b, copy, "slow", 60.0):
        two.b.add("over", tokens, max_tokens=CHUNK)
        eventually(lambda: two.b.step(1) == {} and two.b.ask("calls")[copy] >= 1)
        if mode == "abort":
            # An engine in this process does not tell its front end whom a pause has aborted.
            two.b.ask("abort", "over")
        refused = two.b.ask(pause, mode, True)
        two.b.ask(load, two.models[1])
        two.b.ask(name_version, two.new)
        two.b.ask(resume)
    if mode == "keep":
        assert "waiting for remote KV transfer" in refused
        whole = tokens + two.b.finish("over")["over"].tokens
    else:
        whole = tokens
    two.a.ask(update, two.models[1], two.new)
    finds_nothing(two.b, two.a, whole, tokens)
    # vLLM's own cache has the old prefix if it has kept the request, and shows it to others in
    # place alone, where none of it is published.
    stale = mode == "keep" and two.b.in_place
    again = two.b.one(tokens)
    assert again.agrees(fresh(two.b, tokens)) or stale
    two.b.run(Prompt(whole))
    assert two.b.ask("told")
    found = two.a.one(whole)
    assert (found.cached > 0, found.agrees(fresh(two.a, whole))) == (not stale, True)


@pooled
def test_after_a_sleep_with_the_same_weights_the_pool_is_warm(two: Two) -> None:
    tokens = new_tokens(4 * CHUNK + 1)
    computed = keep(two.a, tokens)
    two.a.ask(sleep)
    assert two.a.one(tokens).cached == 0, "nobody has named it yet"
    two.a.ask(sleep)
    two.a.ask(name_version, two.old)
    hit = two.a.one(tokens)
    assert (hit.cached, hit.agrees(computed)) == (4 * CHUNK, True)
    again = two.b.again(tokens)
    assert (again.cached, again.agrees(computed)) == (4 * CHUNK, True)


def test_the_call_reaches_an_engine_in_a_process_of_its_own(here: Node) -> None:
    settings = {"connector": {"share": "pool", "weights": "first", "min_hit_tokens": CHUNK}}
    tokens = new_tokens(4 * CHUNK + 1)
    with here.connect("apart", settings, {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}) as apart:
        before = here.chunks()
        computed = apart.one(tokens)
        here.stored(before + 4)
        for name, cached in (("first", 4), ("second", 0), ("first", 4)):
            assert apart.ask("reset")
            apart.ask(name_version, name)
            again = apart.one(tokens)
            assert (again.cached, again.agrees(computed)) == (cached * CHUNK, True)


def test_a_load_fails_and_is_computed_where_vllm_did_not_wait(here: Node) -> None:
    """Its bytes are gone with the KV cache; vLLM must not take what lies there now for them."""
    first, tokens = new_tokens(2 * CHUNK + 1), new_tokens(4 * CHUNK + 1)
    with here.connect("owner") as owner, here.connect("later") as later:
        here.keep(owner, first)
        computed = here.keep(owner, tokens)
        later.ask(prepare)
        assert later.one(first, max_tokens=1).cached == 2 * CHUNK
        later.ask(patience, 0.1)
        with meddled(later, PULL, "slow", 60.0):
            later.add("one", tokens)
            assert later.step(2) == {}
            later.ask(below_the_engine, "sleep")
        later.ask(below_the_engine, "wake_up")
        assert later.finish("one")["one"].agrees(computed)
