"""Where the longest hit ends, by the blocks that are there."""

from __future__ import annotations

import pytest

from vcache_backend.metadata_server import hits
from vcache_backend.metadata_server.hits import longest_end, needed
from vcache_backend.protocol.messages import BlockTable

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
    def bound(table: int, first: int, stop: int) -> int:
        gone = [block for block in range(first, stop) if block not in here.get(table, set())]
        return gone[-1] if gone else -1

    assert longest_end(tables, limit, bound) == end


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


def test_few_questions_are_asked_where_few_ends_are() -> None:
    """Retention 0: of a long prompt one window is kept."""
    asked = []

    def bound(table: int, first: int, stop: int) -> int:
        asked.append(stop)
        return -1 if stop == 9 else 9

    tables = [FULL, WINDOW, BlockTable("window", 1, 900)]
    assert longest_end(tables, hits.MAX_LOOKS, bound) == 9
    assert len(asked) == 3
