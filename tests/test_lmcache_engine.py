"""The plugin inside real LMCacheEngines, each in a process of its own: store here, look up and retrieve there, byte for byte.

Engines are made from LMCache's YAML alone. Every retrieval goes into poisoned blocks in other places, and every byte of the whole
KV cache is compared.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch
from engine_cases import WrongCopier
from kv_cases import CHUNK, FLASH, MLA, PACKED, PACKED_HND, Arrangement, Cache, places
from lmcache_cases import Engine, Pool, Retrieved, chunks, lmcache_pool, needs_lmcache, tokens

from vcache_backend.metadata_server.messages import GRACE_SECONDS

if TYPE_CHECKING:
    from lmcache_worker import Inside

pytestmark = needs_lmcache
LAYOUTS = [
    PACKED,
    PACKED_HND,
    Arrangement("flash-fp8", "part block token head dim", dtype=torch.float8_e4m3fn),
    MLA,
]


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Pool]:
    with lmcache_pool(tmp_path) as made:
        yield made


@pytest.fixture
def served(pool: Pool) -> Pool:
    pool.node.serve()
    return pool


class Pair(NamedTuple):
    """A pool with nothing in it and two engines, which the tests of this module share."""

    pool: Pool
    writer: Engine
    reader: Engine


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with lmcache_pool(tmp_path_factory.mktemp("shared")) as made:
        made.node.serve()
        yield Pair(made, made.engine(), made.engine())


@pytest.fixture
def pair(shared: Pair) -> Pair:
    assert shared.pool.settled()
    shared.pool.client.clear()
    return shared


def all_of(count: int, first: int = 0) -> tuple[int, int, bool]:
    """What a retrieval says that brought `count` tokens from `first` on, and every byte is right."""
    return first, count, True


def said(found: Retrieved) -> tuple[int, int, bool]:
    return (found.first, found.tokens, found.right)


NOTHING = all_of(0)


# ---- store, look up, retrieve


@pytest.mark.parametrize("arrangement", LAYOUTS, ids=lambda arrangement: arrangement.name)
def test_what_one_engine_stores_another_retrieves_byte_for_byte(served: Pool, arrangement: Arrangement) -> None:
    writer, reader = served.engine(arrangement), served.engine(arrangement, lent=0)
    prompt = tokens(5 * CHUNK + 7)
    assert reader.lookup(prompt) == 0
    writer.store(prompt)
    assert reader.lookup(prompt, "r") == 5 * CHUNK
    for engine in (reader, writer):
        assert said(engine.retrieve(prompt[: 5 * CHUNK])) == all_of(5 * CHUNK)
    assert served.settled()


def flip_a_byte(inside: Inside) -> None:
    inside.worker.session.copier = WrongCopier()


def forget_what_vllm_has(inside: Inside) -> None:
    load = inside.worker.load
    inside.worker.load = lambda objs, starts, slots, skip: load(objs, starts, slots, 0)


def touch_another_block(inside: Inside) -> None:
    copier = inside.worker.session.copier
    scatter = copier.scatter

    def and_one_more(kv: Any, plan: Any, slots: Any, after: Any) -> Any:
        kv.pages[0][0 if (kv.pages[0][0] == 0xA5).all() else 1, 0] = 0
        return scatter(kv, plan, slots, after)

    copier.scatter = and_one_more


@pytest.mark.parametrize("plant", [flip_a_byte, forget_what_vllm_has, touch_another_block])
def test_the_comparison_sees_one_wrong_byte_anywhere(served: Pool, plant: Any) -> None:
    writer, reader = served.engine(), served.engine(process={"plant": plant})
    writer.store(chunks(3))
    found = reader.retrieve(chunks(3), cached=CHUNK + 16)
    assert (found.tokens, found.right) == (2 * CHUNK, False)


@pytest.mark.parametrize("arrangement", [FLASH, MLA], ids=lambda arrangement: arrangement.name)
def test_tokens_that_vllm_has_are_never_written(served: Pool, arrangement: Arrangement) -> None:
    writer, reader = served.engine(arrangement), served.engine(arrangement)
    writer.store(chunks(4))
    # On a chunk's border, on a block's, in the middle of a block, all but one token.
    for cached in (CHUNK, CHUNK + 16, 2 * CHUNK + 5, 4 * CHUNK - 1):
        first = cached // CHUNK * CHUNK
        assert reader.lookup(chunks(4), f"r{cached}") == 4 * CHUNK
        assert said(reader.retrieve(chunks(4), request=f"r{cached}", cached=cached)) == all_of(4 * CHUNK - first, first)
    assert served.settled()


def test_a_prompt_that_goes_on_differently_hits_as_far_as_it_is_the_same(pair: Pair) -> None:
    served, writer, reader = pair
    writer.store(chunks(5))
    mixed = chunks(2) + chunks(3, family=7)
    assert reader.lookup(mixed, "r") == 2 * CHUNK
    assert said(reader.retrieve(mixed)) == all_of(2 * CHUNK)
    assert reader.lookup(chunks(2, family=2), "miss") == 0
    assert said(reader.retrieve(chunks(2, family=2), request="miss")) == NOTHING
    assert served.settled()


def test_what_is_there_is_not_stored_again(pair: Pair) -> None:
    served, first, second = pair
    first.store(chunks(3))
    before = served.stats().counters["committed"]
    first.store(chunks(3))
    second.store(chunks(3))
    assert (served.stats().counters["committed"], served.stats().chunks) == (before, 3)
    second.store(chunks(4))
    assert (served.stats().counters["committed"], served.stats().chunks) == (before + 1, 4)
    assert said(second.retrieve(chunks(4))) == all_of(4 * CHUNK)


def test_chunks_that_the_mask_leaves_out_are_not_stored(pair: Pair) -> None:
    served, writer, reader = pair
    writer.store(chunks(4), skip=2 * CHUNK)
    assert served.stats().chunks == 2
    assert reader.lookup(chunks(4)) == 0
    writer.store(chunks(2))
    assert said(reader.retrieve(chunks(4))) == all_of(4 * CHUNK)


@pytest.mark.parametrize("unfull", [False, True])
def test_a_tail_shorter_than_a_chunk_is_not_stored(served: Pool, unfull: bool) -> None:
    writer, reader = served.engine(save_unfull_chunk=unfull), served.engine(save_unfull_chunk=unfull)
    prompt = tokens(2 * CHUNK + 9)
    writer.store(prompt)
    writer.store(tokens(CHUNK - 1, family=2))
    assert served.stats().chunks == 2
    assert reader.lookup(prompt, "r") == 2 * CHUNK
    assert said(reader.retrieve(prompt)) == all_of(2 * CHUNK)


def test_kv_caches_may_be_shown_with_the_first_store_or_retrieval(served: Pool) -> None:
    writer, reader = (served.engine(process={"bind": False}) for _ in range(2))
    writer.store(chunks(2))
    assert reader.lookup(chunks(2)) == 0
    reader.store(chunks(1, family=2))
    assert reader.lookup(chunks(2)) == 2 * CHUNK
    assert said(reader.retrieve(chunks(2))) == all_of(2 * CHUNK)


def count_hashes(inside: Inside) -> None:
    database = inside.engine.token_database
    hash_tokens, inside.hashes = database._hash_tokens, 0

    def counted(*things: Any, **more: Any) -> int:
        inside.hashes += 1
        return int(hash_tokens(*things, **more))

    database._hash_tokens = counted


def hashed(inside: Inside) -> int:
    return inside.hashes


def test_a_prompt_that_was_looked_up_is_not_hashed_again(served: Pool) -> None:
    engine = served.engine(process={"plant": count_hashes})
    engine.store(chunks(4))
    assert engine.lookup(chunks(4), "r") == 4 * CHUNK
    before = engine.do(hashed)
    assert said(engine.retrieve(chunks(3), cached=CHUNK + 1)) == all_of(2 * CHUNK, CHUNK)
    assert engine.do(hashed) == before == 8
    assert said(engine.retrieve(chunks(3), request="never looked up")) == all_of(3 * CHUNK)
    assert engine.do(hashed) == before + 3


# ---- leases


def test_a_look_up_leases_until_it_is_unpinned(pair: Pair) -> None:
    served, engine, _ = pair
    engine.store(chunks(3))
    assert engine.lookup(chunks(3)) == 3 * CHUNK
    assert served.leases() == 0
    assert engine.lookup(chunks(3), "r") == 3 * CHUNK
    assert served.leases() == 1
    engine.do("unpin", "r")
    assert served.settled()


def test_the_lease_of_an_abandoned_look_up_ends_by_itself_and_the_next_look_up_has_one_of_its_own(pool: Pool) -> None:
    pool.node.serve(lease_seconds=2.0)
    engine = pool.engine()
    engine.store(chunks(2))
    assert engine.lookup(chunks(2), "aborted") == 2 * CHUNK
    assert pool.leases() == 1
    assert pool.settled()
    for request in ("next", "and the next"):
        assert engine.lookup(chunks(2), request) == 2 * CHUNK
        engine.do("unpin", request)
        assert pool.settled()
    assert pool.stats().counters["expired_leases"] == 1


# ---- forgetting


def test_clear_forgets_the_namespace(served: Pool) -> None:
    engine, other = served.engine(), served.engine(extra={"vcache.model": "another"})
    for one in (engine, other):
        one.store(chunks(3))
    assert served.stats().chunks == 6
    assert engine.do(clear) == 3 * CHUNK
    assert (engine.lookup(chunks(3)), other.lookup(chunks(3))) == (0, 3 * CHUNK)
    other.store(chunks(2, family=2))
    assert other.do(clear, chunks(2, family=2)) == 2
    assert (other.lookup(chunks(2, family=2)), other.lookup(chunks(3))) == (0, 3 * CHUNK)


def clear(inside: Inside, prompt: list[int] | None = None) -> int:
    return int(inside.engine.clear(prompt))


def recreate(inside: Inside) -> bool:
    before = inside.backend
    inside.manager.recreate_backend("vcache")
    inside.show_kv_caches()
    return inside.manager.allocator_backend is inside.backend is not before


def close_and_create(inside: Inside) -> bool:
    before = inside.backend
    inside.manager.close_backend("vcache")
    inside.manager.create_backends()
    inside.show_kv_caches()
    return inside.manager.allocator_backend is inside.backend is not before


@pytest.mark.parametrize("again", [recreate, close_and_create])
def test_a_backend_closed_and_made_again_works_as_before(served: Pool, again: Any) -> None:
    engine, reader = served.engine(), served.engine()
    engine.store(chunks(2))
    assert engine.do(again)
    assert said(engine.retrieve(chunks(2))) == all_of(2 * CHUNK)
    engine.store(chunks(2, family=2))
    assert said(reader.retrieve(chunks(2, family=2))) == all_of(2 * CHUNK)
    assert engine.do("healthy")
    assert served.settled()


# ---- loading ahead (enable_async_loading)


def loading_ahead(pool: Pool, **more: Any) -> Engine:
    return pool.engine(enable_async_loading=True, process={"service": "ahead"}, **more)


def test_what_was_loaded_ahead_is_retrieved(served: Pool) -> None:
    writer, reader = served.engine(), loading_ahead(served)
    writer.store(chunks(4))
    mixed = chunks(3) + chunks(2, family=5)
    assert reader.do("ask", mixed, "r") == 3 * CHUNK
    assert served.leases() == 1
    assert said(reader.retrieve(mixed[: 3 * CHUNK], cached=CHUNK + 4)) == all_of(2 * CHUNK, CHUNK)
    assert served.settled()
    assert reader.do("ask", chunks(2, family=9), "miss") == 0


def test_an_abandoned_load_ahead_leaves_no_lease(served: Pool) -> None:
    reader = loading_ahead(served)
    reader.store(chunks(2))
    assert reader.do("ask", chunks(2), "aborted") == 2 * CHUNK
    reader.do("unpin", "aborted")
    assert served.settled()


def test_chunks_evicted_before_the_load_are_not_retrieved(pool: Pool) -> None:
    pool.node.serve(lease_seconds=1.0)
    writer, reader = pool.engine(lent=4), loading_ahead(pool, lent=0)
    writer.store(chunks(3))
    assert reader.do("ask", chunks(3), "all") == 3 * CHUNK
    assert pool.settled()
    # Tails go first: room for two is the free slot and the third chunk.
    writer.store(chunks(2, family=2))
    assert said(reader.retrieve(chunks(3), request="all")) == all_of(2 * CHUNK)
    assert reader.do("ask", chunks(2), "none") == 2 * CHUNK
    assert pool.settled()
    writer.store(chunks(4, family=3))
    assert said(reader.retrieve(chunks(2), request="none")) == NOTHING
    assert pool.settled()


# ---- several ranks


def ranks(pool: Pool, arrangement: Arrangement = PACKED, **more: Any) -> list[Engine]:
    return [pool.engine(arrangement, process={"rank": rank, "ranks": 2, "service": "ranks"}, **more) for rank in range(2)]


def test_a_chunk_counts_when_both_ranks_have_stored_their_part(served: Pool) -> None:
    first, second = ranks(served)
    first.store(chunks(3))
    assert first.do("ask", chunks(3), "early") == 0
    second.store(chunks(2))
    assert first.do("ask", chunks(3), "r") == 2 * CHUNK
    assert served.leases() == 2
    for rank in (first, second):
        assert said(rank.retrieve(chunks(2))) == all_of(2 * CHUNK)
    assert served.settled()


def test_mla_is_stored_once_and_every_rank_reads_it(served: Pool) -> None:
    first, second = ranks(served, MLA)
    first.store(chunks(3))
    second.store(chunks(3))
    assert served.stats().counters["committed"] == served.stats().chunks == 3
    assert first.do("ask", chunks(3), "r") == 3 * CHUNK
    for rank in (first, second):
        assert said(rank.retrieve(chunks(3))) == all_of(3 * CHUNK)
    assert served.settled()


def sent(inside: Inside) -> bytes:
    """Pickled here: between processes torch would share tensors, not copy them."""
    return pickle.dumps(inside.broadcasts.sent)


def receive(inside: Inside, coming: bytes) -> None:
    inside.broadcasts.coming = pickle.loads(coming)


def latent_rows(prompt: list[int]) -> list[torch.Tensor]:
    """The bytes of each chunk as LMCache's own MLA format has them: all tokens of the first layer, then of the next."""
    cache, rows = Cache(MLA), []
    slots = torch.arange(CHUNK)
    for start in range(0, len(prompt), CHUNK):
        cache.fill(torch.tensor(prompt[start : start + CHUNK]), slots)
        rows.append(torch.cat([tensor.view(torch.uint8).flatten(0, 1)[slots].flatten() for tensor in cache.tensors]))
    return rows


@pytest.mark.parametrize("checksum", [False, True], ids=["", "checksum"])
def test_the_first_rank_broadcasts_mla_chunks_as_lmcache_lays_them_out(served: Pool, checksum: bool) -> None:
    """The rank that receives may have LMCache's own GPU connector, or ours: it has ours where it runs a look-up server too."""
    extra = {"save_only_first_rank": True, "vcache.engine.checksum": checksum}
    first, second = ranks(served, MLA, lookup_server_worker_ids=[0, 1], extra=extra)
    first.store(chunks(3))
    second.store(chunks(3, family=2))
    assert served.stats().chunks == 3
    assert said(first.retrieve(chunks(3), cached=5)) == all_of(3 * CHUNK)
    pickled = first.do(sent)
    told = pickle.loads(pickled)
    places = [(start, start + CHUNK) for start in range(0, 3 * CHUNK, CHUNK)]
    assert (told[0], [one[:2] for one in told[1::2]]) == (3, places)
    assert all(torch.equal(bytes_, rows) for bytes_, rows in zip(told[2::2], latent_rows(chunks(3)), strict=True))
    second.do(receive, pickled)
    assert said(second.retrieve(chunks(3), cached=CHUNK + 1)) == all_of(3 * CHUNK)
    assert served.settled()


def test_more_chunks_are_broadcast_than_are_loaded_at_once(served: Pool) -> None:
    """All were cloned under one lease, which is ended behind the last of them."""
    first, _ = ranks(served, MLA, extra={"save_only_first_rank": True})
    first.store(chunks(10))
    assert said(first.retrieve(chunks(10))) == all_of(10 * CHUNK)
    assert served.settled()


# ---- other KV caches, other requests


def move_house(inside: Inside) -> None:
    """From now on the same worker has its KV in other tensors."""
    inside.cache = Cache(inside.setup.arrangement, inside.setup.sizes)


def test_kv_caches_are_those_of_each_call(pair: Pair) -> None:
    """As in LMCache's own tests, which store from one and retrieve into another."""
    _, engine, _ = pair
    engine.store(chunks(2))
    engine.do(move_house)
    assert said(engine.retrieve(chunks(2))) == all_of(2 * CHUNK)
    engine.store(chunks(3, family=2))
    engine.do(move_house)
    assert engine.lookup(chunks(3, family=2), "r") == 3 * CHUNK
    assert said(engine.retrieve(chunks(3, family=2))) == all_of(3 * CHUNK)


def put_two_requests_at_once(inside: Inside, prompts: list[list[int]]) -> bool:
    keys, objs = [], []
    inside.cache.poison()
    for seed, prompt in enumerate(prompts):
        shapes, dtypes = inside.metadata.get_shapes(CHUNK), inside.metadata.get_dtypes()
        keys.append(inside.keys(prompt)[0])
        objs.append(inside.backend.allocate(shapes, dtypes))
        slots = torch.arange(CHUNK) + seed * CHUNK
        inside.cache.fill(inside.shard(prompt), slots)
        where = {"kvcaches": inside.cache.tensors, "slot_mapping": slots}
        inside.engine.gpu_connector.batched_from_gpu([objs[-1]], [0], [CHUNK], **where)
    inside.backend.batched_submit_put_task(keys, objs)
    return inside.flush()


def test_chunks_of_two_requests_put_at_once_are_stored_each_from_its_own_slots(pair: Pair) -> None:
    _, engine, _ = pair
    prompts = [chunks(1), chunks(1, family=2)]
    assert engine.do(put_two_requests_at_once, prompts)
    for prompt in prompts:
        assert said(engine.retrieve(prompt)) == all_of(CHUNK)


# ---- what others ask of a storage backend


def read_and_drop(inside: Inside, prompt: list[int]) -> list[bytes]:
    """As a tier that wants bytes: get the chunks, read the first one's, drop them all."""
    objs = inside.manager.batched_get(inside.keys(prompt), location="vcache")
    read = [objs[0].byte_array, objs[0].tensor.view(torch.uint8).numpy().tobytes()]
    for obj in objs:
        obj.ref_count_down()
    return read


def test_reading_the_bytes_of_a_chunk_costs_no_other_retrieve(pair: Pair) -> None:
    served, writer, reader = pair
    writer.store(chunks(2))
    writer.store(chunks(3, family=2))
    first, second = reader.do(read_and_drop, chunks(2))
    assert first == second == writer.do(read_and_drop, chunks(2))[0]
    assert served.settled()
    assert said(reader.retrieve(chunks(3, family=2))) == all_of(3 * CHUNK)


def load_every_other(inside: Inside, prompt: list[int]) -> bool:
    """Chunks 0 and 2 of one lease into their places, and nothing else: are all bytes of the KV cache as they must be?"""
    worker, size = inside.worker, inside.setup.chunk_size
    slots = places(inside.setup.sizes, len(prompt), 1)
    objs = worker.get(inside.keys(prompt))
    inside.cache.poison()
    failed = worker.load([objs[0], objs[2]], [0, 2 * size], slots.numpy(), 0)
    for obj in objs:
        obj.ref_count_down()
    expected = Cache(inside.setup.arrangement, inside.setup.sizes)
    for start in (0, 2 * size):
        there = slice(start, start + size)
        expected.fill(inside.shard(prompt)[there], slots[there])
    return failed is None and all(
        torch.equal(mine, its) for mine, its in zip(inside.cache._memory, expected._memory, strict=True)
    )


def test_some_of_the_chunks_of_one_lease_are_loaded_each_from_its_own_slot(pair: Pair) -> None:
    served, writer, reader = pair
    writer.store(chunks(3))
    assert reader.do(load_every_other, chunks(3))
    assert served.settled()


def end_leases_under_broadcasts(inside: Inside) -> None:
    """The server says that the leases are over while the chunks' bytes are on their way to the other ranks."""
    session, theirs, leases = inside.worker.session, inside.engine.broadcast_fn, []
    acquire = session.leases.acquire

    def leased(keys: Any) -> Any:
        leases.append(acquire(keys))
        return leases[-1]

    def broadcast(*what: Any) -> None:
        theirs(*what)
        for one in leases:
            session.client.release(one.id)
            one.deadline -= GRACE_SECONDS  # too old to be believed without asking

    session.leases.acquire, inside.engine.broadcast_fn = leased, broadcast


def test_bytes_that_were_broadcast_under_a_lease_that_ended_are_not_marked(served: Pool) -> None:
    first, _ = ranks(served, MLA, extra={"save_only_first_rank": True})
    first.store(chunks(3))
    first.do(end_leases_under_broadcasts)
    assert first.retrieve(chunks(3)).tokens == 0
    assert served.settled()


def remove_gently(inside: Inside, prompt: list[int]) -> tuple[bool, int]:
    keys = inside.keys(prompt)
    return inside.backend.remove(keys[0], force=False), inside.backend.batched_remove(keys, force=False)


def test_only_a_forced_removal_takes_a_pinned_chunk(pair: Pair) -> None:
    served, writer, reader = pair
    writer.store(chunks(3))
    assert reader.lookup(chunks(2), "r") == 2 * CHUNK
    for engine in (reader, writer):
        assert engine.do(remove_gently, chunks(2)) == (False, 0)
    assert said(reader.retrieve(chunks(2), request="r")) == all_of(2 * CHUNK)
    assert served.settled()
    assert writer.do(remove_gently, chunks(4)) == (True, 2)
    assert writer.lookup(chunks(3)) == served.stats().chunks == 0


def put(inside: Inside, prompt: list[int], foreign: bool) -> tuple[list[int], list[str]]:
    """Put chunks of our own, or another allocator's copies of them: which of them LMCache is told are complete, and the log."""
    keys, slots = inside.keys(prompt), inside.prefill(prompt)
    shapes, dtypes = inside.metadata.get_shapes(CHUNK), inside.metadata.get_dtypes()
    where = {"kvcaches": inside.cache.tensors, "slot_mapping": slots}
    objs: list[Any] = [inside.backend.allocate(shapes, dtypes) for _ in keys]
    inside.engine.gpu_connector.batched_from_gpu(objs, [i * CHUNK for i in range(len(keys))], [], **where)
    if foreign:
        from lmcache.v1.memory_allocators.ad_hoc_memory_allocator import AdHocMemoryAllocator

        theirs = [AdHocMemoryAllocator(device="cpu").allocate(shapes, dtypes) for _ in keys]
        for ours, copy in zip(objs, theirs, strict=True):
            copy.raw_tensor[:] = ours.raw_tensor
        objs = theirs
    done: list[Any] = []
    inside.backend.batched_submit_put_task(keys, objs, on_complete_callback=done.append)
    return [keys.index(key) for key in done], inside.logged("another allocator")


def test_a_put_is_complete_once_others_can_retrieve_it(served: Pool) -> None:
    writer, reader = served.engine(lent=2), served.engine(lent=0)
    assert writer.do(put, chunks(3), False) == ([0, 1], [])
    assert said(reader.retrieve(chunks(3))) == all_of(2 * CHUNK)


def test_what_another_allocator_made_is_refused_and_said(pair: Pair) -> None:
    """Its bytes need not be laid out as the KV blocks of those who would read them from the pool."""
    served, engine, _ = pair
    for _ in range(2):
        done, logged = engine.do(put, chunks(2), True)
        assert (done, len(logged), served.stats().chunks) == ([], 1, 0)
    assert engine.do("stats")["failures"] == {"not_stored: another allocator's": 2}


# ---- LMCache's host tier beside us

HOST_TIER: dict[str, Any] = {"local_cpu": True, "max_local_cpu_size": 0.01}


def slots_in_hot_cache(inside: Inside) -> tuple[int, int]:
    """Chunks that the host tier holds, and how many of them are ours."""
    held = inside.manager.local_cpu_backend.hot_cache.values()
    return len(held), sum(type(one).__module__.startswith("vcache_backend") for one in held)


def forget_pool(inside: Inside) -> None:
    inside.engine.clear(locations=["vcache"])


@pytest.mark.parametrize("arrangement", [FLASH, MLA], ids=lambda arrangement: arrangement.name)
def test_the_host_tier_gets_copies_of_its_own_and_serves_them(served: Pool, arrangement: Arrangement) -> None:
    engine = served.engine(arrangement, **HOST_TIER)
    engine.store(chunks(3))
    assert engine.do(slots_in_hot_cache) == (3, 0)
    engine.do(forget_pool)
    assert served.stats().chunks == 0
    assert engine.lookup(chunks(3), "r") == 3 * CHUNK
    assert said(engine.retrieve(chunks(3), cached=CHUNK + 3)) == all_of(2 * CHUNK, CHUNK)


def test_a_prompt_half_in_the_host_tier_and_half_in_the_pool_is_retrieved_whole(served: Pool) -> None:
    engine, other = served.engine(**HOST_TIER), served.engine()
    engine.store(chunks(2))
    other.store(chunks(5))
    assert engine.lookup(chunks(5), "r") == 5 * CHUNK
    assert said(engine.retrieve(chunks(5))) == all_of(5 * CHUNK)
    # What came from the pool is not kept: its slots will be used again.
    assert engine.do(slots_in_hot_cache) == (2, 0)
    assert served.settled()


def recreate_host_tier(inside: Inside) -> None:
    """LMCache makes all storage plugins again, too."""
    inside.manager.recreate_backend("LocalCPUBackend")
    inside.show_kv_caches()


def test_a_host_tier_made_again_is_guarded_too(served: Pool) -> None:
    writer, reader = served.engine(), served.engine(**HOST_TIER)
    writer.store(chunks(3))
    reader.do(recreate_host_tier)
    assert said(reader.retrieve(chunks(3))) == all_of(3 * CHUNK)
    assert reader.do(slots_in_hot_cache) == (0, 0)
    assert reader.do(allocators)[0]
    # The writer, the reader, and the test: the backend before is closed.
    assert served.stats().clients == 3


# ---- who shares with whom


@pytest.mark.parametrize("other", [{"arrangement": FLASH}, {"chunk_size": 2 * CHUNK}], ids=lambda other: "-".join(other))
def test_instances_that_differ_never_share(served: Pool, other: dict[str, Any]) -> None:
    first, second = served.engine(), served.engine(**other)
    first.store(chunks(4))
    assert second.lookup(chunks(4)) == 0
    second.store(chunks(4))
    assert len(served.stats().namespaces) == 2
    for engine in (first, second):
        assert said(engine.retrieve(chunks(4))) == all_of(4 * CHUNK)


def test_requests_with_different_tags_never_share(pair: Pair) -> None:
    _, writer, reader = pair
    mine, theirs = ({"lmcache.tag.tenant": name} for name in ("a", "b"))
    writer.store(chunks(2), request_configs=mine)
    for configs in (None, theirs, {"lmcache.tag.other": "a"}, {**mine, "lmcache.tag.more": "x"}):
        assert reader.lookup(chunks(2), configs=configs) == 0
        assert said(reader.retrieve(chunks(2), request_configs=configs)) == NOTHING
    assert reader.lookup(chunks(2), configs={**mine, "lmcache.skip_save": True}) == 2 * CHUNK
    assert said(reader.retrieve(chunks(2), request_configs=mine)) == all_of(2 * CHUNK)


# ---- the allocator's role


def allocators(inside: Inside) -> tuple[bool, list[str]]:
    return inside.manager.allocator_backend is inside.backend, list(inside.manager.storage_backends)


def test_the_plugin_allocates_beside_a_host_tier_too(served: Pool) -> None:
    assert served.engine().do(allocators) == (True, ["vcache"])
    engine = served.engine(**HOST_TIER, store_location="vcache")
    assert engine.do(allocators) == (True, ["LocalCPUBackend", "vcache"])
    engine.store(chunks(3))
    assert engine.do(slots_in_hot_cache) == (0, 0)
    assert said(engine.retrieve(chunks(3))) == all_of(3 * CHUNK)


def stock_allocator(inside: Inside, yaml: Path) -> list[str]:
    """The allocator of another engine in this process, which has no plugin of ours."""
    from lmcache.v1.cache_engine import LMCacheEngineBuilder
    from lmcache.v1.config import LMCacheEngineConfig
    from lmcache_worker import metadata

    engine = LMCacheEngineBuilder.get_or_create(
        "stock", LMCacheEngineConfig.from_file(str(yaml)), metadata(inside.setup), None, print, print
    )
    engine.post_init()
    return [type(engine.storage_manager.allocator_backend).__name__, *engine.storage_manager.storage_backends]


def test_an_engine_without_the_plugin_is_left_alone(served: Pool) -> None:
    stock = served.yaml(0, storage_plugins=[], **HOST_TIER)
    assert served.engine().do(stock_allocator, stock) == ["LocalCPUBackend", "LocalCPUBackend"]
