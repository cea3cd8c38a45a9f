"""What a reset changes of an instance that shares through a pool, as decided in vLLM's own scheduler."""

from __future__ import annotations

from pathlib import Path

import pytest
from in_place_cases import (
    BLOCK,
    CHUNK,
    Engine,
    Make,
    engines,
    find_of,
    make,
    new_tokens,
    scheduling,
)
from pool_cases import CHUNKS, PROMPT, engine, here, pooled, reset
from processes import eventually
from vllm_cases import needs_vllm

pytest.importorskip("vllm.v1.core.sched.scheduler", reason="vLLM is not installed")


from vcache_backend.integration.vllm import instance
from vcache_backend.integration.vllm.metadata import WorkerReport
from vcache_backend.protocol.messages import ChunkKey

__all__ = ["engine", "here", "make"]
pytestmark = needs_vllm


def test_a_reset_empties_the_pool_though_the_half_is_out_of_use(engine: Engine) -> None:
    """Or an instance with other weights, which starts later, would find what is of the old ones."""
    tokens, connector = pooled(engine), engine.scheduler.connector
    keys = engine.keys(engine.request(tokens))
    with engine.here.client() as client:
        assert any(client.contains(keys))
        connector.fail("on purpose")
        assert connector.reset_cache()
        assert not any(client.contains(keys))


@pytest.mark.parametrize("whose", ["ours", "another instance's"])
def test_a_step_of_before_a_reset_stores_nothing_after_it(engine: Engine, whose: str) -> None:
    """Its worker may come to it later. The instance that did not make the reset hears of it with its
    next look-up."""
    running = engine.add(new_tokens(CHUNKS * CHUNK), max_tokens=3 * CHUNK)
    engine.step()
    (spec,) = engine.metas[-1].stores
    with engine.here.client() as client:
        if whose == "ours":
            reset(engine)
        else:
            client.clear(engine.half.context.prefix, reset=True)
        assert client.reserve(spec.chunks.keys, 1024).epoch != spec.epoch
        engine.finish(running)
        engine.add(new_tokens(PROMPT))
        engine.step()
        (spec,) = engine.metas[-1].stores
        assert client.reserve(spec.chunks.keys, 1024).epoch == spec.epoch


@pytest.mark.parametrize("heard", ["before", "while vLLM schedules"])
def test_what_was_computed_before_another_instances_reset_is_never_stored(
    make: Make, heard: str
) -> None:
    """Neither the rest of a request that runs, nor what vLLM's own cache has: not even for a request
    for which vLLM has just found it there."""
    engine, tokens = make(share="pool", blocks=64), new_tokens(3 * CHUNK)
    running = engine.add(tokens, max_tokens=3 * CHUNK)
    engine.step()
    assert engine.stored(running) == [0, 1, 2]
    before, context = len(engine.metas), engine.half.context
    with engine.here.client() as client:
        client.clear(context.prefix, reset=True)
    eventually(lambda: context.news.waiting)
    if heard == "before":
        engine.step()
        assert not context.news.waiting
    longer = engine.add([*tokens, *new_tokens(2 * CHUNK), 5], max_tokens=CHUNK)
    engine.step()
    hit = engine.hit(longer)
    engine.finish(running, longer)
    stored = [
        [chunk for meta in engine.metas[before:] for chunk in engine.stored(one, meta)]
        for one in (running, longer)
    ]
    kept_out = (3 * CHUNK, [[], []])
    assert (hit, stored) == ((0, [[], [*range(6)]]) if heard == "before" else kept_out)
    anew = engine.add([*tokens, 6])
    engine.step()
    assert engine.stored(anew) == [0, 1, 2]


def test_an_instance_that_asks_for_nothing_knows_of_earlier_resets(make: Make) -> None:
    """Or nobody would find what it stores."""
    (first := make(share="pool")).step()
    reset(first)
    producer = make(share="pool", role="kv_producer")
    producer.add(new_tokens(PROMPT))
    while not producer.step().stores:
        pass
    (spec,) = producer.metas[-1].stores
    with producer.here.client() as client:
        assert client.reserve(spec.chunks.keys, 1024).epoch == spec.epoch > 0


def test_an_instance_that_asks_for_nothing_hears_of_later_resets(engine: Engine) -> None:
    """Nothing is asked for prompts of less than a chunk, but their answers are stored."""
    engine.step()
    prefix = engine.half.context.prefix
    with engine.here.client() as client:
        client.clear(prefix, reset=True)
        epoch = client.present([ChunkKey(prefix + bytes(18))]).epoch
    eventually(lambda: engine.half.context.news.waiting)
    engine.add(new_tokens(3), max_tokens=2 * CHUNK)
    while not engine.step().stores:
        pass
    (spec,) = engine.metas[-1].stores
    assert spec.epoch == epoch


def test_a_reset_without_a_server_is_made_once_there_is_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until then nothing is looked up. Each step tries, and each cause is said once."""
    with scheduling(tmp_path) as here, engines(here) as make:
        engine = make(share="pool")
        monkeypatch.setattr(instance.log, "handlers", [caplog.handler])
        monkeypatch.setattr(instance.log, "propagate", False)
        engine.step()
        here.server.kill()
        assert not engine.scheduler.connector.reset_cache()
        assert engine.half.resets.clearing
        engine.add(new_tokens(3), max_tokens=CHUNK)
        for _ in range(8):
            engine.step(kv_connector_worker_meta=WorkerReport())
        said = [line for line in caplog.messages if "the pool was not cleared" in line]
        assert 1 <= len(said) == len({*said})
        here.serve()
        client = engine.half.context.client
        eventually(lambda: client.connected)
        engine.add(new_tokens(PROMPT))
        engine.step()
        assert not engine.half.resets.clearing
        with here.client() as other:
            assert other.present([ChunkKey(engine.half.context.prefix + bytes(18))]).epoch


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
