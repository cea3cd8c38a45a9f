"""Pauses between attempts that fail."""

from __future__ import annotations

from vcache_backend.backoff import Backoff


def test_a_backoff_doubles_its_pauses_until_a_success() -> None:
    pauses = Backoff(1.0, 5.0)
    assert [pauses.next() for _ in range(5)] == [1.0, 2.0, 4.0, 5.0, 5.0]
    pauses.reset()
    assert pauses.next() == 1.0
