"""Real vLLM with our own connector on the CPU: which instances share, in which roles, and which are refused.

Instance `a` stores what it computes. The other, `b`, is one process whose engine is started again with other arguments.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from processes import eventually
from vllm_cases import BLOCK, CHUNK, Answer, Instance, Node, missing, new_tokens, node, write_lora

WHY_NOT = missing(())
pytestmark = [pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "vLLM is here"), pytest.mark.timeout(300)]
UNSEEDED: dict[str, str | None] = {"PYTHONHASHSEED": None}
GEMMA = {
    "architectures": ["Gemma2ForCausalLM"],
    "model_type": "gemma2",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "query_pre_attn_scalar": 32,
    "intermediate_size": 64,
    "vocab_size": 1024,
    "max_position_embeddings": 2048,
    "sliding_window": 64,
    "torch_dtype": "bfloat16",
}
"""Every second of its layers looks at a window only, so that it has two groups of blocks."""


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    with node(tmp_path_factory.mktemp("vllm")) as made:
        yield made


@pytest.fixture(scope="module")
def pair(here: Node) -> tuple[Instance, Instance]:
    """Without PYTHONHASHSEED: this vLLM has a seed of its own for its default hash, the same everywhere."""
    return here.connect("a", environment=UNSEEDED, enable_lora=True, max_lora_rank=8), here.connect("b", environment=UNSEEDED)


@pytest.fixture(scope="module")
def a(pair: tuple[Instance, Instance]) -> Instance:
    return pair[0]


@pytest.fixture(scope="module")
def b(pair: tuple[Instance, Instance]) -> Instance:
    return pair[1]


def stored(here: Node, chunks: int) -> None:
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


def caches_nothing(here: Node, instance: Instance, said: int, reason: str) -> None:
    """Requests are served and the pool is left alone; the log gives the reason once, and nothing of ours raised."""
    tokens, chunks, before = new_tokens(4 * CHUNK + 1), here.stats().chunks, asked(here)
    first = instance.one(tokens)
    assert (first.cached, instance.again(tokens).tokens) == (0, first.tokens)
    assert (here.stats().chunks, asked(here)) == (chunks, before)
    lines = [line for line in instance.log[said:].splitlines() if "vcache caches nothing" in line]
    assert [reason in line for line in lines] == [True]
    assert "which counts as a miss" not in instance.log[said:]


# ---- who shares with whom


def test_instances_without_a_hash_seed_share_where_vllm_has_one(here: Node, b: Instance) -> None:
    tokens = new_tokens(4 * CHUNK + 1)
    computed = keep(here, b, tokens)
    assert not b.restart(kv_transfer_config=here.transfer(), model=str(here.model))
    again = b.one(tokens)
    assert again.cached == 4 * CHUNK
    assert again.agrees(computed)
    assert "vcache caches nothing" not in b.log


def test_another_seed_is_another_world_and_who_comes_with_one_says_so(here: Node, a: Instance, b: Instance) -> None:
    tokens = new_tokens(4 * CHUNK + 1)
    computed = keep(here, b, tokens)
    a.one(new_tokens(1))
    said = len(b.log)
    assert not b.restart({"PYTHONHASHSEED": "7"}, kv_transfer_config=here.transfer(), model=str(here.model))
    try:
        first = b.one(tokens)
        assert first.cached == 0
        assert first.agrees(computed)
        (line,) = [line for line in b.log[said:].splitlines() if "vcache: another instance" in line]
        assert "extra.hash_root" in line
        assert "PYTHONHASHSEED" in line
        assert [mismatch.field for mismatch in here.stats().mismatches] == ["extra.hash_root"]
    finally:
        assert not b.restart(UNSEEDED, kv_transfer_config=here.transfer(), model=str(here.model))
    assert b.one(tokens).cached == 4 * CHUNK


@pytest.mark.parametrize(
    "arguments",
    [
        {"dtype": "float32"},
        {"hf_overrides": {"rope_theta": 500.0, "rope_parameters": {"rope_theta": 500.0, "rope_type": "default"}}},
    ],
    ids=["dtype", "rope"],
)
def test_another_model_is_another_world(here: Node, b: Instance, arguments: dict[str, Any]) -> None:
    assert not b.restart(kv_transfer_config=here.transfer(), model=str(here.model))
    tokens = new_tokens(4 * CHUNK + 1)
    keep(here, b, tokens)
    assert not b.restart(kv_transfer_config=here.transfer(), model=str(here.model), **arguments)
    computed = keep(here, b, tokens)
    assert b.again(tokens).said == b.one(tokens).said
    assert b.one(tokens).agrees(computed)


def test_an_adapter_shares_with_itself_only(here: Node, a: Instance, tmp_path: Path) -> None:
    one, two = str(write_lora(tmp_path / "one", 1)), str(write_lora(tmp_path / "two", 2))
    tokens = new_tokens(4 * CHUNK + 1)
    adapted, second, plain = keep(here, a, tokens, lora=one), keep(here, a, tokens, lora=two), keep(here, a, tokens)
    assert len({tuple(answer.tokens) for answer in (adapted, second, plain)}) == 3
    for lora, computed in ((one, adapted), (two, second), (None, plain)):
        own, from_pool = a.one(tokens, lora=lora), a.again(tokens, lora=lora)
        assert (from_pool.cached, from_pool.said) == (4 * CHUNK, own.said)
        assert from_pool.agrees(computed)
    write_lora(tmp_path / "one", 3)
    assert a.again(tokens, lora=one).cached == 0, "trained again into the same folder"


# ---- roles


def test_a_producer_stores_and_does_not_look(here: Node, b: Instance) -> None:
    transfer = here.transfer({"connector": {"store": "prompt"}}, role="kv_producer")
    assert not b.restart(kv_transfer_config=transfer, model=str(here.model))
    # Somebody waits for what it computes.
    assert b.ask("scheduler", "requires_kv_delivery")
    tokens, questions, before = new_tokens(4 * CHUNK - 10), asked(here), here.stats().chunks
    computed = keep(here, b, tokens, max_tokens=2 * CHUNK)
    assert (b.again(tokens).cached, asked(here)) == (0, questions)
    whole = tokens + computed.tokens
    assert not b.restart(kv_transfer_config=here.transfer(role="kv_consumer"), model=str(here.model))
    found = b.one(whole)
    assert found.cached == 3 * CHUNK
    assert here.stats().chunks == before + 3


def test_a_consumer_loads_and_stores_nothing(here: Node, b: Instance) -> None:
    assert not b.restart(kv_transfer_config=here.transfer(), model=str(here.model))
    assert not b.ask("scheduler", "requires_kv_delivery")
    assert b.ask("scheduler", "recompute_kv_load_failures")
    tokens = new_tokens(4 * CHUNK + 1)
    computed = keep(here, b, tokens)
    longer, chunks = tokens + new_tokens(4 * CHUNK), here.stats().chunks
    strict = here.transfer({"connector": {"kv_load_failure_policy": "fail"}}, role="kv_consumer")
    assert not b.restart(kv_transfer_config=strict, model=str(here.model))
    assert not b.ask("scheduler", "recompute_kv_load_failures")
    answer = b.one(tokens)
    assert answer.cached == 4 * CHUNK
    assert answer.agrees(computed)
    assert (b.one(longer).cached, b.again(longer).cached) == (4 * CHUNK, 4 * CHUNK)
    assert here.stats().chunks == chunks


# ---- beside other features


@pytest.mark.parametrize("below", [0, 1 << 20], ids=["between", "in_step"])
def test_a_prompt_that_is_all_there_does_not_wait_while_prompts_are_throttled(here: Node, b: Instance, below: int) -> None:
    """As data parallelism does with what it has to compute more of than the last token; also what is not loaded rightly is computed."""
    settings = {"connector": {"sync_below_tokens": below}, "engine": {"chunk_size": CHUNK, "checksum": True}}
    transfer = here.transfer(settings) | {"kv_connector_module_path": "vllm_variants", "kv_connector": "Throttled"}
    assert not b.restart(kv_transfer_config=transfer, model=str(here.model), async_scheduling=False)
    tokens = new_tokens(4 * CHUNK)
    computed = keep(here, b, tokens)
    b.forget()
    b.add("decodes", new_tokens(20), max_tokens=200)
    b.step(3)
    b.add("is_there", tokens)
    b.add("is_not", new_tokens(CHUNK))
    done = b.finish("is_there")
    assert set(done) == {"is_there"}
    assert done["is_there"].cached >= 4 * CHUNK - 1
    assert done["is_there"].agrees(computed)
    b.finish("decodes", "is_not")
    own = b.one(tokens)
    with here.corrupted():
        assert b.again(tokens).said == own.said


def test_a_reset_before_the_first_request_is_over_soon(here: Node, b: Instance) -> None:
    """The first step runs no model, and older releases do not ask it to save anything."""
    transfer = here.transfer() | {"kv_connector_module_path": "vllm_variants", "kv_connector": "Sparing"}
    assert not b.restart(kv_transfer_config=transfer, model=str(here.model))
    b.ask("reset")
    tokens = new_tokens(4 * CHUNK + 1)
    assert b.one(tokens).cached == 0
    assert eventually(lambda: b.again(tokens).cached == 4 * CHUNK)


def test_tokens_guessed_ahead_are_not_stored_unless_they_were_right(here: Node) -> None:
    """Speculative decoding: what an answer leaves in the pool is as good as what it leaves in vLLM's own cache."""
    guessing = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    instance = here.connect("guessing", speculative_config=guessing)
    for count in (3, 5):
        prompt, before = new_tokens(40) * count + new_tokens(5), here.stats().chunks
        following = prompt + instance.one(prompt, max_tokens=2 * CHUNK + 17 - len(prompt) % CHUNK).tokens
        whole = (len(prompt) // CHUNK + 2) * CHUNK
        assert len(following) == whole + 17
        stored(here, before + whole // CHUNK)
        own, from_pool = instance.one(following), instance.again(following)
        assert (own.cached, from_pool.cached) == (whole, whole)
        assert from_pool.said == own.said
    guessed = instance.counter("vllm:spec_decode_num_draft_tokens")
    assert guessed > instance.counter("vllm:spec_decode_num_accepted_tokens") > 0
    instance.close()


# ---- refused


def test_a_hash_that_differs_between_processes_is_refused(here: Node, b: Instance) -> None:
    said = len(b.log)
    assert not b.restart(UNSEEDED, kv_transfer_config=here.transfer(), model=str(here.model), prefix_caching_hash_algo="xxhash")
    caches_nothing(here, b, said, "PYTHONHASHSEED is not set, so that each process may hash the same tokens differently")


def test_chunks_that_are_not_made_of_whole_blocks_are_refused(here: Node, b: Instance) -> None:
    said, settings = len(b.log), {"engine": {"chunk_size": CHUNK + 16}}
    assert not b.restart(kv_transfer_config=here.transfer(settings), model=str(here.model))
    reason = f"chunk_size {CHUNK + 16} is no multiple of the KV block size {BLOCK}: set engine.chunk_size: {3 * BLOCK}"
    caches_nothing(here, b, said, reason)


def test_several_groups_of_blocks_are_refused(here: Node, b: Instance, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(GEMMA))
    arguments = {"model": str(tmp_path), "load_format": "dummy", "kv_transfer_config": here.transfer()}
    said = len(b.log)
    assert not b.restart(**arguments)
    caches_nothing(here, b, said, "2 groups of layers with block tables of their own: start vLLM with --disable-hybrid-kv-cache-")


def test_without_the_hybrid_manager_a_model_with_windows_is_cached(here: Node, b: Instance, tmp_path: Path) -> None:
    """As the refusal says."""
    (tmp_path / "config.json").write_text(json.dumps(GEMMA))
    arguments = {"model": str(tmp_path), "load_format": "dummy", "disable_hybrid_kv_cache_manager": True}
    assert not b.restart(kv_transfer_config=here.transfer(), **arguments)
    tokens = new_tokens(4 * CHUNK + 1)
    keep(here, b, tokens)
    own, from_pool = b.one(tokens), b.again(tokens)
    assert (from_pool.cached, from_pool.said) == (4 * CHUNK, own.said)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"connector": {"min_hit_token": 3}}, "Object contains unknown field `min_hit_token` - at `$.connector`"),
        ({"conector": {}}, "Object contains unknown field `conector`"),
        ({"connector": {"store": "some"}}, "Invalid enum value 'some' - at `$.connector.store`"),
    ],
    ids=["key", "section", "value"],
)
def test_settings_that_do_not_exist_end_vllm(here: Node, b: Instance, settings: dict[str, Any], reason: str) -> None:
    transfer = here.transfer()
    transfer["kv_connector_extra_config"] |= settings
    said = len(b.log)
    raised = b.restart(kv_transfer_config=transfer, model=str(here.model))
    assert f"kv_connector_extra_config: {reason}" in raised + b.log[said:]
    assert "ConfigError" in raised + b.log[said:]
