"""The directory: which chunk lies where, who writes it and who reads it. A pure state machine.

No socket, no thread, no file: it takes a clock, returns replies, and leaves in `records` what the journal must hold
before the replies may leave. Rules kept here: nobody sees a chunk before commit (1); a leased slot is never reused before its lease
ends (2); a reserved slot comes back only when its writer says so or its process is gone (3).
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from itertools import repeat

from vcache_backend.config import ServerConfig
from vcache_backend.metadata_server import messages as m
from vcache_backend.metadata_server import records
from vcache_backend.metadata_server.backlog import Steps
from vcache_backend.metadata_server.epochs import Epochs
from vcache_backend.metadata_server.leases import Leases
from vcache_backend.metadata_server.placement import MAX_SEARCH, Entry, Peer, Segment
from vcache_backend.metadata_server.residents import Residents
from vcache_backend.metadata_server.segments import SegmentDirectory, added

_ENOUGH = f"one request reserves at most {m.MAX_SLOTS:,} slots; reserve the others with another one"


class Directory(SegmentDirectory):
    """All methods are called from the server's loop, each for a bounded time. `now` is a monotonic clock in seconds.

    What takes longer (`add_segment`, `clear`, `drop_segment`, `disconnect`) is begun, and `go_on` ends it in later turns.

    Ids of leases and reservations count up from `first_id`, near which no earlier life of the server had any; generations from the
    newest that `restore` brings.
    """

    def __init__(self, limits: ServerConfig, now: Callable[[], float], first_id: int = 1) -> None:
        super().__init__(limits, now, first_id)
        self._limits = limits
        self.leases = Leases(limits.lease_seconds, self.contents.let_go)
        self.residents = Residents(self.backlog, self.counters, limits.max_chunks)
        self.epochs = Epochs()

    def __len__(self) -> int:
        """Live chunks."""
        return len(self.contents.live)

    # ---- reading

    def lookup(self, keys: list[m.ChunkKey], ranks: int = 1) -> int:
        """How many leading chunks all ranks have. At most `MAX_LOOKED_UP` keys times ranks."""
        found = self.contents.live.leading_of_all(keys, ranks)
        self.counters["lookup_chunks"] += len(keys)
        self.counters["lookup_hits"] += found
        return found

    def find(self, request: m.Find) -> m.Found:
        """Which leading chunks are pooled, for all ranks, or resident in another instance."""
        found = self.residents.find(request, self.contents.live)
        self.counters["lookup_chunks"] += len(request.keys)
        self.counters["lookup_hits"] += len(found.pooled)
        self.counters["resident_hits"] += len(found.residents) - found.residents.count([])
        return found

    def contains(self, keys: list[m.ChunkKey]) -> list[bool]:
        """For each key whether its chunk is there."""
        return list(map(self.contents.live.among(keys).__contains__, keys))

    def segments_of(self, keys: list[m.ChunkKey]) -> list[str]:
        """For each key the segment in which its chunk lies, "" where it is not there."""
        there = self.contents.live.among(keys)
        return [entry.segment.id if (entry := there.get(key)) is not None else "" for key in keys]

    def acquire(self, client: Peer, keys: list[m.ChunkKey]) -> m.Leased:
        """Lease the leading run. It becomes recent when the lease ends, its first chunk most."""
        entries = list[Entry]() if self.leases.full(client.id, len(keys)) else self.contents.live.leading(keys)
        self.counters["acquire_chunks"] += len(keys)
        self.counters["acquire_hits"] += len(entries)
        if not entries:
            return m.Leased(0, 0.0, [])
        lease, each_once = next(self._ids), list(dict.fromkeys(entries))
        self.contents.hold(each_once)
        self.leases.grant(lease, client.id, each_once, self._now())
        return m.Leased(lease, self._limits.lease_seconds, [entry.location for entry in entries])

    def renew(self, lease: int) -> bool:
        """Full time again for a lease that still holds, whoever asks."""
        return self.leases.renew(lease, self._now())

    def release(self, lease: int) -> bool:
        """End a lease, whoever asks; whether it held until now."""
        return self.leases.release(lease, self._now())

    def touch(self, keys: list[m.ChunkKey]) -> int:
        """Make chunks recent, the first one most; how many are there."""
        there = self.contents.there(keys)
        self.contents.use(there)
        return len(there)

    # ---- writing

    def reserve(self, client: Peer, keys: list[m.ChunkKey], nbytes: int) -> m.Reserved:
        """One slot of `nbytes` a key: own device, peers with room, evict. A key that is there or on its way gets none, and neither does
        one after `MAX_SLOTS` others."""
        if reason := self._not_now(client):
            return m.Reserved(0, 0.0, [int(m.Refusal.FULL)] * len(keys), reason)
        reservation, live = next(self._ids), self.contents.live
        refusal, reason = self._refusal(client, nbytes)
        self.touch(keys)  # those that are there are in use: they must not make room for the others
        there, busy = live.among(keys), self.reservations.among(keys)
        wanted = [key for key in dict.fromkeys(keys) if key not in there and key not in busy]
        some = [] if refusal is not None else wanted[: m.MAX_SLOTS]
        locations = self.contents.room(nbytes, client, len(some), self._limits.max_chunks - len(live) - self.reservations.slots)
        if refusal is None and len(locations) < len(wanted):
            refusal = m.Refusal.FULL
            reason = _full(nbytes, client.medium) if len(locations) < len(some) else _ENOUGH
        if refusal is not None:
            self.counters[f"refused_{refusal.name.lower()}"] += len(wanted) - len(locations)
        stored, slots = some[: len(locations)], list[m.Location | int](locations)
        if len(stored) < len(keys):
            slots = _answers(keys, dict(zip(stored, locations, strict=True)), live.among(keys), busy, refusal)
        if not stored:
            return m.Reserved(0, 0.0, slots, reason)
        self._open(client, reservation, stored, locations)
        self.counters["reserved"] += len(stored)
        return m.Reserved(reservation, self._limits.reservation_seconds, slots, reason)

    def commit(self, client: Peer, reservation: int, prefix: list[m.ChunkKey]) -> int:
        """Publish a reservation of this client; how many chunks are visible. Void: 0, and its slots are free: its writer is done."""
        open_, holds = self.reservations.get(reservation), self.contents.live.holds
        if open_ is None or open_.client != client.id or self._now() > open_.deadline or not all(map(holds, open_.sources)):
            self.abort(client, reservation)
            return 0
        self.reservations.close(reservation)
        # As long as a chunk is found where it was, nobody has written there.
        self.contents.forget(open_.sources)
        self.records.append(records.Published(reservation))
        visible = self.contents.publish(open_.entries)
        self.counters["committed"] += len(open_.entries)
        self.touch(prefix)
        return visible

    def abort(self, client: Peer, reservation: int) -> int:
        """Free the slots of a reservation of this process, since none of its copies runs any more; how many."""
        open_ = self.reservations.get(reservation)
        if open_ is None or open_.process != client.process:
            return 0
        return self._give_back(reservation)

    def remove(self, keys: list[m.ChunkKey], force: bool = True) -> int:
        """Forget chunks; the slot of a leased one is freed when its last lease ends. How many were there.

        Without `force` those that are leased, and those whose segment is not back yet, stay.
        """
        there = self.contents.there(keys)
        if force:
            self.contents.forget([entry for key in dict.fromkeys(keys) if (entry := self.contents.resting.get(key)) is not None])
        else:
            self.leases.expire(self._now())
            there = [entry for entry in there if not entry.leases]
        self.contents.forget(there)
        self.counters["removed"] += len(there)
        return len(there)

    def clear(self, namespace: bytes, reset: bool = False) -> int:
        """Forget all chunks of a namespace (all chunks with b""), resident ones, too; how many were there. Their slots come back soon. Such
        as are being written are forgotten, too: their reservations are void. `reset`: raise its epoch."""
        self.reservations.void(self.reservations.of_namespace(namespace))
        residents = self.residents.clear(namespace)
        if reset:
            self.raise_epoch(namespace)
        chunks, rest = self.contents.clear(namespace)
        self.backlog.begin(rest)
        return chunks + residents

    def raise_epoch(self, namespace: bytes) -> None:
        """Nothing is found again that was offloaded, or computed in a KV cache, of a namespace so far, or of all with b""."""
        self.residents.clear(namespace)
        self.epochs.advance(namespace)
        self.records.append(records.EpochTable(self.epochs.all()))

    # ---- clients and time

    def disconnect(self, client: Peer) -> None:
        """The connection is gone: its leases end, see `GRACE_SECONDS`; its reservations are void, their slots quarantined."""
        self.backlog.later(self.leases.drop_client(client.id, self._now))
        self._claims.drop_client(client.id)
        self.reservations.void(self.reservations.of_client(client.id))

    def process_gone(self, process: records.ProcessId) -> None:
        """The process is really gone, so nothing of it writes any more: its void reservations' slots are free, soon."""
        self.backlog.begin(self._free_slots_of(process))

    def tick(self) -> None:
        """Whatever time brings: leases and reservations end, segments that were dropped go."""
        now = self._now()
        self.leases.expire(now)
        overdue = self.reservations.overdue(now)
        self.reservations.void(overdue)
        self.counters["expired_reservations"] += len(overdue)
        self._tick_segments(now)

    def go_on(self, steps: int) -> None:
        """Some of what earlier turns left."""
        self.backlog.run(steps)

    # ---- journal

    def restore(self, state: records.JournalState) -> None:
        """Take over what an earlier server knew. Segments are absent until offered again, their chunks rest in them; reservations are
        void."""
        self.epochs.restore(state.epochs)
        for number, entries in self.contents.restore(state).items():
            self.reservations.restore(number, state.held[number].process, entries)
        if state.segments:
            # Who got a lease from the earlier server may count on it.
            self._reserves_from = self._now() + m.GRACE_SECONDS

    def still(self, record: records.Record) -> Iterator[records.Record]:
        """What of a journal's record has to be in a shorter one, too, in which also stands what happens from the first one's turn on."""
        match record:
            case records.Counted():  # the first
                yield records.Counted(next(self.contents.placement.generations))
                yield records.EpochTable(self.epochs.all())
                yield from map(added, self.segments.values())
            case records.Held(reservation=number):
                if (held := self.reservations.get(number)) is not None:
                    yield records.Held(number, held.process, [e.key for e in held.entries], [e.location for e in held.entries])
                else:
                    yield from self.contents.lying(record.keys[::-1], record.locations[::-1])
            case records.Live(keys=keys, locations=locations):
                yield from self.contents.lying(keys, locations)

    # ---- inside

    def _refusal(self, client: Peer, nbytes: int) -> tuple[m.Refusal | None, str]:
        """Why no chunk of this size can ever have a slot now, if so."""
        largest = max((segment.end for segment in self.contents.placement.usable(client)), default=-1)
        if largest < 0:
            return m.Refusal.NO_SEGMENT, self._no_segment(client)
        if nbytes > largest:
            have = f"the largest {client.medium} segment has {largest:,} B"
            return m.Refusal.TOO_LARGE, f"a chunk needs {nbytes:,} B but {have}; set pool.segment_bytes >= {nbytes}"
        return None, ""

    def _no_segment(self, client: Peer) -> str:
        """Why there is none in which this client can store, and what to do about it."""
        placement, medium = self.contents.placement, client.medium
        unusable = any(segment.medium == medium for segment in placement.in_state("live"))
        absent = sum(segment.medium == medium for segment in placement.in_state("absent"))
        what = f"this worker can map no {medium} segment that is there" if unusable else f"no {medium} segment is registered"
        if absent:
            what += f", and {absent} of before the server's restart, unless somebody has them mapped, are gone"
        return f"{what}; start a worker with pool.segment_bytes > 0 or `vcache segment add`"

    def _free_slots_of(self, process: records.ProcessId) -> Steps:
        while ids := self.reservations.of_writer(process):
            for id_ in ids:
                if self.reservations.get(id_) is not None:  # else it was answered for meanwhile
                    yield from repeat(None, self._give_back(id_))

    def _give_back(self, id_: int) -> int:
        reservation = self.reservations.close(id_)
        late = dict[m.SegmentId, Segment]()
        for entry in reservation.entries:
            entry.segment.free(entry)
            if entry.end > entry.segment.nbytes - entry.segment.given_back:
                late[entry.segment.id] = entry.segment
        # What was written behind their ends was given back before.
        self.shortened += late.values()
        self.records.append(records.Returned(id_))
        self.counters["aborted"] += len(reservation.entries)
        return len(reservation.entries)


def _answers(
    keys: list[m.ChunkKey],
    given: dict[m.ChunkKey, m.Location],
    there: Container[m.ChunkKey],
    busy: set[m.ChunkKey],
    refusal: m.Refusal | None,
) -> list[m.Location | int]:
    """For each key its slot, or why it gets none: FULL also if it was there until others of its request needed the room."""
    slots: list[m.Location | int] = []
    for key in keys:
        if (location := given.pop(key, None)) is not None:
            slots.append(location)
            busy.add(key)
        elif key in there:
            slots.append(int(m.Refusal.EXISTS))
        else:
            slots.append(int(m.Refusal.BUSY if key in busy else m.Refusal.FULL if refusal is None else refusal))
    return slots


def _full(nbytes: int, medium: m.Medium) -> str:
    taken = f"every {medium} segment is full of chunks that are leased, reserved or beside such"
    return f"no slot of {nbytes:,} B: {taken}, or more than {MAX_SEARCH:,} of them would have to go at once"
