"""Clients of a directory beside those of a simple model: they store, read, hang up and die, and
time passes.

What becomes of segments and servers, and what must hold after every step, is in
`test_directory_stateful`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import msgspec
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule
from model import FakeClock, Held, Memory, Model, Slot, chunk_key, room_of

from vcache_backend.config import ServerConfig
from vcache_backend.metadata_server.pool import backlog
from vcache_backend.metadata_server.pool.directory import Directory
from vcache_backend.metadata_server.pool.placement import Peer
from vcache_backend.metadata_server.records import LedgerState, ProcessId, Record
from vcache_backend.protocol import messages as m
from vcache_backend.protocol.messages import GRACE_SECONDS, ChunkKey, Location, Refusal

LIMITS = ServerConfig(lease_seconds=10, reservation_seconds=30, max_chunks=14)
SEGMENTS = {"s0": ("gpu-0", 4096), "s1": ("gpu-1", 3072)}
SEGMENTS |= {"s2": ("gpu-0", 1536), "s3": ("gpu-2", 5200)}
DEVICES = ["gpu-0", "gpu-1", "gpu-9"]
SPACES = [b"space--0", b"space--1"]
ALL_KEYS = [chunk_key(number, 0, space) for space in SPACES for number in range(9)]
SIZES = [1024, 1024, 1024, 1000, 500, 256, 1500, 2048, 3000, 6000]

keys = st.lists(st.sampled_from(ALL_KEYS), min_size=1, max_size=5)
one_of = st.integers(0, 1 << 16)
_decoder = msgspec.msgpack.Decoder(Record)


class Ledger:
    """What a ledger holds, and what it tells, through its encoding."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.state = LedgerState()

    def write(self, records: Iterable[Record]) -> None:
        for record in records:
            self.records.append(_decoder.decode(msgspec.msgpack.encode(record)))
            self.state.apply(self.records[-1])


class Clients(RuleBasedStateMachine):
    """The directory and its model, side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = FakeClock()
        self.memory = Memory()
        self.model = Model(LIMITS.lease_seconds, LIMITS.reservation_seconds, LIMITS.max_chunks)
        self.directory = Directory(LIMITS, self.clock)
        self.ledger = Ledger()
        self.compacting: tuple[Ledger, Iterator[Record]] | None = None
        self.clients: list[Peer] = []
        self.processes: list[ProcessId] = []
        self.writers: dict[int, ProcessId] = {}
        self.old_leases: list[int] = []
        self.tokens = self.numbers = 0
        self.highest_id = self.highest_generation = 0
        self.restarted = False

    # ---- helpers

    def keep_ledger(self) -> None:
        """As the server does between a turn's work and its answers: every record to the ledger,
        and to the one being made.
        """
        self.ledger.write(self.directory.records)
        if self.compacting is not None:
            self.compacting[0].write(self.directory.records)
        self.directory.records.clear()

    def add_segment(self, name: str) -> int:
        device, nbytes = SEGMENTS[name]
        info = m.SegmentInfo(m.SegmentId(name), device, "cuda", nbytes)
        with self.little_at_once():
            chunks = self.directory.add_segment(info)
        self.keep_ledger()
        return chunks

    def new_slots(self, reply_slots: list[Location | int], asked: list[ChunkKey]) -> list[Slot]:
        slots = []
        for key, location in zip(asked, reply_slots, strict=True):
            if isinstance(location, Location):
                self.tokens += 1
                slots.append(Slot(key, location, self.tokens, "open"))
                assert location.generation > self.highest_generation, "a generation was used before"
        generations = [slot.location.generation for slot in slots]
        self.highest_generation = max([self.highest_generation, *generations])
        return slots

    def visible(self) -> set[ChunkKey]:
        """The keys of the chunks that clients see."""
        present = self.directory.contains(ALL_KEYS)
        return {key for key, there in zip(ALL_KEYS, present, strict=True) if there}

    def write(self, id_: int) -> None:
        for slot in self.model.writes[id_].slots:
            self.memory.write(slot.location, slot.token)

    def follow(self) -> None:
        """Take over how far the directory is with what it does in its own time: slots of cleared
        chunks, segments to be dropped.
        """
        model, segments = self.model, self.directory.segments
        for slot in [slot for slot in model.slots if slot.state in ("cleared", "live", "resting")]:
            segment = segments.get(slot.location.segment)
            at, entry = slot.location.offset, None
            if segment is not None:
                entry = segment.occupants.get(at) or segment.staying.get(at)
            kept = entry is not None and entry.location.generation == slot.location.generation
            if slot.state == "cleared" and (not kept or entry.doomed):
                model.freed(slot)
            elif slot.state == "live" and model.draining(slot) and (not kept or entry.doomed):
                model.forget(slot)
            elif slot.state == "resting" and not kept:
                assert slot.location.segment in model.segments
                model.slots.remove(slot)
            elif slot.state == "resting" and self.directory.contents.live.get(entry.key) is entry:
                assert not model.pending(slot.key)
                model.back(slot)
        draining = [name for name, place in model.segments.items() if place.draining]
        for name in [name for name in draining if name not in segments]:
            assert all(slot.state == "void" for slot in model.lying(name))
            model.left(name)
            self.forget_writers()
            del model.segments[name], self.memory.bytes_of[name]

    @contextmanager
    def little_at_once(self) -> Iterator[None]:
        """What is begun here takes several turns."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(backlog, "AT_ONCE", 2)
            yield

    @rule(work=st.integers(1, 3))
    @precondition(lambda self: self.directory.backlog)
    def go_on(self, work: int) -> None:
        with self.little_at_once():
            self.directory.backlog.run(work)
        self.follow()

    def forget_writers(self) -> None:
        """Writers whose reservation is closed have stopped: they said so, they died, or the memory
        is theirs alone by now.
        """
        writes = self.model.writes
        self.writers = {id_: one for id_, one in self.writers.items() if id_ in writes}

    # ---- clients

    @rule(device=st.sampled_from(DEVICES))
    @precondition(lambda self: len(self.processes) < 4)
    def connect_new(self, device: str) -> None:
        self.numbers += 1
        self.processes.append(ProcessId(1000 + self.numbers, self.numbers))
        self.connect(len(self.processes) - 1, device)

    @rule(pick=one_of, device=st.sampled_from(DEVICES))
    @precondition(lambda self: self.processes and len(self.clients) < 6)
    def connect(self, pick: int, device: str) -> None:
        self.numbers += 1
        process = self.processes[pick % len(self.processes)]
        self.clients.append(Peer(self.numbers, process, device, "cuda"))

    @rule(pick=one_of)
    @precondition(lambda self: self.clients)
    def disconnect(self, pick: int) -> None:
        client = self.clients.pop(pick % len(self.clients))
        self.directory.disconnect(client)
        self.directory.backlog.run(1000)
        self.model.disconnect(client, self.clock.now)
        self.follow()

    @rule(pick=one_of)
    @precondition(lambda self: self.processes)
    def kill(self, pick: int) -> None:
        process = self.processes.pop(pick % len(self.processes))
        for client in [client for client in self.clients if client.process == process]:
            self.disconnect(self.clients.index(client))
        self.directory.process_gone(process)
        self.model.process_gone(process)
        self.forget_writers()

    # ---- storing

    @rule(pick=one_of, wanted=keys, nbytes=st.sampled_from(SIZES))
    @precondition(lambda self: self.clients)
    def reserve_many(self, pick: int, wanted: list[ChunkKey], nbytes: int) -> None:
        for_sure = {key: self.model.live(key) is not None for key in wanted}
        before = self.model.live_keys()
        client = self.clients[pick % len(self.clients)]
        if self.refused_after_a_restart(client, wanted, nbytes):
            return
        self.model.touch(wanted)
        reply = self.directory.reserve(client, wanted, nbytes)
        gone = before - self.visible()
        victims = [slot for slot in map(self.model.live, gone) if slot is not None]
        self.follow()
        if Refusal.NO_SEGMENT in reply.slots or Refusal.TOO_LARGE in reply.slots:
            assert not gone
        self.model.evicted(victims)
        for key, slot in zip(wanted, reply.slots, strict=True):
            assert slot != Refusal.EXISTS or for_sure[key]
        new = self.new_slots(reply.slots, wanted)
        self.open_reservation(client, reply.reservation, new)

    @rule(pick=one_of, key=st.sampled_from(ALL_KEYS), nbytes=st.sampled_from(SIZES))
    @precondition(lambda self: self.clients)
    def reserve_one(self, pick: int, key: ChunkKey, nbytes: int) -> None:
        """With one key the model knows what may happen."""
        client, model, size = self.clients[pick % len(self.clients)], self.model, room_of(nbytes)
        if self.refused_after_a_restart(client, [key], nbytes):
            return
        before = model.live_keys()
        others = any(slot.state in ("cleared", "resting") for slot in model.slots)
        self.model.touch([key])
        reply = self.directory.reserve(client, [key], nbytes)
        slot = reply.slots[0]
        gone = before - self.visible()
        victims = [slot for slot in map(model.live, gone) if slot is not None]
        usable = model.usable()
        if not usable:
            expected: set[object] = {Refusal.NO_SEGMENT}
        elif nbytes > max(place.end for place in usable.values()):
            expected = {Refusal.TOO_LARGE}
        else:
            expected = {Refusal.FULL}
        if key in before:
            expected = {Refusal.EXISTS}
        elif model.pending(key):
            expected = {Refusal.BUSY}
        elif expected == {Refusal.FULL}:
            fits = {name for name in usable if model.largest_gap(name) >= size}
            may = {n for n in usable if model.largest_gap(n, ignore_evictable=True) >= size}
            counted = sum(s.location.segment in model.segments for s in model.slots)
            if fits and counted < model.max_chunks:
                own = {name for name in fits if usable[name].device == client.device}
                most = max(map(model.free, fits))
                roomiest = {name for name in fits if model.free(name) == most}
                assert isinstance(slot, Location), f"{slot!r} though {fits} have room"
                assert slot.segment in (own or roomiest)
                gaps = model.gaps(slot.segment)
                tightest = min(gap for gap in gaps.values() if gap >= size)
                assert gaps[slot.offset] == tightest
                assert not victims, "evicted though there was room"
                expected = {slot}
            elif may:
                evictable = [s for s in model.slots if s.state == "live" and model.evictable(s)]
                can_go = any(s.location.segment in may for s in evictable)
                assert isinstance(slot, Location) or not can_go, f"{slot!r} though {may} have room"
                if isinstance(slot, Location) and not others:
                    self.check_victims(victims, size)
                expected = {slot}
        assert slot in expected
        assert not victims or isinstance(slot, Location), "evicted for nothing"
        model.evicted(victims)
        self.follow()
        self.open_reservation(client, reply.reservation, self.new_slots(reply.slots, [key]))

    def refused_after_a_restart(self, client: Peer, wanted: list[ChunkKey], nbytes: int) -> bool:
        """Is it too early to reserve? That changes nothing, as the invariants see."""
        if self.clock.now >= self.model.reserves_from:
            return False
        reply = self.directory.reserve(client, wanted, nbytes)
        assert (reply.reservation, reply.slots) == (0, [Refusal.FULL] * len(wanted))
        return True

    def check_victims(self, victims: list[Slot], size: int) -> None:
        """The coldest chunk goes, alone if it has the right size; otherwise a run within one
        segment.
        """
        assert victims
        usable = self.model.usable()
        can_go = filter(self.model.evictable, self.model.coldest())
        coldest = next(slot for slot in can_go if slot.location.segment in usable)
        if room_of(coldest.location.length) == size:
            assert victims == [coldest]
        assert len({slot.location.segment for slot in victims}) == 1

    def open_reservation(self, client: Peer, id_: int, slots: list[Slot]) -> None:
        assert (id_ != 0) == bool(slots)
        if slots:
            self.highest_id = max(self.highest_id, id_)
            self.model.reserved(id_, client, slots, self.clock.now)
            self.writers[id_] = client.process

    @rule(pick=one_of, wanted=keys, nbytes=st.sampled_from(SIZES))
    @precondition(lambda self: self.clients)
    def store(self, pick: int, wanted: list[ChunkKey], nbytes: int) -> None:
        """What a worker does nearly always: reserve, write, commit."""
        before = set(self.writers)
        self.reserve_many(pick, wanted, nbytes)
        for id_ in set(self.writers) - before:
            self.write(id_)
            visible = self.directory.commit(self.clients[pick % len(self.clients)], id_, [])
            assert visible == self.model.committed(id_)
        self.forget_writers()

    @rule(pick=one_of, half=st.booleans())
    @precondition(lambda self: self.writers)
    def write_early_or_late(self, pick: int, half: bool) -> None:
        """Whoever has not answered for its slots may still be writing to them, void or not."""
        id_ = sorted(self.writers)[pick % len(self.writers)]
        for slot in self.model.writes[id_].slots[: 1 if half else None]:
            self.memory.write(slot.location, slot.token)

    @rule(pick=one_of, who=one_of, prefix=keys)
    @precondition(lambda self: self.writers and self.clients)
    def commit(self, pick: int, who: int, prefix: list[ChunkKey]) -> None:
        id_ = sorted(self.writers)[pick % len(self.writers)]
        write = self.model.writes[id_]
        owner = [client for client in self.clients if client.id == write.client]
        client = owner[0] if owner and who % 4 else self.clients[who % len(self.clients)]
        mine = write.process == client.process
        if mine:
            self.write(id_)
        visible = self.directory.commit(client, id_, prefix)
        if write.client == client.id and self.clock.now <= write.deadline:
            assert visible == self.model.committed(id_)
            self.model.touch(prefix)
        else:
            assert visible == 0
            if mine:
                self.model.given_back(id_)
        self.forget_writers()

    @rule(pick=one_of, wanted=keys, look=st.booleans())
    @precondition(lambda self: self.clients)
    def store_too_slowly(self, pick: int, wanted: list[ChunkKey], look: bool) -> None:
        """A commit after the reservation's time publishes nothing, whether or not the directory has
        noticed before.
        """
        before = set(self.writers)
        self.reserve_many(pick, wanted, 1024)
        self.time_passes(30.5, look)
        for id_ in set(self.writers) - before:
            assert self.directory.commit(self.clients[pick % len(self.clients)], id_, []) == 0
            self.model.given_back(id_)
        self.forget_writers()

    @rule(pick=one_of, who=one_of)
    @precondition(lambda self: self.writers and self.clients)
    def abort(self, pick: int, who: int) -> None:
        id_ = sorted(self.writers)[pick % len(self.writers)]
        client = self.clients[who % len(self.clients)]
        mine = self.model.writes[id_].process == client.process
        assert self.directory.abort(client, id_) == (self.model.given_back(id_) if mine else 0)
        self.forget_writers()

    # ---- reading

    @rule(wanted=keys)
    def lookup(self, wanted: list[ChunkKey]) -> None:
        live = self.model.live_keys()
        missing = [at for at, key in enumerate(wanted) if key not in live]
        pooled = self.directory.find(m.Find(wanted, pool_only=True)).pooled
        assert len(pooled) == (missing[0] if missing else len(wanted))

    @rule(pick=one_of, wanted=keys)
    @precondition(lambda self: self.clients)
    def acquire(self, pick: int, wanted: list[ChunkKey]) -> None:
        client = self.clients[pick % len(self.clients)]
        leased = self.directory.acquire(client, wanted)
        slots = []
        for key in wanted:
            slot = self.model.live(key)
            if slot is None:
                break
            slots.append(slot)
        assert leased.locations == [slot.location for slot in slots]
        assert (leased.lease != 0) == bool(slots)
        if slots:
            self.highest_id = max(self.highest_id, leased.lease)
            now, each = self.clock.now, list(dict.fromkeys(slots))
            held = Held(client.id, now, now + LIMITS.lease_seconds, each)
            self.model.granted(leased.lease, held)
            self.old_leases.append(leased.lease)

    @rule(pick=one_of, renew=st.booleans())
    @precondition(lambda self: self.old_leases)
    def renew_or_release(self, pick: int, renew: bool) -> None:
        """By anybody, whoever got the lease, also after its holder hung up; those of an earlier
        server are unknown.
        """
        lease = self.old_leases[pick % len(self.old_leases)]
        held = self.model.leases.get(lease)
        if held is not None and held.deadline <= self.clock.now:
            self.model.end_lease(lease)
        holds = lease in self.model.leases
        if renew:
            assert self.directory.leases.renew(lease) is holds
            if holds:
                self.model.renewed(lease, self.clock.now)
        else:
            assert self.directory.leases.release(lease) is holds
            if holds:
                self.model.end_lease(lease)

    @rule(pick=one_of, wanted=keys)
    @precondition(lambda self: self.clients)
    def read_slowly(self, pick: int, wanted: list[ChunkKey]) -> None:
        """A lease renewed in time holds for longer than a lease lasts."""
        before = set(self.model.leases)
        self.acquire(pick, wanted)
        for _ in range(2):
            self.time_passes(6, True)
            for lease in set(self.model.leases) - before:
                assert self.directory.leases.renew(lease) is True
                self.model.renewed(lease, self.clock.now)

    @rule(
        pick=one_of,
        wanted=keys,
        before=st.sampled_from([0, GRACE_SECONDS / 2]),
        after=st.sampled_from([0.5, 1, 2]),
    )
    @precondition(lambda self: self.clients)
    def hang_up_while_reading(
        self, pick: int, wanted: list[ChunkKey], before: float, after: float
    ) -> None:
        """A lease outlives its connection by its grace. after: a multiple of that."""
        self.acquire(pick, wanted)
        self.clock.advance(before)
        self.disconnect(pick)
        self.remove(wanted)
        self.time_passes(GRACE_SECONDS * after, True)

    @rule(wanted=keys)
    def touch(self, wanted: list[ChunkKey]) -> None:
        assert self.directory.touch(wanted) == len(self.model.live_keys() & set(wanted))
        self.model.touch(wanted)

    @rule(wanted=keys)
    def remove(self, wanted: list[ChunkKey]) -> None:
        slots = [slot for slot in map(self.model.live, dict.fromkeys(wanted)) if slot is not None]
        assert self.directory.remove(wanted) == len(slots)
        for slot in slots:
            self.model.forget(slot)
        self.model.forget_resting(wanted)

    @rule(space=st.sampled_from([b"space--0", b"space--1"]))
    def clear(self, space: bytes) -> None:
        wanted = [key for key in ALL_KEYS if key.startswith(space)]
        slots = [slot for slot in map(self.model.live, wanted) if slot is not None]
        resting = [slot for slot in map(self.model.resting, wanted) if slot is not None]
        with self.little_at_once():
            count = self.directory.clear(space)
        for id_, write in self.model.writes.items():
            if write.client is not None and any(slot.key.startswith(space) for slot in write.slots):
                self.model.void(id_)
        for slot in slots + resting:
            self.model.cleared(slot)
        assert count == len(slots)
        self.follow()

    # ---- time

    @rule(
        seconds=st.sampled_from([GRACE_SECONDS / 2, GRACE_SECONDS, 0.5, 5, 10, 30.5, 101]),
        look=st.booleans(),
    )
    def time_passes(self, seconds: float, look: bool) -> None:
        self.clock.advance(seconds)
        if look:
            self.directory.tick()
            self.model.tick(self.clock.now)
            self.follow()
            self.forget_writers()
            for name, place in self.model.segments.items():
                waited_for = any(slot.state != "void" for slot in self.model.lying(name))
                assert not place.draining or waited_for or self.directory.backlog
