"""The tier's small parts, without a store: when the breaker opens, what is remembered for how long,
threads, buffers.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch
from model import FakeClock
from processes import SECONDS, eventually

from vcache_backend.config import MooncakeConfig, OffloadConfig
from vcache_backend.metadata_server.messages import ChunkKey
from vcache_backend.offload.breaker import Breaker
from vcache_backend.offload.objects import Format
from vcache_backend.offload.read import READERS, Bound, Fetch, Reader
from vcache_backend.offload.staging import Buffer, Ring, Staging
from vcache_backend.offload.store import Store
from vcache_backend.offload.workers import Workers
from vcache_backend.transfer.stats import EngineStats


def key(number: int) -> ChunkKey:
    return ChunkKey(number.to_bytes(26, "big"))


def test_a_breaker_opens_after_failures_in_a_row_and_closes_after_a_trial() -> None:
    breaker = Breaker(3, 1.0, 4.0, FakeClock())
    assert (breaker.is_open, breaker.trial_due()) == (True, True)
    breaker.tried(held=True)
    assert [breaker.failed(), breaker.failed()] == [False, False]
    breaker.succeeded()
    assert [breaker.failed() for _ in range(3)] == [False, False, True]
    assert not breaker.failed()
    breaker.succeeded()
    assert (breaker.is_open, breaker.opened, breaker.trial_due()) == (True, 1, False)
    breaker.tried(held=True)
    assert not breaker.is_open
    breaker.lost()
    assert (breaker.is_open, breaker.opened, breaker.trial_due()) == (True, 1, True)


def test_an_open_breaker_is_tried_after_pauses_that_double() -> None:
    clock = FakeClock()
    breaker = Breaker(1, 1.0, 4.0, clock)
    for begin in (
        lambda: breaker.tried(held=False),
        lambda: (breaker.tried(held=True), breaker.failed()),
    ):
        begin()
        for pause in (1.0, 2.0, 4.0, 4.0):
            clock.now += pause - 0.01
            breaker.lost()
            assert not breaker.trial_due()
            clock.now += 0.02
            assert breaker.trial_due()
            breaker.tried(held=False)


def test_a_call_that_hangs_or_fails_holds_up_no_other_and_ends_no_close() -> None:
    workers, go_on, ran = Workers("test", 2), threading.Event(), list[int]()
    workers.submit(lambda: go_on.wait(SECONDS))
    workers.submit(lambda: 1 // 0)
    workers.submit(lambda: ran.append(threading.get_ident()))
    eventually(lambda: ran)
    assert ran != [threading.get_ident()]
    workers.close(0.05)
    go_on.set()
    workers.close(SECONDS)
    assert not {"test-0", "test-1"} & {thread.name for thread in threading.enumerate()}


def test_whoever_takes_buffers_waits_for_all_of_them_or_gets_none() -> None:
    ring = Ring([Buffer((0, 16), torch.empty(16, dtype=torch.uint8))] * 3)
    held = ring.take(2, 0)
    assert ring.take(2, 0.01) == []
    giving = threading.Timer(0.05, ring.give, [held])
    giving.start()
    assert len(ring.take(3, SECONDS)) == 3
    giving.join()


@pytest.fixture
def store() -> Iterator[Store]:
    """One that never opens."""
    nobody = MooncakeConfig(master="127.0.0.1:9")
    config = OffloadConfig(policy="write_through", failures=1, mooncake=nobody)
    made = Store(config, EngineStats())
    yield made
    made.close()


def test_a_store_that_is_down_is_not_asked(store: Store) -> None:
    assert (store.lookup(["vcache1/x"]), store.there(["vcache1/x"])) == (None, [False])
    assert (store.usable, store.breaker.opened) == (False, 0)


def test_a_load_waits_for_its_next_chunk_as_long_as_it_may_and_no_longer(store: Store) -> None:
    """Behind other loads, so that the store is not at fault. In its own call: test_offload_engine."""
    config = OffloadConfig(get_seconds=2.0)
    clock = FakeClock()
    go_on = threading.Event()
    begun = threading.Event()
    ring = Ring(Staging(store.memory, 256, 4, pinned=False).buffers)
    form = Format(bytes(32), 1, 128, 128)
    stats = EngineStats()
    bound = Bound(store, lambda nbytes, seconds: None, stats, form, None)
    reader = Reader(bound, ring, config, now=clock)

    def hang(*_: object) -> list[int]:
        begun.set()
        go_on.wait(SECONDS)
        return [0]

    try:
        for _ in range(READERS):
            reader.calls.submit(hang)
        fetch = Fetch(reader, [key(1)], 0)
        assert begun.wait(SECONDS)
        clock.now += 1.9
        assert not fetch.over
        clock.now += 0.2
        assert fetch.over
        assert (fetch.cause, stats.counted("offload_")) == ("timeout", {})
    finally:
        go_on.set()
        reader.close(SECONDS)
