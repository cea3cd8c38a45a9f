"""Real vLLM with our own connector on the CPU: which instances share, in which roles, and which are
refused.

Instance `a` stores what it computes; for everything else an instance of its own is started.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import vllm_cases
from vllm_cases import BLOCK, CHUNK, TOKEN_BYTES, Answer, Instance, Node, here, new_tokens
from vllm_models import LAYERS, write_eagle, write_guessed

from vcache_backend.integration import plugin

__all__ = ["here"]
pytestmark = vllm_cases.needs_vllm
UNSEEDED: dict[str, str | None] = {"PYTHONHASHSEED": None}
"""vLLM has a seed of its own for its default hash, the same everywhere."""
LENGTH = 4 * CHUNK
Start = Callable[..., Instance]


@pytest.fixture(scope="module")
def a(here: Node) -> Instance:
    return here.connect("a", environment=UNSEEDED)


@pytest.fixture
def start(here: Node, request: pytest.FixtureRequest) -> Iterator[Start]:
    """Another instance, until the test is over. transfer: changes of vLLM's `kv_transfer_config`;
    for the rest see `Node.connect`.
    """
    started: list[Instance] = []

    def made(
        settings: Any = None,
        environment: Any = UNSEEDED,
        role: str = "kv_both",
        transfer: Any = (),
        **arguments: Any,
    ) -> Instance:
        name = f"{request.node.name.partition('[')[0][5:60]}{len(started)}"
        given = here.transfer(settings, role) | dict(transfer)
        started.append(here.alone(name, environment, kv_transfer_config=given, **arguments))
        return started[-1]

    yield made
    for instance in started:
        instance.close()


def caches_nothing(here: Node, instance: Instance, reason: str) -> None:
    """Requests are served and the pool is left alone; the log gives the reason once, and nothing of
    ours raised.
    """
    tokens, chunks, before = new_tokens(LENGTH + 1), here.chunks(), here.asked()
    first = instance.one(tokens)
    assert (first.cached, instance.again(tokens).tokens) == (0, first.tokens)
    assert (here.chunks(), here.asked()) == (chunks, before)
    lines = [line for line in instance.log.splitlines() if "vcache caches nothing" in line]
    assert [reason in line for line in lines] == [True]
    assert "vcache failed" not in instance.log


# ---- who shares with whom


def test_who_shares_with_whom(here: Node, a: Instance, start: Start) -> None:
    """Without a hash seed, where vLLM has one of its own; another seed is another world, and who
    comes with one says so.
    """
    tokens = new_tokens(LENGTH + 1)
    computed = here.keep(a, tokens)
    alike, other = start(), start(environment={"PYTHONHASHSEED": "7"})
    found, apart = alike.one(tokens), other.one(tokens)
    assert (found.cached, apart.cached) == (LENGTH, 0)
    assert found.agrees(computed)
    assert apart.agrees(computed)
    assert "vcache caches nothing" not in alike.log
    (line,) = [line for line in other.log.splitlines() if "vcache: another instance" in line]
    assert "extra.hash_root" in line
    assert "PYTHONHASHSEED" in line
    assert [mismatch.field for mismatch in here.stats().mismatches] == ["extra.hash_root"]


# ---- roles


def test_a_producer_stores_and_does_not_look(here: Node, start: Start) -> None:
    b = start({"connector": {"store": "prompt"}}, role="kv_producer")
    # Somebody waits for what it computes.
    assert b.ask("scheduler", "requires_kv_delivery")
    tokens, questions, before = new_tokens(LENGTH - 10), here.asked(), here.chunks()
    computed = here.keep(b, tokens, max_tokens=CHUNK)
    assert (b.again(tokens).cached, here.asked()) == (0, questions)
    assert start(role="kv_consumer").one(tokens + computed.tokens).cached == 3 * CHUNK
    assert here.chunks() == before + 3


def test_a_consumer_loads_and_stores_nothing(here: Node, a: Instance, start: Start) -> None:
    assert not a.ask("scheduler", "requires_kv_delivery")
    assert a.ask("scheduler", "recompute_kv_load_failures")
    tokens = new_tokens(LENGTH + 1)
    computed = here.keep(a, tokens)
    longer, chunks = tokens + new_tokens(LENGTH), here.chunks()
    strict = start({"connector": {"kv_load_failure_policy": "fail"}}, role="kv_consumer")
    assert not strict.ask("scheduler", "recompute_kv_load_failures")
    answer = strict.one(tokens)
    assert answer.cached == LENGTH
    assert answer.agrees(computed)
    assert (strict.one(longer).cached, strict.again(longer).cached) == (LENGTH, LENGTH)
    assert here.chunks() == chunks


# ---- beside other features


@pytest.fixture(scope="module", params=["in_place", "pool"])
def pair(here: Node, request: pytest.FixtureRequest) -> Iterator[list[Instance]]:
    """One that guesses tokens ahead, and one that does not."""
    guesses = {"method": "ngram", "num_speculative_tokens": 12, "prompt_lookup_max": 2}
    guesses |= {"prompt_lookup_min": 1}
    settings, told = {"connector": {"share": request.param}}, {"speculative_config": guesses}
    begun = [(f"guesses-{request.param}", told), (f"reads-{request.param}", {})]
    with ExitStack() as undo:
        made = [here.connect(name, settings, UNSEEDED, **more) for name, more in begun]
        yield [undo.enter_context(one) for one in made]


@pytest.mark.parametrize("pair", ["in_place"], indirect=True)
def test_tokens_guessed_ahead_are_stored_only_if_they_were_right(
    here: Node, pair: list[Instance]
) -> None:
    """Speculative decoding: what an answer leaves to others, here to one that guesses nothing, is as
    good as what it leaves in vLLM's own cache.
    """
    b, reader = pair
    prompt, before = new_tokens(40) * 3 + new_tokens(5), here.chunks()
    rest = 3 * CHUNK + 17 - len(prompt)
    # Of few different tokens some are guessed on any machine.
    following = prompt + b.one(prompt, max_tokens=rest, among=3).tokens
    whole = 3 * CHUNK
    assert len(following) == whole + 17
    here.kept(b, before + whole // CHUNK)
    own, loaded = b.one(following), reader.again(following)
    assert (own.cached, loaded.cached) == (whole, whole)
    assert loaded.said == own.said
    guessed = b.counter("vllm:spec_decode_num_draft_tokens")
    assert guessed > b.counter("vllm:spec_decode_num_accepted_tokens") > 0


def test_who_guesses_stores_its_first_turn_alone(pair: list[Instance]) -> None:
    """vLLM takes tokens that it has guessed rightly for computed ones of the next turn, also those
    behind the end of the last turn, where other tokens are now."""
    b, reader = pair
    # It may say one token only: each guess is right, and most are behind the end.
    first, second = new_tokens(20) + [3] * 20, new_tokens(LENGTH)
    said = b.ask("turn", vllm_cases.Prompt(first, max_tokens=4, among=1))
    after = b.ask("turn", vllm_cases.Prompt(second, max_tokens=50, among=1))
    b.ask("hang_up")
    whole = first + said + second + after
    # Neither by itself, nor by a request that finds its blocks in vLLM's own cache.
    for _ in range(2):
        b.one(new_tokens(5))
        assert b.ask("told")
        reader.forget()
        found = reader.one(whole, params={"vcache": {"store": False}})
        assert found.agrees(reader.one(whole, fresh=True, params={"vcache": {"store": False}}))
        b.one(whole)


@pytest.mark.parametrize(("kinds", "layers", "share"), [("fsfs", 6, "pool"), ("", 4, "in_place")])
def test_the_kv_of_a_draft_comes_with_its_targets(
    here: Node, start: Start, kinds: str, layers: int, share: str
) -> None:
    """Otherwise its guesses after a hit would be worthless: they are as good as after vLLM's own
    hit. Where some layers look at a window, the head's lies in the others' table, and theirs is
    padded to its length. Where none does, the head has twice as many KV heads as the target, so
    that its pages are twice as large."""
    folder, shares = here.folder / f"eagle{share}", {"connector": {"share": share}}
    model = str(write_guessed(folder / "target", kinds, 64))
    head = str(write_eagle(folder / "head", 1 if kinds else 2))
    guesses = {"method": "eagle", "num_speculative_tokens": 3, "model": head}
    b = start(shares, model=model, speculative_config=guesses)
    reader = b
    if share == "in_place":
        reader = start(shares, model=model, speculative_config=guesses)
    tokens = new_tokens(LENGTH + 9)
    computed = here.keep(b, tokens, max_tokens=24)
    said = [line for line in b.log.splitlines() if "B a chunk" in line][-1]
    assert f" {layers * TOKEN_BYTES // LAYERS * CHUNK:,} B a chunk" in said
    own, guessed_after_own = guessing(b, tokens)
    reader.forget()
    reader.ask("poison")
    hit, guessed = guessing(reader, tokens)
    assert (hit.cached, own.cached > 0) == (LENGTH, True)
    assert hit.agrees(computed)
    assert hit.agrees(own)
    assert kinds or reader.ask("written", True) == reader.ask("written") > LENGTH // BLOCK
    # How many are right depends on the prompt: none, if the head's KV is not what it should be.
    assert guessed[1] > 0
    # With AMX the last bits depend on how many tokens a step computes, and a guess may.
    assert guessed == guessed_after_own or hit.said != own.said


def guessing(instance: Instance, tokens: list[int]) -> tuple[Answer, list[int]]:
    """An answer, how many of its tokens were guessed ahead, and how many of those rightly."""
    names = [f"vllm:spec_decode_num_{what}_tokens" for what in ("draft", "accepted")]
    before = [instance.counter(name) for name in names]
    answer = instance.one(tokens, max_tokens=24)
    counted = zip(names, before, strict=True)
    return answer, [instance.counter(name) - count for name, count in counted]


# ---- refused


def test_who_was_asked_nothing_and_cannot_export_its_kv_cache_serves_and_says_why_it_caches_nothing(
    here: Node, start: Start
) -> None:
    """It lends no memory to a pool that vLLM was not told to leave: memory files may be no larger
    than half of its KV cache.
    """
    extra = here.transfer()["kv_connector_extra_config"]
    del extra["pool"]
    b = start(transfer={"kv_connector_extra_config": extra}, file_bytes=2048 * TOKEN_BYTES)
    caches_nothing(here, b, "File too large); or set connector.share: pool. vLLM serves without it")


def test_settings_that_do_not_exist_end_vllm_without_our_plugin(here: Node, start: Start) -> None:
    """By the connector itself, which vLLM then finds by its module only. What is refused,
    test_settings says."""
    extra = here.transfer()["kv_connector_extra_config"] | {"connector": {"min_hit_token": 3}}
    long = {"kv_connector_module_path": plugin.CONNECTOR, "kv_connector_extra_config": extra}
    with pytest.raises(AssertionError, match="ConfigError") as raised:
        start(transfer=long, environment={"VLLM_PLUGINS": ""}).made()
    expected = "Object contains unknown field `min_hit_token` - at `$.connector`"
    assert f"kv_connector_extra_config: {expected}" in str(raised.value)
