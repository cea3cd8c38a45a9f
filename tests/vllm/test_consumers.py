"""A `kv_consumer` in vLLM's own scheduler says that it computes its prompts, and why."""

from __future__ import annotations

import pytest
from engine_cases import Node
from in_place_cases import CHUNK, Engine, engines, here, new_tokens
from vllm_cases import needs_vllm

from vcache_backend.integration.vllm import consumers

__all__ = ["here"]
pytestmark = needs_vllm


def compute(engine: Engine, chunks: int, rated: int | None = None) -> None:
    """rated: log probabilities of the prompt's tokens, for which vLLM computes it."""
    request = engine.request(new_tokens(chunks * CHUNK))
    request.sampling_params.prompt_logprobs = rated
    engine.scheduler.add_request(request)
    engine.finish(request)
    assert engine.half.context.outbox.flush(10)


def test_a_consumer_that_finds_nobody_says_so_once_a_minute(
    here: Node, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def said() -> list[str]:
        return [line for line in caplog.messages if "kv_consumer computes" in line]

    with engines(here, shown=True) as make:
        reader, tokens = make(role="kv_consumer"), new_tokens(3 * CHUNK)
        # vLLM has set its loggers up by now.
        monkeypatch.setattr(consumers.log, "handlers", [caplog.handler])
        monkeypatch.setattr(consumers.log, "propagate", False)
        compute(reader, 1)  # no longer than a chunk
        compute(reader, 3, rated=1)
        assert said() == []
        for _ in range(3):
            compute(reader, 3)
        (line,) = said()
        assert "the last 1 prompts (192 tokens): no other instance" in line
        reports = [one.text for one in reader.half.context.client.stats().reports]
        assert any("computes its prompts: no other instance" in text for text in reports)
        owner = make()
        reader.half._unserved._due = 0.0
        compute(reader, 3)
        assert "the last 3 prompts (576 tokens): none of the 1 instances" in said()[1]
        # It loads something: nothing is wrong.
        owner.finish(owner.add(tokens))
        owner.flush()
        loads = reader.add(tokens)
        assert reader.step().loads
        reader.step(finished_recving={loads.request_id})
        reader.finish(loads)
        reader.half._unserved._due = 0.0
        compute(reader, 3)
        assert len(said()) == 2
        assert owner.half._unserved is None
