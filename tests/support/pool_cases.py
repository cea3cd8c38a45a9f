"""An instance that shares through a pool, as decided in vLLM's own scheduler, for tests without a
model: see in_place_cases."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from engine_cases import Node
from in_place_cases import CHUNK, Engine, Make, new_tokens, scheduling
from processes import info, make_memfd
from vllm.v1.request import RequestStatus

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
    return sum(len(load.chunks.keys) for load in engine.step().loads)


def reset(engine: Engine) -> None:
    """A reset that vLLM does not make itself where requests run."""
    engine.scheduler.reset_prefix_cache(reset_connector=True)
    engine.step()


def asked(engine: Engine) -> tuple[list[int], list[Any]]:
    """A new prompt, and the keys of its chunks."""
    tokens = new_tokens(PROMPT)
    return tokens, engine.keys(engine.request(tokens))


def abort(engine: Engine) -> None:
    """The request `r`."""
    engine.scheduler.finish_requests("r", RequestStatus.FINISHED_ABORTED)


def patience(engine: Engine, seconds: float) -> None:
    """For the server's answers; no heartbeat notices before that the server is gone."""
    client = engine.half.context.client
    client.on_beat.clear()
    client._config = msgspec.structs.replace(client._config, request_seconds=seconds)
