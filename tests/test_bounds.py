"""What clients may take of a server: its memory, its connections, its instances and its log. Nobody takes all of it."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from instance_cases import NAMESPACE, chunk_generations, instance_id, keys, numbers
from model import FakeClock

from vcache_backend.config import ServerConfig
from vcache_backend.metadata_server import messages as m
from vcache_backend.metadata_server import residents
from vcache_backend.metadata_server.directory import Directory
from vcache_backend.metadata_server.placement import Peer
from vcache_backend.metadata_server.records import ProcessId

MIB = 1 << 20
A, B = instance_id(1), instance_id(2)


def peer(pid: int = 7, number: int = 1, uid: int = 1000) -> Peer:
    return Peer(number, ProcessId(pid, 1), "host", "host", uid=uid)


@pytest.fixture
def directory() -> Directory:
    return Directory(ServerConfig(), FakeClock())


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
    directory: Directory, instance: m.InstanceId, owner: Peer, each: int, lead: int = 0, ranks: int = 1, blocks: int = 10_000
) -> None:
    directory.residents.open(owner, m.Join(instance, NAMESPACE, blocks, ranks, each, lead))


def publish(
    directory: Directory, instance: m.InstanceId, each: int, lead: int, chunks: int, start: int = 0, sequence: int = 1
) -> int:
    """A chunk is in blocks of its own, as far as its lead goes."""
    taken, at_once = 0, 16
    for first in range(start, start + chunks, at_once):
        blocks = b"".join(
            numbers(*range(n * lead, (n + 1) * lead)) + bytes(4 * (each - lead)) for n in range(first, first + at_once)
        )
        generations = chunk_generations(300, at_once, each)
        taken += directory.residents.publish(0, m.Publish(instance, sequence, keys(at_once, start=first), blocks, generations))
    return taken


SHAPES = {"blocks behind the lead": (1024, 1, 1), "a block a chunk": (1, 1, 1), "chunks that wait for another rank": (256, 1, 2)}


@pytest.mark.parametrize(("each", "lead", "ranks"), SHAPES.values(), ids=SHAPES)
def test_what_all_publish_is_bounded_in_bytes(
    directory: Directory, monkeypatch: pytest.MonkeyPatch, each: int, lead: int, ranks: int
) -> None:
    monkeypatch.setattr(residents, "MAX_BYTES", 6 * MIB, raising=False)
    directory = Directory(ServerConfig(), FakeClock())
    with grows_by_less_than(6 * MIB):
        for number in range(3):
            join(directory, instance_id(number), peer(number + 1), each, lead, ranks)
            publish(directory, instance_id(number), each, lead, 9984)


def publish_and_retract(directory: Directory) -> None:
    for sequence in range(1, 60):
        publish(directory, A, 256, 1, 64, sequence=sequence)
        directory.residents.retract(A, sequence + 1)


def retract_old_ones(directory: Directory) -> None:
    publish(directory, A, 1, 1, 4096, start=16, sequence=1000)
    for sequence in range(1, 200):
        publish(directory, A, 1, 1, 16, sequence=sequence)
        directory.residents.retract(A, sequence + 1)


def clear_nothing(directory: Directory) -> None:
    for _ in range(20_000):
        directory.clear(b"")


def join_anew(directory: Directory) -> None:
    for ranks in range(60):
        join(directory, A, peer(), 256, 1, 1 + ranks % 2, 10_000)
        publish(directory, A, 256, 1, 64)


@pytest.mark.parametrize("does", [publish_and_retract, retract_old_ones, clear_nothing, join_anew])
def test_what_is_void_counts_until_it_is_out_of_memory(
    monkeypatch: pytest.MonkeyPatch, does: Callable[[Directory], None]
) -> None:
    """A client that is faster than the server's backlog."""
    monkeypatch.setattr(residents, "MAX_BYTES", 6 * MIB, raising=False)
    directory = Directory(ServerConfig(), FakeClock())
    with grows_by_less_than(6 * MIB):
        join(directory, A, peer(), 256 if does is not retract_old_ones else 1, 1)
        does(directory)
    while directory.backlog:
        directory.go_on(1000)
    directory.residents.close(A)
    while directory.backlog:
        directory.go_on(1000)
    assert directory.residents.shares.taken == 0


def test_whatever_some_publish_there_is_room_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(residents, "MAX_BYTES", 4 * MIB, raising=False)
    directory = Directory(ServerConfig(), FakeClock())
    for number in range(1, 5):
        join(directory, instance_id(number), peer(1 + number % 2), 64, 1, blocks=1000)
        assert 0 < publish(directory, instance_id(number), 64, 1, 992)
    join(directory, instance_id(9), peer(9), 64, 1, blocks=1000)
    assert publish(directory, instance_id(9), 64, 1, 320) == 320
    assert publish(directory, instance_id(1), 64, 1, 992, sequence=2) > 0, "new ones take the place of old ones"


# ---- what they reserve


def test_slots_count_until_they_are_free_whatever_has_become_of_their_writer() -> None:
    """A client that reserves, hangs up and comes back; one that leases chunks and removes them."""
    directory = Directory(ServerConfig(max_chunks=1000), FakeClock())
    directory.add_segment(m.SegmentInfo(m.SegmentId("s"), "host", "host", 16 * MIB))
    slots = 0
    for number in range(1, 6):
        client = peer(number=number)
        reserved = directory.reserve(client, keys(600, start=1000 * number), 256)
        slots += sum(isinstance(slot, m.Location) for slot in reserved.slots)
        if number == 1:
            directory.commit(client, reserved.reservation, [])
            directory.acquire(client, keys(600, start=1000))
            directory.remove(keys(600, start=1000))
        else:
            directory.disconnect(client)
    assert slots == 1000
