"""Saving below what is about to be evicted: who gets which chunks, which go first, and what is counted as lost."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from model import FakeClock, chunk_key
from processes import Stage, info, make_memfd, read_at, stage, write_at

from vcache_backend.errors import Refused
from vcache_backend.metadata_server.directory import Client, Directory, Limits
from vcache_backend.metadata_server.eviction import LRU
from vcache_backend.metadata_server.journal import ProcessId
from vcache_backend.metadata_server.messages import MAX_SAVE, ChunkKey, Location, Pin, SegmentId, SegmentInfo, ToSave
from vcache_backend.metadata_server.saving import LOOK_AHEAD, MAX_FORGOTTEN, MAX_SAVERS, SAVER_SECONDS

KIB = 1 << 10
SPACE = b"namespac"
KEYS = [chunk_key(n) for n in range(8)]
A, B, C, D, E, F, G, H = KEYS
NEW = [chunk_key(100 + n) for n in range(LOOK_AHEAD + 8)]
WORKER = Client(1, ProcessId(11, 5), "gpu-0", "cuda")
PEER = Client(2, ProcessId(22, 5), "gpu-1", "cuda")
NOTHING = ToSave(0, 0.0, [], [])


class Pool:
    """A directory with one segment on gpu-0 that `keys` fill; the first is the next to go. The coldest half is to be saved."""

    def __init__(self, keys: list[ChunkKey] = KEYS, room: int = 0, **limits: float) -> None:
        self.clock = FakeClock()
        self.directory = Directory(LRU(), Limits(**{"save_ahead": 0.5, **limits}), self.clock)
        self.lend("s0", len(keys) + room)
        self.put(keys)

    def lend(self, name: str, chunks: int, device: str = "gpu-0", medium: str = "cuda") -> None:
        self.directory.add_segment(SegmentInfo(SegmentId(name), device, medium, chunks * KIB))

    def put(self, keys: list[ChunkKey], client: Client = WORKER, nbytes: int = KIB) -> int:
        """Store chunks one after the other; how many found room."""
        return sum(self.put_one(key, client, nbytes) for key in keys)

    def put_one(self, key: ChunkKey, client: Client, nbytes: int) -> int:
        return self.directory.commit(client, self.directory.reserve(client, [key], nbytes).reservation, [])

    def save(self, limit: int = MAX_SAVE, client: Client = WORKER, space: bytes = SPACE, rank: int = 0) -> ToSave:
        return self.directory.save(client, space, rank, limit)

    def gone(self, keys: list[ChunkKey] = KEYS) -> list[ChunkKey]:
        return [key for key, there in zip(keys, self.directory.contains(keys), strict=True) if not there]

    def count(self, name: str) -> int:
        return self.directory.counters[name]


@pytest.fixture
def pool() -> Pool:
    return Pool()


# ---- which chunks are offered


def test_the_coldest_chunks_are_offered_under_a_lease_coldest_first(pool: Pool) -> None:
    offered = pool.save()
    assert (offered.keys, offered.seconds) == ([A, B, C, D], 10.0)
    assert offered.locations == pool.directory.acquire(PEER, [A, B, C, D]).locations
    assert pool.directory.release(WORKER, offered.lease) is True
    assert pool.count("save_offered") == 4


def test_free_room_counts_as_saved_and_an_empty_pool_copies_nothing() -> None:
    assert Pool(room=8).save() == NOTHING
    assert Pool(room=4).save().keys == [A, B]


def test_no_more_are_offered_than_were_asked_for(pool: Pool) -> None:
    assert pool.save(limit=3).keys == [A, B, C]


def test_a_share_smaller_than_a_chunk_offers_the_next_victim() -> None:
    assert Pool(save_ahead=0.01).save().keys == [A]
    assert Pool(save_ahead=0.0).save() == NOTHING


def test_only_chunks_of_the_namespace_and_the_rank_are_offered() -> None:
    mine, rank, space = chunk_key(1, 258), chunk_key(1, 2), chunk_key(1, 258, b"elsewher")
    pool = Pool([rank, space, mine, H], save_ahead=1.0)
    assert pool.save(rank=258).keys == [mine]
    assert pool.save(rank=2).keys == [rank]
    assert pool.save(rank=258, space=b"elsewher").keys == [space]
    assert pool.save(rank=1) == NOTHING


def test_hard_pinned_chunks_need_no_saving_and_soft_pinned_ones_come_last() -> None:
    pool = Pool([A, B, C, D], save_ahead=1.0)
    pool.directory.set_pin([A], Pin.HARD)
    pool.directory.set_pin([B], Pin.SOFT)
    assert pool.save().keys == [C, D, B]


def test_two_savers_get_different_chunks_while_the_lease_of_the_first_holds(pool: Pool) -> None:
    first = pool.save(limit=2)
    second = pool.save()
    assert (first.keys, second.keys) == ([A, B], [C, D])
    assert pool.save() == NOTHING
    pool.directory.release(WORKER, first.lease)
    assert pool.save().keys == [A, B], "not saved after all"
    pool.clock.advance(10.5)
    assert pool.save().keys == [A, B, C, D], "whoever had them never came back"


def test_a_saver_may_take_its_time_by_renewing_its_lease(pool: Pool) -> None:
    lease = pool.save().lease
    for _ in range(3):
        pool.clock.advance(6)
        assert pool.directory.renew(WORKER, lease)
        assert pool.save(client=PEER) == NOTHING


def test_what_is_saved_is_not_offered_again_until_it_was_replaced(pool: Pool) -> None:
    lease = pool.save().lease
    assert pool.directory.saved([A, B, A, chunk_key(99)]) == 2
    assert pool.directory.saved([A]) == 1
    pool.directory.release(WORKER, lease)
    lease = pool.save().lease
    assert pool.save() == NOTHING
    assert pool.count("saved") == 2
    pool.directory.release(WORKER, lease)
    pool.directory.remove([A])
    pool.put([A])
    pool.directory.touch(KEYS[1:])
    assert pool.save(limit=1).keys == [A]


def test_what_the_store_may_have_lost_is_offered_again(pool: Pool) -> None:
    """Of this namespace only, and what is saved after that counts again."""
    lease = pool.save().lease
    pool.directory.saved([A, B, C, D])
    pool.directory.release(WORKER, lease)
    pool.directory.unsaved(b"another!")
    assert pool.save() == NOTHING
    pool.directory.unsaved(SPACE)
    offered = pool.save()
    assert offered.keys == [A, B, C, D]
    pool.directory.saved([B])
    pool.directory.release(WORKER, offered.lease)
    assert pool.save().keys == [A, C, D]


def test_chunks_that_can_be_had_elsewhere_make_nothing_be_lost(pool: Pool) -> None:
    pool.directory.release(WORKER, pool.save().lease)
    spare = pool.directory.reserve(WORKER, NEW[:2], KIB, spare=True)
    assert (spare.reservation, pool.gone()) == (0, [])
    pool.directory.saved([C])
    assert pool.directory.reserve(WORKER, NEW[:2], KIB, spare=True).reservation
    assert (pool.gone(), pool.count("evicted_unsaved")) == ([C], 0)
    # Where nobody saves, nothing is lost by it that would not be lost anyway.
    pool.clock.advance(SAVER_SECONDS + 0.5)
    assert pool.directory.reserve(WORKER, NEW[2:3], KIB, spare=True).reservation
    assert pool.gone() == [A, C]


def test_saving_makes_nothing_recent(pool: Pool) -> None:
    pool.directory.release(WORKER, pool.save().lease)
    pool.directory.saved([A, B, C, D])
    pool.put(NEW[:2])
    assert pool.gone() == [A, B]


def test_a_removed_chunk_is_not_offered_though_its_slot_is_still_read(pool: Pool) -> None:
    pool.directory.acquire(PEER, [A, B, C, D])
    pool.directory.remove([A])
    assert A not in pool.save().keys


# ---- on which device


def test_a_chunk_on_another_device_is_left_to_a_saver_there() -> None:
    pool = Pool([A, B, C, D], save_ahead=1.0)
    pool.lend("s1", 2, "gpu-1")
    pool.put([E, F], PEER)
    assert pool.save(limit=1).keys == [A]
    assert pool.save(client=PEER).keys == [E, F], "A to D are on the device of a saver"
    assert pool.save().keys == [B, C, D]


@pytest.mark.parametrize("ends", ["hangs", "disconnects"])
def test_a_chunk_whose_device_has_no_saver_is_offered_to_any(pool: Pool, ends: str) -> None:
    assert pool.save(limit=1).keys == [A]
    assert pool.save(client=PEER) == NOTHING
    if ends == "hangs":
        pool.clock.advance(SAVER_SECONDS - 1)
        assert pool.save(client=PEER) == NOTHING
        pool.clock.advance(1.5)
    else:
        pool.clock.advance(1)
        pool.directory.disconnect(WORKER)
    assert pool.save(client=PEER).keys == [A, B, C, D]


def test_a_saver_of_another_rank_or_namespace_takes_nothing_away(pool: Pool) -> None:
    pool.save(rank=1)
    pool.save(space=b"elsewher")
    assert pool.save(client=PEER).keys == [A, B, C, D]


def test_the_share_is_that_of_the_memory_the_saver_stores_in() -> None:
    host = Client(3, ProcessId(33, 5), "host", "host")
    pool = Pool([A, B, C, D])
    pool.lend("h0", 100, "host", "host")
    pool.put([E], host)
    pool.directory.touch([A, B, C, D])
    assert pool.save().keys == [D, C]
    assert pool.save(client=host) == NOTHING


# ---- what is evicted


def test_a_chunk_is_not_evicted_while_it_is_saved_and_others_go_instead(pool: Pool) -> None:
    lease = pool.save(limit=2).lease
    assert pool.put(NEW[:2]) == 2
    assert pool.gone() == [C, D]
    assert pool.directory.release(WORKER, lease) is True
    pool.put(NEW[2:3])
    assert pool.gone() == [A, C, D]


def test_an_eviction_never_waits_for_a_saver(pool: Pool) -> None:
    pool.save()
    pool.clock.advance(10.5)
    pool.directory.tick()
    assert pool.put(NEW[:1]) == 1
    assert pool.gone() == [A]


def test_saved_chunks_go_before_unsaved_colder_ones_while_there_is_a_saver(pool: Pool) -> None:
    pool.directory.release(WORKER, pool.save().lease)
    pool.directory.saved([C, F])
    pool.put(NEW[:1])
    assert pool.gone() == [C]
    assert pool.directory.reserve(WORKER, NEW[1:3], KIB).reservation
    assert pool.gone() == [A, C, F]
    assert (pool.count("evicted"), pool.count("evicted_unsaved")) == (3, 1)


def test_without_a_saver_the_coldest_goes_and_nothing_counts_as_lost(pool: Pool) -> None:
    pool.directory.release(WORKER, pool.save().lease)
    pool.directory.saved([C])
    pool.clock.advance(SAVER_SECONDS + 0.5)
    pool.put(NEW[:1])
    assert pool.gone() == [A]
    assert (pool.count("evicted"), pool.count("evicted_unsaved")) == (1, 0)


def test_unsaved_chunks_of_a_namespace_nobody_saves_go_in_their_turn() -> None:
    other = chunk_key(1, 0, b"elsewher")
    pool = Pool([A, other, B, C])
    pool.directory.release(WORKER, pool.save().lease)
    pool.put(NEW[:1])
    assert pool.gone([A, other, B, C]) == [other]
    assert pool.count("evicted_unsaved") == 0


def test_soft_pinned_chunks_go_last_even_if_they_are_saved(pool: Pool) -> None:
    pool.directory.set_pin([A], Pin.SOFT)
    pool.directory.release(WORKER, pool.save().lease)
    pool.directory.saved([A])
    pool.put(NEW[:1])
    assert pool.gone() == [B]
    assert pool.count("evicted_unsaved") == 1


def test_only_so_many_unsaved_chunks_are_passed_over() -> None:
    keys = NEW[: LOOK_AHEAD + 2]
    for saved, victim in ((LOOK_AHEAD, LOOK_AHEAD), (LOOK_AHEAD + 1, 0)):
        pool = Pool(keys)
        pool.directory.release(WORKER, pool.save(limit=1).lease)
        pool.directory.saved([keys[saved]])
        pool.put([A])
        assert pool.gone(keys) == [keys[victim]]


def test_watermarks_prefer_saved_chunks_too() -> None:
    pool = Pool(low_water=0.1, high_water=0.25)
    pool.directory.release(WORKER, pool.save().lease)
    pool.directory.saved([C])
    pool.directory.tick()
    assert pool.gone() == [A, C]
    assert (pool.count("evicted"), pool.count("evicted_unsaved")) == (2, 1)


def test_a_run_of_chunks_that_makes_room_for_a_larger_one_counts_what_it_loses(pool: Pool) -> None:
    pool.directory.release(WORKER, pool.save().lease)
    pool.directory.saved([A])
    assert pool.put(NEW[:1], nbytes=2 * KIB) == 1
    assert pool.gone() == [A, B]
    assert pool.count("evicted_unsaved") == 1


# ---- bounds


def test_so_many_savers_are_remembered_and_no_more() -> None:
    pool = Pool([A, B])
    for rank in range(MAX_SAVERS + 1):
        pool.directory.release(WORKER, pool.save(rank=rank).lease)
    assert len(pool.directory._saving._savers) == MAX_SAVERS
    assert pool.save(client=PEER).keys == [A], "the one that asked longest ago is forgotten"
    pool.clock.advance(SAVER_SECONDS + 0.5)
    for _ in range(MAX_SAVERS // MAX_FORGOTTEN):
        assert not pool.directory._saving.active(pool.clock())
    assert not pool.directory._saving._savers


# ---- over the socket


@pytest.fixture
def server(tmp_path: Path) -> Stage:
    with stage(tmp_path) as made:
        made.server(save_ahead=0.5, lease_seconds=5)
        yield made


def test_a_worker_saves_over_the_socket(server: Stage) -> None:
    client, fd = server.client(), make_memfd(4 * KIB)
    server.undo.callback(os.close, fd)
    client.add_segment(info("s0", 4 * KIB), fd)
    for number, key in enumerate(KEYS[:4]):
        reserved = client.reserve([key], KIB)
        assert isinstance(reserved.slots[0], Location)
        write_at(fd, reserved.slots[0], bytes([number]) * KIB)
        client.commit(reserved.reservation)
    offered = client.save(SPACE, 0, 8)
    assert (offered.keys, offered.seconds) == ([A, B], 5.0)
    reserved = client.reserve([E, F, G], KIB)
    assert [read_at(fd, place) for place in offered.locations] == [bytes([number]) * KIB for number in (0, 1)]
    assert client.contains([A, B, C, D]) == [True, True, False, False]
    assert client.saved(offered.keys) == 2
    assert client.release(offered.lease) is True
    assert client.save(SPACE, 0, 8) == NOTHING
    counters = client.stats().counters
    wanted = {"save_offered": 2, "saved": 2, "evicted": 2, "evicted_unsaved": 2}
    assert {name: counters[name] for name in wanted} == wanted


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ((b"short", 0, 1), "length >= 8"),
        ((SPACE, 1 << 16, 1), "<= 65535"),
        ((SPACE, -1, 1), ">= 0"),
        ((SPACE, 0, MAX_SAVE + 1), "<= 256"),
        ((SPACE, 0, 0), ">= 1"),
    ],
)
def test_a_request_out_of_range_is_refused_and_the_connection_goes_on(
    server: Stage, arguments: tuple[bytes, int, int], complaint: str
) -> None:
    client = server.client()
    with pytest.raises(Refused, match=complaint):
        client.save(*arguments)
    assert client.save(SPACE, 0, 1) == NOTHING
