"""Blocks of every block table, copied in place between the KV caches of two processes, which vLLM
itself has laid out: whatever tables a model has, a block is a block."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import closing
from itertools import count
from typing import Any

import pytest
from engine_cases import Node, node
from neighbour_cases import HOST, instance, mapped
from processes import PATIENT, SECONDS, Worker, eventually
from vllm_cases import home, needs_vllm

pytest.importorskip("vllm.v1.worker.utils", reason="vLLM is not installed")

from table_cases import BLOCKS, Owner, Tables, models

from vcache_backend.integration.vllm.metadata import LoadSpec, PublicationSpec, StepMetadata
from vcache_backend.integration.vllm.telemetry.stats import Meter
from vcache_backend.integration.vllm.worker.loads import Loading, Loads
from vcache_backend.integration.vllm.worker.stores import Attached, Stores
from vcache_backend.protocol.messages import BlockRun, ResidentRun
from vcache_backend.resident.mappings import Neighbours
from vcache_backend.transfer.layout import Layout
from vcache_backend.transfer.session import Session
from vcache_backend.vram_pool.copies.copier import NOTHING

pytestmark = needs_vllm
EACH = 3
"""Blocks of each table."""


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    with node(tmp_path_factory.mktemp("tables"), PATIENT) as made:
        made.serve()
        yield made


_numbers = count()


def owner(here: Node, *given: Any) -> Worker:
    """In a process of its own. given: see `Tables`."""
    number = next(_numbers)
    given = here.path, PATIENT, instance(number), *given
    made = Worker(home(), Owner, *given, name=f"owner {number}")
    return here.undo.enter_context(made).made()


class Reader(Tables):
    """A worker that loads out of others' KV caches."""

    def __init__(self, here: Node, *given: Any) -> None:
        super().__init__(*given)
        kv, size = self.kv, self.groups.size
        fields = {"model": "test", "kv_heads": 1, "head_dim": 1, "block_size": kv.block_size}
        fields |= {"dtype": kv.dtype, "layers": kv.layers, "kv_layout": kv.name}
        layout = Layout(chunk_size=size, **fields)
        self.session = Session(here.config("host", chunk_size=size), layout)
        self.session.bind(self.views, kv)
        self.neighbours = Neighbours(self.session.client, HOST, kv, 0)
        block = self.groups.groups[0].block_size
        self.worker = Attached(self.session, kv, block, self.neighbours)

    def load(self, blocks: list[int], tokens: int, runs: list[ResidentRun]) -> Loading:
        """To its end."""
        for run in runs:
            assert mapped(self.neighbours, run.instance)
        spec = LoadSpec("a request", blocks=blocks, tokens=tokens, residents=runs)
        loading = Loading(self.worker, spec, NOTHING)
        loading.run(SECONDS)
        return loading

    def close(self) -> None:
        self.neighbours.close()
        self.session.close()


ANY = random.Random(3)


CASES = [(model, layout, 1) for model in models() for layout in ("LBHNC", "BLHNC")]
CASES += [("gpt-oss", "LBNHC", 2), ("qwen 3.5", "LBNHC", 2)]


@pytest.mark.parametrize("case", CASES, ids=lambda case: " ".join(map(str, case)))
def test_a_load_fills_blocks_of_every_table_and_no_other_byte(
    here: Node, case: tuple[str, str, int]
) -> None:
    """In one copy, out of blocks anywhere into blocks anywhere; a block that vLLM has is left out,
    and a block that was used again is the load's end."""
    one = owner(here, *case)
    with closing(Reader(here, *case)) as reader:
        tables, cut = len(reader.layers), case[-1]
        order = [*reader.groups.groups, *reader.groups.states]
        theirs, ours = (ANY.sample(range(1, BLOCKS), EACH * tables) for _ in range(2))
        runs, held, blocks = list[ResidentRun](), list[list[bytes]](), list[int]()
        for at, group in enumerate(order):
            run, content = one.ask("write", group.number, theirs[EACH * at : EACH * (at + 1)])
            runs.append(run.cut(1, EACH).numbered(EACH * at + 1))
            held += content
            blocks += [-1, *ours[EACH * at + 1 : EACH * (at + 1)]]
        reader.bytes().random_(256)
        before = reader.bytes().clone()
        loading = reader.load(blocks, EACH, runs)
        assert (loading.filled, loading.cause, loading.invalid) == (len(blocks), "", [])
        assert loading.stats.tokens == {"resident": (EACH - 1) * order[0].block_size}
        wanted = [(order[at // EACH].number, block) for at, block in enumerate(blocks)]
        for (table, block), content in zip(wanted, held, strict=True):
            assert block < 0 or reader.held(table, block) == content
        for page in (page for kind in reader.kv.kinds for page in kind.pages):
            for block in filter(lambda block: block >= 0, blocks):
                page[block * cut : (block + 1) * cut] = 0
        left, after = before != reader.bytes(), reader.bytes()
        assert bool((after[left] == 0).all()), "bytes of other blocks changed"

        one.ask("write", order[-1].number, theirs[-1:])
        loading = reader.load(blocks, EACH, runs)
        assert loading.filled == len(blocks) - 1
        assert (loading.invalid, loading.failure) == (blocks[-1:], "changed")


def test_only_a_load_that_proved_all_its_blocks_is_published(here: Node) -> None:
    """Not one of which a block was used again: its step computes it, and publishes it."""
    case = "mistral", "LBNHC", 1
    one, meter, told = owner(here, *case), Meter(), list[PublicationSpec]()
    loads, over = Loads(0, Stores(meter), meter, publish=told.append), list[str]()
    with closing(Reader(here, *case)) as reader:
        group = reader.groups.groups[0].number
        run, _ = one.ask("write", group, [4, 7])
        assert mapped(reader.neighbours, run.instance)
        for name in ("right", "changed"):
            of_it = PublicationSpec([BlockRun(len(over), bytes(4), bytes(8), 0, bytes(16))])
            spec = LoadSpec(
                name, blocks=[1, 2], tokens=2, residents=[run], publication=of_it, number=1
            )
            loads.begin(reader.worker, StepMetadata(loads=[spec]))
            eventually(
                lambda name=name: over.extend(loads.ends(idle=True).over) or over[-1:] == [name]
            )
            one.ask("write", group, [7])
    assert over == ["right", "changed"]
    assert [spec.runs[0].first for spec in told] == [0]
