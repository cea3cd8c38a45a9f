"""What an instance shares in place, as decided in vLLM's own scheduler, and what its worker makes
of that.
"""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
from in_place_cases import BLOCK, CHUNK, EACH, Engine, Make, engine, here, make, new_tokens
from vllm_cases import needs_vllm

pytest.importorskip("vllm.v1.core.sched.scheduler", reason="vLLM is not installed")

from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import RequestStatus

from vcache_backend.integration.vllm.metadata import (
    PublicationSpec,
    SavedChunks,
    StepMetadata,
    WorkerReport,
)
from vcache_backend.protocol.messages import HASH_BYTES, BlockRun

__all__ = ["engine", "here", "make"]
pytestmark = needs_vllm


# ---- what a step publishes


def test_more_blocks_than_a_message_holds_reach_a_worker_elsewhere() -> None:
    """A prompt of 200,000 tokens that is hit has them. The worker would end otherwise."""
    many, saved = BlockRun(0, b"", b"", 0, bytes(1 << 20)), SavedChunks([], b"", b"", 0)
    meta = StepMetadata(publications=[PublicationSpec([many], 0)], victims=saved)
    assert pickle.loads(pickle.dumps(meta)) == meta


def test_a_step_publishes_the_blocks_it_completes_where_they_lie(engine: Engine) -> None:
    request = engine.add(new_tokens(3 * CHUNK - 2), max_tokens=8)
    meta = engine.step()
    first = engine.published(request)
    assert ([one.number for one in first], meta.stores) == ([*range(5)], [])
    own = engine.scheduler.kv_cache_manager.get_block_ids(request.request_id)[0]
    assert [one.block for one in first] == own[:5]
    assert b"".join(one.name for one in first) == engine.hashes(request)[: 5 * HASH_BYTES]
    assert engine.right(first)
    later = [engine.published(request, engine.step()) for _ in range(4)]
    numbers = [[one.number for one in step] for step in later]
    assert numbers == [[], [5], [], []], "with the answer's tokens, once they are final"
    assert later[1][0].generation > first[0].generation


def test_what_no_step_has_written_is_not_published(make: Make) -> None:
    """However early a vLLM names the blocks of later steps."""
    engine = make(arguments={"max_num_batched_tokens": 2 * CHUNK})
    manager = engine.scheduler.kv_cache_manager
    allocate = manager.allocate_slots

    def early(request: Any, new: int, *given: Any, **more: Any) -> Any:
        return allocate(request, request.num_tokens - request.num_computed_tokens, *given, **more)

    manager.allocate_slots = early
    request = engine.add(new_tokens(5 * CHUNK - 9))
    engine.finish(request)
    published = [engine.numbers(request, meta) for meta in engine.metas]
    assert [one for one in published if one] == [[*range(2 * EACH)]]


def test_of_answers_nothing_is_published_if_prompts_alone_are_stored(make: Make) -> None:
    engine = make(store="prompt")
    request = engine.add(new_tokens(2 * CHUNK - 3), max_tokens=2 * BLOCK)
    engine.finish(request)
    assert [one for meta in engine.metas for one in engine.numbers(request, meta)] == [0, 1, 2]


def test_behind_a_block_that_vllm_has_evicted_nothing_is_published(engine: Engine) -> None:
    """As after another connector's load that failed. What lies behind it is never believed."""
    tokens = new_tokens(3 * CHUNK - 9)
    engine.finish(engine.add(tokens[: CHUNK + 1]))
    request, manager = engine.add(tokens, max_tokens=CHUNK), engine.scheduler.kv_cache_manager
    engine.step()
    evicted, *behind = manager.get_block_ids(request.request_id)[0][EACH:]
    manager.block_pool.evict_blocks({evicted})
    engine.finish(request)
    assert [one for meta in engine.metas for one in engine.numbers(request, meta)] == [2, 3, 4]
    numbers = engine.half.publications.generations.counters[behind]
    assert (numbers & np.uint64(1)).tolist() == [0, 0, 1]


@pytest.mark.parametrize("share", ["in_place", "pool"])
def test_what_another_connectors_load_did_not_fill_is_not_found(make: Make, share: str) -> None:
    """Of a request that was aborted as its step ran, which vLLM then looks at no more."""
    engine, tokens = make(share=share), new_tokens(3 * CHUNK)
    scheduler, lost = engine.scheduler, engine.add([*tokens, 5])
    update = scheduler.update_from_output

    def aborted(output: Any, ran: Any) -> Any:
        meta = output.kv_connector_metadata
        invalid = set(output.scheduled_new_reqs[0].block_ids[0][: 2 * EACH])
        assert meta.echoes
        scheduler.finish_requests(lost.request_id, RequestStatus.FINISHED_ABORTED)
        report = WorkerReport(echoes=meta.echoes)
        said = {"invalid_block_ids": invalid, "kv_connector_worker_meta": report}
        ran.kv_connector_output = KVConnectorOutput(**said)
        return update(output, ran)

    scheduler.update_from_output = aborted
    with engine.others_bring(2 * CHUNK):
        engine.step()
    scheduler.update_from_output = update
    again = engine.add([*tokens, 6])
    engine.step()
    assert engine.hit(again) == 0


@pytest.mark.parametrize("share", ["in_place", "pool"])
@pytest.mark.parametrize("then", ["preempted", "aborted"])
def test_what_lies_behind_a_failed_load_is_not_found(make: Make, then: str, share: str) -> None:
    """Another connector's load, whose failure vLLM hears of when it has planned further steps. It
    looks only at the blocks of requests that run."""
    steps = {"long_prefill_token_threshold": BLOCK, "max_num_batched_tokens": 2 * BLOCK}
    engine = make(blocks=10, arguments=steps, share=share)
    engine.add(new_tokens(8 * BLOCK))
    engine.step()
    lost, schedule = engine.add(new_tokens(6 * BLOCK)), engine.scheduler.schedule
    with engine.others_bring(CHUNK):
        began = schedule()
    first, cached = set(began.scheduled_new_reqs[0].block_ids[0]), engine.half.context.blocks.cached
    if then == "preempted":
        assert any(schedule() and lost.num_preemptions for _ in range(9))
    else:
        schedule()
        engine.scheduler.finish_requests(lost.request_id, RequestStatus.FINISHED_ABORTED)
    assert cached(lost.block_hashes[len(first)])
    report = WorkerReport(echoes=began.kv_connector_metadata.echoes)
    engine.end(began, invalid_block_ids=first, kv_connector_worker_meta=report)
    assert not any(map(cached, lost.block_hashes))


@pytest.mark.parametrize("hit", [10, 11], ids=["one that an earlier step had begun", "others, too"])
def test_unwritten_blocks_are_not_found(make: Make, hit: int) -> None:
    """vLLM knows blocks by their tokens as soon as it plans the step that writes them. A request
    that goes before their owner takes that step away: they are computed again, and what ran before
    is not. At random, through windows and states: test_planned."""
    steps = {"long_prefill_token_threshold": 2 * CHUNK, "max_num_batched_tokens": 5 * BLOCK + 8}
    engine = make(blocks=hit + 3, arguments={"scheduling_policy": "priority", **steps})
    gone = engine.add(new_tokens((hit + 1) * BLOCK - 10), priority=1)
    engine.step()
    first = engine.add(new_tokens(BLOCK), max_tokens=8)
    engine.step()
    assert gone.num_computed_tokens // BLOCK == 9
    engine.step()
    assert gone.num_preemptions == 1
    engine.finish(first)
    engine.step()
    assert engine.hit(gone) == 9 * BLOCK
    published = engine.published(gone)
    assert [one.number for one in published] == [*range(9, hit)]
    assert engine.right(published)


# ---- resets


@pytest.mark.parametrize("connector", [False, True])
def test_what_began_before_a_reset_is_never_published(make: Make, connector: bool) -> None:
    """vLLM refuses, as the request runs; whoever resets changes the weights all the same."""
    engine = make(blocks=60)
    request = engine.add(new_tokens(3 * CHUNK - 2), max_tokens=3 * CHUNK)
    short = engine.add(new_tokens(BLOCK // 2), max_tokens=3 * CHUNK)
    engine.step()
    before, coming = engine.published(request), engine.half.publications.generations.coming
    assert not engine.scheduler.reset_prefix_cache(reset_connector=connector)
    assert not engine.right(before)
    steps = [engine.step(finished_recving=set()) for _ in range(2 * CHUNK)]
    found = [engine.numbers(one, meta) for one in (request, short) for meta in steps]
    assert found == [[]] * 2 * len(steps)
    for one in (request, short):
        engine.finish(one)
    assert engine.scheduler.reset_prefix_cache(reset_connector=connector)
    fresh = engine.add(request.prompt_token_ids)
    engine.step()
    published = engine.published(fresh)
    assert [one.number for one in published] == [*range(5)]
    assert engine.right(published)
    assert published[0].generation >= coming
