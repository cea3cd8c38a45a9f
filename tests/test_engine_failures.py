"""The engine while its peers and its pool fail: every failure is a miss, in bounded time, and never
a wrong byte.
"""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path
from typing import Any

import processes
import pytest
import torch
from engine_cases import ROOMY, Node, UnfinishedCopier, counts, get, here, put, said
from kv_cases import CHUNK, FLASH, MLA, SMALL, Cache, layout_of, places, prompt
from processes import QUICK, SECONDS, eventually, hung, make_memfd, with_torch

from vcache_backend.errors import LayoutError, SegmentError
from vcache_backend.metadata_server import messages as m
from vcache_backend.metadata_server.client import Client
from vcache_backend.vram_pool import segment as segments
from vcache_backend.vram_pool.copies.copier import Finished, HostCopier
from vcache_backend.vram_pool.devices import Device
from vcache_backend.vram_pool.pool import Pool
from vcache_backend.vram_pool.segment import MappedSegment

__all__ = ["here"]


class NoCopier(HostCopier):
    """Must not be asked to store."""

    def gather(self, *_: Any) -> Finished:
        pytest.fail("a copy was launched")


# ---- writers that die or hang


@pytest.mark.parametrize(
    "copier", ["pausing", "unfinished"], ids=["in its copy", "between copy and commit"]
)
def test_the_slots_of_a_killed_writer_come_back_and_nobody_sees_its_chunks(
    here: Node, copier: str
) -> None:
    """Also where the bytes are complete, but nobody said so."""
    here.serve()
    mine, theirs = Cache(), Cache()
    reader = here.engine("host:a", 2 * mine.chunk_bytes, layout_of(mine))
    writer = here.worker("host:b", copier=copier)
    tokens = prompt(2 * CHUNK)
    (writer.until_paused if copier == "pausing" else writer.ask)(
        "store", tokens, places(SMALL, 2 * CHUNK)
    )
    client = here.client()
    assert counts(client) == (1, 0)
    assert [reader.contains(key) for key in reader.keys(tokens)] == [-1, -1]
    assert get(reader, theirs, tokens) == 0
    put(reader, mine, prompt(CHUNK, 2))
    assert reader.get_stats()["not_stored"]["full"] == 1, (
        "a slot that is being written went to somebody else"
    )

    writer.kill()
    eventually(lambda: counts(client) == (0, 0))
    assert (client.stats().chunks, client.list_segments()[0].used) == (0, 0)
    put(reader, mine, tokens)
    assert get(reader, theirs, tokens) == 2 * CHUNK


@pytest.mark.parametrize("end", ["late commit", "killed"])
def test_a_writer_that_hangs_in_its_copy_keeps_its_slot_until_it_is_done_or_gone(
    here: Node, end: str
) -> None:
    here.serve(reservation_seconds=1.0)
    mine, theirs = Cache(), Cache()
    other = here.engine("host:a", 2 * mine.chunk_bytes, layout_of(mine))
    writer = here.worker("host:b", copier="pausing")
    client = here.client()
    writer.until_paused("store", prompt(CHUNK), places(SMALL, CHUNK))
    writer.stop()
    eventually(lambda: counts(client) == (0, 1))

    # Its key is free again, its slot is not: of two chunks one finds room, whatever is evicted.
    put(other, mine, prompt(CHUNK))
    assert get(other, theirs, prompt(CHUNK)) == CHUNK
    for family in (2, 3):
        put(other, mine, prompt(CHUNK, family))
    put(other, mine, prompt(CHUNK))
    assert client.list_segments()[0].chunks == 1
    assert get(other, theirs, prompt(CHUNK)) == CHUNK

    if end == "killed":
        writer.kill()
    else:
        writer.cont()
        writer.resume()
        writer.answer()
        assert writer.ask("flush")
        stats = writer.ask("stats")
        assert stats["tokens"]["stored"] == 0
        assert stats["failures"]["reservation_void"] == 1
    eventually(lambda: counts(client) == (0, 0))
    assert get(other, theirs, prompt(CHUNK)) == CHUNK
    put(other, mine, prompt(CHUNK, 4))
    assert client.list_segments()[0].chunks == 2
    assert get(other, theirs, prompt(CHUNK, 4)) == get(other, theirs, prompt(CHUNK)) == CHUNK


def test_slots_that_a_hung_server_promised_to_nobody_come_back(here: Node) -> None:
    """The store gave up at its deadline; the server reads the request later and cannot deliver its
    answer.
    """
    server = here.serve()
    mine = Cache()
    engine = here.engine("host:a", ROOMY, layout_of(mine))
    with hung(server, engine._session.client):
        engine.store(prompt(2 * CHUNK), None, mine.tensors, places(SMALL, 2 * CHUNK))
    client = here.client()
    eventually(lambda: engine.get_stats()["connected"])
    eventually(lambda: counts(client) == (0, 0))
    assert client.list_segments()[0].used == 0


def test_a_store_whose_reservation_ended_gives_its_slots_back_when_its_copy_is_done(
    here: Node,
) -> None:
    """A slow copy on a GPU: the committer waits for it; its commit comes too late, and the server
    takes the slots back.
    """
    here.serve(reservation_seconds=1.0)
    mine = Cache()
    writer = here.worker("host:b", 2 * mine.chunk_bytes, copier="unfinished")
    writer.ask("store", prompt(2 * CHUNK), places(SMALL, 2 * CHUNK))
    client = here.client()
    eventually(lambda: counts(client) == (0, 1))
    assert client.list_segments()[0].used == 2 * mine.chunk_bytes
    writer.ask("finish")
    eventually(lambda: counts(client) == (0, 0))
    eventually(lambda: writer.ask("stats")["failures"].get("reservation_void") == 1)
    assert (client.stats().chunks, client.list_segments()[0].used) == (0, 0)


def test_a_writer_held_up_behind_its_reservation_copies_nothing_and_gives_its_slots_back(
    here: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a process may be stopped for as long as somebody likes: between the server's answer and
    the launch of the copy.
    """
    here.serve(reservation_seconds=1.0)
    mine, theirs, client = Cache(), Cache(), here.client()
    other = here.engine("host:a", 2 * mine.chunk_bytes, layout_of(mine))
    writer = here.engine("host:b", 0, layout_of(mine), copier=NoCopier())
    find = writer._session.pool.slots

    def find_late(locations: list[m.Location]) -> list[Any]:
        eventually(lambda: counts(client) == (0, 1))
        put(other, mine, prompt(CHUNK))
        return find(locations)

    monkeypatch.setattr(writer._session.pool, "slots", find_late)
    writer.store(prompt(CHUNK), None, theirs.tensors, places(SMALL, CHUNK))
    eventually(lambda: counts(client) == (0, 0))
    assert writer.get_stats()["not_stored"]["late"] == 1
    assert get(other, mine, prompt(CHUNK)) == CHUNK
    assert client.list_segments()[0].used == mine.chunk_bytes


def test_a_lease_ends_though_a_store_goes_on(here: Node) -> None:
    here.serve(lease_seconds=60)
    mine, copier, client = Cache(), UnfinishedCopier(), here.client()
    other = here.engine("host:a", ROOMY, layout_of(mine))
    put(other, mine, prompt(CHUNK))
    engine = here.engine("host:b", 0, layout_of(mine), copier=copier)
    lease = engine._session.leases.acquire(engine.keys(prompt(CHUNK)))
    assert lease is not None
    engine.store(prompt(CHUNK, 2), None, mine.tensors, places(SMALL, CHUNK))
    engine._session.leases.release(lease)
    eventually(lambda: client.stats().leases == 0)
    assert engine.lookup(prompt(CHUNK, 2)) == 0
    copier.finished.set()
    assert engine.flush(SECONDS)
    assert engine.lookup(prompt(CHUNK, 2)) == CHUNK


class FullDisk(HostCopier):
    """As where Triton cannot write what it compiled."""

    def gather(self, *_: Any) -> Finished:
        raise OSError(28, "No space left on device")

    scatter = gather


def test_whatever_a_copier_raises_is_a_miss(here: Node, caplog: pytest.LogCaptureFixture) -> None:
    here.serve(lease_seconds=1.0)
    mine, client = Cache(), here.client()
    other = here.engine("host:a", ROOMY, layout_of(mine))
    put(other, mine, prompt(CHUNK))
    broken = here.engine("host:b", 0, layout_of(mine), copier=FullDisk())
    assert get(broken, Cache(), prompt(CHUNK)) == 0
    broken.store(prompt(CHUNK, 2), None, mine.tensors, places(SMALL, CHUNK))
    assert len(said(caplog, "No space left on device", logging.WARNING)) == 2
    eventually(lambda: client.stats().leases == 0)
    assert counts(client) == (1, 0), "nobody knows whether something writes there"
    broken.close()
    assert other.lookup(prompt(CHUNK, 2)) == 0


# ---- workers that start together


class Lender:
    """A worker that lends its share of a device when it is told to."""

    def __init__(self, path: Path) -> None:
        self.client = Client(path, QUICK, "host", "host")

    def lend(self) -> None:
        self.pool = Pool(self.client, Device("host", "host"), ROOMY)


def test_workers_of_one_device_that_start_at_once_lend_its_share_exactly_once(here: Node) -> None:
    here.serve()
    lenders = [
        here.undo.enter_context(processes.Worker(with_torch(), Lender, here.path)) for _ in range(6)
    ]
    for lender in lenders:
        lender.made()
    for lender in lenders:
        lender.tell("lend")
    for lender in lenders:
        lender.answer()
    client = here.client()
    time.sleep(3 * QUICK.heartbeat_seconds)
    assert [segment.nbytes for segment in client.list_segments()] == [ROOMY]


# ---- readers that die or hang


def test_a_killed_reader_holds_nothing(here: Node) -> None:
    here.serve(lease_seconds=60)
    mine, theirs = Cache(), Cache()
    writer = here.engine("host:a", 2 * mine.chunk_bytes, layout_of(mine))
    put(writer, mine, prompt(2 * CHUNK))
    reader = here.worker("host:b", copier="pausing")
    reader.until_paused("retrieve", prompt(2 * CHUNK), places(SMALL, 2 * CHUNK))
    put(writer, mine, prompt(2 * CHUNK, 2))
    assert writer.lookup(prompt(2 * CHUNK, 2)) == 0
    assert writer.lookup(prompt(2 * CHUNK)) == 2 * CHUNK
    client = here.client()
    assert client.stats().leases == 1
    reader.kill()
    eventually(lambda: client.stats().leases == 0)
    put(writer, mine, prompt(2 * CHUNK, 2))
    assert get(writer, theirs, prompt(2 * CHUNK, 2)) == 2 * CHUNK


@pytest.mark.parametrize("trusting", [False, True], ids=["", "planted bug"])
def test_a_reader_that_outlives_its_lease_counts_nothing(here: Node, trusting: bool) -> None:
    """Hung between lease and copy, it wakes up over slots that hold other chunks. An engine that
    did not ask whether its lease held would count wrong bytes: that is the planted bug."""
    here.serve(lease_seconds=1.0)
    mine = Cache()
    writer = here.engine("host:a", 2 * mine.chunk_bytes, layout_of(mine))
    put(writer, mine, prompt(2 * CHUNK))
    reader = here.worker("host:b", copier="pausing", trusting=trusting)
    client = here.client()
    reader.until_paused("retrieve", prompt(2 * CHUNK), places(SMALL, 2 * CHUNK))
    with reader.stopped():
        eventually(lambda: client.stats().leases == 0)
        put(writer, mine, prompt(2 * CHUNK, 2))
        assert writer.lookup(prompt(2 * CHUNK, 2)) == 2 * CHUNK
    reader.resume()
    answer = reader.answer()
    if trusting:
        assert (answer.tokens, answer.wrong > 0) == (2 * CHUNK, True)
        return
    assert answer.tokens == 0
    stats = reader.ask("stats")
    assert stats["failures"]["lease_lost"] == 1
    assert (stats["hits"]["vram"], stats["tokens"]["retrieved"]) == (0, 0)
    good = reader.ask("retrieve", prompt(2 * CHUNK, 2), places(SMALL, 2 * CHUNK))
    assert (good.tokens, good.wrong, good.clean) == (2 * CHUNK, 0, True)


def test_a_reader_whose_server_restarts_in_its_copy_counts_nothing(here: Node) -> None:
    """A new epoch voids every lease, and nobody can say what happened to the slots meanwhile."""
    server = here.serve()
    mine = Cache()
    writer = here.engine("host:a", 2 * mine.chunk_bytes, layout_of(mine))
    put(writer, mine, prompt(2 * CHUNK))
    reader = here.worker("host:b", copier="pausing")
    reader.until_paused("retrieve", prompt(2 * CHUNK), places(SMALL, 2 * CHUNK))
    server.kill()
    here.serve()
    eventually(lambda: writer.lookup(prompt(2 * CHUNK)) == 2 * CHUNK)
    # For so long a lease holds whatever becomes of the server, which lets nobody have a slot
    # meanwhile.
    time.sleep(m.GRACE_SECONDS)
    reader.resume()
    assert reader.answer().tokens == 0
    eventually(lambda: reader.ask("lookup", prompt(2 * CHUNK)) == 2 * CHUNK)
    good = reader.ask("retrieve", prompt(2 * CHUNK), places(SMALL, 2 * CHUNK))
    assert (good.tokens, good.wrong, good.clean) == (2 * CHUNK, 0, True)


# ---- segments and layouts


def test_the_successor_of_a_killed_worker_finds_its_segment_and_makes_no_other(here: Node) -> None:
    here.serve()
    tokens, client = prompt(3 * CHUNK), here.client()
    worker = here.worker("host:a", ROOMY)
    worker.ask("store", tokens, places(SMALL, len(tokens)))
    assert worker.ask("flush")
    (segment,) = client.list_segments()
    for seed in range(2):
        worker.kill()
        worker = here.worker("host:a", ROOMY)
        assert worker.ask("lookup", tokens) == 3 * CHUNK
        answer = worker.ask("retrieve", tokens, places(SMALL, len(tokens), seed))
        assert (answer.tokens, answer.wrong, answer.clean) == (3 * CHUNK, 0, True)
        assert worker.ask("stats")["bytes"]["peer"] == 0
        assert [found.id for found in client.list_segments()] == [segment.id]


@pytest.mark.parametrize(
    "planted",
    [
        Cache(MLA),
        Cache(FLASH._replace(dtype=torch.float16)),
        Cache(FLASH, SMALL._replace(layers=2)),
    ],
    ids=["kind", "dtype", "layers"],
)
def test_kv_caches_that_are_not_what_the_layout_says_are_refused(
    here: Node, planted: Cache
) -> None:
    here.serve()
    mine = Cache()
    writer = here.engine("host:a", ROOMY, layout_of(mine))
    liar = here.engine("host:b", 0, layout_of(mine))
    with pytest.raises(LayoutError, match="the layout says 3 of"):
        liar.register(planted.tensors)
    put(writer, mine, prompt(2 * CHUNK))
    said = "but the layout says 3 of part2.token16.head4.dim16 bfloat16"
    with pytest.raises(ValueError, match=said):
        put(liar, planted, prompt(2 * CHUNK, 2))
    with pytest.raises(ValueError, match=said):
        get(liar, planted, prompt(2 * CHUNK))
    assert writer.lookup(prompt(2 * CHUNK, 2)) == 0
    client = here.client()
    eventually(lambda: client.stats().leases == 0)


def test_a_segment_dropped_under_running_engines_is_a_miss_and_is_unmapped(here: Node) -> None:
    here.serve()
    mine, theirs = Cache(), Cache()
    writer = here.engine("host:a", ROOMY, layout_of(mine))
    reader = here.engine("host:b", 0, layout_of(mine))
    put(writer, mine, prompt(2 * CHUNK))
    assert get(reader, theirs, prompt(2 * CHUNK)) == 2 * CHUNK
    assert reader.flush(SECONDS), "the lease is over"
    (segment,) = here.client().list_segments()
    assert here.client().drop_segment(segment.id) == m.Dropped(2, True)
    assert reader.lookup(prompt(2 * CHUNK)) == 0
    assert get(reader, theirs, prompt(2 * CHUNK)) == 0
    eventually(lambda: segment.id not in Path("/proc/self/maps").read_text())
    put(writer, mine, prompt(2 * CHUNK))
    assert writer.lookup(prompt(2 * CHUNK)) == 0
    assert here.client().list_segments() == [], "a dropped segment stays dropped"
    third = here.engine("host:c", ROOMY, layout_of(mine))
    put(writer, mine, prompt(2 * CHUNK))
    assert get(third, theirs, prompt(2 * CHUNK)) == 2 * CHUNK


def out_of_reach(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """From now on nobody here can map segments on `device`, as a GPU cannot that has no peer
    access.
    """
    mapping = segments.map_segment

    def refusing(info: m.SegmentInfo, fd: int, reader: Device) -> MappedSegment:
        if info.device == device:
            raise SegmentError(f"{reader} has no peer access to {device}")
        return mapping(info, fd, reader)

    monkeypatch.setattr(segments, "map_segment", refusing)


def test_a_segment_that_a_worker_cannot_map_does_not_keep_it_from_storing(
    here: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has the most room, so that every store would go there; as a GPU's without peer access, or
    one that is forged.
    """
    here.serve()
    mine = Cache()
    here.engine("host:far", 8 * ROOMY, layout_of(mine))
    out_of_reach(monkeypatch, "host:far")
    here.engine("host:a", ROOMY, layout_of(mine))
    engine = here.engine("host:b", 0, layout_of(mine))
    for family in range(2, 6):
        put(engine, mine, prompt(2 * CHUNK, family))
        assert engine.lookup(prompt(2 * CHUNK, family)) == 2 * CHUNK
        assert get(engine, mine, prompt(2 * CHUNK, family)) == 2 * CHUNK
    here.server.kill()
    here.serve()
    eventually(lambda: engine.lookup(prompt(2 * CHUNK, 2)) == 2 * CHUNK)
    time.sleep(m.GRACE_SECONDS)  # before that a server that started again reserves nothing
    put(engine, mine, prompt(2 * CHUNK, 8))
    assert get(engine, mine, prompt(2 * CHUNK, 8)) == 2 * CHUNK


def test_a_segment_dropped_in_the_middle_of_a_copy_waits_for_it(here: Node) -> None:
    here.serve()
    mine = Cache()
    writer = here.engine("host:a", ROOMY, layout_of(mine))
    put(writer, mine, prompt(2 * CHUNK))
    reader = here.worker("host:b", copier="pausing")
    reader.until_paused("retrieve", prompt(2 * CHUNK), places(SMALL, 2 * CHUNK))
    client = here.client()
    (segment,) = client.list_segments()
    assert client.drop_segment(segment.id) == m.Dropped(2, False)
    time.sleep(3 * QUICK.heartbeat_seconds)
    assert [found.state for found in client.list_segments()] == ["draining"]
    reader.resume()
    answer = reader.answer()
    assert (answer.tokens, answer.wrong, answer.clean) == (2 * CHUNK, 0, True)
    eventually(lambda: client.list_segments() == [])


def test_a_segment_that_cannot_be_mapped_is_a_miss(
    here: Node, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody registers memory on a device that no process here can read."""
    here.serve()
    out_of_reach(monkeypatch, "tape:0")
    client, mine = here.client(), Cache()
    fd = make_memfd(ROOMY)
    client.add_segment(m.SegmentInfo(m.SegmentId("f0f0f0f0f0f0"), "tape:0", "host", ROOMY), fd)
    os.close(fd)
    engine = here.engine("host:a", 0, layout_of(mine))
    tokens = prompt(2 * CHUNK)
    put(engine, mine, tokens)
    assert engine.get_stats()["not_stored"]["no_slot"] == 2
    eventually(lambda: counts(client) == (0, 0))
    reserved = client.reserve(engine.keys(tokens), mine.chunk_bytes)
    assert client.commit(reserved.reservation) == 2
    assert engine.lookup(tokens) == 2 * CHUNK
    for _ in range(2):
        assert get(engine, mine, tokens) == 0
    stats = engine.get_stats()
    assert (stats["hits"]["vram"], stats["misses"]) == (0, 4)
    (line,) = said(caplog, "f0f0f0f0f0f0", logging.WARNING)
    assert "tape:0" in line
    eventually(lambda: client.stats().leases == 0)
