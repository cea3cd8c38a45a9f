"""The benchmarks of the offload tier, small: every row comes out."""

from __future__ import annotations

import pytest
from mooncake_cases import needs_mooncake

from benchmarks import __main__ as bench
from benchmarks import mooncake, mooncake_trace, trace
from benchmarks.kv import Size

TINY = Size(layers=2, heads=2, dim=16, chunks=4)


@needs_mooncake
def test_every_row_comes_out_beside_the_librarys() -> None:
    rows = [
        mooncake.get_row("mooncake_get_512MiB", TINY, promote=True, runs=2),
        mooncake.put_row("mooncake_put_512MiB", TINY, runs=2),
        *mooncake.lookup_rows(20, TINY),
        *mooncake.step_rows(2, TINY, side=16),
    ]
    assert [row.runs for row in rows] == [2, 2, 20, 20, 2, 2]
    assert all(row.value > 0 < row.reference for row in rows)
    for row in rows[:2]:
        assert row.ratio == pytest.approx(row.value / row.reference)
        assert all(way in row.what for way in mooncake.WAYS)


@needs_mooncake
def test_nothing_of_a_trace_is_lost_below_a_small_pool() -> None:
    requests = trace.excerpt()[:60]
    row = mooncake_trace.run(requests, through=True)
    assert sum(mooncake_trace.infinite(requests)) > 0
    assert (row.case, row.ratio, row.ok) == ("mooncake_trace_hit_rate", 1.0, True), row.what


def test_an_infinite_cache_has_every_prefix_that_was_there_before() -> None:
    def request(*ids: int, tokens: int = 0) -> trace.Request:
        return trace.Request(0, tokens or 512 * len(ids), 1, list(ids))

    requests = [request(1, 2, 3), request(1, 2, 4), request(5, 2, 3), request(1, 2, 4, 6), request(1, 2, tokens=900)]
    assert mooncake_trace.infinite(requests) == [0, 2, 0, 3, 1]


def test_what_takes_long_runs_only_where_it_is_asked_for() -> None:
    assert "--only mooncake" in bench._why_not("mooncake", asked=False)
