"""A simple model of the directory: lists of slots and no cleverness, slow and easy to believe.

The tests drive `Directory` and this model side by side. The model never decides where a chunk goes
or which one is evicted: it checks that what the directory decided was allowed, and keeps what must
then be true."""

from __future__ import annotations

from dataclasses import dataclass, field

from vcache_backend.metadata_server.pool.placement import Peer
from vcache_backend.metadata_server.records import ProcessId
from vcache_backend.protocol.messages import GRACE_SECONDS, ChunkKey, Location

ALIGNMENT = 256


def chunk_key(number: int, rank: int = 0, namespace: bytes = b"namespac") -> ChunkKey:
    """A key as `hashing` would make it: namespace, hash, rank."""
    return ChunkKey(namespace + number.to_bytes(16, "big") + rank.to_bytes(2, "big"))


def room_of(nbytes: int) -> int:
    """Bytes a slot takes."""
    return (nbytes + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT


class FakeClock:
    """Seconds that pass only when told."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


class Memory:
    """The bytes of the segments. A writer fills its slot with a pattern that no other write ever
    used.
    """

    def __init__(self) -> None:
        self.bytes_of: dict[str, bytearray] = {}

    def create(self, segment: str, nbytes: int) -> None:
        self.bytes_of[segment] = bytearray(nbytes)

    def write(self, location: Location, token: int) -> None:
        memory = self.bytes_of[location.segment]
        end = location.offset + location.length
        assert 0 <= location.offset <= end <= len(memory), f"{location} leaves its segment"
        memory[location.offset : end] = pattern(token, location.length)

    def read(self, location: Location) -> bytes:
        end = location.offset + location.length
        return bytes(self.bytes_of[location.segment][location.offset : end])


def pattern(token: int, nbytes: int) -> bytes:
    return (token.to_bytes(8, "little") * (nbytes // 8 + 1))[:nbytes]


@dataclass(eq=False)
class Slot:
    """An occupied place. `state`: open (may be committed), void (quarantined), live, doomed
    (removed under a lease), cleared (seen by nobody, to be freed some time), resting (of before a
    restart, seen by nobody until it is back)."""

    key: ChunkKey
    location: Location
    token: int
    state: str

    @property
    def span(self) -> tuple[int, int]:
        return self.location.offset, self.location.offset + room_of(self.location.length)


@dataclass(eq=False)
class Held:
    """A lease, as the directory's table has it: it may be overdue until the table is looked at.

    `granted`: when, or when it was last renewed. `client`: None once its connection is gone;
    `orphan` until somebody renews it then."""

    client: int | None
    granted: float
    deadline: float
    slots: list[Slot]
    orphan: bool = False


@dataclass(eq=False)
class Written:
    """A reservation. `client` is None once it is void."""

    client: int | None
    process: ProcessId
    deadline: float
    slots: list[Slot]


@dataclass(eq=False)
class Place:
    """A segment."""

    device: str
    nbytes: int
    draining: bool = False

    @property
    def end(self) -> int:
        """Chunks lie before it."""
        return self.nbytes // ALIGNMENT * ALIGNMENT


@dataclass
class Model:
    lease_seconds: float
    reservation_seconds: float
    max_chunks: int
    segments: dict[str, Place] = field(default_factory=dict)
    absent: dict[str, Place] = field(default_factory=dict)
    slots: list[Slot] = field(default_factory=list)
    leases: dict[int, Held] = field(default_factory=dict)
    writes: dict[int, Written] = field(default_factory=dict)
    order: list[ChunkKey] = field(default_factory=list)
    """Live chunks that nobody reads, coldest first."""
    rested: dict[ChunkKey, int] = field(default_factory=dict)
    """Chunks of before a restart that nobody has used since, and their places in the order of then:
    colder than all others.
    """
    before: list[tuple[float, Slot]] = field(default_factory=list)
    """What was leased from servers of before, and until when its readers count on it."""
    reserves_from: float = 0.0

    # ---- what is true

    def live(self, key: ChunkKey) -> Slot | None:
        found = [s for s in self.slots if s.key == key and s.state == "live"]
        assert len(found) <= 1, f"{key!r} is live twice"
        return found[0] if found else None

    def live_keys(self) -> set[ChunkKey]:
        return {s.key for s in self.slots if s.state == "live"}

    def resting(self, key: ChunkKey) -> Slot | None:
        """The chunk of before a restart that is not back yet."""
        return next((s for s in self.slots if s.key == key and s.state == "resting"), None)

    def pending(self, key: ChunkKey) -> bool:
        return any(s.key == key and s.state == "open" for s in self.slots)

    def leased(self, slot: Slot) -> bool:
        return any(slot in held.slots for held in self.leases.values())

    def evictable(self, slot: Slot) -> bool:
        coming_back = slot.state == "resting" and slot.location.segment in self.segments
        leaves = slot.location.segment in self.segments and self.draining(slot)
        there = coming_back or slot.state in ("cleared", "live")
        return there and not self.leased(slot) and not leaves

    def coldest(self) -> list[Slot]:
        """The live chunks in the order in which they should go."""
        return [slot for slot in map(self.live, self.order) if slot is not None]

    def lying(self, segment: str) -> list[Slot]:
        return [slot for slot in self.slots if slot.location.segment == segment]

    def used(self, segment: str) -> int:
        return sum(room_of(slot.location.length) for slot in self.lying(segment))

    def gaps(self, segment: str, ignore_evictable: bool = False) -> dict[int, int]:
        """The bytes of each stretch of a segment that no slot occupies (or none that must stay), by
        its start.
        """
        place = (self.segments | self.absent)[segment]
        keep = [s for s in self.lying(segment) if not (ignore_evictable and self.evictable(s))]
        taken = sorted(slot.span for slot in keep)
        ends = [0, *(end for _, end in taken)]
        between = zip(ends, [*taken, (place.end, 0)], strict=True)
        return {end: start - end for end, (start, _) in between if start > end}

    def largest_gap(self, segment: str, ignore_evictable: bool = False) -> int:
        return max(self.gaps(segment, ignore_evictable).values(), default=0)

    def free(self, segment: str) -> int:
        """Bytes that no slot has."""
        return self.segments[segment].end - self.used(segment)

    def draining(self, slot: Slot) -> bool:
        """Whether its segment is being dropped."""
        return self.segments[slot.location.segment].draining

    def usable(self) -> dict[str, Place]:
        return {name: place for name, place in self.segments.items() if not place.draining}

    # ---- what happened

    def recent(self, slots: list[Slot]) -> None:
        """The first ends up hottest."""
        for slot in reversed(slots):
            self.cool(slot)
            self.order.append(slot.key)

    def cool(self, slot: Slot) -> None:
        """It is in the order no more."""
        self.rested.pop(slot.key, None)
        if slot.key in self.order:
            self.order.remove(slot.key)

    def touch(self, keys: list[ChunkKey]) -> None:
        """Keys in prefix order."""
        there = [slot for slot in map(self.live, dict.fromkeys(keys)) if slot is not None]
        self.recent([slot for slot in there if not self.leased(slot)])

    def back(self, slot: Slot) -> None:
        """A chunk of before a restart is found again."""
        slot.state = "live"
        place = self.rested[slot.key]
        self.order.insert(sum(self.rested.get(key, place) < place for key in self.order), slot.key)

    def granted(self, id_: int, held: Held) -> None:
        self.leases[id_] = held
        for slot in held.slots:
            self.cool(slot)

    def forget(self, slot: Slot) -> None:
        """A live chunk is gone; its place stays taken while somebody reads it."""
        self.cool(slot)
        if self.leased(slot):
            slot.state = "doomed"
        else:
            self.slots.remove(slot)

    def cleared(self, slot: Slot) -> None:
        """A chunk that nobody sees any more; its place stays taken for a while."""
        self.cool(slot)
        slot.state = "cleared"

    def freed(self, slot: Slot) -> None:
        """The place of a cleared chunk is free, or waits for its readers only."""
        if self.leased(slot):
            slot.state = "doomed"
        else:
            self.slots.remove(slot)

    def forget_resting(self, keys: list[ChunkKey]) -> None:
        """What is said about a key holds for its copy of before a restart, too."""
        for key in keys:
            slot = self.resting(key)
            if slot is not None:
                self.slots.remove(slot)

    def evicted(self, slots: list[Slot]) -> None:
        for slot in slots:
            assert self.evictable(slot), f"{slot} was evicted though it is leased or being written"
            self.forget(slot)

    def reserved(self, id_: int, client: Peer, slots: list[Slot], now: float) -> None:
        for slot in slots:
            start, end = slot.span
            beside = self.lying(slot.location.segment)
            taken = [one for one in beside if one.span[0] < end and start < one.span[1]]
            assert not taken, f"{slot} was given out over {taken}"
            place = self.segments[slot.location.segment]
            assert not place.draining, f"{slot} was given out in a segment that is being dropped"
            assert slot.span[1] <= place.end, f"{slot} leaves its segment"
            self.slots.append(slot)
        self.writes[id_] = Written(client.id, client.process, now + self.reservation_seconds, slots)

    def committed(self, id_: int) -> int:
        write = self.writes.pop(id_)
        for slot in reversed(write.slots):
            assert self.live(slot.key) is None, f"{slot.key!r} was committed twice"
            self.forget_resting([slot.key])
            slot.state = "live"
            self.recent([slot])
        visible = 0
        for slot in write.slots:
            if self.draining(slot):
                self.forget(slot)
            else:
                visible += 1
        return visible

    def given_back(self, id_: int) -> int:
        write = self.writes.pop(id_)
        for slot in write.slots:
            self.slots.remove(slot)
        return len(write.slots)

    def left(self, segment: str) -> None:
        """A segment is no longer in the pool: nobody waits for those who may still write to it.
        Readers of before hold the memory by their mappings; another segment of that name is other
        memory.
        """
        self.before = [one for one in self.before if one[1].location.segment != segment]
        for id_, write in list(self.writes.items()):
            for slot in [slot for slot in write.slots if slot.location.segment == segment]:
                write.slots.remove(slot)
                self.slots.remove(slot)
            if not write.slots:
                del self.writes[id_]

    def void(self, id_: int) -> None:
        write = self.writes[id_]
        write.client = None
        for slot in write.slots:
            slot.state = "void"

    def expire_leases(self, now: float) -> None:
        for id_, held in sorted(self.leases.items(), key=lambda lease: lease[1].orphan):
            if held.deadline <= now:
                self.end_lease(id_)

    def renewed(self, id_: int, now: float) -> None:
        held = self.leases[id_] = self.leases.pop(id_)
        held.granted, held.deadline, held.orphan = now, now + self.lease_seconds, False

    def end_lease(self, id_: int) -> None:
        held = self.leases.pop(id_)
        for slot in held.slots:
            if slot.state == "doomed" and not self.leased(slot) and slot in self.slots:
                self.slots.remove(slot)
        self.recent([slot for slot in held.slots if slot.state == "live" and not self.leased(slot)])

    def tick(self, now: float) -> None:
        self.expire_leases(now)
        for id_, write in list(self.writes.items()):
            if write.client is not None and now > write.deadline:
                self.void(id_)

    def disconnect(self, client: Peer, now: float) -> None:
        for id_, held in sorted(self.leases.items()):
            if held.client == client.id:
                held.client, held.deadline, held.orphan = None, now + GRACE_SECONDS, True
                self.leases[id_] = self.leases.pop(id_)
        for id_, write in self.writes.items():
            if write.client == client.id:
                self.void(id_)

    def process_gone(self, process: ProcessId) -> None:
        for id_, write in list(self.writes.items()):
            if write.process == process and write.client is None:
                self.given_back(id_)

    def restart(self, now: float) -> None:
        """Leases are gone but for their grace, reservations void, segments absent, chunks rest in
        them but for cleared ones.
        """
        self.slots = [slot for slot in self.slots if slot.state != "cleared"]
        for id_, held in list(self.leases.items()):
            until = min(held.deadline, held.granted + GRACE_SECONDS)
            self.before += [(until, slot) for slot in held.slots]
            self.end_lease(id_)
        for id_ in self.writes:
            self.void(id_)
        for slot in self.slots:
            slot.state = "resting" if slot.state == "live" else slot.state
        self.absent |= {name: Place(at.device, at.nbytes) for name, at in self.segments.items()}
        self.reserves_from = now + GRACE_SECONDS if self.absent else 0.0
        self.segments = {}
        self.order = []
