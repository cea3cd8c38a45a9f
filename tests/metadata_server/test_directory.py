"""The pool as slots with generations against a simple model, in every order of events that
hypothesis can think of, with real tables.

Processes write slowly, stop, die and come back; readers copy slowly, and believe a copy only if the
generations say so; segments and resets come and go; the server restarts, also after a kill in
the middle of any change to its tables. After every step: what a reader believes are the bytes that
were committed under the key it asked for, nobody is given memory that another process may still
write, and what is pinned is not evicted. `HYPOTHESIS_PROFILE=thorough` runs many more, and longer
ones."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from model import FakeClock, chunk_key, pattern, room_of

from vcache_backend.metadata_server import slots
from vcache_backend.metadata_server.directory import Directory
from vcache_backend.metadata_server.processes import Peer, ProcessId
from vcache_backend.metadata_server.resets import Resets
from vcache_backend.metadata_server.room import Room
from vcache_backend.metadata_server.slots import SlotRegion
from vcache_backend.protocol.messages import (
    ChunkKey,
    Location,
    Refusal,
    SegmentId,
    SegmentInfo,
    SlotRun,
)
from vcache_backend.vram_pool.generations import GenerationView

THOROUGH = os.environ.get("HYPOTHESIS_PROFILE") == "thorough"
SEGMENTS = {"s0": 4096, "s1": 3072, "s2": 2000, "s3": 5200}
SPACES = [b"space--0", b"space--1"]
KEYS = [chunk_key(number, 0, space) for space in SPACES for number in range(7)]
SIZES = [1024, 1024, 1024, 1000, 500, 256, 2048, 6000]
SECONDS = 30.0
one_of = st.integers(0, 1 << 16)
some_keys = st.lists(st.sampled_from(KEYS), min_size=1, max_size=5)


def described(name: str) -> SegmentInfo:
    return SegmentInfo(SegmentId(name), "gpu-0", "host", SEGMENTS[name])


class Killed(Exception):
    """The server, at a store to its tables."""


class Life:
    """How many stores to tables the server has left; None: it is not killed."""

    left: int | None = None

    @classmethod
    def store(cls) -> bool:
        """False for the store in the middle of which it dies."""
        if cls.left is None:
            return True
        cls.left -= 1
        if cls.left < 0:
            raise Killed
        return cls.left > 0


class Stores:
    """A view of a table in which the server can be killed between two stores."""

    def __init__(self, view: Any) -> None:
        self._view = view

    def __getitem__(self, at: Any) -> Any:
        return self._view[at]

    def __setitem__(self, at: int, value: int) -> None:
        Life.store()
        self._view[at] = value

    def release(self) -> None:
        self._view.release()


class Torn:
    """A record's format. A server that is killed has written a part of the record."""

    def __init__(self, form: Any) -> None:
        self._form, self.size, self.unpack_from = form, form.size, form.unpack_from

    def pack_into(self, memory: Any, at: int, *values: Any) -> None:
        packed = self._form.pack(*values)
        part = len(packed) if Life.store() else len(packed) // 2
        memory[at : at + part] = packed[:part]


class Clock(FakeClock):
    """Two looks never see the same time."""

    def __call__(self) -> float:
        self.now += 1e-6
        return self.now


@dataclass(eq=False)
class Writing:
    """A slot that a process was given, and what it has written so far. void: nobody can commit it.
    answered: it has said that it is done."""

    key: ChunkKey
    segment: str
    offset: int
    nbytes: int
    token: int
    process: ProcessId
    client: int
    number: int
    deadline: float
    void: bool = False
    done: bool = False


@dataclass(eq=False)
class Reading:
    """A copy under way. expected: the tokens of the chunks; got: the first halves."""

    run: SlotRun
    keys: list[ChunkKey]
    view: GenerationView
    memory: bytearray
    expected: list[int]
    sizes: list[int]
    half: list[bytes] = field(default_factory=list)

    def spans(self) -> Iterator[tuple[int, int]]:
        slots = memoryview(self.run.blocks).cast("I")
        for slot, size in zip(slots, self.sizes, strict=True):
            yield self.run.offset + (slot - self.run.base) * self.run.slot_bytes, size


class SlotMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        for name in ("RECORD", "SLAB"):
            self.patch.setattr(slots, name, Torn(getattr(slots, name)))
        self.patch.setattr(SlotRegion, "SLABS_WANTED", 2)
        self.patch.setattr(Room, "SEARCH", 4)
        Life.left = None
        self.clock = Clock()
        self.resets: Resets = {}
        """In the server's file."""
        self.serve()
        self.memory: dict[str, bytearray] = {}
        self.fds: dict[str, int] = {}
        """What clients hold of the tables."""
        self.views: dict[str, GenerationView] = {}
        self.away: list[str] = []
        """Segments that nobody has offered to the present server."""
        self.live: dict[ChunkKey, Writing] = {}
        self.writes: list[Writing] = []
        self.pinned: dict[ChunkKey, float] = {}
        self.readings: list[Reading] = []
        self.clients: list[Peer] = []
        self.tokens = self.ids = 0
        self.over, self.ahead = set[int](), set[int]()
        """Numbers of writes that have ended, as their writers have said; `ahead`: before their
        tables came, which the next server does not know."""
        self.epochs: dict[ChunkKey, int] = {}
        """What clients have heard."""

    def serve(self) -> None:
        self.directory = Directory(self.clock, SECONDS, Counter(), self.resets, self.keep)

    def keep(self, resets: Resets) -> None:
        Life.store()
        self.resets = resets

    @initialize()
    def start(self) -> None:
        self.offer_new("s0")
        for _ in range(3):
            self.connect(0, True)
        for at in range(4):
            self.store(at, KEYS[at : at + 1], 1024)

    # ---- segments

    @rule(name=st.sampled_from(list(SEGMENTS)))
    def offer_new(self, name: str) -> None:
        if name not in self.memory:
            self.memory[name] = bytearray(SEGMENTS[name])
            region = SlotRegion.create(described(name))
            self.fds[name] = os.dup(region.fds[-1].fd)
            self.views[name] = GenerationView.of_segment(self.fds[name], name)
            self.use(region)

    @rule(pick=one_of)
    @precondition(lambda self: self.away)
    def offer_again(self, pick: int) -> None:
        name = self.away.pop(pick % len(self.away))
        self.use(SlotRegion.take_over(described(name), self.fds[name]))
        self.follow(may_go=set(KEYS))

    def use(self, region: SlotRegion) -> None:
        for view in ("words", "generations", "numbers"):
            setattr(region, view, Stores(getattr(region, view)))
        self.directory.add(region)

    @rule(pick=one_of)
    @precondition(lambda self: len(self.memory) > len(self.away) + 1)
    def drop(self, pick: int) -> None:
        here = sorted(self.memory.keys() - set(self.away))
        name = here[pick % len(here)]
        self.directory.drop(SegmentId(name))
        for write in [one for one in self.writes if one.segment == name]:
            for other in [one for one in self.writes if one.number == write.number]:
                other.void = True
            self.writes.remove(write)
        self.live = {key: one for key, one in self.live.items() if one.segment != name}
        os.close(self.fds.pop(name))
        del self.memory[name], self.views[name]

    # ---- writers

    @rule(pick=one_of, new=st.booleans())
    @precondition(lambda self: len(self.clients) < 6)
    def connect(self, pick: int, new: bool) -> None:
        self.ids += 1
        process = ProcessId(1000 + self.ids, self.ids)
        if not new and self.clients:
            process = self.clients[pick % len(self.clients)].process
        self.clients.append(Peer(self.ids, process, f"gpu-{pick % 2}", "host"))

    @rule(pick=one_of, keys=some_keys, nbytes=st.sampled_from(SIZES))
    @precondition(lambda self: self.clients)
    def reserve(self, pick: int, keys: list[ChunkKey], nbytes: int) -> None:
        client = self.clients[pick % len(self.clients)]
        # A chunk that is stored again while its segment is away is there twice afterwards, with the
        # same bytes in either place. Here each write has bytes of its own: leave that out.
        keys = [key for key in keys if key not in self.live or self.shown(key)]
        before = {key for key in keys if self.shown(key)}
        pending = {one.key for one in self.writes if not one.void and self.owned(one)}
        now = self.clock.now
        reply = self.directory.reserve(client, keys, nbytes)
        self.follow(may_go=set(KEYS), pins_at=now)
        before = {key for key in before if self.shown(key)}
        for key, answer in zip(keys, reply.slots, strict=True):
            if isinstance(answer, Location):
                assert key not in before | pending
                self.tokens += 1
                place = key, answer.segment, answer.offset, nbytes, self.tokens
                who = client.process, client.id, reply.reservation
                write = Writing(*place, *who, now + SECONDS)
                self.check_alone(write)
                self.writes.append(write)
                pending.add(key)
            else:
                assert (answer == Refusal.EXISTS) == (key in before)
                assert (answer == Refusal.BUSY) == (key in pending - before)

    @rule(pick=one_of, keys=some_keys, nbytes=st.sampled_from(SIZES))
    @precondition(lambda self: self.clients)
    def store(self, pick: int, keys: list[ChunkKey], nbytes: int) -> None:
        before = len(self.writes)
        self.reserve(pick, keys, nbytes)
        if len(self.writes) > before:
            self.commit(-1)

    def owned(self, write: Writing) -> bool:
        """Whether the server has the slot's table."""
        return self.directory.region(SegmentId(write.segment)) is not None

    def check_alone(self, new: Writing) -> None:
        """Nobody else may write there, and no reader be shown what was there."""
        end = new.offset + room_of(new.nbytes)
        assert end <= SEGMENTS[new.segment] // 256 * 256
        for other in [*self.writes, *self.live.values()]:
            apart = other.offset >= end or other.offset + room_of(other.nbytes) <= new.offset
            assert other.segment != new.segment or apart, f"{new} lies over {other}"

    @rule(pick=one_of, half=st.booleans())
    @precondition(lambda self: self.writes)
    def write(self, pick: int, half: bool) -> None:
        """Also of a process that was paused since its write became void."""
        one = self.writes[pick % len(self.writes)]
        nbytes = one.nbytes // 2 if half else one.nbytes
        self.memory[one.segment][one.offset : one.offset + nbytes] = pattern(one.token, nbytes)

    @rule(pick=one_of, late=st.booleans())
    @precondition(lambda self: self.writes)
    def commit(self, pick: int, late: bool = False) -> None:
        if late:
            self.clock.advance(SECONDS + 1)
        number = self.writes[pick % len(self.writes)].number
        self.write_all(number)
        client, mine = self.speaker(number)
        if client is None:
            return
        good = not any(
            one.void or one.deadline < self.clock.now or one.client != client.id for one in mine
        )
        assert len(self.directory.commit(client, number)) == (len(mine) if good else 0)
        self.finished(number, committed=good)

    @rule(pick=one_of)
    @precondition(lambda self: self.writes)
    def abort(self, pick: int) -> None:
        """Also before the server knows of it, since its table has yet to come."""
        mine = [
            one for one in self.writes if one.number == self.writes[pick % len(self.writes)].number
        ]
        client = next((one for one in self.clients if one.process == mine[0].process), None)
        if client is not None:
            freed, here = self.directory.abort(client, mine[0].number), list(map(self.owned, mine))
            assert here.count(True) <= freed <= len(mine)
            self.ahead |= set() if all(here) else {mine[0].number}
            self.finished(mine[0].number, committed=False)

    def speaker(self, number: int) -> tuple[Peer | None, list[Writing]]:
        """A connection of the process that writes this, if the server has all of the segments."""
        mine = [one for one in self.writes if one.number == number]
        connected = [one for one in self.clients if one.process == mine[0].process]
        own = [one for one in connected if one.id == mine[0].client] or connected
        return (own[0] if own and all(map(self.owned, mine)) else None), mine

    def write_all(self, number: int) -> None:
        for one in self.writes:
            if one.number == number:
                self.memory[one.segment][one.offset : one.offset + one.nbytes] = pattern(
                    one.token, one.nbytes
                )

    def finished(self, number: int, committed: bool) -> None:
        self.over.add(number)
        for one in [one for one in self.writes if one.number == number]:
            self.writes.remove(one)
            if committed:
                self.live[one.key] = one
                self.pinned.pop(one.key, None)

    @rule(pick=one_of)
    @precondition(lambda self: self.clients)
    def disconnect(self, pick: int) -> None:
        client = self.clients.pop(pick % len(self.clients))
        self.directory.disconnect(client.id)
        for one in self.writes:
            one.void |= one.client == client.id

    @rule(pick=one_of)
    @precondition(lambda self: self.clients)
    def kill_process(self, pick: int) -> None:
        process = self.clients[pick % len(self.clients)].process
        while any(one.process == process for one in self.clients):
            self.disconnect(
                next(at for at, one in enumerate(self.clients) if one.process == process)
            )
        # What lies in segments that are away is freed when they come: see `watch`.
        self.writes = [one for one in self.writes if one.process != process]
        self.watch()

    @rule()
    def watch(self) -> None:
        """The server hears of ended processes."""
        living = {one.process for one in (*self.clients, *self.writes)}
        for process in {one.process for one in self.directory.quarantined()} - living:
            self.directory.process_gone(process)
            self.follow(may_go=set(KEYS))

    @rule(seconds=st.sampled_from([0.0, 0.5, 3.0, SECONDS + 1]), tick=st.booleans())
    def time_passes(self, seconds: float, tick: bool) -> None:
        self.clock.advance(seconds)
        if not tick:
            return
        self.directory.tick()
        for one in self.writes:
            one.void |= one.deadline < self.clock.now

    # ---- readers

    @rule(keys=some_keys, pin=st.sampled_from([0.0, 2.0]))
    def find(self, keys: list[ChunkKey], pin: float) -> None:
        until = self.clock.now + pin
        runs = self.directory.pin(keys, pin)
        found = sum(len(run.blocks) // 4 for run in runs)
        hits = [self.shown(key) for key in keys]
        assert found == (hits.index(False) if False in hits else len(hits))
        for run in runs:
            mine = [self.live[key] for key in keys[run.first : run.first + len(run.blocks) // 4]]
            for one in mine:
                self.pinned[one.key] = max(until, self.pinned.get(one.key, 0.0))
            tokens, sizes = [one.token for one in mine], [one.nbytes for one in mine]
            view, memory = self.views[run.segment], self.memory[run.segment]
            reading = Reading(run, [one.key for one in mine], view, memory, tokens, sizes)
            assert [at for at, _ in reading.spans()] == [one.offset for one in mine]
            self.readings.append(reading)

    @rule(pick=one_of)
    @precondition(lambda self: self.readings)
    def read_a_half(self, pick: int) -> None:
        one = self.readings[pick % len(self.readings)]
        one.half = [bytes(one.memory[at : at + size // 2]) for at, size in one.spans()]

    @rule(pick=one_of)
    @precondition(lambda self: self.readings)
    def finish_reading(self, pick: int) -> None:
        one = self.readings.pop(pick % len(self.readings))
        halves = one.half or [bytes(one.memory[at : at + size // 2]) for at, size in one.spans()]
        got = [
            first + bytes(one.memory[at + size // 2 : at + size])
            for first, (at, size) in zip(halves, one.spans(), strict=True)
        ]
        right = one.view.leading(one.run.blocks, one.run.generations)
        for copy, token in list(zip(got, one.expected, strict=True))[:right]:
            assert copy == pattern(token, len(copy)), "a reader believes wrong bytes"

    @rule(pick=one_of, others=some_keys, nbytes=st.sampled_from(SIZES), late=st.booleans())
    @precondition(lambda self: self.clients and any(map(self.shown, KEYS)))
    def read_while_others_store(
        self, pick: int, others: list[ChunkKey], nbytes: int, late: bool
    ) -> None:
        shown = list(filter(self.shown, KEYS))
        self.find([shown[pick % len(shown)]], 0.0 if late else 2.0)
        self.read_a_half(-1)
        before = len(self.writes)
        self.reserve(pick, others, nbytes)
        if len(self.writes) > before:
            self.write(-1, True)
            self.finish_reading(-1)
            self.commit(-1, late)

    # ---- what is forgotten

    @rule(keys=some_keys)
    def remove(self, keys: list[ChunkKey]) -> None:
        shown = {key for key in keys if self.shown(key)}
        assert self.directory.remove(set(keys)) >= len(shown)
        for key in shown:
            del self.live[key]

    @rule(space=st.sampled_from([*SPACES, b""]), epoch=st.booleans())
    def clear(self, space: bytes, epoch: bool) -> None:
        """Of chunks that the server does not know either: of segments that are away."""
        before = {key: self.directory.epoch([key]) for key in KEYS}
        self.directory.clear(space, epoch)
        for key in KEYS:
            raised = self.directory.epoch([key]) > before[key]
            assert raised == (epoch and key.startswith(space))
            self.epochs[key] = self.directory.epoch([key])
        for key in [key for key in self.live if key.startswith(space)]:
            del self.live[key]
        touched = {one.number for one in self.writes if one.key.startswith(space)}
        for one in self.writes:
            one.void |= one.number in touched

    # ---- the server's life

    @rule(offered=st.integers(0, 4))
    def restart(self, offered: int) -> None:
        self.close_tables()
        self.serve()
        for key, epoch in self.epochs.items():
            assert self.directory.epoch([key]) >= epoch, "a reset was forgotten"
        self.away = sorted(self.memory)
        self.over -= self.ahead
        self.pinned.clear()
        for one in self.writes:
            one.void = True
        self.clients = [
            Peer(one.id + 1000, one.process, one.device, "host") for one in self.clients
        ]
        while offered and self.away:
            self.offer_again(offered)
            offered -= 1

    @rule(stores=st.integers(0, 25), pick=one_of, keys=some_keys, nbytes=st.sampled_from(SIZES))
    @precondition(lambda self: self.clients)
    def kill_while_it_reserves(
        self, stores: int, pick: int, keys: list[ChunkKey], nbytes: int
    ) -> None:
        """Nobody hears of what it has granted."""
        client = self.clients[pick % len(self.clients)]
        self.killed(stores, lambda: self.directory.reserve(client, keys, nbytes))

    @rule(stores=st.integers(0, 8), pick=one_of)
    @precondition(lambda self: self.writes)
    def kill_while_it_commits(self, stores: int, pick: int) -> None:
        number = self.writes[pick % len(self.writes)].number
        self.write_all(number)
        client, mine = self.speaker(number)
        if client is not None:
            self.killed(stores, lambda: self.directory.commit(client, number), committing=mine)

    @rule(stores=st.integers(0, 8), space=st.sampled_from([*SPACES, b""]))
    def kill_while_it_resets(self, stores: int, space: bytes) -> None:
        self.clear(SPACES[0], True)  # which nobody forgets
        self.killed(stores, lambda: self.directory.clear(space, True), may_go=space)

    def killed(
        self,
        stores: int,
        what: Callable[[], Any],
        committing: list[Writing] | None = None,
        may_go: bytes | None = None,
    ) -> None:
        Life.left = stores
        pins = dict(self.pinned)
        with suppress(Killed):
            what()
        Life.left = None
        # Whatever it had pinned stayed, unless a reset or another chunk's commit took it.
        self.restart(0)
        while self.away and committing is None:
            self.offer_again(0)
        if committing is not None:
            self._offer_all(committing)
        gone = {key for key in pins if pins[key] > self.clock.now and not self.has(key)}
        assert may_go is not None or not gone & self.live.keys()
        self.follow(may_go=set(KEYS))

    def _offer_all(self, committing: list[Writing]) -> None:
        """The table says which chunks of a killed commit count."""
        for name in self.away:
            self.use(SlotRegion.take_over(described(name), self.fds[name]))
        self.away = []
        for one in committing:
            write = self.directory.writes.get(one.number)
            void = write.places.values() if write is not None else ()
            if self.where(one.key) == (one.segment, one.offset):
                self.live[one.key] = one
            elif (one.segment, one.offset) in map(self.at, void):
                continue
            self.writes.remove(one)  # or its slot is free: the writer has said that it is done
        self.follow(may_go=set(KEYS))

    def has(self, key: ChunkKey) -> bool:
        return self.directory.places([key])[0] is not None

    def where(self, key: ChunkKey) -> tuple[str, int] | None:
        (place,) = self.directory.places([key])
        return self.at(place) if place is not None else None

    def at(self, place: int) -> tuple[str, int]:
        region, slot = self.directory.room.at(place)
        return region.id, region.offset(slot)

    # ---- what always holds

    def shown(self, key: ChunkKey) -> bool:
        return key in self.live and self.owned(self.live[key])

    def follow(self, may_go: set[ChunkKey], pins_at: float = 0.0) -> None:
        """Take over what was evicted, if it may have been."""
        for key, one in list(self.live.items()):
            if self.has(key) or not (self.shown(key) or self.lost(one)):
                continue
            assert key in may_go, "evicted what the request itself uses"
            assert not pins_at or self.pinned.get(key, 0.0) <= pins_at, "evicted though pinned"
            del self.live[key]

    def lost(self, one: Writing) -> bool:
        """Whether a chunk is not in its table any more."""
        region = self.directory.region(SegmentId(one.segment))
        for number, slab in enumerate(region.slabs if region is not None else ()):
            at, rest = divmod(one.offset - slab.offset, slab.slot_bytes)
            if 0 <= at < slab.slots:
                slot = number << slots.SLAB_BITS | at
                return bool(rest) or region.generations[slot] != one.number
        return False

    @invariant()
    def the_same_chunks_are_found(self) -> None:
        unread = {key for key, one in self.live.items() if not self.owned(one)}
        found = {key for key in KEYS if self.has(key)}
        assert found - unread == {key for key in self.live if self.shown(key)}

    @invariant()
    def every_chunk_lies_where_it_was_written(self) -> None:
        for key, one in self.live.items():
            if self.shown(key):
                assert self.where(key) == (one.segment, one.offset)
                assert self.memory[one.segment][one.offset : one.offset + one.nbytes] == pattern(
                    one.token, one.nbytes
                )

    def teardown(self) -> None:
        """When all processes have ended and all chunks were removed, every byte is free."""
        try:
            while self.readings:
                self.finish_reading(0)
            while self.away:
                self.offer_again(0)
            assert not self.over & self.directory.writes.keys()
            while self.clients:
                self.kill_process(0)
            self.writes = []
            self.directory.tick()
            self.watch()
            assert not self.directory.writes
            assert not self.directory._pending
            self.directory.remove(list(self.directory.chunks))
            for region in self.directory.regions.values():
                assert region.unused == region.nbytes
                for slab in region.slabs:
                    assert sorted(slab.free) == list(range(slab.slots))
        finally:
            Life.left = None
            self.close_tables()
            for fd in self.fds.values():
                os.close(fd)
            self.patch.undo()

    def close_tables(self) -> None:
        for region in self.directory.regions.values():
            region.close()


if not THOROUGH:  # the same orders each time, whatever else the sources say
    seed(3)(SlotMachine)
SlotMachine.TestCase.settings = settings(
    max_examples=5000 if THOROUGH else 60,
    stateful_step_count=80 if THOROUGH else 50,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
    report_multiple_bugs=False,
)


@pytest.mark.timeout(3600)
class TestSlotsAgainstTheModel(SlotMachine.TestCase):
    pass
