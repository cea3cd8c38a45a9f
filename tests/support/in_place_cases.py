"""vLLM's own scheduler with the connector's half in it, for tests without a model: it hands out
blocks, preempts, resumes, and is told of loads that failed. Each step answers with a token of no
importance. The server is real, and so are the tables."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
from engine_cases import Node, node
from processes import QUICK, SECONDS
from vllm_models import CONNECTOR

pytest.importorskip("vllm.v1.core.sched.scheduler", reason="vLLM is not installed")

from soak.scheduling import Planned, Tables, full, place, state
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from vcache_backend.integration.vllm import requests
from vcache_backend.integration.vllm.metadata import PublicationSpec, SavedChunks, StepMetadata
from vcache_backend.protocol.messages import (
    NAMESPACE_BYTES,
    RANK_BYTES,
    BlockRun,
    ChunkKey,
    Find,
    chunk_keys,
)
from vcache_backend.transfer.keys import block_hashes
from vcache_backend.transfer.publisher import Publisher
from vcache_backend.transfer.stats import EngineStats
from vcache_backend.vram_pool.copies.copier import Finished

BLOCK, CHUNK, BLOCKS = 32, 64, 24
EACH = CHUNK // BLOCK


@contextmanager
def scheduling(folder: Path) -> Iterator[Node]:
    """A server, and what vLLM's schedulers beside it need."""
    with node(folder, QUICK) as made, pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONHASHSEED", "0")
        made.serve()
        with place(made.path, made.path.parent):
            yield made


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """For the tests that import it."""
    with scheduling(tmp_path_factory.mktemp("in-place")) as made:
        yield made


def find_of(keys: Sequence[ChunkKey], **more: Any) -> Find:
    """A question about these chunks, each of one block. more: fields of `Find`."""
    hashes = b"".join(key[NAMESPACE_BYTES:-RANK_BYTES] for key in keys)
    return Find(keys[0][:NAMESPACE_BYTES], hashes, 1, len(keys), **more)


class Published(NamedTuple):
    """One block of one step. number: in its request's block table."""

    number: int
    block: int
    generation: int
    table: int
    name: bytes


def lying(said: BlockRun | SavedChunks) -> list[tuple[int, int]]:
    """Each block, and its generation."""
    both = np.frombuffer(said.blocks, dtype="<u4"), np.frombuffer(said.generations, dtype="<u8")
    return list(zip(*(one.tolist() for one in both), strict=True))


def blocks_of(meta: StepMetadata) -> list[Published]:
    """All blocks that a step publishes, or its loads will."""
    loads = [load.publication for load in meta.loads if load.publication]
    runs = [run for spec in (*meta.publications, *loads) for run in spec.runs]
    return [
        Published(run.first + at, *lies, run.table, run.hashes[16 * at : 16 * at + 16])
        for run in runs
        for at, lies in enumerate(lying(run))
    ]


class Engine(Planned):
    """vLLM's scheduler with our half in it, whose worker says what a test wants it to."""

    def __init__(
        self,
        here: Node,
        undo: ExitStack,
        blocks: int = BLOCKS,
        arguments: dict[str, Any] | None = None,
        lends: int = 0,
        role: str = "kv_both",
        states: int | None = None,
        asynchronous: bool = False,
        **connector: Any,
    ) -> None:
        """arguments: of vLLM's. lends: bytes, to the pool. states: which of two block tables has
        states; None if there is one table, without. asynchronous: it may plan a step before the
        last one is over. connector: settings."""
        self.here = here
        # The model is written while this process runs.
        ours = {"share": "in_place", "min_hit_tokens": CHUNK, "model": "tiny", **connector}
        extra = {"server": {"socket": str(here.path)}, "client": msgspec.to_builtins(QUICK)}
        extra |= {"pool": {"segment_bytes": lends}, "engine": {"chunk_size": CHUNK}}
        extra |= {"connector": ours}
        transfer = CONNECTOR | {"kv_role": role, "kv_connector_extra_config": extra}
        specs = [full(BLOCK)]
        if states is not None:
            specs.insert(states, state(BLOCK))
        given = {"max_model_len": 640, "max_num_batched_tokens": 640} | (arguments or {})
        kind = AsyncScheduler if asynchronous else Scheduler
        model, tables = here.path.parent / "model", Tables(specs, None)
        super().__init__(undo, transfer, model, tables, blocks, given, kind)
        self.metas: list[StepMetadata] = []
        self.rows: list[dict[str, set[int]]] = []
        """By step, and by request: the blocks that vLLM gives it."""
        self.publisher: Publisher | None = None
        self.slow = False
        """Whether its worker publishes what a test tells it to."""

    def share(self, here: Node, undo: ExitStack, blocks: int = BLOCKS) -> None:
        """Its worker shows a KV cache, and publishes what steps compute."""
        client = undo.enter_context(here.stage.client(QUICK))
        self.show(client, blocks, undo)
        self.publisher = Publisher(client, EngineStats(), self.name, 0, blocks)
        undo.callback(self.publisher.close)

    def publish(self, specs: Iterable[PublicationSpec]) -> None:
        """As its worker does, beside the next steps."""
        if self.publisher is not None and not self.slow:
            for spec in specs:
                self.publisher.submit(spec.runs, spec.epoch, Finished(0.0))

    def flush(self) -> None:
        """Wait until all that was published, promised or withdrawn is known."""
        assert self.publisher.outbox.flush(SECONDS)
        assert self.half.context.outbox.flush(SECONDS)

    def request(self, tokens: list[int], max_tokens: int = 4, *given: Any, **more: Any) -> Request:
        return super().request(tokens, max_tokens, *given, **more)

    def planned(self, output: Any) -> None:
        self.ran(output)
        self.metas.append(output.kv_connector_metadata)
        tables = self.scheduler.kv_cache_manager.get_block_ids
        self.rows.append({name: {*chain(*tables(name))} for name in output.num_scheduled_tokens})

    def ran(self, output: Any) -> None:
        """The step that `output` describes writes its blocks."""

    def published(self, request: Request, meta: StepMetadata | None = None) -> list[Published]:
        """The request's blocks in a step's publications; of the last step."""
        meta = meta or self.metas[-1]
        return [one for one in blocks_of(meta) if self.has(request, [one.block], meta)]

    def has(self, request: Request, blocks: Iterable[int], meta: StepMetadata) -> bool:
        """Whether the request has all these blocks in this step."""
        step = [other is meta for other in self.metas].index(True)
        return self.rows[step].get(request.request_id, set()).issuperset(blocks)

    def keys(self, request: Request) -> list[Any]:
        context = self.half.context
        return chunk_keys(context.prefix, self.hashes(request), context.hashes)

    def hashes(self, request: Request) -> bytes:
        """As other instances know them."""
        made = request.block_hashes
        return block_hashes(made, self.half.context.version)

    def stored(self, request: Request, meta: StepMetadata | None = None) -> list[int]:
        """Which of the request's chunks a step stores in the pool; the last step."""
        keys, meta = self.keys(request), meta or self.metas[-1]
        mine = [spec for spec in meta.stores if self.has(request, spec.blocks, meta)]
        return [keys.index(key) for spec in mine for key in spec.chunks.keys]

    def numbers(self, request: Request, meta: StepMetadata | None = None) -> list[int]:
        return [one.number for one in self.published(request, meta)]

    def tracked(self, request: Request) -> requests.Tracked:
        """What the scheduler half knows of a request that has not ended."""
        return self.half._requests[request.request_id]

    def hit(self, request: Request) -> int:
        """Tokens that vLLM's own cache had of a request that runs."""
        return self.tracked(request).local

    def right(self, published: list[Published]) -> bool:
        """Whether all of it is as the table has it now."""
        counters = self.half.publications.generations.counters
        return all(counters[one.block] == one.generation for one in published)


Make = Callable[..., Engine]
"""What makes engines; its arguments are theirs."""
_made = iter(range(1_000_000))


def new_tokens(count: int) -> list[int]:
    return random.Random(next(_made)).choices(range(3, 1000), k=count)


@contextmanager
def engines(here: Node, shown: bool = False) -> Iterator[Make]:
    """Makes engines. shown: such that others find something in their KV caches."""
    with ExitStack() as undo:

        def make(**more: Any) -> Engine:
            engine = Engine(here, undo, **more)
            if shown:
                engine.share(here, undo, more.get("blocks", BLOCKS))
            return engine

        yield make


@pytest.fixture
def make(here: Node) -> Iterator[Make]:
    """For the tests that import it, as is the next one."""
    with engines(here) as made:
        yield made


@pytest.fixture
def engine(make: Make) -> Engine:
    return make()
