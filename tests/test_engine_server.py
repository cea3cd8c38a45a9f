"""The engine while its server is absent, gone, hung or restarted: every call is a miss, in bounded
time.
"""

from __future__ import annotations

import logging

import pytest
import torch
from engine_cases import ROOMY, Node, get, here, put, said
from kv_cases import CHUNK, SMALL, Cache, layout_of, places, prompt
from processes import QUICK, eventually, leaving_nothing

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


def test_a_writer_that_wakes_after_a_cold_restart_writes_over_nobody(here: Node) -> None:
    """The worker lends fresh memory; the writer, still in its copy, has the old to itself."""
    server = here.serve()
    mine, theirs = Cache(), Cache()
    owner = here.engine("host:a", 2 * mine.chunk_bytes, layout_of(mine))
    writer = here.worker("host:b", pauses=True)
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
    eventually(lambda: not client.connected)
    here.serve()
    (second,) = eventually(lambda: client.connected and client.list_segments())
    assert second.id != first.id
