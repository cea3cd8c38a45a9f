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
from neighbour_cases import HOST, SharedCache
from processes import QUICK, SECONDS
from vllm_models import CONNECTOR, write_model

pytest.importorskip("vllm.v1.core.sched.scheduler", reason="vLLM is not installed")

import torch
from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.models import registry
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, MambaSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from vcache_backend.integration.vllm import lookups, requests, waits
from vcache_backend.integration.vllm.metadata import SavedChunks, StepMetadata, WorkerReport
from vcache_backend.integration.vllm.model.spec import ShardSpec
from vcache_backend.protocol.messages import (
    NAMESPACE_BYTES,
    RANK_BYTES,
    BlockRun,
    ChunkKey,
    Find,
)
from vcache_backend.resident.own_cache import OwnCache, cache_shape
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
        # It would import vLLM in another process, to look at one class.
        patch.setattr(registry, "_run_in_subprocess", lambda look: look())
        patch.setattr(lookups, "PROMISED_SECONDS", SECONDS)
        patch.setattr(lookups, "LATE_SECONDS", SECONDS)
        patch.setattr(requests, "FRESH_SECONDS", SECONDS)
        # No model runs, so the time of steps says nothing.
        for name in ("UNKNOWN_CHUNK_SECONDS", "LONGEST_CHUNK_SECONDS"):
            patch.setattr(waits, name, 60.0)
        made.serve()
        write_model(made.path.parent / "model")
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
    """All blocks that a step publishes."""
    runs = [run for spec in meta.publications for run in spec.runs]
    return [
        Published(run.first + at, *lies, run.table, run.hashes[16 * at : 16 * at + 16])
        for run in runs
        for at, lies in enumerate(lying(run))
    ]


class Engine:
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
        transfer = KVTransferConfig(**CONNECTOR, kv_role=role, kv_connector_extra_config=extra)
        given = {"model": str(here.path.parent / "model"), "skip_tokenizer_init": True}
        given |= {"block_size": BLOCK, "max_model_len": 640, "max_num_seqs": 4}
        given |= {"max_num_batched_tokens": 640, "kv_cache_memory_bytes": 1 << 20}
        given |= {"kv_transfer_config": transfer} | (arguments or {})
        config = EngineArgs(**given).create_engine_config()
        config.cache_config.num_gpu_blocks = blocks
        # vLLM does so on GPUs only.
        config.scheduler_config.async_scheduling = asynchronous
        heads = {"num_kv_heads": 2, "head_size": 64, "dtype": torch.bfloat16}
        kind = FullAttentionSpec(block_size=BLOCK, **heads)
        groups = [KVCacheGroupSpec(["layer 0"], kind)]
        if states is not None:
            shape = {"shapes": ((2, 3),), "dtypes": (torch.float32,), "mamba_cache_mode": "align"}
            config.cache_config.mamba_cache_mode = "align"
            kept = MambaSpec(block_size=BLOCK, **shape)
            groups.insert(states, KVCacheGroupSpec(["state"], kept))
        caches = KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=groups)
        hash_ = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
        kv_cache_utils.init_none_hash(hash_)
        self.hasher = kv_cache_utils.get_request_block_hasher(BLOCK, hash_)
        kind_of = AsyncScheduler if asynchronous else Scheduler
        self.scheduler = kind_of(config, caches, StructuredOutputManager(config), BLOCK, BLOCK)
        undo.callback(self.scheduler.connector.shutdown)
        self.half = self.scheduler.connector._scheduler
        self.metas: list[StepMetadata] = []
        self.rows: list[dict[str, set[int]]] = []
        """By step, and by request: the blocks that vLLM gives it."""
        self.publisher: Publisher | None = None
        self.slow = False
        """Whether its worker publishes what a test tells it to."""
        lie = {"dtype": "bfloat16", "kv_layout": "x", "layers": 1, "block_size": BLOCK}
        report = WorkerReport(shards={(0, 0): ShardSpec(pp_rank=0, tp_rank=0, **lie)})
        self.half.update(KVConnectorOutput(kv_connector_worker_meta=report))
        assert self.half.context.open(), self.half.context.refused

    def show(self, here: Node, undo: ExitStack) -> None:
        """Its worker shows a KV cache, and publishes what steps compute."""
        client, cache = undo.enter_context(here.stage.client(QUICK)), SharedCache()
        instance = self.half.publications.instance
        shape = cache_shape(cache.kv, cache.regions, HOST)
        shown = OwnCache(client, instance, 0, shape, cache.regions)
        undo.callback(shown.close)
        blocks = self.half.publications.blocks
        self.publisher = Publisher(client, EngineStats(), instance, 0, blocks)
        undo.callback(self.publisher.close)

    def tell(self, meta: StepMetadata) -> None:
        """The step is over: its worker publishes."""
        assert self.publisher is not None
        for spec in meta.publications:
            self.publisher.submit(spec.runs, spec.epoch, Finished(0.0))

    def flush(self) -> None:
        """Wait until all that was published is known."""
        assert self.publisher.outbox.flush(SECONDS)

    def request(
        self,
        tokens: list[int],
        max_tokens: int = 4,
        priority: int = 0,
        name: str = "",
        **vcache: Any,
    ) -> Request:
        """Not added yet. vcache: its wishes."""
        wishes = {"kv_transfer_params": {"vcache": vcache}}
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, extra_args=wishes)
        more = {"block_hasher": self.hasher, "priority": priority}
        return Request(name or f"r{next(_made)}", tokens, params, None, **more)

    def add(self, tokens: list[int], *given: Any, **more: Any) -> Request:
        """See `request`."""
        request = self.request(tokens, *given, **more)
        self.scheduler.add_request(request)
        return request

    def step(self, **said: Any) -> StepMetadata:
        """One step. said: what the worker's connector answers to it, beside a token for each
        request.
        """
        output = self.scheduler.schedule()
        self.ran(output)
        meta: StepMetadata = output.kv_connector_metadata
        self.metas.append(meta)
        tables = self.scheduler.kv_cache_manager.get_block_ids
        self.rows.append({name: {*chain(*tables(name))} for name in output.num_scheduled_tokens})
        if self.publisher is not None and not self.slow:
            self.tell(meta)
        self.end(output, **said)
        return meta

    def end(self, output: Any, **said: Any) -> None:
        """The step that `output` describes is over. said: see `step`."""
        ids = list(output.num_scheduled_tokens)
        running = [self.scheduler.requests.get(one) for one in ids]
        finished = [one and one.num_computed_tokens >= one.num_tokens for one in running]
        ran = ModelRunnerOutput(ids, {one: at for at, one in enumerate(ids)})
        ran.sampled_token_ids = [[7] if over else [] for over in finished]
        ran.kv_connector_output = KVConnectorOutput(**said) if said else None
        self.scheduler.update_from_output(output, ran)

    @contextmanager
    def others_bring(self, tokens: int, waits: bool = False) -> Iterator[None]:
        """Another connector loads so many tokens of each request that begins, as MultiConnector has
        it. waits: beside the steps."""
        ours = self.scheduler.connector
        matched, allocated = ours.get_num_new_matched_tokens, ours.update_state_after_alloc
        ours.get_num_new_matched_tokens = lambda *asked: (matched(*asked), (tokens, waits))[1]
        ours.update_state_after_alloc = lambda request, blocks, _: allocated(request, blocks, 0)
        yield
        ours.get_num_new_matched_tokens, ours.update_state_after_alloc = matched, allocated

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
        return self.half.context.keys.keys(self.hashes(request))

    def hashes(self, request: Request) -> bytes:
        """As other instances know them."""
        made = request.block_hashes
        return block_hashes(made, 0, len(made), self.half.context.version)

    def stored(self, request: Request, meta: StepMetadata | None = None) -> list[int]:
        """Which of the request's chunks a step stores in the pool; the last step."""
        keys, meta = self.keys(request), meta or self.metas[-1]
        mine = [spec for spec in meta.stores if self.has(request, spec.blocks, meta)]
        return [keys.index(key) for spec in mine for key in spec.keys]

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

    def finish(self, request: Request) -> None:
        for _ in range(1000):
            if request.request_id not in self.scheduler.requests:
                return
            self.step()
        raise AssertionError(f"it is {request.status.name} for ever")


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
                engine.show(here, undo)
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
