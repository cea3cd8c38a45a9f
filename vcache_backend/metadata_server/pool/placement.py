"""The node's segments, their occupants in order of use, and the choice of slots to evict."""

from __future__ import annotations

import heapq
import time
from collections import defaultdict
from collections.abc import Iterator
from itertools import chain, count, islice
from operator import attrgetter
from typing import cast

import msgspec

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
from vcache_backend.metadata_server.pool.quotas import Tenant
from vcache_backend.metadata_server.records import ProcessId

MAX_WINDOW_ATTEMPTS = 64
"""How many chunks, least recently used first, to try as the start of a run to evict among chunks of
other sizes."""
MAX_SEARCH = 2048
"""The most chunks that one request evicts: a few milliseconds of the server's time."""
SLOT_TABLES = 16
"""Dicts for the slots of one segment."""
SAME_SEGMENT = 64
"""How many slots of one request come from a segment before `Placement` chooses a segment again."""


class Entry(msgspec.Struct, gc=False, eq=False):
    """An occupied slot of `size` bytes. `reservation`: 0 once its chunk is committed. `doomed`: the
    chunk was removed while leased. `tenant`: for whom it counts, if a share limits that.

    `use` grows with every use. `older`, `newer`: the neighbours in its `Order`, or None."""

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
    tenant: Tenant | None = None

    def uncount(self) -> None:
        """The slot counts for its tenant no more."""
        if self.tenant is not None:
            self.tenant.used -= self.size

    @property
    def end(self) -> int:
        return self.location.offset + self.size


class Order:
    """A tenant's chunks of a segment that may be evicted (committed, without readers), the least
    recently used first.

    A ring through the entries themselves: a dict would at times be rebuilt for all of them."""

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
            entry.use, entry.older, entry.newer = use, last, ends
            last.newer = ends.older = entry

    def clear(self) -> None:
        """Unlink all entries of an order that is not used again."""
        entry: Entry | None = self._ends
        while entry is not None:
            following, entry.older, entry.newer = entry.newer, None, None
            entry = following


def remove(entry: Entry) -> None:
    older, newer = entry.older, entry.newer
    if older is not None and newer is not None:
        older.newer, newer.older = newer, older
        entry.older = entry.newer = None


class Peer(msgspec.Struct):
    """A client's connection: its number, its process and that process's user, the preferred device,
    the segments it cannot map, the name from its hello, and when (monotonic clock) its last message
    came."""

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
        """The process or user whose limit of log lines applies."""
        return Caller(self.uid, self.process.pid)


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

    def get(self, offset: int) -> Entry | None:
        return self._tables[offset // self._part].get(offset)

    def put(self, offset: int, entry: Entry) -> None:
        """Add an entry, in place of the one at this offset."""
        self._tables[offset // self._part][offset] = entry

    def pop(self, offset: int) -> Entry | None:
        """Remove and return the entry at this offset; None if there is none."""
        return self._tables[offset // self._part].pop(offset, None)

    def take(self) -> Entry | None:
        """Remove and return any entry; None if there is none."""
        return next((table.popitem()[1] for table in self._tables.values() if table), None)

    def clear(self) -> None:
        self._tables.clear()


class Segment:
    """A segment: its holes, its occupants by offset and by end, how many are reserved or leased.

    `state`: live; absent, from before a restart, until a client offers its fd again; or draining,
    until its last reader and writer are gone."""

    def __init__(self, info: SegmentInfo) -> None:
        self.id, self.nbytes = info.id, info.nbytes
        self.device, self.medium = info.device, info.medium
        self.state: SegmentState = info.state
        self.capacity = info.nbytes // ALIGNMENT * ALIGNMENT
        self.extents = Extents(info.nbytes)
        self.orders: dict[Tenant | None, Order] = {}
        self.occupants = SlotTable(info.nbytes)
        self.ending = SlotTable(info.nbytes)
        self.staying: dict[int, Entry] = {}
        """Occupants of a draining segment, removed after their last use."""
        self.returning: list[Entry] = []
        """Chunks that an absent segment will bring back unless they are removed first; the least
        recently used last."""
        self.reserved = self.leased = self.evictions = 0

    def info(self) -> SegmentInfo:
        """The segment as the protocol describes it."""
        return SegmentInfo(
            id=self.id,
            device=self.device,
            medium=self.medium,
            nbytes=self.nbytes,
            used=self.capacity - self.extents.free,
            chunks=len(self.ending) - self.reserved,
            leased=self.leased,
            reserved=self.reserved,
            evictions=self.evictions,
            state=self.state,
        )

    def append(self, entry: Entry, use: int) -> None:
        """Make an entry, which is in no order, the most recent of its tenant."""
        order = self.orders.get(entry.tenant)
        if order is None:
            order = self.orders[entry.tenant] = Order()
        order.append(entry, use)

    def has(self, entry: Entry) -> bool:
        """Whether this very entry still has its slot."""
        return self.ending.get(entry.end) is entry

    def find_holes(self) -> None:
        """Compute the holes from the occupants. ValueError if slots overlap."""
        self.extents = Extents(
            self.nbytes, [(entry.location.offset, entry.size) for entry in self.occupants]
        )

    def free(self, entry: Entry) -> None:
        """Make the slot a hole, after its last user."""
        offset = entry.location.offset
        if self.occupants.pop(offset) is None:
            del self.staying[offset]
        self.ending.pop(entry.end)
        remove(entry)
        entry.uncount()
        self.reserved -= entry.reservation != 0
        self.extents.give(offset, entry.size)

    def let_go(self) -> None:
        """Break the reference cycle between a removed segment and its entries, since the garbage
        collector is off."""
        for entry in self.ending:
            entry.uncount()
        for table in (self.occupants, self.staying, self.ending):
            table.clear()
        for order in self.orders.values():
            order.clear()
        self.orders.clear()
        self.returning.clear()

    def window(
        self, first: Entry, size: int, most: int, own: Tenant | None
    ) -> tuple[list[Entry], bool]:
        """Return a run of at most `most` evictable occupants around `first`, of a tenant alone if
        `own` says so, and whether the run and the holes beside it span `size` bytes.

        The run grows towards the end of the segment as far as possible, then towards the start."""
        run, end = [first], self.extents.hole_at(first.end)
        start = self.extents.hole_before(first.location.offset)
        while end - start < size and len(run) < most:
            after = self.occupants.get(end)
            if after is None or after.newer is None or own not in (None, after.tenant):
                break
            run.append(after)
            end = self.extents.hole_at(after.end)
        while end - start < size and len(run) < most:
            ahead = self.ending.get(start)
            if ahead is None or ahead.newer is None or own not in (None, ahead.tenant):
                break
            run.append(ahead)
            start = self.extents.hole_before(ahead.location.offset)
        return run, end - start >= size


class Placement:
    """All segments. `generations` numbers every use of a slot, also across restarts."""

    def __init__(self) -> None:
        self.segments: dict[SegmentId, Segment] = {}
        self.generations = count(1)

    def take(self, nbytes: int, peer: Peer, most: int) -> list[Location]:
        """Take up to `most` free slots for a peer: on the peer's device first, then in the segment
        with the most room. Empty if no hole is large enough."""
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
        """Reuse the slots of evicted chunks of the same padded size, without making holes of them.
        The caller occupies the slots at once."""
        for entry in entries:
            entry.uncount()
        return [
            Location(e.location.segment, e.location.offset, nbytes, next(self.generations))
            for e in entries
        ]

    def victims(
        self, nbytes: int, most: int, peer: Peer, left: int, own: Tenant | None
    ) -> tuple[list[Entry], bool, int]:
        """Choose chunks of a peer's medium to evict for slots of `nbytes`: anybody's, or those of
        the tenant `own` alone. Examines about `left` chunks at most.

        If the least recently used chunk has the padded size, returns up to `most` chunks of that
        size. Else returns a run around it that leaves one slot, or no chunks if no run can go. Also
        returns whether each chunk leaves a slot, and how many chunks were examined."""
        size, attempts, looked = padded(nbytes), 0, 0
        equal: list[Entry] = []
        orders = [
            order
            for segment in self.usable(peer)
            if size <= segment.capacity
            for tenant, order in segment.orders.items()
            if own in (None, tenant)
        ]
        for entry in islice(heapq.merge(*orders, key=attrgetter("use")), left):
            if entry.size == size:
                equal.append(entry)
                if len(equal) == most:
                    break
            elif equal or attempts == MAX_WINDOW_ATTEMPTS or looked >= left:
                break
            else:
                run, wide = entry.segment.window(entry, size, left - looked, own)
                attempts += 1
                looked += len(run)
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

    def capacity(self) -> int:
        return sum(segment.capacity for segment in self.in_state("live"))

    def occupied(self) -> int:
        """The number of occupied slots: chunks live or being written, removed chunks with readers,
        and quarantined slots."""
        return sum(
            len(segment.ending) for segment in self.segments.values() if segment.state != "absent"
        )

    def in_state(self, state: SegmentState) -> list[Segment]:
        return [segment for segment in self.segments.values() if segment.state == state]
