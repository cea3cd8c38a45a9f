"""What an instance reads in others' KV caches, as decided in vLLM's own scheduler."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

import pytest
from engine_cases import Node
from in_place_cases import BLOCK, CHUNK, Engine, Make, blocks_of, engines, here, new_tokens
from processes import eventually
from vllm_cases import needs_vllm

pytest.importorskip("vllm.v1.core.sched.scheduler", reason="vLLM is not installed")

from vllm.v1.request import Request, RequestStatus

from vcache_backend.integration.vllm import lookups
from vcache_backend.integration.vllm.metadata import StepMetadata, WorkerReport
from vcache_backend.protocol.messages import ResidentRun

__all__ = ["here"]
pytestmark = needs_vllm


@pytest.fixture
def shared(here: Node) -> Iterator[Make]:
    """Makes engines whose KV caches others find something in."""
    with engines(here, shown=True) as made:
        yield made


# ---- what is read where it lies


def owners(meta: StepMetadata) -> list[bytes]:
    """Of the blocks of the only load of a step, in order."""
    (load,) = meta.loads
    assert [run.first for run in load.residents] == [*accumulate_counts(load.residents)]
    assert sum(run.count for run in load.residents) == len(load.blocks)
    return [run.instance for run in load.residents for _ in range(run.count)]


def accumulate_counts(runs: list[ResidentRun]) -> Iterator[int]:
    return accumulate((run.count for run in runs[:-1]), initial=0)


def lying_at(run: ResidentRun) -> list[int]:
    return memoryview(run.blocks).cast("I").tolist()


def computed(engine: Engine, tokens: list[int]) -> Request:
    request = engine.add(tokens, load=False)
    engine.finish(request)
    engine.flush()
    return request


def test_a_hit_is_loaded_from_where_it_was_published_and_published_again(shared: Make) -> None:
    """By the reader, as soon as it has it; in the owner itself it is vLLM's own business."""
    owner, reader, tokens = shared(), shared(), new_tokens(3 * CHUNK + 5)
    source = computed(owner, tokens)
    own = owner.add(tokens)
    assert owner.half.matched(own, 0) == (0, False), "nobody else has it"
    owner.finish(own)
    request = reader.add(tokens)
    loading = reader.step()
    (load,) = loading.loads
    assert owners(loading) == [owner.half.publications.instance] * 6
    published = [one for meta in owner.metas for one in owner.published(source, meta)]
    (run,) = load.residents
    assert lying_at(run) == [one.block for one in published]
    assert load.publication.later, "it is told when the token is out"
    assert [one.number for one in blocks_of(loading)] == [*range(6)]
    assert reader.step().publications == [], "nothing of it is there"
    reader.step(finished_recving={request.request_id})
    assert reader.step().publications == [], "its worker has done so"
    assert not any(spec.later for meta in owner.metas for spec in meta.publications)
    reader.finish(request)
    reader.flush()
    again = owner.add(tokens)
    assert owner.step().loads == []
    owner.finish(again)
    assert owner.scheduler.reset_prefix_cache()
    owner.add(tokens)
    assert owners(owner.step()) == [reader.half.publications.instance] * 6


def read(reader: Engine, tokens: list[int], answer: int = 1) -> Request:
    """Loaded by it, in an asynchronous load that holds, and answered."""
    request = reader.add(tokens, max_tokens=answer)
    (load,) = reader.step().loads
    assert load.residents
    reader.step(finished_recving={request.request_id})
    reader.finish(request)
    reader.flush()
    return request


def hear(engine: Engine) -> None:
    """What the next heartbeat brings."""
    client = engine.half.context.client
    assert client is not None
    client.heartbeat()


def take_more(engine: Engine, more: int = 3) -> None:
    """So many blocks more than those that hold nothing."""
    queue = engine.scheduler.kv_cache_manager.block_pool.free_block_queue
    empty = sum(block.block_hash is None for block in queue.get_all_free_blocks())
    other = computed(engine, new_tokens((empty + more) * BLOCK))
    assert other.num_computed_tokens >= (empty + more) * BLOCK


def kept(engine: Engine, tokens: list[int]) -> int:
    """How many leading chunks vLLM's own cache still has."""
    request = engine.add(tokens, load=False)
    found: int = engine.scheduler.kv_cache_manager.get_computed_blocks(request)[1]
    return found // CHUNK


@pytest.mark.parametrize(
    ("more", "lost", "left"),
    [(3, False, (2, 2)), (1, False, (2, 3)), (3, True, (0, 4))],
    ids=["nothing else", "and from its end", "until its owner lost it"],
)
def test_what_lies_in_two_kv_caches_leaves_the_readers_before_what_lies_in_its_own_alone(
    shared: Make, more: int, lost: bool, left: tuple[int, int]
) -> None:
    """Else both have the same, and half as much. Until then there are blocks that hold nothing, and
    it stays. vLLM finds what is left of a prefix.
    """
    owner, reader = shared(), shared()
    own, both = new_tokens(2 * CHUNK + 1), new_tokens(4 * CHUNK + 1)
    computed(owner, both)
    computed(reader, own)
    read(reader, both)
    if lost:
        owner.half.publications.generations.void_all()
    hear(reader)
    take_more(reader, more)
    assert (kept(reader, own), kept(reader, both)) == left


def test_vllm_keeps_blocks_that_a_step_under_way_may_write(shared: Make) -> None:
    """So a load may begin at once."""
    engine = shared(asynchronous=True)
    request = engine.request(new_tokens(2 * CHUNK + 1))
    request.sampling_params.stop_token_ids = [7]
    engine.scheduler.add_request(request)
    steps = [engine.scheduler.schedule() for _ in "12"]
    assert request.request_id in steps[1].num_scheduled_tokens
    free = engine.half.context.blocks.free
    engine.end(steps[0])
    assert request.is_finished()
    assert engine.half.context.blocks.free == free
    engine.end(steps[1])
    assert engine.half.context.blocks.free > free


def test_a_block_that_its_owner_uses_again_is_not_asked_for(
    shared: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another has it, too, and has lost another chunk; of the last one nobody has anything any
    more. The server names both in any order."""
    monkeypatch.setattr(lookups, "YOUNG_SECONDS", 0.0)
    owner, other, reader, tokens = shared(), shared(), shared(), new_tokens(3 * CHUNK + 5)
    source = computed(owner, tokens)
    copy = computed(other, tokens[: 2 * CHUNK + 1])
    mine = [one.block for meta in owner.metas for one in owner.published(source, meta)]
    theirs = [one.block for meta in other.metas for one in other.published(copy, meta)]
    owner.half.publications.generations.void([mine[3], mine[5]])
    other.half.publications.generations.void(theirs[1:2])
    reader.add(tokens)
    first, second = (engine.half.publications.instance for engine in (owner, other))
    found = owners(reader.step())
    assert (found[1], found[3]) == (first, second)
    assert len(found) == 5


def test_what_a_load_did_not_fill_is_published_by_the_step_that_computes_it(shared: Make) -> None:
    """And only that: of the rest the worker has not told that it is there."""
    owner, reader, tokens = shared(), shared(), new_tokens(3 * CHUNK + 5)
    computed(owner, tokens)
    request = reader.add(tokens)
    (load,) = reader.step().loads
    left, told = set(load.blocks[4:]), len(reader.metas)
    report = WorkerReport(failed={request.request_id})
    said = {"finished_recving": {request.request_id}, "kv_connector_worker_meta": report}
    reader.step(invalid_block_ids=left, **said)
    reader.finish(request)
    published = [one for meta in reader.metas[told:] for one in reader.published(request, meta)]
    assert {one.block for one in published} == left
    assert reader.right(published)


def test_a_producer_hears_of_a_reset_when_it_promises(shared: Make) -> None:
    """It looks nothing up. What it computes before it has heard is lost."""
    producer, reader = shared(role="kv_producer"), shared()
    producer.half.context.client.on_beat.clear()
    computed(producer, new_tokens(2 * CHUNK + 1))
    assert reader.scheduler.reset_prefix_cache(reset_connector=True)
    for found in (False, True):
        tokens = new_tokens(2 * CHUNK + 1)
        computed(producer, tokens)
        request = reader.add(tokens)
        assert bool(reader.step().loads) == found
        reader.scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)


def test_what_was_found_before_a_reset_is_not_loaded_after_it(shared: Make) -> None:
    """Its owner has not heard of it: its generations are those that were found."""
    owner, other, reader, tokens = shared(), shared(), shared(), new_tokens(3 * CHUNK + 5)
    published = owner.published(computed(owner, tokens), owner.metas[0])
    request = reader.add(tokens)
    assert reader.tracked(request).lookup.question is not None
    assert other.scheduler.reset_prefix_cache(reset_connector=True)
    eventually(lambda: reader.half.context.news.waiting)
    assert len(published) == 6
    assert owner.right(published)
    # Nor does the owner's promise hold the reader back.
    assert reader.step().loads == []
    assert reader.numbers(request) == [*range(6)]


def over_a_reset(shared: Make, **of_reader: bool) -> tuple[Engine, Request, list[int]]:
    """A reader, its request that has gone on over another instance's reset, and a prompt that
    begins as that request does, which a third instance has computed since."""
    owner, other, reader = shared(), shared(), shared(**of_reader)
    head = new_tokens(BLOCK - 9)
    tokens = head + [7] * (3 * CHUNK + 5 - len(head))
    stale = reader.add(head, max_tokens=CHUNK, load=False)
    reader.step()
    assert other.scheduler.reset_prefix_cache(reset_connector=True)
    hear(owner)
    hear(reader)
    computed(owner, tokens)
    return reader, stale, tokens


def test_a_failed_load_does_not_hide_that_a_hit_is_from_before_a_reset(shared: Make) -> None:
    """vLLM's own cache has its blocks only since the load was planned, and the request of the load
    hits them."""
    reader, stale, tokens = over_a_reset(shared)
    request = reader.add(tokens)
    (load,) = reader.step().loads
    reader.finish(stale)
    report = WorkerReport(failed={request.request_id})
    said = {"finished_recving": {request.request_id}, "kv_connector_worker_meta": report}
    reader.step(invalid_block_ids=set(load.blocks), **said)
    began = len(reader.metas)
    reader.step()
    assert reader.hit(request) == CHUNK
    reader.finish(request)
    assert not any(reader.numbers(request, meta) for meta in reader.metas[began:])


def test_what_a_sessions_turn_computes_there_is_not_taken_for_loaded_in_the_next_turn(
    shared: Make,
) -> None:
    """With asynchronous scheduling vLLM caches a turn's last block when the turn is over."""
    reader, stale, tokens = over_a_reset(shared, asynchronous=True)
    reader.finish(stale)
    request = reader.request(tokens, max_tokens=7 * BLOCK + 1 - len(tokens))
    next_turn = reader.request(new_tokens(BLOCK), name=request.request_id)
    for turn in (request, next_turn):
        turn.resumable = True
        reader.scheduler.add_request(turn)
    assert reader.step().loads
    assert reader.hit(request) == CHUNK
    reader.step(finished_recving={request.request_id})
    under_way = [reader.scheduler.schedule()]
    while request.streaming_queue:
        under_way.append(reader.scheduler.schedule())
        reader.end(under_way.pop(0))
    reader.end(under_way.pop())
    began = len(reader.metas)
    echoes = reader.step().echoes
    assert echoes
    reader.step(kv_connector_worker_meta=WorkerReport(echoes=echoes))
    reader.step()
    assert not any(reader.numbers(request, meta) for meta in reader.metas[began:])
