"""The allocator of one segment: holes, best fit, merging."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vcache_backend.metadata_server.allocator import ALIGNMENT, Extents, padded

KIB = 1 << 10


def test_slots_are_padded_to_the_alignment_of_cuda_allocations() -> None:
    assert [padded(n) for n in (1, 255, 256, 257, 512)] == [256, 256, 256, 512, 512]


@pytest.mark.parametrize("taken", [[(0, 512), (256, 256)], [(3584, 1024)], [(0, 256), (0, 256)], [(-256, 256)]])
def test_slots_in_use_that_overlap_or_leave_the_segment_are_refused(taken: list[tuple[int, int]]) -> None:
    with pytest.raises(ValueError, match="overlaps another one or leaves the segment"):
        Extents(4 * KIB, taken)


@given(
    nbytes=st.integers(0, 1 << 16),
    steps=st.lists(st.tuples(st.booleans(), st.integers(1, 5000), st.integers(0, 1 << 30)), max_size=80),
)
def test_slots_never_overlap_and_no_byte_is_lost_or_counted_twice(nbytes: int, steps: list[tuple[bool, int, int]]) -> None:
    extents = Extents(nbytes)
    usable = nbytes // ALIGNMENT * ALIGNMENT
    held: dict[int, int] = {}
    for take, want, pick in steps:
        if take or not held:
            size = padded(want)
            gaps = _gaps(held, usable)
            start = extents.take(size)
            fitting = [gap for _, gap in gaps if gap >= size]
            if start is None:
                assert not fitting
            else:
                assert (start, min(fitting)) in gaps, "not from the start of the tightest hole"
                held[start] = size
        else:
            start = sorted(held)[pick % len(held)]
            extents.give(start, held.pop(start))
        gaps = _gaps(held, usable)
        assert extents.free == usable - sum(held.values()) == sum(gap for _, gap in gaps)
        assert extents.largest == max((gap for _, gap in gaps), default=0)
        rebuilt = Extents(nbytes, held.items())
        assert (rebuilt.free, rebuilt.largest) == (extents.free, extents.largest)
        for known in (extents, rebuilt):
            assert [(known.hole_at(at), known.hole_before(at + gap)) for at, gap in gaps] == [(at + gap, at) for at, gap in gaps]
            assert all((known.hole_at(at), known.hole_before(at + size)) == (at, at + size) for at, size in held.items())


def _gaps(held: dict[int, int], end: int) -> list[tuple[int, int]]:
    """(start, bytes) of what is not held; fails if held slots overlap or leave the segment."""
    gaps, at = [], 0
    for start, size in [*sorted(held.items()), (end, 0)]:
        assert start >= at
        if start > at:
            gaps.append((at, start - at))
        at = start + size
    assert at == end
    return gaps
