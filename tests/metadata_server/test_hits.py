"""What instances publish against a simple model (each block by itself), in every order of events
hypothesis can think of.

Instances with one rank or two, with one block table or one of each kind, come, publish runs that
overlap, reuse blocks, are hidden and go; chunks are pooled; namespaces are cleared; what
that leaves is cleared away sooner or later. After every step each look-up finds what the model
says, and nothing else."""

from __future__ import annotations

import os
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from instance_cases import NAMESPACE, counts, instance_id, numbers, prompt
from model import FakeClock
from server_cases import add_region, asked

from vcache_backend.metadata_server.hits import HitSearch
from vcache_backend.metadata_server.instances import ShownPart
from vcache_backend.metadata_server.processes import Descriptor, Peer, ProcessId
from vcache_backend.metadata_server.publications import InstancePublications
from vcache_backend.metadata_server.requests import Service
from vcache_backend.protocol import messages as m
from vcache_backend.protocol.generation_table import ForeignTable
from vcache_backend.vram_pool.generations import Generations

THOROUGH = os.environ.get("HYPOTHESIS_PROFILE") == "thorough"
BLOCKS, HASHES, EACH = 14, 8, 2
FULL = m.BlockTable("full")
MIXED = [
    m.BlockTable("window", 1, 2),
    FULL,
    m.BlockTable("state", 2, 1),
    m.BlockTable("local", 1, 4),
    m.BlockTable("full", 2),
]
KINDS: dict[int, tuple[bytes, int, list[m.BlockTable]]] = {
    0: (b"namespac", 1, [FULL]),
    1: (b"elsewher", 2, [FULL]),
    2: (b"a-window", 1, [m.BlockTable("window", 1, 2)]),
    3: (b"of-a-mix", 1, MIXED),
}
"""Namespace, ranks and tables."""
IDS = [instance_id(number) for number in range(5)]
OF = dict(zip(IDS, (0, 0, 1, 3, 3), strict=True))
"""An instance's kind, at first."""
WRITER = Peer(1, ProcessId(11, 5), "gpu-0", "cuda")
PROMPTS = [
    [bytes([1 if at < 4 else 2 + other, at, *bytes(14)]) for at in range(HASHES)]
    for other in range(2)
]
"""The hashes of two prompts that begin alike."""
Name = tuple[int, bytes]
"""Table and hash."""


@dataclass
class Block:
    """A block as an instance has published it."""

    name: Name
    generation: int
    ranks: set[int]


@dataclass
class Model:
    """One instance. told: by block."""

    kind: int
    table: Generations
    whole: bool = True
    told: dict[int, Block] = field(default_factory=dict)
    content: dict[tuple[int, int], Name] = field(default_factory=dict)
    """For good: what a block of a generation has."""

    def found(self) -> Told:
        """The blocks that are unchanged, and that all ranks have published."""
        found: Told = {}
        for block, one in self.told.items():
            if self.is_right(block, one.generation) and len(one.ranks) == KINDS[self.kind][1]:
                found.setdefault(one.name, set()).add((block, one.generation))
        return found

    def is_right(self, block: int, generation: int) -> bool:
        return bool(self.table.counters[block] == generation)

    def publish(self, rank: int, blocks: list[tuple[Name, int, int]]) -> None:
        for name, block, generation in blocks:
            old = self.told.get(block)
            if not self.is_right(block, generation):
                continue
            if old is not None and (old.name, old.generation) == (name, generation):
                old.ranks.add(rank)
            else:
                self.told[block] = Block(name, generation, {rank})


Told = dict[Name, set[tuple[int, int]]]
"""The blocks of each name, and their generations."""


class Question(NamedTuple):
    """names: of the prompt's blocks in each table. others: what instances have that the asker may
    read. pooled: by chunk.
    """

    tables: list[m.BlockTable]
    names: list[list[Name]]
    others: dict[m.InstanceId, Told]
    pooled: list[bool]

    def anywhere(self, name: Name) -> bool:
        return any(name in told for told in self.others.values())


def lasts(table: m.BlockTable, hashes: list[bytes]) -> list[bytes]:
    """The hashes of a table's blocks."""
    return hashes[table.scale - 1 :: table.scale]


class ResidentMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.undo = ExitStack()
        self.begin()
        self.model: dict[m.InstanceId, Model] = {}
        self.said: list[tuple[m.InstanceId, int, m.BlockRun, list[tuple[Name, int, int]]]] = []
        self.pooled: set[m.ChunkKey] = set()

    def begin(self) -> None:
        self.service = Service(1, now=FakeClock())
        add_region(self.service, m.SegmentInfo(m.SegmentId("s"), "gpu-0", "cuda", 1 << 20))
        self.instances = self.service.instances

    def teardown(self) -> None:
        self.undo.close()

    # ---- instances

    @initialize()
    def start(self) -> None:
        for instance, kind in OF.items():
            self.come(instance, kind)

    @rule(instance=st.sampled_from(IDS), kind=st.sampled_from(list(KINDS)))
    def come(self, instance: m.InstanceId, kind: int) -> None:
        namespace, ranks, tables = KINDS[kind]
        known = self.model.get(instance)
        same = known is not None and known.kind == kind
        table = known.table if known is not None and same else Generations(instance, BLOCKS)
        if not same:
            self.undo.callback(table.close)
        join = m.Join(instance, namespace, BLOCKS, ranks, EACH, tables)
        self.instances.join(self.owner(instance), join, [os.dup(table.fd)])
        self.instances.of[instance].whole = True
        if known is not None and same:
            known.whole = True
        else:
            self.model[instance] = Model(kind, table)

    @rule(instance=st.sampled_from(IDS), whole=st.booleans())
    def show(self, instance: m.InstanceId, whole: bool) -> None:
        if instance in self.model:
            self.instances.of[instance].whole = self.model[instance].whole = whole

    @rule(instance=st.sampled_from(IDS))
    @precondition(lambda self: len(self.model) == len(IDS))
    def go(self, instance: m.InstanceId) -> None:
        self.service.disconnect(self.owner(instance))
        self.model.pop(instance, None)

    def owner(self, instance: m.InstanceId) -> Peer:
        """The connection that is all of the instance."""
        return Peer(10 + IDS.index(instance), ProcessId(20, 5), "gpu-0", "cuda")

    def known(self, instance: m.InstanceId) -> InstancePublications:
        known = self.instances.published(instance)
        assert known is not None
        return known

    @rule(instance=st.sampled_from(IDS))
    @precondition(lambda self: IDS[0] in self.model and self.known(IDS[0]).live)
    def change(self, instance: m.InstanceId) -> None:
        if instance in self.model:
            self.known(instance).clear()
            self.model[instance].told = {}

    # ---- publications

    @rule(
        instance=st.sampled_from(IDS),
        table=st.integers(0, len(MIXED) - 1),
        prompt=st.sampled_from(PROMPTS),
        first=st.integers(0, HASHES - 1),
        blocks=st.one_of(
            st.lists(st.integers(0, BLOCKS - 1), min_size=0, max_size=6, unique=True),
            st.integers(0, 4).map(lambda first: list(range(first, BLOCKS))),
        ),
        ranks=st.sampled_from([(0,), (1,), (0, 1), (1, 0)]),
        shorter=st.sampled_from([0, 0, 1, 2]),
    )
    @precondition(lambda self: self.model)
    def publish(
        self,
        instance: m.InstanceId,
        table: int,
        prompt: list[bytes],
        first: int,
        blocks: list[int],
        ranks: tuple[int, ...],
        shorter: int,
    ) -> None:
        """shorter: of how many blocks the second rank does not know any more."""
        if (known := self.model.get(instance)) is None:
            assert self.asks(instance, 0, []) == 0
            return
        _, of_ranks, tables = KINDS[known.kind]
        table %= len(tables)
        for rank in ranks if of_ranks > 1 else (0,):
            self.told(instance, rank, table, prompt, first, blocks)
            blocks = blocks[: max(0, len(blocks) - shorter)]

    @rule(
        instance=st.sampled_from(IDS),
        prompt=st.sampled_from(PROMPTS),
        end=st.sampled_from([2, 3, 4, 6]),
        blocks=st.permutations(range(BLOCKS)),
    )
    def compute(
        self, instance: m.InstanceId, prompt: list[bytes], end: int, blocks: list[int]
    ) -> None:
        """All that a hit which ends there needs."""
        if (known := self.model.get(instance)) is not None:
            _, ranks, tables = KINDS[known.kind]
            for table, its in enumerate(tables):
                due = range(end // its.scale) if its.kind == "full" else self.needs(its, end)
                own, blocks = blocks[: len(due)], blocks[len(due) :]
                for rank in range(ranks):
                    self.told(instance, rank, table, prompt, due.start, own)

    def told(
        self,
        instance: m.InstanceId,
        rank: int,
        table: int,
        prompt: list[bytes],
        first: int,
        blocks: list[int],
    ) -> None:
        known = self.model[instance]
        hashes = lasts(KINDS[known.kind][2][table], prompt)[first:]
        pairs = list(zip(hashes, blocks, strict=False))
        counters = known.table.counters
        for name, block in pairs:
            content = known.content.setdefault((block, int(counters[block])), (table, name))
            if content != (table, name):
                known.content[block, known.table.filled([block])] = table, name
        told = [((table, one), block, int(counters[block])) for one, block in pairs]
        packs = numbers(*(block for _, block in pairs)), counts(*(number for *_, number in told))
        run = m.BlockRun(first, *packs, table, b"".join(one for one, _ in pairs))
        self.said.append((instance, rank, run, told))
        self.publish_one(*self.said[-1])

    @rule(back=st.integers(1, 6))
    @precondition(lambda self: self.said)
    def publish_again(self, back: int) -> None:
        """As after a reconnection."""
        instance, rank, run, told = self.said[-min(back, len(self.said))]
        if (known := self.model.get(instance)) is not None:
            _, ranks, tables = KINDS[known.kind]
            mine = all(known.content.get((block, number)) == name for name, block, number in told)
            if rank < ranks and run.table < len(tables) and mine:
                self.publish_one(instance, rank, run, told)

    def publish_one(
        self, instance: m.InstanceId, rank: int, run: m.BlockRun, told: list[tuple[Name, int, int]]
    ) -> None:
        assert self.asks(instance, rank, [run]) == len(told)
        self.model[instance].publish(rank, told)

    def asks(self, instance: m.InstanceId, rank: int, runs: list[m.BlockRun]) -> int:
        owner = self.owner(instance)
        if (shared := self.instances.of.get(instance)) is not None:  # as its worker
            shared.parts[rank] = ShownPart(owner, Descriptor(os.memfd_create("part")))
        return self.instances.publish(owner, m.Publish(instance, rank, runs)).count

    @rule(instance=st.sampled_from(IDS), blocks=st.sets(st.integers(0, BLOCKS - 1), max_size=3))
    def reuse(self, instance: m.InstanceId, blocks: set[int]) -> None:
        if instance in self.model:
            self.model[instance].table.void(list(blocks))
            self.model[instance].table.filled(list(blocks))

    # ---- the pool

    @rule(
        kind=st.sampled_from(list(KINDS)),
        prompt=st.sampled_from(PROMPTS),
        number=st.integers(0, HASHES // EACH - 1),
        by=st.sampled_from([(0,), (1,), (0, 1)]),
    )
    def store(self, kind: int, prompt: list[bytes], number: int, by: tuple[int, ...]) -> None:
        namespace, ranks, _ = KINDS[kind]
        key = m.chunk_keys(namespace, b"".join(prompt), EACH)[number]
        for rank in by:
            if rank < ranks:
                (own,) = m.of_rank([key], rank)
                reserved = asked(self.service, WRITER, m.Reserve([own], 256))
                asked(self.service, WRITER, m.Commit(reserved.reservation))
                self.pooled.add(own)

    @rule(kind=st.sampled_from([None, *KINDS]), reset=st.booleans())
    def clear(self, kind: int | None, reset: bool) -> None:
        namespace = b"" if kind is None else KINDS[kind][0]
        asked(self.service, WRITER, m.Clear(namespace, reset))
        self.pooled = {key for key in self.pooled if not key.startswith(namespace)}
        for model in self.model.values():
            if kind in (None, model.kind):
                model.told = {}

    @rule()
    @precondition(lambda self: len(self.pooled) > 3)
    def restart(self) -> None:
        """All that another server knows it hears from those who join it."""
        self.begin()
        self.pooled, earlier, self.model = set(), self.model, {}
        for instance, model in earlier.items():
            self.come(instance, model.kind)

    # ---- what always holds

    @invariant()
    def every_look_up_finds_what_is_there(self) -> None:
        for kind in KINDS:
            for asker in (IDS[0], IDS[3], m.InstanceId(b"")):
                for at, hashes in enumerate(PROMPTS):
                    for limit in (HASHES, HASHES - 1 - 2 * at):
                        self.look_up(kind, asker, hashes, limit)

    def look_up(self, kind: int, asker: m.InstanceId, prompt: list[bytes], limit: int) -> None:
        namespace, ranks, tables = KINDS[kind]
        if asker and (asker not in self.model or self.model[asker].kind != kind):
            return
        hashes = b"".join(prompt)
        found = asked(self.service, WRITER, m.Find(namespace, hashes, EACH, limit, ranks, asker))
        others = {
            instance: model.found()
            for instance, model in self.model.items()
            if instance != asker and model.kind == kind and model.whole
        }
        keys = m.chunk_keys(namespace, hashes, EACH)
        pooled = [all(key in self.pooled for key in m.of_ranks([one], ranks)) for one in keys]
        names = [[(table, one) for one in lasts(its, prompt)] for table, its in enumerate(tables)]
        question = Question(tables, names, others, pooled)
        covered = self.covered(question)
        end = self.longest(question, min(covered, limit))
        if any(table.kind == "full" for table in tables):
            assert found.found == covered
        else:
            leading = [*pooled, False].index(False) * EACH
            assert found.found == max(end, leading)
        ends = {end}
        if not (asker or any(others.values())):  # nobody has said of what tables the model is
            ends.add(min(found.found, limit))
        assert found.end in ends
        assert not found.cut
        assert list(map(bool, found.pooled)) == pooled[: found.found // EACH]
        if any(others.values()):
            self.runs_are_right(found, question)
        else:
            assert not found.residents

    @staticmethod
    def covered(asked: Question) -> int:
        """How many leading hashes the full tables or the pool have."""
        stops = [HASHES]
        for table, blocks in zip(asked.tables, asked.names, strict=True):
            here = [
                asked.anywhere(name)
                or all(asked.pooled[at * table.scale // EACH : -(-(at + 1) * table.scale // EACH)])
                for at, name in enumerate(blocks)
            ]
            if table.kind == "full":
                stops.append([*here, False].index(False) * table.scale)
        return min(stops)

    @staticmethod
    def needs(table: m.BlockTable, end: int) -> range:
        stop = end // table.scale
        if table.kind == "local":
            return range(stop // table.reach * table.reach, stop)
        return range(max(0, stop - table.reach), stop)

    def longest(self, asked: Question, most: int) -> int:
        unit = max(table.scale for table in asked.tables)
        partly = [at for at, table in enumerate(asked.tables) if table.kind != "full"]
        for end in range(most // unit * unit, 0, -unit):
            needs = [(at, block) for at in partly for block in self.needs(asked.tables[at], end)]
            due = {asked.names[at][block] for at, block in needs}
            if not partly or any(due <= told.keys() for told in asked.others.values()):
                return end
        return 0

    def runs_are_right(self, found: m.Found, asked: Question) -> None:
        tables, names, others, pooled = asked
        spans = [(run.table, run.first) for run in found.residents]
        assert spans == sorted(spans)
        holders: dict[tuple[int, int], list[bytes]] = {}
        for run in found.residents:
            assert 0 < run.count <= found.end // tables[run.table].scale
            for block in range(run.first, run.stop):
                one = run.cut(block, block + 1)
                there = others[m.InstanceId(run.instance)][names[run.table][block]]
                right = {(numbers(block), counts(number)) for block, number in there}
                assert (one.blocks, one.generations) in right
                holders.setdefault((run.table, block), []).append(run.instance)
        partly = set[bytes]()
        for table, its in enumerate(tables):
            full = its.kind == "full"
            due = range(found.end // its.scale) if full else self.needs(its, found.end)
            here = {block for at, block in holders if at == table}
            assert here <= set(due)
            for block in due:
                owners = holders.get((table, block), [])
                assert len(set(owners)) == len(owners) <= (m.MAX_REPLICAS if full else 1)
                assert owners or (full and pooled[block * its.scale // EACH])
                partly |= set() if full else set(owners)
        assert len(partly) <= 1

    @invariant()
    def the_tables_are_as_large_as_they_should_be(self) -> None:
        for instance in IDS:
            model = self.model.get(instance)
            if model is None:
                assert instance not in self.instances.of
                continue
            of = self.known(instance)
            least = sum(map(len, model.found().values()))
            assert least == of.live
            assert len(of.named) <= sum(map(bool, of._place_of)) <= len(model.told) <= BLOCKS


if not THOROUGH:  # the same orders each time, whatever else the sources say
    seed(3)(ResidentMachine)
ResidentMachine.TestCase.settings = settings(
    max_examples=5000 if THOROUGH else 40,
    stateful_step_count=80 if THOROUGH else 40,
    deadline=None,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.timeout(3600 if THOROUGH else 300)
class TestResidentsAgainstTheModel(ResidentMachine.TestCase):
    @pytest.fixture(autouse=True)
    def little_at_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Logs have few more places than twice their blocks."""
        monkeypatch.setattr(m, "MAX_PUBLISHED", BLOCKS)


# ---- where a hit ends


WIDE = m.BlockTable("full", 4)
WINDOW, STATE, LOCAL = (
    m.BlockTable("window", 1, 3),
    m.BlockTable("state", 4, 1),
    m.BlockTable("local", 1, 4),
)
Blocks = dict[int, set[int]]
"""Of a table."""

CASES: dict[str, tuple[list[m.BlockTable], int, Blocks, int]] = {
    # tables, limit, the blocks that are there, the end
    "full tables need nothing more": ([FULL], 7, {}, 7),
    "a common end of all tables' blocks": ([FULL, WIDE], 11, {}, 8),
    "nothing": ([FULL], 0, {}, 0),
    "no window": ([FULL, WINDOW], 9, {}, 0),
    "a window at the end": ([FULL, WINDOW], 9, {1: {6, 7, 8}}, 9),
    "a window before the end": ([WINDOW, FULL], 9, {0: {3, 4, 5}}, 6),
    "a window that is too short": ([FULL, WINDOW], 9, {1: {7, 8}}, 0),
    "a window with a hole": ([FULL, WINDOW], 9, {1: {1, 2, 3, 5, 6}}, 4),
    "a window at the beginning": ([FULL, WINDOW], 9, {1: {0, 1}}, 2),
    "windows behind the limit": ([FULL, WINDOW], 5, {1: set(range(3, 9))}, 0),
    "the longest of two windows": ([FULL, WINDOW], 20, {1: {2, 3, 4, 10, 11, 12}}, 13),
    "a state": ([FULL, STATE], 11, {1: {1}}, 8),
    "the state before": ([FULL, STATE], 7, {1: {0, 1}}, 4),
    "a state and a window that do not meet": ([FULL, STATE, WINDOW], 12, {1: {2}, 2: {5, 6, 7}}, 0),
    "a state and a window that meet": ([WINDOW, STATE, FULL], 12, {0: {5, 6, 7, 11}, 1: {1, 2}}, 8),
    "a local chunk": ([FULL, LOCAL], 7, {1: {4, 5, 6}}, 7),
    "the beginning of a local chunk": ([FULL, LOCAL], 7, {1: {5, 6}}, 4),
    "a part of a local chunk": ([FULL, LOCAL], 7, {1: {4}}, 5),
    "a window that reaches nowhere": ([FULL, m.BlockTable("window")], 5, {}, 5),
    "only states": ([STATE], 100, {0: {4}}, 20),
    "only windows": ([WINDOW, m.BlockTable("window", 1, 2)], 9, {0: {2, 3, 4}, 1: {3, 4}}, 5),
}


@pytest.mark.parametrize(("tables", "limit", "here", "end"), CASES.values(), ids=CASES)
def test_a_hit_ends_where_all_tables_have_what_it_needs(
    tables: list[m.BlockTable], limit: int, here: Blocks, end: int
) -> None:
    search, there = searched(tables, here)
    assert search.best(limit, [there])[0] == end


def searched(tables: list[m.BlockTable], here: Blocks) -> tuple[HitSearch, InstancePublications]:
    """A look-up, and an instance that has published these blocks."""
    with closing(Generations(IDS[0], 64)) as table:
        join = m.Join(IDS[0], NAMESPACE, 64, 1, 4, tables)
        there = InstancePublications(join, ForeignTable(table.fd, IDS[0], 64))
        pairs = [(number, block) for number, blocks in here.items() for block in blocks]
        for own, (number, block) in enumerate(pairs):
            name = prompt(1, (block + 1) * tables[number].scale - 1, 1)
            packs = numbers(own), counts(table.filled([own]))
            there.publish(0, [m.BlockRun(block, *packs, number, name)])
    return HitSearch(prompt(100, 0, 1), tables), there
