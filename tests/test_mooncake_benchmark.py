"""The benchmarks of the offload tier, small: every row comes out."""

from __future__ import annotations

import pytest
from mooncake_cases import needs_mooncake

from benchmarks import mooncake
from benchmarks.kv import Size

TINY = Size(layers=2, heads=2, dim=16, chunks=4)


@needs_mooncake
def test_every_row_comes_out_beside_the_librarys() -> None:
    rows = [
        mooncake.get_row(TINY, runs=2),
        mooncake.put_row(TINY, runs=2),
        *mooncake.lookup_rows(20, TINY),
        *mooncake.step_rows(2, TINY, side=16),
    ]
    assert [row.runs for row in rows] == [2, 2, 20, 20, 2, 2]
    assert all(row.value > 0 < row.reference for row in rows)
    for row in rows[:2]:
        assert row.ratio == pytest.approx(row.value / row.reference)
        assert all(way in row.what for way in mooncake.WAYS)
