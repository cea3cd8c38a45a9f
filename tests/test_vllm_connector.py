"""Real vLLM with our own connector on the CPU: what requests are answered, and what they cost.

Every answer is compared with vLLM's own. Instance `a` stores, and computes long prompts in several steps; instance `b`, another
process, has never computed what it is asked and so can only have it from the pool; `aside` is vLLM alone; `tiny` has hardly room.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from processes import eventually
from vllm_cases import BLOCK, CHUNK, TOKEN_BYTES, Answer, Instance, Node, Prompt, missing, new_tokens, node

WHY_NOT = missing(())
pytestmark = [
    pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "vLLM is here"),
    # An engine starts in 10 s when nothing else runs: each is started by the first test to use it.
    pytest.mark.timeout(300),
]


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    with node(tmp_path_factory.mktemp("vllm")) as made:
        yield made


@pytest.fixture(scope="module")
def pair(here: Node) -> tuple[Instance, Instance]:
    """Two instances that start beside each other. There is room for all chunks of these tests."""
    a = here.connect("a", {"pool": {"segment_bytes": "64 MiB"}}, max_num_batched_tokens=256, enable_chunked_prefill=True)
    return a, here.connect("b", {"connector": {"min_hit_tokens": 2 * CHUNK, "sync_below_tokens": 4 * CHUNK}})


@pytest.fixture(scope="module")
def a(pair: tuple[Instance, Instance]) -> Instance:
    return pair[0]


@pytest.fixture(scope="module")
def b(pair: tuple[Instance, Instance]) -> Instance:
    return pair[1]


@pytest.fixture(scope="module")
def later(here: Node, pair: tuple[Instance, Instance]) -> Instance:
    """As `b`, but what it loads always comes between its steps."""
    return here.connect("later", {"connector": {"min_hit_tokens": 2 * CHUNK, "sync_below_tokens": 0}})


@pytest.fixture(params=["in the step", "between steps"])
def reader(request: pytest.FixtureRequest, b: Instance, later: Instance) -> Instance:
    return b if request.param == "in the step" else later


@pytest.fixture(scope="module")
def aside(here: Node, pair: tuple[Instance, Instance]) -> Instance:
    return here.alone("aside")


@pytest.fixture(scope="module")
def tiny(here: Node, pair: tuple[Instance, Instance]) -> Instance:
    """With KV blocks for 448 tokens, no prefix cache of its own, and loads between steps only."""
    settings = {"connector": {"sync_below_tokens": 0}}
    room = 15 * BLOCK * TOKEN_BYTES
    return here.connect("tiny", settings, kv_cache_memory_bytes=room, enable_prefix_caching=False, max_model_len=448)


def stored(here: Node, chunks: int) -> None:
    """Stores become visible in the background."""
    eventually(lambda: here.stats().chunks >= chunks)


def keep(here: Node, instance: Instance, tokens: list[int], **more: Any) -> Answer:
    """Have `instance` compute and store a prompt nobody has seen; its answer, once every whole chunk is visible."""
    before = here.stats().chunks
    answer = instance.one(tokens, **more)
    assert answer.cached == 0
    stored(here, before + len(tokens) // CHUNK)
    return answer


def asked(here: Node) -> int:
    """How often the server was asked for chunks: whether they are there, and for leases on them."""
    return here.counted("Lookup") + here.counted("Acquire")


def unleased(here: Node) -> None:
    """Leases under which nothing is read end in the background."""
    eventually(lambda: here.stats().leases == 0)


def vcache(**wishes: Any) -> dict[str, Any]:
    return {"vcache": wishes}


# ---- hits


def test_a_load_beside_others_is_part_of_a_step_only_if_it_is_small(
    here: Node, a: Instance, b: Instance, later: Instance
) -> None:
    small, large = new_tokens(3 * CHUNK + 1), new_tokens(6 * CHUNK + 1)
    for tokens in (small, large):
        keep(here, a, tokens)
    # Its first step runs no model: the worker says what it holds.
    b.one(new_tokens(5))
    b.add("alone", large, max_tokens=1)
    assert b.step(1)["alone"].cached == 6 * CHUNK
    b.forget()
    b.add("other", new_tokens(5), max_tokens=40)
    b.step(2)
    b.add("small", small, max_tokens=1)
    assert b.step(1)["small"].cached == 3 * CHUNK
    b.add("large", large, max_tokens=1)
    assert b.step(1) == {}
    assert b.finish("large", "other")["large"].cached == 6 * CHUNK
    later.add("small", small, max_tokens=1)
    assert later.step(1) == {}
    assert later.finish("small")["small"].cached == 3 * CHUNK


@pytest.mark.parametrize("tail", [1, 17], ids="{} more tokens".format)
def test_another_instances_prefix_is_as_good_as_vllms_own(here: Node, a: Instance, reader: Instance, tail: int) -> None:
    """The same tokens are cached in both, so the same are computed: tokens and log probabilities are equal to the last bit."""
    tokens = new_tokens(3 * CHUNK + tail)
    computed = keep(here, a, tokens)
    own, from_pool = a.one(tokens), reader.one(tokens)
    assert (own.cached, from_pool.cached) == (3 * CHUNK, 3 * CHUNK)
    assert from_pool.said == own.said
    assert from_pool.agrees(computed)


def test_of_a_prompt_that_is_all_there_the_last_block_is_computed(here: Node, a: Instance, reader: Instance) -> None:
    tokens, loaded = new_tokens(3 * CHUNK), reader.counter("vllm:vcache_loaded_tokens")
    computed = keep(here, a, tokens)
    own, from_pool = a.one(tokens), reader.one(tokens)
    assert (own.cached, from_pool.cached) == (3 * CHUNK - BLOCK, 3 * CHUNK - BLOCK)
    assert reader.counter("vllm:vcache_loaded_tokens") - loaded == 3 * CHUNK - BLOCK
    assert from_pool.said == own.said
    assert from_pool.agrees(computed)


def test_a_shared_beginning_is_a_hit_and_the_rest_is_computed(here: Node, a: Instance, reader: Instance, aside: Instance) -> None:
    tokens = new_tokens(5 * CHUNK + 1)
    branch = tokens[: 3 * CHUNK] + new_tokens(2 * CHUNK + 5)
    keep(here, a, tokens)
    aside.one(tokens)
    own, from_pool = aside.one(branch), reader.one(branch)
    assert (own.cached, from_pool.cached) == (3 * CHUNK, 3 * CHUNK)
    assert from_pool.said == own.said


def test_the_pool_continues_vllms_own_cache(here: Node, a: Instance, reader: Instance, aside: Instance) -> None:
    """The reader has a chunk and a half in blocks of its own, which are not written again, and takes the rest from the pool."""
    tokens = new_tokens(5 * CHUNK + 1)
    keep(here, reader, tokens[: CHUNK + BLOCK + 1])
    before = here.stats().chunks
    a.one(tokens)
    stored(here, before + 4)
    aside.one(tokens)
    own, from_both = aside.one(tokens), reader.one(tokens)
    assert (own.cached, from_both.cached) == (5 * CHUNK, 5 * CHUNK)
    assert from_both.said == own.said


def test_what_b_had_itself_is_not_written_again(here: Node, a: Instance, b: Instance) -> None:
    """The bytes of its own chunk and a half are wrong in the pool, and nobody notices."""
    tokens = new_tokens(4 * CHUNK + 1)
    beginning = tokens[: CHUNK + BLOCK + 1]
    computed = keep(here, a, tokens)
    b.one(beginning, params=vcache(load=False))
    with here.corrupted():
        wrong = b.one(tokens)
        assert wrong.cached == 4 * CHUNK
        assert wrong.differs(computed)
        own = b.one(beginning)
    assert own.said == a.one(beginning).said


def test_a_miss_is_vllms_ordinary_prefill(b: Instance, aside: Instance) -> None:
    tokens = new_tokens(3 * CHUNK + 9)
    alone, missed = aside.one(tokens), b.one(tokens)
    assert (alone.cached, missed.cached) == (0, 0)
    assert missed.said == alone.said


def test_a_prompt_computed_in_several_steps_is_stored_whole(here: Node, a: Instance, b: Instance) -> None:
    tokens = new_tokens(13 * CHUNK + 1)
    keep(here, a, tokens)
    own, from_pool = a.one(tokens), b.one(tokens)
    assert from_pool.cached == 13 * CHUNK
    assert from_pool.said == own.said


def test_a_hit_whose_rest_is_computed_in_several_steps(here: Node, a: Instance, aside: Instance) -> None:
    """`a` computes 256 tokens a step at most, after what it loads."""
    tokens = new_tokens(3 * CHUNK + 1)
    longer = tokens[: 3 * CHUNK] + new_tokens(9 * CHUNK + 5)
    computed = keep(here, a, tokens)
    assert a.again(tokens).agrees(computed)
    a.forget()
    before = here.stats().chunks
    found = a.one(longer)
    assert found.cached == 3 * CHUNK
    assert found.agrees(aside.one(longer))
    stored(here, before + 9)


def test_a_conversation_finds_what_was_said_before(here: Node, a: Instance, b: Instance) -> None:
    """Chunks that an answer completes are stored, and are a prefix of the next prompt."""
    tokens, before = new_tokens(3 * CHUNK - 10), here.stats().chunks
    said = a.one(tokens, max_tokens=2 * CHUNK)
    stored(here, before + 4)
    following = tokens + said.tokens + new_tokens(7)
    from_pool = b.one(following)
    assert from_pool.cached == 4 * CHUNK
    assert from_pool.said == b.one(following).said
    assert from_pool.agrees(a.one(following))


def test_requests_of_one_batch_share_a_prefix(here: Node, a: Instance, reader: Instance, aside: Instance) -> None:
    prefix = new_tokens(3 * CHUNK)
    keep(here, a, [*prefix, 3])
    prompts = [Prompt([*prefix, *new_tokens(tail)]) for tail in (1, 7, 19, BLOCK - 1)]
    aside.one(prefix)
    together, alone = reader.run(*prompts, together=True), aside.run(*prompts)
    assert [answer.cached for answer in together] == [3 * CHUNK] * 4
    assert all(map(Answer.agrees, together, alone))


def test_hits_and_misses_of_one_batch(here: Node, a: Instance, b: Instance) -> None:
    prompts = [Prompt(new_tokens(count * CHUNK + 3), max_tokens=20) for count in (2, 4, 6)]
    computed = [keep(here, a, prompt.tokens, max_tokens=20) for prompt in prompts]
    other = Prompt(new_tokens(5 * CHUNK), max_tokens=20)
    answers = b.run(other, *prompts, together=True)
    assert [answer.cached for answer in answers] == [0, 2 * CHUNK, 4 * CHUNK, 6 * CHUNK]
    assert all(map(Answer.agrees, answers[1:], computed))


def test_wrong_bytes_in_the_pool_are_wrong_tokens(here: Node, a: Instance, reader: Instance) -> None:
    """What the tests here compare does come from the pool."""
    tokens = new_tokens(3 * CHUNK + 17)
    computed = keep(here, a, tokens)
    with here.corrupted():
        wrong = reader.again(tokens)
    assert wrong.cached == 3 * CHUNK
    assert wrong.differs(computed)
    assert reader.again(tokens).agrees(computed)


# ---- what it costs, and who asks for nothing


def test_a_request_costs_one_look_up(here: Node, a: Instance, b: Instance, later: Instance) -> None:
    """Which leases what it finds, where the step waits for it; else the worker asks for the lease."""
    hit, miss = new_tokens(6 * CHUNK + 1), new_tokens(6 * CHUNK + 1)
    keep(here, a, hit)
    for instance, cost in ((b, 1), (later, 2)):
        before = asked(here)
        assert instance.one(hit, max_tokens=2 * CHUNK).cached == 6 * CHUNK
        assert asked(here) == before + cost
        instance.one(miss, max_tokens=CHUNK // 2, params=vcache(store=False))
        assert asked(here) == before + cost + 1


@pytest.mark.parametrize(
    ("count", "own"), [(2 * CHUNK - 1, 0), (2 * CHUNK, 0), (6 * CHUNK, 6 * CHUNK), (6 * CHUNK, 4 * CHUNK + 1)], ids=str
)
def test_what_cannot_be_worth_a_load_costs_nothing(here: Node, b: Instance, count: int, own: int) -> None:
    """`b` wants at least two chunks beyond what it has itself."""
    tokens = new_tokens(count)
    if own:
        b.one(tokens[:own])
    before = asked(here)
    b.one(tokens)
    assert asked(here) == before


def test_a_hit_too_short_to_be_worth_a_load_is_computed(here: Node, a: Instance, b: Instance) -> None:
    tokens = new_tokens(CHUNK)
    keep(here, a, tokens)
    longer = tokens + new_tokens(2 * CHUNK)
    assert b.one(longer).cached == 0
    unleased(here)
    assert a.again(longer).cached == 3 * CHUNK - BLOCK


@pytest.mark.parametrize("wish", [{"rate": True}, {"fresh": True}, {"params": vcache(load=False)}], ids=str)
def test_requests_that_are_computed_whatever_is_there(
    here: Node, a: Instance, b: Instance, aside: Instance, wish: dict[str, Any]
) -> None:
    """Their prompt's own log probabilities are wanted, or they say so."""
    tokens = new_tokens(3 * CHUNK + 5)
    keep(here, a, tokens)
    before = asked(here)
    computed = b.one(tokens, **wish)
    assert (computed.cached, asked(here)) == (0, before)
    assert computed.said == aside.one(tokens, **wish).said
    assert b.again(tokens).cached == 3 * CHUNK


def test_a_request_that_leaves_nothing_in_the_pool(here: Node, a: Instance, b: Instance) -> None:
    tokens, before = new_tokens(3 * CHUNK + 5), here.stats().chunks
    a.one(tokens, params=vcache(store=False))
    later = keep(here, a, new_tokens(CHUNK))
    assert later.cached == 0
    assert here.stats().chunks == before + 1
    assert b.one(tokens).cached == 0


@pytest.mark.parametrize("wishes", [{"anounced": True}, {"wait_seconds": -1}, {"load": "no"}, "announced"], ids=str)
def test_wishes_we_do_not_understand_are_served_uncached(here: Node, a: Instance, b: Instance, wishes: Any) -> None:
    tokens = new_tokens(3 * CHUNK + 5)
    computed = keep(here, a, tokens)
    before, chunks, said = asked(here), here.stats().chunks, len(b.log)
    answer = b.one(tokens + new_tokens(CHUNK), params={"vcache": wishes})
    assert (answer.cached, asked(here), here.stats().chunks) == (0, before, chunks)
    lines = [line for line in b.log[said:].splitlines() if "is served uncached: kv_transfer_params: vcache: " in line]
    assert len(lines) == 1
    assert b.again(tokens, params={"another": 1}).agrees(computed)


def test_salts_never_share_but_with_themselves(here: Node, a: Instance, b: Instance) -> None:
    tokens = new_tokens(3 * CHUNK + 1)
    red = keep(here, a, tokens, salt="red")
    assert b.again(tokens, params=vcache(store=False)).cached == 0
    assert b.again(tokens, salt="blue").cached == 0
    from_pool = b.again(tokens, salt="red")
    assert from_pool.cached == 3 * CHUNK
    assert from_pool.agrees(red)


# ---- a prefix that another instance is still computing


def test_an_announced_prefix_is_loaded_as_it_is_computed(here: Node, a: Instance, b: Instance) -> None:
    """The reader is first. It waits without holding others up, and takes what comes in the order in which it comes."""
    tokens, other = new_tokens(6 * CHUNK + 17), new_tokens(CHUNK)
    b.add("waiting", tokens, params=vcache(announced=True, wait_seconds=60))
    assert b.step(3) == {}
    b.add("other", other)
    assert b.finish("other").keys() == {"other"}
    before = here.stats().chunks
    computed = a.one(tokens[: 4 * CHUNK])
    assert computed.cached == 0
    stored(here, before + 4)
    b.step(3)
    unleased(here)
    a.one(tokens)
    answer = b.finish("waiting")["waiting"]
    own = a.one(tokens)
    assert (answer.cached, own.cached) == (6 * CHUNK, 6 * CHUNK)
    assert answer.said == own.said


def test_what_was_announced_and_does_not_come_is_computed(here: Node, a: Instance, b: Instance, aside: Instance) -> None:
    tokens = new_tokens(6 * CHUNK + 17)
    keep(here, a, tokens[: 2 * CHUNK])
    for start in (2 * CHUNK, 0):
        prompt = tokens if start else new_tokens(6 * CHUNK + 17)
        said = len(b.log)
        answer = b.one(prompt, params=vcache(announced=True, wait_seconds=0.05))
        assert answer.agrees(aside.one(prompt))
        assert f"{6 * CHUNK - start} tokens of request" in b.log[said:]
    stored(here, 12)
    assert a.again(tokens).cached == 6 * CHUNK


def test_an_announced_prefix_that_is_there_needs_no_waiting(here: Node, a: Instance, b: Instance) -> None:
    """Nobody looks it up: the worker asks for the lease."""
    tokens = new_tokens(6 * CHUNK)
    keep(here, a, tokens)
    before = asked(here)
    answer = b.one(tokens, params=vcache(announced=True, wait_seconds=600))
    assert (answer.cached, asked(here)) == (6 * CHUNK - BLOCK, before + 1)
    assert answer.said == a.one(tokens).said


def test_chunks_for_one_reader_leave_with_it(here: Node, a: Instance, reader: Instance) -> None:
    tokens, before = new_tokens(3 * CHUNK + 1), here.stats().chunks
    computed = keep(here, a, tokens)
    answer = reader.one(tokens, params=vcache(consume_once=True))
    assert answer.cached == 3 * CHUNK
    assert answer.agrees(computed)
    assert here.stats().chunks == before
    assert reader.again(tokens).cached == 0


def test_two_readers_of_chunks_for_one_both_answer_right(here: Node, a: Instance, b: Instance) -> None:
    tokens = new_tokens(6 * CHUNK + 1)
    computed = keep(here, a, tokens)
    answers = b.run(*[Prompt(tokens, params=vcache(consume_once=True))] * 2, together=True)
    assert all(answer.agrees(computed) for answer in answers)


# ---- requests that end early, or are interrupted


def test_an_aborted_request_gives_its_blocks_back(here: Node, a: Instance, tiny: Instance, aside: Instance) -> None:
    """Of what was announced to it a part has come when it is aborted; then somebody needs all blocks there are."""
    tokens = new_tokens(6 * CHUNK + 1)
    keep(here, a, tokens[: 2 * CHUNK])
    failures = tiny.counter("vllm:vcache_failures")
    tiny.add("waiting", tokens, params=vcache(announced=True, wait_seconds=600))
    assert tiny.step(3) == {}
    tiny.ask("abort", "waiting")
    assert tiny.step(3) == {}
    whole = new_tokens(13 * BLOCK)
    assert tiny.one(whole, max_tokens=BLOCK).agrees(aside.one(whole, max_tokens=BLOCK))
    assert tiny.counter("vllm:vcache_failures") == failures
    unleased(here)


def test_a_request_aborted_the_moment_it_is_looked_up(here: Node, a: Instance, tiny: Instance) -> None:
    """Before its load, while it is under way, and when there was no room for it."""
    tokens = new_tokens(6 * CHUNK + 1)
    computed = keep(here, a, tokens)
    for steps in (0, 1, 2):
        tiny.add("short", tokens)
        tiny.step(steps)
        tiny.ask("abort", "short")
        assert tiny.step(2) == {}
    tiny.add("long", new_tokens(4 * CHUNK + 1), max_tokens=60)
    tiny.step(2)
    tiny.add("no room", tokens)
    tiny.step(2)
    tiny.ask("abort", "no room")
    tiny.finish("long")
    answer = tiny.one(tokens)
    assert answer.cached == 6 * CHUNK
    assert answer.agrees(computed)
    unleased(here)


def test_preempted_requests_go_on_where_they_were(here: Node, a: Instance, tiny: Instance, aside: Instance) -> None:
    """There is room for two; what the third had computed comes back from the pool."""
    prompts = [Prompt(new_tokens(2 * CHUNK + 9), max_tokens=120) for _ in range(3)]
    keep(here, a, prompts[0].tokens)
    preempted = tiny.counter("vllm:num_preemptions")
    answers = tiny.run(*prompts, together=True)
    assert tiny.counter("vllm:num_preemptions") > preempted
    assert all(map(Answer.agrees, answers, aside.run(*prompts)))
    unleased(here)


def test_resetting_the_cache_empties_the_pool_too(here: Node, a: Instance, b: Instance) -> None:
    """A weight update makes every chunk wrong, those under way to the pool as well."""
    tokens = new_tokens(6 * CHUNK + 1)
    keep(here, a, tokens)
    a.forget()
    assert here.stats().chunks > 0
    assert a.ask("reset")
    assert here.stats().chunks == 0
    assert b.again(tokens).cached == 0
    for _ in range(8):
        fresh = new_tokens(6 * CHUNK + 1)
        a.ask("run_and_reset", Prompt(fresh)._asdict())
        a.one(new_tokens(5))
        a.one(new_tokens(5))
        assert b.again(fresh, params=vcache(store=False)).cached == 0
    again = keep(here, a, new_tokens(3 * CHUNK))
    assert again.cached == 0
