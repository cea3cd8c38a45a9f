"""What an instance shares in place, as decided in vLLM's own scheduler: it hands out blocks, preempts, resumes, and is told of loads that
failed. The model is not run: each step answers with a token of no importance. The server is real, and so are the tables."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from engine_cases import Node, node
from kv_cases import Cache, layout_of
from neighbour_cases import HOST, SharedCache
from processes import QUICK, SECONDS, eventually
from vllm_cases import missing
from vllm_models import write_model

pytest.importorskip("vllm.v1.core.sched.scheduler", reason="vLLM is not installed")

import torch
import vllm
from vllm.config import KVTransferConfig
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

from vcache_backend.integration.vllm import exportable, lookups
from vcache_backend.integration.vllm.in_place import InPlace
from vcache_backend.integration.vllm.metadata import PublicationSpec, Shard, StepMetadata, WorkerReport
from vcache_backend.integration.vllm.model_spec import ShardSpec
from vcache_backend.metadata_server.messages import ChunkKey, InstanceId
from vcache_backend.resident.exported import Shown, cache_shape
from vcache_backend.resident.generations import Generations
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
        self, here: Node, undo: ExitStack, blocks: int = BLOCKS, arguments: dict[str, Any] | None = None, **connector: Any
    ) -> None:
        """arguments: of vLLM's. connector: settings."""
        transfer = KVTransferConfig(
            kv_connector="VCacheConnector",
            kv_connector_module_path="vcache_backend.integration.vllm_connector",
            kv_role="kv_both",
            kv_connector_extra_config={
                "server": {"socket": str(here.path)},
                "pool": {"segment_bytes": 0},
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
            blocks = np.frombuffer(spec.blocks, dtype="<u4").reshape(-1, EACH).tolist()
            generations = np.frombuffer(spec.generations, dtype="<u8").reshape(-1, EACH).tolist()
            numbers = [keys.index(key) for key in spec.keys]
            found += [Published(*one, spec.sequence) for one in zip(numbers, blocks, generations, strict=True)]
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
    eventually(lambda: owner.half.publications.heard == other.half.publications.heard != 0)
    longer = owner.add(tokens + new_tokens(CHUNK), load=False)
    meta = owner.step()
    assert (owner.hit(longer), owner.numbers(longer, meta)) == (3 * CHUNK, [])
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


def test_what_was_computed_from_a_block_that_no_load_filled_is_not_published(here: Node) -> None:
    """Its own, or one of a chunk before it; the scheduler is told whose it was."""
    cache = Cache()
    exporter = exportable.begin("cpu", vllm.__version__)
    with ExitStack() as undo:
        around = exporter.context()
        assert around is not None
        with around:
            # As vLLM makes them.
            raw = [torch.zeros(tensor.nbytes, dtype=torch.int8, device="cpu") for tensor in cache.tensors]
        shape = cache.tensors[0].shape
        tensors = {f"layer {number}": one.view(torch.bfloat16).view(shape) for number, one in enumerate(raw)}
        session = Session(here.config("host"), layout_of(cache))
        undo.callback(session.close)
        worker, each = InPlace(exporter, 2, shows=True), 2
        undo.callback(worker.close)
        worker.export(tensors)
        worker.open(session, session.bind(tensors))
        name, scheduler = InstanceId(b"w" * 16), undo.enter_context(here.client())
        table = Generations(name, cache.sizes.blocks)
        undo.callback(table.close)
        scheduler.join(name, session.namespace.prefix, table.blocks, 1, each, table.fd)
        worker.show(name)
        keys = [ChunkKey(session.namespace.prefix + bytes([number]) * 16 + b"\0\0") for number in range(3)]

        def spec(request: str, number: int, *before: int) -> PublicationSpec:
            blocks = np.array([2 * number, 2 * number + 1], dtype="<u4")
            return PublicationSpec(
                request, [keys[number]], blocks.tobytes(), np.full(2, 2, dtype="<u8").tobytes(), 1, list(before)
            )

        specs = [spec("own", 0), spec("before", 1, 9), spec("right", 2)]
        assert worker.publish(specs, {1, 9}) == {"own", "before"}
        assert worker.publisher is not None
        assert worker.publisher.flush(SECONDS)
        assert [len(scheduler.find([key]).pooled) for key in keys] == [0, 0, 1]
