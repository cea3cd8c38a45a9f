"""What clients may take of a server: its memory, its connections and its log."""

from __future__ import annotations

import gc
import os
import signal
import tracemalloc
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from typing import Any

import pytest
from instance_cases import (
    FULL,
    NAMESPACE,
    block_run,
    counts,
    find,
    instance_id,
    make_table,
    numbers,
    prompt,
)
from model import FakeClock, chunk_key
from processes import Raw, Stage, info
from server_cases import A_TURN, add_region, asked, work_of

from vcache_backend.errors import Refused
from vcache_backend.log_format import LineLimit
from vcache_backend.metadata_server import publications
from vcache_backend.metadata_server.directory import Backlog
from vcache_backend.metadata_server.instances import InstanceRegistry, ShownPart
from vcache_backend.metadata_server.processes import Peer, ProcessId
from vcache_backend.metadata_server.requests import Service
from vcache_backend.metadata_server.slots import SLAB_SLOTS, SLABS
from vcache_backend.protocol import messages as m
from vcache_backend.protocol.sockets import close_fds
from vcache_backend.vram_pool.generations import Generations

MIB = 1 << 20
LINES, SECONDS = LineLimit.LINES, LineLimit.SECONDS
A = instance_id(1)
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


def join(
    service: Service,
    instance: m.InstanceId,
    ranks: int = 1,
    blocks: int = 10_000,
    tables: Sequence[m.BlockTable] = FULL,
) -> None:
    shown(service, m.Join(instance, NAMESPACE, blocks, ranks, 1, list(tables)))


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


def publish(
    service: Service,
    instance: m.InstanceId,
    blocks: int,
    size: int = 16,
    start: int = 0,
    of: int = 10_000,
    table: int = 0,
) -> int:
    """So many blocks, in runs of this size. Each has a block of its own, as far as the instance has
    enough of them."""
    taken = 0
    for first in range(start, start + blocks, size):
        every = [number % of for number in range(first, first + size)]
        hashes, generations = prompt(size, first, 1), counts(*[2] * size)
        run = m.BlockRun(table, first, hashes, numbers(*every), generations)
        taken += service.instances.publish(ME, m.Publish(instance, 0, [run])).count
    return taken


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
                    packs = (
                        prompt(size, turn * blocks + first, 1),
                        numbers(*range(first, first + size)),
                    )
                    counted = counts(*[2 * turn + 4] * size)
                    run = m.BlockRun(first % tables, 0, *packs, counted)
                    for rank in range(ranks):
                        service.instances.publish(ME, m.Publish(one, rank, [run]))
            assert service.instances.published(one).live == blocks
        service.disconnect(ME)
    assert not service.instances.of


def test_a_look_up_that_finds_all_of_a_name_changed_takes_no_long_turn() -> None:
    service, client = Service(1, now=FakeClock()), Peer(1, ProcessId(7, 8), "host", "host")
    with closing(Generations(A, 4096)) as table:
        request = m.Join(A, NAMESPACE, 4096, 1, 1, FULL)
        shown(service, request, table.fd)
        for number in range(4096):
            run = m.BlockRun(0, 0, prompt(1, 0, 1), numbers(number), counts(2))
            assert service.instances.publish(ME, m.Publish(A, 0, [run])) == m.Count(1)
        question = find(1, each=1)
        assert asked(service, client, question).found == 1
        table.void_all()
        assert work_of(lambda: asked(service, client, question)) <= 2 * A_TURN
        assert asked(service, client, question).found == 0


HOSTILE = {
    "blocks of one instance after the other": (1, FULL),
    "states without windows": (
        1,
        [m.BlockTable("full"), m.BlockTable("state", 1, 1), m.BlockTable("window", 1, 99)],
    ),
    "no state at all": (16, [m.BlockTable("full"), m.BlockTable("state", 1, 1)]),
}


@pytest.mark.parametrize(("size", "tables"), HOSTILE.values(), ids=HOSTILE)
def test_no_look_up_takes_a_long_turn(size: int, tables: list[m.BlockTable]) -> None:
    service, client = Service(1, now=FakeClock()), Peer(1, ProcessId(7, 8), "host", "host")
    for number in range(8):
        one = instance_id(number)
        join(service, one, blocks=3 * m.MAX_HASHES, tables=tables)
        if tables is FULL:  # each has every eighth block
            for at in range(number, m.MAX_HASHES, 8):
                publish(service, one, 1, 1, at)
        else:
            publish(service, one, m.MAX_HASHES, size, of=1 << 30)
        for table in range(1, len(tables)):
            if size == 1:
                every = range(table - 1, m.MAX_HASHES, table)
                for at in every:
                    run = block_run(1, table * m.MAX_HASHES + at, at, each=1, table=table)
                    service.instances.publish(ME, m.Publish(one, 0, [run]))
    question = find(m.MAX_HASHES, each=1, limit=m.MAX_HASHES)
    answer = asked(service, client, question)
    assert answer.cut == (tables is FULL) == (0 < answer.found < m.MAX_HASHES)
    assert work_of(lambda: asked(service, client, question)) <= 2 * A_TURN


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


def pinned(service: Service, client: Peer, count: int = 4000) -> tuple[Peer, int]:
    add_region(service, info("s0", CHUNKS * 256))
    stored(service, client, 0, CHUNKS)
    for first in range(0, count, 1000):
        service.directory.pin([chunk_key(first + number) for number in range(1000)], 60.0)
    service.directory.touch([chunk_key(number) for number in range(count, CHUNKS)])
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


def test_a_request_passes_over_few_chunks_however_many_it_evicts() -> None:
    service = Service(1, now=FakeClock())
    client, nbytes = pinned(service, Peer(1, ProcessId(7, 8), "host", "host"), 2000)
    new = [chunk_key(2 * CHUNKS + number) for number in range(900)]
    for _ in range(3):
        assert work_of(lambda: service.directory.reserve(client, new, nbytes)) < 3 * A_TURN


def test_a_request_empties_few_slabs_of_other_sizes() -> None:
    """Where slots are small, a slab has 16,384 of them."""
    service = Service(1, now=FakeClock())
    client = Peer(1, ProcessId(7, 8), "host", "host")
    add_region(service, info("s0", 64 * 4096 * 256))
    count = 64 * 4096
    assert stored(service, client, 0, count) == count
    new = [chunk_key(count + number) for number in range(64)]
    before = len(service.directory)
    service.directory.reserve(client, new, 4096 * 256)
    assert before - SLAB_SLOTS <= len(service.directory) < before


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


def test_resets_in_a_loop_are_swept_together() -> None:
    """Each would look at all slots of the pool, while frees and rebuilds wait behind it."""
    service, chunks = Service(1, now=FakeClock()), 2 * Backlog.AT_ONCE
    add_region(service, info("s0", chunks * 256))
    client = Peer(1, ProcessId(7, 8), "host", "host")
    assert stored(service, client, 0, chunks) == len(service.directory) == chunks
    for _ in range(100):
        service.directory.clear(chunk_key(0)[: m.NAMESPACE_BYTES], reset=True)
    assert not asked(service, client, m.Contains([chunk_key(chunks - 1)])).present[0]
    service.backlog.run(3 * chunks)
    assert (len(service.directory), bool(service.backlog)) == (0, False)


def test_a_publication_tells_few_however_many_hold_its_chunks() -> None:
    """Data parallel ranks with one system prompt: a publication that 60 instances hold took the
    server 25 ms."""
    service, size = Service(1, now=FakeClock()), m.MAX_PUBLISHED
    run = block_run(size, each=1)
    everyone = [instance_id(number) for number in range(60)]
    for one in everyone:
        join(service, one)
        work = work_of(lambda one=one: service.instances.publish(ME, m.Publish(one, 0, [run])))
        assert work <= 2 * A_TURN
        assert service.instances.published(one).live == size
        told = {other: service.instances.copies(other) for other in service.instances.of}
        while any(map(service.instances.copies, service.instances.of)):
            pass
        holders = sum(map(bool, told.values()))
        assert (bool(told[one]), holders <= 5) == (one != everyone[0], True)


# ---- connections


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


# ---- names
