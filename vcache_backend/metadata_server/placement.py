"""Where chunks lie: the segments of the node, what occupies their slots, and which slots make room for a new chunk."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count, islice

import msgspec

from vcache_backend.metadata_server.allocator import Extents, padded
from vcache_backend.metadata_server.messages import ChunkKey, Location, Medium, SegmentId, SegmentInfo, SegmentState
from vcache_backend.metadata_server.records import ProcessId

MAX_WINDOW_ATTEMPTS = 64
"""How many cold chunks are tried as the start of a run to evict, when chunks of other sizes surround them."""
MAX_SEARCH = 2048
"""Most chunks that one search for victims looks at, and most that a run to evict is made of: some milliseconds of the server's time."""
SAME_SEGMENT = 64
"""So many slots of one request are taken from a segment before the roomiest one is looked for again."""


class Entry(msgspec.Struct, gc=False, eq=False):
    """One occupied slot. `reservation` is 0 once its chunk is committed; `doomed` once that was removed under a lease. `ring`, `older`,
    `newer` and `told` are the eviction order's: a chunk is in a ring as long as its slot may be taken for another one."""

    key: ChunkKey
    location: Location
    reservation: int = 0
    leases: int = 0
    doomed: bool = False
    ring: Entry | None = None
    older: Entry | None = None
    newer: Entry | None = None
    told: int = 0

    @property
    def evictable(self) -> bool:
        """Whether nobody reads it, and it is a chunk that others may follow."""
        return self.ring is not None and not self.leases

    @property
    def end(self) -> int:
        """Where its slot ends."""
        return self.location.offset + padded(self.location.length)


class Peer(msgspec.Struct, frozen=True):
    """One connection of a client: its number, the process behind it, the device it prefers and the segments it cannot use."""

    id: int
    process: ProcessId
    device: str
    medium: Medium
    avoids: set[SegmentId] = msgspec.field(default_factory=set)


class Segment:
    """One segment: its holes and its occupants by offset (and by where they end), and how many are reserved and leased.

    `state`: live; absent, of before a restart, until its fd is offered again; draining, until nobody reads or writes there any more.
    """

    def __init__(self, info: SegmentInfo, taken: list[Entry] | None = None) -> None:
        taken = taken or []
        self.id, self.device, self.medium, self.nbytes = info.id, info.device, info.medium, info.nbytes
        self.state: SegmentState = info.state
        self.extents = Extents(info.nbytes, [(entry.location.offset, padded(entry.location.length)) for entry in taken])
        self.occupants: dict[int, Entry] = {}
        self.staying: dict[int, Entry] = {}
        """Occupants of a draining segment that go when somebody is done with them."""
        self.returning: list[Entry] = []
        """Chunks that an absent segment will bring back, unless they have gone meanwhile; the coldest last."""
        self._ending: dict[int, Entry] = {}
        self.reserved = self.leased = self.evictions = 0
        for entry in taken:
            self.occupy(entry)

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
            state=self.state,
        )

    def has(self, entry: Entry) -> bool:
        """Whether this very entry still has its slot."""
        return self._ending.get(entry.end) is entry

    def occupy(self, entry: Entry) -> None:
        """Record who has the slot."""
        self.occupants[entry.location.offset] = self._ending[entry.end] = entry
        self.reserved += entry.reservation != 0

    def vacate(self, entry: Entry) -> None:
        if self.occupants.pop(entry.location.offset, None) is None:
            del self.staying[entry.location.offset]
        del self._ending[entry.end]
        self.reserved -= entry.reservation != 0

    def window(self, first: Entry, size: int, most: int) -> tuple[list[Entry], bool]:
        """A run of at most `most` evictable occupants with `first`, and whether it, with the holes around it, spans `size` bytes.

        It grows towards the end of the segment as far as it can, then towards the start."""
        run, end = [first], self.extents.hole_at(first.end)
        start = self.extents.hole_before(first.location.offset)
        while end - start < size and len(run) < most:
            after = self.occupants.get(end)
            if after is None or not after.evictable:
                break
            run.append(after)
            end = self.extents.hole_at(after.end)
        while end - start < size and len(run) < most:
            before = self._ending.get(start)
            if before is None or not before.evictable:
                break
            run.append(before)
            start = self.extents.hole_before(before.location.offset)
        return run, end - start >= size


class Placement:
    """All segments. `generations` numbers every use of a slot, across the server's lives."""

    def __init__(self) -> None:
        self.segments: dict[SegmentId, Segment] = {}
        self.generations = count(1)

    def take(self, nbytes: int, peer: Peer, most: int) -> list[Location]:
        """Free slots for a peer, at most `most`: on its device first, then on the one with the most room. Empty if there is no hole that
        is large enough."""
        size = padded(nbytes)
        best: Segment | None = None
        for segment in self._usable(peer):
            if segment.extents.largest < size:
                continue
            if segment.device == peer.device:
                best = segment
                break
            if best is None or segment.extents.free > best.extents.free:
                best = segment
        locations: list[Location] = []
        while best is not None and len(locations) < min(most, SAME_SEGMENT):
            offset = best.extents.take(size)
            if offset is None:
                break
            locations.append(Location(best.id, offset, nbytes, next(self.generations)))
        return locations

    def reuse(self, entry: Entry, nbytes: int) -> Location:
        """The slot of an evicted chunk for one of the same padded size, to be occupied at once: no detour through the holes."""
        return Location(entry.location.segment, entry.location.offset, nbytes, next(self.generations))

    def has(self, entry: Entry) -> bool:
        """Whether this very entry still has its slot."""
        segment = self.segments.get(entry.location.segment)
        return segment is not None and segment.has(entry)

    def free(self, entry: Entry) -> None:
        """Give the slot back to the holes."""
        segment = self.segments[entry.location.segment]
        segment.vacate(entry)
        segment.extents.give(entry.location.offset, padded(entry.location.length))

    def victims(self, coldest: Iterator[Entry], nbytes: int, most: int, peer: Peer) -> tuple[list[Entry], bool, list[Entry]]:
        """Which chunks of a peer's medium to evict for slots of `nbytes`: (victims, whether each of them leaves such a slot, passed over).

        Up to `most` of the coldest ones as long as they have that size; if the coldest has another one, the run from it on that
        leaves one slot; no victims if none can go, or none among the `MAX_SEARCH` that are looked at.
        """
        size, attempts, left = padded(nbytes), 0, MAX_SEARCH
        equal: list[Entry] = []
        passed: list[Entry] = []
        for entry in islice(coldest, MAX_SEARCH):
            segment = self.segments[entry.location.segment]
            if segment.state != "live" or not entry.evictable or segment.id in peer.avoids:
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

    def largest_segment(self, peer: Peer) -> int:
        """Bytes of the largest segment that a peer can use; 0 without one."""
        return max((segment.nbytes for segment in self._usable(peer)), default=0)

    def in_state(self, state: SegmentState) -> list[Segment]:
        """The segments in a state."""
        return [segment for segment in self.segments.values() if segment.state == state]

    def _usable(self, peer: Peer) -> Iterator[Segment]:
        for segment in self.segments.values():
            if segment.medium == peer.medium and segment.state == "live" and segment.id not in peer.avoids:
                yield segment
