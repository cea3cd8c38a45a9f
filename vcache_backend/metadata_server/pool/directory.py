"""The directory: the location, the writer and the readers of each chunk. A pure state machine.

The directory has no socket, thread or file. It reads the time from a function, returns replies, and
appends the changes to `records`, which the ledger must hold before the replies leave. Three rules
hold. (1) No client sees a chunk before its commit. (2) A leased slot is not reused before its lease
ends. (3) A reserved slot is freed only after its writer says so, or after the writer's process has
ended."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator
from itertools import count, repeat

from vcache_backend.config import ServerConfig
from vcache_backend.metadata_server import records
from vcache_backend.metadata_server.instances.resident_chunks import ResidentDirectory
from vcache_backend.metadata_server.pool.backlog import Steps
from vcache_backend.metadata_server.pool.contents import Contents
from vcache_backend.metadata_server.pool.epochs import Epochs
from vcache_backend.metadata_server.pool.leases import Leases
from vcache_backend.metadata_server.pool.placement import MAX_SEARCH, Peer
from vcache_backend.metadata_server.pool.promises import Promises
from vcache_backend.metadata_server.pool.segments import SegmentDirectory, added
from vcache_backend.metadata_server.pool.slots import Entry
from vcache_backend.protocol import messages as m

_ENOUGH = f"one request reserves at most {m.MAX_SLOTS:,} slots; reserve the others with another one"


class Directory(SegmentDirectory):
    """The state behind every request about chunks and segments. Called from the server's loop only;
    `now` is a monotonic clock in seconds.

    Each call takes a bounded time. `add_segment`, `clear`, `drop_segment` and `disconnect` leave
    long work to the backlog, for later turns of the loop.

    Ids of leases and reservations count up from `first_id`, far from the ids of earlier servers.
    Generations continue after the newest generation that `restore` brings."""

    def __init__(self, limits: ServerConfig, now: Callable[[], float], first_id: int = 1) -> None:
        super().__init__(limits, now, first_id)
        self._limits = limits
        self.leases = Leases(limits.lease_seconds, now, self.contents.let_go)
        self.promises = Promises(self.backlog, self.counters, now)
        self.residents = ResidentDirectory(
            self.backlog, self.counters, limits.max_chunks, self.promises.arrived
        )
        self.epochs = Epochs()
        self.records.append(records.Counted(0))

    def __len__(self) -> int:
        """The number of live chunks."""
        return len(self.contents.live)

    # ---- reading

    def find(self, request: m.Find) -> m.Found:
        """Find the leading chunks that are in the pool for all ranks, or resident in another
        instance's KV cache."""
        answer = self.residents.find(request, self.contents.live)
        self.counters["lookup_chunks"] += len(request.keys)
        self.counters["lookup_hits"] += len(answer.pooled)
        resident = (range(run.first, run.stop) for run in answer.residents)
        self.counters["resident_hits"] += len(set[int]().union(*resident))
        return answer

    def lacking(self, request: m.Find | m.Promise, keys: list[m.ChunkKey]) -> list[m.ChunkKey]:
        """The keys (of rank 0), each once, whose chunks the request's instance has not published,
        and the pool lacks for a rank."""
        own = self.residents.of(request.instance)
        keys = list(dict.fromkeys(keys))
        pairs = zip(keys, self.contents.live.of_all(keys, request.ranks), strict=True)
        return [key for key, stored in pairs if not stored and key not in own]

    def promise(self, client: Peer, request: m.Promise) -> m.Promised:
        """Note the chunks that a request computes. Ignores a request that began before a reset."""
        epoch = self.epochs.of(request.keys)
        lacking = self.lacking(request, request.keys) if request.epoch == epoch else []
        return m.Promised(self.promises.begin(client, request, lacking), epoch)

    def contains(self, keys: list[m.ChunkKey]) -> list[bool]:
        return list(map(self.contents.live.among(keys).__contains__, keys))

    def acquire(self, client: Peer, keys: list[m.ChunkKey]) -> m.Leased:
        """Lease the leading chunks. The lease's end makes them recent, the first most of all."""
        entries = (
            list[Entry]()
            if self.leases.full(client.id, len(keys))
            else self.contents.live.leading(keys)
        )
        self.counters["acquire_chunks"] += len(keys)
        self.counters["acquire_hits"] += len(entries)
        if not entries:
            return m.Leased(0, 0.0, [], self.epochs.of(keys))
        lease, each_once = next(self._ids), list(dict.fromkeys(entries))
        self.contents.hold(each_once)
        self.leases.grant(lease, client.id, each_once)
        locations = [entry.location for entry in entries]
        return m.Leased(lease, self._limits.lease_seconds, locations, self.epochs.of(keys))

    def touch(self, keys: list[m.ChunkKey]) -> int:
        """Make chunks recent, the first most of all. Returns how many are in the pool."""
        entries = self.contents.live_entries(keys)
        self.contents.use(entries)
        return len(entries)

    # ---- writing

    def reserve(self, client: Peer, keys: list[m.ChunkKey], nbytes: int) -> m.Reserved:
        """Reserve a slot of `nbytes` for each key: on the client's device, then on peers with room,
        then by eviction.

        A key gets a refusal instead if its chunk is stored or being written, or if it comes after
        the first `MAX_SLOTS` new keys."""
        epoch = self.epochs.of(keys)
        if reason := self._not_now(client):
            return m.Reserved(0, 0.0, [int(m.Refusal.FULL)] * len(keys), reason, epoch)
        reservation, live = next(self._ids), self.contents.live
        refusal, reason = self._refusal(client, nbytes)
        self.touch(keys)  # stored chunks are in use: do not evict them for the others
        stored, busy = live.among(keys), self.reservations.among(keys)
        wanted = [key for key in dict.fromkeys(keys) if key not in stored and key not in busy]
        leading = [] if refusal is not None else wanted[: m.MAX_SLOTS]
        allowed = self._limits.max_chunks - self.contents.placement.occupied()
        locations = self.contents.room(nbytes, client, len(leading), allowed)
        if refusal is None and len(locations) < len(wanted):
            refusal = m.Refusal.FULL
            full = _full(nbytes, client.medium)
            reason = full if len(locations) < len(leading) else _ENOUGH
        if refusal is not None:
            self.counters[f"refused_{refusal.name.lower()}"] += len(wanted) - len(locations)
        given = dict(zip(leading, locations, strict=False))
        slots = _answers(keys, given, live.among(keys), busy, refusal)
        self.promises.refused(
            key
            for key, slot in zip(keys, slots, strict=True)
            if isinstance(slot, int) and slot != m.Refusal.BUSY
        )
        if not given:
            return m.Reserved(0, 0.0, slots, reason, epoch)
        entries = self.contents.occupy(given, reservation)
        self.reservations.open(reservation, client.id, client.process, entries, self._now())
        self.records.append(records.Held(reservation, client.process, given))
        self.counters["reserved"] += len(given)
        return m.Reserved(reservation, self._limits.reservation_seconds, slots, reason, epoch)

    def commit(self, client: Peer, reservation: int, prefix: list[m.ChunkKey]) -> int:
        """Publish a reservation of this client. Returns how many chunks are visible.

        Returns 0 if the reservation is void, and frees its slots, since the writer has finished."""
        open_ = self.reservations.get(reservation)
        if open_ is None or open_.client != client.id or self._now() > open_.deadline:
            self.abort(client, reservation)
            return 0
        self.reservations.close(reservation)
        self.records.append(records.Published(reservation))
        visible = self.contents.publish(open_.entries)
        self.promises.stored([entry.key for entry in open_.entries], self.contents.live)
        self.counters["committed"] += len(open_.entries)
        self.touch(prefix)
        return visible

    def abort(self, client: Peer, reservation: int) -> int:
        """Free the slots of this process's reservation, whose copies are over. Returns how many."""
        open_ = self.reservations.get(reservation)
        if open_ is None or open_.process != client.process:
            return 0
        return self._give_back(reservation)

    def remove(self, keys: list[m.ChunkKey]) -> int:
        """Forget chunks. Returns how many. A leased chunk's slot is freed when its last lease
        ends."""
        entries = self.contents.live_entries(keys)
        resting = map(self.contents.resting.get, set(keys))
        self.contents.forget(entries + [entry for entry in resting if entry is not None])
        self.counters["removed"] += len(entries)
        return len(entries)

    def clear(self, namespace: bytes, reset: bool = False) -> int:
        """Forget all chunks of a namespace, also resident chunks; of all namespaces with b"".
        Returns how many.

        Slots are freed now or in later turns. The namespace's reservations become void. reset: also
        raise the namespace's epoch."""
        self.reservations.void(self.reservations.of_namespace(namespace))
        residents = self.residents.clear(namespace)
        self.promises.clear(namespace)
        if reset:
            self.raise_epoch(namespace)
        chunks, rest = self.contents.clear(namespace)
        self.backlog.begin(rest)
        return chunks + residents

    def raise_epoch(self, namespace: bytes) -> None:
        """Void all chunks that a namespace has offloaded or published so far; of all namespaces
        with b""."""
        self.residents.clear(namespace)
        self.promises.clear(namespace)
        self.epochs.advance(namespace)
        self.records.append(records.EpochTable(self.epochs.all()))

    # ---- clients and time

    def disconnect(self, client: Peer) -> None:
        """Handle a closed connection: its leases end after `GRACE_SECONDS`, its reservations become
        void and their slots quarantined."""
        self.backlog.later(self.leases.drop_client(client.id))
        self.claims.end(client.id)
        self.promises.drop_client(client)
        self.reservations.void(self.reservations.of_client(client.id))

    def process_gone(self, process: records.ProcessId) -> None:
        """Free the slots of a process's void reservations, now or in later turns. The process has
        ended and writes no more."""
        self.backlog.begin(self._free_slots_of(process))

    def tick(self) -> None:
        """End overdue leases and reservations, and remove dropped segments that are empty."""
        self.leases.expire()
        self.promises.tick()
        overdue = self.reservations.overdue(self._now())
        self.reservations.void(overdue)
        self.counters["expired_reservations"] += len(overdue)
        for segment in self.contents.placement.in_state("draining"):
            self._close(segment)

    # ---- ledger

    def restore(self, state: records.LedgerState) -> Steps:
        """Take over an earlier server's state in steps: the segments become absent, the chunks
        resting, the reservations void. ValueError, and nothing changes, if no pool can have it.

        The present chunks stay, unless the earlier server knew of resets: then all present chunks
        are cleared, since they may be older than a reset. Likewise its chunks are cleared if there
        were resets here."""
        read = Contents()
        try:
            yield from read.read(state)
        except ValueError:
            read.discard()
            raise
        own = [namespace for namespace, epoch in self.epochs.all().items() if epoch]
        if any(state.epochs.values()):
            self.clear(b"")
            if own:
                self.raise_epoch(b"")
            else:
                self.epochs.restore(state.epochs)
        state.epochs = self.epochs.all()
        for id_ in state.segments.keys() & self.segments.keys():
            read.resting.drop(read.placement.segments[id_].returning)
            read.placement.segments.pop(id_).let_go()
            state.apply(records.SegmentGone(id_))
        for namespace in own:
            self.backlog.later(read.clear(namespace)[1])
        self._ids = count(_clear_of(state.held, next(self._ids)))
        self.contents.adopt(read, state.generation)
        self.records.extend(state.records())
        for number, held in state.held.items():
            found = (
                self.segments[at.segment].occupants.get(at.offset) for at in held.chunks.values()
            )
            self.reservations.restore(number, held.process, [entry for entry in found if entry])
        if state.segments:
            # Clients may still read under leases of the earlier server.
            self._reserves_from = self._now() + m.GRACE_SECONDS
        for piece in state.pieces(records.SLICE):
            self.records.extend(self.contents.lying(piece))
            yield from repeat(None, len(piece))

    def still(self, record: records.Record) -> Iterator[records.Record]:
        """Yield the parts of an earlier record that are still true, for a compacted ledger.

        The new ledger also gets every change since the turn of its first record."""
        match record:
            case records.Counted(servers=servers):  # begins this or an earlier server's ledger
                yield records.Counted(next(self.contents.placement.generations), servers)
                yield records.EpochTable(self.epochs.all())
                yield from map(added, self.segments.values())
            case records.Held(reservation=number):
                if (held := self.reservations.get(number)) is not None:
                    chunks = {entry.key: entry.location for entry in held.entries}
                    yield records.Held(number, held.process, chunks)
                else:
                    yield from self.contents.lying(dict(reversed(record.chunks.items())))
            case records.Live(chunks=chunks):
                yield from self.contents.lying(chunks)

    # ---- inside

    def _refusal(self, client: Peer, nbytes: int) -> tuple[m.Refusal | None, str]:
        """Explain why no chunk of this size can get a slot now; (None, "") if a chunk can."""
        largest = max(
            (segment.capacity for segment in self.contents.placement.usable(client)), default=-1
        )
        if largest < 0:
            return m.Refusal.NO_SEGMENT, self._no_segment(client)
        if nbytes > largest:
            have = f"the largest {client.medium} segment has {largest:,} B"
            return (
                m.Refusal.TOO_LARGE,
                f"a chunk needs {nbytes:,} B but {have}; set pool.segment_bytes >= {nbytes}",
            )
        return None, ""

    def _no_segment(self, client: Peer) -> str:
        """Explain why this client has no segment to store in, and what to do about it."""
        placement, medium = self.contents.placement, client.medium
        unusable = any(segment.medium == medium for segment in placement.in_state("live"))
        absent = sum(segment.medium == medium for segment in placement.in_state("absent"))
        what = (
            f"this worker cannot map any {medium} segment of the pool"
            if unusable
            else f"no {medium} segment is registered"
        )
        if absent:
            what += (
                f", and {absent} from before the server's restart are gone, unless a worker has "
                "them mapped"
            )
        return f"{what}; start a worker with pool.segment_bytes > 0 or `vcache segment add`"

    def _free_slots_of(self, process: records.ProcessId) -> Steps:
        while ids := self.reservations.of_writer(process):
            for id_ in ids:
                if self.reservations.get(id_) is not None:  # else the writer answered meanwhile
                    yield from repeat(None, self._give_back(id_))

    def _give_back(self, id_: int) -> int:
        reservation = self.reservations.close(id_)
        for entry in reservation.entries:
            entry.segment.free(entry)
        self.records.append(records.Returned(id_))
        self.counters["aborted"] += len(reservation.entries)
        return len(reservation.entries)


def _clear_of(taken: Iterable[int], first: int) -> int:
    """Return a first number for ids, `first` or later, from which ids count up without meeting a
    number of `taken`."""
    for number in sorted(taken):
        if first <= number < first + (1 << 48):
            first = number + 1
    return first


def _answers(
    keys: list[m.ChunkKey],
    given: dict[m.ChunkKey, m.Location],
    stored: Container[m.ChunkKey],
    busy: set[m.ChunkKey],
    refusal: m.Refusal | None,
) -> list[m.Location | int]:
    """For each key a slot or a refusal: FULL also for a chunk that this request evicted."""
    slots: list[m.Location | int] = []
    for key in keys:
        if key in given and key not in busy:
            slots.append(given[key])
            busy.add(key)
        elif key in stored:
            slots.append(int(m.Refusal.EXISTS))
        else:
            full = m.Refusal.FULL if refusal is None else refusal
            slots.append(int(m.Refusal.BUSY if key in busy else full))
    return slots


def _full(nbytes: int, medium: m.Medium) -> str:
    taken = f"every {medium} segment is full of chunks that are leased, reserved or beside such"
    return f"no slot of {nbytes:,} B: {taken}, or more than {MAX_SEARCH:,} would have to go at once"
