"""Allocates slots within one segment: best fit over exact hole sizes. A freed slot merges with its
neighbours at once.

Pure arithmetic over offsets. Chunks of one size fill a segment without gaps, except for a tail
smaller than a chunk. With several sizes, best fit keeps each size in holes of that size, and
`Contents` evicts neighbours when no hole is large enough."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator

ALIGNMENT = 256
"""Slots start and end on multiples of 256, CUDA's allocation alignment: 16-byte vector accesses
stay aligned."""


def padded(nbytes: int) -> int:
    """The size of a slot for `nbytes` bytes."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class Extents:
    """The holes of one segment of `nbytes` bytes. A call costs a binary search among the distinct
    hole sizes."""

    def __init__(self, nbytes: int) -> None:
        self.free = 0
        self._end_of: dict[int, int] = {}
        self._start_of: dict[int, int] = {}
        self._by_size: dict[int, dict[int, None]] = {}
        self._sizes: list[int] = []
        self._end = nbytes // ALIGNMENT * ALIGNMENT
        self._add(0, self._end)

    @property
    def largest(self) -> int:
        return self._sizes[-1] if self._sizes else 0

    def take(self, size: int) -> int | None:
        """Take a slot of `size` bytes (a multiple of ALIGNMENT) from the tightest hole. Returns its
        offset; None if no hole fits."""
        at = bisect_left(self._sizes, size)
        if at == len(self._sizes):
            return None
        hole = self._sizes[at]
        start = next(iter(self._by_size[hole]))
        self._remove(start, start + hole)
        if hole > size:
            self._add(start + size, start + hole)
        return start

    def carve(self, taken: Iterable[tuple[int, int]]) -> Iterator[None]:
        """Take these slots, by start and size in order, out of the whole segment, one for each
        step. ValueError if slots overlap or leave the segment."""
        at, end = 0, self._end
        if end:
            self._remove(0, end)
        for start, size in taken:
            if start < at or start + size > end:
                raise ValueError(f"slot [{start}, {start + size}) overlaps another or leaves {end}")
            self._add(at, start)
            at = start + size
            yield
        self._add(at, end)

    def give(self, start: int, size: int) -> None:
        """Free a slot from `take`, and merge it with the holes beside it."""
        end = start + size
        before = self._start_of.get(start)
        if before is not None:
            self._remove(before, start)
            start = before
        after = self._end_of.get(end)
        if after is not None:
            self._remove(end, after)
            end = after
        self._add(start, end)

    def hole_at(self, start: int) -> int:
        """The end of the hole at `start`; `start` if no hole begins at `start`."""
        return self._end_of.get(start, start)

    def hole_before(self, end: int) -> int:
        """The start of the hole before `end`; `end` if no hole ends at `end`."""
        return self._start_of.get(end, end)

    def _add(self, start: int, end: int) -> None:
        size = end - start
        if not size:
            return
        self._end_of[start] = end
        self._start_of[end] = start
        self.free += size
        starts = self._by_size.get(size)
        if starts is None:
            self._by_size[size] = {start: None}
            insort(self._sizes, size)
        else:
            starts[start] = None

    def _remove(self, start: int, end: int) -> None:
        size = end - start
        del self._end_of[start]
        del self._start_of[end]
        self.free -= size
        starts = self._by_size[size]
        del starts[start]
        if not starts:
            del self._by_size[size]
            del self._sizes[bisect_left(self._sizes, size)]
