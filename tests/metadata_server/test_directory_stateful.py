"""The directory against a simple model, in every order of events hypothesis can think of.

Several processes with several connections each store, read, die and linger; leases and reservations
run out; segments come and go; the server restarts from its ledger, whole or compacted. After every
step: every leased location holds the bytes last committed under its key, for its grace also where
the connection or the server is gone; no two occupied places overlap, no chunk is lost or counted
twice, and the ledger tells the truth. `HYPOTHESIS_PROFILE=thorough` runs many more, and longer
ones."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Collection

import msgspec
import pytest
from directory_machine import ALL_KEYS, DEVICES, LIMITS, SEGMENTS, Clients, Ledger, one_of
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule
from model import Place, Slot, pattern

from vcache_backend.metadata_server.pool.directory import Directory
from vcache_backend.protocol.messages import GRACE_SECONDS, ChunkKey, SegmentId

THOROUGH = os.environ.get("HYPOTHESIS_PROFILE") == "thorough"


def tables(thing: object, path: str = "") -> dict[str, int]:
    """How many items each container has that is reached by attributes of our own classes."""
    sized = isinstance(thing, Collection) and not isinstance(thing, (str, bytes))
    found = {path: len(thing)} if sized else {}
    if type(thing).__module__.startswith(
        ("vcache_backend.metadata_server", "vcache_backend.protocol")
    ):
        names = getattr(thing, "__struct_fields__", None) or getattr(thing, "__dict__", ())
        for name in names:
            found |= tables(getattr(thing, name), f"{path}.{name}")
    return found


class DirectoryMachine(Clients):
    @initialize()
    def start(self) -> None:
        for name in ("s0", "s1"):
            self.offer_new(name)
        for device in DEVICES:
            self.connect_new(device)
        for at in range(0, 6, 2):
            self.store(at, ALL_KEYS[at : at + 2], 1024)

    # ---- segments

    @rule(name=st.sampled_from(list(SEGMENTS)))
    @precondition(lambda self: not self.model.absent)
    def offer_new(self, name: str) -> None:
        if name not in self.model.segments:
            if name not in self.memory.bytes_of:
                self.memory.create(name, SEGMENTS[name][1])
            self.model.segments[name] = Place(*SEGMENTS[name])
            assert self.add_segment(name) == 0
            assert len(self.directory.segments) == len(self.model.segments)

    @rule(pick=one_of)
    @precondition(lambda self: self.model.segments)
    def drop_segment(self, pick: int) -> None:
        name = sorted(self.model.segments)[pick % len(self.model.segments)]
        live = sum(slot.state == "live" for slot in self.model.lying(name))
        with self.little_at_once():
            assert self.directory.drop_segment(SegmentId(name)) >= live
        self.model.segments[name].draining = True
        self.follow()

    @rule(pick=one_of)
    @precondition(lambda self: self.model.absent)
    def offer_again(self, pick: int) -> None:
        name = sorted(self.model.absent)[pick % len(self.model.absent)]
        self.model.segments[name] = self.model.absent.pop(name)
        resting = sum(slot.state == "resting" for slot in self.model.lying(name))
        assert self.add_segment(name) >= resting
        self.follow()

    @rule()
    @precondition(lambda self: self.model.absent)
    def give_up_absent_segments(self) -> None:
        model = self.model
        lying = [s for name in model.absent for s in model.lying(name) if s.state != "void"]
        resting = sum(slot.state == "resting" for slot in lying)
        assert self.directory.forget_absent() == (len(model.absent), resting)
        for slot in lying:
            model.slots.remove(slot)
        for name in model.absent:
            model.left(name)
            del self.memory.bytes_of[name]
        model.absent = {}
        self.forget_writers()

    # ---- the server's life

    @rule(offered=st.integers(0, 3), wait=st.booleans())
    def restart(self, offered: int, wait: bool) -> None:
        """The server dies and another one starts from the ledger; the workers and their kernels go
        on. wait: until it reserves.
        """
        self.restarted = True
        self.keep_ledger()
        state = self.ledger.state
        assert state.generation >= self.highest_generation
        self.model.restart(self.clock.now)
        self.model.rested = {key: place for place, key in enumerate(state.chunks)}
        self.directory = Directory(LIMITS, self.clock, first_id=self.highest_id + 1000)
        deque(self.directory.restore(state), 0)
        self.ledger, self.compacting = Ledger(), None
        self.keep_ledger()
        self.clients = [msgspec.structs.replace(one, id=10_000 + one.id) for one in self.clients]
        self.old_leases = self.old_leases[-2:]
        while offered and self.model.absent:
            self.offer_again(0)
            offered -= 1
        if wait:
            self.clock.advance(GRACE_SECONDS)

    @rule()
    @precondition(lambda self: self.compacting is None)
    def start_compaction(self) -> None:
        self.keep_ledger()
        self.compacting = Ledger(), iter(self.ledger.records[:])
        self.compact_a_slice()

    @rule()
    @precondition(lambda self: self.compacting is not None)
    def compact_a_slice(self) -> None:
        self.keep_ledger()
        ledger, told = self.compacting
        record = next(told, None)
        if record is None:
            self.ledger, self.compacting = ledger, None
        else:
            ledger.write(self.directory.still(record))

    @rule(slices=st.integers(0, 3), key=st.sampled_from(ALL_KEYS))
    def restart_and_compact_at_once(self, slices: int, key: ChunkKey) -> None:
        """Segments come back, and chunks are stored, while the snapshot in which those segments are
        absent is being copied.
        """
        self.restart(1, True)
        self.start_compaction()
        for _ in range(slices):
            if self.compacting is not None:
                self.compact_a_slice()
        if self.clients:
            self.store(0, [key], 1024)
        while self.model.absent:
            self.offer_again(0)
        while self.compacting is not None:
            self.compact_a_slice()

    def teardown(self) -> None:
        """When all processes have ended and all memory was taken back, no table holds anything of
        them.
        """
        for name in list(self.directory.segments):
            self.directory.drop_segment(SegmentId(name))
        for client in self.clients:
            self.directory.disconnect(client)
        for process in {*self.processes, *self.directory.reservations.processes()}:
            self.directory.process_gone(process)
        self.directory.forget_absent()
        self.clock.advance(LIMITS.lease_seconds + LIMITS.reservation_seconds)
        self.directory.tick()
        self.directory.backlog.run(10_000)
        # What the server would have taken by now.
        self.directory.records.clear()
        left = [table for table, items in tables(self.directory).items() if items]
        assert not [one for one in left if not one.endswith("counters")]

    # ---- what always holds

    @invariant()
    def the_ledger_tells_the_truth(self) -> None:
        self.keep_ledger()
        state = self.ledger.state
        kept = [s for s in self.model.slots if s.state in ("live", "resting")]
        assert state.chunks == {slot.key: slot.location for slot in kept}
        assert set(state.segments) == set(self.model.segments) | set(self.model.absent)
        writes = self.model.writes.items()
        held = {id_: {slot.key: slot.location for slot in one.slots} for id_, one in writes}
        assert {id_: one.chunks for id_, one in state.held.items()} == held

    def intact(self, slot: Slot) -> bool:
        """Whether its bytes are those that were written for it."""
        return self.memory.read(slot.location) == pattern(slot.token, slot.location.length)

    @invariant()
    def every_chunk_is_where_it_should_be_with_its_bytes(self) -> None:
        assert self.visible() == self.model.live_keys()
        assert len(self.directory) == len(self.model.live_keys())
        for slot in self.model.slots:
            assert slot.state not in ("live", "doomed", "resting") or self.intact(slot)

    @invariant()
    def every_lease_that_holds_still_shows_its_bytes(self) -> None:
        for held in self.model.leases.values():
            assert held.deadline <= self.clock.now or all(map(self.intact, held.slots))
        for until, slot in self.model.before:
            assert until <= self.clock.now or self.intact(slot)

    @invariant()
    def every_byte_is_used_once_or_free(self) -> None:
        infos = {info.id: info for info in self.directory.segment_infos()}
        assert set(infos) == set(self.model.segments) | set(self.model.absent)
        for name, place in (self.model.segments | self.model.absent).items():
            mine = self.model.lying(name)
            info = infos[SegmentId(name)]
            segment = self.directory.segments[SegmentId(name)]
            assert info.used == self.model.used(name)
            assert segment.extents.largest == self.model.largest_gap(name)
            here = "draining" if place.draining else "live"
            assert info.state == ("absent" if name in self.model.absent else here)
            assert segment.reserved == sum(slot.state in ("open", "void") for slot in mine)
            assert info.chunks == len(mine) - segment.reserved
            assert info.leased == sum(self.model.leased(slot) for slot in mine)

    @invariant()
    def the_order_of_eviction_is_the_order_of_use(self) -> None:
        live, segments = self.directory.contents.live, self.directory.segments.values()
        orders = [list(segment.order) for segment in segments]
        uses = {one.use: one.key for order in orders for one in order if live.get(one.key) is one}
        assert orders == [sorted(order, key=lambda entry: entry.use) for order in orders]
        assert [uses[use] for use in sorted(uses)] == self.model.order

    @invariant()
    def the_tables_are_as_large_as_they_should_be(self) -> None:
        assert len(self.directory.leases) == len(self.model.leases)
        writes, reservations = self.model.writes, self.directory.reservations
        void = [write for write in writes.values() if write.client is None]
        assert reservations.counts() == (len(writes) - len(void), len(void))
        assert reservations.processes() == {write.process for write in void}
        occupied = sum(slot.location.segment in self.model.segments for slot in self.model.slots)
        assert occupied == self.directory.contents.placement.occupied()
        assert occupied <= LIMITS.max_chunks or self.restarted


DirectoryMachine.TestCase.settings = settings(
    max_examples=5000 if THOROUGH else 150,
    stateful_step_count=80 if THOROUGH else 50,
    deadline=None,
    derandomize=not THOROUGH,
    phases=[Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink],
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.timeout(3600 if THOROUGH else 300)
class TestDirectoryAgainstTheModel(DirectoryMachine.TestCase):
    pass
