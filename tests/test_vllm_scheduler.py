"""The half of the connector in vLLM's scheduler, with vLLM's requests and a real metadata server:
what is asked and when it counts, which chunks a step stores, and what a worker's report changes."""

from __future__ import annotations

import pickle
import random
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from engine_cases import Node, node
from kv_cases import Cache, layout_of
from processes import QUICK, SECONDS, asked, eventually
from vllm_objects import BLOCK, vllm_config

pytest.importorskip("vllm.distributed.kv_events", reason="vLLM is not installed")

import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from vcache_backend import status
from vcache_backend.config import ConnectorConfig
from vcache_backend.engine import VCacheEngine
from vcache_backend.integration.vllm.in_place import hints
from vcache_backend.integration.vllm.metadata import (
    REFUSED,
    LoadSpan,
    Shard,
    StepMetadata,
    WorkerReport,
)
from vcache_backend.integration.vllm.model import compat, groups
from vcache_backend.integration.vllm.model.spec import ShardSpec
from vcache_backend.integration.vllm.scheduler import introduction, lookups, tracked
from vcache_backend.integration.vllm.scheduler.side import SchedulerSide
from vcache_backend.integration.vllm.telemetry.stats import Meter
from vcache_backend.integration.vllm.worker.side import WorkerSide
from vcache_backend.metadata_server.client import Client
from vcache_backend.metadata_server.messages import ChunkKey, of_rank

CHUNK, CHUNKS = 16, 5
PROMPT = CHUNKS * CHUNK + 3
NBYTES = 4096


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """A server, and a segment that somebody has lent."""
    folder: Path = tmp_path_factory.mktemp("scheduler")
    with node(folder, QUICK) as made, pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONHASHSEED", "0")
        # However slow the machine is.
        patch.setattr(lookups, "AHEAD_SECONDS", SECONDS)
        patch.setattr(tracked, "FRESH_SECONDS", SECONDS)
        kv_cache_utils.init_none_hash(sha256)
        made.serve()
        made.undo.enter_context(VCacheEngine(made.config("host", 4 << 20), layout_of(Cache())))
        yield made


class Side:
    """A scheduler's half whose workers have said what they hold."""

    def __init__(
        self,
        here: Node,
        undo: ExitStack,
        window: int = 0,
        ranks: int = 1,
        state: bool = False,
        **connector: Any,
    ) -> None:
        """window: of a second block table, vLLM's first. ranks: tensor parallel ones. state: what
        the first table's layers keep.
        """
        self.meter, self.client = Meter(), undo.enter_context(here.client())
        config = here.config("host", chunk_size=CHUNK)
        settings = ConnectorConfig(**{"share": "pool", "min_hit_tokens": CHUNK} | connector)
        config = msgspec.structs.replace(config, connector=settings)
        one = {
            "parallel_config__tensor_parallel_size": ranks,
            "parallel_config__pipeline_parallel_size": 1,
        }
        vllm = vllm_config(**one, kv_events_config=None, use_v2_model_runner=True)
        vllm.cache_config.prefix_caching_hash_algo, vllm.cache_config.prefix_match_unit = (
            "sha256",
            None,
        )
        vllm.cache_config.enable_prefix_caching, vllm.parallel_config.data_parallel_size = True, 1
        vllm.scheduler_config = SimpleNamespace(async_scheduling=True, max_num_batched_tokens=64)
        vllm.observability_config = SimpleNamespace(otlp_traces_endpoint="http://127.0.0.1:4317")
        sizes = {"block_size": BLOCK, "num_kv_heads": 4, "head_size": 8, "dtype": torch.bfloat16}
        specs = [SlidingWindowSpec(sliding_window=window, **sizes)] if window else []
        if state:
            specs = [
                MambaSpec(
                    block_size=BLOCK,
                    shapes=((2, 3),),
                    dtypes=(torch.float32,),
                    mamba_cache_mode="align",
                )
            ]
        named = [KVCacheGroupSpec(["layer"], one) for one in (*specs, FullAttentionSpec(**sizes))]
        caches = KVCacheConfig(num_blocks=64, kv_cache_tensors=[], kv_cache_groups=named)
        self.vllm, self.caches, self.config = vllm, caches, config
        self.half = SchedulerSide(vllm, caches, config, True, True, self.meter)
        undo.callback(self.half.close)
        self.client.clear()
        sizes = {"dtype": "bfloat16", "kv_layout": "x", "layers": 1, "block_size": BLOCK}
        shards = {
            (0, rank): Shard(ShardSpec(pp_rank=0, tp_rank=rank, **sizes)) for rank in range(ranks)
        }
        self.segments = {segment.id: "host" for segment in self.client.list_segments()}
        self.report(shards=shards, segments=dict.fromkeys(range(ranks), self.segments))
        assert self.half.instance.open()
        if state:
            self.half.watch(SimpleNamespace(get_num_free_blocks=lambda: 64))

    def report(self, **said: Any) -> None:
        self.half.update(KVConnectorOutput(kv_connector_worker_meta=WorkerReport(**said)))

    def reset(self) -> None:
        """And all that was on its way to the pool has got there."""
        assert self.half.reset()
        self.report(flushed=self.step().flush)

    def keys(self, request: Request, count: int = CHUNKS) -> Any:
        tracked = self.half._track(request)
        assert self.half.lookups.name(tracked, count)
        return tracked.lookup.keys[:count]

    def put(self, request: Request, count: int = CHUNKS, rank: int = 0) -> None:
        """The request's first chunks are in the pool."""
        assert stored_by(self.client, of_rank(self.keys(request, count), rank)) == count

    def matched(self, request: Request, local: int = 0) -> tuple[int | None, bool]:
        return self.half.matched(request, local)

    def allocated(
        self, request: Request, external: int = CHUNKS * CHUNK, end: int = CHUNKS * CHUNK
    ) -> None:
        """vLLM has blocks for the request's tokens up to `end`, of which the last `external` are to
        be loaded.
        """
        self.half.allocated(
            request, SimpleNamespace(get_block_ids=lambda: (blocks_of(end),)), external
        )

    def asked(self, *requests: str) -> int:
        return asked(self.client, *requests)

    def step(
        self, *new: tuple[Request, int], cached: tuple[Request, int, int, Any] | None = None
    ) -> StepMetadata:
        """One step. new: requests that begin with so many tokens. cached: one that goes on, from
        where, with how many, in which new blocks: a list, or one a table."""
        begin = [(request, 0, count, (list(range(-(-count // BLOCK))),)) for request, count in new]
        return self._step(begin, [] if cached is None else [cached])

    def begun(
        self, request: Request, computed: int, count: int, rows: tuple[list[int], ...]
    ) -> StepMetadata:
        """One step, in which the request begins behind `computed` tokens, with the blocks of all
        its tables.
        """
        return self._step([(request, computed, count, rows)], [])

    def preempted(self, request: Request) -> StepMetadata:
        """One step, before which vLLM took the request's blocks away."""
        return self._step([], [], {request.request_id})

    def _step(
        self,
        begin: list[tuple[Request, int, int, Any]],
        go_on: list[tuple[Request, int, int, Any]],
        preempted: set[str] | None = None,
    ) -> StepMetadata:
        scheduled = {request.request_id: count for request, _, count, _ in begin + go_on}
        output = SimpleNamespace(
            num_scheduled_tokens=scheduled,
            total_num_scheduled_tokens=sum(scheduled.values()),
            preempted_req_ids=preempted,
            scheduled_new_reqs=[
                SimpleNamespace(
                    req_id=request.request_id, block_ids=rows, num_computed_tokens=computed
                )
                for request, computed, _, rows in begin
            ],
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=[request.request_id for request, *_ in go_on],
                num_computed_tokens=[computed for _, computed, _, _ in go_on],
                new_block_ids=[
                    (blocks,) if isinstance(blocks, list) else blocks for *_, blocks in go_on
                ],
                resumed_req_ids=set(),
            ),
        )
        meta = StepMetadata()
        self.half.begin(meta)
        self.half.plan(output, meta)
        return meta


_made = iter(range(1_000_000))


def new_request(tokens: int | list[int] = PROMPT, **vcache: Any) -> Request:
    """tokens: of the prompt, or how many of one that nobody has seen."""
    number = next(_made)
    return Request(
        request_id=str(number),
        prompt_token_ids=random.Random(number).choices(range(1000), k=tokens)
        if isinstance(tokens, int)
        else tokens,
        sampling_params=SamplingParams(
            max_tokens=4, extra_args={"kv_transfer_params": {"vcache": vcache}}
        ),
        pooling_params=None,
        block_hasher=kv_cache_utils.get_request_block_hasher(BLOCK, sha256),
    )


def same_prompt(request: Request) -> Request:
    return new_request(list(request.prompt_token_ids or ()))


def blocks_of(tokens: int) -> list[int]:
    return list(range(100, 100 - -tokens // BLOCK))


def stored_by(client: Client, keys: list[ChunkKey]) -> int:
    """How many of the chunks were not there."""
    return client.commit(client.reserve(keys, NBYTES).reservation)


@pytest.fixture
def make(here: Node) -> Iterator[Callable[..., Side]]:
    with ExitStack() as undo:
        yield lambda **connector: Side(here, undo, **connector)


@pytest.fixture
def side(make: Callable[..., Side]) -> Side:
    return make()


# ---- when an answer counts


@pytest.mark.parametrize("ahead", [False, True])
def test_an_answer_of_before_a_reset_is_no_answer_after_it(side: Side, ahead: bool) -> None:
    """Of a request that waits to be scheduled meanwhile: its chunks are those of other weights."""
    request = new_request()
    side.put(request)
    if ahead:
        side.half.arrived(request)
    else:
        assert side.matched(request) == side.matched(request) == (CHUNKS * CHUNK, True)
    assert side.half.reset()
    assert side.half._track(request).lookup.answer is None
    side.half._resets.clearing = False
    assert side.matched(request) == (0, False)


def test_what_workers_say_of_a_reset_does_not_end_a_later_one(side: Side) -> None:
    """Steps that were planned between the two may still store what is of weights before the later
    one.
    """
    request = new_request()
    assert side.half.reset()
    first = side.step()
    assert side.half.reset()
    second = side.step()
    side.report(flushed=first.flush)
    side.put(request)
    assert side.matched(request) == (0, False)
    side.report(flushed=second.flush)
    assert not side.half._resets.clearing
    assert side.matched(request) == (0, False)


def test_workers_are_asked_of_a_reset_until_they_have_answered(side: Side) -> None:
    """A step that ran while vLLM slept, or whose stores raised, says nothing."""
    assert side.half.reset()
    first, second = side.step(), side.step()
    side.report()
    side.report(flushed=second.flush)
    assert first.flush
    assert not side.half._resets.clearing
    assert not side.step().flush


def test_what_began_before_a_reset_that_vllm_did_not_make_is_never_stored(side: Side) -> None:
    """Requests run, so vLLM resets nothing; whoever resets changes the weights all the same."""
    request, each = new_request(), CHUNK // BLOCK
    assert side.matched(request) == (0, False)
    assert side.step((request, CHUNK + BLOCK)).stores
    side.reset()
    assert (
        side.step(cached=(request, CHUNK + BLOCK, CHUNK, list(range(50, 50 + each)))).stores == []
    )
    side.half.finished(request)
    # What is computed behind it, found in vLLM's own cache, is no better; nor behind that.
    own = [*range(each + 1), *range(50, 50 + each - 1)]
    longer = same_prompt(request)
    assert side.matched(longer, 2 * CHUNK) == (0, False)
    assert side.begun(longer, 2 * CHUNK, CHUNK, ([*own, *range(60, 60 + each)],)).stores == []
    third = same_prompt(request)
    assert side.matched(third, 3 * CHUNK) == (0, False)
    assert side.begun(third, 3 * CHUNK, CHUNK, ([*own, *range(60, 60 + 2 * each)],)).stores == []
    # What is computed anew is, also in their blocks, and so is what is computed behind that.
    fresh = same_prompt(request)
    assert side.matched(fresh) == (0, False)
    assert [len(store.keys) for store in side.begun(fresh, 0, 2 * CHUNK, (own,)).stores] == [2]
    behind = same_prompt(request)
    assert side.matched(behind, 2 * CHUNK) == (0, False)
    assert [
        len(store.keys)
        for store in side.begun(behind, 2 * CHUNK, CHUNK, ([*own, *range(70, 70 + each)],)).stores
    ] == [3]


def test_what_a_load_brings_that_began_before_a_reset_is_not_built_on(side: Side) -> None:
    request = new_request()
    side.put(request, 2)
    assert side.matched(request) == (2 * CHUNK, True)
    side.allocated(request, 2 * CHUNK, 2 * CHUNK)
    assert side.step().loads
    side.reset()
    assert side.begun(request, 2 * CHUNK, CHUNK, (blocks_of(3 * CHUNK),)).stores == []


@pytest.mark.parametrize("local", [0, 1])
def test_what_others_bring_after_a_reset_that_vllm_did_not_make_is_not_built_on(
    side: Side, local: int
) -> None:
    """Another connector's tokens, or a part of a block that vLLM copies from another: whoever had
    the block since, it may be of before.
    """
    request, own = new_request(), blocks_of(2 * CHUNK)
    assert side.matched(request) == (0, False)
    side.reset()
    fresh, same = same_prompt(request), same_prompt(request)
    assert side.matched(fresh) == (0, False)
    assert side.begun(fresh, 0, CHUNK, (own[: CHUNK // BLOCK],)).stores
    side.half.finished(fresh)
    assert side.matched(same, local) == (0, False)
    first = side.begun(same, local or BLOCK, 2 * CHUNK - BLOCK, (own,))
    side.report(echoes={first.echo})
    later = side.step(cached=(same, 2 * CHUNK, CHUNK, list(range(50, 50 + CHUNK // BLOCK))))
    assert first.stores + later.stores == []


def test_who_is_computed_again_after_a_reset_is_stored_from_the_start(side: Side) -> None:
    """vLLM has preempted all that ran, and its own cache is empty; what was stored before is gone
    from the pool.
    """
    request, each = new_request(), CHUNK // BLOCK
    side.half.watch(BlockPool(num_gpu_blocks=64, enable_caching=True, hash_block_size=BLOCK))
    assert side.matched(request) == (0, False)
    assert side.step((request, CHUNK)).stores
    side.reset()
    assert side.matched(request) == (0, False)
    assert [
        len(store.keys)
        for store in side.begun(request, 0, 2 * CHUNK, (list(range(2 * each)),)).stores
    ] == [2]


@pytest.mark.parametrize("ahead", [False, True])
def test_what_was_sent_ahead_is_asked_once(side: Side, ahead: bool) -> None:
    request = new_request()
    side.put(request)
    before = side.asked()
    if ahead:
        side.half.arrived(request)
    assert side.matched(request) == side.matched(request) == (CHUNKS * CHUNK, True)
    assert side.asked() == before + 1
    counters = side.meter.take()
    assert counters is not None
    assert counters.data["counters"] == {
        "lookup_asked_tokens": {"": 80},
        "lookup_hit_tokens": {"": 80},
    }


def test_a_request_that_waits_is_looked_up_again_and_its_tokens_are_counted_once(
    side: Side, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM asks in every step until it has blocks for the request; meanwhile chunks come and go."""
    monkeypatch.setattr(tracked, "FRESH_SECONDS", 0.0)
    request = new_request()
    before, (asked, found) = side.asked(), status.tokens(side.client.stats())
    for chunks in (0, 2, CHUNKS, 1):
        side.client.clear()
        side.put(request, chunks)
        assert side.matched(request)[0] == chunks * CHUNK
    assert side.asked() == before + 4
    eventually(lambda: status.tokens(side.client.stats()) == (asked + 80, found + 80))
    counters = side.meter.take()
    assert counters is not None
    assert counters.data["counters"] == {
        "lookup_asked_tokens": {"": 80},
        "lookup_hit_tokens": {"": 80},
    }


def test_what_was_sent_ahead_too_long_ago_is_asked_again(
    side: Side, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody may have stored it meanwhile."""
    request = new_request()
    side.put(request, 2)
    side.half.arrived(request)
    monkeypatch.setattr(lookups, "AHEAD_SECONDS", 0.0)
    assert stored_by(side.client, side.keys(request)) == CHUNKS - 2
    assert side.matched(request) == (CHUNKS * CHUNK, True)


def test_a_hit_that_begins_within_a_chunk_fills_what_vllm_lacks_of_it(side: Side) -> None:
    request = new_request()
    side.put(request)
    side.half.arrived(request)
    assert side.matched(request, 2 * CHUNK + BLOCK) == ((CHUNKS - 2) * CHUNK - BLOCK, True)
    side.allocated(request, (CHUNKS - 2) * CHUNK - BLOCK)
    (load,) = side.step().loads
    assert load.keys == side.keys(request)[2:]
    assert load.blocks == [-1, *range(109, 120)]


def test_a_chunk_missing_from_the_pool_that_vllm_has_itself_hides_nothing(
    side: Side,
) -> None:
    request = new_request()
    side.put(request)
    side.client.remove(side.keys(request)[:1])
    side.half.arrived(request)
    assert side.matched(request, CHUNK) == ((CHUNKS - 1) * CHUNK, True)


def test_what_vllms_own_cache_has_is_not_asked_for(side: Side) -> None:
    request = new_request()
    own: set[bytes] = set()
    side.half.blocks = SimpleNamespace(cached=lambda block: block in own)
    before = side.asked()
    own |= set(request.block_hashes[: (CHUNKS - 1) * CHUNK // BLOCK + 1])
    side.half.arrived(request)
    assert side.asked() == before
    own.remove(request.block_hashes[(CHUNKS - 1) * CHUNK // BLOCK])
    side.half.arrived(request)
    eventually(lambda: side.asked() == before + 1)


# ---- several ranks


def test_a_chunk_that_one_rank_lacks_ends_the_hit(make: Callable[..., Side]) -> None:
    side, request = make(ranks=2), new_request()
    side.put(request)
    side.put(request, 3, rank=1)
    assert side.matched(request) == (3 * CHUNK, True)


def test_what_was_computed_with_another_connectors_load_is_stored_when_that_has_held(
    side: Side,
) -> None:
    """Under MultiConnector: it may be part of the step, and fail."""
    request = new_request()
    assert side.matched(request) == (0, False)
    own = blocks_of(PROMPT)
    first = side.begun(request, 3 * CHUNK, PROMPT - 3 * CHUNK, (own,))
    assert first.stores == side.step(cached=(request, PROMPT, 1, None)).stores == []
    side.report(echoes={first.echo})
    # It failed: vLLM goes back.
    assert [len(store.keys) for store in side.step(cached=(request, 0, PROMPT, None)).stores] == [
        CHUNKS
    ]


def test_states_are_stored_once_the_loads_they_were_computed_behind_have_held(
    make: Callable[..., Side],
) -> None:
    """Under MultiConnector, with another connector's load in the step: also for a request that
    begins with what was computed behind it, whose table of states has none of that load's
    blocks."""
    side, request, each = make(state=True), new_request(), CHUNK // BLOCK
    same = same_prompt(request)
    assert side.matched(request) == (0, False)
    own, none = blocks_of(5 * CHUNK), [0] * (each - 1)
    first = side.begun(request, CHUNK, CHUNK, ([0] * each + [*none, 200], own[: 2 * each]))
    second = side.step(cached=(request, 2 * CHUNK, CHUNK, ([*none, 201], own[2 * each : 3 * each])))
    assert side.matched(same, 3 * CHUNK) == (0, False)
    rows = [0] * 2 * each + [*none, 201, *none, 202], [*own[: 3 * each], *range(300, 300 + each)]
    third = side.begun(same, 3 * CHUNK, CHUNK, rows)
    assert first.echo
    assert first.stores == second.stores == third.stores == []
    side.report(echoes={first.echo})
    fourth = side.step(cached=(request, 3 * CHUNK, CHUNK, ([*none, 203], own[3 * each : 4 * each])))
    assert [(len(store.keys), len(store.prefix)) for store in fourth.stores] == [(4, 0), (1, 4)]


# ---- what a step stores


def stored(meta: StepMetadata) -> list[tuple[int, list[int], int]]:
    """Of each store: how many chunks, in which blocks, after how many."""
    return [(len(store.keys), store.blocks, len(store.prefix)) for store in meta.stores]


def test_chunks_are_stored_by_the_step_that_completes_them(side: Side) -> None:
    request = new_request()
    side.matched(request)
    assert stored(side.step((request, 2 * CHUNK - 1))) == [(1, [0, 1, 2, 3], 0)]
    assert stored(side.step(cached=(request, 2 * CHUNK - 1, 1, None))) == [(1, [4, 5, 6, 7], 1)]
    assert stored(side.step(cached=(request, 2 * CHUNK, CHUNK - 1, [20, 21, 22, 23]))) == []
    more = list(range(24, 34))
    meta = side.step(cached=(request, 3 * CHUNK - 1, PROMPT - 3 * CHUNK + 1, more))
    assert stored(meta) == [(3, [20, 21, 22, 23, *more[:8]], 2)]
    assert meta.fresh == [more]


@pytest.mark.parametrize(("which", "count"), [("all", 1), ("prompt", 0)])
def test_tokens_guessed_ahead_are_not_stored_and_answers_if_wanted(
    make: Callable[..., Side], which: str, count: int
) -> None:
    side, request = make(store=which), new_request(CHUNK + 1)
    side.matched(request)
    assert len(side.step((request, CHUNK + 1)).stores) == 1
    assert side.step(cached=(request, CHUNK + 1, CHUNK, [20, 21, 22, 23])).stores == []
    request.append_output_token_ids([5] * (CHUNK - 1))
    assert len(side.step(cached=(request, 2 * CHUNK, 1, None)).stores) == count


def test_what_was_loaded_is_not_stored_again_unless_the_load_failed(side: Side) -> None:
    request = new_request()
    side.put(request)
    assert side.matched(request) == (CHUNKS * CHUNK, True)
    before = side.step()
    side.allocated(request)
    assert len(side.step().loads) == 1
    assert (before.loads, before.fresh) == ([], []), "of a step that may still run"
    assert side.step((request, PROMPT)).stores == []
    side.report(failed={request.request_id})
    assert side.matched(request) == (0, False), "it does not look again"
    assert stored(side.step((request, PROMPT))) == [
        (CHUNKS, list(range(CHUNKS * CHUNK // BLOCK)), 0)
    ]


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Any]:
    """Those that have ended."""
    pytest.importorskip("opentelemetry.sdk.trace", reason="no SDK of OpenTelemetry is installed")
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)
    return exporter.get_finished_spans


def test_spans_of_instances_that_vllm_gave_one_seed_have_names_of_their_own(
    make: Callable[..., Side], spans: Callable[[], Any]
) -> None:
    """OpenTelemetry draws them from Python's generator, which vLLM seeds alike in every
    instance.
    """
    state = random.getstate()
    for _ in range(2):
        side, request = make(), new_request()
        random.seed(0)
        assert side.matched(request)[0] == 0
    random.setstate(state)
    one, other = (span.context for span in spans())
    assert one.span_id != other.span_id
    assert one.trace_id != other.trace_id


def test_where_vllm_traces_a_look_up_and_a_load_are_spans_of_their_request(
    make: Callable[..., Side], spans: Callable[[], Any]
) -> None:
    side, request = make(), new_request()
    request.trace_headers = {"traceparent": f"00-{'ab' * 16}-{'cd' * 8}-01"}
    side.put(request)
    assert side.matched(request) == side.matched(request) == (CHUNKS * CHUNK, True)
    side.allocated(request)
    side.step((request, PROMPT))
    side.half.finished(request)
    assert [span.name for span in spans()] == ["vcache.lookup"], (
        "it may end with the step that loads"
    )
    other = LoadSpan("another", 0, 1, 2, {}, 0.0, 0.0, "")
    now = time.time_ns()
    mine = other._replace(
        request_id=request.request_id, began=now + 5, ended=now + 9, nbytes={"peer": 7, "own": 1}
    )
    side.report(spans=[other, mine])
    lookup, worker, load = spans()
    assert (worker.name, worker.start_time, worker.end_time, load.end_time) == (
        "vcache.load.worker",
        now + 5,
        now + 9,
        now + 9,
    )
    assert (worker.attributes["vcache.bytes"], worker.attributes["vcache.bytes.peer"]) == (8, 7)
    assert (worker.parent.span_id, worker.context.trace_id) == (
        load.context.span_id,
        load.context.trace_id,
    )
    assert (lookup.attributes["vcache.local_tokens"], lookup.attributes["vcache.found_tokens"]) == (
        0,
        CHUNKS * CHUNK,
    )
    assert (load.name, load.attributes["vcache.tokens"]) == ("vcache.load", CHUNKS * CHUNK)
    assert lookup.start_time < lookup.end_time
    for span in (lookup, load):
        assert f"{span.context.trace_id:x}" == "ab" * 16
        assert f"{span.parent.span_id:x}" == "cd" * 8
        assert span.attributes["gen_ai.request.id"] == request.request_id


def test_vllm_hears_where_the_tokens_of_a_hit_lay(here: Node, make: Callable[..., Side]) -> None:
    """By segment: the server is asked, unless all of the pool is in one place. Here a segment on
    the own GPU, one on a peer's; the first block is vLLM's own, the last one is computed."""
    with (
        VCacheEngine(here.config("host:peer", 1 << 20), layout_of(Cache())),
        here.stage.client(device="host:peer") as peer,
    ):
        side, request, plain = make(), new_request(CHUNKS * CHUNK), new_request()
        side.put(request, 2)
        assert stored_by(peer, side.keys(request)) == CHUNKS - 2
        own, far = sorted(side.client.list_segments(), key=lambda segment: segment.device)
        side.report(segments={0: {own.id: "own", far.id: "peer"}})
        external = (CHUNKS * CHUNK - BLOCK) - BLOCK
        assert side.matched(request, BLOCK) == (external, True)
        before = side.asked("Contains")
        side.allocated(request, external)
        assert side.half.hit_sources(request, external) == {
            "device": 2 * CHUNK - BLOCK,
            "p2p": 3 * CHUNK - BLOCK,
        }
        assert side.asked("Contains") - before == 1
        side.report(segments={0: {own.id: "own"}})
        side.put(plain)
        assert side.matched(plain) == (CHUNKS * CHUNK, True)
        side.allocated(plain)
        assert side.half.hit_sources(plain, CHUNKS * CHUNK) == {"device": CHUNKS * CHUNK}
        assert side.asked("Contains") - before == 1
        assert peer.drop_segment(far.id)


def test_what_a_request_computes_is_promised_until_it_is_stored_or_given_up(side: Side) -> None:
    """By its look-up, and confirmed by its first step; not what it has."""

    def coming(request: Request) -> tuple[int, bool] | None:
        found = side.client.find(side.keys(request), 1, pool_only=True).coming
        return None if found is None else (found.chunks, found.begun)

    request = new_request()
    assert side.matched(request) == (0, False)
    assert coming(request) == (CHUNKS, False)
    side.step((request, CHUNK))
    eventually(lambda: coming(request) == (CHUNKS, True))
    side.preempted(request)
    eventually(lambda: coming(request) is None)
    side.begun(request, 0, CHUNK, (blocks_of(CHUNK),))
    eventually(lambda: coming(request) == (CHUNKS, True))
    side.half.finished(request)
    eventually(lambda: coming(request) is None)
    queued = new_request()
    assert side.matched(queued) == (0, False)
    assert coming(queued) == (CHUNKS, False)
    side.half.finished(queued)
    eventually(lambda: coming(queued) is None)
    # Nobody waits for what is not stored.
    private = new_request(store=False)
    assert side.matched(private) == (0, False)
    side.step((private, CHUNK))
    assert coming(private) is None


def test_a_request_that_ends_while_it_loads_is_cancelled(side: Side) -> None:
    request = new_request()
    side.put(request)
    side.matched(request)
    side.allocated(request)
    side.step()
    side.half.finished(request)
    assert side.step().cancelled == {request.request_id}
    assert side.step().cancelled == set()


def test_after_an_exception_nobodys_blocks_are_known(side: Side) -> None:
    request = new_request()
    side.matched(request)
    with pytest.raises(TypeError):
        side.step((new_request(), PROMPT), cached=(request, 0, 1, 7))  # type: ignore[arg-type]
    meta = side.step(cached=(request, PROMPT, CHUNK, None))
    assert meta.stores == []


# ---- several block tables

WINDOW, ROWS = 9, (list(range(1, 21)), list(range(101, 121)))
"""Of the window a hit needs two blocks, half a chunk."""


def test_a_store_has_blocks_of_every_table_and_all_that_get_an_owner_are_fenced(
    make: Callable[..., Side],
) -> None:
    side, request = make(window=WINDOW), new_request()
    side.matched(request)
    meta = side.begun(request, 0, 2 * CHUNK, ROWS)
    assert meta.fresh == list(ROWS)
    assert [store.blocks for store in meta.stores] == [
        [101, 102, 103, 104, 3, 4, 105, 106, 107, 108, 7, 8]
    ]


def test_who_goes_on_gets_blocks_of_every_table(make: Callable[..., Side]) -> None:
    side, request = make(window=WINDOW), new_request()
    side.matched(request)
    assert not side.begun(request, 0, CHUNK - 1, tuple(row[:4] for row in ROWS)).stores
    rows = tuple(row[4:8] for row in ROWS)
    meta = side.step(cached=(request, CHUNK - 1, CHUNK + 1, rows))
    assert meta.fresh == list(rows)
    (store,) = meta.stores
    assert store.blocks == [101, 102, 103, 104, 3, 4, 105, 106, 107, 108, 7, 8]
    # A table that ends before the others has no more chunks than it has whole.
    (store,) = side.step(
        cached=(request, 2 * CHUNK, 2 * CHUNK, (ROWS[0][8:15], ROWS[1][8:16]))
    ).stores
    assert len(store.keys) == 1


def test_of_what_windows_have_passed_nothing_is_stored(make: Callable[..., Side]) -> None:
    """A prefix in vLLM's own cache: of its windows the last one is there, and so is the chunk that
    ends with it.
    """
    side, request = make(window=WINDOW), new_request()
    side.matched(request, 3 * CHUNK)
    passed = (3 * CHUNK - WINDOW + 1) // BLOCK
    (store,) = side.begun(
        request, 3 * CHUNK, CHUNK, ([0] * passed + ROWS[0][passed:], ROWS[1])
    ).stores
    assert store.keys == side.keys(request)[2:4]
    assert store.blocks == [109, 110, 111, 112, 11, 12, 113, 114, 115, 116, 15, 16]


def test_a_hit_ends_with_a_chunk_and_is_loaded_where_vllm_wants_it(
    make: Callable[..., Side],
) -> None:
    side, request = make(window=WINDOW), new_request(CHUNKS * CHUNK)
    side.put(request)
    assert side.matched(request, CHUNK + BLOCK) == (3 * CHUNK - BLOCK, True)
    end = 4 * CHUNK
    passed = (end - WINDOW + 1) // BLOCK
    rows = [0] * passed + ROWS[0][passed : end // BLOCK], ROWS[1][: end // BLOCK]
    side.half.allocated(request, SimpleNamespace(get_block_ids=lambda: rows), 3 * CHUNK - BLOCK)
    (load,) = side.step().loads
    assert load.keys == side.keys(request)[1:4]
    assert load.blocks == [
        -1,
        106,
        107,
        108,
        -1,
        -1,
        109,
        110,
        111,
        112,
        -1,
        -1,
        113,
        114,
        115,
        116,
        15,
        16,
    ]


def test_pages_of_several_sizes_which_vllm_shows_workers_alone_are_refused_by_their_word(
    make: Callable[..., Side],
) -> None:
    """Otherwise the first request waits ten seconds for them."""
    side, sizes = make(), {"block_size": BLOCK, "head_size": 8, "dtype": torch.bfloat16}
    layers = {f"layer {heads}": FullAttentionSpec(num_kv_heads=heads, **sizes) for heads in (1, 2)}
    group = KVCacheGroupSpec(list(layers), UniformTypeKVCacheSpecs.from_specs(layers))
    theirs = KVCacheConfig(num_blocks=64, kv_cache_tensors=[], kv_cache_groups=[group])
    ours = kv_cache_utils.generate_scheduler_kv_cache_config([theirs])
    assert groups.read(ours, CHUNK).plain
    worker = WorkerSide(side.vllm, theirs, side.config, 0, 0, Meter())
    worker.register({})
    worker.report.introduce = True
    said = worker.report.take()
    assert not worker.needless
    assert said is not None
    assert "pages of several sizes" in said.shards[0, 0].spec.problem
    assert pickle.loads(pickle.dumps(REFUSED)) is REFUSED


def test_workers_that_never_describe_their_kv_caches_are_named(
    make: Callable[..., Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(introduction, "INTRODUCTION_SECONDS", -1.0)
    side = make(ranks=3)
    late = introduction.Introduction(
        side.config, compat.read_model(side.vllm, side.caches, ""), BLOCK, None
    )
    shard = Shard(
        ShardSpec(pp_rank=0, tp_rank=1, dtype="bfloat16", kv_layout="x", layers=1, block_size=BLOCK)
    )
    late.note({(0, 1): shard}, {})
    assert not late.waits()
    assert late.refused.startswith("1 of 3 workers have described their KV caches")
    assert late.refused.endswith(
        "see the log of the others: pipeline rank 0, tensor rank 0; pipeline rank 0, tensor rank 2"
    )
    late.close()


def test_a_load_of_which_an_exception_comes_late_is_told_once(
    side: Side, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM takes a request that is over twice for a defect of its own."""
    request = new_request()
    side.put(request)
    assert side.matched(request) == (CHUNKS * CHUNK, True)
    monkeypatch.setattr(hints, "tell", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        side.allocated(request)
    side.half.lost(request)
    assert [load.lost for load in side.step().loads] == [True]
