"""What clients may take of a server: its memory, its connections and its log."""

from __future__ import annotations

import gc
import os
import signal
import tracemalloc
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import Any

import pytest
from instance_cases import (
    FULL,
    NAMESPACE,
    block_run,
    counts,
    instance_id,
    make_table,
    numbers,
    prompt,
)
from model import FakeClock, chunk_key
from processes import Raw, Stage, info
from server_cases import A_TURN, add_region, work_of

from vcache_backend.errors import Refused
from vcache_backend.log_format import LineLimit
from vcache_backend.metadata_server import publications
from vcache_backend.metadata_server.instances import InstanceRegistry, ShownPart
from vcache_backend.metadata_server.processes import Peer, ProcessId
from vcache_backend.metadata_server.requests import Service
from vcache_backend.metadata_server.slots import SLABS
from vcache_backend.protocol import messages as m
from vcache_backend.protocol.sockets import close_fds
from vcache_backend.vram_pool.generations import Generations

LINES = LineLimit.LINES
ME = Peer(1, ProcessId(7, 8), "host", "host")


@contextmanager
def grows_by_less_than(nbytes: int) -> Iterator[None]:
    gc.collect()
    tracemalloc.start()
    try:
        yield
        grown = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert grown < nbytes, f"the server has grown by {grown:,} B"


# ---- what instances publish


def shown(service: Service, request: m.Join, table: int | None = None) -> None:
    """All of an instance."""
    one = request.instance
    fds = [make_table(one, request.blocks) if table is None else os.dup(table)]
    try:
        service.instances.join(ME, request, fds)
    finally:
        close_fds(fds)
    instance = service.instances.of[one]
    instance.parts |= {rank: ShownPart(ME, []) for rank in range(request.ranks)}
    instance.whole = True


@pytest.mark.parametrize(("size", "ranks", "tables"), [(1, 1, 1), (256, 2, 1), (64, 1, 64)])
def test_publications_are_bounded(
    monkeypatch: pytest.MonkeyPatch, size: int, ranks: int, tables: int
) -> None:
    """Also of blocks that have changed since, and of names that were published before."""
    most, blocks = 3 * publications.BLOCK_BYTES * 512, 512
    monkeypatch.setattr(InstanceRegistry, "MAX_BYTES", most)
    monkeypatch.setattr(m, "MAX_PUBLISHED", 256)
    service, undo = Service(1, now=FakeClock()), ExitStack()
    with grows_by_less_than(most), undo:
        for number in range(4):
            one = instance_id(number)
            table = undo.enter_context(closing(Generations(one, blocks)))
            request = m.Join(one, NAMESPACE, blocks, ranks, 1, FULL * tables)
            if number == 3:
                with pytest.raises(Refused, match="no memory for 512 more blocks"):
                    shown(service, request, table.fd)
                continue
            shown(service, request, table.fd)
            for turn in range(6):
                table.void_all()
                table.filled(range(blocks))
                for first in range(0, blocks, size):
                    packs = numbers(*range(first, first + size)), counts(*[2 * turn + 4] * size)
                    hashes = prompt(size, turn * blocks + first, 1)
                    run = m.BlockRun(0, *packs, first % tables, hashes)
                    for rank in range(ranks):
                        service.instances.publish(ME, m.Publish(one, rank, [run]))
            assert service.instances.published(one).live == blocks
        service.disconnect(ME)
    assert not service.instances.of


# ---- what writers ask for


def stored(service: Service, client: Peer, first: int, count: int, nbytes: int = 256) -> int:
    """How many of so many new chunks get into the pool."""
    done = 0
    for start in range(first, first + count, m.MAX_SLOTS):
        stop = min(start + m.MAX_SLOTS, first + count)
        new = [chunk_key(number) for number in range(start, stop)]
        reserved = service.directory.reserve(client, new, nbytes)
        done += len(service.directory.commit(client, reserved.reservation))
    return done


CHUNKS = 5000


def pinned(service: Service, client: Peer) -> tuple[Peer, int]:
    add_region(service, info("s0", CHUNKS * 256))
    stored(service, client, 0, CHUNKS)
    for first in range(0, 4000, 1000):
        service.directory.pin([chunk_key(first + number) for number in range(1000)], 60.0)
    service.directory.touch([chunk_key(number) for number in range(4000, CHUNKS)])
    return client, 256


def in_other_memory(service: Service, client: Peer) -> tuple[Peer, int]:
    add_region(service, info("s0", CHUNKS * 256))
    add_region(service, m.SegmentInfo(m.SegmentId("s1"), "gpu-0", "cuda", 100 * 256))
    stored(service, client, 0, CHUNKS)
    on_gpu = Peer(2, client.process, "gpu-0", "cuda")
    assert stored(service, on_gpu, CHUNKS, 100) == 100
    return on_gpu, 256


def in_slabs_that_are_too_small(service: Service, client: Peer) -> tuple[Peer, int]:
    add_region(service, info("s0", 64 * 4096))
    stored(service, client, 0, 100)
    return client, 4 * 4096


STAYS = pinned, in_other_memory, in_slabs_that_are_too_small


@pytest.mark.parametrize("what", STAYS)
def test_chunks_that_stay_keep_no_younger_one_from_eviction(what: Any) -> None:
    service = Service(1, now=FakeClock())
    client, nbytes = what(service, Peer(1, ProcessId(7, 8), "host", "host"))
    done = [stored(service, client, 2 * CHUNKS + number, 1, nbytes) for number in range(40)]
    assert sum(done) >= 38, "one or two searches end behind some of them"


def test_a_segment_full_of_tiny_chunks_has_room_for_large_ones_later() -> None:
    """Its table has no more slabs, and a slab's place never changes."""
    service, nbytes = Service(1, now=FakeClock()), 1 << 33
    client = Peer(1, ProcessId(7, 8), "host", "host")
    region = add_region(service, info("s0", nbytes))
    while region.cut(256) is not None:
        pass
    assert stored(service, client, 0, 64, nbytes // SLABS) == SLABS


@pytest.mark.parametrize("nbytes", [128, 4096])
def test_what_is_free_has_room_for_chunks_of_any_size(nbytes: int) -> None:
    """Chunks of another size were there, and none is any more that could be evicted."""
    service, client = Service(1, now=FakeClock()), Peer(1, ProcessId(7, 8), "host", "host")
    add_region(service, info("s0", 32 * 4096))
    assert stored(service, client, 0, 64, 2048) == 64
    service.directory.clear(b"")
    assert stored(service, client, 100, 32, nbytes) == 32


def test_a_publication_tells_few_however_many_hold_its_chunks() -> None:
    """Data parallel ranks with one system prompt: a publication that 60 instances hold took the
    server 25 ms."""
    service, size = Service(1, now=FakeClock()), m.MAX_PUBLISHED
    run = block_run(size, each=1)
    everyone = [instance_id(number) for number in range(60)]
    for one in everyone:
        shown(service, m.Join(one, NAMESPACE, 10_000, 1, 1, FULL))
        work = work_of(lambda one=one: service.instances.publish(ME, m.Publish(one, 0, [run])))
        assert work <= 2 * A_TURN
        assert service.instances.published(one).live == size
        told = {other: service.instances.copies(other) for other in service.instances.of}
        while any(map(service.instances.copies, service.instances.of)):
            pass
        holders = sum(map(bool, told.values()))
        assert (bool(told[one]), holders <= 5) == (one != everyone[0], True)


# ---- the log


def test_clients_that_connect_in_a_loop_do_not_fill_the_log(alone: Stage) -> None:
    server = alone.server()
    layout = {"model": "m", "namespace": "aa", "field": "x"}
    alone.raw(hello=False).hello(layout)
    for number in range(LINES // 3):
        with Raw(alone.path, hello=False) as raw:
            other = layout | {"namespace": str(number), "field": str(number)}
            assert raw.hello(other)[0] == "welcome"
            raw.ask("report", "info", f"{number} " + "x" * 1000)
            raw.send_bytes(b"\xc1")
            assert raw.closed()
        server.said()
    server.signal(signal.SIGTERM)
    _, said = server.wait()
    assert LINES - 10 < said.count("\n") < LINES + 30
