"""What a request promises to compute, as decided in vLLM's own scheduler."""

from __future__ import annotations

from functools import partial

import pytest
from in_place_cases import BLOCK, CHUNK, Engine, Make, find_of, make, new_tokens
from pool_cases import PROMPT, engine, here
from processes import eventually
from vllm_cases import needs_vllm

pytest.importorskip("vllm.v1.core.sched.scheduler", reason="vLLM is not installed")

from vllm.v1.request import Request, RequestStatus

from vcache_backend.protocol.client import Client

__all__ = ["engine", "here", "make"]
pytestmark = needs_vllm


def coming(asking: Client, engine: Engine, request: Request) -> tuple[int, bool] | None:
    """How many of the request's chunks are promised, and whether their owner has begun."""
    found = asking.find(find_of(engine.keys(request), pool_only=True)).coming
    return None if found is None else (found.chunks, found.begun)


@pytest.mark.parametrize("share", ["pool", "in_place"])
def test_what_a_request_computes_is_promised_until_it_is_stored_or_given_up(
    make: Make, share: str
) -> None:
    """By its look-up, and confirmed by its first step."""
    steps = {"long_prefill_token_threshold": BLOCK, "max_num_batched_tokens": 2 * BLOCK}
    steps |= {"scheduling_policy": "priority"}
    engine = make(share=share, blocks=10, arguments=steps)
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
