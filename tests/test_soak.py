"""The soak, small: nothing is wrong whatever happens, and where what must not be trusted is, wrong
bytes are seen.
"""

from __future__ import annotations

import pytest

from benchmarks.soak import __main__ as soak


@pytest.mark.timeout(400)
def test_no_byte_is_wrong_whatever_happens_and_one_would_be_seen() -> None:
    """`make soak` is the long one; `python -m benchmarks.soak --store` has a store below."""
    result = soak.run(retrieves=60, seed=7, workers=2, pause=0.15)
    assert all(row.ok for row in soak.rows(result, 60)), soak.told(result)
    assert result.counts
    assert result.control is not None
    assert result.control.wrong_bytes > 0
