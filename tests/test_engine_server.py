"""The engine while its server is absent, gone, hung or restarted: every call is a miss, in bounded
time.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from engine_cases import ROOMY, Node, get, here, node, put, said
from kv_cases import CHUNK, SMALL, Cache, layout_of, places, prompt
from processes import PATIENT, QUICK, SECONDS, eventually, hasty, hung, leaving_nothing, make_memfd

from vcache_backend.engine import VCacheEngine
from vcache_backend.errors import ServerTimeout
from vcache_backend.metadata_server import messages as m
from vcache_backend.metadata_server.client import Client
from vcache_backend.vram_pool.devices import Device, resolve
from vcache_backend.vram_pool.pool import Pool

__all__ = ["here"]

# ---- the server is absent, gone, hung, restarted


def everything_is_a_miss(engine: VCacheEngine, cache: Cache) -> None:
    tokens, slots = prompt(2 * CHUNK), places(cache.sizes, 2 * CHUNK)
    assert engine.lookup(tokens) == 0
    assert get(engine, cache, tokens) == 0
    engine.store(tokens, None, cache.tensors, slots)
    assert engine.contains(engine.keys(tokens)[0]) == -1
    stats = engine.get_stats()
    assert (stats["connected"], stats["server"]) == (False, None)


def test_an_engine_without_a_server_misses_and_connects_by_itself_later(
    here: Node, caplog: pytest.LogCaptureFixture
) -> None:
    mine, theirs = Cache(), Cache()
    writer = here.engine("host:a", ROOMY, layout_of(mine))
    reader = here.engine("host:b", 0, layout_of(mine))
    everything_is_a_miss(writer, mine)
    eventually(lambda: said(caplog, level=logging.WARNING))
    assert all(
        "no metadata server at" in line and "vcache serve" in line
        for line in said(caplog, level=logging.WARNING)
    )
    assert len(said(caplog, level=logging.WARNING)) == 2, "one line an engine"

    here.serve()
    eventually(lambda: writer.get_stats()["connected"] and reader.get_stats()["connected"])
    eventually(
        lambda: (
            [s["device"] for s in writer.get_stats()["server"]["segments"].values()] == ["host:a"]
        )
    )
    put(writer, mine, prompt(3 * CHUNK))
    assert get(reader, theirs, prompt(3 * CHUNK)) == 3 * CHUNK


def test_a_hung_server_delays_one_call_to_its_deadline_and_then_none(tmp_path: Path) -> None:
    """Whichever call finds out; the others ask nobody until there is a connection again. An engine
    that starts meanwhile does start.
    """
    # No heartbeat notices before the call does.
    with node(tmp_path, PATIENT) as here:
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
            # Nothing is on its way, whose deadline would lose the connection again.
            eventually(lambda: engine.flush(SECONDS) and engine.lookup(tokens) == 2 * CHUNK)
            lost = client.connections_lost
            with hung(server, client):
                assert call() in (0, -1, None)
                assert not client.connected
                for again in calls.values():
                    assert again() in (0, -1, None)
                assert client.connections_lost == lost + 1
        with server.stopped():
            config = here.config("host:b")
            another = here.undo.enter_context(
                VCacheEngine(
                    msgspec.structs.replace(config, client=hasty(PATIENT)), layout_of(mine)
                )
            )
            everything_is_a_miss(another, mine)
            another._session.client._config = PATIENT
        eventually(lambda: engine.get_stats()["connected"] and another.get_stats()["connected"])
        assert get(another, theirs, tokens) == 2 * CHUNK
        put(engine, mine, prompt(2 * CHUNK, 3))
        assert get(engine, theirs, prompt(2 * CHUNK, 3)) == 2 * CHUNK


def test_a_server_lost_while_an_engine_starts_is_no_error(
    here: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    """Server and workers killed together: ledger and segment died with them."""
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
    eventually(lambda: [segment.state for segment in client.list_segments()] == ["live"])
    put(engine, mine, prompt(2 * CHUNK))
    assert get(engine, mine, prompt(2 * CHUNK)) == 2 * CHUNK


def test_a_writer_that_wakes_after_a_cold_restart_writes_over_nobody(
    here: Node,
) -> None:
    """The worker lends fresh memory; the writer, still in its copy, has the old to itself."""
    server = here.serve()
    mine, theirs = Cache(), Cache()
    owner = here.engine("host:a", 2 * mine.chunk_bytes, layout_of(mine))
    writer = here.worker("host:b", copier="pausing")
    writer.until_paused("store", prompt(2 * CHUNK), places(SMALL, 2 * CHUNK))
    with leaving_nothing(here.path):
        server.kill()
    here.serve()
    other = prompt(2 * CHUNK, 2)

    def stored() -> bool:
        put(owner, mine, other)
        return owner.lookup(other) == 2 * CHUNK

    eventually(stored)
    writer.resume()
    writer.answer()
    assert get(owner, theirs, other) == 2 * CHUNK


def test_in_each_life_of_the_server_a_worker_says_once_why_it_stores_nothing(
    here: Node, caplog: pytest.LogCaptureFixture
) -> None:
    """Somebody has lent memory by hand, and nobody had it mapped when the server died."""
    server = here.serve()
    fd = make_memfd(ROOMY)
    here.client().add_segment(
        m.SegmentInfo(m.SegmentId("f0f0f0f0f0f0"), "host:b", "host", ROOMY), fd
    )
    os.close(fd)
    server.kill()
    server, mine = here.serve(), Cache()
    engine = here.engine("host:a", 0, layout_of(mine))
    client, why = (
        engine._session.client,
        "not stored: no host segment is registered, and 1 of before the server's restart",
    )
    for life in (1, 2):
        # It takes new chunks again after a moment.
        eventually(
            lambda life=life: put(engine, mine, prompt(CHUNK)) or caplog.text.count(why) == life
        )
        put(engine, mine, prompt(CHUNK))
        assert caplog.text.count(why) == life
        before = client.epoch
        server.kill()
        server = here.serve()
        eventually(lambda before=before: client.epoch != before)


def test_after_a_cold_restart_a_worker_waits_for_memory_that_others_have_yet_to_unmap(
    here: Node,
) -> None:
    server = here.serve()
    client = here.undo.enter_context(Client(here.path, QUICK, "host:a"))
    refusals = [None, "it is mapped elsewhere", "it is mapped elsewhere", None]
    pool = Pool(client, Device("host:a", "host"), ROOMY, lambda whole, new: refusals.pop(0))
    here.undo.callback(pool.close)
    (first,) = client.list_segments()
    with leaving_nothing(here.path):
        server.kill()
    here.serve()
    eventually(lambda: not refusals)
    (second,) = eventually(lambda: client.connected and client.list_segments())
    assert second.id != first.id


@pytest.mark.gpu
def test_a_gpu_lends_fresh_memory_once_everybody_has_unmapped_the_old(here: Node) -> None:
    """The two do not fit at once."""
    device, most = resolve("cuda:0"), int(0.6 * torch.cuda.mem_get_info(0)[0])
    server = here.serve()
    client = here.undo.enter_context(Client(here.path, QUICK, device.name, "cuda"))
    here.undo.callback(Pool(client, device, most).close)
    here.worker("cuda:0")
    (first,) = client.list_segments()
    with leaving_nothing(here.path):
        server.kill()
    here.serve()
    (second,) = eventually(lambda: client.connected and client.list_segments())
    assert second.id != first.id


def test_what_the_background_could_not_say_is_no_error_in_the_log(
    here: Node, caplog: pytest.LogCaptureFixture
) -> None:
    server = here.serve()
    mine = Cache()
    engine = here.engine("host:a", ROOMY, layout_of(mine))
    put(engine, mine, prompt(2 * CHUNK))
    with hung(server, engine._session.client):
        engine._session.committer.touch(engine.keys(prompt(2 * CHUNK)))
        assert engine.flush(SECONDS)
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert "commit_error" not in engine.get_stats()["failures"]
