"""What an instance shares in place, as decided in vLLM's own scheduler: it hands out blocks, preempts, resumes, and is told of loads that
failed. The model is not run: each step answers with a token of no importance. The server is real, and so are the tables."""

from __future__ import annotations

import inspect
import os
import random
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
from engine_cases import ROOMY, Node, UnfinishedCopier, node
from kv_cases import Cache, layout_of
from neighbour_cases import HOST, SharedCache
from processes import QUICK, SECONDS, eventually
from vllm_cases import missing
from vllm_models import write_model

pytest.importorskip("vllm.v1.core.sched.scheduler", reason="vLLM is not installed")

import torch
import vllm
from vllm.config import KVTransferConfig, VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.models import registry
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from vcache_backend.errors import ConfigError
from vcache_backend.integration.vllm import exportable, hints, lookups
from vcache_backend.integration.vllm.in_place import InPlace
from vcache_backend.integration.vllm.metadata import PublicationSpec, Shard, StepMetadata, WorkerReport
from vcache_backend.integration.vllm.model_spec import ShardSpec
from vcache_backend.integration.vllm.stats import Meter
from vcache_backend.integration.vllm.stores import Stores
from vcache_backend.integration.vllm_connector import VCacheConnector
from vcache_backend.metadata_server.messages import ChunkKey, InstanceId
from vcache_backend.resident import pins
from vcache_backend.resident.exported import Shown, cache_shape
from vcache_backend.resident.generations import Generations
from vcache_backend.transfer import publisher
from vcache_backend.transfer.publisher import Publication, Publisher
from vcache_backend.transfer.session import Session
from vcache_backend.transfer.stats import EngineStats
from vcache_backend.vram_pool.copier import Finished

pytestmark = pytest.mark.skipif(bool(missing(())), reason=missing(()) or "vLLM is here")
BLOCK, CHUNK, BLOCKS = 32, 64, 24
EACH = CHUNK // BLOCK


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    folder: Path = tmp_path_factory.mktemp("in-place")
    with node(folder, QUICK) as made, pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONHASHSEED", "0")
        # It would import vLLM in another process, to look at one class.
        patch.setattr(registry, "_run_in_subprocess", lambda look: look())
        patch.setattr(lookups, "AHEAD_SECONDS", SECONDS)
        patch.setattr(lookups, "FRESH_SECONDS", SECONDS)
        made.serve()
        write_model(made.path.parent / "model")
        yield made


class Published(NamedTuple):
    """One chunk of one step."""

    number: int
    blocks: list[int]
    generations: list[int]
    sequence: int


class Engine:
    """vLLM's scheduler with our half in it, whose worker says what a test wants it to."""

    def __init__(
        self,
        here: Node,
        undo: ExitStack,
        blocks: int = BLOCKS,
        arguments: dict[str, Any] | None = None,
        lends: int = 0,
        **connector: Any,
    ) -> None:
        """arguments: of vLLM's. lends: bytes, to the pool. connector: settings."""
        transfer = KVTransferConfig(
            kv_connector="VCacheConnector",
            kv_connector_module_path="vcache_backend.integration.vllm_connector",
            kv_role="kv_both",
            kv_connector_extra_config={
                "server": {"socket": str(here.path)},
                "pool": {"segment_bytes": lends},
                "engine": {"chunk_size": CHUNK},
                "connector": {"share": "in_place", "min_hit_tokens": CHUNK, **connector},
            },
        )
        config = EngineArgs(
            model=str(here.path.parent / "model"),
            skip_tokenizer_init=True,
            block_size=BLOCK,
            max_model_len=640,
            max_num_seqs=4,
            kv_cache_memory_bytes=1 << 20,
            kv_transfer_config=transfer,
            **{"max_num_batched_tokens": 640, **(arguments or {})},
        ).create_engine_config()
        config.cache_config.num_gpu_blocks = blocks
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=2, head_size=64, dtype=torch.bfloat16)
        caches = KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)])
        hash_ = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
        kv_cache_utils.init_none_hash(hash_)
        self.hasher = kv_cache_utils.get_request_block_hasher(BLOCK, hash_)
        self.scheduler = Scheduler(config, caches, StructuredOutputManager(config), BLOCK)
        undo.callback(self.scheduler.connector.shutdown)
        self.half = self.scheduler.connector._scheduler
        self.metas: list[StepMetadata] = []
        self.publisher: Publisher | None = None
        self.slow = False
        """Whether its worker publishes what a test tells it to."""
        shard = Shard(ShardSpec(pp_rank=0, tp_rank=0, dtype="bfloat16", kv_layout="x", layers=1, block_size=BLOCK))
        self.half.update(KVConnectorOutput(kv_connector_worker_meta=WorkerReport(shards={(0, 0): shard})))
        assert self.half.instance.open(), self.half.instance.refused

    def show(self, here: Node, undo: ExitStack) -> None:
        """Its worker shows a KV cache, and publishes what steps compute."""
        client, cache = undo.enter_context(here.client()), SharedCache()
        instance = self.half.publications.instance
        shown = Shown(client, instance, 0, cache_shape(cache.kv, cache.regions, HOST), cache.regions)
        undo.callback(shown.close)
        self.publisher = Publisher(client, EngineStats(), instance, EACH)
        undo.callback(self.publisher.close)

    def tell(self, meta: StepMetadata) -> None:
        """The step is over: its worker publishes."""
        assert self.publisher is not None
        for spec in meta.publications:
            one = Publication(spec.keys, spec.blocks, spec.generations, spec.sequence, spec.epoch)
            self.publisher.submit(one, Finished(0.0))

    def flush(self) -> None:
        """Wait until all that was published is known."""
        assert self.publisher is not None
        assert self.publisher.flush(SECONDS)

    def add(self, tokens: list[int], max_tokens: int = 4, priority: int = 0, **vcache: Any) -> Request:
        request = Request(
            request_id=f"r{next(_made)}",
            prompt_token_ids=tokens,
            sampling_params=SamplingParams(
                max_tokens=max_tokens, ignore_eos=True, extra_args={"kv_transfer_params": {"vcache": vcache}}
            ),
            pooling_params=None,
            block_hasher=self.hasher,
            priority=priority,
        )
        self.scheduler.add_request(request)
        return request

    def step(self, **said: Any) -> StepMetadata:
        """One step. said: what the worker's connector answers to it, beside a token for each request."""
        output = self.scheduler.schedule()
        meta: StepMetadata = output.kv_connector_metadata
        self.metas.append(meta)
        if self.publisher is not None and not self.slow:
            self.tell(meta)
        ids = list(output.num_scheduled_tokens)
        finished = [self.scheduler.requests[one].num_computed_tokens >= self.scheduler.requests[one].num_tokens for one in ids]
        ran = ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={one: at for at, one in enumerate(ids)},
            sampled_token_ids=[[7] if over else [] for over in finished],
            kv_connector_output=KVConnectorOutput(**said) if said else None,
        )
        self.scheduler.update_from_output(output, ran)
        return meta

    def published(self, request: Request, meta: StepMetadata | None = None) -> list[Published]:
        """The request's chunks in a step's publications; of the last step."""
        found = []
        for spec in (meta or self.metas[-1]).publications:
            if spec.request_id != request.request_id:
                continue
            keys = self.keys(request)
            numbers = [keys.index(key) for key in spec.keys]
            found += [Published(number, *lies, spec.sequence) for number, lies in zip(numbers, lying(spec), strict=True)]
        return found

    def keys(self, request: Request) -> list[Any]:
        assert self.half.instance.keys is not None
        return self.half.instance.keys.keys(request.block_hashes, 0, len(request.block_hashes) // EACH)

    def numbers(self, request: Request, meta: StepMetadata | None = None) -> list[int]:
        return [one.number for one in self.published(request, meta)]

    def hit(self, request: Request) -> int:
        """Tokens that vLLM's own cache had of a request that runs."""
        tokens: int = self.half._requests[request.request_id].local
        return tokens

    def right(self, published: list[Published]) -> bool:
        """Whether all of it is as the table has it now."""
        counters = self.half.publications.generations.counters
        return all(counters[one.blocks].tolist() == one.generations for one in published)

    def finish(self, request: Request) -> None:
        for _ in range(1000):
            if request.request_id not in self.scheduler.requests:
                return
            self.step()
        raise AssertionError(f"it is {request.status.name} for ever")


_made = iter(range(1_000_000))


def new_tokens(count: int) -> list[int]:
    return random.Random(next(_made)).choices(range(3, 1000), k=count)


@pytest.fixture
def make(here: Node) -> Iterator[Callable[..., Engine]]:
    with ExitStack() as undo:
        yield lambda **more: Engine(here, undo, **more)


@pytest.fixture
def shared(here: Node) -> Iterator[Callable[[], Engine]]:
    """Makes engines whose KV caches others find something in."""
    with ExitStack() as undo:

        def made() -> Engine:
            engine = Engine(here, undo)
            engine.show(here, undo)
            return engine

        yield made


@pytest.fixture
def engine(make: Callable[..., Engine]) -> Engine:
    return make()


# ---- what a step publishes


def test_a_step_publishes_the_chunks_it_completes_where_they_lie(engine: Engine) -> None:
    request = engine.add(new_tokens(3 * CHUNK - 2), max_tokens=8)
    meta = engine.step()
    first = engine.published(request)
    assert ([one.number for one in first], meta.stores) == ([0, 1], [])
    own = engine.scheduler.kv_cache_manager.get_block_ids(request.request_id)[0]
    assert [block for one in first for block in one.blocks] == own[: 2 * EACH]
    assert engine.right(first)
    later = [engine.published(request, engine.step()) for _ in range(4)]
    assert [[one.number for one in step] for step in later] == [[], [2], [], []], "with the answer's tokens, once they are final"
    assert later[1][0].sequence > first[0].sequence


def test_what_vllms_own_cache_has_is_not_published_again(engine: Engine) -> None:
    tokens = new_tokens(3 * CHUNK)
    first = engine.add(tokens)
    engine.step()
    published = engine.published(first)
    engine.finish(first)
    longer = engine.add(tokens + new_tokens(CHUNK))
    engine.step()
    assert engine.numbers(longer) == [3]
    own = engine.scheduler.kv_cache_manager.get_block_ids(longer.request_id)[0]
    assert [block for one in published for block in one.blocks] == own[: 3 * EACH]


def test_the_role_and_the_request_may_forbid_it(engine: Engine) -> None:
    request = engine.add(new_tokens(2 * CHUNK), store=False)
    engine.step()
    assert engine.numbers(request) == []


def test_a_preempted_requests_blocks_are_published_anew_when_it_has_got_others(make: Callable[..., Engine]) -> None:
    """Two grow until one has to go; the other takes its blocks. It comes back with new blocks, or with what is left of its own."""
    engine = make(blocks=13)
    kept, gone = (engine.add(new_tokens(2 * CHUNK + BLOCK - 3), max_tokens=2 * CHUNK) for _ in range(2))
    engine.step()
    before = engine.published(gone)
    assert len(before) == 2
    for _ in range(4 * CHUNK):
        if gone.num_preemptions:
            break
        engine.step()
    engine.finish(kept)
    assert not engine.right(before), "somebody else has got them"
    engine.step()
    engine.finish(gone)
    again = [one for meta in engine.metas[1:] for one in engine.published(gone, meta)]
    assert {one.number for one in again} >= {1}
    assert engine.right(again[-1:])
    assert not {tuple(zip(one.blocks, one.generations, strict=True)) for one in again} & {
        tuple(zip(one.blocks, one.generations, strict=True)) for one in before
    }


@pytest.mark.parametrize("hit", [10, 11], ids=["one that an earlier step had begun", "others, too"])
def test_blocks_whose_step_never_ran_are_not_published(make: Callable[..., Engine], hit: int) -> None:
    """vLLM knows them by their tokens as soon as it plans the step. A request that goes before its owner takes the step away from
    it, and then its owner finds them in vLLM's own cache, never written."""
    steps = {"scheduling_policy": "priority", "long_prefill_token_threshold": 2 * CHUNK, "max_num_batched_tokens": 5 * BLOCK + 8}
    engine = make(blocks=hit + 3, arguments=steps)
    gone = engine.add(new_tokens((hit + 1) * BLOCK - 10), priority=1)
    engine.step()
    first = engine.add(new_tokens(BLOCK), max_tokens=8)
    engine.step()
    assert engine.numbers(gone) == [2, 3]
    engine.step()
    assert gone.num_preemptions == 1
    engine.finish(first)
    engine.step()
    assert engine.hit(gone) == hit * BLOCK
    again = [engine.numbers(gone, meta) for meta in engine.metas[2:]]
    engine.finish(gone)
    assert again == [[]] * len(again)


# ---- resets


@pytest.mark.parametrize("connector", [False, True])
def test_what_began_before_a_reset_is_never_published(engine: Engine, connector: bool) -> None:
    """vLLM refuses, as the request runs; whoever resets changes the weights all the same."""
    request = engine.add(new_tokens(3 * CHUNK - 2), max_tokens=3 * CHUNK)
    engine.step()
    before, sequence = engine.published(request), engine.half.publications.sequence
    assert not engine.scheduler.reset_prefix_cache(reset_connector=connector)
    assert not engine.right(before)
    steps = [engine.step(finished_recving=set()) for _ in range(2 * CHUNK)]
    assert [engine.numbers(request, meta) for meta in steps] == [[]] * len(steps)
    engine.finish(request)
    assert engine.scheduler.reset_prefix_cache(reset_connector=connector)
    fresh = engine.add(request.prompt_token_ids)
    engine.step()
    published = engine.published(fresh)
    assert [one.number for one in published] == [0, 1]
    assert engine.right(published)
    assert published[0].sequence >= sequence


def test_what_began_before_a_reset_is_not_published_by_who_finds_it_in_vllms_cache(engine: Engine) -> None:
    """vLLM did not reset, as a request ran: what it has computed stays in its own cache, and so does what is computed behind that."""
    tokens = new_tokens(3 * CHUNK)
    request = engine.add(tokens + new_tokens(5))
    engine.step()
    assert not engine.scheduler.reset_prefix_cache()
    engine.finish(request)
    longer = engine.add(tokens + new_tokens(2 * CHUNK))
    meta = engine.step()
    assert engine.hit(longer) == 3 * CHUNK
    assert engine.numbers(longer, meta) == []
    own = engine.scheduler.kv_cache_manager.get_block_ids(longer.request_id)[0][: 5 * EACH]
    assert (engine.half.publications.generations.counters[own] & np.uint64(1)).all(), "nobody ever believes these"
    engine.finish(longer)
    fresh = engine.add(new_tokens(18 * BLOCK))
    engine.step()
    assert engine.right(engine.published(fresh))
    assert engine.numbers(fresh) == list(range(9))


def test_what_fails_as_a_step_is_planned_is_not_vllms(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """It looks for chunks that loads wait for."""

    def fails() -> Any:
        raise RuntimeError("on purpose")

    monkeypatch.setattr(engine.half._awaited, "found", fails)
    request = engine.add(new_tokens(2 * CHUNK))
    engine.step()
    assert request.num_computed_tokens == 2 * CHUNK
    assert engine.metas[-1].publications == []
    monkeypatch.undo()
    request = engine.add(new_tokens(2 * CHUNK))
    assert engine.published(request, engine.step())


# ---- what is saved in the pool


def lying(spec: PublicationSpec) -> list[tuple[list[int], list[int]]]:
    """Of each chunk the blocks, and their generations."""
    both = np.frombuffer(spec.blocks, dtype="<u4"), np.frombuffer(spec.generations, dtype="<u8")
    return list(zip(*(one.reshape(-1, EACH).tolist() for one in both), strict=True))


def saved(engine: Engine, meta: StepMetadata, request: Request) -> list[tuple[int, list[int]]]:
    """Which of the request's chunks a step saves, and no others, and where they lie. All are as they were published."""
    spec, counters = meta.victims, engine.half.publications.generations.counters
    if spec is None:
        return []
    places = [engine.keys(request).index(key) for key in spec.keys]
    assert [counters[blocks].tolist() for blocks, _ in lying(spec)] == [generations for _, generations in lying(spec)]
    return [(place, blocks) for place, (blocks, _) in zip(places, lying(spec), strict=True)]


def test_without_a_pool_beside_it_nothing_is_saved(engine: Engine) -> None:
    engine.finish(engine.add(new_tokens(3 * CHUNK)))
    engine.step()
    assert [meta.victims for meta in engine.metas] == [None] * len(engine.metas)


def test_what_may_be_used_again_is_saved_once_and_once_more_after_it_was_hit(make: Callable[..., Engine]) -> None:
    """The pool may have lost it by then."""
    engine = make(lends=1 << 20)
    request = engine.add(new_tokens(3 * CHUNK + 5))
    engine.finish(request)
    assert [saved(engine, meta, request) for meta in engine.metas] == [[]] * len(engine.metas), "it runs, nobody gets its blocks"
    published = [one for meta in engine.metas for one in engine.published(request, meta)]
    assert saved(engine, engine.step(), request) == [(one.number, one.blocks) for one in published]
    again = engine.add(request.prompt_token_ids[: CHUNK + 1])
    engine.step()
    assert engine.hit(again) == CHUNK
    engine.finish(again)
    assert [number for number, _ in saved(engine, engine.step(), request)] == [0]
    assert engine.step().victims is None


def test_a_chunk_is_saved_before_the_first_of_its_blocks_is_handed_out(make: Callable[..., Engine]) -> None:
    """Two plans before, or its copy would not be over; one, where requests hit much of what would be handed out first. They come and go,
    and answer; each step is small beside the cache."""
    engine, choice = make(blocks=65, arguments={"max_num_batched_tokens": 64}, lends=1 << 20), random.Random(5)
    known = [new_tokens(chunks * CHUNK + 7) for chunks in (1, 2, 3, 4) * 3]
    counters, there, told, left = engine.half.publications.generations.counters, dict[int, Any](), dict[int, int](), list[int]()
    for number in range(400):
        if number % 3 == 0 and len(engine.scheduler.requests) < 3:
            engine.add(choice.choice(known) + new_tokens(choice.choice([0, CHUNK])), max_tokens=choice.randrange(1, 9))
        meta = engine.step()
        for first, (blocks, generations) in list(there.items()):
            if (counters[blocks] != generations).any():
                del there[first]
                left.append(number - told.pop(first))
        for spec in (*meta.publications, meta.victims):
            for blocks, generations in lying(spec) if spec is not None else ():
                there[blocks[0]] = blocks, generations
                if spec is meta.victims:
                    told.setdefault(blocks[0], number)
    assert len(left) > 50
    assert min(left) > 0
    assert left.count(1) < len(left) // 20


def test_what_a_reset_made_void_is_not_saved(make: Callable[..., Engine]) -> None:
    engine = make(lends=1 << 20)
    engine.finish(engine.add(new_tokens(3 * CHUNK)))
    assert engine.scheduler.reset_prefix_cache()
    assert engine.step().victims is None
    assert engine.scheduler.reset_prefix_cache()


# ---- what is read where it lies


def owners(meta: StepMetadata) -> list[bytes]:
    """Of the chunks of the only load of a step, in order."""
    (load,) = meta.loads
    return [load.residents[chunk][0] for chunk in range(len(load.keys))]


def computed(engine: Engine, tokens: list[int]) -> Request:
    request = engine.add(tokens, load=False)
    engine.finish(request)
    engine.flush()
    return request


def test_a_hit_is_loaded_from_where_it_was_published_and_published_again(shared: Callable[[], Engine]) -> None:
    """By the reader, as soon as it has it; in the owner itself it is vLLM's own business."""
    owner, reader, tokens = shared(), shared(), new_tokens(3 * CHUNK + 5)
    source = computed(owner, tokens)
    own = owner.add(tokens)
    assert owner.half.matched(own, 0) == (0, False), "nobody else has it"
    owner.finish(own)
    request = reader.add(tokens)
    loading = reader.step()
    (load,) = loading.loads
    assert owners(loading) == [owner.half.publications.instance] * 3
    published = [one for meta in owner.metas for one in owner.published(source, meta)]
    assert [np.frombuffer(load.residents[one.number][1], dtype="<u4").tolist() for one in published] == [
        one.blocks for one in published
    ]
    assert reader.step().publications == [], "nothing of it is there"
    reader.step(finished_recving={request.request_id})
    assert reader.numbers(request, reader.step()) == [0, 1, 2]
    reader.finish(request)
    reader.flush()
    again = owner.add(tokens)
    assert owner.step().loads == []
    owner.finish(again)
    assert owner.scheduler.reset_prefix_cache()
    owner.add(tokens)
    assert owners(owner.step()) == [reader.half.publications.instance] * 3


def test_a_hit_is_loaded_in_the_step_where_the_worker_has_mapped_its_owner_and_nothing_runs(
    shared: Callable[[], Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request runs at once, and what it loads is published as if computed. Its owner keeps the blocks until it is told that the load
    is over; a request that vLLM cannot run after all keeps nothing."""
    monkeypatch.setattr(pins, "_HOLD", 60 * 10**9)
    owner, reader, tokens = shared(), shared(), new_tokens(CHUNK + 5)
    computed(owner, tokens)
    told, blocks = owner.half.publications, np.arange(BLOCKS)

    def pinned() -> int:
        found = told.pins.on(blocks)
        return 0 if found is None else int(found.sum())

    request = reader.add(tokens)
    assert reader.half.matched(request, 0) == (CHUNK, True), "the worker would have to map it"
    reader.half.update(KVConnectorOutput(kv_connector_worker_meta=WorkerReport(mapped=frozenset({told.instance}))))
    assert reader.half.matched(request, 0) == (CHUNK, False)
    assert pinned() == EACH
    reader.half.begin(SimpleNamespace(num_scheduled_tokens={}, total_num_scheduled_tokens=0))
    assert pinned() == 0, "nothing was allocated"
    meta = reader.step()
    assert [load.pinned for load in meta.loads] == [True]
    assert reader.numbers(request, meta) == [0]
    assert pinned() == EACH
    reader.step(kv_connector_worker_meta=WorkerReport(read={request.request_id}))
    assert pinned() == 0
    reader.finish(request)


@pytest.mark.parametrize("right", [0, 1], ids=["nothing held", "the first chunk held"])
def test_of_a_load_that_failed_nothing_is_published_before_it_is_computed(shared: Callable[[], Engine], right: int) -> None:
    owner, reader, tokens = shared(), shared(), new_tokens(3 * CHUNK + 5)
    computed(owner, tokens)
    request = reader.add(tokens)
    (load,) = reader.step().loads
    invalid = set(load.wanted[right * EACH :])
    failed = WorkerReport(failed={request.request_id})
    reader.step(finished_recving={request.request_id}, invalid_block_ids=invalid, kv_connector_worker_meta=failed)
    assert [reader.numbers(request, meta) for meta in reader.metas] == [[]] * len(reader.metas)
    for _ in range(10):
        if reader.step().publications:
            break
        assert request.num_output_tokens == 0
    assert request.num_computed_tokens >= 3 * CHUNK
    assert reader.numbers(request) == [0, 1, 2]
    assert reader.right(reader.published(request))


def test_what_was_loaded_before_a_reset_is_not_published_after_it(shared: Callable[[], Engine]) -> None:
    owner, reader, tokens = shared(), shared(), new_tokens(3 * CHUNK + 5)
    computed(owner, tokens)
    request = reader.add(tokens, max_tokens=CHUNK)
    assert len(reader.step().loads) == 1
    reader.scheduler.reset_prefix_cache()
    reader.step(finished_recving={request.request_id})
    reader.finish(request)
    assert [reader.numbers(request, meta) for meta in reader.metas] == [[]] * len(reader.metas)


def test_a_block_that_its_owner_uses_again_is_not_asked_for(shared: Callable[[], Engine]) -> None:
    """Another has it, too; of its last chunk nobody has anything any more."""
    owner, other, reader, tokens = shared(), shared(), shared(), new_tokens(3 * CHUNK + 5)
    source = computed(owner, tokens)
    computed(other, tokens[: 2 * CHUNK + 1])
    published = [one for meta in owner.metas for one in owner.published(source, meta)]
    owner.half.publications.generations.void(published[1].blocks[:1] + published[2].blocks[1:])
    names = owner.half.publications.instance, other.half.publications.instance
    reader.add(tokens)
    assert owners(reader.step()) in [[name, names[1]] for name in names]


def test_what_others_read_leaves_its_owner_last_and_of_a_prefix_the_end_first(
    shared: Callable[[], Engine], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A few blocks at a time; not those in use, nor one that was handed out meanwhile."""
    monkeypatch.setattr(hints, "MOST_BLOCKS", 3)
    owner, reader, tokens = shared(), shared(), new_tokens(4 * CHUNK + 5)
    source = computed(owner, tokens)
    blocks = [block for one in owner.published(source, owner.metas[0]) for block in one.blocks]
    running = owner.add(tokens[: CHUNK + 1], max_tokens=2 * CHUNK)
    owner.step()
    computed(owner, new_tokens(3 * CHUNK))

    def last() -> list[int]:
        free = owner.scheduler.kv_cache_manager.block_pool.free_block_queue.get_all_free_blocks()
        return [block.block_id for block in free][-5:]

    assert not {*blocks} & {*last()}
    # vLLM takes it back with every engine.
    monkeypatch.setattr(hints.log.parent, "propagate", True)
    reader.add(tokens)
    assert owners(reader.step()) == [owner.half.publications.instance] * 4
    waiting = owner.half.publications.hints
    eventually(lambda: waiting.waiting)
    owner.half.publications.generations.void(blocks[4:5])
    for _ in range(3):
        assert waiting.waiting
        owner.half.publications.learn()
        owner.step()
    assert not waiting.waiting
    assert last() == [blocks[number] for number in (7, 6, 5, 3, 2)]
    assert "ERROR" not in {record.levelname for record in caplog.records}
    owner.finish(running)
    assert last()[-2:] == [blocks[1], blocks[0]]


def test_what_a_reset_made_void_is_not_found(shared: Callable[[], Engine]) -> None:
    owner, reader, tokens = shared(), shared(), new_tokens(3 * CHUNK + 5)
    computed(owner, tokens)
    assert owner.scheduler.reset_prefix_cache()
    request = reader.add(tokens)
    assert reader.step().loads == []
    reader.finish(request)
    name, client = owner.half.publications.instance.hex(), reader.half.instance.client
    eventually(lambda: [one.resident for one in client.stats().instances if one.id == name] == [0])


def test_what_was_computed_before_another_reset_the_namespace_is_not_found(shared: Callable[[], Engine]) -> None:
    """Not if it is told late, and not behind what vLLM's own cache, which nobody reset, goes on with."""
    owner, other, tokens = shared(), shared(), new_tokens(3 * CHUNK + 5)
    owner.slow = True
    source = owner.add(tokens, load=False)
    late = owner.step()
    assert owner.numbers(source, late) == [0, 1, 2]
    assert other.scheduler.reset_prefix_cache(reset_connector=True)
    owner.slow = False
    owner.tell(late)
    owner.flush()
    assert other.half.instance.client.find(other.keys(source)).pooled == b""
    owner.finish(source)
    longer = owner.add(tokens + new_tokens(CHUNK))
    meta = owner.step()
    assert (owner.hit(longer), owner.numbers(longer, meta)) == (3 * CHUNK, [])
    assert owner.half.publications.epoch == other.half.publications.heard != 0
    owner.finish(longer)
    assert not owner.right(owner.published(source, late))
    later = new_tokens(3 * CHUNK + 5)
    computed(owner, later)
    other.add(later)
    assert owners(other.step()) == [owner.half.publications.instance] * 3


def test_what_was_found_before_a_reset_is_not_loaded_after_it(shared: Callable[[], Engine]) -> None:
    """Its owner has not heard of it: its generations are those that were found."""
    owner, other, reader, tokens = shared(), shared(), shared(), new_tokens(3 * CHUNK + 5)
    published = owner.published(computed(owner, tokens), owner.metas[0])
    request = reader.add(tokens)
    assert reader.half._requests[request.request_id].question is not None
    assert other.scheduler.reset_prefix_cache(reset_connector=True)
    eventually(lambda: reader.half.publications.heard == other.half.publications.heard)
    assert len(published) == 3
    assert owner.right(published)
    assert reader.step().loads == []
    assert reader.numbers(request) == [0, 1, 2]


# ---- the worker


class Sharing:
    """A worker that shares its KV cache, in blocks 2n and 2n + 1 of which chunk n is, and lends to the pool. Its stores are read when a
    test says so."""

    def __init__(self, here: Node, undo: ExitStack) -> None:
        cache, exporter, each = Cache(), exportable.begin("cpu", vllm.__version__), 2
        around = exporter.context()
        assert around is not None
        with around:
            # As vLLM makes them.
            raw = [torch.zeros(tensor.nbytes, dtype=torch.int8, device="cpu") for tensor in cache.tensors]
        shape = cache.tensors[0].shape
        tensors = {f"layer {number}": one.view(torch.bfloat16).view(shape) for number, one in enumerate(raw)}
        self.copier = UnfinishedCopier()
        self.session = Session(here.config("host", ROOMY), layout_of(cache), copier=self.copier)
        undo.callback(self.session.close)
        undo.callback(self.copier.finished.set)
        self.in_place, self.stores = InPlace(exporter, each, shows=True), Stores(Meter())
        undo.callback(self.in_place.close)
        self.in_place.export(tensors)
        kv = self.session.bind(tensors)
        self.in_place.open(self.session, kv)
        self.stores.open(self.session, kv, cache.sizes.block_size)
        name, self.client = InstanceId(b"w" * 16), undo.enter_context(here.client())
        self.table = Generations(name, cache.sizes.blocks)
        undo.callback(self.table.close)
        self.client.join(name, self.session.namespace.prefix, self.table.blocks, 1, each, self.table.fd)
        self.in_place.show(name)
        self.keys = [ChunkKey(self.session.namespace.prefix + os.urandom(16) + b"\0\0") for _ in range(4)]
        self.epoch = self.client.present(self.keys).epoch

    def publish(self, *specs: tuple[str, int, list[int]], unfilled: Collection[int] = ()) -> set[str]:
        """Chunks of requests, each with blocks before it; those that must not be."""
        made = [
            PublicationSpec(request, [self.keys[one]], *self._lies(one), 1, before, self.epoch) for request, one, before in specs
        ]
        spoiled = self.in_place.publish(made, set(unfilled))
        assert self.in_place.publisher is not None
        assert self.in_place.publisher.flush(SECONDS)
        return spoiled

    def save(self, *chunks: int) -> None:
        keys, lies = [self.keys[chunk] for chunk in chunks], zip(*map(self._lies, chunks), strict=True)
        self.in_place.save(PublicationSpec("", keys, *map(b"".join, lies), 0, [], self.epoch), self.stores)

    def saved(self, chunk: int) -> bool:
        """Whether the pool has it, once everything that was saved is read."""
        self.copier.finished.set()
        assert self.session.flush(SECONDS)
        return bool(self.client.lookup([self.keys[chunk]]))

    def _lies(self, chunk: int) -> tuple[bytes, bytes]:
        blocks = np.array([2 * chunk, 2 * chunk + 1], dtype="<u4")
        return blocks.tobytes(), np.full(2, 2, dtype="<u8").tobytes()


@pytest.fixture
def sharing(here: Node) -> Iterator[Sharing]:
    with ExitStack() as undo:
        yield Sharing(here, undo)


def test_what_was_computed_from_a_block_that_no_load_filled_is_not_published_nor_saved(sharing: Sharing) -> None:
    """Its own, or one of a chunk before it; the scheduler is told whose it was."""
    assert sharing.publish(("own", 0, []), ("before", 1, [9]), ("right", 2, []), unfilled={1, 9}) == {"own", "before"}
    assert [len(sharing.client.find([key]).pooled) for key in sharing.keys] == [0, 0, 1, 0]
    for chunk in range(4):
        sharing.save(chunk)
    assert [sharing.saved(chunk) for chunk in range(4)] == [False, False, True, False]


@pytest.mark.parametrize("looks", [True, False], ids=["", "control: nobody looks at the generations"])
@pytest.mark.parametrize("how", ["handed out", "reset"])
def test_what_changes_hands_while_it_is_saved_is_never_found(
    sharing: Sharing, how: str, looks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not looks:
        monkeypatch.setattr(Publisher, "holds", lambda self, publication: True)
    sharing.publish(("one", 0, []), ("other", 1, []))
    sharing.save(0)
    if how == "reset":
        sharing.table.void_all()
    else:
        sharing.table.void([1])
    assert sharing.saved(0) is not looks
    assert sharing.session.stats.not_stored()["changed"] == looks
    sharing.save(1)
    assert sharing.saved(1) == (how == "handed out" or not looks), "its slot was given back, and the next one is stored"
    eventually(lambda: sharing.client.stats().reservations == 0)


def test_one_that_changes_hands_takes_few_others_along(sharing: Sharing, monkeypatch: pytest.MonkeyPatch) -> None:
    """What leaves first is saved first, and is last in what the scheduler says."""
    monkeypatch.setattr(publisher, "TOGETHER", 2)
    sharing.publish(*((str(chunk), chunk, []) for chunk in range(4)))
    sharing.save(*range(4))
    sharing.table.void([7])
    assert [sharing.saved(chunk) for chunk in range(4)] == [True, True, False, False]


def test_what_was_published_before_somebody_elses_reset_is_not_saved(sharing: Sharing) -> None:
    """Its scheduler has not heard of it."""
    sharing.publish(("one", 0, []))
    sharing.client.clear(sharing.session.namespace.prefix, reset=True)
    sharing.save(0)
    assert not sharing.saved(0)
    assert sharing.client.stats().reservations == 0


# ---- settings


def test_a_mistake_in_the_settings_is_refused_where_vllm_asks_first() -> None:
    """In its front end, before it starts a process, where CUDA graphs may be on: the mistake is the last line of the log then."""
    asked = VCacheConnector.requires_piecewise_for_cudagraph
    assert asked({"pool": {"segment_bytes": 1}}) is False
    with pytest.raises(ConfigError, match=r"unknown field `segment_byts` - at `\$.pool`; did you mean `segment_bytes`"):
        asked({"pool": {"segment_byts": 1}})
    assert f"connector_cls.{asked.__name__}(" in inspect.getsource(VllmConfig.__post_init__)
