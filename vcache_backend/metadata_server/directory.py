"""The directory: which chunk lies where, who writes it and who reads it. A pure state machine.

No socket, no thread, no file: it takes a clock, returns replies, and leaves in `records` what the journal must hold
before the replies may leave. Rules kept here: nobody sees a chunk before commit (1); a leased slot is never reused before its lease
ends (2); a reserved slot comes back only when its writer says so or its process is gone (3).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import count, takewhile

import msgspec

from vcache_backend.metadata_server import messages as m
from vcache_backend.metadata_server import records, snapshot
from vcache_backend.metadata_server.backlog import Backlog, Steps, Task
from vcache_backend.metadata_server.contents import Contents
from vcache_backend.metadata_server.leases import Leases
from vcache_backend.metadata_server.placement import MAX_SEARCH, Entry, Peer, Segment
from vcache_backend.metadata_server.reservations import MAX_RESERVATIONS_PER_CLIENT, Claims, Reservations

MAX_AVOIDED = 1024
"""With more, a client's list of segments that it cannot use is rid of those that are not there."""


_ENOUGH = f"one request reserves at most {m.MAX_SLOTS:,} slots; reserve the others with another one"


class Limits(msgspec.Struct, frozen=True):
    """Times in seconds; see `ServerConfig`."""

    lease_seconds: float = 10.0
    reservation_seconds: float = 30.0
    max_chunks: int = 4_000_000


class Directory:
    """All methods are called from the server's loop, each for a bounded time. `now` is a monotonic clock in seconds.

    What takes longer (`add_segment`, `clear`, `drop_segment`, `disconnect`) is a task, which `go_on` ends in later turns.

    Ids of leases and reservations count up from `first_id`, near which no earlier life of the server had any; generations from the
    newest that `restore` brings.
    """

    def __init__(self, limits: Limits, now: Callable[[], float], first_id: int = 1) -> None:
        self._now = now
        self._limits = limits
        self._ids = count(first_id)
        self.contents = Contents()
        self.segments = self.contents.placement.segments
        self.records = self.contents.records
        self.counters = self.contents.counters
        self.leases = Leases(limits.lease_seconds, self.contents.held, self.contents.unheld)
        self.reservations = Reservations(limits.reservation_seconds)
        self.backlog = Backlog()
        self.epochs = snapshot.Epochs()
        self._claims = Claims()
        self._reserves_from = 0.0

    def __len__(self) -> int:
        """Live chunks."""
        return len(self.contents.live)

    @property
    def work(self) -> int:
        """How many entries were touched since the start."""
        return self.contents.work

    # ---- reading

    def lookup(self, keys: list[m.ChunkKey], ranks: int = 1) -> int:
        """How many leading chunks all ranks have. At most `MAX_LOOKED_UP` keys times ranks."""
        live = self.contents.live
        beside = live.beside(keys)
        if ranks == 1:
            found = sum(1 for _ in takewhile(beside.__contains__, keys))
            found += sum(1 for _ in takewhile(live.__contains__, keys[found:]))  # where keys are of several namespaces
        else:
            suffixes = [rank.to_bytes(m.RANK_BYTES, "big") for rank in range(ranks)]
            stems = (key[: -m.RANK_BYTES] for key in keys)
            there = (all(stem + suffix in beside or stem + suffix in live for suffix in suffixes) for stem in stems)
            found = sum(takewhile(bool, there))
        self.contents.work += (found + 1) * ranks // 4
        self.counters["lookup_chunks"] += len(keys)
        self.counters["lookup_hits"] += found
        return found

    def contains(self, keys: list[m.ChunkKey]) -> list[bool]:
        """For each key whether its chunk is there."""
        beside, everywhere = self.contents.live.beside(keys), self.contents.live
        self.contents.work += len(keys) // 4
        return [key in beside or key in everywhere for key in keys]

    def acquire(self, client: Peer, keys: list[m.ChunkKey]) -> m.Leased:
        """Lease the leading run. It becomes recent, its first chunk most."""
        beside, everywhere = self.contents.live.beside(keys), self.contents.live
        entries: list[Entry] = []
        if not self.leases.full(client.id, len(keys)):
            for key in keys:
                entry = beside.get(key) or everywhere.get(key)
                if entry is None:
                    break
                entries.append(entry)
        self.contents.touch(entries)
        self.contents.work += len(entries)
        self.counters["acquire_chunks"] += len(keys)
        self.counters["acquire_hits"] += len(entries)
        if not entries:
            return m.Leased(0, 0.0, [])
        lease = next(self._ids)
        self.leases.grant(lease, client.id, list(dict.fromkeys(entries)), self._now())
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
        self.contents.touch(there)
        return len(there)

    # ---- writing

    def reserve(self, client: Peer, keys: list[m.ChunkKey], nbytes: int) -> m.Reserved:
        """One slot of `nbytes` a key: own device, peers with room, evict. A key that is there or on its way gets none, and neither does
        one after `MAX_SLOTS` others."""
        if reason := self._not_now(client):
            return m.Reserved(0, 0.0, [int(m.Refusal.FULL)] * len(keys), reason)
        reservation = next(self._ids)
        live, pending = self.contents.live, self.reservations.pending
        refusal, reason = self._refusal(client, nbytes)
        self.touch(keys)  # those that are there are in use: they must not make room for the others
        wanted = min(m.MAX_SLOTS, sum(key not in live and not pending(key) for key in set(keys)))
        allowed = self._limits.max_chunks - len(live) - self.reservations.slots
        room = self.contents.room(nbytes, client, wanted, allowed)
        slots: list[m.Location | int] = []
        entries: list[Entry] = []
        for key in keys:
            if key in live or pending(key):
                slots.append(int(m.Refusal.EXISTS if key in live else m.Refusal.BUSY))
                continue
            enough = len(entries) == m.MAX_SLOTS
            location = None if refusal is not None or enough else next(room, None)
            if location is None:
                if refusal is None:
                    refusal, reason = m.Refusal.FULL, _ENOUGH if enough else _full(nbytes, client.medium)
                slots.append(int(refusal))
                self.counters[f"refused_{refusal.name.lower()}"] += 1
                continue
            entries.append(Entry(key, location, reservation))
            self.segments[location.segment].occupy(entries[-1])
            self.reservations.announce(key, reservation)
            slots.append(location)
        if not entries:
            return m.Reserved(0, 0.0, slots, reason)
        self.reservations.open(reservation, client.id, client.process, entries, self._now())
        self.records.append(records.Held(reservation, client.process, [e.key for e in entries], [e.location for e in entries]))
        self.contents.work += 2 * len(entries)
        self.counters["reserved"] += len(entries)
        return m.Reserved(reservation, self._limits.reservation_seconds, slots, reason)

    def commit(self, client: Peer, reservation: int, prefix: list[m.ChunkKey]) -> int:
        """Publish a reservation of this client; how many chunks are visible. Void: 0, and its slots are free: its writer is done."""
        open_ = self.reservations.get(reservation)
        if open_ is None or open_.client != client.id or self._now() > open_.deadline:
            self.abort(client, reservation)
            return 0
        self.reservations.close(reservation)
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
        there = self.contents.there(list(dict.fromkeys(keys)))
        if force:
            resting = self.contents.resting
            self.contents.forget([entry for key in dict.fromkeys(keys) if (entry := resting.get(key)) is not None])
        else:
            self.leases.expire(self._now())
            there = [entry for entry in there if entry.evictable]
        self.contents.forget(there)
        self.counters["removed"] += len(there)
        return len(there)

    def clear(self, namespace: bytes, reset: bool = False) -> Task:
        """Forget all chunks of a namespace (all chunks with b""), also such as are being written: their reservations are void. Nobody
        sees them from here on, and they are gone when the task is done. Its `count`: how many. `reset`: raise its epoch."""
        self.reservations.void(self.reservations.of_namespace(namespace))
        if reset:
            self.raise_epoch(namespace)
        return self._begin(self.contents.clear(namespace))

    def raise_epoch(self, namespace: bytes) -> None:
        """Nothing is found again that was offloaded of a namespace so far, or of all with b""."""
        self.epochs.advance(namespace)
        self.records.append(records.EpochTable(self.epochs.all()))

    # ---- clients and time

    def disconnect(self, client: Peer) -> None:
        """The connection is gone: its leases end, see `GRACE_SECONDS`; its reservations are void, their slots quarantined."""
        self._begin(self.leases.drop_client(client.id, self._now()))
        self._claims.drop_client(client.id)
        self.reservations.void(self.reservations.of_client(client.id))

    def process_gone(self, process: records.ProcessId) -> None:
        """The process is really gone, so nothing of it writes any more: its void reservations' slots are free, soon."""
        self._begin(self._free_slots_of(process))

    def tick(self) -> None:
        """Whatever time brings: leases and reservations end, segments that were dropped go."""
        now = self._now()
        self.leases.expire(now)
        overdue = self.reservations.overdue(now)
        self.reservations.void(overdue)
        self.counters["expired_reservations"] += len(overdue)
        for segment in self.contents.placement.in_state("draining"):
            self._close(segment)

    @property
    def unfinished(self) -> bool:
        """Whether there is something for `go_on` to do."""
        return bool(self.backlog.tasks or self.leases.ended)

    def go_on(self, work: int) -> None:
        """Some of what earlier turns left: about `work` entries."""
        self.contents.work += self.backlog.run(work)
        self.leases.let_go(work)

    # ---- segments

    def lend(self, client: Peer, nbytes: int) -> m.Lendable:
        """What is missing of `nbytes` on the client's device and nobody else is about to make: the client may, soon."""
        there = sum(segment.nbytes for segment in self.segments.values() if segment.device == client.device)
        claim = next(self._ids)
        lendable = self._claims.grant(claim, client.id, client.device, nbytes - there, self._now())
        return m.Lendable(claim if lendable else 0, lendable)

    def redeem(self, client: Peer, claim: int, device: str, nbytes: int) -> bool:
        """A segment made under a claim of this client has come, which ends the claim; False if it is too late or too large."""
        return self._claims.redeem(claim, client.id, device, nbytes, self._now())

    def add_segment(self, info: m.SegmentInfo) -> Task:
        """A segment is usable from now on. The task's `count`: how many chunks it brings back from before a restart."""
        segment = self.segments.get(info.id)
        if segment is None:
            segment = self.segments[info.id] = Segment(info)
            self.records.append(records.SegmentAdded(info.id, info.device, info.medium, info.nbytes))
        elif segment.state == "absent":
            segment.state = "live"
        return self._begin(self.contents.bring_back(segment, self.reservations.pending))

    def drop_segment(self, id_: m.SegmentId) -> Task:
        """Evict the segment's chunks and take no new ones. Its `count`: chunks evicted. When the task is done and nobody reads or
        writes there any more, the segment is gone; else some `tick` later.

        Slots in quarantine are not waited for: whoever still writes there has the memory to itself."""
        segment = self.segments[id_]
        segment.state = "draining"
        return self._begin(self._empty(segment))

    def avoid(self, client: Peer, id_: m.SegmentId) -> int:
        """No slot there for this client, which cannot map the segment, should it come back, too; how many it avoids."""
        if len(client.avoids) >= MAX_AVOIDED:
            client.avoids.intersection_update(self.segments)
        client.avoids.add(id_)
        return len(client.avoids)

    def absent_segments(self) -> list[m.SegmentId]:
        """Segments of before a restart whose fd nobody has offered yet."""
        return [segment.id for segment in self.contents.placement.in_state("absent")]

    def forget_absent(self, ids: Iterable[m.SegmentId]) -> int:
        """Stop waiting for these; how many chunks are lost. Their memory must not be used again: somebody may still write there."""
        lost = 0
        for id_ in ids:
            segment = self.segments.pop(id_)
            lost += sum(self.contents.resting.drop(entry) for entry in segment.returning)
            self.reservations.let_go([entry for entry in segment.occupants.values() if entry.reservation])
            self.records.append(records.SegmentGone(id_))
        return lost

    def segment_infos(self) -> list[m.SegmentInfo]:
        """Every segment, live, draining and absent, with its occupancy."""
        self.contents.work += len(self.segments)
        return [segment.info() for segment in self.segments.values()]

    # ---- journal

    def restore(self, state: records.JournalState) -> None:
        """Take over what an earlier server knew. Segments are absent until offered again; reservations are void."""
        snapshot.restore(state, self.contents, self.reservations, self.epochs)
        if state.segments:
            # Who got a lease from the earlier server may count on it.
            self._reserves_from = self._now() + m.GRACE_SECONDS

    def snapshot(self) -> Iterator[records.Record]:
        """The whole state as records, a slice at a time. Requests may change the state in between if they are recorded too."""
        return snapshot.snapshot(self.contents, self.reservations, self.epochs)

    # ---- inside

    def _begin(self, steps: Steps) -> Task:
        task = Task(steps)
        self.contents.work += self.backlog.add(task)
        return task

    def _not_now(self, client: Peer) -> str:
        """Why nothing at all is reserved for this client, if so."""
        if self.reservations.full(client.id):
            return f"{MAX_RESERVATIONS_PER_CLIENT} reservations of this client are open; commit or abort some"
        return "the server has just started again; try later" if self._now() < self._reserves_from else ""

    def _refusal(self, client: Peer, nbytes: int) -> tuple[m.Refusal | None, str]:
        """Why no chunk of this size can ever have a slot now, if so."""
        largest = self.contents.placement.largest_segment(client)
        if not largest:
            advice = "start a worker with pool.segment_bytes > 0 or `vcache segment add`"
            return m.Refusal.NO_SEGMENT, f"no {client.medium} segment is registered; {advice}"
        if nbytes > largest:
            have = f"the largest {client.medium} segment has {largest:,} B"
            return m.Refusal.TOO_LARGE, f"a chunk needs {nbytes:,} B but {have}; set pool.segment_bytes >= {nbytes}"
        return None, ""

    def _empty(self, segment: Segment) -> Steps:
        """Forget the chunks of a segment; it goes with the last."""
        forgotten = yield from self.contents.empty(segment)
        self._close(segment)
        return forgotten

    def _close(self, segment: Segment) -> None:
        """The segment is gone, if nothing is left in it."""
        staying = segment.staying.values()
        waited_for = segment.occupants or not all(map(self.reservations.quarantined, staying))
        if not waited_for and self.segments.get(segment.id) is segment:
            self.reservations.let_go(list(staying))
            del self.segments[segment.id]
            self.records.append(records.SegmentGone(segment.id))

    def _free_slots_of(self, process: records.ProcessId) -> Steps:
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
            self.contents.placement.free(entry)
        self.records.append(records.Returned(id_))
        self.counters["aborted"] += len(reservation.entries)
        return len(reservation.entries)


def _full(nbytes: int, medium: m.Medium) -> str:
    taken = f"every {medium} segment is full of chunks that are leased, reserved or beside such"
    return f"no slot of {nbytes:,} B: {taken}, or more than {MAX_SEARCH:,} of them would have to go at once"
