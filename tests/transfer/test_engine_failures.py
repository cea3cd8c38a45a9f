"""The engine while its peers, its pool and its server fail: every failure is a miss, in bounded
time, and never a wrong byte.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_cases import ROOMY, Node, Pair, counts, get, here, put, said, served
from kv_cases import CHUNK, FLASH, SMALL, Cache, layout_of, places, prompt
from processes import QUICK, eventually, hung, leaving_nothing

from vcache_backend.engine import VCacheEngine
from vcache_backend.errors import LayoutError, SegmentError
from vcache_backend.protocol import messages as m
from vcache_backend.protocol.client import Client
from vcache_backend.vram_pool import regions
from vcache_backend.vram_pool.copies.copier import Completion, CopyJob, HostCopier, Mark
from vcache_backend.vram_pool.devices import Device, resolve
from vcache_backend.vram_pool.memory_budget import Shortfall, shortfall
from vcache_backend.vram_pool.pool import Pool

__all__ = ["here", "served"]
MIB = 1 << 20


class NoCopier(HostCopier):
    """Must not be asked to store."""

    def copy(self, job: CopyJob, after: Mark | None = None) -> Completion:
        pytest.fail("a copy was launched")


# ---- writers that die or hang


def test_a_writer_that_hangs_in_its_copy_keeps_its_slot_until_it_is_done(here: Node) -> None:
    here.serve(reservation_seconds=1.0)
    mine, theirs = Cache(), Cache()
    other = here.engine("host:a", 2 * mine.chunk_bytes, layout_of(mine))
    writer = here.worker("host:b", pauses=True)
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


def test_slots_that_a_hung_server_promised_to_nobody_come_back(served: Node) -> None:
    """The store gave up at its deadline; the server reads the request later and cannot deliver its
    answer.
    """
    mine = Cache()
    engine = served.engine("host:a", ROOMY, layout_of(mine))
    with hung(served.server, engine._session.client):
        engine.store(prompt(2 * CHUNK), None, mine.tensors, places(SMALL, 2 * CHUNK))
    client = served.client()
    eventually(lambda: engine.get_stats()["connected"])
    eventually(lambda: counts(client) == (0, 0))
    assert client.list_segments()[0].used == 0


def test_a_writer_that_is_late_copies_nothing(here: Node, monkeypatch: pytest.MonkeyPatch) -> None:
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


class FullDisk(HostCopier):
    """As where Triton cannot write what it compiled."""

    def copy(self, job: CopyJob, after: Mark | None = None) -> Completion:
        raise OSError(28, "No space left on device")


def test_whatever_a_copier_raises_is_a_miss(here: Node, caplog: pytest.LogCaptureFixture) -> None:
    here.serve()
    mine, client = Cache(), here.client()
    other = here.engine("host:a", ROOMY, layout_of(mine))
    put(other, mine, prompt(CHUNK))
    broken = here.engine("host:b", 0, layout_of(mine), copier=FullDisk())
    assert get(broken, Cache(), prompt(CHUNK)) == 0
    broken.store(prompt(CHUNK, 2), None, mine.tensors, places(SMALL, CHUNK))
    assert len(said(caplog, "No space left on device", logging.WARNING)) == 2
    assert counts(client) == (1, 0), "nobody knows whether something writes there"
    broken.close()
    assert other.lookup(prompt(CHUNK, 2)) == 0


def restarted(here: Node, *engines: VCacheEngine) -> None:
    """The server is killed and started again, and these engines have offered it their segments."""
    here.server.kill()
    here.serve()
    client = here.client()
    for engine in engines:
        lost = {one.id for one in engine._session.pool.mapped()}
        eventually(lambda lost=lost: lost <= {one.id for one in client.list_segments()})


# ---- readers that die or hang


@pytest.mark.parametrize("restart", [False, True])
def test_a_late_reader_counts_nothing(here: Node, restart: bool) -> None:
    """Hung between answer and copy, it wakes up over slots that hold other chunks. That one which
    did not compare generations would count wrong bytes: test_soak."""
    here.serve()
    mine = Cache()
    writer = here.engine("host:a", 2 * mine.chunk_bytes, layout_of(mine))
    put(writer, mine, prompt(2 * CHUNK))
    reader = here.worker("host:b", pauses=True)
    reader.until_paused("retrieve", prompt(2 * CHUNK), places(SMALL, 2 * CHUNK))
    with reader.stopped():
        if restart:
            restarted(here, writer)

        def stored() -> bool:
            """Once the pins have ended."""
            put(writer, mine, prompt(2 * CHUNK, 2))
            return writer.lookup(prompt(2 * CHUNK, 2)) == 2 * CHUNK

        eventually(stored)
    reader.resume()
    answer = reader.answer()
    assert answer.tokens == 0
    stats = reader.ask("stats")
    assert (stats["resident"]["refused"], stats["failures"]) == (1, {}), "at the first"
    assert (stats["hits"]["vram"], stats["tokens"]["retrieved"]) == (0, 0)
    eventually(lambda: reader.ask("stats")["connected"])
    good = reader.ask("retrieve", prompt(2 * CHUNK, 2), places(SMALL, 2 * CHUNK))
    assert (good.tokens, good.wrong, good.clean) == (2 * CHUNK, 0, True)


# ---- segments and layouts


def test_kv_caches_that_are_not_what_the_layout_says_are_refused(served: Node) -> None:
    mine, planted = Cache(), Cache(FLASH._replace(dtype=torch.float16))
    writer = served.engine("host:a", ROOMY, layout_of(mine))
    liar = served.engine("host:b", 0, layout_of(mine))
    with pytest.raises(LayoutError, match="the layout says 3 of"):
        liar.register(planted.tensors)
    put(writer, mine, prompt(2 * CHUNK))
    said = "but the layout says 3 of part2.token16.head4.dim16 bfloat16"
    with pytest.raises(ValueError, match=said):
        put(liar, planted, prompt(2 * CHUNK, 2))
    with pytest.raises(ValueError, match=said):
        get(liar, planted, prompt(2 * CHUNK))
    assert writer.lookup(prompt(2 * CHUNK, 2)) == 0


def test_a_segment_dropped_under_running_engines_is_a_miss_and_is_unmapped(served: Node) -> None:
    pair = Pair(served)
    put(pair.writer, pair.mine, prompt(2 * CHUNK))
    assert get(pair.reader, pair.theirs, prompt(2 * CHUNK)) == 2 * CHUNK
    (segment,) = served.client().list_segments()
    assert served.client().drop_segment(segment.id) == m.Dropped(2, True)
    assert pair.reader.lookup(prompt(2 * CHUNK)) == 0
    assert get(pair.reader, pair.theirs, prompt(2 * CHUNK)) == 0
    eventually(lambda: segment.id not in Path("/proc/self/maps").read_text())
    put(pair.writer, pair.mine, prompt(2 * CHUNK))
    assert pair.writer.lookup(prompt(2 * CHUNK)) == 0
    assert served.client().list_segments() == [], "a dropped segment stays dropped"
    third = served.engine("host:c", ROOMY, pair.layout)
    put(pair.writer, pair.mine, prompt(2 * CHUNK))
    assert get(third, pair.theirs, prompt(2 * CHUNK)) == 2 * CHUNK


def test_who_cannot_map_a_segment_still_stores(
    served: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has the most room, so that every store would go there; as a GPU's without peer access, or
    one that is forged.
    """
    mine = Cache()
    far = served.engine("host:far", 8 * ROOMY, layout_of(mine))
    mapping = regions.map_segment

    def refusing(info: m.SegmentInfo, fd: int, reader: Device) -> torch.Tensor:
        if info.device == "host:far":
            raise SegmentError(f"{reader} has no peer access to it")
        return mapping(info, fd, reader)

    monkeypatch.setattr(regions, "map_segment", refusing)
    served.engine("host:a", ROOMY, layout_of(mine))
    engine = served.engine("host:b", 0, layout_of(mine))
    put(engine, mine, prompt(CHUNK))
    put(far, mine, prompt(2 * CHUNK))
    assert get(engine, mine, prompt(2 * CHUNK)) == CHUNK, "what lies there is a miss"
    for family in range(2, 6):
        put(engine, mine, prompt(2 * CHUNK, family))
        assert engine.lookup(prompt(2 * CHUNK, family)) == 2 * CHUNK
        assert get(engine, mine, prompt(2 * CHUNK, family)) == 2 * CHUNK
    served.server.kill()
    served.serve()
    eventually(lambda: engine.lookup(prompt(2 * CHUNK, 2)) == 2 * CHUNK)
    put(engine, mine, prompt(2 * CHUNK, 8))
    assert get(engine, mine, prompt(2 * CHUNK, 8)) == 2 * CHUNK


# ---- the server is absent, gone, hung, restarted


def test_a_reader_gives_a_restarted_server_the_segment_of_a_dead_worker(served: Node) -> None:
    """Whoever has mapped a segment holds it: server and owner may both be gone."""
    owner = served.worker("host:a", ROOMY)
    owner.ask("store", prompt(2 * CHUNK), places(SMALL, 2 * CHUNK))
    assert owner.ask("flush")
    theirs = Cache()
    reader = served.engine("host:b", 0, layout_of(theirs))
    assert get(reader, theirs, prompt(2 * CHUNK)) == 2 * CHUNK
    owner.kill()
    served.server.kill()
    served.serve()
    eventually(lambda: reader.lookup(prompt(2 * CHUNK)) == 2 * CHUNK)
    assert get(reader, theirs, prompt(2 * CHUNK)) == 2 * CHUNK


def test_after_a_cold_restart_a_worker_waits_for_memory_that_others_still_map(served: Node) -> None:
    client = served.undo.enter_context(Client(served.path, QUICK, "host:a"))
    elsewhere = Shortfall("it is mapped elsewhere", 0)
    refusals = [None, elsewhere, elsewhere, None]
    pool = Pool(client, Device("host:a", "host"), ROOMY, lambda whole, new: refusals.pop(0))
    served.undo.callback(pool.close)
    (first,) = client.list_segments()
    with leaving_nothing(served.path):
        served.server.kill()
    served.serve()
    eventually(lambda: not refusals)
    (second,) = eventually(lambda: client.connected and client.list_segments())
    assert second.id != first.id


def test_a_pool_of_the_default_size_takes_what_fits_and_one_of_a_set_size_all_or_nothing(
    served: Node,
) -> None:
    """On a GPU of 100 MiB beside vLLM's default utilisation, where 8 MiB are too much."""
    lent = dict[str, int]()
    for name, least in (("default", MIB), ("small", 4 * MIB), ("set", None)):
        client = served.undo.enter_context(Client(served.path, QUICK, f"host:{name}"))

        def over_budget(whole: int, new: int) -> Shortfall | None:
            return shortfall(100 * MIB, 8 * MIB, whole, new, 0.92)

        device = Device(f"host:{name}", "host")
        for _ in range(2):  # and a second worker of the device adds nothing
            pool = Pool(client, device, 8 * MIB, over_budget, least)
            served.undo.callback(pool.close)
        mine = [each.nbytes for each in client.list_segments() if each.device == device.name]
        lent[name] = sum(mine)
        said = [each.text for each in client.stats().reports if device.name in each.text]
        assert any("gpu_memory_utilization to 0.87 or less" in line for line in said) == (not mine)
    assert lent == {"default": 2 * MIB, "small": 0, "set": 0}


@pytest.mark.gpu
def test_a_gpu_lends_fresh_memory_once_everybody_has_unmapped_the_old(served: Node) -> None:
    """The two do not fit at once."""
    device, most = resolve("cuda:0"), int(0.6 * torch.cuda.mem_get_info(0)[0])
    client = served.undo.enter_context(Client(served.path, QUICK, device.name, "cuda"))
    served.undo.callback(Pool(client, device, most).close)
    served.worker("cuda:0")
    (first,) = client.list_segments()
    with leaving_nothing(served.path):
        served.server.kill()
    eventually(lambda: not client.connected)
    served.serve()
    (second,) = eventually(lambda: client.connected and client.list_segments())
    assert second.id != first.id
