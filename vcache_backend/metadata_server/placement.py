"""Where chunks lie: the segments of the node, what occupies their slots and when it was last used, and which slots make room."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from itertools import count, islice
from operator import attrgetter
from typing import cast

import msgspec

from vcache_backend.metadata_server.allocator import ALIGNMENT, Extents, padded
from vcache_backend.metadata_server.messages import ChunkKey, Location, Medium, SegmentId, SegmentInfo, SegmentState
from vcache_backend.metadata_server.records import ProcessId

MAX_WINDOW_ATTEMPTS = 64
"""How many cold chunks are tried as the start of a run to evict, when chunks of other sizes surround them."""
MAX_SEARCH = 2048
"""Most chunks that a run to evict is made of, and that one request evicts: some milliseconds of the server's time."""
SAME_SEGMENT = 64
"""So many slots of one request are taken from a segment before the roomiest one is looked for again."""


class Entry(msgspec.Struct, gc=False, eq=False):
    """One occupied slot of `size` bytes. `reservation` is 0 once its chunk is committed; `doomed` once that was removed under a lease.
    `use` grows with every use; `older` and `newer` are its neighbours in the order of its segment, None if it is not in there."""

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
        """Where its slot ends."""
        return self.location.offset + self.size


class Order:
    """The chunks of a segment that may go, the coldest first: those that are committed and that nobody reads.

    It runs through the entries themselves, in a ring. A table, however fast, would be built anew for all of them now and then."""

    def __init__(self) -> None:
        self._ends = Entry(ChunkKey(b""), Location(SegmentId(""), 0, 0, 0), cast("Segment", None), 0)
        self._ends.older = self._ends.newer = self._ends

    def __iter__(self) -> Iterator[Entry]:
        """Not to be used after the next change."""
        entry = self._ends.newer
        while entry is not None and entry is not self._ends:
            yield entry
            entry = entry.newer

    def append(self, entry: Entry, use: int) -> None:
        """It is the most recent now, and was not in there."""
        ends, last = self._ends, self._ends.older
        if last is not None:
            entry.use, entry.older, entry.newer = use, last, ends
            last.newer = ends.older = entry

    def remove(self, entry: Entry) -> None:
        """It may not go, or has gone. Not in there: nothing happens."""
        older, newer = entry.older, entry.newer
        if older is not None and newer is not None:
            older.newer, newer.older = newer, older
            entry.older = entry.newer = None

    def clear(self) -> None:
        """No entry names another one any more; this is not used again."""
        entry: Entry | None = self._ends
        while entry is not None:
            following, entry.older, entry.newer = entry.newer, None, None
            entry = following


class Peer(msgspec.Struct, frozen=True):
    """One connection of a client: its number, the process behind it, the device it prefers and the segments it cannot use."""

    id: int
    process: ProcessId
    device: str
    medium: Medium
    avoids: set[SegmentId] = msgspec.field(default_factory=set)


class Segment:
    """One segment: its holes, its occupants by offset (and by where they end), and how many of these are reserved and leased.

    `state`: live; absent, of before a restart, until its fd is offered again; draining, until nobody reads or
    writes there any more.
    """

    def __init__(self, info: SegmentInfo) -> None:
        self.id, self.device, self.medium, self.nbytes = info.id, info.device, info.medium, info.nbytes
        self.state: SegmentState = info.state
        self.end = self.limit = info.nbytes // ALIGNMENT * ALIGNMENT
        """Chunks lie before `end`, which comes down to `limit` where memory is taken back."""
        self.outside = 0
        """Bytes of slots behind `end` that somebody is not done with yet."""
        self.given_back = 0
        self.extents = Extents(info.nbytes)
        self.order = Order()
        self.occupants: dict[int, Entry] = {}
        self.ending: dict[int, Entry] = {}
        self.staying: dict[int, Entry] = {}
        """Occupants of a draining segment, or of one's cut end, that go when somebody is done with them."""
        self.leaving: dict[int, Entry] = {}
        """Chunks among these that are to be moved, until `keeps_until` (0: none are any more)."""
        self.keeps_until = 0.0
        self.returning: list[Entry] = []
        """Chunks that an absent segment will bring back, unless they have gone meanwhile; the coldest last."""
        self.reserved = self.leased = self.evictions = 0

    def info(self) -> SegmentInfo:
        """What people and the protocol see."""
        return SegmentInfo(
            id=self.id,
            device=self.device,
            medium=self.medium,
            nbytes=self.nbytes,
            used=self.end + self.outside - self.extents.free,
            chunks=len(self.ending) - self.reserved,
            leased=self.leased,
            reserved=self.reserved,
            largest_hole=self.extents.largest,
            evictions=self.evictions,
            state=self.state,
            given_back=self.given_back,
        )

    def has(self, entry: Entry) -> bool:
        """Whether this very entry still has its slot."""
        return self.ending.get(entry.end) is entry

    def find_holes(self) -> None:
        """After slots were occupied for which no hole was taken. ValueError if they overlap."""
        self.extents = Extents(self.nbytes, [(at, entry.size) for at, entry in self.occupants.items()])

    def free(self, entry: Entry) -> None:
        """Nobody has the slot any more: it is a hole."""
        offset = entry.location.offset
        if self.occupants.pop(offset, None) is None:
            del self.staying[offset]
            self.leaving.pop(offset, None)
        del self.ending[entry.end]
        self.order.remove(entry)
        self.reserved -= entry.reservation != 0
        if entry.end <= self.end:
            self.extents.give(offset, entry.size)
        else:
            self.outside -= entry.size

    def shorten(self, end: int) -> Entry | None:
        """Cut the hole at its end, no further than to `end`; where there is none, the occupant, which is returned, yet to be forgotten."""
        if (cut := self.extents.cut(self.end, end)) < self.end:
            self.end = cut
            return None
        entry = self.ending[self.end]
        self.end = entry.location.offset
        self.outside += entry.size
        self.staying[self.end] = self.occupants.pop(self.end)
        return entry

    def let_go(self) -> None:
        """The segment is in the pool no more. (It and its entries name each other, and nobody collects garbage.)"""
        for table in (self.occupants, self.staying, self.leaving, self.ending):
            table.clear()
        self.order.clear()
        self.returning.clear()
        self.end = 0

    def window(self, first: Entry, size: int, most: int, before: float) -> tuple[list[Entry], bool]:
        """A run of at most `most` occupants used `before`, with `first`, and whether it, with the holes around it, spans `size` bytes.

        It grows towards the end of the segment as far as it can, then towards the start."""
        run, end = [first], self.extents.hole_at(first.end)
        start = self.extents.hole_before(first.location.offset)
        while end - start < size and len(run) < most:
            after = self.occupants.get(end)
            if after is None or after.newer is None or after.use >= before:
                break
            run.append(after)
            end = self.extents.hole_at(after.end)
        while end - start < size and len(run) < most:
            ahead = self.ending.get(start)
            if ahead is None or ahead.newer is None or ahead.use >= before:
                break
            run.append(ahead)
            start = self.extents.hole_before(ahead.location.offset)
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
        for segment in self.usable(peer):
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

    def reuse(self, entries: list[Entry], nbytes: int) -> list[Location]:
        """The slots of evicted chunks for others of the same padded size, to be occupied at once: no detour through the holes."""
        return [Location(e.location.segment, e.location.offset, nbytes, next(self.generations)) for e in entries]

    def victims(self, nbytes: int, most: int, peer: Peer, left: int, before: float) -> tuple[list[Entry], bool, int]:
        """Which chunks of a peer's medium, used `before`, to evict for slots of `nbytes`, whether each of them leaves such a slot, and how
        many chunks were looked at: about `left` at most.

        Up to `most` of the coldest ones as long as they have that size; if the coldest has another one, the run from it on that
        leaves one slot; no victims if none can go, or if too many would have to.
        """
        size, attempts, looked = padded(nbytes), 0, 0
        equal: list[Entry] = []
        orders = [segment.order for segment in self.usable(peer) if size <= segment.end]
        for entry in islice(heapq.merge(*orders, key=attrgetter("use")), left):
            if entry.use >= before:
                break
            if entry.size == size:
                equal.append(entry)
                if len(equal) == most:
                    break
            elif equal or attempts == MAX_WINDOW_ATTEMPTS or looked >= left:
                break
            else:
                run, wide = entry.segment.window(entry, size, left - looked, before)
                attempts, looked = attempts + 1, looked + len(run)
                if wide:
                    return run, False, looked
        return equal, bool(equal), looked + len(equal)

    def usable(self, peer: Peer) -> Iterator[Segment]:
        """Where a peer may store."""
        for segment in self.segments.values():
            if segment.medium == peer.medium and segment.state == "live" and segment.id not in peer.avoids:
                yield segment

    def in_state(self, state: SegmentState) -> list[Segment]:
        """The segments in a state."""
        return [segment for segment in self.segments.values() if segment.state == state]
