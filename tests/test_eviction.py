"""The order of eviction: least recently used first, soft pins last, hard pins never."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from model import chunk_key

from vcache_backend.metadata_server.eviction import LRU, POLICIES
from vcache_backend.metadata_server.messages import ChunkKey, Pin

A, B, C, D = (chunk_key(n) for n in range(4))


def lru(*keys: ChunkKey) -> LRU:
    policy = LRU()
    for key in keys:
        policy.add(key, Pin.NONE)
    return policy


def test_the_least_recently_added_goes_first() -> None:
    assert list(lru(A, B, C).victims()) == [A, B, C]


def test_a_touched_chunk_goes_last() -> None:
    policy = lru(A, B, C)
    policy.touch(A)
    assert list(policy.victims()) == [B, C, A]


def test_a_removed_chunk_is_no_victim() -> None:
    policy = lru(A, B)
    policy.remove(A)
    assert list(policy.victims()) == [B]


def test_removing_what_is_not_there_does_nothing() -> None:
    policy = lru(A)
    policy.remove(B)
    assert list(policy.victims()) == [A]


def test_soft_pinned_chunks_go_after_all_others() -> None:
    policy = lru(A, B, C)
    policy.add(A, Pin.SOFT)
    assert list(policy.victims()) == [B, C, A]
    policy.add(D, Pin.NONE)
    assert list(policy.victims()) == [B, C, D, A]


def test_soft_pinned_chunks_keep_their_own_order_of_use() -> None:
    policy = LRU()
    for key in (A, B, C):
        policy.add(key, Pin.SOFT)
    policy.touch(A)
    assert list(policy.victims()) == [B, C, A]


def test_hard_pinned_chunks_never_go_and_are_still_told() -> None:
    policy = lru(A, B)
    policy.add(A, Pin.HARD)
    policy.touch(A)
    assert list(policy.victims()) == [B]
    assert set(policy.coldest_first()) == {A, B}


def test_an_unpinned_chunk_is_most_recent_and_goes_again() -> None:
    policy = lru(A, B)
    policy.add(A, Pin.HARD)
    policy.add(A, Pin.NONE)
    assert list(policy.victims()) == [B, A]


def test_the_policy_is_found_by_the_name_the_configuration_uses() -> None:
    assert POLICIES["lru"] is LRU


@given(st.lists(st.tuples(st.sampled_from(["add", "touch", "remove"]), st.sampled_from([A, B, C, D]), st.sampled_from(Pin))))
def test_the_order_is_that_of_a_plain_list(steps: list[tuple[str, ChunkKey, Pin]]) -> None:
    policy, order, pins = LRU(), [], {}
    for what, key, pin in steps:
        if what == "touch" and key not in order:
            continue
        if key in order:
            order.remove(key)
        if what == "add":
            policy.add(key, pin)
            pins[key] = pin
        elif what == "touch":
            policy.touch(key)
        else:
            policy.remove(key)
        if what != "remove":
            order.append(key)
    assert list(policy.victims()) == [k for k in order if pins[k] == Pin.NONE] + [k for k in order if pins[k] == Pin.SOFT]
    assert sorted(policy.coldest_first()) == sorted(order)
