"""The pool's room: where chunks go, which leave first. What always holds, in
any order of events, is in test_directory.py."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable

import msgspec
import pytest
from model import FakeClock, chunk_key

from vcache_backend.metadata_server.directory import Directory
from vcache_backend.metadata_server.processes import Peer, ProcessId
from vcache_backend.metadata_server.slots import SLABS, SlotRegion
from vcache_backend.protocol import messages as m

KIB = 1 << 10
ME = Peer(1, ProcessId(10, 1), "gpu-0", "cuda")


class Pool:
    """A directory, and its tables as clients hold them."""

    def __init__(self) -> None:
        self.clock, self.fds = FakeClock(), dict[str, int]()
        self.directory = Directory(self.clock, 30.0, Counter())

    def add(self, name: str, nbytes: int, device: str = "gpu-0", medium: m.Medium = "cuda") -> None:
        info = m.SegmentInfo(m.SegmentId(name), device, medium, nbytes)
        held = self.fds.get(name)
        region = SlotRegion.create(info) if held is None else SlotRegion.take_over(info, held)
        self.fds.setdefault(name, os.dup(region.fds[-1].fd))
        self.directory.add(region)

    def store(self, *numbers: int, nbytes: int = KIB, client: Peer = ME) -> list[str | int]:
        """In which segments, or why not."""
        reserved = self.directory.reserve(client, list(map(chunk_key, numbers)), nbytes)
        self.directory.commit(client, reserved.reservation)
        return [at.segment if isinstance(at, m.Location) else at for at in reserved.slots]

    def here(self, *numbers: int) -> list[int]:
        places = self.directory.places(list(map(chunk_key, numbers)))
        return [at for at, place in zip(numbers, places, strict=True) if place is not None]

    def restart(self) -> None:
        for region in self.directory.regions.values():
            region.close()
        self.directory = Directory(self.clock, 30.0, Counter())


def test_chunks_go_to_the_own_device_first_then_to_where_there_is_room() -> None:
    pool = Pool()
    pool.add("far", 8 * KIB, "gpu-1")
    pool.add("own", 2 * KIB)
    pool.add("host", 64 * KIB, "host", "host")
    assert pool.store(1, 2, 3, 4) == ["own", "own", "far", "far"]
    avoids = msgspec.structs.replace(ME, avoids={m.SegmentId("own")})
    assert pool.store(5, client=avoids) == ["far"], "it cannot map the other one"
    assert pool.store(1, 1, 6) == [m.Refusal.EXISTS, m.Refusal.EXISTS, "far"]
    everything = msgspec.structs.replace(ME, avoids={m.SegmentId("own"), m.SegmentId("far")})
    refused = pool.directory.reserve(everything, [chunk_key(9)], KIB)
    assert refused.slots == [m.Refusal.NO_SEGMENT]
    assert "cannot map any cuda segment" in refused.reason
    refused = pool.directory.reserve(ME, [chunk_key(9)], 9 * KIB)
    assert refused.slots == [m.Refusal.TOO_LARGE]
    assert "set pool.segment_bytes >= 9216" in refused.reason


def test_the_least_recently_used_leave_and_the_end_of_a_prefix_first() -> None:
    pool = Pool()
    pool.add("s", 8 * KIB)
    pool.store(*range(8))
    pool.directory.pin(list(map(chunk_key, (5, 6, 7))), 0.0)
    pool.store(8, 9, 10)
    assert pool.here(*range(11)) == [0, 1, 5, 6, 7, 8, 9, 10]
    pool.directory.touch(list(map(chunk_key, (0, 1))))
    pool.store(11, 12)
    assert pool.here(*range(13)) == [0, 1, 5, 8, 9, 10, 11, 12]


def test_a_slab_changes_its_size_for_chunks_of_another_one() -> None:
    pool = Pool()
    pool.add("s", 64 * KIB)
    pool.store(*range(64))
    assert pool.store(100, 101, nbytes=2 * KIB) == ["s", "s"]
    left = pool.here(*range(64))
    assert len(left) == 60, "two slabs of two slots each"
    assert pool.here(100, 101) == [100, 101]
    assert pool.directory.segments()[0].chunks == len(left) + 2


def test_a_slab_in_which_a_chunk_is_being_written_keeps_its_size() -> None:
    pool = Pool()
    pool.add("s", 64 * KIB)
    directory, keys = pool.directory, list(map(chunk_key, range(64)))
    given = [directory.reserve(ME, [key], KIB) for key in keys]
    slabs = [one.slots[0].offset // (2 * KIB) for one in given]
    for one in given[:-1]:
        directory.commit(ME, one.reservation)
    # Only its neighbour may leave.
    directory.pin([key for key, at in zip(keys, slabs, strict=True) if at != slabs[-1]], 60.0)
    assert pool.store(100, nbytes=2 * KIB) == [m.Refusal.FULL]
    assert directory.commit(ME, given[-1].reservation) == keys[-1:]
    assert pool.here(*range(64)) == [*range(64)]


def test_no_more_chunks_than_there_may_be() -> None:
    pool = Pool()
    pool.directory.room.MAX_CHUNKS = 3
    pool.add("s", 64 * KIB)
    assert pool.store(0, 1, 2) == ["s"] * 3
    assert pool.store(3) == ["s"]
    assert pool.here(0, 1, 2, 3) == [0, 1, 3], "it replaces one"


def test_a_writer_that_is_done_before_its_table_comes_leaves_nothing_in_quarantine() -> None:
    """It reconnects, and gives its reservation back, before it offers the segment again."""
    pool = Pool()
    pool.add("s", 4 * KIB)
    first = pool.directory.reserve(ME, [chunk_key(0)], KIB).reservation
    other = pool.directory.reserve(ME, [chunk_key(1)], KIB).reservation
    pool.restart()
    assert pool.directory.abort(ME, first) == 0
    pool.add("s", 4 * KIB)
    assert [one.process.pid for one in pool.directory.quarantined()] == [10]
    assert pool.directory.commit(ME, other) == []
    assert not pool.directory.quarantined()
    assert pool.store(*range(4)) == ["s"] * 4


def test_a_write_in_two_segments_loses_what_lies_in_the_one_that_is_dropped() -> None:
    pool = Pool()
    pool.add("s", 2 * KIB)
    pool.add("t", 2 * KIB)
    reserved = pool.directory.reserve(ME, list(map(chunk_key, range(4))), KIB)
    pool.directory.drop(m.SegmentId("s"))
    assert pool.directory.commit(ME, reserved.reservation) == []
    assert pool.store(*range(4)) == ["t", "t", m.Refusal.FULL, m.Refusal.FULL]


def test_nothing_is_left_of_a_write_whose_segment_is_dropped() -> None:
    pool = Pool()
    pool.add("s", 2 * KIB)
    pool.directory.reserve(ME, [chunk_key(0)], KIB)
    pool.directory.drop(m.SegmentId("s"))
    assert not pool.directory.writes


def test_a_chunk_that_two_tables_bring_takes_one_slot() -> None:
    """It was stored again while its first segment was away."""
    pool = Pool()
    for name in ("s", "t"):
        pool.add(name, 2 * KIB)
        assert pool.store(0) == [name]
        pool.restart()
    for name in ("s", "t"):
        pool.add(name, 2 * KIB)
    pool.store(1, 2, 3)
    assert pool.here(*range(4)) == [*range(4)]


def test_a_table_that_comes_after_a_reset_brings_only_later_chunks() -> None:
    pool = Pool()
    pool.add("s", 4 * KIB)
    pool.store(0, 1)
    pool.clock.advance(1)
    pool.restart()
    pool.directory.clear(chunk_key(0)[: m.NAMESPACE_BYTES], reset=True)
    pool.add("s", 4 * KIB)
    assert pool.store(2) == ["s"]
    assert pool.here(0, 1, 2) == [2]


# ---- chunks of other sizes and memory, and pinned ones

MANY = 5000


def pinned(pool: Pool) -> int:
    pool.add("s", MANY * 256)
    for first in range(0, MANY, 1000):
        pool.store(*range(first, first + 1000), nbytes=256)
    for first in range(0, 4000, 1000):
        pool.directory.pin([chunk_key(first + number) for number in range(1000)], 60.0)
    pool.directory.touch([chunk_key(number) for number in range(4000, MANY)])
    return 256


def in_other_memory(pool: Pool) -> int:
    pool.add("host", MANY * 256, medium="host")
    for first in range(0, MANY, 1000):
        on_host = msgspec.structs.replace(ME, medium="host")
        pool.store(*range(first, first + 1000), nbytes=256, client=on_host)
    pool.add("s", 100 * 256)
    pool.store(*range(MANY, MANY + 100), nbytes=256)
    return 256


def in_slabs_that_are_too_small(pool: Pool) -> int:
    pool.add("s", 64 * 4096)
    pool.store(*range(100), nbytes=256)
    return 4 * 4096


@pytest.mark.parametrize(
    ("fill", "short"), [(pinned, 1), (in_other_memory, 2), (in_slabs_that_are_too_small, 0)]
)
def test_chunks_that_stay_keep_no_younger_one_from_eviction(
    fill: Callable[[Pool], int], short: int
) -> None:
    """short: of so many requests the search ends behind some of them, since nobody is to wait for
    it; the next one's begins there."""
    pool = Pool()
    nbytes = fill(pool)
    done = [pool.store(2 * MANY + number, nbytes=nbytes) for number in range(40)]
    assert done == [[m.Refusal.FULL]] * short + [["s"]] * (40 - short)


def test_a_segment_full_of_tiny_chunks_has_room_for_large_ones_later() -> None:
    """Its table has no more slabs, and a slab's place never changes."""
    pool, nbytes = Pool(), 1 << 33
    pool.add("s", nbytes)
    while pool.directory.regions[0].cut(256) is not None:
        pass
    assert pool.store(*range(64), nbytes=nbytes // SLABS).count("s") == SLABS


@pytest.mark.parametrize("nbytes", [128, 4096])
def test_what_is_free_has_room_for_chunks_of_any_size(nbytes: int) -> None:
    """Chunks of another size were there, and none is any more that could be evicted."""
    pool = Pool()
    pool.add("s", 32 * 4096)
    assert pool.store(*range(64), nbytes=2048) == ["s"] * 64
    pool.directory.clear(b"")
    assert pool.store(*range(100, 132), nbytes=nbytes) == ["s"] * 32
