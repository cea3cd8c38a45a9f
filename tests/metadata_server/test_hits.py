"""Where the longest hit ends, by the blocks that are there."""

from __future__ import annotations

from contextlib import closing

import pytest
from instance_cases import NAMESPACE, counts, instance_id, numbers, prompt

from vcache_backend.metadata_server import hits
from vcache_backend.metadata_server.hits import HitSearch, needed
from vcache_backend.metadata_server.publications import (
    COMPARED,
    ForeignTable,
    InstancePublications,
)
from vcache_backend.protocol.messages import BlockRun, BlockTable, Join
from vcache_backend.vram_pool.generations import Generations

A = instance_id(1)

FULL, WIDE = BlockTable("full"), BlockTable("full", 4)
WINDOW, STATE, LOCAL = (
    BlockTable("window", 1, 3),
    BlockTable("state", 4, 1),
    BlockTable("local", 1, 4),
)
Blocks = dict[int, set[int]]
"""Of a table."""

CASES: dict[str, tuple[list[BlockTable], int, Blocks, int]] = {
    # tables, limit, the blocks that are there, the end
    "full tables need nothing more": ([FULL], 7, {}, 7),
    "a common end of all tables' blocks": ([FULL, WIDE], 11, {}, 8),
    "nothing": ([FULL], 0, {}, 0),
    "no window": ([FULL, WINDOW], 9, {}, 0),
    "a window at the end": ([FULL, WINDOW], 9, {1: {6, 7, 8}}, 9),
    "a window before the end": ([WINDOW, FULL], 9, {0: {3, 4, 5}}, 6),
    "a window that is too short": ([FULL, WINDOW], 9, {1: {7, 8}}, 0),
    "a window with a hole": ([FULL, WINDOW], 9, {1: {1, 2, 3, 5, 6}}, 4),
    "a window at the beginning": ([FULL, WINDOW], 9, {1: {0, 1}}, 2),
    "windows behind the limit": ([FULL, WINDOW], 5, {1: set(range(3, 9))}, 0),
    "the longest of two windows": ([FULL, WINDOW], 20, {1: {2, 3, 4, 10, 11, 12}}, 13),
    "a state": ([FULL, STATE], 11, {1: {1}}, 8),
    "the state before": ([FULL, STATE], 7, {1: {0, 1}}, 4),
    "a state and a window that do not meet": ([FULL, STATE, WINDOW], 12, {1: {2}, 2: {5, 6, 7}}, 0),
    "a state and a window that meet": (
        [WINDOW, STATE, FULL],
        12,
        {0: {5, 6, 7, 11}, 1: {1, 2}},
        8,
    ),
    "a local chunk": ([FULL, LOCAL], 7, {1: {4, 5, 6}}, 7),
    "the beginning of a local chunk": ([FULL, LOCAL], 7, {1: {5, 6}}, 4),
    "a part of a local chunk": ([FULL, LOCAL], 7, {1: {4}}, 5),
    "a window that reaches nowhere": ([FULL, BlockTable("window")], 5, {}, 5),
    "only states": ([STATE], 100, {0: {4}}, 20),
    "only windows": ([WINDOW, BlockTable("window", 1, 2)], 9, {0: {2, 3, 4}, 1: {3, 4}}, 5),
}


@pytest.mark.parametrize(("tables", "limit", "here", "end"), CASES.values(), ids=CASES)
def test_a_hit_ends_where_all_tables_have_what_it_needs(
    tables: list[BlockTable], limit: int, here: Blocks, end: int
) -> None:
    search, there = searched(tables, here)
    assert search.best(limit, [(A, there)])[0] == end


def searched(
    tables: list[BlockTable], here: Blocks, hashes: int = 100
) -> tuple[HitSearch, InstancePublications]:
    """A look-up, and an instance that has published these blocks."""
    with closing(Generations(A, 64)) as table:
        join = Join(A, NAMESPACE, 64, 1, 4, tables)
        there = InstancePublications(join, ForeignTable(table.fd, A, 64))
        pairs = [(number, block) for number, blocks in here.items() for block in blocks]
        for own, (number, block) in enumerate(pairs):
            name = prompt(1, (block + 1) * tables[number].scale - 1, 1)
            packs = numbers(own), counts(table.filled([own]))
            there.publish(0, [BlockRun(number, block, name, *packs)])
    return HitSearch(prompt(hashes, 0, 1), tables), there


NEEDED = [
    (BlockTable("full", 2), 8, (0, 4)),
    (BlockTable("window", 2, 3), 8, (1, 4)),
    (BlockTable("window", 2, 9), 8, (0, 4)),
    (BlockTable("state", 2, 1), 8, (3, 4)),
    (BlockTable("local", 2, 3), 8, (3, 4)),
    (BlockTable("local", 2, 4), 8, (4, 4)),
]


@pytest.mark.parametrize(("table", "end", "blocks"), NEEDED)
def test_what_a_hit_needs_of_a_table(table: BlockTable, end: int, blocks: tuple[int, int]) -> None:
    assert needed(table, end) == blocks


def test_few_blocks_are_looked_for_where_few_ends_are() -> None:
    """Retention 0: of a long prompt one window is kept."""
    tables = [FULL, WINDOW, BlockTable("window", 1, 9)]
    every = {1: set(range(9)), 2: set(range(9))}
    search, there = searched(tables, every, 8192)
    assert search.best(8192, [(A, there)])[0] == 9
    assert search.left > hits.MAX_LOOKS - 2 * 8192 // COMPARED
