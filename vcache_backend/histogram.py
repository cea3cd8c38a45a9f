"""Percentiles of durations in constant memory. A bucket's bounds are a factor of 2^(1/8) apart, so
percentiles are right within 5 %."""

from __future__ import annotations

import math


class Histogram:
    """Counts durations in microseconds, from 2^-10 to 2^40 µs. Not thread-safe."""

    _per_octave, _lowest = 8, -10

    def __init__(self) -> None:
        self.count = 0
        self.total_us = 0.0
        self._buckets = [0] * (50 * self._per_octave)

    def add(self, us: float) -> None:
        self.count += 1
        self.total_us += us
        at = int((math.log2(us) - self._lowest) * self._per_octave) if us > 0 else 0
        self._buckets[min(max(at, 0), len(self._buckets) - 1)] += 1

    def percentile(self, q: float) -> float:
        """The duration in µs that a share `q` (0 to 1) of the samples did not exceed, or 0.0."""
        wanted = q * self.count
        seen = 0
        for at, count in enumerate(self._buckets):
            seen += count
            if count and seen >= wanted:
                return float(2.0 ** ((at + 0.5) / self._per_octave + self._lowest))
        return 0.0

    def summary(self) -> dict[str, float]:
        """`count`, `mean_us`, `p50_us` and `p99_us`."""
        mean = self.total_us / self.count if self.count else 0.0
        return {
            "count": self.count,
            "mean_us": mean,
            "p50_us": self.percentile(0.5),
            "p99_us": self.percentile(0.99),
        }
