"""Stores between their reservation and their commit."""

from __future__ import annotations

import threading
from typing import Any

import engine_cases
import pytest
from engine_cases import ROOMY, Node, Pair, counts, fresh, get, here, pair, put
from kv_cases import CHUNK, SMALL, Cache, layout_of, places, prompt
from processes import SECONDS, eventually

from vcache_backend.errors import Refused, ServerTimeout
from vcache_backend.protocol import messages as m
from vcache_backend.transfer import store
from vcache_backend.vram_pool.copies.copier import Completion, CopyJob, HostCopier, Mark

__all__ = ["fresh", "here", "pair"]
RESERVATION_SECONDS = 3.0
"""Short, since tests wait for its end; a copy that begins in the second half of it is late, so that a
machine that stalls must not miss the first."""


def test_a_store_behind_too_many_is_skipped(fresh: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "MAX_INFLIGHT", 2)
    copier, mine = engine_cases.UnfinishedCopier(), Cache()
    writer = fresh.engine("host:a", ROOMY, layout_of(mine), copier=copier)
    slots = places(mine.sizes, CHUNK)
    for family in range(1, 5):
        writer.store(prompt(CHUNK, family), None, mine.tensors, slots)
    copier.finished.set()
    assert writer.flush(SECONDS)
    assert [writer.lookup(prompt(CHUNK, family)) for family in range(1, 5)] == [CHUNK, CHUNK, 0, 0]
    assert writer.get_stats()["not_stored"]["backlog"] == 2


def test_close_finishes_the_stores_under_way(fresh: Node) -> None:
    copier, mine, tokens = engine_cases.UnfinishedCopier(), Cache(), prompt(4 * CHUNK)
    writer = fresh.engine("host:a", ROOMY, layout_of(mine), copier=copier)
    slots = places(mine.sizes, len(tokens))
    mine.fill(tokens, slots)
    writer.store(tokens, None, mine.tensors, slots)
    threading.Timer(0.1, copier.finished.set).start()
    writer.close()
    assert get(fresh.engine("host:b", 0, layout_of(mine)), mine, tokens) == len(tokens)


def test_a_copy_that_outlasts_its_reservation_keeps_its_slot_until_it_is_over(here: Node) -> None:
    here.serve(reservation_seconds=RESERVATION_SECONDS)
    copier, mine, client = engine_cases.UnfinishedCopier(), Cache(), here.client()
    other = here.engine("host:a", 2 * mine.chunk_bytes, layout_of(mine))
    writer = here.engine("host:b", 0, layout_of(mine), copier=copier)
    writer.store(prompt(CHUNK), None, mine.tensors, places(SMALL, CHUNK))
    eventually(lambda: counts(client) == (0, 1))
    # Its key is free again, its slot is not: of two chunks one finds room, whatever is evicted.
    for family in (1, 2, 3, 1):
        put(other, mine, prompt(CHUNK, family))
    assert client.list_segments()[0].chunks == 1
    assert get(other, Cache(), prompt(CHUNK)) == CHUNK
    copier.finished.set()
    assert writer.flush(SECONDS)
    stats = writer.get_stats()
    assert (stats["tokens"]["stored"], stats["failures"]["reservation_void"]) == (0, 1)
    eventually(lambda: counts(client) == (0, 0))
    put(other, mine, prompt(CHUNK, 4))
    assert client.list_segments()[0].chunks == 2
    assert [get(other, Cache(), prompt(CHUNK, family)) for family in (1, 4)] == [CHUNK, CHUNK]


class NoCopier(HostCopier):
    """Must not be asked to store."""

    def copy(self, job: CopyJob, after: Mark | None = None) -> Completion:
        pytest.fail("a copy was launched")


def test_a_writer_that_is_late_copies_nothing(here: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a process may be stopped for as long as somebody likes: between the server's answer and
    the launch of the copy.
    """
    here.serve(reservation_seconds=RESERVATION_SECONDS)
    mine, theirs, client = Cache(), Cache(), here.client()
    other = here.engine("host:a", 2 * mine.chunk_bytes, layout_of(mine))
    writer = here.engine("host:b", 0, layout_of(mine), copier=NoCopier())
    find = writer._session.pool.slots

    def find_late(locations: list[m.Location], nbytes: int) -> list[Any]:
        eventually(lambda: counts(client) == (0, 1))
        put(other, mine, prompt(CHUNK))
        return find(locations, nbytes)

    monkeypatch.setattr(writer._session.pool, "slots", find_late)
    writer.store(prompt(CHUNK), None, theirs.tensors, places(SMALL, CHUNK))
    eventually(lambda: counts(client) == (0, 0))
    assert writer.get_stats()["not_stored"]["late"] == 1
    assert get(other, mine, prompt(CHUNK)) == CHUNK
    assert client.list_segments()[0].used == mine.chunk_bytes


def test_a_listener_that_raises_is_told_of_the_next_store(pair: Pair) -> None:
    heard = list[Any]()

    def listen(keys: list[Any]) -> None:
        heard.append(keys)
        raise RuntimeError("on purpose")

    pair.writer._session.on_stored.append(listen)
    for family in (1, 2):
        put(pair.writer, pair.mine, prompt(CHUNK, family))
        assert get(pair.reader, pair.theirs, prompt(CHUNK, family)) == CHUNK
    assert len(heard) == 2


class Endless:
    """A copy of which nobody can tell whether it is over."""

    seconds = None

    def done(self) -> bool:
        raise RuntimeError("on purpose")

    def wait(self, timeout_s: float) -> bool:
        return self.done()


def test_a_copy_of_which_nobody_can_tell_whether_it_is_over_holds_up_no_store(
    pair: Pair, fresh: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    copier, copy = pair.writer._session.copier, pair.writer._session.copier.copy
    monkeypatch.setattr(copier, "copy", lambda *given: (copy(*given), Endless())[1])
    put(pair.writer, pair.mine, prompt(CHUNK))
    monkeypatch.setattr(copier, "copy", copy)
    put(pair.writer, pair.mine, prompt(CHUNK, 2))
    assert get(pair.reader, pair.theirs, prompt(CHUNK, 2)) == CHUNK
    assert get(pair.reader, pair.theirs, prompt(CHUNK)) == 0
    with fresh.client() as bystander:
        # Its slot is not used again: the copy may still write.
        assert counts(bystander) == (1, 0)


def test_an_abort_that_is_late_is_sent_again(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else slots would stay reserved. One that is refused is not: a client would ask for ever."""
    session = pair.writer._session
    answers: dict[int, list[Exception]] = {5: [ServerTimeout("late")], 6: [Refused("no")]}
    sent = list[int]()

    def abort(reservation: int) -> int:
        sent.append(reservation)
        if answers[reservation]:
            raise answers[reservation].pop()
        return 0

    monkeypatch.setattr(session.client, "abort", abort)
    for reservation in (5, 6):
        store.give_back(session, reservation)
    assert session.outbox.flush(SECONDS)
    assert sorted(sent) == [5, 5, 6]
