"""The LMCache plugin with a real Mooncake below the pool: real LMCacheEngines on two nodes, each
node with a metadata server of its own.

Every retrieval goes into poisoned blocks, and every byte of the whole KV cache is compared.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import vllm_cases
from kv_cases import CHUNK, FLASH
from lmcache_cases import Engine, Pool, Retrieved, chunks, lmcache_pool, needs_lmcache
from mooncake_cases import Raw, depot, model, names_in, needs_mooncake, own_depot, raw
from offload_cases import TIER
from processes import QUICK, SECONDS, eventually

from benchmarks.mooncake_store import Depot
from vcache_backend.offload import objects

if TYPE_CHECKING:
    from lmcache_worker import Inside

__all__ = ["depot", "model", "own_depot", "raw"]
pytestmark = [needs_lmcache, needs_mooncake]


@pytest.fixture
def pools(tmp_path: Path) -> Iterator[list[Pool]]:
    with lmcache_pool(tmp_path / "1") as one, lmcache_pool(tmp_path / "2") as two:
        for made in (one, two):
            made.node.serve()
        yield [one, two]


def settings(store: Depot, model: str, **offload: Any) -> dict[str, Any]:
    """LMCache's `extra_config`. offload: of that section, with names as in the YAML."""
    mooncake = {"mooncake.master": store.master.address, "mooncake.hostname": "127.0.0.1"}
    section = {"policy": "write_through", "staging_bytes": "8 MiB"} | TIER | mooncake | offload
    return {f"vcache.offload.{name}": value for name, value in section.items()} | {
        "vcache.model": model
    }


def engine(
    pool: Pool, store: Depot, model: str, offload: dict[str, Any] | None = None, **more: Any
) -> Engine:
    """An engine whose tier is open."""
    made = pool.engine(extra=settings(store, model, **(offload or {})), **more)
    eventually(lambda: made.do(usable))
    return made


def ahead(*given: Any, **more: Any) -> Engine:
    """One that reads before it promises."""
    return engine(*given, enable_async_loading=True, process={"service": "ahead"}, **more)


def usable(inside: Inside) -> bool:
    return bool(inside.worker.session.tier.usable)


def flushed(inside: Inside) -> bool:
    return bool(inside.worker.session.flush(SECONDS, through=True))


def through(made: Engine, prompt: list[int]) -> None:
    """Store, and wait until it is below."""
    made.store(prompt)
    assert made.do(flushed)


def fetch(
    made: Engine, prompt: list[int], request: str = "r", **more: Any
) -> tuple[int, Retrieved]:
    """Look up and retrieve what was found: how many tokens the look-up promised, and what came."""
    promised = made.do("ask", prompt, request)
    if not promised:
        return 0, Retrieved(0, 0, True, 0.0)
    return promised, made.retrieve(prompt[:promised], request=request, **more)


def said(found: Retrieved) -> tuple[int, int, bool]:
    return (found.first, found.tokens, found.right)


def hits(made: Engine) -> tuple[int, int]:
    """Chunks so far, from VRAM and from below."""
    counted = made.do("stats")["hits"]
    return counted["vram"], counted["offload"]


def names(inside: Inside, prompt: list[int]) -> list[Any]:
    """What the pool and the store call the chunks of a prompt."""
    return list(inside.worker._names.keys(inside.keys(prompt)))


def held(inside: Inside) -> int:
    """Bytes of chunks from below that were read ahead."""
    return int(inside.worker.host.memory.held)


def buffers_back(inside: Inside) -> bool:
    """Are all staging buffers for reading where they were?"""
    ring = inside.worker.session.tier._reader.ring
    return bool(len(ring._free) == ring.count)


# ---- hits


def test_another_node_retrieves_what_one_stored_and_keeps_it_in_its_pool(
    pools: list[Pool], depot: Depot, model: str
) -> None:
    writer, reader = engine(pools[0], depot, model), ahead(pools[1], depot, model)
    through(writer, chunks(5))
    reader.do(copy_in_pairs)
    assert pools[1].stats().chunks == 0
    for expected in ((0, 5), (5, 5)):
        promised, found = fetch(reader, chunks(5))
        assert (promised, said(found)) == (5 * CHUNK, (0, 5 * CHUNK, True))
        assert reader.do(flushed)
        assert hits(reader) == expected
    # Promoted, and not written below again.
    assert pools[1].stats().chunks == 5
    assert reader.do("stats")["bytes"]["offload_written"] == 0
    assert reader.do(held) == 0
    assert pools[1].settled()


def copy_in_pairs(inside: Inside) -> None:
    inside.worker.session.uploader.most = 2


def test_tokens_that_vllm_has_are_never_written_nor_promoted_in_part(
    pools: list[Pool], depot: Depot, model: str
) -> None:
    writer, reader = (
        engine(pools[0], depot, model, arrangement=FLASH),
        ahead(pools[1], depot, model, arrangement=FLASH),
    )
    through(writer, chunks(4))
    _, found = fetch(reader, chunks(4), cached=CHUNK + 16)
    assert said(found) == (CHUNK, 3 * CHUNK, True)
    assert reader.do(flushed)
    assert pools[1].stats().chunks == 2


def test_pool_and_store_take_turns(pools: list[Pool], depot: Depot, model: str) -> None:
    """Chunks 0 and 3 are in the pool, all are below: every run comes from where it is."""
    writer = engine(pools[0], depot, model)
    reader = ahead(pools[1], depot, model, {"promote": False})
    through(writer, chunks(5))
    reader.store(chunks(5))
    there = reader.do(names, chunks(5))
    pools[1].client.remove([there[1], there[2], there[4]])
    promised, found = fetch(reader, chunks(5))
    assert (promised, said(found)) == (5 * CHUNK, (0, 5 * CHUNK, True))
    assert hits(reader) == (2, 3)
    assert pools[1].settled()


@pytest.mark.parametrize("make", [engine, ahead])
def test_what_left_the_pool_after_the_look_up_is_retrieved_from_below(
    tmp_path: Path, depot: Depot, model: str, make: Callable[..., Engine]
) -> None:
    """The lease of the look-up has ended, too."""
    with lmcache_pool(tmp_path) as pool:
        pool.node.serve(lease_seconds=1.0)
        made = make(pool, depot, model)
        through(made, chunks(4))
        assert (
            made.do("ask", chunks(4), "r") if make is ahead else made.lookup(chunks(4), "r")
        ) == 4 * CHUNK
        assert pool.settled()
        assert pool.client.remove(made.do(names, chunks(4))) == 4
        assert said(made.retrieve(chunks(4))) == (0, 4 * CHUNK, True)
        assert hits(made) == (0, 4)


def test_requests_that_begin_alike_each_get_their_own_chunks_from_below(
    pools: list[Pool], depot: Depot, model: str
) -> None:
    """Both look-ups leased the same chunks, which the pool has; what follows differs, and is below
    only.
    """
    prompts = [chunks(4), chunks(2) + chunks(2, family=2)]
    writer, reader = engine(pools[0], depot, model), ahead(pools[1], depot, model)
    for prompt in prompts:
        through(writer, prompt)
    reader.store(chunks(2))
    assert [reader.do("ask", prompt, f"r{i}") for i, prompt in enumerate(prompts)] == [
        4 * CHUNK,
        4 * CHUNK,
    ]
    for i in (1, 0):
        assert said(reader.retrieve(prompts[i], request=f"r{i}")) == (0, 4 * CHUNK, True)
    assert pools[1].settled()


def test_ranks_hit_what_all_of_them_have(pools: list[Pool], depot: Depot, model: str) -> None:
    here = {"rank": 0, "ranks": 2}, {"rank": 1, "ranks": 2}
    writers = [engine(pools[0], depot, model, process=place) for place in here]
    through(writers[0], chunks(4))
    through(writers[1], chunks(3))
    more = {"enable_async_loading": True}
    readers = [
        engine(pools[1], depot, model, process=place | {"service": "ranks"}, **more)
        for place in here
    ]
    assert readers[0].do("ask", chunks(4), "r") == 3 * CHUNK
    for reader in readers:
        assert said(reader.retrieve(chunks(3))) == (0, 3 * CHUNK, True)
        assert hits(reader) == (0, 3)


# ---- look-ups


def test_a_look_up_below_leaves_no_lease_and_ends_nobody_elses(
    pools: list[Pool], depot: Depot, model: str
) -> None:
    """Two look-ups begin with the same chunk: the first found it below only, the second in the
    pool.
    """
    writer, reader = (
        engine(pools[0], depot, model),
        ahead(pools[1], depot, model, {"promote": False}),
    )
    through(writer, chunks(3))
    assert reader.do("ask", chunks(3), "below") == 3 * CHUNK
    assert pools[1].leases() == 0
    reader.store(chunks(1))
    assert reader.do("ask", chunks(3), "both") == 3 * CHUNK
    # Writing what was stored below takes one, too, for a moment.
    eventually(lambda: pools[1].leases() == 1)
    reader.do("unpin", "below")
    reader.do("flush")  # releases go out in the background
    assert pools[1].leases() == 1
    reader.do("unpin", "both")
    assert pools[1].settled()
    promised, found = fetch(reader, chunks(3))
    assert (promised, said(found), hits(reader)) == (3 * CHUNK, (0, 3 * CHUNK, True), (1, 2))
    assert pools[1].settled()


def test_who_does_not_read_before_it_promises_promises_what_the_pool_has(
    pools: list[Pool], depot: Depot, model: str
) -> None:
    writer, reader = (
        engine(pools[0], depot, model),
        engine(pools[1], depot, model, {"promote": False}),
    )
    through(writer, chunks(3))
    reader.store(chunks(1))
    assert reader.lookup(chunks(3), "r") == CHUNK
    reader.do("unpin", "r")
    # Who asks without being promised anything, and who loads, has it all.
    assert reader.lookup(chunks(3)) == 3 * CHUNK
    assert said(reader.retrieve(chunks(3))) == (0, 3 * CHUNK, True)


def forget(inside: Inside, prompt: list[int]) -> int:
    return int(inside.engine.clear(prompt))


def test_removing_a_prompt_forgets_it_below_and_clearing_forgets_all(
    pools: list[Pool], depot: Depot, raw: Raw, model: str
) -> None:
    made = engine(pools[0], depot, model)
    through(made, chunks(2))
    through(made, chunks(2, family=2))
    assert made.do(forget, chunks(2)) == 2
    removed, kept = (
        [objects.name(name) for name in made.do(names, chunks(2, family))] for family in (1, 2)
    )
    eventually(lambda: raw.there(removed) == [False, False])
    assert made.lookup(chunks(2)) == 0
    others = engine(pools[1], depot, f"{model}, another")
    through(others, chunks(2))
    assert raw.there(kept) == [True, True]
    made.do(clear)
    assert made.lookup(chunks(2, family=2)) == 0
    eventually(lambda: others.lookup(chunks(2)) == 2 * CHUNK)
    # It goes on.
    through(made, chunks(2, family=2))
    pools[0].client.clear()
    eventually(lambda: made.lookup(chunks(2, family=2)) == 2 * CHUNK)


def clear(inside: Inside) -> None:
    inside.engine.clear()


# ---- failures


def test_a_damaged_object_ends_the_hit_before_it(
    pools: list[Pool], depot: Depot, raw: Raw, model: str
) -> None:
    writer, reader = engine(pools[0], depot, model), ahead(pools[1], depot, model)
    through(writer, chunks(5))
    raw.damage(objects.name(reader.do(names, chunks(5))[2]))
    promised, found = fetch(reader, chunks(5))
    # Who reads before it promises, promises nothing that does not come.
    assert (promised, said(found)) == (2 * CHUNK, (0, 2 * CHUNK, True))
    assert any(cause.startswith("offload_bad") for cause in reader.do("stats")["failures"])
    assert reader.do(flushed)
    assert (pools[1].stats().chunks, reader.do(held)) == (2, 0)
    eventually(lambda: reader.do(buffers_back))
    assert pools[1].settled()


def test_a_dead_master_costs_the_hits_below_and_nothing_else(
    pools: list[Pool], own_depot: Depot, model: str
) -> None:
    """One chunk is in the pool, three below. Nothing raises, and no call waits longer than its
    deadline.
    """
    writer, reader = (
        engine(pools[0], own_depot, model),
        ahead(pools[1], own_depot, model, client=QUICK),
    )
    through(writer, chunks(4))
    reader.store(chunks(1))
    own_depot.master.kill()
    for request in ("1", "2", "3"):
        promised, found = fetch(reader, chunks(4), request=request)
        assert (promised, said(found)) == (CHUNK, (0, CHUNK, True))
    eventually(lambda: not reader.do(usable))
    reader.store(chunks(1, family=2))
    assert not reader.do("logged", "with a traceback")
    assert reader.do("healthy")
    assert pools[1].settled()


def test_a_provider_that_hangs_is_waited_for_within_a_deadline(
    pools: list[Pool], own_depot: Depot, model: str
) -> None:
    writer, reader = (
        engine(pools[0], own_depot, model),
        ahead(pools[1], own_depot, model, {"failures": 1, "get_seconds": 0.5}),
    )
    through(writer, chunks(4))
    own_depot.providers[0].stop()
    _, found = fetch(reader, chunks(4))
    assert said(found) == (0, 0, True)
    assert reader.do(held) == 0
    own_depot.providers[0].cont()


def test_what_is_read_ahead_holds_a_bounded_part_of_the_host(
    pools: list[Pool], depot: Depot, model: str
) -> None:
    """Of two requests loaded ahead the second gets what there is room for, until the first has been
    retrieved.
    """
    writer, reader = (
        engine(pools[0], depot, model),
        ahead(pools[1], depot, model, {"promote": False}),
    )
    through(writer, chunks(5))
    through(writer, chunks(5, family=2))
    reader.do(hold_at_most, 7)
    assert reader.do("ask", chunks(5), "a") == 5 * CHUNK
    assert reader.do("ask", chunks(5, family=2), "b") == 2 * CHUNK
    assert said(reader.retrieve(chunks(5), request="a")) == (0, 5 * CHUNK, True)
    assert said(reader.retrieve(chunks(2, family=2), request="b")) == (0, 2 * CHUNK, True)
    assert reader.do(held) == 0
    assert reader.do("ask", chunks(5, family=2), "abandoned") == 5 * CHUNK
    reader.do("unpin", "abandoned")
    eventually(lambda: reader.do(held) == 0)


def hold_at_most(inside: Inside, count: int) -> None:
    inside.worker.host.memory.most = count * inside.worker.session.bind(
        inside.cache.tensors
    ).chunk_bytes(CHUNK)


# ---- vLLM


@pytest.mark.skipif(bool(vllm_cases.missing()), reason=vllm_cases.missing() or "vLLM is here")
@pytest.mark.timeout(300)
def test_vllm_answers_from_below_as_from_its_own_cache(
    tmp_path: Path, depot: Depot, raw: Raw
) -> None:
    """Two nodes, whose instances read before they promise."""
    length = vllm_cases.CHUNK
    with vllm_cases.node(tmp_path / "1") as one, vllm_cases.node(tmp_path / "2") as two:
        lmcache = {"enable_async_loading": True, "extra_config": settings(depot, "tiny")}
        first, second = one.start("first", lmcache), two.start("second", lmcache)
        seen = names_in(depot)

        def reads(writer: vllm_cases.Instance, reader: vllm_cases.Instance) -> bool:
            tokens = vllm_cases.new_tokens(length + 17)
            keep_below(writer, tokens, depot, seen)
            return bool(reader.one(tokens).cached == length)

        for writer, reader in ((first, second), (second, first)):
            # Until its offload process is there, what an instance asks for is computed.
            eventually(functools.partial(reads, writer, reader))
            tokens = vllm_cases.new_tokens(4 * length + 17)
            computed, _ = keep_below(writer, tokens, depot, seen)
            own, from_below = writer.one(tokens), reader.one(tokens)
            assert (computed.cached, own.cached, from_below.cached) == (0, 4 * length, 4 * length)
            assert from_below.said == own.said
            assert from_below.agrees(computed)
            # One object is not what it should be: what comes after it is computed.
            tokens = vllm_cases.new_tokens(4 * length + 17)
            computed, added = keep_below(writer, tokens, depot, seen)
            raw.damage(min(added))
            damaged = reader.one(tokens)
            assert not damaged.differs(computed)
            assert damaged.cached < 4 * length
        for instance in (first, second):
            assert "look-ups do not count what is in the offload tier" not in instance.log


def keep_below(
    instance: vllm_cases.Instance, tokens: list[int], store: Depot, seen: set[str]
) -> tuple[Any, set[str]]:
    """Have it compute and store a prompt nobody has seen: its answer and the objects that came of
    it. seen: every name there was so far, with what was removed since: a reader removes a damaged
    object and writes it again, whenever it comes to that."""
    chunks = len(tokens) // vllm_cases.CHUNK
    answer = instance.one(tokens)
    eventually(lambda: len(names_in(store) - seen) == chunks)
    added = names_in(store) - seen
    seen |= added
    return answer, added
