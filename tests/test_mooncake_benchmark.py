"""The benchmarks of the offload tier, small: every row comes out, and a wrong byte is seen."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from mooncake_cases import needs_mooncake

from benchmarks import __main__ as bench
from benchmarks import mooncake, mooncake_chaos, mooncake_site, mooncake_trace
from benchmarks.mooncake_site import Size
from benchmarks.results import Row

TINY = Size(layers=2, heads=2, dim=16, chunks=4)


@needs_mooncake
def test_reading_and_writing_are_measured_in_turns_with_the_library() -> None:
    got = mooncake.get_row("mooncake_get_512MiB", TINY, 2, promote=True)
    put = mooncake.put_row("mooncake_put_512MiB", TINY, 2)
    for row in (got, put):
        assert (row.runs, row.unit, row.limit) == (2, "GB/s", ">= 0.9")
        assert row.value > 0
        assert row.ratio == pytest.approx(row.value / row.reference)
        assert all(way in row.what for way in ("one call", "a call each", "2 threads"))


@needs_mooncake
def test_lookups_and_steps_are_measured_with_and_without_the_tier() -> None:
    (lookup, dead), steps = mooncake.lookup_rows(20, TINY), mooncake.step_rows(2, TINY, side=16)
    assert [row.case for row in steps] == ["mooncake_step_overhead", "mooncake_store_call", "mooncake_steps_after"]
    assert (lookup.case, dead.case) == ("mooncake_lookup_on_off", "mooncake_lookup_dead_master")
    assert lookup.runs == 20
    assert all(row.value > 0 < row.reference for row in (lookup, dead, *steps))


@needs_mooncake
def test_nothing_of_a_trace_is_lost_below_a_small_pool() -> None:
    requests = mooncake_trace.trace.excerpt()[:60]
    (row,) = mooncake_trace.run(requests, ["write_through"], through=True)
    assert sum(mooncake_trace.infinite(requests)) > 0
    assert (row.case, row.ratio, row.ok) == ("mooncake_trace_hit_rate", 1.0, True), row.what


def test_an_infinite_cache_has_every_prefix_that_was_there_before() -> None:
    def request(*ids: int, tokens: int = 0) -> mooncake_trace.trace.Request:
        return mooncake_trace.trace.Request(0, tokens or 512 * len(ids), 1, list(ids))

    requests = [request(1, 2, 3), request(1, 2, 4), request(5, 2, 3), request(1, 2, 4, 6), request(1, 2, tokens=900)]
    assert mooncake_trace.infinite(requests) == [0, 2, 0, 3, 1]


@needs_mooncake
def test_no_wrong_byte_comes_from_the_store_while_all_of_it_is_killed() -> None:
    (row,) = mooncake_chaos.run(gets=150, workers=2, pause=0.15)
    assert row.case == "mooncake_wrong_bytes"
    assert row.ok, row.what
    assert row.runs >= 150


@needs_mooncake
@pytest.mark.timeout(120)
def test_wrong_bytes_would_be_seen() -> None:
    """Workers that take every object for a right one, and a vandal."""
    with mooncake_chaos.Chaos(workers=2, accept=True, only=["objects damaged"]) as chaos:
        chaos.run(gets=50_000, pause=0.1)
        assert chaos.counts.wrong_bytes > 0


def test_it_runs_only_where_it_is_asked_for() -> None:
    assert "--only mooncake" in bench._why_not("mooncake", asked=False)


def test_a_missed_limit_is_the_exit_status(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [Row("fine", 1.0, "x", 1.0, 1.0, 1, 0.0, ok=True), Row("missed", 1.0, "x", 1.0, 1.0, 1, 0.0, ok=False)]
    assert mooncake_site.write_rows(rows[:1], None) == 0
    assert mooncake_site.write_rows(rows, tmp_path / "out.json") == 1
    assert [row["case"] for row in json.loads((tmp_path / "out.json").read_text())["rows"]] == ["fine", "missed"]
    assert "missed" in capsys.readouterr().out
