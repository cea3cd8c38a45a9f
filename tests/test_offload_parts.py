"""The tier's small parts, without a store: when the breaker opens, what is remembered for how long, threads, buffers."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest
import torch
from processes import SECONDS, eventually

from vcache_backend.config import MooncakeConfig, OffloadConfig, from_dict
from vcache_backend.metadata_server.messages import ChunkKey
from vcache_backend.offload.breaker import Breaker
from vcache_backend.offload.index import Index
from vcache_backend.offload.objects import Format
from vcache_backend.offload.read import Bound, Reader, parts
from vcache_backend.offload.recent import Recent
from vcache_backend.offload.staging import ALIGNMENT, Ring
from vcache_backend.offload.store import Store
from vcache_backend.offload.workers import Workers
from vcache_backend.transfer.stats import EngineStats


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def key(number: int) -> ChunkKey:
    return ChunkKey(number.to_bytes(26, "big"))


def test_a_breaker_opens_after_failures_in_a_row() -> None:
    breaker = Breaker(3, 1.0, 4.0, Clock())
    assert not breaker.failed()
    assert not breaker.failed()
    breaker.succeeded()
    assert [breaker.failed() for _ in range(3)] == [False, False, True]
    assert breaker.is_open
    assert not breaker.failed()
    breaker.succeeded()
    assert (breaker.is_open, breaker.opened) == (True, 1)


def test_an_open_breaker_is_tried_after_pauses_that_double() -> None:
    clock = Clock()
    breaker = Breaker(1, 1.0, 4.0, clock)
    assert not breaker.trial_due()
    breaker.failed()
    for pause in (1.0, 2.0, 4.0, 4.0):
        clock.now += pause - 0.01
        assert not breaker.trial_due()
        clock.now += 0.02
        assert breaker.trial_due()
        breaker.tried(held=False)
    clock.now += 10
    breaker.tried(held=True)
    assert not breaker.is_open
    assert not breaker.trial_due()
    breaker.failed()
    clock.now += 1.01
    assert breaker.trial_due()


def test_what_is_recent_ends_with_time_and_by_number() -> None:
    clock = Clock()
    recent = Recent[ChunkKey](2.0, 3, clock)
    recent.add([key(1), key(2)])
    clock.now += 1.5
    recent.add([key(1), key(3)])
    assert [n for n in range(5) if key(n) in recent] == [1, 2, 3]
    clock.now += 1.0
    assert [n for n in range(5) if key(n) in recent] == [1, 3]
    assert recent.first([key(9), key(3), key(1)]) == 1
    assert recent.first([key(9), key(2)]) == 2
    recent.discard([key(3), key(7)])
    recent.add([key(10), key(11), key(12)])
    assert [n for n in range(20) if key(n) in recent] == [10, 11, 12]
    assert len(recent) == 3


def test_a_call_that_hangs_or_fails_holds_up_no_other_and_ends_no_close() -> None:
    workers, go_on, ran = Workers("test", 2, 3), threading.Event(), list[int]()
    assert workers.submit(go_on.wait)
    assert workers.submit(lambda: 1 // 0)
    assert workers.submit(lambda: ran.append(threading.get_ident()))
    eventually(lambda: ran)
    assert ran != [threading.get_ident()]
    assert [workers.submit(go_on.wait) for _ in range(6)][-1] is False
    assert not workers.close(0.05)
    go_on.set()
    assert workers.close(SECONDS)
    assert not workers.submit(go_on.wait)


def test_buffers_are_equal_apart_and_shared_with_who_has_the_fd() -> None:
    ring = Ring(1000, 3, pinned=False)
    first, second, third = ring.take(3, 0)
    assert [buffer.memory.numel() for buffer in (first, second, third)] == [1000] * 3
    for buffer in (first, second, third):
        assert buffer.memory.data_ptr() % ALIGNMENT == 0
        buffer.memory.fill_(buffer.number + 1)
    assert [int(buffer.memory.sum()) for buffer in (first, second, third)] == [
        1000 * (b.number + 1) for b in (first, second, third)
    ]
    ((number, start, nbytes),) = ring.places([second])
    assert (number, nbytes) == (0, 1000)
    assert os.pread(ring.fd, nbytes, start) == bytes([second.number + 1]) * 1000
    ring.give([second])
    assert ring.free == 1
    ring.close()
    ring.close()
    assert torch.equal(first.memory, torch.full((1000,), first.number + 1, dtype=torch.uint8))


def test_whoever_takes_buffers_waits_for_all_of_them_or_gets_none() -> None:
    ring = Ring(16, 3, pinned=False)
    held = ring.take(2, 0)
    assert ring.take(2, 0.01) == []
    giving = threading.Timer(0.05, ring.give, [held])
    giving.start()
    assert len(ring.take(3, SECONDS)) == 3
    giving.join()
    ring.close()


def test_memory_that_is_not_there_is_an_error() -> None:
    with pytest.raises((OSError, RuntimeError)):
        Ring(1 << 50, 1000, pinned=False)


@pytest.fixture
def store() -> Iterator[Store]:
    """One that never opens."""
    made = Store(OffloadConfig(policy="write_through", failures=1, mooncake=MooncakeConfig(master="127.0.0.1:9")), EngineStats())
    yield made
    made.close()


def test_a_store_that_is_down_is_not_asked(store: Store) -> None:
    index = Index(OffloadConfig(), store, on_gpu=False)
    assert (store.lookup(["vcache1/x"]), index.lookup([key(1)], 0), index.may_have(key(1))) == (None, 0, False)
    assert store.breaker.opened == 0


def test_what_was_found_in_another_epoch_is_forgotten(store: Store) -> None:
    index = Index(OffloadConfig(), store, on_gpu=False)
    index.known([key(1)])
    index.note_epoch(0)
    assert key(1) in index.recent
    index.note_epoch(7)
    assert key(1) not in index.recent


def test_slow_links_are_tried_now_and_then(store: Store) -> None:
    config = OffloadConfig(min_bandwidth=1000, retry_max_seconds=60.0)  # type: ignore[arg-type]
    index = Index(config, store, on_gpu=False)
    index.measured(100, 10.0)
    assert (index.bandwidth, index.too_slow()) == (None, False)
    index.measured(1 << 20, 1.0)
    assert not index.too_slow()
    index.bandwidth = 999.0
    assert [index.too_slow() for _ in range(3)] == [False, True, True]
    index.bandwidth = 1000.0
    assert not index.too_slow()


def test_a_link_is_measured_against_what_a_gpu_computes_unless_somebody_set_a_bound(store: Store) -> None:
    """Loopback TCP loses against an H200; RDMA, and computing on the CPU, are left alone."""
    over_tcp, over_rdma = OffloadConfig(), OffloadConfig(mooncake=MooncakeConfig(protocol="rdma"))
    assert [over_tcp.least_bandwidth(on_gpu) for on_gpu in (True, False)] == [5 * 10**9, 0]
    assert [over_rdma.least_bandwidth(on_gpu) for on_gpu in (True, False)] == [0, 0]
    for bound in (0, 1000):
        assert from_dict({"offload": {"min_bandwidth": bound}}).offload.least_bandwidth(True) == bound
    for on_gpu in (True, False):
        index = Index(over_tcp, store, on_gpu)
        index.bandwidth = 4.4e9
        # One is tried, to find out.
        assert [index.too_slow() for _ in range(2)] == [False, on_gpu]


@pytest.mark.parametrize("most", [1, 2, 3, 4, 16])
def test_what_is_read_is_divided_among_calls_of_which_the_first_and_the_last_are_small(most: int) -> None:
    for count in range(50):
        made = parts(count, most)
        assert [chunk for part in made for chunk in part] == list(range(count))
        assert all(0 < len(part) <= most for part in made)
        half = max(1, most // 2)
        assert all(len(made[end]) <= half for end in (0, -1) if made)
    assert [len(part) for part in parts(16, 4)] == [2, 4, 4, 4, 2]


@pytest.mark.parametrize("called", [False, True], ids=["behind another load", "in its own call"])
def test_a_load_waits_for_its_next_chunk_as_long_as_it_may_and_no_longer(
    store: Store, called: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store is at fault only where its own call took that long."""
    config, clock, go_on, begun = OffloadConfig(get_seconds=2.0, readers=1), Clock(), threading.Event(), threading.Event()
    ring, form = Ring(256, 4, pinned=False), Format(bytes(32), 1, 128, 128)
    index = Index(config, store, on_gpu=False)
    reader = Reader(Bound(store, index, EngineStats(), form, None), ring, config, now=clock)

    def hang(*_: object) -> list[int]:
        begun.set()
        go_on.wait(SECONDS)
        return [0]

    try:
        if called:
            monkeypatch.setattr(store, "get", hang)
        else:
            reader.calls.submit(hang)
        fetch = reader.fetch([key(1)], 0)
        assert begun.wait(SECONDS)
        clock.now += 1.9
        assert not fetch.over
        clock.now += 0.2
        assert fetch.over
        assert (fetch.cause, store.breaker.is_open) == ("timeout", called)
    finally:
        go_on.set()
        reader.close(SECONDS)
        ring.close()
