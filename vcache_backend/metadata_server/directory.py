"""The directory: which chunk lies where, who writes it and who reads it. A pure state machine.

No socket, no thread, no file: it takes a clock, returns replies, and leaves in `records` what the journal must hold
before the replies may leave. Rules of DESIGN.md kept here: nobody sees a chunk before commit (1); a leased slot is never
reused before its lease ends (2); a reserved slot comes back only when its writer says so or its process is gone (3).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import count, islice
from typing import get_args

import msgspec

from vcache_backend.metadata_server import journal
from vcache_backend.metadata_server.allocator import padded
from vcache_backend.metadata_server.awaited import Awaited
from vcache_backend.metadata_server.backlog import Backlog, Job, Steps
from vcache_backend.metadata_server.chunks import Chunks, Spaces
from vcache_backend.metadata_server.claims import Claims
from vcache_backend.metadata_server.epochs import Epochs
from vcache_backend.metadata_server.eviction import EvictionPolicy
from vcache_backend.metadata_server.journal import ProcessId
from vcache_backend.metadata_server.leases import Leases
from vcache_backend.metadata_server.messages import (
    GRACE_SECONDS,
    MAX_SLOTS,
    RANK_BYTES,
    ChunkKey,
    Leased,
    Lendable,
    Location,
    Medium,
    Pin,
    Refusal,
    Reserved,
    SegmentId,
    SegmentInfo,
    ToSave,
)
from vcache_backend.metadata_server.placement import MAX_SEARCH, Entry, Placement, Segment
from vcache_backend.metadata_server.reservations import MAX_RESERVATIONS_PER_CLIENT, Reservations
from vcache_backend.metadata_server.saving import MAX_SCAN, Saver, Saving

BACKGROUND_EVICTIONS = 256
"""Most chunks one tick evicts for the watermarks, so that no request waits long behind it."""
SNAPSHOT_SLICE = 2048
"""Chunks in one record of a snapshot: about a millisecond of the server's time."""
DRAIN_PIECE = 32
"""Cleared chunks whose slots come back together."""
MAX_PASSED = 512
"""Who passed over more chunks in use than this in search of victims makes them recent, so that the next search does not meet them."""


MAX_AVOIDED = 1024
"""With more, a client's list of segments that it cannot use is rid of those that are not there."""


class Client(msgspec.Struct, frozen=True):
    """One connection: its number, the process behind it, the device it prefers and the segments it cannot use."""

    id: int
    process: ProcessId
    device: str
    medium: Medium
    avoids: set[SegmentId] = msgspec.field(default_factory=set)


class Limits(msgspec.Struct, frozen=True):
    """Times in seconds; see `ServerConfig`."""

    lease_seconds: float = 10.0
    reservation_seconds: float = 30.0
    max_chunks: int = 4_000_000
    low_water: float = 0.0
    high_water: float = 0.0
    save_ahead: float = 0.125


class Directory:
    """All methods are called from the server's loop, each for a bounded time. `now` is a monotonic clock in seconds.

    What takes longer (`clear`, `drop_segment`, `disconnect`) is a `Job`, which `go_on` ends in later turns; what is cleared nobody
    sees from the first one on. `work` counts the entries that were touched, roughly: a microsecond each.

    Ids of leases and reservations count up from `first_id`, near which no earlier life of the server had any; generations from the
    newest that `restore` brings.
    """

    def __init__(self, policy: EvictionPolicy, limits: Limits, now: Callable[[], float], first_id: int = 1) -> None:
        self._now = now
        self._limits = limits
        self._policy = policy
        self._ids = count(first_id)
        self._generations = count(1)
        self._live = Chunks()
        self._cleared: list[Spaces] = []
        self._awaited = Awaited()
        self.placement = Placement(lambda: next(self._generations))
        self.leases = Leases(limits.lease_seconds, self._held, self._unheld)
        self.backlog = Backlog()
        self.work = 0
        self.reservations = Reservations(limits.reservation_seconds)
        self._claims = Claims()
        self.epochs = Epochs()
        self._saving = Saving(limits.save_ahead, self.placement, self.leases)
        self.counters: Counter[str] = Counter()
        self._reserves_from = 0.0
        self.records: list[journal.Record] = []

    def __len__(self) -> int:
        """Committed chunks."""
        return len(self._live)

    # ---- reading

    def lookup(self, keys: list[ChunkKey], ranks: int = 1) -> int:
        """How many leading chunks all ranks have. At most `MAX_LOOKED_UP` keys times ranks."""
        live, everywhere, found = self._live.beside(keys), self._live, 0
        if ranks == 1:
            for key in keys:
                if key not in live and key not in everywhere:
                    break
                found += 1
        else:
            suffixes = [rank.to_bytes(RANK_BYTES, "big") for rank in range(ranks)]
            for key in keys:
                stem = key[:-RANK_BYTES]
                if not all(stem + suffix in live or stem + suffix in everywhere for suffix in suffixes):
                    break
                found += 1
        self.work += (found + 1) * ranks // 4
        self.counters["lookup_chunks"] += len(keys)
        self.counters["lookup_hits"] += found
        return found

    def contains(self, keys: list[ChunkKey]) -> list[bool]:
        """Is each of them there?"""
        live, everywhere = self._live.beside(keys), self._live
        self.work += len(keys) // 4
        return [key in live or key in everywhere for key in keys]

    def acquire(self, client: Client, keys: list[ChunkKey]) -> Leased:
        """Lease the leading run. It becomes recent, its first chunk most: tails are evicted before what they hang on."""
        live, everywhere = self._live.beside(keys), self._live
        entries: list[Entry] = []
        if not self.leases.full(client.id, len(keys)):
            for key in keys:
                entry = live.get(key) or everywhere.get(key)
                if entry is None:
                    break
                entries.append(entry)
        for entry in reversed(entries):
            self._policy.touch(entry)
        self.work += len(entries)
        self.counters["acquire_chunks"] += len(keys)
        self.counters["acquire_hits"] += len(entries)
        if not entries:
            return Leased(0, 0.0, [])
        lease = next(self._ids)
        self.leases.grant(lease, client.id, list(dict.fromkeys(entries)), self._now())
        return Leased(lease, self._limits.lease_seconds, [entry.location for entry in entries])

    def renew(self, client: Client, lease: int) -> bool:
        """Full time again for a lease that still holds."""
        return self.leases.renew(lease, self._now())

    def release(self, client: Client, lease: int) -> bool:
        """End a lease; did it hold until now?"""
        return self.leases.release(lease, self._now())

    def touch(self, keys: list[ChunkKey]) -> int:
        """Make chunks recent, the first one most; how many are there."""
        there = self._there(keys)
        for entry in reversed(there):
            self._policy.touch(entry)
        return len(there)

    # ---- saving

    def save(self, client: Client, namespace: bytes, rank: int, limit: int) -> ToSave:
        """Lease up to `limit` chunks that should be saved before they are evicted. They stay as cold as they are."""
        now = self._now()
        self.leases.expire(now)
        saver = Saver(namespace, rank, client.device)
        self._saving.asked(saver, client.id, now)
        if self.leases.full(client.id):
            return ToSave(0, 0.0, [], [])
        coldest = self._policy.victims(client.medium)
        offered = filter(self._live.holds, coldest) if self._cleared else coldest
        entries = self._saving.choose(saver, client.medium, offered, limit)
        self.work += MAX_SCAN // 4
        if not entries:
            return ToSave(0, 0.0, [], [])
        lease = next(self._ids)
        self.leases.grant(lease, client.id, entries, now)
        for entry in entries:
            entry.saving = lease
        self.counters["save_offered"] += len(entries)
        return ToSave(lease, self._limits.lease_seconds, [e.key for e in entries], [e.location for e in entries])

    def saved(self, keys: list[ChunkKey]) -> int:
        """The offload tier has these: not to be offered again, and to be evicted before others. How many are here."""
        there = self._there(list(dict.fromkeys(keys)))
        for entry in there:
            self.counters["saved"] += not self._saving.is_saved(entry)
            self._saving.mark(entry)
        return len(there)

    def unsaved(self, namespace: bytes) -> None:
        """What of this namespace was said to be saved may not be: it is offered again."""
        self._saving.doubt(namespace)

    # ---- writing

    def reserve(self, client: Client, keys: list[ChunkKey], nbytes: int, spare: bool = False) -> Reserved:
        """One slot of `nbytes` a key: own device, peers with room, evict. A key that is there or on its way gets none, and neither does
        one after `MAX_SLOTS` others."""
        if self.reservations.full(client.id):
            reason = f"{MAX_RESERVATIONS_PER_CLIENT} reservations of this client are open; commit or abort some"
            return Reserved(0, 0.0, [int(Refusal.FULL)] * len(keys), reason)
        if self._now() < self._reserves_from:
            return Reserved(0, 0.0, [int(Refusal.FULL)] * len(keys), "the server has just started again; try later")
        slots: list[Location | int] = []
        entries: list[Entry] = []
        reservation = next(self._ids)
        refusal, reason = self._refusal(client, nbytes)
        self.touch(keys)  # those that are there are in use: they must not make room for the others
        wanted = min(MAX_SLOTS, sum(key not in self._live and not self.reservations.pending(key) for key in set(keys)))
        rooms = self._rooms(nbytes, client, wanted, spare)
        for key in keys:
            if key in self._live:
                slots.append(int(Refusal.EXISTS))
                continue
            if self.reservations.pending(key):
                slots.append(int(Refusal.BUSY))
                continue
            if refusal is None and len(entries) == MAX_SLOTS:
                refusal, reason = (
                    Refusal.FULL,
                    f"one request reserves at most {MAX_SLOTS:,} slots; reserve the others with another one",
                )
            location = None if refusal is not None else next(rooms, None)
            if location is None:
                if refusal is None:
                    refusal, reason = Refusal.FULL, _full(nbytes, client.medium)
                slots.append(int(refusal))
                self.counters[f"refused_{refusal.name.lower()}"] += 1
                continue
            entry = Entry(key, location, reservation)
            self.placement.occupy(entry)
            self.reservations.announce(key, reservation)
            entries.append(entry)
            slots.append(location)
        if not entries:
            return Reserved(0, 0.0, slots, reason)
        self.reservations.open(reservation, client.id, client.process, entries, self._now())
        locations = [entry.location for entry in entries]
        self.records.append(journal.Held(reservation, client.process, [entry.key for entry in entries], locations))
        self.work += 2 * len(entries)
        self.counters["reserved"] += len(entries)
        return Reserved(reservation, self._limits.reservation_seconds, slots, reason)

    def commit(self, client: Client, reservation: int, prefix: list[ChunkKey]) -> int:
        """Publish a reservation of this client; how many chunks are visible. Void: 0, and its slots are free: its writer is done."""
        open_ = self.reservations.get(reservation)
        if open_ is None or open_.client != client.id or self._now() > open_.deadline:
            self.abort(client, reservation)
            return 0
        self.reservations.close(reservation)
        self.records.append(journal.Published(reservation))
        self._awaited.forget([entry.key for entry in open_.entries])
        draining: list[Entry] = []
        for entry in reversed(open_.entries):
            segment = self.placement.segments[entry.location.segment]
            entry.reservation = 0
            segment.reserved -= 1
            self._live.put(entry)
            self._policy.add(entry, segment.medium)
            if segment.draining:
                draining.append(entry)
        self._forget(draining)
        self.work += len(open_.entries)
        self.counters["committed"] += len(open_.entries)
        self.touch(prefix)
        return len(open_.entries) - len(draining)

    def abort(self, client: Client, reservation: int) -> int:
        """Free the slots of a reservation of this process, since none of its copies runs any more; how many."""
        open_ = self.reservations.get(reservation)
        if open_ is None or open_.process != client.process:
            return 0
        return self._give_back(reservation)

    def set_pin(self, keys: list[ChunkKey], pin: Pin) -> int:
        """Set the pin of those that are there; how many."""
        there = self._there(keys)
        for entry in reversed(there):
            entry.pin = pin
            self._policy.add(entry, self.placement.segments[entry.location.segment].medium)
        self.records.append(journal.Pinned([entry.key for entry in there], int(pin)))
        return len(there)

    def remove(self, keys: list[ChunkKey], force: bool = True) -> int:
        """Forget chunks; the slot of a leased one is freed when its last lease ends. How many were there.

        Without `force` those that are leased or hard-pinned, and those whose segment is not back yet, stay.
        """
        there = self._there(list(dict.fromkeys(keys)))
        if not force:
            self.leases.expire(self._now())
            there, keys = [entry for entry in there if entry.evictable], []
        self._forget(there)
        resting = self._awaited.forget(keys)
        if resting:
            self.records.append(journal.Gone(resting))
        self.counters["removed"] += len(there)
        return len(there)

    def clear(self, namespace: bytes, reset: bool = False) -> Job:
        """Forget all chunks of a namespace (all chunks with b""), also such as are being written: their reservations are void. Nobody
        sees them from here on, and they are gone when the job is done. Its `count`: how many. `reset`: raise its epoch."""
        self.reservations.void(self.reservations.of_namespace(namespace))
        if reset:
            self.raise_epoch(namespace)
        spaces, chunks = self._live.clear(namespace)
        if spaces:
            self._cleared.append(spaces)
        resting = self._awaited.forget([key for key in list(self._awaited.keys()) if key.startswith(namespace)])
        if resting:
            self.records.append(journal.Gone(resting))
        self.counters["removed"] += chunks
        return self._begin(self._drain(spaces, chunks))

    def raise_epoch(self, namespace: bytes) -> None:
        """Nothing is found again that was offloaded of a namespace so far, or of all with b""."""
        self.epochs.advance(namespace)
        self.records.append(journal.Epochs(self.epochs.all()))

    # ---- clients and time

    def disconnect(self, client: Client) -> None:
        """The connection is gone: its leases end, see `GRACE_SECONDS`; its reservations are void, their slots quarantined."""
        self._begin(self.leases.drop_client(client.id, self._now()))
        self._saving.drop_client(client.id)
        self._claims.drop_client(client.id)
        self.reservations.void(self.reservations.of_client(client.id))

    def process_gone(self, process: ProcessId) -> None:
        """The process is really gone, so nothing of it writes any more: its void reservations' slots are free, soon."""
        self._begin(self._free_slots_of(process))

    def quarantined_processes(self) -> set[ProcessId]:
        """Processes whose death the directory waits for."""
        return set(self.reservations.processes())

    def tick(self) -> None:
        """Whatever time brings: leases and reservations end, watermarks are kept."""
        now = self._now()
        self.leases.expire(now)
        overdue = self.reservations.overdue(now)
        self.reservations.void(overdue)
        self.counters["expired_reservations"] += len(overdue)
        for medium in get_args(Medium):
            self._keep_watermarks(medium)
        for segment in self.placement.draining():
            self._close(segment)

    @property
    def unfinished(self) -> bool:
        """Is there something for `go_on` to do?"""
        return bool(self.backlog) or self.leases.letting_go

    def go_on(self, work: int) -> None:
        """Some of what earlier turns left: about `work` entries."""
        self.work += self.backlog.run(work)
        self.leases.let_go(work)

    # ---- segments

    def lend(self, client: Client, nbytes: int) -> Lendable:
        """What is missing of `nbytes` on the client's device and nobody else is about to make: the client may, soon."""
        live = sum(segment.nbytes for segment in self.placement.segments.values() if segment.device == client.device)
        absent = sum(info.nbytes for info in self.absent_segments().values() if info.device == client.device)
        claim = next(self._ids)
        lendable = self._claims.grant(claim, client.id, client.device, nbytes - live - absent, self._now())
        return Lendable(claim if lendable else 0, lendable)

    def redeem(self, client: Client, claim: int, device: str, nbytes: int) -> bool:
        """A segment made under a claim of this client has come, which ends the claim; False if it is too late or too large."""
        return self._claims.redeem(claim, client.id, device, nbytes, self._now())

    def add_segment(self, info: SegmentInfo) -> int:
        """A segment is usable from now on. Returns how many chunks it brings back from before a restart."""
        if info.id in self.placement.segments:
            return 0
        written, chunks = self._awaited.take(info)
        overtaken = [entry.key for entry in chunks if self.reservations.pending(entry.key)]
        chunks = [entry for entry in chunks if not self.reservations.pending(entry.key)]
        self.placement.segments[info.id] = Segment(info, written + chunks)
        self.records.append(journal.Gone(overtaken))
        self.records.append(journal.SegmentAdded(info.id, info.device, info.medium, info.nbytes))
        for entry in chunks:
            self._live.put(entry)
            self._policy.add(entry, info.medium)
        return len(chunks)

    def drop_segment(self, id_: SegmentId) -> Job:
        """Evict the segment's chunks and take no new ones. Its `count`: chunks evicted. When the job is done and nobody reads or writes
        there any more, the segment is gone; else some `tick` later.

        Slots in quarantine are not waited for: whoever still writes there has the memory to itself."""
        segment = self.placement.segments[id_]
        segment.draining = True
        return self._begin(self._empty(segment))

    def avoid(self, client: Client, id_: SegmentId) -> int:
        """No slot there for this client, which cannot map the segment, should it come back, too; how many it avoids."""
        if len(client.avoids) >= MAX_AVOIDED:
            client.avoids.intersection_update(self.placement.segments)
        client.avoids.add(id_)
        return len(client.avoids)

    def absent_segments(self) -> dict[SegmentId, SegmentInfo]:
        """Segments of before a restart whose fd nobody has offered yet."""
        return self._awaited.segments()

    def forget_absent(self, ids: Iterable[SegmentId]) -> int:
        """Stop waiting for these; how many chunks are lost. Their memory must not be used again: somebody may still write there."""
        lost = 0
        for id_ in ids:
            written, chunks = self._awaited.give_up(id_)
            self.reservations.let_go(written)
            self.records.append(journal.SegmentGone(id_))
            lost += chunks
        return lost

    def segment_infos(self) -> list[SegmentInfo]:
        """Every segment, live, draining and absent, with its occupancy."""
        self.work += len(self.placement.segments)
        return [segment.info() for segment in self.placement.segments.values()] + self._awaited.infos()

    # ---- journal

    def restore(self, state: journal.State) -> None:
        """Take over what an earlier server knew. Segments are absent until offered again; reservations are void."""
        self._generations = count(1 + state.generation)
        self.epochs.restore(state.epochs)
        written = self._awaited.restore(state)
        if state.segments:
            # Who got a lease from the earlier server may count on it.
            self._reserves_from = self._now() + GRACE_SECONDS
        for id_, held in state.held.items():
            self.reservations.restore(id_, held.process, written[id_])

    def snapshot(self) -> Iterator[journal.Record]:
        """The whole state as records, a slice at a time. Requests may change the state in between if they are recorded too."""
        newest = next(self._generations)
        yield journal.Epochs(self.epochs.all())
        live, absent = list(self.placement.segments.values()), self._awaited.contents()
        reservations = self.reservations.items()
        yield journal.Counted(newest)
        for segment in live:
            if segment.id in self.placement.segments:
                yield journal.SegmentAdded(segment.id, segment.device, segment.medium, segment.nbytes)
        for info, entries in absent:
            if info.id in self._awaited.segments() or info.id in self.placement.segments:
                yield journal.SegmentAdded(info.id, info.device, info.medium, info.nbytes)
                yield _live([e for e in entries if self._awaited.rests(e) or self._live.holds(e)])
        for id_, held in reservations:
            if self.reservations.get(id_) is held:
                locations = [entry.location for entry in held.entries]
                yield journal.Held(id_, held.process, [entry.key for entry in held.entries], locations)
            else:
                yield _live([entry for entry in held.entries if self._live.holds(entry)])
        for piece in self._policy.pieces(SNAPSHOT_SLICE):
            yield _live([entry for entry in piece if self._live.holds(entry) and entry.location.generation < newest])

    # ---- inside

    def _refusal(self, client: Client, nbytes: int) -> tuple[Refusal | None, str]:
        """Why no chunk of this size can ever have a slot now, if so."""
        medium = client.medium
        largest = self.placement.largest_segment(medium, client.avoids)
        if not largest:
            advice = "start a worker with pool.segment_bytes > 0 or `vcache segment add`"
            return Refusal.NO_SEGMENT, f"no {medium} segment is registered; {advice}"
        if nbytes > largest:
            have = f"the largest {medium} segment has {largest:,} B"
            return Refusal.TOO_LARGE, f"a chunk needs {nbytes:,} B but {have}; set pool.segment_bytes >= {nbytes}"
        return None, ""

    def _rooms(self, nbytes: int, client: Client, wanted: int, spare: bool) -> Iterator[Location]:
        """Slots for at least `wanted` chunks, if there is room: from the holes, then by evicting, several at a time."""
        allowed = self._limits.max_chunks - len(self._live) - self.reservations.pending_count()
        left = MAX_SEARCH
        met: list[Entry] = []
        while True:
            most = min(allowed, max(wanted, 1))
            while most > 0 and (room := self.placement.take(nbytes, client.device, client.medium, most, client.avoids)):
                allowed, wanted = allowed - len(room), wanted - len(room)
                most = min(allowed, max(wanted, 1))
                yield from room
            if left > 0 and self._drain_some(max(wanted, 1)):
                left -= max(wanted, DRAIN_PIECE)
                continue
            coldest = self._next_to_go(client.medium, spare)
            victims, equal, passed = self.placement.victims(coldest, nbytes, max(wanted, 1), client.avoids)
            met += passed
            if len(met) > MAX_PASSED:
                self._pass_over(met)
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

    def _pass_over(self, passed: list[Entry]) -> None:
        """These are in use and stood before what may go: the next search does not meet them. What is being saved stays cold."""
        self.work += len(passed) // 4
        for entry in passed:
            if not entry.saving:
                self._policy.touch(entry)

    def _next_to_go(self, medium: Medium, spare: bool = False) -> Iterator[Entry]:
        """Chunks of a medium from the first to be evicted to the last, but for those that would be lost if that is to `spare` them; not
        to be used after the next change."""
        coldest = self._policy.victims(medium)
        if not self._saving.active(self._now()):
            return coldest
        return self._saving.only_saved(coldest) if spare else self._saving.prefer_saved(coldest)

    def _evict(self, victims: list[Entry]) -> None:
        """Unlink chunks nobody reads; their slots are the caller's to free or reuse."""
        lost = self._saving.lost(victims) if self._saving.active(self._now()) else 0
        for victim in victims:
            self._live.drop(victim)
            self._policy.remove(victim)
            self.placement.segments[victim.location.segment].evictions += 1
        self.work += len(victims)
        self.counters["evicted"] += len(victims)
        self.counters["evicted_unsaved"] += lost
        self._record_gone(victims)

    def _forget(self, entries: list[Entry]) -> None:
        """Unlink chunks, cleared ones too; a slot somebody reads is freed later."""
        for entry in entries:
            self._live.drop(entry)
            self._policy.remove(entry)
            if entry.leases:
                entry.doomed = True
            else:
                self.placement.free(entry)
        self.work += 2 * len(entries)
        self._record_gone(entries)

    def _record_gone(self, entries: list[Entry]) -> None:
        """These are live no more. One whose key was stored again since it was cleared has its record already."""
        gone = (
            [entry.key for entry in entries if entry.key not in self._live] if self._cleared else [entry.key for entry in entries]
        )
        if gone:
            self.records.append(journal.Gone(gone))

    def _begin(self, steps: Steps) -> Job:
        job = Job(steps)
        self.work += self.backlog.add(job)
        return job

    def _drain(self, spaces: Spaces, chunks: int) -> Steps:
        """Give back the slots of cleared chunks."""
        while spaces:
            yield self._drain_piece(spaces)
        self._cleared = [others for others in self._cleared if others is not spaces]
        return chunks

    def _drain_some(self, wanted: int) -> bool:
        """Give back some slots of cleared chunks, whoever cleared them; False if there are none."""
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
        self._forget([entry for entry in entries if not entry.doomed and self.placement.has(entry)])
        return len(entries)

    def _empty(self, segment: Segment) -> Steps:
        """Forget the chunks of a segment; it goes with the last."""
        forgotten = 0
        while segment.occupants:
            offset, entry = segment.occupants.popitem()
            segment.staying[offset] = entry
            if not entry.reservation and not entry.doomed:
                forgotten += self._live.holds(entry)
                self._forget([entry])
            yield 1
        self._close(segment)
        return forgotten

    def _close(self, segment: Segment) -> None:
        """The segment is gone, if nothing is left in it."""
        staying = segment.staying.values()
        waited_for = segment.occupants or not all(map(self.reservations.quarantined, staying))
        if not waited_for and self.placement.segments.get(segment.id) is segment:
            self.reservations.let_go(list(staying))
            del self.placement.segments[segment.id]
            self.records.append(journal.SegmentGone(segment.id))

    def _there(self, keys: list[ChunkKey]) -> list[Entry]:
        """The chunks that are there."""
        live, everywhere = self._live.beside(keys), self._live
        self.work += len(keys)
        return [entry for key in keys if (entry := live.get(key) or everywhere.get(key)) is not None]

    def _held(self, entry: Entry) -> None:
        self.placement.segments[entry.location.segment].leased += 1

    def _unheld(self, entry: Entry) -> None:
        self.work += 1
        self.placement.segments[entry.location.segment].leased -= 1
        if entry.doomed:
            self.placement.free(entry)

    def _free_slots_of(self, process: ProcessId) -> Steps:
        freed = 0
        while ids := self.reservations.of_writer(process):
            for id_ in ids:
                if self.reservations.get(id_) is None:
                    continue  # it was answered for meanwhile
                slots = self._give_back(id_)
                freed += slots
                yield slots
        return freed

    def _give_back(self, id_: int) -> int:
        reservation = self.reservations.close(id_)
        for entry in reservation.entries:
            if entry.location.segment in self.placement.segments:
                self.placement.free(entry)
            else:
                self._awaited.answered(entry)
        self.records.append(journal.Returned(id_))
        self.counters["aborted"] += len(reservation.entries)
        return len(reservation.entries)

    def _keep_watermarks(self, medium: Medium) -> None:
        used, total = self.placement.used_and_total(medium)
        if not self._limits.high_water or used <= total * (1 - self._limits.low_water):
            return
        victims: list[Entry] = []
        passed: list[Entry] = []
        for entry in islice(self._next_to_go(medium), MAX_SEARCH):
            if used <= total * (1 - self._limits.high_water) or len(victims) == BACKGROUND_EVICTIONS:
                break
            (victims if entry.evictable else passed).append(entry)
            used -= padded(entry.location.length) if entry.evictable else 0
        if len(passed) > MAX_PASSED:
            self._pass_over(passed)
        self._evict(victims)
        for victim in victims:
            self.placement.free(victim)


def _full(nbytes: int, medium: Medium) -> str:
    taken = f"every {medium} segment is full of chunks that are leased, reserved, pinned or beside such"
    return f"no slot of {nbytes:,} B: {taken}, or more than {MAX_SEARCH:,} of them would have to go at once"


def _live(entries: list[Entry]) -> journal.Live:
    return journal.Live([e.key for e in entries], [e.location for e in entries], [int(e.pin) for e in entries])
