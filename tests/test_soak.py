"""The soak, small: nothing is wrong whatever happens, and where verdicts are ignored wrong bytes are seen."""

from __future__ import annotations

import pytest

from benchmarks.soak import __main__ as soak


@pytest.mark.timeout(180)
def test_no_byte_is_wrong_whatever_happens_and_one_would_be_seen() -> None:
    result = soak.run(retrieves=200, seed=7, workers=3, pause=0.15)
    assert result.ok, soak.table(result)
    assert result.outcomes.verified >= 200
    assert sum(result.counts.values()) > 3
    assert result.control is not None
    assert result.control.wrong_bytes > 0
    assert all(len(line) <= 80 for line in soak.table(result).splitlines())
    assert [row.ok for row in soak.rows(result, 200)] == [True, True, True]
