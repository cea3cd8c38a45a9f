"""What one instance has published, block by block: which of it look-ups find, and for how long."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Iterator, Sequence

import pytest
from instance_cases import NAMESPACE, counts, instance_id, numbers, prompt

from vcache_backend.metadata_server.publications import BLOCK_BYTES, InstancePublications
from vcache_backend.protocol import messages as m
from vcache_backend.protocol.generation_table import ForeignTable
from vcache_backend.vram_pool.generations import Generations

A, BLOCKS = instance_id(1), 64
FULL, WINDOW = m.BlockTable("full"), m.BlockTable("window", 1, 9)


class Owner:
    """An instance, and what the server knows of it. A block's name is a number."""

    def __init__(self, ranks: int, tables: Sequence[m.BlockTable], blocks: int) -> None:
        self.table = Generations(A, blocks)
        join = m.Join(A, NAMESPACE, blocks, ranks, 4, list(tables))
        self.known = InstancePublications(join, ForeignTable(self.table.fd, A, blocks))

    def fill(self, blocks: Sequence[int], name: int, table: int = 0) -> m.BlockRun:
        """Consecutive blocks of a prompt, the first of this name."""
        generation = self.table.filled(blocks)
        packs = numbers(*blocks), counts(*[generation] * len(blocks))
        return m.BlockRun(0, *packs, table, prompt(len(blocks), name, 1))

    def found(self, name: int, count: int, table: int = 0) -> int:
        hashes = prompt(count, name, 1)
        found = self.known.follow(table, hashes, 0, count)
        assert len(b"".join(found.blocks)) == found.stop * m.NUMBER_BYTES
        return found.stop


@pytest.fixture
def owners(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Owner]]:
    """Their logs have few more places than twice their blocks."""
    monkeypatch.setattr(m, "MAX_PUBLISHED", BLOCKS)
    made = list[Owner]()

    class Kept(Owner):
        def __init__(
            self, ranks: int = 1, tables: Sequence[m.BlockTable] = (FULL,), blocks: int = BLOCKS
        ) -> None:
            super().__init__(ranks, tables, blocks)
            made.append(self)

    yield Kept
    for owner in made:
        owner.table.close()


def test_a_block_is_found_once_all_ranks_have_published_it(owners: type[Owner]) -> None:
    owner = owners(ranks=2)
    run = owner.fill(range(8), 100)
    assert owner.known.publish(0, [run]) == []
    assert (owner.found(100, 8), owner.known.live) == (0, 0)
    # The other rank says it in other pieces, and lacks one.
    ends = owner.known.publish(1, [run.cut(2, 5)]) + owner.known.publish(1, [run.cut(0, 2)])
    assert (ends, owner.found(100, 8), owner.known.live) == ([prompt(1, 103, 1)], 5, 5)
    owner.known.publish(1, [run.cut(6, 8)])
    assert (owner.found(100, 8), owner.found(106, 2), owner.known.live) == (5, 2, 7)


def test_a_block_that_has_changed_when_its_publication_comes_is_not_taken(
    owners: type[Owner],
) -> None:
    """The newer publication may have come before, of another rank."""
    owner = owners(ranks=2)
    late, newer = owner.fill(range(4), 100), owner.fill(range(4), 200)
    owner.known.publish(0, [newer])
    # Nobody waits for its chunk.
    assert owner.known.publish(1, [late]) == [prompt(1, 103, 1)]
    owner.known.publish(1, [newer])
    assert [owner.found(name, 4) for name in (100, 200)] == [0, 4]


def test_what_is_right_stays_however_old_it_is(
    owners: type[Owner], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every other block never changes. The others fill the log again and again."""
    owner, odd, even = owners(), range(1, BLOCKS, 2), range(0, BLOCKS, 2)
    for block in odd:
        owner.known.publish(0, [owner.fill([block], block)])
    for turn in range(1, 20):
        for at in range(0, len(even), 8):
            owner.known.publish(0, [owner.fill(even[at : at + 8], 1000 * turn + at)])
    assert all(owner.found(block, 1) for block in odd)
    assert [owner.found(1000 * 19 + at, 8) for at in range(0, 32, 8)] == [8] * 4
    assert owner.known.live == BLOCKS == len(owner.known.named)
    monkeypatch.setattr(InstancePublications, "MAX_MOVED", 0)
    for turn in range(20, 40):
        owner.known.publish(0, [owner.fill(even, 1000 * turn)])
    assert not any(owner.found(block, 1) for block in odd), "a miss, which takes no time"
    assert owner.found(39_000, len(even)) == len(even)


def test_a_run_ends_where_newer_ones_have_overwritten_it(owners: type[Owner]) -> None:
    owner = owners(tables=(FULL, WINDOW))
    owner.known.publish(0, [owner.fill(range(16), 100, 1)])
    owner.table.void(range(8))
    for turn in range(11):
        count = 16 if turn < 10 else owner.known._size - owner.known._next
        owner.known.publish(0, [owner.fill(range(16, 16 + count), 1000 * turn)])
    owner.known.publish(0, [owner.fill(range(40, 48), 50_000)])
    assert owner.known._next == 9
    assert [owner.found(100, 16, 1), owner.found(108, 8, 1)] == [0, 8]


def test_blocks_that_are_moved_keep_their_tables(owners: type[Owner]) -> None:
    owner = owners(tables=(FULL, WINDOW))
    for table in (0, 1):
        owner.known.publish(0, [owner.fill(range(8 * table, 8 * table + 8), 100 * table, table)])
    for turn in range(10):
        owner.known.publish(0, [owner.fill(range(16, 48), 1000 + 100 * turn)])
    found = [owner.found(100 * name, 8, table) for name in (0, 1) for table in (0, 1)]
    assert found == [8, 0, 0, 8]


def test_a_chunk_is_told_of_only_if_it_is_one_run(owners: type[Owner]) -> None:
    owner = owners()
    for blocks, name in ((range(4), 100), (range(10, 12), 200), (range(12, 14), 202)):
        owner.known.publish(0, [owner.fill(blocks, name)])
    assert owner.known.chunk(prompt(1, 103, 1)) == (3, 4, 0)
    assert owner.known.chunk(prompt(1, 203, 1)) is None


def test_equal_blocks_stand_in_for_each_other(owners: type[Owner]) -> None:
    """The oldest is found, as in vLLM's own cache."""
    owner = owners()
    runs = [owner.fill([block], 100) for block in range(InstancePublications.MAX_ALIKE)]
    for run in runs:
        owner.known.publish(0, [run])
    for left in range(InstancePublications.MAX_ALIKE):
        found = owner.known.follow(0, prompt(1, 100, 1), 0, 1)
        assert found.blocks == [numbers(left)]
        owner.table.void([left])
    assert (owner.found(100, 1), owner.known.named) == (0, {})


@pytest.mark.parametrize(("size", "ranks", "tables"), [(1, 1, 1), (64, 2, 1), (64, 1, 64)])
def test_publications_are_bounded(owners: type[Owner], size: int, ranks: int, tables: int) -> None:
    """Also of blocks that have changed since, and of names that were published before."""
    blocks = 512
    gc.collect()
    tracemalloc.start()
    try:
        owner = owners(ranks, [FULL] * tables, blocks)
        for turn in range(6):
            for first in range(0, blocks, size):
                name = turn * blocks + first
                run = owner.fill(range(first, first + size), name, first % tables)
                for rank in range(ranks):
                    owner.known.publish(rank, [run])
        assert owner.known.live == blocks
        grown = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert grown < 1.5 * BLOCK_BYTES * blocks
