"""Pools in host memory beside KV caches on GPUs, against a driver that counts what it locked; the
KV caches here are on the CPU. On real GPUs: test_cross_process_store_retrieve.py and
test_regions.py."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator

import pytest
from engine_cases import Node, get, here, put, said, served
from fake_cuda import MIB, NOTHING, FakeCuda, cuda
from kv_cases import CHUNK, FLASH, Cache, Sizes, layout_of, prompt
from memory_cases import mappings, open_fds, why_not_mapped
from processes import eventually, info

from vcache_backend.engine import VCacheEngine
from vcache_backend.errors import SegmentError
from vcache_backend.vram_pool import devices, host_memory, pool
from vcache_backend.vram_pool.copies.copier import HostCopier
from vcache_backend.vram_pool.devices import Device
from vcache_backend.vram_pool.regions import create, map_segment

__all__ = ["cuda", "here", "served"]

HOST = Device("host:a", "host", 0)
PIECE = MIB
SIZES = Sizes(blocks=120)


@pytest.fixture
def pieces(monkeypatch: pytest.MonkeyPatch, cuda: FakeCuda) -> FakeCuda:
    monkeypatch.setattr(pool, "PIECE_BYTES", PIECE)
    return cuda


@pytest.fixture
def quiet(cuda: FakeCuda) -> Iterator[None]:
    """Nothing is left of a test that asks for this, memory and descriptors included."""
    gc.collect()
    before = open_fds(), mappings()
    yield
    gc.collect()
    assert (open_fds() <= before[0], mappings() <= before[1], cuda.holds()) == (True, True, NOTHING)


# ---- segments


@pytest.mark.parametrize("nbytes", [MIB, 12_345])
def test_a_segment_is_locked_while_a_tensor_lives(cuda: FakeCuda, quiet: None, nbytes: int) -> None:
    with create(HOST, nbytes) as owned:
        assert cuda.holds() == NOTHING
        whole = map_segment(owned.info, owned.fd, HOST)
    part = whole[:64][8:16]
    part.fill_(7)
    assert cuda.registered == {whole.data_ptr(): -(-nbytes // 4096) * 4096}
    del whole
    assert cuda.holds() == NOTHING | {"contexts": 1, "registered": 1}
    assert part.tolist() == [7] * 8
    cuda.calls.clear()
    del part
    assert cuda.calls.index("cuCtxSynchronize") < cuda.calls.index("cuMemHostUnregister")


@pytest.mark.parametrize(
    "call",
    [
        "cuDevicePrimaryCtxRetain",
        "cuCtxPushCurrent",
        "cuMemHostRegister",
        "cuMemHostGetDevicePointer",
    ],
)
def test_a_segment_that_failed_leaves_nothing(cuda: FakeCuda, quiet: None, call: str) -> None:
    with create(HOST, MIB) as owned:
        cuda.broken = call
        message = why_not_mapped(owned, HOST)
    assert f"segment {owned.id} of host:a: " in message
    assert f"{call}: CUDA_ERROR" in message


def test_memory_is_locked_step_by_step_and_given_back_where_a_step_fails(
    cuda: FakeCuda, quiet: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_memory, "_STEP_BYTES", MIB // 4)
    with create(HOST, MIB - 12_345) as owned:
        whole = map_segment(owned.info, owned.fd, HOST)
        start, steps = whole.data_ptr(), [MIB // 4, MIB // 4, MIB // 4, MIB // 4 - 12_288]
        assert cuda.registered == {start + at * (MIB // 4): size for at, size in enumerate(steps)}
        whole[: owned.nbytes].fill_(3)
        del whole
    assert cuda.registered == {}
    cuda.most_registered = MIB // 2
    with create(HOST, MIB) as owned:
        assert "cannot lock 262,144 B" in why_not_mapped(owned, HOST)


def test_a_gpu_that_has_the_memory_elsewhere_does_not_read_it(cuda: FakeCuda) -> None:
    cuda.moved = 4096
    with create(HOST, MIB) as owned:
        assert "GPU 0 has host memory elsewhere" in why_not_mapped(owned, HOST)


def test_the_last_gibibyte_of_the_machine_is_left_to_others(
    monkeypatch: pytest.MonkeyPatch, cuda: FakeCuda, quiet: None
) -> None:
    answers = [0, host_memory.SPARE_BYTES + MIB]
    monkeypatch.setattr(devices, "host_available", lambda: answers.pop(0))
    create(HOST, MIB).close()
    monkeypatch.setattr(devices, "host_available", lambda: host_memory.SPARE_BYTES + MIB - 1)
    monkeypatch.setattr(host_memory, "GROW_SECONDS", 0.0)
    why = "1,074,790,399 B of host memory are available, and 1,073,741,824 of them stay free"
    with pytest.raises(SegmentError, match=why):
        create(HOST, MIB)


def test_memory_that_is_yet_to_be_allocated_is_not_mapped_where_there_is_too_little(
    monkeypatch: pytest.MonkeyPatch, cuda: FakeCuda, quiet: None, memfd: int
) -> None:
    """It may be another process's, and of any size."""
    monkeypatch.setattr(devices, "host_available", lambda: host_memory.SPARE_BYTES + 1)
    segment = info("s0", os.fstat(memfd).st_size, "host:a")
    with pytest.raises(SegmentError, match="are not allocated yet"):
        map_segment(segment, memfd, HOST)
    os.pwrite(memfd, bytes(segment.nbytes), 0)
    map_segment(segment, memfd, HOST)


# ---- pools


def engine(here: Node, name: str, segment_bytes: int, cache: Cache, gpu: int = 0) -> VCacheEngine:
    more = {"copier": HostCopier(), "kv_device": f"cuda:{gpu}"}
    made = here.engine(name, segment_bytes, layout_of(cache), **more)
    assert made.device == Device(name, "host", gpu)
    return made


def held_up(pieces: FakeCuda) -> tuple[threading.Event, threading.Event]:
    """Locking says when it has begun, and goes on when it is told to."""
    begun, go_on = threading.Event(), threading.Event()

    def wait() -> None:
        begun.set()
        go_on.wait(20)

    pieces.register_waits = wait
    return begun, go_on


def has(made: VCacheEngine, segments: int) -> None:
    eventually(lambda: len(made._session.pool.mapped()) == segments)


def test_workers_share_what_lies_in_locked_memory(served: Node, pieces: FakeCuda) -> None:
    mine, theirs = Cache(FLASH, SIZES), Cache(FLASH, SIZES)
    writer = engine(served, "host:a", 2 * PIECE + PIECE // 2, mine)
    has(writer, 3)
    reader = engine(served, "host:b", PIECE, theirs, gpu=1)
    has(reader, 4)
    has(writer, 4)
    lent = sorted((one.device, one.nbytes) for one in served.client().list_segments())
    assert lent[:3] == [("host:a", size) for size in (PIECE // 2, PIECE, PIECE)]
    assert lent[3:] == [("host:b", PIECE)]
    assert sum(pieces.registered.values()) == 2 * (3 * PIECE + PIECE // 2)
    tokens = prompt(3 * CHUNK)
    put(writer, mine, tokens)
    assert get(reader, theirs, tokens, seed=4) == len(tokens)
    assert reader.get_stats()["bytes"]["peer"] == 3 * mine.chunk_bytes
    served.undo.close()
    gc.collect()
    assert pieces.holds() == NOTHING


def test_a_step_never_waits_for_memory_that_is_being_locked(served: Node, pieces: FakeCuda) -> None:
    mine, theirs = Cache(FLASH, SIZES), Cache(FLASH, SIZES)
    writer = engine(served, "host:a", PIECE, mine)
    has(writer, 1)
    put(writer, mine, prompt(CHUNK))
    begun, go_on = held_up(pieces)
    reader = engine(served, "host:b", 0, theirs)
    assert begun.wait(20)
    # Chunks that cannot be read yet are not there; nor is anything stored.
    assert get(reader, theirs, prompt(CHUNK)) == 0
    put(reader, theirs, prompt(CHUNK, 2))
    assert reader.lookup(prompt(CHUNK, 2)) == 0
    go_on.set()
    has(reader, 1)
    assert get(reader, theirs, prompt(CHUNK)) == CHUNK


def test_the_thread_that_locks_leaves_captured_graphs_whole(served: Node, pieces: FakeCuda) -> None:
    """As vLLM does after its KV cache is made, which is when the pool begins. On a GPU:
    test_regions.py.
    """
    spoils: list[bool] = []
    pieces.register_waits = lambda: spoils.append(threading.get_ident() not in pieces.relaxed)
    served.engine("host:b", PIECE, layout_of(Cache(FLASH, SIZES)))
    has(engine(served, "host:a", PIECE, Cache(FLASH, SIZES)), 2)
    assert spoils == [False, False]


@pytest.mark.parametrize("lends", [True, False])
def test_a_pool_that_is_closed_while_memory_is_locked_lets_go_of_it(
    served: Node, pieces: FakeCuda, monkeypatch: pytest.MonkeyPatch, lends: bool
) -> None:
    monkeypatch.setattr(pool, "CLOSE_SECONDS", 0.0)
    if not lends:
        served.engine("host:b", PIECE, layout_of(Cache(FLASH, SIZES)))
    begun, go_on = held_up(pieces)
    made = engine(served, "host:a", 8 * PIECE * lends, Cache(FLASH, SIZES))
    assert begun.wait(20)
    made.close()
    go_on.set()
    eventually(lambda: not made._session.pool._thread.is_alive())  # type: ignore[union-attr]
    gc.collect()
    assert pieces.holds() == NOTHING
    assert len(served.client().list_segments()) == (not lends)


def test_where_the_driver_gives_out_what_was_lent_by_then_stays(
    served: Node, pieces: FakeCuda, caplog: pytest.LogCaptureFixture
) -> None:
    pieces.most_registered = 2 * PIECE
    mine = Cache(FLASH, SIZES)
    made = engine(served, "host:a", 8 * PIECE, mine)
    client = served.client()
    eventually(lambda: any("host:a" in one.text for one in client.stats().reports))
    (line,) = said(caplog, "lends 2 MiB of 8 MiB")
    cause = "cuMemHostRegister: CUDA_ERROR_OUT_OF_MEMORY"
    assert f"the driver cannot lock 1,048,576 B of host memory: {cause}" in line
    tokens = prompt(2 * CHUNK)
    put(made, mine, tokens)
    assert get(made, mine, tokens) == len(tokens)
    beats: list[int] = []
    made._session.client.on_beat.append(
        lambda: beats.append(pieces.calls.count("cuMemHostRegister"))
    )
    eventually(lambda: len(beats) > 3)
    assert beats[0] == beats[-1] == 3, "it is not tried again"
    assert len(said(caplog, "lends 2 MiB of 8 MiB")) == 1
