"""What a reset changes of an instance that shares through a pool, as decided in vLLM's own scheduler."""

from __future__ import annotations

import pytest
from in_place_cases import BLOCK, CHUNK, Engine, Make, find_of, make, new_tokens
from pool_cases import CHUNKS, PROMPT, engine, flushed, here, loaded, pooled, put, reset
from processes import eventually
from vllm_cases import needs_vllm

pytest.importorskip("vllm.v1.core.sched.scheduler", reason="vLLM is not installed")


from vcache_backend.integration.vllm.metadata import WorkerReport

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
