"""Real vLLM with LMCacheConnectorV1 and vcache on the CPU, selected from LMCache's YAML alone: what requests are answered.

Every answer is compared with vLLM's own. Instance `a` stores; instance `b`, another process, has never computed what it is asked
and so can only have it from the pool; `aside` works without the pool, as vLLM alone does.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from processes import eventually
from vllm_cases import (
    ANSWER_SECONDS,
    BLOCK,
    CHUNK,
    LEASE_SECONDS,
    TOKEN_BYTES,
    Answer,
    Instance,
    Node,
    Prompt,
    missing,
    new_tokens,
    node,
    write_lora,
)

from vcache_backend.integration.lmcache.scope import TAG, scope

pytestmark = [
    pytest.mark.skipif(bool(missing()), reason=missing() or "vLLM is here"),
    # An engine starts in 10 s when nothing else runs, two ranks in 30: each is started by the first test to use it.
    pytest.mark.timeout(300),
]


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    with node(tmp_path_factory.mktemp("vllm")) as made:
        yield made


@pytest.fixture(scope="module")
def pair(here: Node) -> tuple[Instance, Instance]:
    """Two instances that start beside each other. `a` computes a long prompt in several steps."""
    return here.start("a", max_num_batched_tokens=256, enable_chunked_prefill=True), here.start("b")


@pytest.fixture(scope="module")
def a(pair: tuple[Instance, Instance]) -> Instance:
    return pair[0]


@pytest.fixture(scope="module")
def b(pair: tuple[Instance, Instance]) -> Instance:
    return pair[1]


@pytest.fixture(scope="module")
def aside(here: Node) -> Instance:
    """Without PYTHONHASHSEED two instances would never agree on a key."""
    return here.start("aside", environment={"PYTHONHASHSEED": None})


@pytest.fixture(scope="module")
def tiny(here: Node) -> Instance:
    """With KV blocks for 448 tokens, and no prefix cache of its own."""
    return here.start("tiny", kv_cache_memory_bytes=15 * BLOCK * TOKEN_BYTES, enable_prefix_caching=False, max_model_len=448)


@pytest.fixture(scope="module")
def other(here: Node) -> Instance:
    """With another chunk size, LMCache's own tier in host memory beside ours, and LoRA."""
    lmcache = {"chunk_size": 2 * CHUNK, "local_cpu": True, "max_local_cpu_size": 0.1, "store_location": None}
    return here.start("other", lmcache, enable_lora=True, max_lora_rank=8, max_loras=2)


@pytest.fixture(scope="module")
def loading(here: Node) -> Instance:
    """LMCache answers a look-up only when it has the chunks in its hands."""
    return here.start("loading", {"enable_async_loading": True})


@pytest.fixture(scope="module")
def ranks(here: Node) -> Instance:
    """Two tensor-parallel ranks: front end, engine and workers are processes of their own, as in production."""
    environment: dict[str, str | None] = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    return here.start("ranks", None, environment, tensor_parallel_size=2, distributed_executor_backend="mp")


def stored(here: Node, chunks: int) -> None:
    """Stores become visible in the background."""
    eventually(lambda: here.stats().chunks >= chunks)


def keep(here: Node, instance: Instance, tokens: list[int], **more: Any) -> Any:
    """Have `instance` compute and store a prompt nobody has seen; its answer, once every whole chunk is visible."""
    before = here.stats().chunks
    answer = instance.one(tokens, **more)
    assert answer.cached == 0
    stored(here, before + len(tokens) // CHUNK)
    return answer


# ---- hits


@pytest.mark.parametrize("tail", [1, 17, BLOCK], ids="{} tokens after the last whole chunk".format)
def test_another_instances_prefix_is_as_good_as_vllms_own(here: Node, a: Instance, b: Instance, tail: int) -> None:
    """The same tokens are cached in both, so the same are computed: tokens and log probabilities are equal to the last bit."""
    tokens = new_tokens(4 * CHUNK + tail)
    computed = keep(here, a, tokens)
    own, from_pool = a.one(tokens), b.one(tokens)
    assert (own.cached, from_pool.cached) == (4 * CHUNK, 4 * CHUNK)
    assert from_pool.said == own.said
    assert from_pool.agrees(computed)


def test_of_a_prompt_that_is_all_there_the_last_token_is_computed(here: Node, a: Instance, b: Instance) -> None:
    tokens = new_tokens(4 * CHUNK)
    computed, from_pool = keep(here, a, tokens), b.one(tokens)
    assert from_pool.cached == 4 * CHUNK - 1
    assert from_pool.agrees(computed)


def test_a_prompt_computed_in_several_steps_is_stored_whole(here: Node, a: Instance, b: Instance) -> None:
    tokens = new_tokens(13 * CHUNK + 1)
    keep(here, a, tokens)
    own, from_pool = a.one(tokens), b.one(tokens)
    assert from_pool.cached == 13 * CHUNK
    assert from_pool.said == own.said


def test_a_shared_beginning_is_a_hit_and_the_rest_is_computed(here: Node, a: Instance, b: Instance, aside: Instance) -> None:
    tokens = new_tokens(4 * CHUNK + 1)
    branch = tokens[: 2 * CHUNK] + new_tokens(2 * CHUNK + 5)
    keep(here, a, tokens)
    aside.one(tokens)
    own, from_pool = aside.one(branch), b.one(branch)
    assert (own.cached, from_pool.cached) == (2 * CHUNK, 2 * CHUNK)
    assert from_pool.said == own.said


def test_the_pool_continues_vllms_own_cache(here: Node, a: Instance, b: Instance, aside: Instance) -> None:
    """`b` has a chunk and a half in blocks of its own, which are not written again, and takes the rest from the pool."""
    tokens = new_tokens(4 * CHUNK + 1)
    keep(here, b, tokens[: CHUNK + BLOCK + 1])
    before = here.stats().chunks
    assert a.one(tokens).cached == CHUNK
    stored(here, before + 3)
    aside.one(tokens)
    own, from_both = aside.one(tokens), b.one(tokens)
    assert (own.cached, from_both.cached) == (4 * CHUNK, 4 * CHUNK)
    assert from_both.said == own.said


def test_a_miss_is_vllms_ordinary_prefill(a: Instance, aside: Instance) -> None:
    tokens = new_tokens(3 * CHUNK + 9)
    alone = aside.one(tokens)
    missed = a.one(tokens)
    assert (alone.cached, missed.cached) == (0, 0)
    assert missed.agrees(alone)


def test_less_than_a_chunk_is_not_stored(here: Node, a: Instance, b: Instance) -> None:
    tokens, before = new_tokens(CHUNK - 1), here.stats().chunks
    assert (a.one(tokens).cached, b.one(tokens).cached) == (0, 0)
    assert here.stats().chunks == before


def test_several_requests_of_one_step_each_have_their_own_prefix(here: Node, a: Instance, b: Instance) -> None:
    prompts = [Prompt(new_tokens(count * CHUNK + 3)) for count in (1, 2, 3)]
    computed = [keep(here, a, prompt.tokens) for prompt in prompts]
    answers = b.run(*prompts, together=True)
    assert [answer.cached for answer in answers] == [CHUNK, 2 * CHUNK, 3 * CHUNK]
    assert all(map(Answer.agrees, answers, computed))


def test_a_prompt_that_is_rated_is_computed(here: Node, a: Instance, b: Instance, aside: Instance) -> None:
    """Its own log probabilities are wanted for every token, so none may come from the pool."""
    tokens = new_tokens(2 * CHUNK + 5)
    keep(here, a, tokens)
    alone, rated = aside.one(tokens, rate=True), b.one(tokens, rate=True)
    assert (rated.cached, len(rated.logprobs)) == (0, len(tokens) - 1 + len(rated.tokens))
    assert rated.said == alone.said
    assert b.again(tokens).cached == 2 * CHUNK


def test_wrong_bytes_in_the_pool_are_wrong_tokens(here: Node, a: Instance, b: Instance) -> None:
    """What the tests above compare does come from the pool."""
    tokens = new_tokens(4 * CHUNK + 17)
    computed = keep(here, a, tokens)
    with here.corrupted():
        wrong = b.again(tokens)
    assert wrong.cached == 4 * CHUNK
    assert wrong.differs(computed)
    assert b.again(tokens).agrees(computed)


# ---- who shares with whom


def test_salts_never_share_but_with_themselves(here: Node, a: Instance, b: Instance) -> None:
    tokens = new_tokens(2 * CHUNK + 1)
    red = keep(here, a, tokens, salt="red")
    assert b.again(tokens).cached == 0
    assert b.again(tokens, salt="blue").cached == 0
    from_pool = b.again(tokens, salt="red")
    assert from_pool.cached == 2 * CHUNK
    assert from_pool.agrees(red)


def test_a_salted_request_does_not_find_the_plain_one(here: Node, a: Instance, b: Instance) -> None:
    tokens = new_tokens(2 * CHUNK + 1)
    keep(here, a, tokens)
    assert b.again(tokens, salt="red").cached == 0
    assert b.again(tokens).cached == 2 * CHUNK


def test_a_forged_tag_opens_nothing(here: Node, a: Instance, b: Instance) -> None:
    tokens = new_tokens(2 * CHUNK + 1)
    keep(here, a, tokens, salt="red")
    forged = {TAG: scope("red", None)}
    assert b.again(tokens, params=forged).cached == 0
    assert b.again(tokens, params=forged, salt="blue").cached == 0


def test_a_users_own_tags_keep_requests_apart(here: Node, a: Instance, b: Instance) -> None:
    tokens = new_tokens(2 * CHUNK + 1)
    keep(here, a, tokens, params={"lmcache.tag.team": "red"})
    assert b.again(tokens).cached == 0
    assert b.again(tokens, params={"lmcache.tag.team": "blue"}).cached == 0
    assert b.again(tokens, params={"lmcache.tag.team": "red"}).cached == 2 * CHUNK


def test_another_chunk_size_is_another_world(here: Node, a: Instance, other: Instance) -> None:
    tokens = new_tokens(4 * CHUNK + 1)
    computed = keep(here, a, tokens)
    first = other.one(tokens)
    assert first.cached == 0
    assert first.agrees(computed)
    assert len(here.stats().namespaces) >= 2


def test_an_adapter_is_told_apart_by_what_lies_at_its_path(here: Node, other: Instance, tmp_path: Path) -> None:
    one, two = str(write_lora(tmp_path / "one", 1)), str(write_lora(tmp_path / "two", 2))
    tokens, before = new_tokens(4 * CHUNK + 1), here.stats().chunks
    adapted = other.one(tokens, lora=one)
    assert adapted.cached == 0
    stored(here, before + 2)
    from_pool = other.again(tokens, lora=one)
    assert (from_pool.cached, from_pool.said) == (4 * CHUNK, other.one(tokens, lora=one).said)
    assert from_pool.agrees(adapted)
    plain, second = other.again(tokens), other.again(tokens, lora=two)
    assert (plain.cached, second.cached) == (0, 0)
    assert len({tuple(answer.tokens) for answer in (adapted, plain, second)}) == 3
    write_lora(tmp_path / "one", 3)
    assert other.again(tokens, lora=one).cached == 0, "trained again into the same folder"


# ---- modes and failures


def test_without_a_hash_seed_it_steps_aside_and_says_so_once(here: Node, a: Instance, aside: Instance) -> None:
    tokens, before = new_tokens(2 * CHUNK + 1), here.stats().chunks
    alone = aside.one(tokens)
    assert aside.again(tokens).cached == 0
    assert here.stats().chunks == before
    assert a.one(tokens).said == alone.said
    lines = [line for line in aside.log.splitlines() if line.startswith("vcache")]
    assert ["stepped aside: PYTHONHASHSEED is not set" in line for line in lines] == [True]


def test_lmcaches_own_tier_beside_us(here: Node, other: Instance) -> None:
    """Host memory has the chunks too, as copies: the pool may lose them."""
    tokens, before = new_tokens(4 * CHUNK + 1), here.stats().chunks
    computed = other.one(tokens)
    stored(here, before + 2)
    again = other.again(tokens)
    assert again.cached == 4 * CHUNK
    assert again.agrees(computed)
    eventually(lambda: here.stats().leases == 0)
    with here.corrupted():
        from_host = other.again(tokens)
    assert from_host.cached == 4 * CHUNK
    assert from_host.agrees(computed)


def test_preempted_requests_go_on_where_they_were(here: Node, a: Instance, tiny: Instance, aside: Instance) -> None:
    """There is room for two, and the second has to go; it is not cached at all, since its tag is none (LMCache could not hash it)."""
    prompts = [Prompt(new_tokens(2 * CHUNK + 9), max_tokens=120) for _ in range(3)]
    keep(here, a, prompts[0].tokens)
    prompts[1] = prompts[1]._replace(params={"lmcache.tag.team": ["red"]})
    before, preempted = here.stats().chunks, tiny.ask("counter", "vllm:num_preemptions")
    answers = tiny.run(*prompts, together=True)
    assert tiny.ask("counter", "vllm:num_preemptions") > preempted
    assert all(map(Answer.agrees, answers, aside.run(*prompts)))
    stored(here, before + 2)
    assert here.stats().chunks == before + 2


def test_an_aborted_request_keeps_no_lease(here: Node, a: Instance, tiny: Instance) -> None:
    """It was looked up, and so its chunks were leased, but there was never room to load them."""
    tokens = new_tokens(4 * CHUNK + 1)
    keep(here, a, tokens)
    eventually(lambda: here.stats().leases == 0)
    tiny.ask("add", "long", Prompt(new_tokens(4 * CHUNK + 1), max_tokens=60)._asdict())
    tiny.ask("step", 2)
    tiny.ask("add", "waiting", Prompt(tokens)._asdict())
    tiny.ask("step", 2)
    assert here.stats().leases == 1
    tiny.ask("abort", "waiting")
    tiny.ask("abort", "long")
    tiny.ask("step", 1)
    eventually(lambda: here.stats().leases == 0, LEASE_SECONDS + 10)
    assert tiny.one(tokens).cached == 4 * CHUNK


def test_asynchronous_loading_is_as_good(here: Node, a: Instance, loading: Instance, aside: Instance) -> None:
    tokens = new_tokens(4 * CHUNK + 17)
    branch = tokens[: 2 * CHUNK] + new_tokens(CHUNK)
    keep(here, a, tokens)
    aside.one(tokens)
    for prompt, cached in ((tokens, 4 * CHUNK), (branch, 2 * CHUNK)):
        own, from_pool = aside.one(prompt), loading.one(prompt)
        assert (own.cached, from_pool.cached) == (cached, cached)
        assert from_pool.said == own.said
    with here.corrupted():
        assert loading.again(tokens).differs(aside.one(tokens))
    eventually(lambda: here.stats().leases == 0, LEASE_SECONDS + 10)


def test_tensor_parallel_ranks_each_store_and_load_their_part(here: Node, ranks: Instance) -> None:
    tokens, before = new_tokens(4 * CHUNK + 17), here.stats().chunks
    computed = ranks.one(tokens)
    stored(here, before + 2 * 4)
    own, from_pool = ranks.one(tokens), ranks.again(tokens)
    assert (computed.cached, own.cached, from_pool.cached) == (0, 4 * CHUNK, 4 * CHUNK)
    assert computed.said == own.said == from_pool.said
    with here.corrupted():
        assert ranks.again(tokens).differs(computed)
    assert here.stats().chunks == before + 2 * 4
    eventually(lambda: here.stats().leases == 0, LEASE_SECONDS + 10)


def test_a_dead_server_costs_the_hits_and_nothing_else(here: Node, a: Instance, b: Instance) -> None:
    """Killed, then started again: the workers still hold the memory, and offer it."""
    tokens = new_tokens(4 * CHUNK + 17)
    computed = keep(here, a, tokens)
    assert b.again(tokens).cached == 4 * CHUNK
    here.server.kill()
    for instance in (a, b):
        alone = instance.again(tokens)
        assert alone.cached == 0
        assert alone.agrees(computed)
        assert instance.again(new_tokens(2 * CHUNK)).cached == 0
    here.serve()
    back = eventually(lambda: (answer := b.again(tokens)).cached and answer, ANSWER_SECONDS)
    assert back.cached == 4 * CHUNK
    assert back.agrees(computed)
