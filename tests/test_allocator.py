"""The allocator of one segment: holes, best fit, merging."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vcache_backend.metadata_server.allocator import ALIGNMENT, Extents, padded

KIB = 1 << 10


def test_slots_are_padded_to_the_alignment_of_cuda_allocations() -> None:
    assert [padded(n) for n in (1, 255, 256, 257, 512)] == [256, 256, 256, 512, 512]


def test_the_tail_below_the_alignment_is_never_given_out() -> None:
    extents = Extents(2 * ALIGNMENT + 100)
    assert [extents.take(ALIGNMENT) for _ in range(3)] == [0, ALIGNMENT, None]


def test_slots_already_in_use_leave_the_holes_between_them() -> None:
    extents = Extents(8 * KIB, [(6 * KIB, KIB), (KIB, 2 * KIB)])
    assert extents.free == 5 * KIB
    assert (extents.hole_at(0), extents.hole_at(3 * KIB), extents.hole_at(7 * KIB)) == (KIB, 6 * KIB, 8 * KIB)
    assert extents.hole_at(KIB) == KIB
    assert extents.hole_before(KIB) == 0
    assert extents.hole_before(2 * KIB) == 2 * KIB


@pytest.mark.parametrize("taken", [[(0, 512), (256, 256)], [(3584, 1024)], [(0, 256), (0, 256)], [(-256, 256)]])
def test_slots_in_use_that_overlap_or_leave_the_segment_are_refused(taken: list[tuple[int, int]]) -> None:
    with pytest.raises(ValueError, match="overlaps another one or leaves the segment"):
        Extents(4 * KIB, taken)


@given(st.integers(ALIGNMENT * 20, 1 << 26), st.integers(1, 1 << 20))
def test_at_one_size_only_a_tail_smaller_than_a_chunk_is_lost(segment: int, nbytes: int) -> None:
    size = padded(nbytes)
    count = min(segment // size, 3000)
    extents = Extents(segment)
    assert [extents.take(size) for _ in range(count)] == [at * size for at in range(count)]
    if count < 3000:
        assert extents.free < size


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
        for at, gap in gaps:
            assert extents.hole_at(at) == at + gap
            assert extents.hole_before(at + gap) == at
        rebuilt = Extents(nbytes, held.items())
        assert (rebuilt.free, rebuilt.largest) == (extents.free, extents.largest)


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
