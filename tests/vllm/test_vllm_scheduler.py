"""What an instance that shares through a pool asks, loads and stores, as decided in vLLM's own
scheduler: when an answer counts, and what a reset changes."""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from engine_cases import Node
from in_place_cases import BLOCK, CHUNK, Engine, Make, find_of, make, new_tokens, scheduling
from model import FakeClock
from processes import SECONDS, eventually, info, make_memfd
from vllm_cases import needs_vllm

pytest.importorskip("vllm.v1.core.sched.scheduler", reason="vLLM is not installed")

from vllm.pooling_params import PoolingParams
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request, RequestStatus

from vcache_backend.integration.vllm import lookups, requests, waits
from vcache_backend.integration.vllm.ends import SIZE, AwaitedLoads, EndRing, LoadEnds
from vcache_backend.integration.vllm.metadata import QUIET, LoadSpec, WorkerReport
from vcache_backend.integration.vllm.telemetry.stats import Meter
from vcache_backend.protocol.client import Client
from vcache_backend.protocol.messages import QUEUED_SECONDS, Promise

__all__ = ["make"]
pytestmark = needs_vllm

CHUNKS = 5
PROMPT = CHUNKS * CHUNK + 3


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """A server, to which somebody lends memory."""
    with scheduling(tmp_path_factory.mktemp("scheduler")) as made:
        memory = make_memfd(4 << 20)
        made.client().add_segment(info("lent", 4 << 20), memory)
        os.close(memory)
        yield made


@pytest.fixture
def engine(make: Make) -> Engine:
    return make(share="pool")


def pooled(engine: Engine, count: int = CHUNKS) -> list[int]:
    """A prompt whose first chunks are in the pool."""
    tokens = new_tokens(PROMPT)
    put(engine, tokens, count)
    return tokens


def put(engine: Engine, tokens: list[int], count: int = CHUNKS) -> None:
    keys = engine.keys(engine.request(tokens))[:count]
    with engine.here.client() as client:
        assert client.commit(client.reserve(keys, 1024).reservation) == count


def loaded(engine: Engine) -> int:
    """How many chunks the loads have that begin in the next step."""
    return sum(len(load.keys) for load in engine.step().loads)


def reset(engine: Engine, over: bool = True) -> int:
    """A reset that vLLM does not make itself where requests run; its number. over: the workers have
    said that no store of before is under way."""
    engine.scheduler.reset_prefix_cache(reset_connector=True)
    (number,) = engine.step().echoes
    if over:
        flushed(engine, number)
    return number


def flushed(engine: Engine, number: int) -> None:
    engine.step(kv_connector_worker_meta=WorkerReport(echoes={number}))


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


# ---- the end of a load, before the report of the step that saw it


SAYS_NOTHING: dict[str, Any] = {"invalid_block_ids": set()}


def ends(engine: Engine, request_id: str = "r") -> None:
    """The worker writes, while the next steps run, that the request's load has succeeded."""

    def ran(output: Any) -> None:
        meta = output.kv_connector_metadata
        if numbers := [load.number for load in meta.loads if load.request_id == request_id]:
            ring = EndRing(0)
            ring.open(meta.ends)
            ring.put(*numbers)

    engine.ran = ran


def test_a_later_request_of_a_name_is_seen_though_the_earlier_had_far_to_go(engine: Engine) -> None:
    """Beside another one, which has far to go, too."""
    engine.add(new_tokens(CHUNK + 1), max_tokens=CHUNK)
    engine.finish(engine.add(new_tokens(CHUNK + 1), name="same"))
    later = engine.add(new_tokens(CHUNK - 2), name="same", max_tokens=CHUNK)
    engine.step()
    assert [engine.stored(later, engine.step()) for _ in range(3)] == [[], [0], []]


def test_a_block_for_a_step_that_completes_nothing_is_known(engine: Engine) -> None:
    running = engine.add(new_tokens(CHUNK + 1), max_tokens=2 * CHUNK)
    metas = [engine.step() for _ in range(CHUNK)]
    assert sum(len(row) for meta in metas for row in meta.fresh) == 2 * CHUNK // BLOCK
    assert [number for meta in metas for number in engine.stored(running, meta)] == [0, 1]


def test_a_load_whose_end_is_reported_and_written_at_once_counts_once(engine: Engine) -> None:
    """So the report of the next load of that request counts, too."""
    ends(engine)
    tokens = pooled(engine)
    for _ in range(2):
        request = engine.add(tokens, name="r")
        engine.step(finished_recving={"r"})
        engine.step(**SAYS_NOTHING)
        assert request.num_output_tokens == 1
        engine.finish(request)
        engine.ran = lambda _: None
        engine.scheduler.reset_prefix_cache()


@pytest.mark.parametrize("seen", [True, False])
def test_the_report_of_what_was_aborted_is_not_its_successors(engine: Engine, seen: bool) -> None:
    """seen: vLLM knew of the load's end before the abort, so it has freed the blocks."""
    ends(engine)
    tokens = pooled(engine)
    engine.add(tokens, name="r")
    if seen:
        engine.step(**SAYS_NOTHING)
    else:
        write = engine.ran
        engine.ran = lambda output: (write(output), abort(engine))
        engine.step(**SAYS_NOTHING)
    abort(engine)
    assert not engine.scheduler.requests
    engine.ran = lambda _: None
    request = engine.add(tokens, name="r")
    meta = engine.step(finished_recving={"r"})
    assert (len(meta.loads), meta.cancelled) == (1, set())
    engine.step(**SAYS_NOTHING)
    assert request.status == RequestStatus.WAITING_FOR_REMOTE_KVS
    engine.step(finished_recving={"r"})
    engine.finish(request)


def abort(engine: Engine) -> None:
    engine.scheduler.finish_requests("r", RequestStatus.FINISHED_ABORTED)


def test_a_preempted_request_that_loads_again_waits_for_its_second_load(engine: Engine) -> None:
    """The report of the first one comes late, as from a pipeline of several stages."""
    ends(engine)
    request = engine.add(pooled(engine), name="r")
    for _ in range(2):
        engine.step(**SAYS_NOTHING)
    assert request.num_output_tokens == 1
    engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    engine.ran = lambda _: None
    assert len(engine.step(finished_recving={"r"}).loads) == 1
    assert request.status == RequestStatus.WAITING_FOR_REMOTE_KVS
    engine.step(**SAYS_NOTHING)
    assert request.num_output_tokens == 1
    ends(engine)
    engine.ran(SimpleNamespace(kv_connector_metadata=engine.metas[-2]))
    engine.step(**SAYS_NOTHING)
    engine.step(finished_recving={"r"})
    assert request.num_output_tokens == 2
    engine.finish(request)


def test_a_load_that_ends_beside_one_that_fails_is_not_touched_by_that(engine: Engine) -> None:
    """The blocks of the failed one come with the same output."""
    ends(engine)
    right = engine.add(pooled(engine), name="r")
    wrong = engine.add(pooled(engine), name="wrong")
    engine.step(**SAYS_NOTHING)
    (blocks,) = (load.blocks for load in engine.metas[-1].loads if load.request_id == "wrong")
    said = {"invalid_block_ids": set(blocks), "finished_recving": {"r", "wrong"}}
    engine.step(kv_connector_worker_meta=WorkerReport(failed={"wrong"}), **said)
    assert (right.num_output_tokens, wrong.num_output_tokens) == (1, 0)
    engine.finish(wrong)
    engine.finish(right)
    again = [chunk for meta in engine.metas for chunk in engine.stored(wrong, meta)]
    assert again == [*range(CHUNKS)], "what is computed in place of a load is stored"


def test_blocks_that_another_connector_fills_beside_the_steps_wait_for_stores(
    engine: Engine,
) -> None:
    with engine.others_bring(2 * CHUNK, waits=True):
        request = engine.add(new_tokens(PROMPT))
        meta = engine.step(**SAYS_NOTHING)
    assert request.status == RequestStatus.WAITING_FOR_REMOTE_KVS
    assert meta.fresh == [*engine.scheduler.kv_cache_manager.get_block_ids(request.request_id)]
    engine.step(finished_recving={request.request_id})
    engine.finish(request)


def test_a_load_is_over_once_all_workers_say_so() -> None:
    """And a number that another worker's load has overwritten says nothing."""
    ends, rings = LoadEnds(2), [EndRing(worker) for worker in range(2)]
    for ring in rings:
        ring.open(ends.address)
    awaited, output = AwaitedLoads(), KVConnectorOutput()
    awaited.sent([LoadSpec(name, number=at) for at, name in enumerate("xy", 1)])
    rings[0].put(1)
    assert not ends.in_all(1)
    rings[1].put(1 + SIZE)
    assert not ends.in_all(1)
    rings[1].put(1)
    awaited.tell(output, ends.in_all)
    assert output.finished_recving == {"x"}
    later = KVConnectorOutput(finished_recving={"x", "y"})
    awaited.settle(later)
    assert later.finished_recving == {"y"}
    ends.close()


def test_a_worker_writes_into_nothing_but_its_schedulers_memory(tmp_path: Path) -> None:
    """On another host the path may be that of any file of this user. Nobody can take the memory
    from under the scheduler."""
    ends, ring = LoadEnds(1), EndRing(0)
    path, link = ends.address
    with pytest.raises(OSError, match="not permitted"):
        os.truncate(path, 0)
    with (tmp_path / "other").open("wb+") as other:
        other.write(bytes(SIZE * 8))
        other.flush()
        for wrong in (f"/proc/{os.getpid()}/fd/{other.fileno()}", "/proc/0/fd/0", ""):
            ring.open((wrong, f"{link}{wrong}" if wrong else ""))
            ring.put(7)
        assert not any((tmp_path / "other").read_bytes())
    assert not ends.in_all(7)
    ring.open(ends.address)
    ring.put(7)
    assert ends.in_all(7)
    ends.close()


# ---- when an answer counts


@pytest.mark.parametrize("ahead", [False, True])
def test_an_answer_of_before_a_reset_is_no_answer_after_it(make: Make, ahead: bool) -> None:
    """Of a request that waits for blocks meanwhile: its chunks are those of other weights. ahead: it
    was asked for, and is not read yet."""
    engine = make(share="pool", blocks=13)
    running = engine.add(new_tokens(10 * BLOCK), max_tokens=CHUNK)
    engine.step()
    request = engine.add(pooled(engine))
    if not ahead:
        engine.step()
    reset(engine)
    engine.finish(running)
    engine.finish(request)
    assert sum(len(meta.loads) for meta in engine.metas) == 0


def test_a_request_that_waits_while_the_weights_change_loads_nothing_of_before(make: Make) -> None:
    engine = make(share="pool", weights="old")
    engine.add(pooled(engine))
    assert loaded(engine) == CHUNKS
    engine.add(pooled(engine))
    engine.scheduler.connector.weights_are("new")
    assert loaded(engine) == 0


@pytest.mark.parametrize("over", [False, True])
def test_what_is_loaded_when_the_weights_change_is_of_no_version(make: Make, over: bool) -> None:
    """Nor what is computed behind it. over: the load has ended, and the request has not begun."""
    engine = make(share="pool", weights="old")
    tokens = pooled(engine)
    request = engine.add(tokens, max_tokens=2 * CHUNK, name="r")
    assert loaded(engine) == CHUNKS
    if over:
        engine.step(finished_recving={"r"})
    engine.scheduler.connector.weights_are("new")
    if not over:
        engine.step(finished_recving={"r"})
    engine.step()
    assert request.num_computed_tokens > CHUNKS * CHUNK
    same = engine.add([*tokens, 5], max_tokens=CHUNK)
    engine.step()
    assert engine.hit(same) == 0
    engine.finish(request)
    assert [engine.stored(request, meta) for meta in engine.metas] == [[]] * len(engine.metas)
    assert any(engine.stored(same, meta) for meta in engine.metas), "it is computed anew"


@pytest.mark.parametrize("ahead", [False, True])
def test_a_late_answer_stalls_no_step_and_is_used_when_it_arrives(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, ahead: bool
) -> None:
    """A step that waited for it would compute the prompt, at the deadline."""
    monkeypatch.setattr(lookups, "LATE_SECONDS", 0.001)
    monkeypatch.setattr(lookups, "PROMISED_SECONDS", SECONDS if ahead else 0.0)
    tokens = pooled(engine)
    with engine.here.server.stopped():
        request = engine.add(tokens)
        assert [loaded(engine) for _ in range(3)] == [0, 0, 0]
        assert request.num_computed_tokens == 0
    eventually(lambda: loaded(engine) == CHUNKS)


def test_what_waits_in_the_queue_of_another_instance_is_computed_here(engine: Engine) -> None:
    """By a request that vLLM could schedule now, and stores what it computes. The owner's request
    waits for it in turn."""
    with engine.here.client() as owner, engine.here.client() as asking:
        tokens, keys = asked(engine)
        owner.find(find_of(keys, promise=1))
        request = engine.add(tokens)
        eventually(lambda: engine.step() and request.num_computed_tokens > 0)
        eventually(lambda: asking.find(find_of(keys)).coming.begun)
        coming = owner.find(find_of(keys, promise=1, begins=True)).coming
        assert coming is not None
        assert coming.chunks == CHUNKS
        tokens, keys = asked(engine)
        owner.find(find_of(keys, promise=2))
        time.sleep(2 * QUEUED_SECONDS)
        request = engine.add(tokens)
        assert engine.tracked(request).lookup.question.sent.arrives(SECONDS)
        for stores_nothing in (find_of(keys), find_of(keys, begins=True)):
            coming = asking.find(stores_nothing).coming
            assert coming is not None
            assert coming.quiet > QUEUED_SECONDS, "what has only arrived takes nothing over"
        engine.step()
        assert request.num_computed_tokens > 0


def coming(asking: Client, engine: Engine, request: Request) -> tuple[int, bool] | None:
    """How many of the request's chunks are promised, and whether their owner has begun."""
    found = asking.find(find_of(engine.keys(request), pool_only=True)).coming
    return None if found is None else (found.chunks, found.begun)


def test_only_so_many_requests_wait(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next one is computed; when one of them ends, another may wait."""
    monkeypatch.setattr(waits, "MOST_WAITING", 2)

    def waits_too() -> bool:
        request = engine.add(new_tokens(PROMPT), announced=True, wait_seconds=600)
        waiting.append(request)
        engine.step()
        return bool(request.num_computed_tokens == 0)

    waiting: list[Request] = []
    assert [waits_too() for _ in range(3)] == [True, True, False]
    engine.scheduler.finish_requests([waiting[0].request_id], RequestStatus.FINISHED_ABORTED)
    assert [waits_too() for _ in range(2)] == [True, False]


def begun(
    owner: Client,
    engine: Engine,
    number: int,
    chunk: float,
    tokens: list[int] | None = None,
) -> list[int]:
    """A prompt, new by default, that the owner has begun to compute; how long a chunk takes
    there."""
    tokens, keys = asked(engine, tokens)
    epoch = owner.find(find_of(keys)).epoch
    owner.promise(Promise(number + 1, keys, 1, b"", epoch, chunk))
    return tokens


def asked(engine: Engine, tokens: list[int] | None = None) -> tuple[list[int], list[Any]]:
    """A prompt, new by default, and the keys of its chunks."""
    tokens = tokens or new_tokens(PROMPT)
    return tokens, engine.keys(engine.request(tokens))


def test_too_late_an_answer_is_asked_again(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookups, "LATE_SECONDS", 0.001)
    tokens = new_tokens(PROMPT)
    with engine.here.server.stopped():
        request = engine.add(tokens)
        assert loaded(engine) == 0
    question = engine.tracked(request).lookup.question
    assert question.sent.arrives(SECONDS)
    put(engine, tokens)
    monkeypatch.setattr(requests, "FRESH_SECONDS", 0.0)
    assert loaded(engine) == CHUNKS


def patience(engine: Engine, seconds: float) -> None:
    """For the server's answers; no heartbeat notices before that the server is gone."""
    client = engine.half.context.client
    client.on_beat.clear()
    client._config = msgspec.structs.replace(client._config, request_seconds=seconds)


def test_a_hung_server_costs_one_deadline(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's metrics count its look-up as late, and the next one as without a server."""
    monkeypatch.setattr(lookups, "LATE_SECONDS", 0.001)
    patience(engine, 0.2)
    tokens, counted = pooled(engine), list[tuple[Any, ...]]()
    monkeypatch.setattr(engine.half.lookups._meter, "count", lambda *given: counted.append(given))
    with engine.here.server.stopped():
        request = engine.add(tokens)
        assert loaded(engine) == request.num_computed_tokens == 0
        eventually(lambda: loaded(engine) == 0 and request.num_computed_tokens)
        second = engine.add(new_tokens(PROMPT))
        assert loaded(engine) == 0 < second.num_computed_tokens
    assert [cause for _, _, cause in counted] == ["late", "server"]
    again = new_tokens(PROMPT)
    eventually(lambda: engine.half.context.client.connected)
    put(engine, again)
    engine.add(again)
    eventually(lambda: loaded(engine) == CHUNKS)


def test_a_wait_ends_though_nobody_answers(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    patience(engine, 100 * SECONDS)
    with engine.here.client() as owner:
        tokens = new_tokens(PROMPT)
        keys = engine.keys(engine.request(tokens))
        owner.promise(Promise(1, keys, epoch=owner.find(find_of(keys)).epoch, chunk_seconds=0.2))
        request = engine.add(tokens)
        engine.step()
        assert request.num_computed_tokens == 0
        monkeypatch.setattr(lookups, "LATE_SECONDS", 0.001)
        with engine.here.server.stopped():
            eventually(lambda: engine.step() and request.num_computed_tokens)


# ---- resets


def test_a_reset_empties_the_pool_though_the_half_is_out_of_use(engine: Engine) -> None:
    """Or an instance with other weights, which starts later, would find what is of the old ones."""
    tokens, connector = pooled(engine), engine.scheduler.connector
    keys = engine.keys(engine.request(tokens))
    with engine.here.client() as client:
        assert any(client.contains(keys))
        connector.fail("on purpose")
        assert connector.reset_cache()
        assert not any(client.contains(keys))


def test_what_workers_say_of_a_reset_does_not_end_a_later_one(engine: Engine) -> None:
    """Steps that were planned between the two may still store what is of weights before the later
    one. Workers are asked until they have answered."""
    engine.step()
    first, second = reset(engine, over=False), reset(engine, over=False)
    flushed(engine, first)
    tokens = pooled(engine)
    engine.add(tokens)
    assert loaded(engine) == 0
    assert engine.step(kv_connector_worker_meta=WorkerReport()).echoes == {second}
    flushed(engine, second)
    with engine.here.client() as client:
        assert not any(client.contains(engine.keys(engine.request(tokens))))
    assert not engine.step().echoes
    put(engine, again := new_tokens(PROMPT))
    engine.add(again)
    assert loaded(engine) == CHUNKS


def test_what_began_before_a_reset_that_vllm_did_not_make_is_never_stored(make: Make) -> None:
    """Requests run, so vLLM resets nothing; whoever resets changes the weights all the same. vLLM's
    own cache finds nothing of it, and nobody waits for it."""
    engine, tokens = (
        make(share="pool", blocks=64, arguments={"max_num_seqs": 1}),
        new_tokens(3 * CHUNK),
    )
    request = engine.add(tokens, max_tokens=CHUNK)
    waiting = engine.add(new_tokens(18 * BLOCK))
    engine.step()
    assert engine.stored(request) == [0, 1, 2]
    before, asking = len(engine.metas), engine.here.client()
    reset(engine)
    promised = find_of(engine.keys(request)[-1:], pool_only=True)
    eventually(lambda: asking.find(promised).coming is None)
    engine.finish(request)
    assert not any(engine.stored(request, meta) for meta in engine.metas[before:])
    engine.finish(waiting)
    # What is computed anew is stored, and nothing of before is found behind it.
    anew = engine.add([*tokens, 5])
    engine.step()
    assert engine.hit(anew) == 0
    engine.finish(anew)
    longer = engine.add([*tokens, *[7] * CHUNK, 5])
    engine.step()
    assert engine.hit(longer) == 3 * CHUNK
    engine.finish(longer)
    for one, count in ((waiting, 9), (anew, 3), (longer, 4)):
        stored = [chunk for meta in engine.metas[before:] for chunk in engine.stored(one, meta)]
        assert stored == [*range(count)]


@pytest.mark.parametrize("states", [None, 0, 1])
def test_what_goes_on_over_a_refused_reset_is_not_cached(make: Make, states: int | None) -> None:
    """Nor is the state at the end of its prompt, which vLLM caches by another call than whole
    blocks."""
    steps = {"max_num_batched_tokens": CHUNK}
    engine = make(share="pool", states=states, blocks=64, arguments=steps)
    request = engine.add(new_tokens(4 * CHUNK + BLOCK + 3), max_tokens=CHUNK)
    engine.step()
    reset(engine)
    blocks = engine.half.context.blocks.pool.blocks
    while request.num_output_tokens <= BLOCK:
        engine.step()
        assert not any(block.block_hash for block in blocks)


def test_what_others_load_after_a_refused_reset_is_not_built_on(engine: Engine) -> None:
    """The other connector may have it from a request of before."""
    running = engine.add(new_tokens(CHUNK), max_tokens=CHUNK)
    engine.step()
    reset(engine)
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
    assert any(len(spec.prefix) > 3 for spec, _ in stored), "states, too"


# ---- promises, and what is not worth a load


def test_a_request_that_pools_is_loaded(engine: Engine) -> None:
    tokens, params = pooled(engine), PoolingParams(task="classify")
    request = Request("pools", tokens, None, params, block_hasher=engine.hasher)
    engine.scheduler.add_request(request)
    assert loaded(engine) == CHUNKS


def test_what_a_request_computes_is_promised_until_it_is_stored_or_given_up(make: Make) -> None:
    """By its look-up, and confirmed by its first step."""
    steps = {"long_prefill_token_threshold": BLOCK, "max_num_batched_tokens": 2 * BLOCK}
    steps |= {"scheduling_policy": "priority"}
    engine = make(share="pool", blocks=10, arguments=steps)
    promised = partial(coming, engine.here.client(), engine)
    gone = engine.add(new_tokens(4 * CHUNK + 3), priority=1)
    eventually(lambda: promised(gone) == (4, False))
    engine.step()
    eventually(lambda: promised(gone) == (4, True))
    gone.skip_reading_prefix_cache = True
    first = engine.add(new_tokens(BLOCK), max_tokens=40)
    assert any(engine.step() and gone.num_preemptions for _ in range(20))
    eventually(lambda: promised(gone) is None)
    engine.finish(first)
    engine.step()
    eventually(lambda: promised(gone) == (4, True))
    queued = engine.add(new_tokens(4 * CHUNK + 3))
    eventually(lambda: promised(queued) == (4, False))
    for one in (gone, queued):
        engine.scheduler.finish_requests(one.request_id, RequestStatus.FINISHED_ABORTED)
        eventually(lambda one=one: promised(one) is None)
    # Nobody waits for what is not stored.
    private = engine.add(new_tokens(PROMPT), store=False)
    engine.step()
    assert promised(private) is None


def waited_for(owner: Client, engine: Engine, chunk_seconds: float) -> list[int]:
    """A prompt that the owner has begun, at this pace, and that a request of the least priority
    waits for."""
    tokens = begun(owner, engine, 0, chunk_seconds)
    waiting = engine.add(tokens, priority=2)
    engine.step()
    assert engine.tracked(waiting).wait.present
    return tokens


def test_nobody_follows_one_that_waits_no_more(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """By priority vLLM may not come to it for long: one before it lacks blocks."""
    clock = FakeClock()
    monkeypatch.setattr(waits, "monotonic", clock)
    engine = make(share="pool", arguments={"scheduling_policy": "priority"})
    engine.add(new_tokens(10 * BLOCK), max_tokens=CHUNK)
    engine.step()
    with engine.here.client() as owner:
        tokens = waited_for(owner, engine, 1)
        engine.add(new_tokens(18 * BLOCK), priority=1)
        follower = engine.add(tokens, priority=0)
        engine.step()
        for _ in range(2):  # The second one's own wait is not over yet.
            assert follower.num_computed_tokens == 0
            clock.advance(2 * CHUNKS)
            engine.step()
        engine.step()
        assert follower.num_computed_tokens > 0


def test_nobody_follows_a_request_that_waited_while_the_weights_changed(make: Make) -> None:
    """Also not if they are what they were before."""
    engine = make(share="pool", weights="old", arguments={"scheduling_policy": "priority"})
    with engine.here.client() as owner:
        tokens = waited_for(owner, engine, 60)
        engine.scheduler.connector.weights_change()
        engine.scheduler.connector.weights_are("old")
        later = engine.add(tokens, priority=0)
        engine.step()
        assert engine.tracked(later).wait.present
        assert not engine.scheduler.connector.off


def test_a_request_is_named_no_more_once_its_adapter_was_replaced(tmp_path: Path) -> None:
    """In place, too, it then shares nothing more of what it computes."""
    weights, meter = tmp_path / "adapter_model.safetensors", Meter()
    weights.write_text("ode")
    context: Any = SimpleNamespace(version=b"", hashes=1)
    given = {"lora_name": "poet", "lora_path": str(tmp_path), "lora_int_id": 1}
    request = SimpleNamespace(lora_request=SimpleNamespace(**given), block_hashes=[])
    asks = lookups.Lookups(context, meter)
    tracked = requests.Tracked(request, requests.DEFAULT, True)
    assert asks.name(tracked)
    weights.write_text("elegy")
    assert not asks.name(tracked)


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
