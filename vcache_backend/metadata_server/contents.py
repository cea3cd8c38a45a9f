"""What lies in the pool: chunks, the slots they occupy, and how room is made for others. Pure.

A chunk is live (found by its key), resting (in a segment of before a restart that is not back yet), or cleared (found no more, its
slot yet to be freed). A chunk elsewhere than in a slot of the pool would have a table of its own beside `live`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from vcache_backend.metadata_server.backlog import Steps
from vcache_backend.metadata_server.chunks import LRU, Chunks, Spaces
from vcache_backend.metadata_server.messages import ChunkKey, Location
from vcache_backend.metadata_server.placement import MAX_SEARCH, Entry, Peer, Placement, Segment
from vcache_backend.metadata_server.records import Gone, Record

DRAIN_PIECE = 32
"""Cleared chunks whose slots come back together."""
MAX_PASSED = 512
"""Who passed over more chunks in use than this in search of victims makes them recent, so that the next search does not meet them."""


class Contents:
    """`records`: what the journal must hold before anybody is told of it. `work`: entries that were touched, roughly a microsecond
    each."""

    def __init__(self) -> None:
        self.live, self.resting = Chunks(), Chunks()
        self.order = LRU()
        self.placement = Placement()
        self.records: list[Record] = []
        self.counters: Counter[str] = Counter()
        self.work = 0
        self._cleared: list[Spaces] = []

    def there(self, keys: list[ChunkKey]) -> list[Entry]:
        """The chunks that are found."""
        beside, everywhere = self.live.beside(keys), self.live
        self.work += len(keys)
        return [entry for key in keys if (entry := beside.get(key) or everywhere.get(key)) is not None]

    def touch(self, entries: list[Entry]) -> None:
        """Make chunks recent, the first one most: tails are evicted before what they hang on."""
        for entry in reversed(entries):
            self.order.touch(entry)

    # ---- chunks come

    def publish(self, entries: list[Entry]) -> int:
        """Chunks are found from now on, the first one the most recent, but for those of a segment that is being dropped; how many."""
        draining: list[Entry] = []
        for entry in reversed(entries):
            segment = self.placement.segments[entry.location.segment]
            entry.reservation = 0
            segment.reserved -= 1
            if (before := self.resting.get(entry.key)) is not None:
                self._release(before)
            self.live.put(entry)
            self.order.add(entry, segment.medium)
            if segment.state == "draining":
                draining.append(entry)
        self.forget(draining)
        self.work += len(entries)
        return len(entries) - len(draining)

    def bring_back(self, segment: Segment, pending: Callable[[ChunkKey], bool]) -> Steps:
        """The chunks of a segment that is here again are found, but for those that went meanwhile or are being stored anew; how many."""
        back = 0
        while segment.returning and segment.state == "live":
            entry = segment.returning.pop()
            if self.resting.holds(entry):
                if pending(entry.key):
                    self.forget([entry])
                else:
                    self.resting.drop(entry)
                    self.live.put(entry)
                    self.order.add(entry, segment.medium)
                    back += 1
            yield 1
        return back

    def room(self, nbytes: int, peer: Peer, wanted: int, allowed: int) -> Iterator[Location]:
        """Slots for at least `wanted` chunks, if there is room: from the holes, then by evicting, several at a time. `allowed`: so many
        chunks more there may be."""
        left = MAX_SEARCH
        met: list[Entry] = []
        while True:
            while (most := min(allowed, max(wanted, 1))) > 0 and (free := self.placement.take(nbytes, peer, most)):
                allowed, wanted = allowed - len(free), wanted - len(free)
                yield from free
            if left > 0 and self._drain_some(max(wanted, 1)):
                left -= max(wanted, DRAIN_PIECE)
                continue
            coldest = self.order.coldest(peer.medium)
            victims, equal, passed = self.placement.victims(coldest, nbytes, max(wanted, 1), peer)
            met += passed
            if len(met) > MAX_PASSED:
                self.work += len(met) // 4
                self.touch(met[::-1])
                met = []
            left -= len(victims) + len(passed) // 8
            if not victims or left < 0:
                return
            self._evict(victims)
            if equal:
                wanted -= len(victims)
                for victim in victims:
                    yield self.placement.reuse(victim, nbytes)
            else:
                allowed += len(victims)
                for victim in victims:
                    self.placement.free(victim)

    # ---- chunks go

    def forget(self, entries: list[Entry]) -> None:
        """Chunks are found no more; a slot that somebody reads is freed later."""
        for entry in entries:
            self._release(entry)
        self.work += 2 * len(entries)
        self._record_gone(entries)

    def clear(self, namespace: bytes) -> Steps:
        """No chunk of a namespace, or none at all with b"", is found any more. Each step frees some of their slots; the end tells how
        many chunks were live."""
        (live, chunks), (resting, _) = self.live.clear(namespace), self.resting.clear(namespace)
        taken = [spaces for spaces in (live, resting) if spaces]
        self._cleared += taken
        self.counters["removed"] += chunks
        return self._drain(taken, chunks)

    def empty(self, segment: Segment) -> Steps:
        """Forget the chunks of a segment, one a step; how many were live."""
        forgotten = 0
        while segment.occupants:
            offset, entry = segment.occupants.popitem()
            segment.staying[offset] = entry
            if not entry.reservation and not entry.doomed:
                forgotten += self.live.holds(entry)
                self.forget([entry])
            yield 1
        return forgotten

    def held(self, entry: Entry) -> None:
        """Somebody reads it."""
        self.placement.segments[entry.location.segment].leased += 1

    def unheld(self, entry: Entry) -> None:
        """Nobody reads it any more."""
        self.work += 1
        self.placement.segments[entry.location.segment].leased -= 1
        if entry.doomed:
            self.placement.free(entry)

    # ---- inside

    def _release(self, entry: Entry) -> None:
        """Unlink a chunk, be it live, resting or cleared."""
        if not self.live.drop(entry):
            self.resting.drop(entry)
        self.order.remove(entry)
        if entry.leases:
            entry.doomed = True
        else:
            self.placement.free(entry)

    def _evict(self, victims: list[Entry]) -> None:
        """Unlink chunks nobody reads; their slots are the caller's to free or reuse."""
        for victim in victims:
            self.live.drop(victim)
            self.order.remove(victim)
            self.placement.segments[victim.location.segment].evictions += 1
        self.work += len(victims)
        self.counters["evicted"] += len(victims)
        self._record_gone(victims)

    def _record_gone(self, entries: list[Entry]) -> None:
        """These are live no more. One whose key was stored again since it was cleared has its record already."""
        gone = [entry.key for entry in entries if not (self._cleared and entry.key in self.live)]
        if gone:
            self.records.append(Gone(gone))

    def _drain(self, taken: list[Spaces], chunks: int) -> Steps:
        """Free the slots of cleared chunks."""
        for spaces in taken:
            while spaces:
                yield self._drain_piece(spaces)
            self._cleared = [others for others in self._cleared if others is not spaces]
        return chunks

    def _drain_some(self, wanted: int) -> bool:
        """Free some slots of cleared chunks, whoever cleared them; False if there are none."""
        drained = 0
        for spaces in self._cleared:
            while spaces and drained < wanted:
                drained += self._drain_piece(spaces)
        return drained > 0

    def _drain_piece(self, spaces: Spaces) -> int:
        """A few cleared chunks: those that still have their slots give them back. How many were looked at."""
        entries: list[Entry] = []
        while spaces and len(entries) < DRAIN_PIECE:
            namespace = next(reversed(spaces))
            entries.append(spaces[namespace].popitem()[1])
            if not spaces[namespace]:
                del spaces[namespace]
        self.forget([entry for entry in entries if not entry.doomed and self.placement.has(entry)])
        return len(entries)
