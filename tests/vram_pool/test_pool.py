"""What a worker lends to the pool and maps of it, also in host memory beside a GPU: there against a
driver that counts what it locked, with KV caches on the CPU. On real GPUs: test_engine_processes.
"""

from __future__ import annotations

import gc
import threading

import pytest
import torch
from engine_cases import ROOMY, Node, get, here, put, said, served
from fake_cuda import MIB, NOTHING, FakeCuda, cuda
from kv_cases import CHUNK, FLASH, Cache, Sizes, layout_of, prompt
from processes import QUICK, eventually, leaving_nothing

from vcache_backend.engine import VCacheEngine
from vcache_backend.errors import SegmentError
from vcache_backend.protocol import messages as m
from vcache_backend.protocol.client import Client
from vcache_backend.vram_pool import regions
from vcache_backend.vram_pool.copies.copier import HostCopier
from vcache_backend.vram_pool.devices import Device, resolve
from vcache_backend.vram_pool.memory_budget import Shortfall, shortfall
from vcache_backend.vram_pool.pool import Pool

__all__ = ["cuda", "here", "served"]
HOST = Device("host:a", "host", 0)
PIECE = MIB
SIZES = Sizes(blocks=120)


@pytest.fixture
def pieces(monkeypatch: pytest.MonkeyPatch, cuda: FakeCuda) -> FakeCuda:
    monkeypatch.setattr(Pool._contribute, "__defaults__", (PIECE,))
    return cuda


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
    monkeypatch.setattr(Pool.close, "__defaults__", (0.0,))
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


MIB = 1 << 20


def test_who_cannot_map_a_segment_still_stores(
    served: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has the most room, so that every store would go there; as a GPU's without peer access, or
    one that is forged.
    """
    mine = Cache()
    far = served.engine("host:far", 8 * ROOMY, layout_of(mine))
    mapping = regions.map_segment

    def refusing(info: m.SegmentInfo, fd: int, reader: Device) -> torch.Tensor:
        if info.device == "host:far":
            raise SegmentError(f"{reader} has no peer access to it")
        return mapping(info, fd, reader)

    monkeypatch.setattr(regions, "map_segment", refusing)
    served.engine("host:a", ROOMY, layout_of(mine))
    engine = served.engine("host:b", 0, layout_of(mine))
    put(engine, mine, prompt(CHUNK))
    put(far, mine, prompt(2 * CHUNK))
    assert get(engine, mine, prompt(2 * CHUNK)) == CHUNK, "what lies there is a miss"
    for family in range(2, 6):
        put(engine, mine, prompt(2 * CHUNK, family))
        assert engine.lookup(prompt(2 * CHUNK, family)) == 2 * CHUNK
        assert get(engine, mine, prompt(2 * CHUNK, family)) == 2 * CHUNK
    served.server.kill()
    served.serve()
    eventually(lambda: engine.lookup(prompt(2 * CHUNK, 2)) == 2 * CHUNK)
    client = served.client()
    eventually(lambda: len(client.list_segments()) == 2)

    def stores() -> bool:
        """One store may be lost before the new server hears what this engine cannot map."""
        put(engine, mine, prompt(2 * CHUNK, 8))
        return get(engine, mine, prompt(2 * CHUNK, 8)) == 2 * CHUNK

    eventually(stores)


def test_after_a_cold_restart_a_worker_waits_for_memory_that_others_still_map(served: Node) -> None:
    client = served.undo.enter_context(Client(served.path, QUICK, "host:a"))
    elsewhere = Shortfall("it is mapped elsewhere", 0)
    refusals = [None, elsewhere, elsewhere, None]
    pool = Pool(client, Device("host:a", "host"), ROOMY, lambda whole, new: refusals.pop(0))
    served.undo.callback(pool.close)
    (first,) = client.list_segments()
    with leaving_nothing(served.path):
        served.server.kill()
    served.serve()
    eventually(lambda: not refusals)
    (second,) = eventually(lambda: client.connected and client.list_segments())
    assert second.id != first.id


def test_a_pool_of_the_default_size_takes_what_fits_and_one_of_a_set_size_all_or_nothing(
    served: Node,
) -> None:
    """On a GPU of 100 MiB beside vLLM's default utilisation, where 8 MiB are too much."""
    lent = dict[str, int]()
    for name, least in (("default", MIB), ("small", 4 * MIB), ("set", None)):
        client = served.undo.enter_context(Client(served.path, QUICK, f"host:{name}"))

        def over_budget(whole: int, new: int) -> Shortfall | None:
            return shortfall(100 * MIB, 8 * MIB, whole, new, 0.92)

        device = Device(f"host:{name}", "host")
        for _ in range(2):  # and a second worker of the device adds nothing
            pool = Pool(client, device, 8 * MIB, over_budget, least)
            served.undo.callback(pool.close)
        mine = [each.nbytes for each in client.list_segments() if each.device == device.name]
        lent[name] = sum(mine)
        said = [each.text for each in client.stats().reports if device.name in each.text]
        assert any("gpu_memory_utilization to 0.87 or less" in line for line in said) == (not mine)
    assert lent == {"default": 2 * MIB, "small": 0, "set": 0}


@pytest.mark.gpu
def test_a_gpu_lends_fresh_memory_once_everybody_has_unmapped_the_old(served: Node) -> None:
    """The two do not fit at once."""
    device, most = resolve("cuda:0"), int(0.6 * torch.cuda.mem_get_info(0)[0])
    client = served.undo.enter_context(Client(served.path, QUICK, device.name, "cuda"))
    served.undo.callback(Pool(client, device, most).close)
    served.worker("cuda:0")
    (first,) = client.list_segments()
    with leaving_nothing(served.path):
        served.server.kill()
    eventually(lambda: not client.connected)
    served.serve()
    (second,) = eventually(lambda: client.connected and client.list_segments())
    assert second.id != first.id
