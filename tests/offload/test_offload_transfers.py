"""Reads without a store: buffers, a load's deadline. With one: test_offload_tier."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from model import FakeClock
from processes import SECONDS

from vcache_backend.config import MooncakeConfig, OffloadConfig
from vcache_backend.offload.objects import Format
from vcache_backend.offload.store import Store
from vcache_backend.offload.transfers import Fetch, Reader, staging
from vcache_backend.protocol.messages import ChunkKey
from vcache_backend.transfer.stats import EngineStats


def key(number: int) -> ChunkKey:
    return ChunkKey(number.to_bytes(26, "big"))


def test_whoever_takes_buffers_waits_for_all_of_them_or_gets_none(store: Store) -> None:
    reader = Reader(
        store, EngineStats(), Format(bytes(32), 128), staging(store.memory, 16, 3, None), 2.0
    )
    held = reader.take(2, 0)
    assert reader.take(2, 0.01) == []
    giving = threading.Timer(0.05, reader.give_back, [held])
    giving.start()
    assert len(reader.take(3, SECONDS)) == 3
    giving.join()
    reader.close()


@pytest.fixture
def store() -> Iterator[Store]:
    """One that never opens."""
    nobody = MooncakeConfig(master="127.0.0.1:9")
    config = OffloadConfig(policy="write_through", failures=1, mooncake=nobody)
    made = Store(config, EngineStats())
    yield made
    made.close()


def test_a_load_waits_for_its_next_chunk_as_long_as_it_may_and_no_longer(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind other loads."""
    clock, stats = FakeClock(), EngineStats()
    go_on, begun = threading.Event(), threading.Event()
    buffers = staging(store.memory, 256, 4, None)
    reader = Reader(store, stats, Format(bytes(32), 128), buffers, 2.0, now=clock)

    def hang(*given: object) -> list[int]:
        begun.set()
        go_on.wait(SECONDS)
        return [0]

    monkeypatch.setattr(store, "get", hang)
    try:
        for _ in range(3):
            Fetch(reader, [key(2)], 0)
        fetch = Fetch(reader, [key(1)], 0)
        assert begun.wait(SECONDS)
        clock.now += 1.9
        assert not fetch.over
        clock.now += 0.2
        assert fetch.over
        assert (fetch.cause, stats.counted("offload_")) == ("timeout", {"late": 1})
    finally:
        go_on.set()
        reader.close()
