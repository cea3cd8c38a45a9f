"""The engine while its server, its peers and its pool fail: every failure is a miss, in bounded time, and never a wrong byte."""

from __future__ import annotations

import logging
import multiprocessing
import os
import random
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from engine_cases import (
    CHUNK,
    FLASH,
    MLA,
    SMALL,
    SNAPPY,
    Cache,
    LoadStats,
    Node,
    UnfinishedCopier,
    Worker,
    get,
    layout_of,
    node,
    places,
    prompt,
    put,
)
from processes import QUICK, SECONDS, Child, eventually, make_memfd

from vcache_backend.engine import VCacheEngine
from vcache_backend.errors import ServerTimeout
from vcache_backend.metadata_server import messages as m
from vcache_backend.metadata_server.client import Client
from vcache_backend.vram_pool import pool as pools
from vcache_backend.vram_pool.copier import Finished, HostCopier
from vcache_backend.vram_pool.devices import Device, resolve
from vcache_backend.vram_pool.pool import Pool


class NoCopier(HostCopier):
    """Must not be asked to store."""

    def gather(self, *_: Any) -> Finished:
        pytest.fail("a copy was launched")


ROOMY = 1 << 20


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Node]:
    """A node on which everything is noticed quickly. No server yet."""
    with node(tmp_path, QUICK) as made:
        yield made


@pytest.fixture
def hanging(tmp_path: Path) -> Iterator[Node]:
    """The same, with deadlines for a server that hangs."""
    with node(tmp_path, SNAPPY) as made:
        yield made


def warned(caplog: pytest.LogCaptureFixture, text: str = "") -> list[str]:
    lines = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    return [line for line in lines if text in line]


def counts(client: Client) -> tuple[int, int]:
    """Reservations: (open, in quarantine)."""
    stats = client.stats()
    return stats.reservations, stats.quarantined


# ---- the server is absent, gone, hung, restarted


def everything_is_a_miss(engine: VCacheEngine, cache: Cache) -> None:
    tokens, slots = prompt(2 * CHUNK), places(cache.sizes, 2 * CHUNK)
    assert engine.lookup(tokens) == 0
    assert get(engine, cache, tokens) == 0
    engine.store(tokens, None, cache.tensors, slots)
    assert engine.contains(engine.keys(tokens)[0]) == -1
    stats = engine.get_stats()
    assert (stats["connected"], stats["server"]) == (False, None)


def test_an_engine_without_a_server_misses_and_connects_by_itself_later(here: Node, caplog: pytest.LogCaptureFixture) -> None:
    mine, theirs = Cache(), Cache()
    writer = here.engine("host:a", ROOMY, layout_of(mine))
    reader = here.engine("host:b", 0, layout_of(mine))
    everything_is_a_miss(writer, mine)
    eventually(lambda: warned(caplog))
    assert all("no metadata server at" in line and "vcache serve" in line for line in warned(caplog))
    assert len(warned(caplog)) == 2, "one line an engine"

    here.serve()
    eventually(lambda: writer.get_stats()["connected"] and reader.get_stats()["connected"])
    eventually(lambda: [s["device"] for s in writer.get_stats()["server"]["segments"].values()] == ["host:a"])
    put(writer, mine, prompt(3 * CHUNK))
    assert get(reader, theirs, prompt(3 * CHUNK)) == 3 * CHUNK


def test_a_hung_server_delays_one_call_to_its_deadline_and_then_none(tmp_path: Path) -> None:
    """Whichever call finds out; the others ask nobody until there is a connection again. An engine that starts meanwhile does start."""
    # No heartbeat notices before the call does.
    patient = msgspec.structs.replace(SNAPPY, request_seconds=0.5, heartbeat_seconds=60)
    with node(tmp_path, patient) as here:
        server, mine, theirs = here.serve(), Cache(), Cache()
        engine = here.engine("host:a", ROOMY, layout_of(mine))
        tokens, slots = prompt(2 * CHUNK), places(SMALL, 2 * CHUNK)
        put(engine, mine, tokens)
        key, client = engine.keys(tokens)[0], engine._session.client
        calls: dict[str, Callable[[], Any]] = {
            "lookup": lambda: engine.lookup(tokens),
            "retrieve": lambda: int(engine.retrieve(tokens, None, theirs.tensors, slots).sum()),
            "store": lambda: engine.store(prompt(2 * CHUNK, 2), None, mine.tensors, slots),
            "contains": lambda: engine.contains(key),
            "get_stats": lambda: engine.get_stats()["server"],
        }
        for call in calls.values():
            eventually(lambda: engine.get_stats()["connected"])
            lost = client.connections_lost
            with server.stopped():
                assert call() in (0, -1, None)
                assert not client.connected
                for again in calls.values():
                    assert again() in (0, -1, None)
                assert client.connections_lost == lost + 1
        with server.stopped():
            another = here.engine("host:b", 0, layout_of(mine))
            everything_is_a_miss(another, mine)
        eventually(lambda: engine.get_stats()["connected"] and another.get_stats()["connected"])
        assert get(another, theirs, tokens) == 2 * CHUNK
        put(engine, mine, prompt(2 * CHUNK, 3))
        assert get(engine, theirs, prompt(2 * CHUNK, 3)) == 2 * CHUNK


def test_a_server_lost_while_an_engine_starts_is_no_error(here: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    here.serve()
    answers = [ServerTimeout("planted")]
    whole = Client.list_segments

    def list_segments(client: Client) -> list[m.SegmentInfo]:
        if answers:
            raise answers.pop()
        return whole(client)

    monkeypatch.setattr(Client, "list_segments", list_segments)
    mine = Cache()
    engine = here.engine("host:a", ROOMY, layout_of(mine))
    assert not answers
    eventually(lambda: engine.get_stats()["server"]["segments"])
    put(engine, mine, prompt(CHUNK))
    assert engine.lookup(prompt(CHUNK)) == CHUNK


def test_a_restarted_server_has_the_contents_of_before(here: Node) -> None:
    server = here.serve()
    mine, theirs = Cache(), Cache()
    writer = here.engine("host:a", ROOMY, layout_of(mine))
    reader = here.engine("host:b", 0, layout_of(mine))
    put(writer, mine, prompt(3 * CHUNK))
    assert get(reader, theirs, prompt(3 * CHUNK)) == 3 * CHUNK
    server.kill()
    assert get(reader, theirs, prompt(3 * CHUNK)) == 0
    here.serve()
    eventually(lambda: reader.lookup(prompt(3 * CHUNK)) == 3 * CHUNK)
    assert get(reader, theirs, prompt(3 * CHUNK), seed=5) == 3 * CHUNK
    eventually(lambda: writer.get_stats()["connected"])
    time.sleep(m.GRACE_SECONDS)  # before that a server that started again reserves nothing
    put(writer, mine, prompt(3 * CHUNK, 2))
    assert get(reader, theirs, prompt(3 * CHUNK, 2)) == 3 * CHUNK
    assert len(writer.get_stats()["server"]["segments"]) == 1


def test_a_reader_gives_a_restarted_server_the_segment_of_a_dead_worker(here: Node) -> None:
    """Whoever has mapped a segment holds it: server and owner may both be gone."""
    server = here.serve()
    owner = here.worker("host:a", ROOMY)
    owner.ask("store", prompt(2 * CHUNK), places(SMALL, 2 * CHUNK))
    assert owner.ask("flush")
    theirs = Cache()
    reader = here.engine("host:b", 0, layout_of(theirs))
    assert get(reader, theirs, prompt(2 * CHUNK)) == 2 * CHUNK
    owner.kill()
    server.kill()
    here.serve()
    eventually(lambda: reader.lookup(prompt(2 * CHUNK)) == 2 * CHUNK)
    assert get(reader, theirs, prompt(2 * CHUNK)) == 2 * CHUNK


def test_a_pool_whose_memory_died_with_everybody_is_lent_again(here: Node) -> None:
    """Server and workers killed together: the journal names a segment that nobody has any more."""
    server = here.serve(recover_seconds=0.5)
    worker = here.worker("host:a", ROOMY)
    worker.ask("store", prompt(2 * CHUNK), places(SMALL, 2 * CHUNK))
    assert worker.ask("flush")
    worker.kill()
    server.kill()
    here.serve(recover_seconds=0.5)
    mine = Cache()
    engine = here.engine("host:a", ROOMY, layout_of(mine))
    assert engine.lookup(prompt(2 * CHUNK)) == 0
    client = here.client()
    assert [segment.state for segment in client.list_segments()] == ["absent"]
    eventually(lambda: [segment.state for segment in client.list_segments()] == ["live"])
    put(engine, mine, prompt(2 * CHUNK))
    assert get(engine, mine, prompt(2 * CHUNK)) == 2 * CHUNK


def test_a_writer_that_wakes_after_a_restart_without_a_journal_writes_over_nobody(here: Node) -> None:
    """The worker lends fresh memory; the writer, still in its copy, has the old to itself."""
    server = here.serve(journal=False)
    mine, theirs = Cache(), Cache()
    owner = here.engine("host:a", 2 * mine.chunk_bytes, layout_of(mine))
    writer = here.worker("host:b", copier="pausing")
    writer.until_paused("store", prompt(2 * CHUNK), places(SMALL, 2 * CHUNK))
    server.kill()
    here.serve(journal=False)
    other = prompt(2 * CHUNK, 2)

    def stored() -> bool:
        put(owner, mine, other)
        return owner.lookup(other) == 2 * CHUNK

    eventually(stored)
    writer.resume()
    writer.answer()
    assert get(owner, theirs, other) == 2 * CHUNK


def test_after_a_cold_restart_a_worker_waits_for_memory_that_others_have_yet_to_unmap(here: Node) -> None:
    server = here.serve(journal=False)
    client = here.undo.enter_context(Client(here.path, QUICK, "host:a"))
    refusals = [None, "it is mapped elsewhere", "it is mapped elsewhere", None]
    pool = Pool(client, Device("host:a", "host"), ROOMY, lambda whole, new: refusals.pop(0))
    here.undo.callback(pool.close)
    (first,) = client.list_segments()
    server.kill()
    here.serve(journal=False)
    eventually(lambda: not refusals)
    (second,) = eventually(lambda: client.connected and client.list_segments())
    assert second.id != first.id


@pytest.mark.gpu
def test_a_gpu_lends_fresh_memory_once_everybody_has_unmapped_the_old(here: Node) -> None:
    """The two do not fit at once."""
    device, most = resolve("cuda:0"), int(0.6 * torch.cuda.mem_get_info(0)[0])
    server = here.serve(journal=False)
    client = here.undo.enter_context(Client(here.path, QUICK, device.name, "cuda"))
    here.undo.callback(Pool(client, device, most).close)
    here.worker("cuda:0")
    (first,) = client.list_segments()
    server.kill()
    here.serve(journal=False)
    (second,) = eventually(lambda: client.connected and client.list_segments())
    assert second.id != first.id


def test_what_the_background_could_not_say_is_no_error_in_the_log(hanging: Node, caplog: pytest.LogCaptureFixture) -> None:
    server = hanging.serve()
    mine = Cache()
    engine = hanging.engine("host:a", ROOMY, layout_of(mine))
    put(engine, mine, prompt(2 * CHUNK))
    with server.stopped():
        engine._session.committer.touch(engine.keys(prompt(2 * CHUNK)))
        assert engine.flush(SECONDS)
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert "commit_error" not in engine.get_stats()["failures"]


# ---- writers that die or hang


def test_the_slots_of_a_writer_killed_in_its_copy_come_back_and_nobody_sees_its_chunks(here: Node) -> None:
    here.serve()
    mine, theirs = Cache(), Cache()
    reader = here.engine("host:a", 2 * mine.chunk_bytes, layout_of(mine))
    writer = here.worker("host:b", copier="pausing")
    tokens = prompt(2 * CHUNK)
    writer.until_paused("store", tokens, places(SMALL, 2 * CHUNK))
    client = here.client()
    assert counts(client) == (1, 0)
    assert [reader.contains(key) for key in reader.keys(tokens)] == [-1, -1]
    assert get(reader, theirs, tokens) == 0
    put(reader, mine, prompt(CHUNK, 2))
    assert reader.get_stats()["not_stored"]["full"] == 1, "a slot that is being written went to somebody else"

    writer.kill()
    eventually(lambda: counts(client) == (0, 0))
    assert (client.stats().chunks, client.list_segments()[0].used) == (0, 0)
    put(reader, mine, tokens)
    assert get(reader, theirs, tokens) == 2 * CHUNK


def test_the_slots_of_a_writer_killed_between_copy_and_commit_come_back(here: Node) -> None:
    """The bytes are complete, but nobody said so: they are not shared."""
    here.serve()
    mine = Cache()
    reader = here.engine("host:a", 2 * mine.chunk_bytes, layout_of(mine))
    writer = here.worker("host:b", copier="unfinished")
    writer.ask("store", prompt(2 * CHUNK), places(SMALL, 2 * CHUNK))
    client = here.client()
    assert counts(client) == (1, 0)
    assert reader.lookup(prompt(2 * CHUNK)) == 0
    writer.kill()
    eventually(lambda: counts(client) == (0, 0))
    assert reader.lookup(prompt(2 * CHUNK)) == 0
    assert client.list_segments()[0].used == 0


@pytest.mark.parametrize("end", ["late commit", "killed"])
def test_a_writer_that_hangs_in_its_copy_keeps_its_slot_until_it_is_done_or_gone(here: Node, end: str) -> None:
    here.serve(reservation_seconds=0.3)
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


def test_slots_that_a_hung_server_promised_to_nobody_come_back(hanging: Node) -> None:
    """The store gave up at its deadline; the server reads the request later and cannot deliver its answer."""
    server = hanging.serve()
    mine = Cache()
    engine = hanging.engine("host:a", ROOMY, layout_of(mine))
    with server.stopped():
        engine.store(prompt(2 * CHUNK), None, mine.tensors, places(SMALL, 2 * CHUNK))
    client = hanging.client()
    eventually(lambda: engine.get_stats()["connected"])
    eventually(lambda: counts(client) == (0, 0))
    assert client.list_segments()[0].used == 0


def test_a_store_whose_reservation_ended_gives_its_slots_back_when_its_copy_is_done(here: Node) -> None:
    """A slow copy on a GPU: the committer waits for it; its commit comes too late, and the server takes the slots back."""
    here.serve(reservation_seconds=0.3)
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
    """Where a process may be stopped for as long as somebody likes: between the server's answer and the launch of the copy."""
    here.serve(reservation_seconds=0.3)
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
    lease = engine._session.lease(engine.keys(prompt(CHUNK)))
    assert lease is not None
    engine.store(prompt(CHUNK, 2), None, mine.tensors, places(SMALL, CHUNK))
    engine._session.release(lease)
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
    here.serve()
    mine, client = Cache(), here.client()
    other = here.engine("host:a", ROOMY, layout_of(mine))
    put(other, mine, prompt(CHUNK))
    broken = here.engine("host:b", 0, layout_of(mine), copier=FullDisk())
    assert get(broken, Cache(), prompt(CHUNK)) == 0
    broken.store(prompt(CHUNK, 2), None, mine.tensors, places(SMALL, CHUNK))
    assert len(warned(caplog, "No space left on device")) == 2
    eventually(lambda: client.stats().leases == 0)
    assert counts(client) == (1, 0), "nobody knows whether something writes there"
    broken.close()
    assert other.lookup(prompt(CHUNK, 2)) == 0


# ---- workers that start together


def _lend(path: Path, barrier: Any) -> None:
    with Client(path, QUICK, "host", "host") as client:
        barrier.wait(SECONDS)
        Pool(client, Device("host", "host"), ROOMY)
        barrier.wait(SECONDS)
        barrier.wait(SECONDS)


def test_workers_of_one_device_that_start_at_once_lend_its_share_exactly_once(here: Node) -> None:
    here.serve()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "vcache_backend.engine"])
    barrier = context.Barrier(7)
    children = [context.Process(target=_lend, args=(here.path, barrier), daemon=True) for _ in range(6)]
    try:
        for child in children:
            child.start()
        barrier.wait(SECONDS)
        barrier.wait(SECONDS)
        client = here.client()
        eventually(lambda: client.list_segments())
        time.sleep(3 * QUICK.heartbeat_seconds)
        assert [segment.nbytes for segment in client.list_segments()] == [ROOMY]
        barrier.wait(SECONDS)
    finally:
        for child in children:
            child.kill()
            child.join(SECONDS)


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
    """Hung between lease and copy, it wakes up over slots that hold other chunks. An engine that did not ask whether its
    lease held would count wrong bytes: that is the planted bug."""
    here.serve(lease_seconds=0.3)
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
    # For so long a lease holds whatever becomes of the server, which lets nobody have a slot meanwhile.
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
    [Cache(MLA), Cache(FLASH._replace(dtype=torch.float16)), Cache(FLASH, SMALL._replace(layers=2))],
    ids=["kind", "dtype", "layers"],
)
def test_kv_caches_that_are_not_what_the_layout_says_are_misses(
    here: Node, planted: Cache, caplog: pytest.LogCaptureFixture
) -> None:
    here.serve()
    mine = Cache()
    writer = here.engine("host:a", ROOMY, layout_of(mine))
    liar = here.engine("host:b", 0, layout_of(mine))
    put(writer, mine, prompt(2 * CHUNK))
    for family in (2, 3):
        put(liar, planted, prompt(2 * CHUNK, family))
        assert writer.lookup(prompt(2 * CHUNK, family)) == 0
        assert get(liar, planted, prompt(2 * CHUNK)) == 0
    (stored,), (retrieved,) = warned(caplog, "store failed"), warned(caplog, "retrieve failed")
    assert "but the layout says 3 of part2.token16.head4.dim16 bfloat16" in stored
    assert stored.partition(":")[2] == retrieved.partition(":")[2]
    client = here.client()
    eventually(lambda: client.stats().leases == 0)


def test_a_segment_dropped_under_running_engines_is_a_miss_and_is_unmapped(here: Node) -> None:
    here.serve()
    mine, theirs = Cache(), Cache()
    writer = here.engine("host:a", ROOMY, layout_of(mine))
    reader = here.engine("host:b", 0, layout_of(mine))
    put(writer, mine, prompt(2 * CHUNK))
    assert get(reader, theirs, prompt(2 * CHUNK)) == 2 * CHUNK
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


def test_a_segment_that_a_worker_cannot_map_does_not_keep_it_from_storing(here: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the most room, so that every store would go there; as a GPU's without peer access, or one that is forged."""
    here.serve()
    mine = Cache()
    here.engine("host:far", 8 * ROOMY, layout_of(mine))
    monkeypatch.setattr(pools, "can_read", lambda reader, owner: owner != "host:far")
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


def test_a_segment_that_cannot_be_mapped_is_a_miss(here: Node, caplog: pytest.LogCaptureFixture) -> None:
    """Somebody registers memory on a device that no host process can read."""
    here.serve()
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
    (line,) = warned(caplog, "f0f0f0f0f0f0")
    assert "tape:0" in line
    eventually(lambda: client.stats().leases == 0)


# ---- everything at once


class Chaos:
    """Workers that store and retrieve, and somebody who kills and stops them and their server."""

    def __init__(self, here: Node, seed: int) -> None:
        self.here, self.dice = here, random.Random(seed)
        self.outcomes, self.done = (
            LoadStats(),
            dict.fromkeys(("worker killed", "worker hung", "server killed", "server hung"), 0),
        )
        self.options = {"lease_seconds": 0.3, "reservation_seconds": 0.3, "recover_seconds": 2}
        self.server: Child = here.serve(**self.options)
        self.workers = [self.start(number) for number in range(2)]

    def start(self, number: int, copier: str = "pausing") -> Worker:
        chunk_bytes = Cache().chunk_bytes
        worker = self.here.worker(f"host:{number}", 5 * chunk_bytes, copier=copier)
        worker.tell("soak", self.dice.randrange(1 << 30), 4, 6)
        return worker

    def run(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self.collect(self.dice.uniform(0.05, 0.3))
            self.harm()
        self.collect(0.5)

    def harm(self) -> None:
        what, number = self.dice.choice([*self.done, "worker hung", "worker killed"]), self.dice.randrange(2)
        self.done[what] += 1
        if what == "worker killed":
            self.collect(0)
            self.workers[number].kill()
            self.workers[number] = self.start(number)
        elif what == "worker hung":
            with self.workers[number].stopped():
                self.collect(self.dice.uniform(0.1, 0.6))
        elif what == "server hung":
            with self.server.stopped():
                self.collect(self.dice.uniform(0.1, 0.6))
        else:
            self.server.kill()
            self.collect(self.dice.uniform(0, 0.2))
            self.server = self.here.serve(**self.options)

    def collect(self, seconds: float) -> None:
        """Take what the workers report, for so long."""
        deadline = time.monotonic() + seconds
        while True:
            for worker in self.workers:
                while worker.answered:
                    self.outcomes = self.outcomes.plus(worker.answer())
            if time.monotonic() >= deadline:
                return
            time.sleep(0.005)


def test_no_wrong_byte_whatever_is_killed_or_hangs(hanging: Node) -> None:
    seed = random.randrange(1 << 30)
    chaos = Chaos(hanging, seed)
    chaos.run(4)
    print(f"\nseed {seed}: {chaos.outcomes}, {chaos.done}")
    assert chaos.outcomes.wrong == 0, seed
    assert chaos.outcomes.retrieved > 4 * CHUNK, "hardly anything was retrieved: the test shows nothing"
    survivor = hanging.worker("host:0", 5 * Cache().chunk_bytes)
    eventually(lambda: survivor.ask("stats")["connected"])
    for worker in chaos.workers:
        worker.kill()
    client = hanging.client()
    eventually(lambda: counts(client) == (0, 0) and client.stats().leases == 0)
    survivor.ask("store", prompt(2 * CHUNK, 99), places(SMALL, 2 * CHUNK))
    assert survivor.ask("flush")
    answer = survivor.ask("retrieve", prompt(2 * CHUNK, 99), places(SMALL, 2 * CHUNK))
    assert (answer.tokens, answer.wrong, answer.clean) == (2 * CHUNK, 0, True)


def test_the_soak_notices_one_wrong_byte(hanging: Node) -> None:
    chaos = Chaos(hanging, 1)
    for worker in chaos.workers:
        worker.kill()
    chaos.workers = [chaos.start(0, copier="wrong")]
    eventually(lambda: chaos.collect(0.01) or chaos.outcomes.wrong)
    assert re.search(r"wrong=[1-9]", str(chaos.outcomes))
