"""The soak, small: nothing is wrong whatever happens, and where what must not be trusted is, wrong
bytes are seen.
"""

from __future__ import annotations

import pytest
from mooncake_cases import needs_mooncake

from benchmarks.soak import __main__ as soak


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "store", [False, pytest.param(True, marks=needs_mooncake)], ids=["node", "store"]
)
def test_no_byte_is_wrong_whatever_happens_and_one_would_be_seen(store: bool) -> None:
    result = soak.run(retrieves=200, seed=7, workers=3, pause=0.15, store=store)
    assert all(row.ok for row in soak.rows(result, 200)), soak.told(result)
    assert bool(result.outcomes.below) == store
    assert result.counts
    assert result.control is not None
    assert result.control.wrong_bytes > 0
