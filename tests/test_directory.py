"""The directory by example, on a fake clock: what a worker, a scheduler and an operator may rely on."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from model import FakeClock, chunk_key

from vcache_backend.metadata_server import backlog
from vcache_backend.metadata_server import messages as m
from vcache_backend.metadata_server.directory import Directory, Limits
from vcache_backend.metadata_server.placement import MAX_SEARCH, Peer
from vcache_backend.metadata_server.records import Gone, JournalState, Live, ProcessId, Record, SegmentAdded
from vcache_backend.metadata_server.reservations import CLAIM_SECONDS, ROUNDING_BYTES
from vcache_backend.metadata_server.snapshot import SLICE

KIB = 1 << 10
A, B, C, D, E = (chunk_key(n) for n in range(5))
WRITER = Peer(1, ProcessId(11, 5), "gpu-0", "cuda")
READER = Peer(2, ProcessId(22, 5), "gpu-1", "cuda")
OTHER = Peer(3, ProcessId(33, 5), "gpu-2", "cuda")


def make(clock: FakeClock, **limits: float) -> Directory:
    return Directory(Limits(**limits), clock)


def lend(directory: Directory, name: str = "s0", chunks: int = 4, device: str = "gpu-0", medium: str = "cuda") -> m.SegmentId:
    """A segment with room for so many chunks of 1 KiB."""
    directory.add_segment(m.SegmentInfo(m.SegmentId(name), device, medium, chunks * KIB))
    return m.SegmentId(name)


def put(directory: Directory, *keys: m.ChunkKey, client: Peer = WRITER, nbytes: int = KIB) -> m.Reserved:
    """Store chunks as a worker does."""
    reserved = directory.reserve(client, list(keys), nbytes)
    assert directory.commit(client, reserved.reservation, []) == sum(isinstance(slot, m.Location) for slot in reserved.slots)
    return reserved


def there(directory: Directory, *keys: m.ChunkKey) -> list[m.ChunkKey]:
    return [key for key, present in zip(keys, directory.contains(list(keys)), strict=True) if present]


def places(leased: m.Leased | m.Reserved) -> list[tuple[str, int]]:
    slots = leased.locations if isinstance(leased, m.Leased) else leased.slots
    return [(slot.segment, slot.offset) for slot in slots if isinstance(slot, m.Location)]


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


# ---- the order of eviction


def test_commit_makes_the_prefix_as_recent_as_its_continuation(directory: Directory) -> None:
    put(directory, A)
    put(directory, D)
    reserved = directory.reserve(WRITER, [B], KIB)
    directory.commit(WRITER, reserved.reservation, [A])
    put(directory, C)
    put(directory, E)
    assert there(directory, A, B, C, D, E) == [A, B, C, E]


# ---- reservations that go wrong


def test_reservations_of_one_client_are_bounded(directory: Directory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vcache_backend.metadata_server.reservations.MAX_RESERVATIONS_PER_CLIENT", 2)
    first = directory.reserve(WRITER, [A], KIB)
    directory.reserve(WRITER, [B], KIB)
    refused = directory.reserve(WRITER, [C], KIB)
    assert refused.slots == [m.Refusal.FULL]
    assert "commit or abort some" in refused.reason
    assert isinstance(directory.reserve(READER, [C], KIB).slots[0], m.Location)
    directory.abort(WRITER, first.reservation)
    assert isinstance(directory.reserve(WRITER, [D], KIB).slots[0], m.Location)


# ---- leases


def test_a_lease_shorter_than_the_grace_gets_no_longer_by_losing_its_connection(clock: FakeClock) -> None:
    directory = make(clock, lease_seconds=m.GRACE_SECONDS / 2)
    lend(directory)
    put(directory, A, B, C, D)
    directory.acquire(READER, [A, B, C, D])
    directory.disconnect(READER)
    clock.advance(m.GRACE_SECONDS / 2)
    directory.tick()
    assert len(places(directory.reserve(WRITER, [E], KIB))) == 1


def test_leases_of_one_client_are_bounded(directory: Directory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vcache_backend.metadata_server.leases.MAX_LEASES_PER_CLIENT", 2)
    put(directory, A)
    leases = [directory.acquire(READER, [A]).lease for _ in range(3)]
    assert leases[2] == 0
    directory.release(leases[0])
    assert directory.acquire(READER, [A]).lease != 0


# ---- tensor parallelism and namespaces


def test_a_prefix_counts_only_when_every_rank_has_it(directory: Directory) -> None:
    ranks = [[chunk_key(n, rank) for n in range(2)] for rank in range(2)]
    put(directory, *ranks[0])
    assert directory.lookup(ranks[0], ranks=1) == 2
    assert directory.lookup(ranks[0], ranks=2) == 0
    put(directory, ranks[1][0])
    assert directory.lookup(ranks[0], ranks=2) == 1
    put(directory, ranks[1][1])
    assert directory.lookup(ranks[0], ranks=2) == 2


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


def test_a_chunk_larger_than_every_segment_is_refused_with_the_size_it_needs(directory: Directory) -> None:
    refused = directory.reserve(WRITER, [A, B], 5 * KIB)
    assert refused.slots == [m.Refusal.TOO_LARGE] * 2
    assert "5,120 B" in refused.reason
    assert "4,096 B" in refused.reason
    assert "pool.segment_bytes >= 5120" in refused.reason


def test_a_larger_chunk_evicts_a_contiguous_run(directory: Directory) -> None:
    put(directory, A, B, C, D)
    directory.touch([A])
    assert places(put(directory, E, nbytes=2 * KIB)) == [("s0", 2 * KIB)]
    assert there(directory, A, B, C, D, E) == [A, B, E]
    assert directory.segment_infos()[0].evictions == 2


def test_a_large_chunk_finds_room_though_the_coldest_small_ones_end_the_segment(clock: FakeClock) -> None:
    """The 80 coldest of 200 small chunks lie at the end: the run that makes room starts before all of them."""
    directory = make(clock)
    lend(directory, chunks=200)
    keys = [chunk_key(100 + n) for n in range(200)]
    for key in keys:
        put(directory, key)
    directory.touch(keys[:120])
    assert isinstance(directory.reserve(WRITER, [A], 100 * KIB).slots[0], m.Location)


# ---- the work of a turn


def filled(directory: Directory, count: int, medium: str = "cuda", name: str = "s0", first: int = 0) -> list[m.ChunkKey]:
    """So many chunks of 1 KiB in a segment of their own, which they fill."""
    client = Peer(1, ProcessId(11, 5), "host" if medium == "host" else "gpu-0", medium)
    lend(directory, name, count, client.device, medium)
    keys = [chunk_key(first + n) for n in range(count)]
    for at in range(0, count, m.MAX_SLOTS):
        put(directory, *keys[at : at + m.MAX_SLOTS], client=client)
    directory.records.clear()
    return keys


def work_of(directory: Directory, what: Callable[[], Any]) -> int:
    """How many entries it touched; roughly, and journal records tell no more."""
    directory.records.clear()
    before = directory.work
    what()
    told = sum(len(record.keys) for record in directory.records if isinstance(record, Gone))
    directory.records.clear()
    work = directory.work - before
    assert told <= work
    return work


MANY = 20_000
A_TURN = 3 * backlog.AT_ONCE


def turns(directory: Directory) -> int:
    """Go on until nothing is left to do, no turn too long; how many turns that took."""
    count = 0
    while directory.unfinished:
        assert work_of(directory, lambda: directory.go_on(backlog.AT_ONCE)) <= A_TURN
        count += 1
    return count


@pytest.mark.parametrize("namespace", [b"", b"namespac"])
def test_what_is_cleared_is_gone_at_once_and_its_slots_come_back_in_later_turns(clock: FakeClock, namespace: bytes) -> None:
    directory = make(clock)
    keys = filled(directory, MANY)
    jobs: list[backlog.Task] = []
    assert work_of(directory, lambda: jobs.append(directory.clear(namespace))) <= A_TURN
    assert (len(directory), directory.lookup(keys), there(directory, *keys)) == (0, 0, [])
    assert directory.acquire(READER, keys[:5]) == m.Leased(0, 0.0, [])
    assert used(directory) > MANY * KIB // 2
    again = put(directory, *keys[:10])
    assert turns(directory) >= MANY // backlog.AT_ONCE - 2
    assert jobs[0].count == MANY
    assert directory.acquire(READER, keys).locations == again.slots
    assert used(directory) == 10 * KIB


def test_two_jobs_share_the_turns(clock: FakeClock) -> None:
    directory = make(clock)
    filled(directory, MANY)
    few = [chunk_key(n, namespace=b"another!") for n in range(2 * backlog.AT_ONCE)]
    lend(directory, "s1", len(few), "gpu-0")
    put(directory, *few)
    long = directory.clear(b"namespac")
    short = directory.clear(b"another!")
    for _ in range(4):
        directory.go_on(backlog.AT_ONCE)
    assert short.done
    assert not long.done


def test_a_segment_of_many_chunks_is_dropped_in_several_turns(clock: FakeClock) -> None:
    directory = make(clock)
    filled(directory, MANY)
    jobs: list[backlog.Task] = []
    assert work_of(directory, lambda: jobs.append(directory.drop_segment(m.SegmentId("s0")))) <= A_TURN
    assert directory.segment_infos()[0].state == "draining"
    turns(directory)
    assert jobs[0].count == MANY
    assert directory.segment_infos() == []


def test_the_leases_of_a_client_that_is_gone_end_in_several_turns(clock: FakeClock) -> None:
    directory = make(clock)
    keys = filled(directory, 512)
    for _ in range(100):
        directory.acquire(READER, keys)
    clock.advance(m.GRACE_SECONDS)
    assert work_of(directory, lambda: directory.disconnect(READER)) <= A_TURN
    assert len(directory.leases) > 0
    assert turns(directory) <= 100
    assert len(directory.leases) == directory.segment_infos()[0].leased == 0


def test_the_slots_of_a_process_that_is_gone_come_back_in_several_turns(clock: FakeClock) -> None:
    directory = make(clock)
    lend(directory, chunks=8 * m.MAX_SLOTS)
    for n in range(8):
        directory.reserve(WRITER, [chunk_key(n * m.MAX_SLOTS + i) for i in range(m.MAX_SLOTS)], KIB)
    full = used(directory)
    directory.disconnect(WRITER)
    assert directory.reservations.counts() == (0, 8)
    assert directory.reservations.slots == 0
    assert work_of(directory, lambda: directory.process_gone(WRITER.process)) <= A_TURN
    assert full // 2 < used(directory) < full
    turns(directory)
    assert used(directory) == 0
    assert directory.reservations.counts() == (0, 0)
    assert put(directory, chunk_key(0)).reservation


def test_leases_that_run_out_together_let_go_in_several_turns(clock: FakeClock) -> None:
    directory = make(clock)
    keys = filled(directory, 8192)
    directory.acquire(READER, keys)
    directory.remove(keys)
    clock.advance(10)
    assert work_of(directory, directory.tick) <= A_TURN
    assert 0 < turns(directory) <= 8
    assert used(directory) == 0


def test_a_lease_ends_in_time_however_many_were_released_before(clock: FakeClock) -> None:
    directory = make(clock)
    keys = filled(directory, 2)
    for _ in range(5000):
        assert directory.release(directory.acquire(READER, keys[:1]).lease)
    directory.acquire(READER, keys)
    clock.advance(10)
    directory.tick()
    assert len(directory.leases) == 0


def test_leased_chunks_of_one_client_are_bounded(directory: Directory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vcache_backend.metadata_server.leases.MAX_LEASED_PER_CLIENT", 3)
    put(directory, A, B)
    first = directory.acquire(READER, [A, B])
    assert directory.acquire(READER, [A, B]).lease == 0
    assert directory.acquire(OTHER, [A, B]).lease != 0
    directory.release(first.lease)
    assert directory.acquire(READER, [A, B]).lease != 0


def test_victims_of_one_medium_are_not_looked_for_behind_those_of_another(clock: FakeClock) -> None:
    directory = make(clock)
    filled(directory, MANY, "cuda")
    filled(directory, 8, "host", "s1", first=MANY)
    client = Peer(9, ProcessId(99, 1), "host", "host")
    assert work_of(directory, lambda: put(directory, chunk_key(MANY + 100), client=client)) < 20
    assert len(directory) == MANY + 8


def test_chunks_in_use_before_those_that_may_go_are_met_once(clock: FakeClock) -> None:
    directory = make(clock)
    keys = filled(directory, MANY)
    held = keys[m.MAX_SLOTS : 2 * m.MAX_SLOTS]
    directory.acquire(READER, held)
    directory.touch([key for key in keys if key not in set(held)])
    first, second = (chunk_key(MANY + n) for n in range(2))
    assert work_of(directory, lambda: put(directory, first)) > m.MAX_SLOTS // 8
    assert work_of(directory, lambda: put(directory, second)) < 20
    assert len(there(directory, *held)) == len(held)


def test_a_search_among_chunks_in_use_ends_and_the_next_one_goes_on(clock: FakeClock) -> None:
    directory = make(clock)
    keys = filled(directory, MANY)
    held = keys[: MAX_SEARCH + 1000]
    for at in range(0, len(held), m.MAX_KEYS):
        directory.acquire(READER, held[at : at + m.MAX_KEYS])
    directory.touch(keys[len(held) :])
    new = chunk_key(MANY)
    assert directory.reserve(WRITER, [new], KIB).slots == [m.Refusal.FULL]
    assert len(places(directory.reserve(WRITER, [new], KIB))) == 1


def test_room_for_one_large_chunk_is_not_made_of_any_number_of_small_ones(clock: FakeClock) -> None:
    directory = make(clock)
    filled(directory, MANY)
    refused: list[m.Reserved] = []
    assert (
        work_of(directory, lambda: refused.append(directory.reserve(WRITER, [A[:8] + b"x" * 18], MANY * KIB))) <= 2 * MAX_SEARCH
    )
    assert refused[0].slots == [m.Refusal.FULL]
    assert f"more than {MAX_SEARCH:,} of them would have to go at once" in refused[0].reason
    assert len(directory) == MANY


def test_a_snapshot_is_made_of_bounded_pieces(clock: FakeClock) -> None:
    directory = make(clock)
    keys = filled(directory, MANY)
    told: list[m.ChunkKey] = []
    for record in directory.snapshot():
        if isinstance(record, Live):
            assert len(record.keys) <= SLICE
            told += record.keys
            directory.touch(keys[: SLICE // 2])
    assert sorted(told) == keys


# ---- removal


def test_only_a_forced_removal_takes_what_is_leased(directory: Directory, clock: FakeClock) -> None:
    put(directory, A, B, C)
    directory.acquire(READER, [A, B])
    assert directory.remove([A, B, C, E], force=False) == 1
    assert directory.remove([B]) == 1
    clock.advance(11)
    assert directory.remove([A, B], force=False) == 1


# ---- segments


def test_of_several_who_start_at_once_one_makes_the_memory(directory: Directory, clock: FakeClock) -> None:
    beside = msgspec.structs.replace(OTHER, device=WRITER.device)
    assert directory.lend(WRITER, 4 * KIB).nbytes == 0, "it is there"
    claim = directory.lend(WRITER, 10 * KIB)
    assert claim.nbytes == 6 * KIB
    assert directory.lend(beside, 10 * KIB).nbytes == 0, "somebody is about to make it"
    assert directory.lend(READER, 10 * KIB).nbytes == 10 * KIB, "another device"
    assert directory.lend(beside, 12 * KIB).nbytes == 2 * KIB, "who wants more makes the rest"
    assert directory.redeem(WRITER, claim.claim, WRITER.device, 6 * KIB)
    assert not directory.redeem(WRITER, claim.claim, WRITER.device, 6 * KIB), "once"


def test_a_claim_ends_with_its_time_and_with_its_connection(directory: Directory, clock: FakeClock) -> None:
    beside = msgspec.structs.replace(OTHER, device=WRITER.device)
    late = directory.lend(WRITER, 10 * KIB)
    clock.advance(CLAIM_SECONDS + 1)
    lost = directory.lend(beside, 10 * KIB)
    assert lost.nbytes == 6 * KIB
    assert not directory.redeem(WRITER, late.claim, WRITER.device, 6 * KIB)
    directory.disconnect(beside)
    again = directory.lend(WRITER, 10 * KIB)
    assert again.nbytes == 6 * KIB
    assert not directory.redeem(beside, lost.claim, WRITER.device, 6 * KIB)
    assert not directory.redeem(WRITER, again.claim, WRITER.device, 6 * KIB + ROUNDING_BYTES + 1), "more than was claimed"


def test_memory_that_may_be_offered_again_is_not_made_anew(clock: FakeClock) -> None:
    directory, added = make(clock), SegmentAdded(m.SegmentId("s0"), WRITER.device, WRITER.medium, 4 * KIB)
    directory.restore(JournalState(segments={m.SegmentId("s0"): added}))
    assert directory.lend(WRITER, 4 * KIB).nbytes == 0
    directory.forget_absent([m.SegmentId("s0")])
    assert directory.lend(WRITER, 4 * KIB).nbytes == 4 * KIB


# ---- restart


def replayed(directory: Directory) -> JournalState:
    """What a journal of everything that happened so far tells, through its encoding."""
    state = JournalState()
    decoder = msgspec.msgpack.Decoder(Record)
    for record in directory.records:
        state.apply(decoder.decode(msgspec.msgpack.encode(record)))
    return state


def restarted(directory: Directory, clock: FakeClock, after: float = m.GRACE_SECONDS) -> Directory:
    """`after` seconds after its start."""
    state = replayed(directory)
    successor = Directory(Limits(), clock, first_id=1_000_000)
    successor.restore(state)
    clock.advance(after)
    return successor


S0 = m.SegmentInfo(m.SegmentId("s0"), "gpu-0", "cuda", 4 * KIB)


def test_a_restart_keeps_the_order(directory: Directory, clock: FakeClock) -> None:
    put(directory, C, D)
    put(directory, B, A)
    again = restarted(directory, clock)
    again.add_segment(S0)
    assert len(places(again.reserve(WRITER, [E], KIB))) == 1
    assert there(again, A, B, C, D) == [A, B, C]


def test_a_server_that_remembers_nothing_reserves_at_once(clock: FakeClock) -> None:
    """It is lent fresh memory only, which no reader of before knows."""
    directory = make(clock)
    directory.restore(JournalState())
    lend(directory)
    assert len(places(put(directory, A))) == 1


def test_absent_segments_are_told_of_without_a_look_at_their_chunks(clock: FakeClock) -> None:
    directory = make(clock)
    filled(directory, 1000)
    directory.records += directory.snapshot()
    again = restarted(directory, clock)
    calls: list[str] = []
    sys.setprofile(lambda frame, event, arg: calls.append(event))
    try:
        (info,) = again.segment_infos()
    finally:
        sys.setprofile(None)
    assert (info.state, info.chunks) == ("absent", 1000)
    assert len(calls) < 100


def test_a_segment_of_many_chunks_comes_back_in_several_turns(clock: FakeClock) -> None:
    """What is not found yet gives way to what is stored anew."""
    directory = make(clock)
    keys = filled(directory, MANY)
    directory.records += directory.snapshot()
    again, tasks = restarted(directory, clock), []
    lend(again, "s1", device="gpu-1")
    info = m.SegmentInfo(m.SegmentId("s0"), "gpu-0", "cuda", MANY * KIB)
    assert work_of(again, lambda: tasks.append(again.add_segment(info))) <= A_TURN
    assert 0 < len(again) < MANY // 2
    late = keys[0] if not there(again, keys[0]) else keys[-1]
    new = put(again, late, client=READER)
    turns(again)
    assert (tasks[0].count, len(again)) == (MANY - 1, MANY)
    assert again.acquire(READER, [late]).locations == new.slots
    assert used(again) == (MANY - 1) * KIB
