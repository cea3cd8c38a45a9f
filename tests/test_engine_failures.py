"""The engine while its peers and its server fail: every failure is a miss, in bounded time, and never a
wrong byte.
"""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from engine_cases import ROOMY, Node, Pair, counts, get, here, put, said, served
from kv_cases import CHUNK, SMALL, Cache, layout_of, places, prompt
from processes import eventually, hung

from vcache_backend.vram_pool.copies.copier import Completion, CopyJob, HostCopier, Mark

__all__ = ["here", "served"]


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


# ---- what readers read goes


def test_a_segment_dropped_under_running_engines_is_a_miss_and_is_unmapped(served: Node) -> None:
    pair = Pair(served)
    put(pair.writer, pair.mine, prompt(2 * CHUNK))
    assert get(pair.reader, pair.theirs, prompt(2 * CHUNK)) == 2 * CHUNK
    (segment,) = served.client().list_segments()
    assert served.client().drop_segment(segment.id) == 2
    assert pair.reader.lookup(prompt(2 * CHUNK)) == 0
    assert get(pair.reader, pair.theirs, prompt(2 * CHUNK)) == 0
    eventually(lambda: segment.id not in Path("/proc/self/maps").read_text())
    put(pair.writer, pair.mine, prompt(2 * CHUNK))
    assert pair.writer.lookup(prompt(2 * CHUNK)) == 0
    assert served.client().list_segments() == [], "a dropped segment stays dropped"
    third = served.engine("host:c", ROOMY, pair.layout)
    put(pair.writer, pair.mine, prompt(2 * CHUNK))
    assert get(third, pair.theirs, prompt(2 * CHUNK)) == 2 * CHUNK


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
