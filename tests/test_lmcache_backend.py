"""The plugin as one of LMCache's storage backends: beside its host tier, closed and made again,
asked for what is no request's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from kv_cases import CHUNK
from lmcache_cases import Pool, all_of, chunks, needs_lmcache, pool, served

if TYPE_CHECKING:
    from lmcache_worker import Inside

__all__ = ["pool", "served"]
pytestmark = needs_lmcache


# ---- what others ask of a storage backend


def put_anothers(inside: Inside, prompt: list[int]) -> bool:
    """Put chunks that another allocator made; whether nothing of it is under way any more."""
    from lmcache.v1.memory_allocators.ad_hoc_memory_allocator import AdHocMemoryAllocator

    keys, slots = inside.keys(prompt), inside.prefill(prompt)
    shapes, dtypes = inside.metadata.get_shapes(CHUNK), inside.metadata.get_dtypes()
    where = {"kvcaches": inside.cache.tensors, "slot_mapping": slots}
    theirs = [AdHocMemoryAllocator(device="cpu").allocate(shapes, dtypes) for _ in keys]
    inside.engine.gpu_connector.batched_from_gpu(
        theirs, [i * CHUNK for i in range(len(keys))], [], **where
    )
    inside.backend.batched_submit_put_task(keys, theirs)
    return inside.flush()


def test_what_another_allocator_made_is_not_stored(served: Pool) -> None:
    """Its bytes need not be laid out as the KV blocks of those who would read them from the
    pool.
    """
    assert served.engine().ask(put_anothers, chunks(2))
    assert (served.stats().chunks, served.stats().reservations) == (0, 0)


# ---- LMCache's host tier beside us

HOST_TIER: dict[str, Any] = {"local_cpu": True, "max_local_cpu_size": 0.01}


def in_hot_cache(inside: Inside) -> int:
    """Chunks that the host tier holds."""
    return len(inside.manager.local_cpu_backend.hot_cache)


def fill_host_tier(inside: Inside, prompt: list[int]) -> int:
    """Put chunks there under the prompt's keys, as a disk or a server behind it would that others
    fill, too. Their bytes are arranged as stock LMCache arranges them."""
    tier = inside.manager.local_cpu_backend
    shapes = inside.metadata.get_shapes(CHUNK)
    dtypes = inside.metadata.get_dtypes()
    for key in inside.keys(prompt):
        tier.submit_put_task(key, tier.allocate(shapes, dtypes))
    return in_hot_cache(inside)


def test_what_another_tier_has_under_our_keys_is_not_read(served: Pool) -> None:
    """Its keys say nothing of the layout of the bytes."""
    engine = served.engine(**HOST_TIER)
    engine.store(chunks(1))
    assert engine.ask(fill_host_tier, chunks(3)) == 3
    assert engine.lookup(chunks(3), "r") == CHUNK
    assert engine.retrieve(chunks(3), request="r") == all_of(CHUNK)
    assert engine.retrieve(chunks(3)) == all_of(CHUNK)


# ---- the allocator's role


def allocators(inside: Inside) -> tuple[bool, list[str]]:
    return inside.manager.allocator_backend is inside.backend, list(inside.manager.storage_backends)


def test_the_plugin_allocates_beside_a_host_tier_too(served: Pool) -> None:
    assert served.engine().ask(allocators) == (True, ["vcache"])
    engine = served.engine(**HOST_TIER)
    assert engine.ask(allocators) == (True, ["LocalCPUBackend", "vcache"])
    engine.store(chunks(3))
    assert engine.ask(in_hot_cache) == 0
    assert engine.retrieve(chunks(3)) == all_of(3 * CHUNK)


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


def test_chunks_of_two_requests_put_at_once_are_stored_each_from_its_own_slots(
    served: Pool,
) -> None:
    engine, prompts = served.engine(), [chunks(1), chunks(1, family=2)]
    assert engine.ask(put_two_requests_at_once, prompts)
    for prompt in prompts:
        assert engine.retrieve(prompt) == all_of(CHUNK)


# ---- forgetting


def test_clear_forgets_the_namespace(served: Pool) -> None:
    engine, other = served.engine(), served.engine(extra={"vcache.model": "another"})
    for one in (engine, other):
        one.store(chunks(3))
    assert served.stats().chunks == 6
    assert engine.ask(clear) == 3 * CHUNK
    assert (engine.lookup(chunks(3)), other.lookup(chunks(3))) == (0, 3 * CHUNK)
    other.store(chunks(2, family=2))
    assert other.ask(clear, chunks(2, family=2)) == 2
    assert (other.lookup(chunks(2, family=2)), other.lookup(chunks(3))) == (0, 3 * CHUNK)


def clear(inside: Inside, prompt: list[int] | None = None) -> int:
    return int(inside.engine.clear(prompt))


def recreate(inside: Inside) -> bool:
    before = inside.backend
    inside.manager.recreate_backend("vcache")
    inside.show_kv_caches()
    return inside.manager.allocator_backend is inside.backend is not before


def test_a_backend_made_again_works_as_before(served: Pool) -> None:
    engine, reader = served.engine(), served.engine()
    engine.store(chunks(2))
    assert engine.ask(recreate)
    assert engine.retrieve(chunks(2)) == all_of(2 * CHUNK)
    engine.store(chunks(2, family=2))
    assert reader.retrieve(chunks(2, family=2)) == all_of(2 * CHUNK)
    assert engine.ask("healthy")
    assert served.settled()
