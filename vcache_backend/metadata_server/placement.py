"""Where chunks lie: the segments of the node, what occupies their slots, and which slots make room for a new chunk."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from itertools import islice

import msgspec

from vcache_backend.metadata_server.allocator import Extents, padded
from vcache_backend.metadata_server.messages import ChunkKey, Location, Medium, Pin, SegmentId, SegmentInfo

MAX_WINDOW_ATTEMPTS = 64
"""How many cold chunks are tried as the start of a run to evict, when chunks of other sizes surround them."""
MAX_SEARCH = 2048
"""Most chunks that one search for victims looks at, and most that a run to evict is made of: some milliseconds of the server's time."""
SAME_SEGMENT = 64
"""So many slots of one request are taken from a segment before the roomiest one is looked for again."""


class Entry(msgspec.Struct, gc=False, eq=False):
    """One occupied slot. `reservation` is 0 once the chunk is committed; `doomed` once it was removed under a lease; `saved` since
    the offload tier has it (see `Saving`); `saving` is the lease under which somebody last began to save it. `ring`, `older`, `newer`
    and `told` are the eviction policy's."""

    key: ChunkKey
    location: Location
    reservation: int = 0
    leases: int = 0
    pin: Pin = Pin.NONE
    doomed: bool = False
    saved: int = 0
    saving: int = 0
    ring: Entry | None = None
    older: Entry | None = None
    newer: Entry | None = None
    told: int = 0

    @property
    def evictable(self) -> bool:
        """Nobody writes it, nobody reads it, nobody insists on it."""
        return not (self.reservation or self.leases or self.doomed or self.pin == Pin.HARD)


class Segment:
    """One live segment: its holes and its occupants by offset (and by where they end), and how many are reserved and leased."""

    def __init__(self, info: SegmentInfo, taken: list[Entry] | None = None) -> None:
        taken = taken or []
        self.id, self.device, self.medium, self.nbytes = info.id, info.device, info.medium, info.nbytes
        self.extents = Extents(info.nbytes, [(e.location.offset, padded(e.location.length)) for e in taken])
        self.occupants: dict[int, Entry] = {}
        self.staying: dict[int, Entry] = {}
        """Occupants of a draining segment that go when somebody is done with them."""
        self._ending: dict[int, Entry] = {}
        self.reserved = self.leased = 0
        for entry in taken:
            self.occupy(entry)
        self.draining = False
        self.evictions = 0

    def info(self) -> SegmentInfo:
        """What people and the protocol see."""
        return SegmentInfo(
            id=self.id,
            device=self.device,
            medium=self.medium,
            nbytes=self.nbytes,
            used=self.nbytes - self.extents.free,
            chunks=len(self._ending) - self.reserved,
            leased=self.leased,
            reserved=self.reserved,
            largest_hole=self.extents.largest,
            evictions=self.evictions,
            state="draining" if self.draining else "live",
        )

    def has(self, entry: Entry) -> bool:
        """Does this very entry still have its slot?"""
        return self._ending.get(_end(entry)) is entry

    def occupy(self, entry: Entry) -> None:
        self.occupants[entry.location.offset] = self._ending[_end(entry)] = entry
        self.reserved += entry.reservation != 0

    def vacate(self, entry: Entry) -> None:
        if self.occupants.pop(entry.location.offset, None) is None:
            del self.staying[entry.location.offset]
        del self._ending[_end(entry)]
        self.reserved -= entry.reservation != 0

    def window(self, first: Entry, size: int, most: int) -> tuple[list[Entry], bool]:
        """A run of at most `most` evictable occupants with `first`, and whether it, with the holes around it, spans `size` bytes.

        It grows towards the end of the segment as far as it can, then towards the start."""
        run, end = [first], self.extents.hole_at(_end(first))
        start = self.extents.hole_before(first.location.offset)
        while end - start < size and len(run) < most:
            after = self.occupants.get(end)
            if after is None or not after.evictable:
                break
            run.append(after)
            end = self.extents.hole_at(_end(after))
        while end - start < size and len(run) < most:
            before = self._ending.get(start)
            if before is None or not before.evictable:
                break
            run.append(before)
            start = self.extents.hole_before(before.location.offset)
        return run, end - start >= size


def _end(entry: Entry) -> int:
    return entry.location.offset + padded(entry.location.length)


class Placement:
    """All live segments. `next_generation` numbers every use of a slot, across the server's lives."""

    def __init__(self, next_generation: Callable[[], int]) -> None:
        self.segments: dict[SegmentId, Segment] = {}
        self._next_generation = next_generation

    def take(self, nbytes: int, device: str, medium: Medium, most: int, avoid: Collection[SegmentId] = ()) -> list[Location]:
        """Free slots, at most `most`: on `device` first, then on the peer with the most room, not in segments to `avoid`. Empty if there
        is no hole that is large enough."""
        size = padded(nbytes)
        best: Segment | None = None
        for segment in self.segments.values():
            if segment.medium != medium or segment.draining or segment.extents.largest < size or segment.id in avoid:
                continue
            if segment.device == device:
                best = segment
                break
            if best is None or segment.extents.free > best.extents.free:
                best = segment
        locations: list[Location] = []
        while best is not None and len(locations) < min(most, SAME_SEGMENT):
            offset = best.extents.take(size)
            if offset is None:
                break
            locations.append(self._location(best, offset, nbytes))
        return locations

    def reuse(self, entry: Entry, nbytes: int) -> Location:
        """The slot of an evicted chunk for one of the same padded size, to be occupied at once: no detour through the holes."""
        return Location(entry.location.segment, entry.location.offset, nbytes, self._next_generation())

    def occupy(self, entry: Entry) -> None:
        """Record who has the slot."""
        self.segments[entry.location.segment].occupy(entry)

    def has(self, entry: Entry) -> bool:
        """Does this very entry still have its slot?"""
        segment = self.segments.get(entry.location.segment)
        return segment is not None and segment.has(entry)

    def free(self, entry: Entry) -> None:
        """Give the slot back to the holes."""
        segment = self.segments[entry.location.segment]
        segment.vacate(entry)
        segment.extents.give(entry.location.offset, padded(entry.location.length))

    def victims(
        self, coldest: Iterator[Entry], nbytes: int, most: int, avoid: Collection[SegmentId] = ()
    ) -> tuple[list[Entry], bool, list[Entry]]:
        """Which chunks of one medium to evict for slots of `nbytes`: (victims, does each of them leave such a slot?, passed over).

        Up to `most` of the coldest ones as long as they have that size; if the coldest has another one, the run from it on that
        leaves one slot; no victims if none can go, or none among the `MAX_SEARCH` that are looked at.
        """
        size, attempts, left = padded(nbytes), 0, MAX_SEARCH
        equal: list[Entry] = []
        passed: list[Entry] = []
        for entry in islice(coldest, MAX_SEARCH):
            segment = self.segments[entry.location.segment]
            if segment.draining or not entry.evictable or segment.id in avoid:
                passed.append(entry)
            elif padded(entry.location.length) == size:
                equal.append(entry)
                if len(equal) == most:
                    break
            elif equal or attempts == MAX_WINDOW_ATTEMPTS or left <= 0:
                break
            elif size <= segment.nbytes:
                run, wide = segment.window(entry, size, left)
                if wide:
                    return run, False, passed
                attempts, left = attempts + 1, left - len(run)
        return equal, bool(equal), passed

    def largest_segment(self, medium: Medium, avoid: Collection[SegmentId] = ()) -> int:
        """Bytes of the largest usable segment of a medium, none of those to `avoid`; 0 without one."""
        usable = (s.nbytes for s in self.segments.values() if s.medium == medium and not s.draining and s.id not in avoid)
        return max(usable, default=0)

    def draining(self) -> list[Segment]:
        """The segments that wait to be dropped."""
        return [segment for segment in self.segments.values() if segment.draining]

    def free_and_total(self, medium: Medium) -> tuple[int, int]:
        """Bytes that are free and bytes in all usable segments of a medium."""
        usable = [s for s in self.segments.values() if s.medium == medium and not s.draining]
        return sum(s.extents.free for s in usable), sum(s.nbytes for s in usable)

    def used_and_total(self, medium: Medium) -> tuple[int, int]:
        """Bytes in use and bytes in all live segments of a medium."""
        live = [segment for segment in self.segments.values() if segment.medium == medium]
        total = sum(segment.nbytes for segment in live)
        return total - sum(segment.extents.free for segment in live), total

    def _location(self, segment: Segment, offset: int, nbytes: int) -> Location:
        return Location(segment.id, offset, nbytes, self._next_generation())
