"""When the answer to a look-up counts, as decided in vLLM's own scheduler."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from in_place_cases import BLOCK, CHUNK, Engine, Make, make, new_tokens
from pool_cases import CHUNKS, PROMPT, engine, here, loaded, patience, pooled, put, reset
from processes import SECONDS, eventually
from vllm_cases import needs_vllm

pytest.importorskip("vllm.v1.core.sched.scheduler", reason="vLLM is not installed")


from vcache_backend.integration.vllm import lookups, requests
from vcache_backend.integration.vllm.telemetry.stats import Meter

__all__ = ["engine", "here", "make"]
pytestmark = needs_vllm


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
        # As often as vLLM asks while the request waits for another connector's answer.
        tracked = engine.tracked(second)
        assert [engine.half.lookups.find(tracked, 0) is requests.FAILED for _ in "123"] == [
            True
        ] * 3
    assert [cause for _, _, cause in counted] == ["late", "server"]
    again = new_tokens(PROMPT)
    eventually(lambda: engine.half.context.client.connected)
    put(engine, again)
    engine.add(again)
    eventually(lambda: loaded(engine) == CHUNKS)


@pytest.mark.parametrize("unit", [1, 2])
def test_a_request_whose_tokens_have_changed_is_named_again(unit: int) -> None:
    """As of a session whose next turn goes on with other tokens than were guessed."""
    context: Any = SimpleNamespace(version=b"", unit=unit)
    own = [bytes([number]) * 32 for number in range(6)]
    request = SimpleNamespace(lora_request=None, block_hashes=list(own))
    asks = lookups.Lookups(context, Meter())
    tracked = requests.Tracked(request, requests.DEFAULT, True)
    for behind in (6, 6, 5, 4, 6):
        # A hash stands for all tokens before it.
        new = [bytes([10 * behind + number]) * 32 for number in range(6 - behind)]
        request.block_hashes[behind:] = new
        tracked.lookup.answer = requests.FAILED
        assert asks.name(tracked)
        assert (tracked.lookup.answer is None) == (behind < 6), "it was about other tokens"
        stop = len(request.block_hashes) // unit
        names = b"".join(one[:16] for one in request.block_hashes[unit - 1 :: unit])
        assert asks.hashes(tracked, 0, stop, unit) == names
    del request.block_hashes[3:]
    assert asks.name(tracked)
    assert len(tracked.lookup.named) == 3 // unit * 16


def test_a_request_is_named_no_more_once_its_adapter_was_replaced(tmp_path: Path) -> None:
    """In place, too, it then shares nothing more of what it computes."""
    weights, meter = tmp_path / "adapter_model.safetensors", Meter()
    weights.write_text("ode")
    context: Any = SimpleNamespace(version=b"", unit=1)
    given = {"lora_name": "poet", "lora_path": str(tmp_path), "lora_int_id": 1}
    request = SimpleNamespace(lora_request=SimpleNamespace(**given), block_hashes=[])
    asks = lookups.Lookups(context, meter)
    tracked = requests.Tracked(request, requests.DEFAULT, True)
    assert asks.name(tracked)
    weights.write_text("elegy")
    assert not asks.name(tracked)
