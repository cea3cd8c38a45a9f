"""What instances publish against a simple model (a dict an instance), in every order of events
hypothesis can think of.

Instances of two namespaces, with one rank or two, come, publish, retract, are hidden and go; chunks
are pooled; namespaces are cleared; what that leaves is cleared away sooner or later. After every
step each look-up finds what the model says, and nothing else."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from instance_cases import counts, instance_id, numbers
from model import FakeClock, chunk_key
from server_cases import add_region, asked

from vcache_backend.metadata_server.directory import Backlog
from vcache_backend.metadata_server.processes import Peer, ProcessId
from vcache_backend.metadata_server.requests import Service
from vcache_backend.metadata_server.residents import BLOCK_BYTES
from vcache_backend.protocol import messages as m

THOROUGH = os.environ.get("HYPOTHESIS_PROFILE") == "thorough"
BLOCKS, KEYS, MAX_CHUNKS = 5, 4, 8
NAMESPACES = {1: (b"namespac", 1), 2: (b"elsewher", 2)}
"""By number of ranks: (namespace, blocks a chunk)."""
IDS = [instance_id(number) for number in range(4)]
RANKS = dict(zip(IDS, (1, 1, 2, 2), strict=True))
"""Of an instance, at first."""
WRITER = Peer(1, ProcessId(11, 5), "gpu-0", "cuda")
ALL_KEYS = {
    (ranks, rank): [chunk_key(n, rank, NAMESPACES[ranks][0]) for n in range(KEYS)]
    for ranks in (1, 2)
    for rank in (0, 1)
}
Place = tuple[bytes, bytes]


@dataclass
class Told:
    """A chunk as an instance has published it."""

    place: Place
    sequence: int
    by: set[int]

    def blocks(self) -> set[bytes]:
        blocks = self.place[0]
        return {blocks[at : at + 4] for at in range(0, len(blocks), 4)}


@dataclass
class Model:
    """One instance."""

    ranks: int
    whole: bool = True
    floor: int = 0
    told: dict[bytes, Told] = field(default_factory=dict)

    def found(self) -> dict[bytes, Place]:
        return {key: one.place for key, one in self.told.items() if len(one.by) == self.ranks}

    def publish(self, rank: int, sequence: int, key: bytes, place: Place, full: bool) -> bool:
        old = self.told.get(key)
        if old is not None and old.place == place:
            if len(old.by) == self.ranks:
                old.sequence = max(old.sequence, sequence)
            elif sequence < old.sequence:
                return False
            else:
                old.by = {rank} | (old.by if sequence == old.sequence else set())
                old.sequence = sequence
            return True
        new = Told(place, sequence, {rank})
        rivals = [k for k, one in self.told.items() if k == key or one.blocks() & new.blocks()]
        twice = len(new.blocks()) * 4 < len(place[0])
        if twice or any(self.told[k].sequence > sequence for k in rivals):
            return False
        if full and not rivals:
            return False
        for k in rivals:
            del self.told[k]
        self.told[key] = new
        return True


class ResidentMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.service = Service(1, now=FakeClock(), max_chunks=MAX_CHUNKS)
        add_region(self.service, m.SegmentInfo(m.SegmentId("s"), "gpu-0", "cuda", 1 << 20))
        self.residents = self.service.residents
        self.model: dict[m.InstanceId, Model] = {}
        self.pooled: set[m.ChunkKey] = set()

    def keys(self, ranks: int, rank: int = 0) -> list[m.ChunkKey]:
        return ALL_KEYS[ranks, rank]

    # ---- instances

    @initialize()
    def start(self) -> None:
        for instance, ranks in RANKS.items():
            self.come(instance, ranks)

    @rule(instance=st.sampled_from(IDS), ranks=st.sampled_from([1, 2]))
    def come(self, instance: m.InstanceId, ranks: int) -> None:
        namespace, each = NAMESPACES[ranks]
        self.residents.open(m.Join(instance, namespace, BLOCKS, ranks, each))
        self.residents.show(instance, True)
        if (known := self.model.get(instance)) is not None and known.ranks == ranks:
            known.whole = True
        else:
            self.model[instance] = Model(ranks)

    @rule(instance=st.sampled_from(IDS), whole=st.booleans())
    def show(self, instance: m.InstanceId, whole: bool) -> None:
        self.residents.show(instance, whole)
        if instance in self.model:
            self.model[instance].whole = whole

    @rule(instance=st.sampled_from(IDS))
    @precondition(lambda self: len(self.model) == len(IDS))
    def go(self, instance: m.InstanceId) -> None:
        self.residents.close(instance)
        self.model.pop(instance, None)

    @rule(instance=st.sampled_from(IDS))
    @precondition(lambda self: self.residents.of(IDS[0]))
    def change(self, instance: m.InstanceId) -> None:
        self.residents.empty(instance)
        if instance in self.model:
            self.model[instance].told = {}

    # ---- publications

    @rule(
        instance=st.sampled_from(IDS),
        first=st.integers(0, KEYS - 1),
        places=st.lists(
            st.tuples(
                st.lists(st.integers(0, BLOCKS - 1), min_size=2, max_size=2), st.integers(1, 2)
            ),
            min_size=1,
            max_size=3,
        ),
        sequence=st.integers(0, 2),
        ranks=st.sampled_from([(0,), (1,), (0, 1)]),
    )
    @precondition(lambda self: self.model)
    def publish(
        self,
        instance: m.InstanceId,
        first: int,
        places: list[tuple[list[int], int]],
        sequence: int,
        ranks: tuple[int, ...],
    ) -> None:
        if (known := self.model.get(instance)) is None:
            assert self.residents.publish(0, m.Publish(instance, sequence, [], b"", b"")) == 0
            return
        each = NAMESPACES[known.ranks][1]
        chunks = [
            (numbers(*blocks[:each]), counts(*[generation] * each)) for blocks, generation in places
        ][: KEYS - first]
        for rank in ranks if known.ranks > 1 else (0,):
            keys = self.keys(known.ranks, rank)[first : first + len(chunks)]
            packed = [b"".join(parts) for parts in zip(*chunks, strict=True)] or [b"", b""]
            request = m.Publish(instance, sequence, keys, *packed)
            taken = self.residents.publish(rank, request)
            assert taken == self.told(known, rank, sequence, self.keys(known.ranks)[first:], chunks)

    @rule(
        instance=st.sampled_from(IDS[2:]),
        number=st.integers(0, KEYS - 1),
        block=st.integers(0, BLOCKS - 1),
        sequences=st.lists(st.integers(0, 2), min_size=2, max_size=3),
        first=st.integers(0, 1),
    )
    def publish_the_same_of_all_ranks(
        self, instance: m.InstanceId, number: int, block: int, sequences: list[int], first: int
    ) -> None:
        for at, sequence in enumerate(sequences):
            places, ranks = [([block, BLOCKS - 1 - block], 1)], ((first + at) % 2,)
            self.publish(instance, number, places, sequence, ranks)

    def told(
        self, known: Model, rank: int, sequence: int, keys: list[m.ChunkKey], chunks: list[Place]
    ) -> int:
        if sequence < known.floor:
            return 0
        room = MAX_CHUNKS - sum(len(model.told) for model in self.model.values())
        limit = len(known.told) + max(0, room)
        taken = 0
        for key, place in zip(keys, chunks, strict=False):
            taken += known.publish(rank, sequence, key, place, len(known.told) >= limit)
        return taken

    @rule(instance=st.sampled_from(IDS), sequence=st.integers(0, 3))
    def retract(self, instance: m.InstanceId, sequence: int) -> None:
        known = self.model.get(instance, Model(1))
        void = [key for key, one in known.told.items() if one.sequence < sequence]
        assert self.residents.retract(instance, sequence) == len(void)
        known.floor = max(known.floor, sequence)
        for key in void:
            del known.told[key]

    # ---- the pool

    @rule(
        ranks=st.sampled_from([1, 2]),
        number=st.integers(0, KEYS - 1),
        by=st.sampled_from([(0,), (1,), (0, 1)]),
    )
    def store(self, ranks: int, number: int, by: tuple[int, ...]) -> None:
        keys = [self.keys(ranks, rank)[number] for rank in by if rank < ranks]
        reserved = asked(self.service, WRITER, m.Reserve(keys, 256))
        asked(self.service, WRITER, m.Commit(reserved.reservation))
        every = [key for ranks in (1, 2) for rank in range(ranks) for key in self.keys(ranks, rank)]
        present = zip(every, asked(self.service, WRITER, m.Contains(every)).present, strict=True)
        self.pooled = {key for key, there in present if there}

    @rule(ranks=st.sampled_from([0, 1, 2]), reset=st.booleans())
    def clear(self, ranks: int, reset: bool) -> None:
        namespace = NAMESPACES[ranks][0] if ranks else b""
        asked(self.service, WRITER, m.Clear(namespace, reset))
        self.pooled = {key for key in self.pooled if not key.startswith(namespace)}
        for model in self.model.values():
            if ranks in (0, model.ranks):
                model.told = {}

    @rule(steps=st.integers(1, 20))
    def go_on(self, steps: int) -> None:
        self.service.backlog.run(steps)

    @rule()
    def go_on_to_the_end(self) -> None:
        """Then no block belongs to anything that is not found any more: memory is bounded by the
        chunks that are.
        """
        while self.service.backlog:
            self.service.backlog.run(100)
        for instance, model in self.model.items():
            holders = self.residents._of[instance].holders
            told = {bytes(one.place[0]): one.blocks() for one in model.told.values()}
            held = {numbers(block) for block, one in enumerate(holders) if one is not None}
            assert held == set().union(*told.values())
            assert {one.blocks for one in holders if one is not None} == set(told)
        of, models = self.residents._of, self.model.items()
        chunks = sum(len(model.told) * of[i].chunk_bytes for i, model in models)
        held = len(models) * BLOCKS * BLOCK_BYTES + chunks
        assert self.residents.nbytes == held

    # ---- what always holds

    @invariant()
    def every_look_up_finds_what_is_there(self) -> None:
        for ranks in (1, 2):
            for asker in (*IDS[:2], m.InstanceId(b"")):
                self.look_up(ranks, asker)

    def look_up(self, ranks: int, asker: m.InstanceId) -> None:
        keys = self.keys(ranks)
        found = asked(self.service, WRITER, m.Find(keys, ranks, asker))
        others = {
            i: model.found()
            for i, model in self.model.items()
            if i != asker and model.ranks == ranks and model.whole
        }
        last: m.InstanceId | None = None
        for at, key in enumerate(keys):
            pooled = all(self.keys(ranks, rank)[at] in self.pooled for rank in range(ranks))
            places = {(one, *chunks[key]) for one, chunks in others.items() if key in chunks}
            if not (pooled or places):
                assert len(found.pooled) == at
                assert all(run.stop <= at for run in found.residents)
                return
            assert found.pooled[at] == pooled
            runs = [run.cut(at, at + 1) for run in found.residents if run.first <= at < run.stop]
            here = [(run.instance, run.blocks, run.generations) for run in runs]
            assert len(set(here)) == len(here) == min(m.MAX_REPLICAS, len(places))
            assert set(here) <= places
            if here:
                assert here[0][0] == last or last not in {instance for instance, _, _ in places}
                last = here[0][0]
        assert (len(found.pooled), found.cut) == (KEYS, False)

    @invariant()
    def the_tables_are_as_large_as_they_should_be(self) -> None:
        for instance in IDS:
            model = self.model.get(instance)
            assert len(self.residents.of(instance)) == (0 if model is None else len(model.found()))
        assert sum(len(model.told) for model in self.model.values()) <= MAX_CHUNKS


ResidentMachine.TestCase.settings = settings(
    max_examples=5000 if THOROUGH else 80,
    stateful_step_count=80 if THOROUGH else 40,
    deadline=None,
    derandomize=not THOROUGH,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.timeout(3600 if THOROUGH else 300)
class TestResidentsAgainstTheModel(ResidentMachine.TestCase):
    @pytest.fixture(autouse=True)
    def little_at_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """What is left for later turns is left, however few chunks there are."""
        monkeypatch.setattr(Backlog, "AT_ONCE", 1)
