"""Real vLLM on the CPU with our own connector and with LMCache: what requests are answered,
whichever way their KV comes; in place: test_real_in_place.

Every answer is compared with vLLM's own. Of each integration instance `a` stores, and computes long
prompts in several steps; a `reader`, another process, has never computed what it is asked and so
can only have it from the pool; `aside` is vLLM alone; `tiny` has hardly room."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import vllm_cases
from vllm_cases import BLOCK, CHUNK, TINY, Answer, Instance, Node, Prompt, here, missing, new_tokens
from vllm_models import write_lora

from vcache_backend.integration.lmcache.scheduler import TAG, scope

LORA = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 2}
AS_GIVEN = {"environment": {"VLLM_DISABLE_REQUEST_ID_RANDOMIZATION": "1"}}
"""A request has the name that a client gives it."""
ARGUMENTS: dict[str, Any] = {"a": {"max_num_batched_tokens": 256, "enable_chunked_prefill": True}}
ARGUMENTS |= {"tiny": TINY | AS_GIVEN}
ARGUMENTS |= {"adapters": LORA, "adapters-too": LORA}
"""Of vLLM, by the name of the instance."""
HITS = 3 * CHUNK

lmcache_here = pytest.mark.skipif(bool(missing()), reason=missing() or "LMCache is here")
__all__ = ["here"]


Fleet = Callable[[str], Instance]
"""The instances of one integration on a node, each started by the first test to use it."""


@pytest.fixture(scope="module")
def aside(here: Node) -> Instance:
    return here.alone("aside")


MARKS = {"vllm": vllm_cases.needs_vllm, "lmcache": lmcache_here}
WAYS = [pytest.param(way, marks=mark) for way, mark in MARKS.items()]
only_lmcache = pytest.mark.parametrize("fleet", WAYS[1:], indirect=True)


@pytest.fixture(scope="module", params=WAYS)
def fleet(request: pytest.FixtureRequest, here: Node, aside: Instance) -> Fleet:
    start: Any = here.connect if request.param == "vllm" else here.start

    @functools.cache
    def started(name: str) -> Any:
        return start(f"{request.param}-{name}", **ARGUMENTS.get(name, {}))

    for name in ("a", "reader"):
        started(name)
    return started


@pytest.fixture
def a(fleet: Fleet) -> Instance:
    return fleet("a")


@pytest.fixture
def reader(fleet: Fleet) -> Instance:
    return fleet("reader")


@pytest.fixture
def tiny(fleet: Fleet) -> Instance:
    return fleet("tiny")


# ---- hits


@pytest.mark.parametrize("tail", [0, 1, 17, BLOCK])
def test_anothers_prefix_is_as_good_as_vllms_own(
    here: Node, a: Instance, reader: Instance, tail: int
) -> None:
    """The same tokens are cached in both, so the same are computed: tokens and log probabilities
    are equal to the last bit. Of a prompt's last token as much as has to be: our connector loads
    whole blocks, LMCache tokens."""
    tokens, with_lmcache = new_tokens(HITS + tail), a.name.startswith("lmcache")
    computed = here.keep(a, tokens)
    own, from_pool = a.one(tokens), reader.one(tokens)
    hits = HITS if tail else HITS - (1 if with_lmcache else BLOCK)
    assert (own.cached, from_pool.cached) == (hits, hits)
    assert from_pool.agrees(computed)
    assert from_pool.said == own.said or (with_lmcache and not tail)


def test_a_hit_whose_rest_takes_several_steps(
    here: Node, a: Instance, reader: Instance, aside: Instance
) -> None:
    """`a` computes 256 tokens a step at most, after what it loads, and stores all of it."""
    tokens = new_tokens(HITS + 1)
    longer = tokens[:HITS] + new_tokens(9 * CHUNK + 5)
    computed = here.keep(a, tokens)
    assert a.again(tokens).agrees(computed)
    a.forget()
    before = here.chunks()
    found = a.one(longer)
    assert found.cached == HITS
    assert found.agrees(aside.one(longer))
    here.stored(before + 9)
    from_pool = reader.one(longer)
    assert from_pool.cached == HITS + 9 * CHUNK
    assert from_pool.said == a.one(longer).said


def test_wrong_bytes_in_a_pool_are_wrong_tokens(here: Node, a: Instance, reader: Instance) -> None:
    """What the tests here compare does come from the pool."""
    tokens = new_tokens(HITS + 17)
    computed = here.keep(a, tokens)
    with here.corrupted():
        wrong = reader.again(tokens)
    assert wrong.cached == HITS
    assert wrong.differs(computed)
    assert reader.again(tokens).agrees(computed)


@only_lmcache
def test_a_prompt_that_is_rated_is_computed(
    here: Node, a: Instance, reader: Instance, aside: Instance
) -> None:
    """Its own log probabilities are wanted for every token, so none may come from the pool. With our
    connector: test_connector."""
    tokens = new_tokens(HITS + 5)
    here.keep(a, tokens)
    alone, rated = aside.one(tokens, rate=True), reader.one(tokens, rate=True)
    assert (rated.cached, len(rated.logprobs)) == (0, len(tokens) - 1 + len(rated.tokens))
    assert rated.said == alone.said
    assert reader.again(tokens).cached == HITS


# ---- who shares with whom


def test_salts_never_share_but_with_themselves(here: Node, a: Instance, reader: Instance) -> None:
    tokens = new_tokens(HITS + 1)
    plain, red = here.keep(a, tokens), here.keep(a, tokens, salt="red")
    assert reader.again(tokens, salt="blue").cached == 0
    for salt, computed in ((None, plain), ("red", red)):
        from_pool = reader.again(tokens, salt=salt)
        assert from_pool.cached == HITS
        assert from_pool.agrees(computed)
    tokens = new_tokens(HITS + 1)
    here.keep(a, tokens, salt="red")
    assert reader.again(tokens).cached == 0


def test_an_adapter_is_what_lies_at_its_path(here: Node, fleet: Fleet, tmp_path: Path) -> None:
    """Two of one name."""
    one = str(write_lora(tmp_path / "1/sql", 1))
    two = str(write_lora(tmp_path / "2/sql", 2))
    adapters = fleet("adapters")
    tokens = new_tokens(4 * CHUNK + 1)
    answers = {lora: here.keep(adapters, tokens, lora=lora) for lora in (one, two, None)}
    assert len({tuple(answer.tokens) for answer in answers.values()}) == 3
    for lora, computed in answers.items():
        own, from_pool = adapters.one(tokens, lora=lora), adapters.again(tokens, lora=lora)
        assert (from_pool.cached, from_pool.said) == (4 * CHUNK, own.said)
        assert from_pool.agrees(computed)
    write_lora(tmp_path / "1/sql", 3)
    assert adapters.again(tokens, lora=one).cached == 0, "trained again into the same folder"


def test_kv_that_vllm_mistakes_is_not_passed_on(here: Node, fleet: Fleet, tmp_path: Path) -> None:
    """Its own prefix cache does not see that an adapter was trained again, nor its workers that
    another one has its number.
    """
    one = tmp_path / "one"
    two = tmp_path / "two"
    adapters = fleet("adapters")
    reader = fleet("adapters-too")
    tokens = [*new_tokens(4 * CHUNK), 5]
    here.keep(adapters, tokens, lora=str(write_lora(one, 1)), lora_id=1)
    for folder, seed, number, cached in ((one, 2, 2, 4 * CHUNK), (two, 3, 1, 0)):
        lora = str(write_lora(folder, seed))
        wrong = adapters.one(tokens, lora=lora, lora_id=number)
        here.keep(adapters, new_tokens(CHUNK))
        right = reader.one(tokens, lora=lora, lora_id=seed)
        assert (wrong.cached, right.cached) == (cached, 0)
        assert right.differs(wrong)


def fetch(serving: Any, request: Prompt, inplace: bool) -> bool:
    """Add an adapter of which nothing is there until a worker fetches it, as from the hub."""
    from vllm.lora.worker_manager import WorkerLoRAManager

    load = WorkerLoRAManager._load_adapter

    def fetch_and_load(self: Any, lora_request: Any) -> Any:
        write_lora(Path(lora_request.lora_path), request.lora_id)
        return load(self, lora_request)

    WorkerLoRAManager._load_adapter = fetch_and_load
    try:
        return bool(serving.adapt(request, inplace))
    finally:
        WorkerLoRAManager._load_adapter = load


def test_an_adapter_is_what_vllm_has_read_of_it(here: Node, fleet: Fleet, tmp_path: Path) -> None:
    """One is trained again between its loading and its first request. Another is replaced under a
    request, which goes on with the new one. What a worker fetches is seen once it is there.
    """
    adapters, reader = fleet("adapters"), fleet("adapters-too")
    old, new = (str(write_lora(tmp_path / f"{i}/sql", i)) for i in (1, 2))
    fetched = [str(tmp_path / f"{i}/sql") for i in (3, 5)]
    prompt, goes_on = Prompt(new_tokens(HITS), lora=old, lora_id=11), new_tokens(CHUNK)
    assert adapters.ask("adapt", prompt, False)
    write_lora(Path(old), 4)
    [wrong] = adapters.run(prompt)
    adapters.add("goes on", goes_on, lora=new, lora_id=12, max_tokens=2 * CHUNK + 1)
    adapters.step(2)
    assert adapters.ask(fetch, Prompt([], lora=fetched[0], lora_id=12), True)
    goes_on += adapters.finish("goes on")["goes on"].tokens
    assert adapters.ask(fetch, Prompt([], lora=fetched[1], lora_id=13), False)
    here.keep(adapters, new_tokens(CHUNK), lora=fetched[1], lora_id=13)
    [right] = reader.run(prompt)
    assert right.cached == 0
    assert right.differs(wrong)
    found = reader.one(goes_on, lora=new, lora_id=12)
    assert found.cached == CHUNK
    assert found.agrees(reader.one(goes_on, lora=new, lora_id=12, fresh=True))


# ---- requests that end early, or are interrupted


def test_an_aborted_request_keeps_no_blocks(
    here: Node, a: Instance, tiny: Instance, aside: Instance
) -> None:
    """Before its load, while it is under way, and when there was no room for it; its name comes
    again with another prompt. Then somebody needs all blocks there are.
    """
    tokens, other = new_tokens(4 * CHUNK + 1), new_tokens(4 * CHUNK + 1)
    computed = here.keep(a, tokens)
    for steps in (0, 1, 2):
        tiny.add(f"short {steps}", tokens)
        tiny.step(steps)
        tiny.ask("abort", f"short {steps}")
        assert tiny.step(2) == {}
    tiny.add("long", new_tokens(4 * CHUNK + 1), max_tokens=60)
    tiny.step(2)
    tiny.add("no room", tokens)
    tiny.step(2)
    tiny.ask("abort", "no room")
    tiny.add("no room", other)
    assert tiny.finish("long", "no room")["no room"].agrees(aside.one(other))
    whole = new_tokens(13 * BLOCK)
    assert tiny.one(whole, max_tokens=BLOCK).agrees(aside.one(whole, max_tokens=BLOCK))
    answer = tiny.one(tokens)
    assert answer.cached == 4 * CHUNK
    assert answer.agrees(computed)


def test_preempted_requests_go_on_where_they_were(
    here: Node, a: Instance, tiny: Instance, aside: Instance
) -> None:
    """There is room for two to grow; what the third had computed comes back from the pool."""
    prompts = [Prompt(new_tokens(2 * CHUNK), max_tokens=20) for _ in range(3)]
    here.keep(a, prompts[0].tokens)
    preempted = tiny.counter("vllm:num_preemptions")
    answers = tiny.run(*prompts, together=True)
    assert tiny.counter("vllm:num_preemptions") > preempted
    assert all(map(Answer.agrees, answers, aside.run(*prompts)))


# ---- what only LMCache has


@only_lmcache
def test_a_tag_separates_and_a_forged_one_fails(here: Node, a: Instance, reader: Instance) -> None:
    """That of a salt is ours to make. One of several parts is a tag, too."""
    tokens = new_tokens(2 * CHUNK + 1)
    here.keep(a, tokens, salt="red")
    forged = {TAG: scope("red", None)}
    assert reader.again(tokens, params=forged).cached == 0
    assert reader.again(tokens, params=forged, salt="blue").cached == 0
    tokens = new_tokens(2 * CHUNK + 1)
    here.keep(a, tokens, params={"lmcache.tag.team": "red"})
    assert reader.again(tokens).cached == 0
    assert reader.again(tokens, params={"lmcache.tag.team": "blue"}).cached == 0
    assert reader.again(tokens, params={"lmcache.tag.team": "red"}).cached == 2 * CHUNK
    tokens = new_tokens(2 * CHUNK + 1)
    answer = here.keep(a, tokens, params={"lmcache.tag.team": ["red"]})
    assert reader.again(tokens, params={"lmcache.tag.team": "red"}).cached == 0
    hit = reader.again(tokens, params={"lmcache.tag.team": ["red"]})
    assert (hit.cached, hit.agrees(answer)) == (2 * CHUNK, True)


@only_lmcache
def test_without_a_hash_seed_it_steps_aside_and_says_so_once(here: Node, a: Instance) -> None:
    """Two instances would never agree on a key."""
    unseeded = here.start("unseeded", environment={"PYTHONHASHSEED": None})
    tokens, before = new_tokens(2 * CHUNK + 1), here.chunks()
    alone = unseeded.one(tokens)
    assert unseeded.again(tokens).cached == 0
    assert here.chunks() == before
    assert a.one(tokens).said == alone.said
    # LMCache says the reason, too.
    said = "vLLM serves without it"
    (line,) = [line for line in unseeded.log.splitlines() if said in line]
    assert "vcache caches nothing: PYTHONHASHSEED is not set" in line
