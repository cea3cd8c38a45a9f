"""The plugin inside real LMCacheEngines, each in a process of its own: store here, look up and
retrieve there, byte for byte.

Engines are made from LMCache's YAML alone. Every retrieval goes into poisoned blocks in other
places, and every byte of the whole KV cache is compared."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import torch
from engine_cases import WrongCopier
from kv_cases import CHUNK, PACKED, Arrangement
from lmcache_cases import TAGGED, Engine, Pool, all_of, chunks, needs_lmcache, pool, served, tokens
from processes import QUICK, eventually

from vcache_backend import status

if TYPE_CHECKING:
    from lmcache_worker import Inside

__all__ = ["pool", "served"]
pytestmark = needs_lmcache
FP8 = PACKED._replace(dtype=torch.float8_e4m3fn)
"""The plugin's usual layout is in every other test here."""
MLA = Arrangement("mla", "block head token dim")


# ---- store, look up, retrieve


def flip_a_byte(inside: Inside) -> None:
    inside.worker.session.copier = WrongCopier()


def test_the_comparison_sees_one_wrong_byte(served: Pool) -> None:
    writer, reader = served.engine(), served.engine(process={"plant": flip_a_byte})
    writer.store(chunks(3))
    found = reader.retrieve(chunks(3), cached=CHUNK + 16)
    assert (found.tokens, found.right) == (2 * CHUNK, False)


def test_tokens_that_vllm_has_are_never_written(served: Pool) -> None:
    writer, reader = served.engine(FP8), served.engine(FP8, lent=0)
    writer.store(chunks(4))
    # On a chunk's border, on a block's, in the middle of a block, all but one token.
    for cached in (CHUNK, CHUNK + 16, 2 * CHUNK + 5, 4 * CHUNK - 1):
        first = cached // CHUNK * CHUNK
        assert reader.lookup(chunks(4), f"r{cached}") == 4 * CHUNK
        found = reader.retrieve(chunks(4), request=f"r{cached}", cached=cached)
        assert found == all_of(4 * CHUNK - first, first)
    assert served.settled()


def test_a_tail_shorter_than_a_chunk_is_not_stored_even_if_lmcache_would(served: Pool) -> None:
    writer, reader = served.engine(save_unfull_chunk=True), served.engine(save_unfull_chunk=True)
    prompt = tokens(2 * CHUNK + 9)
    writer.store(prompt)
    writer.store(tokens(CHUNK - 1, family=2))
    assert served.stats().chunks == 2
    assert reader.lookup(prompt, "r") == 2 * CHUNK
    assert reader.retrieve(prompt) == all_of(2 * CHUNK)


# ---- look-ups


def remember_at_most(inside: Inside, count: int) -> None:
    from vcache_backend.integration.lmcache import worker

    worker.MOST_HITS = count


def freeze(inside: Inside, on: bool) -> None:
    inside.engine.freeze(on)


def bypass(inside: Inside, on: bool) -> None:
    inside.manager.set_backend_bypass("vcache", on)


@pytest.mark.parametrize("stop", [freeze, bypass])
def test_while_lmcache_is_frozen_or_goes_round_the_plugin_nothing_is_stored(
    served: Pool, stop: Callable[[Inside, bool], None]
) -> None:
    engine = served.engine()
    engine.ask(stop, True)
    engine.store(chunks(2))
    assert served.stats().chunks == 0
    engine.ask(stop, False)
    engine.store(chunks(2))
    assert served.stats().chunks == 2


def kept(inside: Inside) -> int:
    return len(inside.worker._hits)


def test_a_look_up_is_kept_until_it_is_loaded_made_again_or_one_of_too_many(served: Pool) -> None:
    engine = served.engine()
    engine.store(chunks(3))
    for length in (3, 2):
        assert engine.lookup(chunks(length), "r") == length * CHUNK
        assert engine.ask(kept) == 1
    assert engine.lookup(chunks(3), "vLLM has it") == 3 * CHUNK
    assert engine.retrieve(chunks(3), request="vLLM has it", cached=3 * CHUNK) == all_of(0)
    assert engine.ask(kept) == 1
    engine.ask(remember_at_most, 2)
    for request in ("1", "2", "3", "4"):
        assert engine.lookup(chunks(3), request) == 3 * CHUNK
    assert engine.ask(kept) == 2
    # One that is forgotten is looked up anew.
    assert engine.retrieve(chunks(3), request="1") == all_of(3 * CHUNK)


# ---- several ranks


def ranks(pool: Pool, arrangement: Arrangement = PACKED, **more: Any) -> list[Engine]:
    both = [{"rank": rank, "ranks": 2, "service": "ranks"} for rank in range(2)]
    return [pool.engine(arrangement, process=process, **more) for process in both]


def test_a_chunk_counts_when_both_ranks_have_stored_their_part(served: Pool) -> None:
    """And once in the hit rate."""
    first, second = ranks(served, client=QUICK)
    first.store(chunks(3))
    assert first.ask("ask", chunks(3), "early") == 0
    second.store(chunks(2))
    assert first.ask("ask", chunks(3), "r") == 2 * CHUNK
    for rank in (first, second):
        assert rank.retrieve(chunks(2)) == all_of(2 * CHUNK)
    assert served.settled()
    eventually(lambda: status.tokens(served.stats()) == (6 * CHUNK, 2 * CHUNK))


def test_mla_is_stored_once_and_every_rank_reads_it(served: Pool) -> None:
    first, second = ranks(served, MLA)
    first.store(chunks(3))
    second.store(chunks(3))
    assert served.stats().counters["committed"] == served.stats().chunks == 3
    assert first.ask("ask", chunks(3), "r") == 3 * CHUNK
    for rank in (first, second):
        assert rank.retrieve(chunks(3)) == all_of(3 * CHUNK)
    assert served.settled()


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


def allocators(inside: Inside) -> tuple[bool, list[str]]:
    return inside.manager.allocator_backend is inside.backend, list(inside.manager.storage_backends)


def test_another_tier_gets_nothing_and_what_it_has_under_our_keys_is_not_read(served: Pool) -> None:
    """Its keys say nothing of the layout of the bytes."""
    engine = served.engine(**HOST_TIER)
    assert engine.ask(allocators) == (True, ["LocalCPUBackend", "vcache"])
    engine.store(chunks(1))
    assert engine.ask(in_hot_cache) == 0
    assert engine.ask(fill_host_tier, chunks(3)) == 3
    assert engine.lookup(chunks(3), "r") == CHUNK
    assert engine.retrieve(chunks(3), request="r") == all_of(CHUNK)
    assert engine.retrieve(chunks(3)) == all_of(CHUNK)


# ---- forgetting


def test_clear_forgets_the_namespace(served: Pool) -> None:
    engine, other = served.engine(), served.engine(extra={"connector": {"model": "another"}})
    for one in (engine, other):
        one.store(chunks(3))
    assert served.stats().chunks == 6
    assert engine.ask(clear) == 3 * CHUNK
    assert (engine.lookup(chunks(3)), other.lookup(chunks(3))) == (0, 3 * CHUNK)


def clear(inside: Inside) -> int:
    return int(inside.engine.clear(**TAGGED))


def recreate(inside: Inside) -> bool:
    before = inside.backend
    inside.manager.recreate_backend("vcache")
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
