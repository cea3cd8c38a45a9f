"""The plugin as one of LMCache's storage backends: beside its host tier, closed and made again,
asked for what is no request's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kv_cases import CHUNK
from lmcache_cases import (
    Pair,
    Pool,
    all_of,
    chunks,
    needs_lmcache,
    pair,
    pool,
    said,
    served,
    shared,
)

if TYPE_CHECKING:
    from lmcache_worker import Inside

__all__ = ["pair", "pool", "served", "shared"]
pytestmark = needs_lmcache


# ---- what others ask of a storage backend


def remove(inside: Inside, prompt: list[int]) -> tuple[bool, int]:
    keys = inside.keys(prompt)
    return inside.backend.remove(keys[0]), inside.backend.batched_remove(keys)


def test_chunks_are_removed_and_who_has_looked_them_up_still_loads_them(pair: Pair) -> None:
    served, writer, reader = pair
    writer.store(chunks(3))
    assert reader.lookup(chunks(2), "r") == 2 * CHUNK
    assert writer.do(remove, chunks(4)) == (True, 2)
    assert writer.lookup(chunks(3)) == 0
    assert said(reader.retrieve(chunks(2), request="r")) == all_of(2 * CHUNK)
    assert served.settled()
    assert served.stats().chunks == 0


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
    assert engine.do(fill_host_tier, chunks(3)) == 3
    assert engine.lookup(chunks(3), "r") == CHUNK
    assert said(engine.retrieve(chunks(3), request="r")) == all_of(CHUNK)
    assert said(engine.retrieve(chunks(3))) == all_of(CHUNK)


# ---- the allocator's role


def allocators(inside: Inside) -> tuple[bool, list[str]]:
    return inside.manager.allocator_backend is inside.backend, list(inside.manager.storage_backends)


def test_the_plugin_allocates_beside_a_host_tier_too(served: Pool) -> None:
    assert served.engine().do(allocators) == (True, ["vcache"])
    engine = served.engine(**HOST_TIER)
    assert engine.do(allocators) == (True, ["LocalCPUBackend", "vcache"])
    engine.store(chunks(3))
    assert engine.do(in_hot_cache) == 0
    assert said(engine.retrieve(chunks(3))) == all_of(3 * CHUNK)


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


def test_a_backend_made_again_works_as_before(served: Pool) -> None:
    engine, reader = served.engine(), served.engine()
    engine.store(chunks(2))
    assert engine.do(recreate)
    assert said(engine.retrieve(chunks(2))) == all_of(2 * CHUNK)
    engine.store(chunks(2, family=2))
    assert said(reader.retrieve(chunks(2, family=2))) == all_of(2 * CHUNK)
    assert engine.do("healthy")
    assert served.settled()
