"""Percentiles of durations."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vcache_backend.histogram import Histogram


@given(st.lists(st.floats(2**-9, 2**39), min_size=1), st.sampled_from([0.5, 0.99]))
def test_a_percentile_is_right_within_5_percent(samples: list[float], share: float) -> None:
    made = Histogram()
    for us in samples:
        made.add(us)
    right = np.quantile(samples, share, method="inverted_cdf")
    assert made.percentile(share) == pytest.approx(right, rel=0.05)
    assert made.summary()["mean_us"] == pytest.approx(np.mean(samples))


def test_what_is_out_of_range_counts_at_its_end() -> None:
    made = Histogram()
    assert made.percentile(0.5) == 0.0
    for us in (-1.0, 0.0, 1e30):
        made.add(us)
    assert (made.count, made.percentile(0.5) < 0.002, made.percentile(1.0) > 1e11) == (
        3,
        True,
        True,
    )
