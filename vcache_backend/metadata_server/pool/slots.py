"""A segment of the pool: the slots, their occupants in order of use, and the holes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import chain
from typing import cast

import msgspec

from vcache_backend.metadata_server.pool.allocator import ALIGNMENT, Extents
from vcache_backend.protocol.messages import (
    ChunkKey,
    Location,
    SegmentId,
    SegmentInfo,
    SegmentState,
)

SLOT_TABLES = 16
"""Dicts for the slots of one segment."""


class Entry(msgspec.Struct, gc=False, eq=False):
    """An occupied slot of `size` bytes. `reservation`: 0 once the chunk is committed. `doomed`: the
    chunk was removed while leased.

    `use` grows with every use. `older`, `newer`: the neighbours in the `Order`, or None."""

    key: ChunkKey
    location: Location
    segment: Segment
    size: int
    reservation: int = 0
    leases: int = 0
    doomed: bool = False
    use: int = 0
    older: Entry | None = None
    newer: Entry | None = None

    @property
    def end(self) -> int:
        return self.location.offset + self.size


class Order:
    """A segment's chunks that may be evicted (committed, without readers), the least recently used
    first.

    A ring through the entries: a dict would at times be rebuilt for all entries."""

    def __init__(self) -> None:
        self._ends = Entry(
            ChunkKey(b""), Location(SegmentId(""), 0, 0, 0), cast("Segment", None), 0
        )
        self._ends.older = self._ends.newer = self._ends

    def __iter__(self) -> Iterator[Entry]:
        """Iterate over the entries. Stop before changing the order."""
        entry = self._ends.newer
        while entry is not None and entry is not self._ends:
            yield entry
            entry = entry.newer

    def append(self, entry: Entry, use: int) -> None:
        """Add an entry as the most recent. The entry must not be in the order."""
        ends, last = self._ends, self._ends.older
        if last is not None:
            entry.use = use
            entry.older = last
            entry.newer = ends
            last.newer = ends.older = entry

    def clear(self) -> None:
        """Unlink all entries of an order that is not used again."""
        entry: Entry | None = self._ends
        while entry is not None:
            following = entry.newer
            entry.older = None
            entry.newer = None
            entry = following


def remove(entry: Entry) -> None:
    older, newer = entry.older, entry.newer
    if older is not None and newer is not None:
        older.newer = newer
        newer.older = older
        entry.older = entry.newer = None


class SlotTable:
    """Entries by an offset in a segment of `nbytes` bytes.

    Each part of the segment has a dict of its own, since CPython enlarges a dict in one go: 5 ms
    for 87,000 entries."""

    def __init__(self, nbytes: int) -> None:
        self._part = nbytes // SLOT_TABLES + 1
        self._tables: defaultdict[int, dict[int, Entry]] = defaultdict(dict)

    def __len__(self) -> int:
        return sum(map(len, self._tables.values()))

    def __iter__(self) -> Iterator[Entry]:
        return chain.from_iterable(table.values() for table in self._tables.values())

    def in_order(self) -> Iterator[Entry]:
        """The entries by offset. A part at a time is sorted."""
        for part in sorted(self._tables):
            table = self._tables[part]
            yield from map(table.__getitem__, sorted(table))

    def get(self, offset: int) -> Entry | None:
        return self._tables[offset // self._part].get(offset)

    def put(self, offset: int, entry: Entry) -> None:
        """Add an entry, in place of the present entry at this offset."""
        self._tables[offset // self._part][offset] = entry

    def pop(self, offset: int) -> Entry | None:
        """Remove and return the entry at this offset, or None."""
        return self._tables[offset // self._part].pop(offset, None)

    def take(self) -> Entry | None:
        """Remove and return any entry; None if the table is empty."""
        return next((table.popitem()[1] for table in self._tables.values() if table), None)

    def clear(self) -> None:
        self._tables.clear()


class Segment:
    """A segment: holes, occupants by offset and by end, the numbers of reserved and leased slots.

    `state`: live; absent, from before a restart, until a client offers the fd again; or draining,
    until the last reader and writer are gone."""

    def __init__(self, info: SegmentInfo) -> None:
        self._added = info
        self.id, self.nbytes = info.id, info.nbytes
        self.device, self.medium = info.device, info.medium
        self.state: SegmentState = info.state
        self.capacity = info.nbytes // ALIGNMENT * ALIGNMENT
        self.extents = Extents(info.nbytes)
        self.order = Order()
        self.occupants = SlotTable(info.nbytes)
        self.ending = SlotTable(info.nbytes)
        self.staying: dict[int, Entry] = {}
        """Occupants of a draining segment, removed after their last use."""
        self.returning: list[Entry] = []
        """Chunks that an absent segment will bring back unless they are removed first, the least
        recently used last."""
        self.reserved = self.leased = self.evictions = 0

    def info(self) -> SegmentInfo:
        """The segment as the protocol describes it."""
        return msgspec.structs.replace(
            self._added,
            used=self.capacity - self.extents.free,
            chunks=len(self.ending) - self.reserved,
            leased=self.leased,
            evictions=self.evictions,
            state=self.state,
        )

    def has(self, entry: Entry) -> bool:
        """Whether this very entry still has its slot."""
        return self.ending.get(entry.end) is entry

    def find_holes(self) -> Iterator[None]:
        """Compute the holes from the occupants, one for each step. ValueError if slots overlap."""
        slots = ((entry.location.offset, entry.size) for entry in self.occupants.in_order())
        return self.extents.carve(slots)

    def free(self, entry: Entry) -> None:
        """Make the slot a hole, after its last user."""
        offset = entry.location.offset
        if self.occupants.pop(offset) is None:
            del self.staying[offset]
        self.ending.pop(entry.end)
        remove(entry)
        self.reserved -= entry.reservation != 0
        self.extents.give(offset, entry.size)

    def let_go(self) -> None:
        """Break the cycle of a removed segment and its entries: there is no garbage collector."""
        for table in (self.occupants, self.staying, self.ending):
            table.clear()
        self.order.clear()
        self.returning.clear()

    def window(self, first: Entry, size: int, most: int) -> tuple[list[Entry], bool]:
        """Return a run of at most `most` evictable occupants around `first`, and whether the run
        and the holes beside it span `size` bytes.

        The run grows towards the end of the segment as far as possible, then towards the start."""
        run, end = [first], self.extents.hole_at(first.end)
        start = self.extents.hole_before(first.location.offset)
        while end - start < size and len(run) < most:
            after = self.occupants.get(end)
            if after is None or after.newer is None:
                break
            run.append(after)
            end = self.extents.hole_at(after.end)
        while end - start < size and len(run) < most:
            ahead = self.ending.get(start)
            if ahead is None or ahead.newer is None:
                break
            run.append(ahead)
            start = self.extents.hole_before(ahead.location.offset)
        return run, end - start >= size
