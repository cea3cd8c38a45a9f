"""What steps bring to a scheduler half that shares through a pool, as decided in vLLM's own scheduler."""

from __future__ import annotations

import pickle

import pytest
from in_place_cases import BLOCK, CHUNK, Engine, Make, make, new_tokens
from pool_cases import CHUNKS, PROMPT, abort, engine, here, loaded, pooled, reset
from processes import eventually
from vllm_cases import needs_vllm

pytest.importorskip("vllm.v1.core.sched.scheduler", reason="vLLM is not installed")

from vllm.pooling_params import PoolingParams
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.request import Request, RequestStatus

from vcache_backend.integration.vllm.metadata import QUIET, WorkerReport

__all__ = ["engine", "here", "make"]
pytestmark = needs_vllm


def test_a_step_in_which_requests_only_run_on_sends_one_constant(engine: Engine) -> None:
    """It costs next to nothing to plan, and to send to workers in other processes."""
    engine.add(new_tokens(CHUNK + 3), 2 * CHUNK)
    metas = [engine.step() for _ in range(4)]
    assert [meta is QUIET for meta in metas] == [False, True, True, True]
    assert pickle.loads(pickle.dumps(QUIET)) is QUIET
    # A load begins beside it, and is not wanted any more.
    engine.add(pooled(engine), name="r")
    assert len(engine.step().loads) == 1
    abort(engine)
    assert [engine.step().cancelled for _ in range(2)] == [{"r"}, set()]


def test_a_later_request_of_a_name_is_seen_though_the_earlier_had_far_to_go(engine: Engine) -> None:
    """Beside another one, which has far to go, too."""
    engine.add(new_tokens(CHUNK + 1), max_tokens=CHUNK)
    engine.finish(engine.add(new_tokens(CHUNK + 1), name="same"))
    later = engine.add(new_tokens(CHUNK - 2), name="same", max_tokens=CHUNK)
    engine.step()
    assert [engine.stored(later, engine.step()) for _ in range(3)] == [[], [0], []]


def test_a_request_that_some_steps_left_out_is_seen(engine: Engine) -> None:
    """As vLLM does if a step's budget is used up, here beside a request that has far to go."""
    engine.add(new_tokens(CHUNK + 1), max_tokens=CHUNK)
    near = engine.add(new_tokens(CHUNK - 3), max_tokens=CHUNK)
    engine.step()
    engine.scheduler.running.remove(near)
    engine.step()
    engine.scheduler.running.append(near)
    assert [engine.stored(near, engine.step()) for _ in range(4)] == [[], [], [0], []]


def test_a_block_for_a_step_that_completes_nothing_is_known(engine: Engine) -> None:
    running = engine.add(new_tokens(CHUNK + 1), max_tokens=2 * CHUNK)
    metas = [engine.step() for _ in range(CHUNK)]
    assert sum(len(row) for meta in metas for row in meta.fresh) == 2 * CHUNK // BLOCK
    assert [number for meta in metas for number in engine.stored(running, meta)] == [0, 1]


def test_a_chunk_is_stored_by_the_step_that_completes_it(make: Make) -> None:
    """Which may be its request's last. Eight tokens a step complete it sooner than the one token of
    another request would, and only every fourth step brings a block."""
    engine = make(share="pool", arguments={"max_num_batched_tokens": 9})
    beside = engine.add([5], max_tokens=CHUNK)
    engine.step()
    request = engine.add(new_tokens(CHUNK), max_tokens=1)
    engine.finish(request)
    assert engine.stored(request) == [0]
    engine.finish(beside)


def test_blocks_that_another_connector_fills_beside_the_steps_wait_for_stores(
    engine: Engine,
) -> None:
    with engine.others_bring(2 * CHUNK, waits=True):
        request = engine.add(new_tokens(PROMPT))
        meta = engine.step(invalid_block_ids=set())
    assert request.status == RequestStatus.WAITING_FOR_REMOTE_KVS
    assert meta.fresh == [*engine.scheduler.kv_cache_manager.get_block_ids(request.request_id)]
    engine.step(finished_recving={request.request_id})
    engine.finish(request)


def test_blocks_for_another_connectors_load_wait_for_our_stores_in_a_step_that_only_decodes(
    make: Make,
) -> None:
    engine = make(share="pool")
    request = engine.add(new_tokens(CHUNK + 4), max_tokens=40)
    eventually(lambda: engine.step() is QUIET)
    pool = engine.scheduler.kv_cache_manager.block_pool
    given = KVCacheBlocks((pool.get_new_blocks(2),))
    engine.scheduler.connector.update_state_after_alloc(engine.request([1]), given, 0)
    assert engine.step().fresh == [*given.get_block_ids()]
    engine.finish(request)


def test_a_request_that_pools_is_loaded(engine: Engine) -> None:
    tokens, params = pooled(engine), PoolingParams(task="classify")
    request = Request("pools", tokens, None, params, block_hasher=engine.hasher)
    engine.scheduler.add_request(request)
    assert loaded(engine) == CHUNKS


def test_who_shares_a_block_of_anothers_failed_load_stores_nothing_more(make: Make) -> None:
    """With steps planned ahead vLLM does not compute anew all that it has computed behind it."""
    steps = {"long_prefill_token_threshold": CHUNK}
    engine = make(share="pool", blocks=64, asynchronous=True, arguments=steps)
    common, schedule = new_tokens(BLOCK), engine.scheduler.schedule
    both = [engine.add([*common, *new_tokens(4 * CHUNK)]) for _ in range(2)]
    with engine.others_bring(BLOCK):
        began = schedule()
    ahead, first = schedule(), began.scheduled_new_reqs[0].block_ids[0][0]
    assert engine.hit(both[1]) == BLOCK
    report = WorkerReport(echoes=began.kv_connector_metadata.echoes)
    engine.end(began, invalid_block_ids={first}, kv_connector_worker_meta=report)
    engine.end(ahead)
    assert not began.kv_connector_metadata.stores + ahead.kv_connector_metadata.stores
    for request in both:
        engine.finish(request)
    assert [meta.stores for meta in engine.metas] == [[]] * len(engine.metas)


@pytest.mark.parametrize("table", [0, 1])
def test_states_are_stored_once_the_loads_before_them_have_held(make: Make, table: int) -> None:
    """Also of a request that begins with what was computed behind another connector's load, whose
    table of states has none of that load's blocks."""
    steps, tokens = {"max_num_batched_tokens": CHUNK}, new_tokens(3 * CHUNK)
    engine = make(share="pool", states=table, blocks=64, arguments=steps)
    with engine.others_bring(CHUNK):
        request = engine.add([*tokens, 5], max_tokens=2 * CHUNK)
        echoes = engine.step().echoes
    assert echoes
    for _ in range(4):
        engine.step()
    same = engine.add([*tokens, *new_tokens(CHUNK), 6], max_tokens=2 * CHUNK)
    engine.step()
    assert engine.hit(same) > CHUNK
    assert [meta.stores for meta in engine.metas] == [[]] * len(engine.metas)
    engine.step(kv_connector_worker_meta=WorkerReport(echoes=echoes))
    for one in (request, same):
        engine.finish(one)
    stored = [(spec, meta) for meta in engine.metas for spec in meta.stores]
    whose = [
        [engine.has(one, spec.blocks, meta) for one in (request, same)] for spec, meta in stored
    ]
    assert [True, False] in whose
    assert [False, True] in whose
    assert any(len(spec.chunks.prefix) > 3 for spec, _ in stored), "states, too"


@pytest.mark.parametrize("then", ["runs", "ends", "another resets"])
def test_what_others_load_after_a_refused_reset_is_not_built_on(engine: Engine, then: str) -> None:
    """The other connector may have it from a request of before, even if that ends before the next
    step, in which the instance hears of its own reset."""
    running = engine.add(new_tokens(CHUNK), max_tokens=CHUNK)
    engine.step()
    if then == "runs":
        reset(engine)
    else:
        engine.scheduler.reset_prefix_cache(reset_connector=True)
        name = running.request_id
        engine.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
    if then == "another resets":
        with engine.here.client() as client:
            client.clear(engine.half.context.prefix, reset=True)
        eventually(lambda: engine.half.context.news.waiting)
    tokens = new_tokens(3 * CHUNK)
    with engine.others_bring(BLOCK):
        request = engine.add(tokens, max_tokens=CHUNK)
        echoes = engine.step().echoes
    assert echoes
    engine.step(kv_connector_worker_meta=WorkerReport(echoes=echoes))
    same = engine.add([*tokens, 5])
    engine.step()
    assert engine.hit(same) == 0
    engine.finish(request)
    assert [engine.stored(request, meta) for meta in engine.metas] == [[]] * len(engine.metas)
    engine.finish(running)
