"""The chunks of the pool and their slots, and eviction. Pure.

A chunk is live (look-ups return it), resting (in a segment from before a restart that no client has
offered again yet), or cleared (look-ups leave it out, and the slot is not freed yet)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import count, repeat

from vcache_backend.metadata_server.pool.allocator import ALIGNMENT, padded
from vcache_backend.metadata_server.pool.backlog import Steps
from vcache_backend.metadata_server.pool.chunks import Chunks, Space
from vcache_backend.metadata_server.pool.placement import MAX_SEARCH, Peer, Placement
from vcache_backend.metadata_server.pool.slots import Entry, Segment, remove
from vcache_backend.metadata_server.records import Cleared, Gone, LedgerState, Live, Record
from vcache_backend.protocol.messages import ChunkKey, Location, SegmentInfo

READ_TOGETHER = 256
"""Chunks of a ledger to add at once."""


class Contents:
    """Chunks and slots. `records`: changes that the ledger must hold before any reply."""

    def __init__(self) -> None:
        self.live, self.resting = Chunks(), Chunks()
        self.placement = Placement()
        self.records: list[Record] = []
        self.counters: Counter[str] = Counter()
        self._uses = 0

    def live_entries(self, keys: Iterable[ChunkKey]) -> list[Entry]:
        """The live chunks of these keys, each once."""
        wanted = list(dict.fromkeys(keys))
        return [entry for entry in map(self.live.among(wanted).get, wanted) if entry is not None]

    def use(self, entries: list[Entry]) -> None:
        """Make unread chunks recent. The first becomes the most recent, so the end of a prefix is
        evicted before its beginning."""
        for use, entry in enumerate(reversed(entries), self._uses):
            if entry.newer is not None:
                remove(entry)
                entry.segment.order.append(entry, use)
        self._uses += len(entries)

    def lying(self, chunks: dict[ChunkKey, Location]) -> Iterator[Live]:
        """Yield a record of the chunks that still lie at these locations, live or resting. Yields
        nothing if all chunks are gone."""
        lying = {
            key: at
            for key, at in chunks.items()
            if (e := self.live.get(key) or self.resting.get(key)) is not None and e.location == at
        }
        if lying:
            yield Live(lying)

    # ---- chunks come

    def read(self, state: LedgerState) -> Steps:
        """Add the segments of an earlier server, as absent, and their chunks, as resting, to these
        contents, which have neither: a step for each chunk. The least recently used chunks come
        back first. The slots that were being written are occupied.

        ValueError unless a pool can have this state: known segments, and slots inside them that do
        not overlap."""
        segments = self.placement.segments
        for id_, added in state.segments.items():
            info = SegmentInfo(id_, added.device, added.medium, added.nbytes, state="absent")
            segments[id_] = Segment(info)
        slots = 0
        for number, held in state.held.items():
            slots += len(self._placed(held.chunks, number))
            yield
        for piece in state.pieces(READ_TOGETHER):
            entries = self._placed(piece, 0)
            slots += len(entries)
            self.resting.put(entries)
            for use, entry in enumerate(entries, self._uses):
                entry.segment.order.append(entry, use)
                entry.segment.returning.append(entry)
            self._uses += len(entries)
            yield from repeat(None, len(entries))
        for segment in segments.values():
            segment.returning.reverse()
            yield from segment.find_holes()
        if slots != sum(len(segment.occupants) for segment in segments.values()):
            raise ValueError("two chunks have one slot")

    def discard(self) -> None:
        """Break the cycles of contents that could not be read: see `Segment.let_go`."""
        for segment in self.placement.segments.values():
            segment.let_go()

    def adopt(self, read: Contents, generation: int) -> None:
        """Take over what an earlier server had, with generations up to `generation`. Chunks that
        are here already stay."""
        known = self.live.shared(read.resting) + self.resting.shared(read.resting)
        read.resting.drop(known)
        for entry in known:
            entry.segment.free(entry)
        for segment in {entry.segment.id: entry.segment for entry in known}.values():
            segment.returning = list(filter(segment.has, segment.returning))
        self.resting.merge(read.resting)
        self.placement.segments.update(read.placement.segments)
        newest = max(generation, next(self.placement.generations))
        self.placement.generations = count(1 + newest)
        self._uses = max(self._uses, read._uses)

    def _placed(self, chunks: dict[ChunkKey, Location], reservation: int) -> list[Entry]:
        """Occupy slots from a ledger. ValueError if one cannot be."""
        for key, at in chunks.items():
            if at.offset % ALIGNMENT or at.segment not in self.placement.segments:
                raise ValueError(f"chunk {key.hex()} at {at} cannot be")
        return self.occupy(chunks, reservation)

    def occupy(self, chunks: dict[ChunkKey, Location], reservation: int) -> list[Entry]:
        """Mark slots from `room` as being written."""
        segments, entries = self.placement.segments, []
        length = size = 0
        for key, location in chunks.items():
            if location.length != length:
                length, size = location.length, padded(location.length)
            segment, offset = segments[location.segment], location.offset
            entry = Entry(key, location, segment, size, reservation)
            segment.occupants.put(offset, entry)
            segment.ending.put(offset + size, entry)
            segment.reserved += reservation != 0
            entries.append(entry)
        return entries

    def publish(self, entries: list[Entry]) -> int:
        """Make chunks live, the first the most recent. Returns how many.

        Chunks in a draining segment are forgotten instead."""
        draining: list[Entry] = []
        resting = self.resting
        for use, entry in enumerate(reversed(entries), self._uses):
            segment = entry.segment
            entry.reservation = 0
            segment.reserved -= 1
            segment.order.append(entry, use)
            if segment.state == "draining":
                draining.append(entry)
            if resting and (before := resting.get(entry.key)) is not None:
                resting.drop([before])
                before.segment.free(before)
        self.live.put(entries)
        self._uses += len(entries)
        self.forget(draining)
        return len(entries) - len(draining)

    def bring_back(self, segment: Segment, pending: Callable[[ChunkKey], bool]) -> Steps:
        """Make the chunks of a segment live after a client has offered the segment again. Skips
        chunks that were removed or are being stored again."""
        while segment.returning and segment.state == "live":
            entry = segment.returning.pop()
            if self.resting.get(entry.key) is entry:
                if pending(entry.key):
                    self.forget([entry])
                else:
                    self.resting.drop([entry])
                    self.live.put([entry])
            yield

    def room(self, nbytes: int, peer: Peer, wanted: int, allowed: int) -> list[Location]:
        """Find slots for up to `wanted` chunks: first in holes, then by evicting the least recently
        used chunks.

        allowed: by how much the number of chunks may grow."""
        left, slots = MAX_SEARCH, list[Location]()
        while True:
            while (most := min(allowed, wanted - len(slots))) > 0 and (
                free := self.placement.take(nbytes, peer, most)
            ):
                allowed -= len(free)
                slots += free
            if len(slots) == wanted or left <= 0:
                return slots
            most = wanted - len(slots)
            victims, equal, looked = self.placement.victims(nbytes, most, peer, left)
            if not victims:
                return slots
            left -= looked
            self._evict(victims)
            if equal:
                slots += self.placement.reuse(victims, nbytes)
            else:
                allowed += len(victims)
                for victim in victims:
                    victim.segment.free(victim)

    # ---- chunks are read

    def hold(self, entries: Iterable[Entry]) -> None:
        """Add a reader to each of these different chunks. Chunks with readers are not evicted."""
        for entry in entries:
            if not entry.leases:
                entry.segment.leased += 1
                remove(entry)
            entry.leases += 1

    def let_go(self, entries: list[Entry]) -> None:
        """Remove a reader from each chunk. Chunks without readers become recent, the first the
        most; removed chunks without readers free their slots."""
        for use, entry in enumerate(reversed(entries), self._uses):
            entry.leases -= 1
            if not entry.leases:
                segment = entry.segment
                segment.leased -= 1
                if entry.doomed:
                    segment.free(entry)
                else:
                    segment.order.append(entry, use)
        self._uses += len(entries)

    # ---- chunks go

    def forget(self, entries: list[Entry]) -> None:
        """Remove chunks, whether live, resting or cleared. The slot of a chunk with readers is
        freed when its last reader ends."""
        gone = self.live.drop(entries) + self.resting.drop(entries)
        for entry in entries:
            if entry.leases:
                entry.doomed = True
            else:
                entry.segment.free(entry)
        if gone:
            self.records.append(Gone(gone))

    def clear(self, namespace: bytes) -> tuple[int, Steps]:
        """Remove all chunks of a namespace, or of all namespaces with b"". Returns how many were
        live, and the steps that free their slots."""
        live, resting = self.live.clear(namespace), self.resting.clear(namespace)
        if live or resting:
            self.records.append(Cleared(namespace))
        chunks = sum(map(len, live))
        self.counters["removed"] += chunks
        return chunks, self._drain([*live, *resting])

    def empty(self, segment: Segment) -> Steps:
        """Forget the chunks of a segment, one for each step."""
        while (entry := segment.occupants.take()) is not None:
            segment.staying[entry.location.offset] = entry
            if not entry.reservation and not entry.doomed:
                self.forget([entry])
            yield

    def _drain(self, spaces: list[Space]) -> Steps:
        """Free the slots of cleared chunks, one for each step. Skips chunks that were evicted
        meanwhile, and chunks with leases."""
        for space in spaces:
            while space:
                _, entry = space.popitem()
                if not entry.doomed and entry.segment.has(entry):
                    self.forget([entry])
                yield

    def _evict(self, victims: list[Entry]) -> None:
        """Unlink chunks without readers. The caller frees or reuses their slots."""
        gone = self.live.drop(victims) + self.resting.drop(victims)
        for victim in victims:
            segment = victim.segment
            remove(victim)
            segment.evictions += 1
        self.counters["evicted"] += len(gone)
        if gone:
            self.records.append(Gone(gone))
