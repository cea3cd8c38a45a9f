"""The order of eviction: least recently used first."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from model import chunk_key

from vcache_backend.metadata_server.chunks import LRU
from vcache_backend.metadata_server.messages import ChunkKey, Location, SegmentId
from vcache_backend.metadata_server.placement import Entry

A, B, C, D = KEYS = [chunk_key(n) for n in range(4)]


class Order:
    """The order by the keys of its chunks, all of one medium."""

    def __init__(self, *keys: ChunkKey) -> None:
        self.lru = LRU()
        self.entries: dict[ChunkKey, Entry] = {}
        for key in keys:
            self.add(key)

    def add(self, key: ChunkKey) -> None:
        self.remove(key)
        self.entries[key] = Entry(key, Location(SegmentId("s0"), 0, 1, 1))
        self.lru.add(self.entries[key], "cuda")

    def touch(self, key: ChunkKey) -> None:
        if key in self.entries:
            self.lru.touch(self.entries[key])

    def remove(self, key: ChunkKey) -> None:
        if key in self.entries:
            self.lru.remove(self.entries.pop(key))

    def coldest(self) -> list[ChunkKey]:
        return [entry.key for entry in self.lru.coldest("cuda")]


def test_a_removed_chunk_is_in_no_order_and_cannot_be_touched() -> None:
    order = Order(A, B)
    removed = order.entries[A]
    order.remove(A)
    order.lru.remove(removed)
    order.lru.touch(removed)
    assert order.coldest() == [B]


def test_pieces_come_to_an_end_though_chunks_are_touched_all_the_time() -> None:
    """Each piece looks at a bounded number of chunks, and each chunk is told once."""
    keys = [chunk_key(n) for n in range(40)]
    order, told = Order(*keys), []
    for count, piece in enumerate(order.lru.pieces(2)):
        assert len(piece) <= 2
        assert count < 200
        told += [entry.key for entry in piece]
        for key in keys[(7 * count) % 30 :][:10]:
            order.touch(key)
    assert sorted(told) == keys


Steps = list[tuple[str, ChunkKey]]
some_steps = st.lists(st.tuples(st.sampled_from(["add", "touch", "remove"]), st.sampled_from(KEYS)))


@given(some_steps, some_steps)
def test_the_order_is_that_of_a_plain_list(steps: Steps, meanwhile: Steps) -> None:
    """And so it stays while it is told in pieces; told is what was there from first to last, no chunk twice."""
    order, plain, lasting = Order(), [], set()

    def take(what: str, key: ChunkKey) -> None:
        getattr(order, what)(key)
        if key in plain or what == "add":
            plain[:] = [other for other in plain if other != key] + [key] * (what != "remove")
        if what != "touch":
            lasting.discard(key)

    for step in steps:
        take(*step)
    assert order.coldest() == plain
    lasting |= set(plain)
    pieces, told = order.lru.pieces(1), []
    for step in meanwhile:
        told += next(pieces, [])
        take(*step)
        assert order.coldest() == plain
    told += [entry for piece in pieces for entry in piece]
    assert lasting <= {entry.key for entry in told}
    assert len(set(map(id, told))) == len(told)
