"""The order of eviction: least recently used first, soft pins last, hard pins never."""

from __future__ import annotations

import sys

from hypothesis import given
from hypothesis import strategies as st
from model import chunk_key

from vcache_backend.metadata_server.eviction import LRU, POLICIES
from vcache_backend.metadata_server.messages import ChunkKey, Location, Pin, SegmentId
from vcache_backend.metadata_server.placement import Entry

A, B, C, D = (chunk_key(n) for n in range(4))


class Order:
    """A policy by the keys of its chunks, all of one medium."""

    def __init__(self, *keys: ChunkKey) -> None:
        self.policy = LRU()
        self.entries: dict[ChunkKey, Entry] = {}
        for key in keys:
            self.add(key, Pin.NONE)

    def add(self, key: ChunkKey, pin: Pin) -> None:
        entry = self.entries.setdefault(key, Entry(key, Location(SegmentId("s0"), 0, 1, 1)))
        entry.pin = pin
        self.policy.add(entry, "cuda")

    def touch(self, key: ChunkKey) -> None:
        self.policy.touch(self.entries[key])

    def remove(self, key: ChunkKey) -> None:
        if key in self.entries:
            self.policy.remove(self.entries.pop(key))

    def victims(self) -> list[ChunkKey]:
        return [entry.key for entry in self.policy.victims("cuda")]

    def told(self, size: int = 2) -> list[ChunkKey]:
        return [entry.key for piece in self.policy.pieces(size) for entry in piece]


def test_the_least_recently_added_goes_first() -> None:
    assert Order(A, B, C).victims() == [A, B, C]


def test_a_touched_chunk_goes_last() -> None:
    order = Order(A, B, C)
    order.touch(A)
    assert order.victims() == [B, C, A]


def test_a_removed_chunk_is_no_victim_and_cannot_be_touched() -> None:
    order = Order(A, B)
    removed = order.entries[A]
    order.remove(A)
    order.policy.remove(removed)
    order.policy.touch(removed)
    assert order.victims() == [B]


def test_soft_pinned_chunks_go_after_all_others() -> None:
    order = Order(A, B, C)
    order.add(A, Pin.SOFT)
    assert order.victims() == [B, C, A]
    order.add(D, Pin.NONE)
    assert order.victims() == [B, C, D, A]


def test_soft_pinned_chunks_keep_their_own_order_of_use() -> None:
    order = Order()
    for key in (A, B, C):
        order.add(key, Pin.SOFT)
    order.touch(A)
    assert order.victims() == [B, C, A]


def test_hard_pinned_chunks_never_go_and_are_still_told() -> None:
    order = Order(A, B)
    order.add(A, Pin.HARD)
    order.touch(A)
    assert order.victims() == [B]
    assert sorted(order.told()) == [A, B]


def test_an_unpinned_chunk_is_most_recent_and_goes_again() -> None:
    order = Order(A, B)
    order.add(A, Pin.HARD)
    order.add(A, Pin.NONE)
    assert order.victims() == [B, A]


def test_a_medium_has_an_order_of_its_own() -> None:
    order = Order(A, B)
    order.policy.add(Entry(C, Location(SegmentId("s1"), 0, 1, 2)), "host")
    assert order.victims() == [A, B]
    assert [entry.key for entry in order.policy.victims("host")] == [C]


def test_pieces_come_to_an_end_though_chunks_are_touched_all_the_time() -> None:
    """Each piece looks at a bounded number of chunks, and each chunk is told once."""
    keys = [chunk_key(n) for n in range(40)]
    order, told = Order(*keys), []
    for count, piece in enumerate(order.policy.pieces(2)):
        assert len(piece) <= 2
        assert count < 200
        told += [entry.key for entry in piece]
        for key in keys[(7 * count) % 30 :][:10]:
            order.touch(key)
    assert sorted(told) == keys


def test_the_policy_is_found_by_the_name_the_configuration_uses() -> None:
    assert POLICIES["lru"] is LRU


Steps = list[tuple[str, ChunkKey, Pin]]
steps_ = st.lists(st.tuples(st.sampled_from(["add", "touch", "remove"]), st.sampled_from([A, B, C, D]), st.sampled_from(Pin)))


@given(steps_, steps_)
def test_the_order_is_that_of_a_plain_list(steps: Steps, meanwhile: Steps) -> None:
    """And so it stays while it is told in pieces; told is what was there from first to last."""
    order, plain, pins = Order(), [], {}
    lasting: set[ChunkKey] = set()

    def take(what: str, key: ChunkKey, pin: Pin) -> None:
        if what == "touch" and key not in plain:
            return
        if key in plain:
            plain.remove(key)
        if what == "add":
            order.add(key, pin)
            pins[key] = pin
        elif what == "touch":
            order.touch(key)
        else:
            order.remove(key)
            lasting.discard(key)
        if what != "remove":
            plain.append(key)

    for step in steps:
        take(*step)
    assert order.victims() == [k for k in plain if pins[k] == Pin.NONE] + [k for k in plain if pins[k] == Pin.SOFT]
    assert sorted(order.told()) == sorted(plain)
    lasting |= set(plain)
    pieces, told = order.policy.pieces(1), []
    for step in meanwhile:
        told += [entry.key for entry in next(pieces, [])]
        take(*step)
        assert order.victims() == [k for k in plain if pins[k] == Pin.NONE] + [k for k in plain if pins[k] == Pin.SOFT]
    told += [entry.key for piece in pieces for entry in piece]
    assert lasting <= set(told)


def test_pieces_that_are_given_up_keep_nothing() -> None:
    """As when the disk is full in the middle of a compaction."""
    order = Order(A, B)
    pieces = order.policy.pieces(1)
    next(pieces)
    pieces.close()
    holders = sys.getrefcount(order.entries[A])
    for pin in [Pin.SOFT, Pin.NONE] * 10:
        order.add(A, pin)
    after = sys.getrefcount(order.entries[A])
    assert after == holders
