"""The half of the connector in vLLM's scheduler, with vLLM's requests and a real metadata server:
what is asked and when it counts, which chunks a step stores, and what a worker's report changes."""

from __future__ import annotations

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
from processes import QUICK, SECONDS, eventually
from vllm_objects import BLOCK, vllm_config

pytest.importorskip("vllm.distributed.kv_events", reason="vLLM is not installed")

import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, MambaSpec
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from vcache_backend.config import ConnectorConfig
from vcache_backend.engine import VCacheEngine
from vcache_backend.integration.vllm.metadata import Shard, StepMetadata, WorkerReport
from vcache_backend.integration.vllm.model import versions
from vcache_backend.integration.vllm.model.spec import ShardSpec
from vcache_backend.integration.vllm.scheduler import lookups, pace, tracked
from vcache_backend.integration.vllm.scheduler.side import SchedulerSide
from vcache_backend.integration.vllm.telemetry.stats import Meter
from vcache_backend.metadata_server.client import Client
from vcache_backend.metadata_server.messages import ChunkKey, Find, of_rank
from vcache_backend.metadata_server.pool.quotas import tenant_id

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
        patch.setattr(lookups, "LATE_SECONDS", SECONDS)
        patch.setattr(tracked, "FRESH_SECONDS", SECONDS)
        kv_cache_utils.init_none_hash(sha256)
        made.serve()
        made.undo.enter_context(VCacheEngine(made.config("host", 4 << 20), layout_of(Cache())))
        yield made


class Side:
    """A scheduler's half whose workers have said what they hold."""

    def __init__(
        self, here: Node, undo: ExitStack, ranks: int = 1, state: bool = False, **connector: Any
    ) -> None:
        """ranks: tensor parallel ones. state: whether the first of two block tables has states."""
        self.meter, self.client = Meter(), undo.enter_context(here.client())
        config = here.config("host", chunk_size=CHUNK)
        settings = ConnectorConfig(**{"share": "pool", "min_hit_tokens": CHUNK} | connector)
        config = msgspec.structs.replace(config, connector=settings)
        one = {
            "parallel_config__tensor_parallel_size": ranks,
            "parallel_config__pipeline_parallel_size": 1,
        }
        vllm = vllm_config(**one, kv_events_config=None, use_v2_model_runner=True)
        vllm.cache_config.prefix_caching_hash_algo = "sha256"
        vllm.cache_config.prefix_match_unit = None
        vllm.cache_config.enable_prefix_caching, vllm.parallel_config.data_parallel_size = True, 1
        vllm.scheduler_config = SimpleNamespace(async_scheduling=True, max_num_batched_tokens=64)
        vllm.observability_config = SimpleNamespace(otlp_traces_endpoint="http://127.0.0.1:4317")
        sizes = {"block_size": BLOCK, "num_kv_heads": 4, "head_size": 8, "dtype": torch.bfloat16}
        shape = {"shapes": ((2, 3),), "dtypes": (torch.float32,), "mamba_cache_mode": "align"}
        specs = [MambaSpec(block_size=BLOCK, **shape)] if state else []
        named = [KVCacheGroupSpec(["layer"], one) for one in (*specs, FullAttentionSpec(**sizes))]
        caches = KVCacheConfig(num_blocks=64, kv_cache_tensors=[], kv_cache_groups=named)
        self.vllm, self.caches, self.config = vllm, caches, config
        self.half = SchedulerSide(vllm, caches, config, True, True, self.meter, apart=True)
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

    def waiting(self, request: Request) -> bool:
        wait = self.half._track(request).wait
        return bool(wait.since) and not wait.over

    def allocated(
        self, request: Request, external: int = CHUNKS * CHUNK, end: int = CHUNKS * CHUNK
    ) -> None:
        """vLLM has blocks for the request's tokens up to `end`, of which the last `external` are to
        be loaded.
        """
        self.half.allocated(
            request, SimpleNamespace(get_block_ids=lambda: (blocks_of(end),)), external
        )

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


def test_the_end_of_a_load_that_was_told_is_not_cancelled_in_a_later_request_of_that_name(
    side: Side,
) -> None:
    """vLLM aborts the first one while its last step runs; the worker would report the load of the
    second one, whose bytes never came, as over."""
    request = new_request()
    side.put(request)
    for _ in range(2):
        assert side.matched(request) == (CHUNKS * CHUNK, True)
        side.allocated(request)
        meta = side.step()
        assert (len(meta.loads), meta.cancelled) == (1, set())
        side.half.finished(request)
        side.half.update(KVConnectorOutput(finished_recving={request.request_id}))


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


@pytest.mark.parametrize("ahead", [False, True])
def test_a_late_answer_stalls_no_step_and_is_used_when_it_arrives(
    here: Node, side: Side, monkeypatch: pytest.MonkeyPatch, ahead: bool
) -> None:
    monkeypatch.setattr(lookups, "LATE_SECONDS", 0.001)
    monkeypatch.setattr(lookups, "AHEAD_SECONDS", 0.0 if not ahead else SECONDS)
    request = new_request()
    side.put(request)
    with here.server.stopped():
        if ahead:
            side.half.arrived(request)
        began = time.monotonic()
        assert [side.matched(request) for _ in range(3)] == [(None, False)] * 3
        assert time.monotonic() < began + QUICK.request_seconds / 2
    eventually(lambda: side.matched(request) == (CHUNKS * CHUNK, True))


def test_an_answer_that_vllm_comes_back_for_too_late_is_asked_for_again(
    here: Node, side: Side, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lookups, "LATE_SECONDS", 0.001)
    request = new_request()
    with here.server.stopped():
        assert side.matched(request) == (None, False)
    question = side.half._track(request).lookup.question
    assert question is not None
    assert question.sent.arrives(SECONDS)
    side.put(request)
    monkeypatch.setattr(tracked, "FRESH_SECONDS", 0.0)
    assert side.matched(request) == (CHUNKS * CHUNK, True)


def test_a_request_waits_one_deadline_for_a_server_that_does_not_answer(
    here: Node, side: Side, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lookups, "LATE_SECONDS", 0.001)
    client = side.half.instance.client
    assert client is not None
    monkeypatch.setattr(
        client, "_config", msgspec.structs.replace(client._config, request_seconds=0.2)
    )
    request = new_request()
    side.put(request)
    with here.server.stopped():
        began = time.monotonic()
        assert side.matched(request) == (None, False)
        eventually(lambda: side.matched(request) == (0, False))
        assert time.monotonic() > began + 0.2
    eventually(lambda: side.matched(request) == (CHUNKS * CHUNK, True))


def test_a_wait_ends_at_its_bound_though_the_server_does_not_answer(
    here: Node, side: Side, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lookups, "LATE_SECONDS", 0.001)
    client, request = side.half.instance.client, new_request()
    assert client is not None
    patient = msgspec.structs.replace(client._config, request_seconds=100 * SECONDS)
    monkeypatch.setattr(client, "_config", patient)
    with here.client() as owner:
        keys = side.keys(request)
        owner.promise(1, keys, epoch=owner.find(Find(keys)).epoch, chunk_seconds=0.2)
        eventually(lambda: side.matched(request) == (None, False) and side.waiting(request))
        with here.server.stopped():
            eventually(lambda: side.matched(request) == (0, False))
    assert not side.waiting(request)


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


def test_a_version_has_keys_of_its_own_and_a_reset_leaves_it_without_the_server(
    make: Callable[..., Side],
) -> None:
    side, request = make(weights="v1"), new_request()
    first = side.keys(request)
    side.put(request)
    assert side.matched(request) == (CHUNKS * CHUNK, True)
    side.half.instance.clear = None  # type: ignore[method-assign]
    assert side.half.reset()
    assert not side.step().flush
    assert side.matched(request) == (0, False)
    others = side.keys(request)
    side.half.change_version(versions.digest("v1"))
    assert side.keys(request) == first != others
    assert side.matched(request) == (CHUNKS * CHUNK, True)


def test_a_store_counts_for_the_tenant_of_its_request(side: Side) -> None:
    for request, tenant in ((new_request(), b""), (new_request(tenant="acme"), tenant_id("acme"))):
        assert side.matched(request) == (0, False)
        (store,) = side.step((request, PROMPT)).stores
        assert store.tenant == tenant
    request = new_request()
    request.cache_salt = "pepper"
    assert side.half._track(request).tenant == tenant_id("pepper")


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


def test_what_a_request_computes_is_promised_until_it_is_stored_or_given_up(side: Side) -> None:
    """By its look-up, and confirmed by its first step; not what it has."""

    def coming(request: Request) -> tuple[int, bool] | None:
        found = side.client.find(Find(side.keys(request), 1, pool_only=True)).coming
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


def test_a_load_of_which_an_exception_comes_late_is_told_once(
    side: Side, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM takes a request that is over twice for a defect of its own."""
    request = new_request()
    side.put(request)
    assert side.matched(request) == (CHUNKS * CHUNK, True)
    monkeypatch.setattr(side.half, "_stands", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        side.allocated(request)
    side.half.lost(request)
    assert [load.lost for load in side.step().loads] == [True]


def test_beside_running_requests_a_short_hit_is_computed(
    side: Side, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As long as its load would take more of the present steps than it takes to compute. A step
    that computes a prompt says nothing of the next ones."""
    running, hit = new_request(CHUNK), new_request()
    side.put(hit)
    side.matched(running)
    clock = iter([0.0, 0.9, 0.92])
    monkeypatch.setattr(pace, "monotonic", lambda: next(clock))
    side.step((running, CHUNK))
    for _ in range(2):
        side.step(cached=(running, CHUNK, 1, [1]))
    side.half._pace.chunk_seconds = 0.1 / CHUNKS
    assert side.matched(same_prompt(hit)) == (CHUNKS * CHUNK, True), "long, at this pace"
    side.half._pace.chunk_seconds = 0.001
    assert side.matched(same_prompt(hit)) == (0, False), "sooner than in two steps of 20 ms"
    announced = new_request(list(hit.prompt_token_ids or ()), announced=True)
    assert side.matched(announced) == (CHUNKS * CHUNK, True), "whoever asks for the load gets it"
    side.half._pace.chunk_seconds = 0.0
    assert side.matched(same_prompt(hit)) == (CHUNKS * CHUNK, True), "the pace is not known"
    side.half._pace.chunk_seconds = 0.001
    side.half.finished(running)
    assert side.matched(same_prompt(hit)) == (CHUNKS * CHUNK, True), "steps without a model run"
