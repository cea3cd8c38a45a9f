"""Where chunks lie: the node's segments, what occupies their slots and when it was last used, and
which slots make room.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Iterator
from itertools import count, islice
from operator import attrgetter
from typing import cast

import msgspec

from vcache_backend.metadata_server import shares
from vcache_backend.metadata_server.client_lines import Caller
from vcache_backend.metadata_server.messages import (
    ChunkKey,
    Location,
    Medium,
    SegmentId,
    SegmentInfo,
    SegmentState,
)
from vcache_backend.metadata_server.pool.allocator import ALIGNMENT, Extents, padded
from vcache_backend.metadata_server.records import ProcessId

MAX_WINDOW_ATTEMPTS = 64
"""How many chunks, least recently used first, are tried as the start of a run to evict among chunks
of other sizes.
"""
MAX_SEARCH = 2048
"""The most chunks in a run to evict, and that one request evicts: a few milliseconds of the
server's time.
"""
SAME_SEGMENT = 64
"""How many slots of one request come from a segment before the one with the most room is looked for
again.
"""


class Entry(msgspec.Struct, gc=False, eq=False):
    """One occupied slot of `size` bytes. `reservation`: 0 once its chunk is committed. `doomed`:
    the chunk was removed while leased.

    `use` grows with every use. `older` and `newer`: its neighbours in the order of its segment,
    None if it is not in there."""

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
        """The offset at which its slot ends."""
        return self.location.offset + self.size


class Order:
    """The chunks of a segment that may be evicted (committed, and read by nobody), the least
    recently used first.

    A ring through the entries themselves: a table, however fast, would at times be rebuilt for all
    of them."""

    def __init__(self) -> None:
        self._ends = Entry(
            ChunkKey(b""), Location(SegmentId(""), 0, 0, 0), cast("Segment", None), 0
        )
        self._ends.older = self._ends.newer = self._ends

    def __iter__(self) -> Iterator[Entry]:
        """Not to be continued after a change."""
        entry = self._ends.newer
        while entry is not None and entry is not self._ends:
            yield entry
            entry = entry.newer

    def append(self, entry: Entry, use: int) -> None:
        """Add an entry as the most recent one. It must not be in there."""
        ends, last = self._ends, self._ends.older
        if last is not None:
            entry.use, entry.older, entry.newer = use, last, ends
            last.newer = ends.older = entry

    def remove(self, entry: Entry) -> None:
        """Take an entry out, if it is in there."""
        older, newer = entry.older, entry.newer
        if older is not None and newer is not None:
            older.newer, newer.older = newer, older
            entry.older = entry.newer = None

    def clear(self) -> None:
        """Unlink all entries. The order is not used again."""
        entry: Entry | None = self._ends
        while entry is not None:
            following, entry.older, entry.newer = entry.newer, None, None
            entry = following


class Peer(msgspec.Struct):
    """One connection of a client: its number, the process behind it and that one's user, the device
    it prefers, the segments it cannot use, the name from its hello, and when (monotonic clock) its
    last message came."""

    id: int
    process: ProcessId
    device: str
    medium: Medium
    avoids: set[SegmentId] = msgspec.field(default_factory=set)
    name: str = ""
    heard: float = msgspec.field(default_factory=time.monotonic)
    uid: int = 0

    @property
    def caller(self) -> Caller:
        """Whom its lines in the log count for."""
        return Caller(self.uid, self.process.pid)

    @property
    def user(self) -> int:
        """Whose share it counts to, see `shares.user`."""
        return shares.user(self.uid, self.process.pid)


class Segment:
    """One segment: its holes, its occupants by offset (and by where they end), and how many of
    these are reserved and leased.

    `state`: live; absent, from before a restart, until its fd is offered again; or draining, until
    nobody reads or writes there any more."""

    def __init__(self, info: SegmentInfo) -> None:
        self.id, self.device, self.medium, self.nbytes = (
            info.id,
            info.device,
            info.medium,
            info.nbytes,
        )
        self.state: SegmentState = info.state
        self.capacity = info.nbytes // ALIGNMENT * ALIGNMENT
        self.extents = Extents(info.nbytes)
        self.order = Order()
        self.occupants: dict[int, Entry] = {}
        self.ending: dict[int, Entry] = {}
        self.staying: dict[int, Entry] = {}
        """Occupants of a draining segment that are removed once nobody uses them."""
        self.returning: list[Entry] = []
        """Chunks that an absent segment will bring back, unless removed meanwhile; the least
        recently used last.
        """
        self.reserved = self.leased = self.evictions = 0

    def info(self) -> SegmentInfo:
        """The segment as people and the protocol see it."""
        return SegmentInfo(
            id=self.id,
            device=self.device,
            medium=self.medium,
            nbytes=self.nbytes,
            used=self.capacity - self.extents.free,
            chunks=len(self.ending) - self.reserved,
            leased=self.leased,
            reserved=self.reserved,
            largest_hole=self.extents.largest,
            evictions=self.evictions,
            state=self.state,
        )

    def has(self, entry: Entry) -> bool:
        """Whether this very entry still has its slot."""
        return self.ending.get(entry.end) is entry

    def find_holes(self) -> None:
        """Find the holes anew, after slots were occupied without taking them from holes. ValueError
        if slots overlap.
        """
        self.extents = Extents(
            self.nbytes, [(at, entry.size) for at, entry in self.occupants.items()]
        )

    def free(self, entry: Entry) -> None:
        """Make a slot a hole: nobody has it any more."""
        offset = entry.location.offset
        if self.occupants.pop(offset, None) is None:
            del self.staying[offset]
        del self.ending[entry.end]
        self.order.remove(entry)
        self.reserved -= entry.reservation != 0
        self.extents.give(offset, entry.size)

    def let_go(self) -> None:
        """Unlink a segment that has left the pool: it and its entries refer to each other, and the
        garbage collector is off.
        """
        for table in (self.occupants, self.staying, self.ending):
            table.clear()
        self.order.clear()
        self.returning.clear()

    def window(self, first: Entry, size: int, most: int) -> tuple[list[Entry], bool]:
        """A run of at most `most` occupants that may be evicted, with `first`, and whether it, with
        the holes around it, spans `size` bytes.

        It grows towards the end of the segment as far as it can, then towards the start.
        """
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


class Placement:
    """All segments. `generations` numbers every use of a slot, across the server's lives."""

    def __init__(self) -> None:
        self.segments: dict[SegmentId, Segment] = {}
        self.generations = count(1)

    def take(self, nbytes: int, peer: Peer, most: int) -> list[Location]:
        """Take up to `most` free slots for a peer: on its device first, then where there is the
        most room. Empty if no hole is large enough."""
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
        """The slots of evicted chunks of the same padded size, without a detour through the holes.
        To be occupied at once.
        """
        return [
            Location(e.location.segment, e.location.offset, nbytes, next(self.generations))
            for e in entries
        ]

    def victims(
        self, nbytes: int, most: int, peer: Peer, left: int
    ) -> tuple[list[Entry], bool, int]:
        """Choose chunks of a peer's medium to evict for slots of `nbytes`.

        Returns them, whether each of them leaves such a slot, and how many chunks were looked at,
        about `left` at most. They are up to `most` of the least recently used ones if those have
        that size. If the first one has another size, they are a run around it that leaves one slot.
        None if none can go, or too many would have to."""
        size, attempts, looked = padded(nbytes), 0, 0
        equal: list[Entry] = []
        orders = [segment.order for segment in self.usable(peer) if size <= segment.capacity]
        for entry in islice(heapq.merge(*orders, key=attrgetter("use")), left):
            if entry.size == size:
                equal.append(entry)
                if len(equal) == most:
                    break
            elif equal or attempts == MAX_WINDOW_ATTEMPTS or looked >= left:
                break
            else:
                run, wide = entry.segment.window(entry, size, left - looked)
                attempts, looked = attempts + 1, looked + len(run)
                if wide:
                    return run, False, looked
        return equal, bool(equal), looked + len(equal)

    def usable(self, peer: Peer) -> Iterator[Segment]:
        """The segments in which a peer may store."""
        for segment in self.segments.values():
            if (
                segment.medium == peer.medium
                and segment.state == "live"
                and segment.id not in peer.avoids
            ):
                yield segment

    def occupied(self) -> int:
        """The number of slots in use, be their chunks live, being written, or gone and still read
        or in quarantine.
        """
        return sum(
            len(segment.ending) for segment in self.segments.values() if segment.state != "absent"
        )

    def in_state(self, state: SegmentState) -> list[Segment]:
        """The segments in a state."""
        return [segment for segment in self.segments.values() if segment.state == state]
