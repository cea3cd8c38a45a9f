"""The directory: which chunk lies where, who writes it and who reads it. A pure state machine.

No socket, no thread, no file: it takes a clock, returns replies, and leaves in `records` what the journal must hold
before the replies may leave. Rules of DESIGN.md kept here: nobody sees a chunk before commit (1); a leased slot is never
reused before its lease ends (2); a reserved slot comes back only when its writer says so or its process is gone (3).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import count

import msgspec

from vcache_backend.metadata_server import journal
from vcache_backend.metadata_server.allocator import padded
from vcache_backend.metadata_server.awaited import Awaited
from vcache_backend.metadata_server.claims import Claims
from vcache_backend.metadata_server.epochs import Epochs
from vcache_backend.metadata_server.eviction import EvictionPolicy
from vcache_backend.metadata_server.journal import ProcessId
from vcache_backend.metadata_server.leases import Leases
from vcache_backend.metadata_server.messages import (
    GRACE_SECONDS,
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
from vcache_backend.metadata_server.placement import Entry, Placement, Segment
from vcache_backend.metadata_server.reservations import MAX_RESERVATIONS_PER_CLIENT, Reservations
from vcache_backend.metadata_server.saving import Saver, Saving

BACKGROUND_EVICTIONS = 256
"""Most chunks one tick evicts for the watermarks, so that no request waits long behind it."""
SNAPSHOT_SLICE = 2048
"""Chunks in one record of a snapshot: about a millisecond of the server's time."""


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
    """All methods are called from the server's loop. `now` is a monotonic clock in seconds.

    Ids of leases and reservations count up from `first_id`, near which no earlier life of the server had any; generations from the
    newest that `restore` brings.
    """

    def __init__(self, policy: EvictionPolicy, limits: Limits, now: Callable[[], float], first_id: int = 1) -> None:
        self._now = now
        self._limits = limits
        self._policy = policy
        self._ids = count(first_id)
        self._generations = count(1)
        self._live: dict[ChunkKey, Entry] = {}
        self._awaited = Awaited()
        self.placement = Placement(lambda: next(self._generations))
        self.leases = Leases(limits.lease_seconds, self._unheld)
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
        """How many leading chunks all ranks have."""
        live, found = self._live, 0
        if ranks == 1:
            for key in keys:
                if key not in live:
                    break
                found += 1
        else:
            suffixes = [rank.to_bytes(RANK_BYTES, "big") for rank in range(ranks)]
            for key in keys:
                stem = key[:-RANK_BYTES]
                if not all(stem + suffix in live for suffix in suffixes):
                    break
                found += 1
        self.counters["lookup_chunks"] += len(keys)
        self.counters["lookup_hits"] += found
        return found

    def contains(self, keys: list[ChunkKey]) -> list[bool]:
        """Is each of them there?"""
        return [key in self._live for key in keys]

    def acquire(self, client: Client, keys: list[ChunkKey]) -> Leased:
        """Lease the leading run. It becomes recent, its first chunk most: tails are evicted before what they hang on."""
        entries: list[Entry] = []
        if not self.leases.full(client.id):
            for key in keys:
                entry = self._live.get(key)
                if entry is None:
                    break
                entries.append(entry)
        for entry in reversed(entries):
            self._policy.touch(entry.key)
        self.counters["acquire_chunks"] += len(keys)
        self.counters["acquire_hits"] += len(entries)
        if not entries:
            return Leased(0, 0.0, [])
        lease = next(self._ids)
        self.leases.grant(lease, client.id, entries, self._now())
        return Leased(lease, self._limits.lease_seconds, [entry.location for entry in entries])

    def renew(self, client: Client, lease: int) -> bool:
        """Full time again for a lease that still holds."""
        return self.leases.renew(lease, self._now())

    def release(self, client: Client, lease: int) -> bool:
        """End a lease; did it hold until now?"""
        return self.leases.release(lease, self._now())

    def touch(self, keys: list[ChunkKey]) -> int:
        """Make chunks recent, the first one most; how many are there."""
        there = [key for key in keys if key in self._live]
        for key in reversed(there):
            self._policy.touch(key)
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
        entries = self._saving.choose(saver, client.medium, self._coldest(), limit)
        if not entries:
            return ToSave(0, 0.0, [], [])
        lease = next(self._ids)
        self.leases.grant(lease, client.id, entries, now)
        for entry in entries:
            entry.saving = lease
        self.counters["save_offered"] += len(entries)
        return ToSave(lease, self._limits.lease_seconds, [e.key for e in entries], [e.location for e in entries])

    def saved(self, keys: list[ChunkKey]) -> int:
        """The store below has these: not to be offered again, and to be evicted before others. How many are here."""
        there = [entry for entry in map(self._live.get, dict.fromkeys(keys)) if entry is not None]
        for entry in there:
            self.counters["saved"] += not self._saving.is_saved(entry)
            self._saving.mark(entry)
        return len(there)

    def unsaved(self, namespace: bytes) -> None:
        """What of this namespace was said to be saved may not be: it is offered again."""
        self._saving.doubt(namespace)

    # ---- writing

    def reserve(self, client: Client, keys: list[ChunkKey], nbytes: int, spare: bool = False) -> Reserved:
        """One slot of `nbytes` a key: own device, peers with room, evict. A key that is there or on its way gets none."""
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
        wanted = sum(key not in self._live and not self.reservations.pending(key) for key in set(keys))
        rooms = self._rooms(nbytes, client, wanted, spare)
        for key in keys:
            if key in self._live:
                slots.append(int(Refusal.EXISTS))
                continue
            if self.reservations.pending(key):
                slots.append(int(Refusal.BUSY))
                continue
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
        for entry in reversed(open_.entries):
            entry.reservation = 0
            self._live[entry.key] = entry
            self._policy.add(entry.key, entry.pin)
        draining = [entry for entry in open_.entries if self.placement.segments[entry.location.segment].draining]
        self._forget(draining)
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
        there = [key for key in keys if key in self._live]
        for key in reversed(there):
            self._live[key].pin = pin
            self._policy.add(key, pin)
        self.records.append(journal.Pinned(there, int(pin)))
        return len(there)

    def remove(self, keys: list[ChunkKey], force: bool = True) -> int:
        """Forget chunks; the slot of a leased one is freed when its last lease ends. How many were there.

        Without `force` those that are leased or hard-pinned, and those whose segment is not back yet, stay.
        """
        there = [self._live[key] for key in dict.fromkeys(keys) if key in self._live]
        if not force:
            self.leases.expire(self._now())
            there, keys = [entry for entry in there if entry.evictable], []
        self._forget(there)
        resting = self._awaited.forget(keys)
        if resting:
            self.records.append(journal.Gone(resting))
        self.counters["removed"] += len(there)
        return len(there)

    def clear(self, namespace: bytes, reset: bool = False) -> int:
        """Forget all chunks of a namespace (all chunks with b""), also such as are being written: their reservations are void. `reset`:
        raise its epoch."""
        for id_, reservation in self.reservations.items():
            if reservation.client is not None and any(entry.key.startswith(namespace) for entry in reservation.entries):
                self.reservations.void(id_)
        if reset:
            self.raise_epoch(namespace)
        return self.remove([key for keys in (self._live, self._awaited.keys()) for key in keys if key.startswith(namespace)])

    def raise_epoch(self, namespace: bytes) -> None:
        """Nothing is found again that was offloaded of a namespace so far, or of all with b""."""
        self.epochs.advance(namespace)
        self.records.append(journal.Epochs(self.epochs.all()))

    # ---- clients and time

    def disconnect(self, client: Client) -> None:
        """The connection is gone: its leases end, see `GRACE_SECONDS`; its reservations are void, their slots quarantined."""
        self.leases.drop_client(client.id, self._now())
        self._saving.drop_client(client.id)
        self._claims.drop_client(client.id)
        for id_, reservation in self.reservations.items():
            if reservation.client == client.id:
                self.reservations.void(id_)

    def process_gone(self, process: ProcessId) -> None:
        """The process is really gone, so nothing of it writes any more: its void reservations' slots are free."""
        for id_, reservation in self.reservations.items():
            if reservation.process == process and reservation.client is None:
                self._give_back(id_)

    def quarantined_processes(self) -> set[ProcessId]:
        """Processes whose death the directory waits for."""
        return {reservation.process for _, reservation in self.reservations.items() if reservation.client is None}

    def tick(self) -> None:
        """Whatever time brings: leases and reservations end, watermarks are kept."""
        now = self._now()
        self.leases.expire(now)
        for id_ in self.reservations.overdue(now):
            self.reservations.void(id_)
            self.counters["expired_reservations"] += 1
        self._keep_watermarks()

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
            self._live[entry.key] = entry
            self._policy.add(entry.key, entry.pin)
        return len(chunks)

    def drop_segment(self, id_: SegmentId) -> tuple[int, bool]:
        """Evict the segment's chunks and take no new ones; (chunks evicted, is it gone?). Call again until it is.

        Slots in quarantine are not waited for: whoever still writes there has the memory to itself.
        """
        segment = self.placement.segments[id_]
        segment.draining = True
        entries = [entry for entry in segment.occupants.values() if not entry.reservation and not entry.doomed]
        self._forget(entries)
        quarantined = [entry for entry in segment.occupants.values() if self.reservations.quarantined(entry)]
        if len(quarantined) < len(segment.occupants):
            return len(entries), False
        self.reservations.let_go(quarantined)
        del self.placement.segments[id_]
        self.records.append(journal.SegmentGone(id_))
        return len(entries), True

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
        leased = Counter(segment for segment, _ in {(e.location.segment, e.location.offset) for e in self.leases.entries()})
        reserved = Counter(e.location.segment for _, r in self.reservations.items() for e in r.entries)
        infos = [
            segment.info(reserved=reserved[segment.id], leased=leased[segment.id]) for segment in self.placement.segments.values()
        ]
        return infos + self._awaited.infos()

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
        keys = list(self._policy.coldest_first())
        live, absent = list(self.placement.segments.values()), self._awaited.contents()
        reservations = self.reservations.items()
        yield journal.Counted(newest)
        for segment in live:
            if segment.id in self.placement.segments:
                yield journal.SegmentAdded(segment.id, segment.device, segment.medium, segment.nbytes)
        for info, entries in absent:
            if info.id in self._awaited.segments() or info.id in self.placement.segments:
                yield journal.SegmentAdded(info.id, info.device, info.medium, info.nbytes)
                yield _live([e for e in entries if self._awaited.rests(e) or self._live.get(e.key) is e])
        for id_, held in reservations:
            if self.reservations.get(id_) is held:
                locations = [entry.location for entry in held.entries]
                yield journal.Held(id_, held.process, [entry.key for entry in held.entries], locations)
            else:
                yield _live([entry for entry in held.entries if self._live.get(entry.key) is entry])
        for start in range(0, len(keys), SNAPSHOT_SLICE):
            slice_ = [self._live[key] for key in keys[start : start + SNAPSHOT_SLICE] if key in self._live]
            yield _live([entry for entry in slice_ if entry.location.generation < newest])

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
        while True:
            while (
                allowed > 0 and (location := self.placement.take(nbytes, client.device, client.medium, client.avoids)) is not None
            ):
                allowed, wanted = allowed - 1, wanted - 1
                yield location
            victims, equal = self.placement.victims(self._next_to_go(spare), nbytes, client.medium, max(wanted, 1), client.avoids)
            if not victims:
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

    def _coldest(self) -> Iterator[Entry]:
        return map(self._live.__getitem__, self._policy.victims())

    def _next_to_go(self, spare: bool = False) -> Iterator[Entry]:
        """Chunks from the first to be evicted to the last, but for those that would be lost if that is to `spare` them; not to be used
        after the next change."""
        coldest = self._coldest()
        if not self._saving.active(self._now()):
            return coldest
        return self._saving.only_saved(coldest) if spare else self._saving.prefer_saved(coldest)

    def _evict(self, victims: list[Entry]) -> None:
        """Unlink chunks nobody reads; their slots are the caller's to free or reuse."""
        for victim in victims:
            del self._live[victim.key]
            self._policy.remove(victim.key)
            self.placement.segments[victim.location.segment].evictions += 1
        self.counters["evicted"] += len(victims)
        if self._saving.active(self._now()):
            self.counters["evicted_unsaved"] += self._saving.lost(victims)
        self.records.append(journal.Gone([victim.key for victim in victims]))

    def _forget(self, entries: list[Entry]) -> None:
        """Unlink chunks; a slot somebody reads is freed later."""
        for entry in entries:
            del self._live[entry.key]
            self._policy.remove(entry.key)
            if entry.leases:
                entry.doomed = True
            else:
                self.placement.free(entry)
        if entries:
            self.records.append(journal.Gone([entry.key for entry in entries]))

    def _unheld(self, entry: Entry) -> None:
        if entry.doomed:
            self.placement.free(entry)

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

    def _keep_watermarks(self) -> None:
        used, total = self.placement.used_and_total()
        if not self._limits.high_water or used <= total * (1 - self._limits.low_water):
            return
        victims: list[Entry] = []
        for entry in self._next_to_go():
            if used <= total * (1 - self._limits.high_water) or len(victims) == BACKGROUND_EVICTIONS:
                break
            if entry.evictable:
                victims.append(entry)
                used -= padded(entry.location.length)
        if victims:
            self._evict(victims)
        for victim in victims:
            self.placement.free(victim)


def _full(nbytes: int, medium: Medium) -> str:
    return f"no slot of {nbytes:,} B: every {medium} segment is full of chunks that are leased, reserved, pinned or beside such"


def _live(entries: list[Entry]) -> journal.Live:
    return journal.Live([e.key for e in entries], [e.location for e in entries], [int(e.pin) for e in entries])
