"""Real vLLM on the CPU, three instances that share in place: nothing is stored, hits come out of
the KV cache of whoever computed them.

Every answer is compared with vLLM's own prefix-cache hit of the same length, bit for bit, or with
vLLM alone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import vllm_cases
from processes import eventually
from vllm_cases import BLOCK, CHUNK, IN_PLACE, Node, keep, new_tokens, stopped_at
from vllm_models import TOKEN_BYTES

pytestmark = vllm_cases.needs_vllm

MAPPING = "vcache_backend.protocol.client:Client.open_cache"
"""A place: a worker asks for another one's KV cache."""


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    with vllm_cases.node(tmp_path_factory.mktemp("vllm"), vllm_cases.QUICK) as made:
        made.a = made.connect("a", IN_PLACE)
        made.b = made.connect("b", IN_PLACE)
        made.aside = made.alone("aside")
        yield made


def test_a_hit_is_what_vllms_own_prefix_cache_would_have_given(here: Node) -> None:
    for chunks in (1, 3, 7):
        tokens = new_tokens(chunks * CHUNK + 1)
        computed = keep(here.a, tokens)
        hit, own = here.b.one(tokens), here.a.one(tokens)
        assert (hit.cached, own.cached) == (chunks * CHUNK, chunks * CHUNK)
        assert hit.said == own.said
        assert hit.agrees(computed)
    assert here.chunks() == 0
    assert not here.stats().segments, "nobody was told to lend memory"
    assert here.b.counter("vllm:vcache_loaded_tokens", tier="resident") == 11 * CHUNK
    assert here.b.counter("vllm:prompt_tokens_cached_by_source", source="p2p") == 11 * CHUNK
    ids = {one.id for one in here.stats().instances}
    expected = [(11 * CHUNK * TOKEN_BYTES, 0, 11 * CHUNK)]
    eventually(
        lambda: [(row.nbytes, row.refused, row.tokens) for row in here.stats().reads] == expected
    )
    eventually(lambda: here.stats().minute == (3, 11 * CHUNK))
    (row,) = here.stats().reads
    assert {row.instance, row.reader} == ids, "one instance has read the other"
    assert here.b.counter("vllm:vcache_stored_bytes") == 0


def test_the_server_knows_an_instance_before_its_first_request(here: Node) -> None:
    known = {one.id for one in here.stats().instances}
    here.connect("early", IN_PLACE).made()
    assert len({one.id for one in here.stats().instances} - known) == 1


def saved(owner: vllm_cases.Instance, tokens: list[int]) -> vllm_cases.Answer:
    """Have `owner` compute a prompt and save all of it; what vLLM's own cache gives."""
    keep(owner, tokens)
    hit = owner.one(tokens)
    # Nothing runs any more: what the request had is free, and the next one may get it.
    owner.step(1)
    assert owner.ask("told")
    return hit


def test_a_new_owner_is_mapped_beside_steps_and_a_killed_one_left_what_it_saved(here: Node) -> None:
    """Though the server does not answer the reader's question about it: with the mapping in the
    step, the load is over first.

    What it saved outlives its blocks, too: also for a reader that waits for what it was
    computing."""
    saves = IN_PLACE | {"pool": {"segment_bytes": "16 MiB"}}
    owner = here.connect("killed", saves, **vllm_cases.SMALL)
    tokens = new_tokens(3 * CHUNK + 1)
    keep(owner, tokens)
    with stopped_at(here.b, MAPPING) as place:
        here.b.add("load", tokens, max_tokens=1)
        here.b.add("beside", new_tokens(40), max_tokens=14)
        assert here.b.finish("beside").keys() == {"beside"}
        eventually(lambda: place.reached)
    assert here.b.finish("load")["load"].cached == 3 * CHUNK
    left, kept, more, coming = (new_tokens(count * CHUNK + 1) for count in (3, 2, 3, 5))
    own = saved(owner, left)
    owner.one(new_tokens(6 * CHUNK + BLOCK))  # in all of its blocks

    def loaded() -> list[float]:
        tiers = "resident", "host"
        return [here.b.counter("vllm:vcache_loaded_tokens", tier=tier) for tier in tiers]

    before = loaded()
    hit = here.b.one(left)
    assert (hit.cached, own.cached) == (3 * CHUNK, 3 * CHUNK)
    assert hit.said == own.said
    own = saved(owner, kept)
    here.b.add("waiting", coming, params={"vcache": {"announced": True, "wait_seconds": 2}})
    assert here.b.step(1) == {}
    keep(owner, coming[: 3 * CHUNK])
    keep(owner, more)
    instances = len(here.stats().instances)
    owner.kill()
    assert here.b.finish("waiting")["waiting"].agrees(here.aside.one(coming))
    after = loaded()
    assert [now - then for now, then in zip(after, before, strict=True)] == [0, 6 * CHUNK]
    eventually(lambda: len(here.stats().instances) == instances - 1)
    hit, answer = here.b.one(kept), here.b.one(more)
    assert (hit.cached, own.cached) == (2 * CHUNK, 2 * CHUNK)
    assert hit.said == own.said
    assert answer.cached == 0
    assert answer.said == here.aside.one(more).said


def test_a_hit_may_lie_in_a_kv_cache_and_go_on_in_the_pool(here: Node) -> None:
    """Who reads in place needs no pool of its own: somebody beside it lends. It passes on what it had
    from there."""
    pooled, tokens = here.connect("pooled"), new_tokens(5 * CHUNK + 1)
    computed = here.keep(pooled, tokens)
    keep(here.a, tokens[: 3 * CHUNK + 1], params={"vcache": {"load": False}})
    counted = [("vllm:vcache_loaded_tokens", "tier", tier) for tier in ("resident", "host")]
    before = [here.b.counter(name, **{label: value}) for name, label, value in counted]
    hit, own = keep(here.b, tokens), pooled.one(tokens)
    assert (hit.cached, hit.said) == (5 * CHUNK, own.said)
    assert hit.agrees(computed)
    after = [here.b.counter(name, **{label: value}) for name, label, value in counted]
    assert [now - then for now, then in zip(after, before, strict=True)] == [3 * CHUNK, 2 * CHUNK]
    assert here.a.ask("forget")
    c = here.connect("c", IN_PLACE)
    passed_on = c.one(tokens)
    assert (passed_on.cached, passed_on.said) == (5 * CHUNK, own.said)
    assert c.counter("vllm:vcache_loaded_tokens", tier="resident") == 5 * CHUNK
