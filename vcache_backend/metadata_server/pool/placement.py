"""The node's segments, and the choice of slots to take and to evict."""

from __future__ import annotations

import heapq
import time
from collections.abc import Iterator
from itertools import count, islice
from operator import attrgetter

import msgspec

from vcache_backend.metadata_server.pool.allocator import padded
from vcache_backend.metadata_server.pool.slots import Entry, Segment
from vcache_backend.metadata_server.records import ProcessId
from vcache_backend.protocol.messages import Location, Medium, Reads, SegmentId, SegmentState

MAX_WINDOW_ATTEMPTS = 64
"""How many chunks to try as the start of a run to evict among chunks of other sizes."""
MAX_SEARCH = 2048
"""The most chunks that one request evicts: a few milliseconds of the server's time."""
SAME_SEGMENT = 64
"""How many slots of a request `Placement` takes from a segment before it chooses again."""


class Peer(msgspec.Struct):
    """A client's connection, `id` by number.

    From the hello: the client's process, the process's parent and `processes.spawner`, the
    preferred device, the instance's name and layout (empty for tools). From later messages:
    segments that the client cannot map, its reads, whether it has looked tokens up, its
    `Promise.chunk_seconds`; `heard`: when its last message came (monotonic clock)."""

    id: int
    process: ProcessId
    device: str
    medium: Medium
    name: str = ""
    parent: int = 0
    spawner: int = 0
    layout: dict[str, str] = {}
    avoids: set[SegmentId] = msgspec.field(default_factory=set)
    reads: list[Reads] = []
    asked: bool = False
    chunk_seconds: float = 0.0
    heard: float = msgspec.field(default_factory=time.monotonic)

    @property
    def namespace(self) -> str:
        return self.layout.get("namespace", "")


class Placement:
    """All segments. `generations` numbers every use of a slot, also across restarts."""

    def __init__(self) -> None:
        self.segments: dict[SegmentId, Segment] = {}
        self.generations = count(1)

    def take(self, nbytes: int, peer: Peer, most: int) -> list[Location]:
        """Take up to `most` free slots for a peer: on the peer's device first, and there or
        elsewhere in the segment with the most room. Empty if no hole is large enough."""
        size, locations = padded(nbytes), list[Location]()
        roomy = [segment for segment in self.usable(peer) if segment.extents.largest >= size]
        best = max(roomy, key=lambda it: (it.device == peer.device, it.extents.free), default=None)
        while best is not None and len(locations) < min(most, SAME_SEGMENT):
            offset = best.extents.take(size)
            if offset is None:
                break
            locations.append(Location(best.id, offset, nbytes, next(self.generations)))
        return locations

    def reuse(self, entries: list[Entry], nbytes: int) -> list[Location]:
        """Reuse the slots of evicted chunks of the same padded size, without making holes of them.
        The caller occupies the slots at once."""
        return [
            Location(e.location.segment, e.location.offset, nbytes, next(self.generations))
            for e in entries
        ]

    def victims(
        self, nbytes: int, most: int, peer: Peer, left: int
    ) -> tuple[list[Entry], bool, int]:
        """Choose chunks of a peer's medium to evict for slots of `nbytes`. Examines about `left`
        chunks at most.

        If the least recently used chunk has the padded size, returns up to `most` chunks of that
        size. Otherwise returns neighbouring chunks that together leave one slot, or no chunks. Also
        returns whether each chunk leaves a slot, and how many chunks were examined."""
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
                attempts += 1
                looked += len(run)
                if wide:
                    return run, False, looked
        return equal, bool(equal), looked + len(equal)

    def usable(self, peer: Peer) -> Iterator[Segment]:
        """The segments in which a peer may store."""
        for segment in self.in_state("live"):
            if segment.medium == peer.medium and segment.id not in peer.avoids:
                yield segment

    def occupied(self) -> int:
        """The number of occupied slots: chunks live or being written, removed chunks with readers,
        and quarantined slots."""
        return sum(
            len(segment.ending) for segment in self.segments.values() if segment.state != "absent"
        )

    def in_state(self, state: SegmentState) -> list[Segment]:
        return [segment for segment in self.segments.values() if segment.state == state]
