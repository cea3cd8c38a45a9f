"""The directory by example, on a fake clock: what a worker, a scheduler and an operator may rely
on.
"""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from model import FakeClock, chunk_key

from vcache_backend.config import ServerConfig
from vcache_backend.metadata_server.ledger import Ledger
from vcache_backend.metadata_server.pool import backlog, leases, reservations, segments
from vcache_backend.metadata_server.pool.directory import Directory
from vcache_backend.metadata_server.pool.placement import MAX_SEARCH, Peer
from vcache_backend.metadata_server.pool.reservations import CLAIM_SECONDS
from vcache_backend.metadata_server.records import LedgerState, ProcessId, SegmentAdded
from vcache_backend.metadata_server.succession import Predecessors
from vcache_backend.protocol import messages as m

KIB = 1 << 10
A, B, C, D, E = (chunk_key(n) for n in range(5))
WRITER = Peer(1, ProcessId(11, 5), "gpu-0", "cuda")
READER = Peer(2, ProcessId(22, 5), "gpu-1", "cuda")
OTHER = Peer(3, ProcessId(33, 5), "gpu-2", "cuda")


def make(clock: FakeClock, **limits: Any) -> Directory:
    return Directory(ServerConfig(**limits), clock)


def lend(
    directory: Directory,
    name: str = "s0",
    chunks: int = 4,
    device: str = "gpu-0",
    medium: str = "cuda",
) -> m.SegmentId:
    """A segment with room for so many chunks of 1 KiB."""
    directory.add_segment(m.SegmentInfo(m.SegmentId(name), device, medium, chunks * KIB))
    return m.SegmentId(name)


def put(
    directory: Directory, *keys: m.ChunkKey, client: Peer = WRITER, nbytes: int = KIB
) -> m.Reserved:
    """Store chunks as a worker does."""
    reserved = directory.reserve(client, list(keys), nbytes)
    places = sum(isinstance(slot, m.Location) for slot in reserved.slots)
    assert directory.commit(client, reserved.reservation, []) == places
    return reserved


def there(directory: Directory, *keys: m.ChunkKey) -> list[m.ChunkKey]:
    present = zip(keys, directory.contains(list(keys)), strict=True)
    return [key for key, found in present if found]


def used(directory: Directory, segment: str = "s0") -> int:
    return next(info.used for info in directory.segment_infos() if info.id == segment)


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def directory(clock: FakeClock) -> Directory:
    """One segment of four 1-KiB chunks on the writer's device; leases 10 s, reservations 30 s."""
    directory = make(clock)
    lend(directory)
    return directory


# ---- what one client may have


def test_reservations_are_bounded(directory: Directory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reservations, "MAX_RESERVATIONS_PER_CLIENT", 2)
    first = directory.reserve(WRITER, [A], KIB)
    directory.reserve(WRITER, [B], KIB)
    refused = directory.reserve(WRITER, [C], KIB)
    assert refused.slots == [m.Refusal.FULL]
    assert "commit some" in refused.reason
    assert isinstance(directory.reserve(READER, [C], KIB).slots[0], m.Location)
    directory.abort(WRITER, first.reservation)
    assert isinstance(directory.reserve(WRITER, [D], KIB).slots[0], m.Location)


def test_what_is_written_is_bounded(directory: Directory, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clear goes through all of it in one turn."""
    monkeypatch.setattr(segments, "MAX_WRITTEN", 2, raising=False)
    directory.reserve(WRITER, [A, B], KIB)
    directory.disconnect(WRITER)
    refused = directory.reserve(READER, [C], KIB)
    assert refused.slots == [m.Refusal.FULL]
    assert "in quarantine" in refused.reason
    directory.process_gone(WRITER.process)
    assert isinstance(directory.reserve(READER, [C], KIB).slots[0], m.Location)


@pytest.mark.parametrize(
    ("name", "limit"), [("MAX_LEASES_PER_CLIENT", 2), ("MAX_LEASED_PER_CLIENT", 5)]
)
def test_leases_of_one_client_and_the_chunks_under_them_are_bounded(
    directory: Directory, monkeypatch: pytest.MonkeyPatch, name: str, limit: int
) -> None:
    monkeypatch.setattr(leases, name, limit)
    put(directory, A, B)
    first, _, third = [directory.acquire(READER, [A, B]).lease for _ in range(3)]
    assert third == 0
    assert directory.acquire(OTHER, [A, B]).lease != 0
    directory.leases.release(first)
    assert directory.acquire(READER, [A, B]).lease != 0


# ---- placement


def test_media_do_not_mix(clock: FakeClock) -> None:
    directory = make(clock)
    lend(directory, "host", 4, "host", "host")
    refused = directory.reserve(WRITER, [A], KIB)
    assert refused.slots == [m.Refusal.NO_SEGMENT]
    assert "vcache segment add" in refused.reason
    lend(directory, "gpu", 1, "gpu-0")
    put(directory, A)
    put(directory, B)
    assert used(directory, "host") == 0


def test_a_worker_gets_no_slot_in_a_segment_that_it_cannot_map(directory: Directory) -> None:
    refused = directory.reserve(msgspec.structs.replace(WRITER, avoids={"s0"}), [A], KIB)
    assert refused.slots == [m.Refusal.NO_SEGMENT]
    assert "this worker cannot map any cuda segment of the pool" in refused.reason


def test_a_large_chunk_finds_room_though_the_coldest_ones_end_the_segment(clock: FakeClock) -> None:
    """The 80 coldest of 200 small chunks lie at the end: the run that makes room starts before all
    of them.
    """
    directory = make(clock)
    lend(directory, chunks=200)
    keys = [chunk_key(100 + n) for n in range(200)]
    for key in keys:
        put(directory, key)
    directory.touch(keys[:120])
    assert isinstance(directory.reserve(WRITER, [A], 100 * KIB).slots[0], m.Location)


# ---- the work of a turn


def filled(directory: Directory, count: int) -> list[m.ChunkKey]:
    """So many chunks of 1 KiB in a segment of their own, which they fill."""
    lend(directory, chunks=count)
    keys = [chunk_key(n) for n in range(count)]
    for at in range(0, count, m.MAX_SLOTS):
        put(directory, *keys[at : at + m.MAX_SLOTS])
    return keys


def work_of(what: Callable[[], object]) -> int:
    """How many calls of functions it makes."""
    calls = 0

    def count(frame: object, event: str, arg: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        what()
    finally:
        sys.setprofile(None)
    return calls


MANY = 10_000
A_TURN = 40 * backlog.AT_ONCE


def clear(directory: Directory, clock: FakeClock) -> Callable[[], object]:
    return lambda: directory.clear(b"")


def drop_the_segment(directory: Directory, clock: FakeClock) -> Callable[[], object]:
    return lambda: directory.drop_segment(m.SegmentId("s0"))


def lose_the_writer(directory: Directory, clock: FakeClock) -> Callable[[], object]:
    for n in range(8):
        keys = [chunk_key(MANY + n * m.MAX_SLOTS + i) for i in range(m.MAX_SLOTS)]
        directory.reserve(OTHER, keys, KIB)
    directory.disconnect(OTHER)
    assert directory.reservations.counts() == (0, 8)
    directory.clear(b"")
    return lambda: directory.process_gone(OTHER.process)


@pytest.mark.parametrize("job", [clear, drop_the_segment, lose_the_writer])
def test_what_takes_long_is_begun_at_once_and_done_in_later_turns(
    clock: FakeClock, job: Callable[[Directory, FakeClock], Callable[[], object]]
) -> None:
    directory = make(clock)
    keys = filled(directory, MANY)
    begin = job(directory, clock)
    assert work_of(begin) <= A_TURN
    assert sum(info.used for info in directory.segment_infos()) > MANY * KIB // 2
    turns = 0
    while directory.backlog:
        assert work_of(lambda: directory.backlog.run(backlog.AT_ONCE)) <= A_TURN
        turns += 1
    assert turns >= 8
    assert (len(directory), there(directory, *keys)) == (0, [])
    assert directory.find(m.Find(keys)).pooled == b""
    assert sum(info.used for info in directory.segment_infos()) == 0
    assert directory.reservations.counts() == (0, 0)


def test_a_segment_of_many_chunks_comes_back_in_several_turns(clock: FakeClock) -> None:
    """What is not found yet gives way to what is stored anew."""
    directory, state = make(clock), LedgerState()
    keys = filled(directory, MANY)
    for record in directory.records:
        state.apply(record)
    again = make(clock)
    deque(again.restore(state), 0)
    clock.advance(m.GRACE_SECONDS)
    lend(again, "s1", device="gpu-1")
    anew = again.reserve(READER, [keys[MANY // 2]], KIB)
    info = m.SegmentInfo(m.SegmentId("s0"), "gpu-0", "cuda", MANY * KIB)
    assert work_of(lambda: again.add_segment(info)) <= A_TURN
    assert 0 < len(again) < MANY // 2
    late = keys[0] if not there(again, keys[0]) else keys[-1]
    new = put(again, late, client=READER)
    while again.backlog:
        assert work_of(lambda: again.backlog.run(backlog.AT_ONCE)) <= A_TURN
    assert again.commit(READER, anew.reservation, []) == 1
    assert len(again) == MANY
    found = again.acquire(READER, [late, keys[MANY // 2]])
    assert found.locations == new.slots + anew.slots
    assert used(again) == (MANY - 2) * KIB


def test_leases_of_gone_clients_end_in_several_looks_at_the_clock(clock: FakeClock) -> None:
    directory = make(clock)
    keys = filled(directory, 512)
    for _ in range(100):
        directory.acquire(READER, keys)
    directory.disconnect(READER)
    while directory.backlog:
        assert work_of(lambda: directory.backlog.run(backlog.AT_ONCE)) <= A_TURN
    assert len(directory.leases) == 100
    clock.advance(m.GRACE_SECONDS)
    left = [100]
    while left[-1]:
        assert work_of(directory.tick) <= A_TURN
        left.append(len(directory.leases))
        assert left[-1] < left[-2], "each look ends some"
    assert len(left) > 20
    assert directory.segment_infos()[0].leased == 0


def test_a_renewed_lease_outlives_its_connection(directory: Directory, clock: FakeClock) -> None:
    put(directory, A, B)
    renewed, other = directory.acquire(READER, [A]).lease, directory.acquire(READER, [B]).lease
    directory.disconnect(READER)
    assert directory.leases.renew(renewed)
    directory.backlog.run(1000)
    clock.advance(m.GRACE_SECONDS)
    assert (directory.leases.release(renewed), directory.leases.release(other)) == (True, False)


def test_room_for_one_large_chunk_is_not_made_of_any_number_of_small_ones(clock: FakeClock) -> None:
    directory = make(clock)
    filled(directory, MANY)
    refused: list[m.Reserved] = []
    new = m.ChunkKey(A[:8] + b"x" * 18)
    assert work_of(lambda: refused.append(directory.reserve(WRITER, [new], MANY * KIB))) <= A_TURN
    assert refused[0].slots == [m.Refusal.FULL]
    assert f"more than {MAX_SEARCH:,} would have to go at once" in refused[0].reason
    assert len(directory) == MANY


# ---- segments


def test_of_several_who_start_at_once_one_makes_the_memory(directory: Directory) -> None:
    beside = msgspec.structs.replace(OTHER, device=WRITER.device)
    assert directory.lend(WRITER, 4 * KIB) == 0, "it is there"
    assert directory.lend(WRITER, 10 * KIB) == 6 * KIB
    assert directory.lend(beside, 10 * KIB) == 0, "somebody is about to make it"
    assert directory.lend(READER, 10 * KIB) == 10 * KIB, "another device"
    assert directory.lend(beside, 12 * KIB) == 2 * KIB, "who wants more makes the rest"
    directory.claims.end(WRITER.id)
    assert directory.lend(beside, 10 * KIB) == 6 * KIB, "nobody makes it any more"


def test_a_claim_ends_with_its_time_or_connection(directory: Directory, clock: FakeClock) -> None:
    beside = msgspec.structs.replace(OTHER, device=WRITER.device)
    assert directory.lend(WRITER, 10 * KIB) == 6 * KIB
    clock.advance(CLAIM_SECONDS + 1)
    assert directory.lend(beside, 10 * KIB) == 6 * KIB
    assert directory.lend(WRITER, 10 * KIB) == 0
    directory.disconnect(beside)
    assert directory.lend(WRITER, 10 * KIB) == 6 * KIB


def test_a_long_ledger_is_read_in_several_turns(clock: FakeClock) -> None:
    """Others are answered between them. Its client and other ledgers wait for the end."""
    directory, again = make(clock), make(clock)
    keys = filled(directory, MANY)
    ledger = Ledger(77)
    ledger.write(directory.records, directory.still)
    client = os.dup(ledger.fd)
    ledger.close()
    predecessors = Predecessors(again, 78, 60.0)
    assert work_of(lambda: predecessors.hear(client)) <= A_TURN
    turns = 0
    while again.backlog:
        assert not predecessors.hear(client)
        assert again.contains(keys[:1]) == [False]
        assert work_of(lambda: again.backlog.run(backlog.AT_ONCE)) <= A_TURN
        turns += 1
    assert turns > MANY // (2 * backlog.AT_ONCE)
    assert predecessors.hear(client)
    info = m.SegmentInfo(m.SegmentId("s0"), "gpu-0", "cuda", MANY * KIB)
    assert again.add_segment(info) == MANY
    os.close(client)


def test_memory_that_may_be_offered_again_is_not_made_anew(clock: FakeClock) -> None:
    directory = make(clock)
    added = SegmentAdded(m.SegmentId("s0"), WRITER.device, WRITER.medium, 4 * KIB)
    deque(directory.restore(LedgerState(segments={m.SegmentId("s0"): added})), 0)
    assert directory.lend(WRITER, 4 * KIB) == 0
    directory.forget_absent()
    assert directory.lend(WRITER, 4 * KIB) == 4 * KIB
