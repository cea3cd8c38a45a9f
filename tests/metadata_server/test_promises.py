"""Promises: what a look-up says of chunks that another instance is computing."""

from __future__ import annotations

import os

from instance_cases import EACH, NAMESPACE, find, instance_id, join, keys, publish, share, show
from model import FakeClock, chunk_key
from processes import SECONDS, Stage, eventually, info, make_memfd
from server_cases import add_region, asked

from vcache_backend.metadata_server.processes import Peer, ProcessId
from vcache_backend.metadata_server.promises import Promises
from vcache_backend.metadata_server.requests import Service
from vcache_backend.protocol import messages as m
from vcache_backend.protocol.client import Client

A, B = instance_id(1), instance_id(2)
KIB = 1024
ALICE = Peer(1, ProcessId(10, 1), "gpu-0", "host")
BOB = Peer(2, ProcessId(20, 2), "gpu-0", "host")


def coming(client: Client, count: int, promise: int = 0) -> m.Coming | None:
    return client.find(find(count, 1, B, promise=promise)).coming


def chunks(client: Client, count: int) -> tuple[int, int]:
    """How many chunks are there, and how many come."""
    found = client.find(find(count, 1, B))
    return found.found // EACH, found.coming.chunks if found.coming is not None else 0


def test_of_two_look_ups_at_once_the_second_sees_the_promise_of_the_first(stage: Stage) -> None:
    first, second = stage.client(), stage.client()
    assert first.find(find(5, 1, A, promise=1)).coming is None
    told = coming(second, 6, promise=1)
    assert (told.chunks, told.begun) == (5, False)
    assert first.find(find(5, 1, A, promise=1)).coming is None, "nobody waits for oneself"
    assert first.find(find(6, 1, A)).coming is None, "who waits promises nothing"
    assert first.promise(m.Promise(1, keys(5), chunk_seconds=0.5)) == m.Promised(5)
    told = coming(second, 6)
    assert (told.chunks, told.begun, told.chunk_seconds) == (5, True, 0.5)
    assert told.quiet < SECONDS
    first.find(find(1, 1, A, start=6, promise=2))
    first.promise(m.Promise(3, keys(1, start=7), begun=False))
    found = [second.find(find(1, 1, B, start=at)).coming for at in (6, 7)]
    assert [(one.begun, one.chunk_seconds) for one in found] == [(False, 0.5), (False, 0.0)]


def test_who_waits_has_nobody_wait_for_what_it_has_promised(stage: Stage) -> None:
    """Else two wait for each other."""
    first, second = stage.client(), stage.client()
    first.find(find(5, 1, A, promise=1))
    second.promise(m.Promise(1, keys(1)))
    assert first.find(find(5, 1, A, promise=1)).coming.chunks == 1
    assert coming(second, 5) is None
    assert second.find(find(4, 1, B, start=1)).coming is None


def test_promised_chunks_become_resident_one_after_the_other(stage: Stage) -> None:
    owner, reader = stage.client(), stage.client()
    join(owner, A)
    show(owner, A)
    owner.find(find(4, 1, A, promise=7))
    for published in range(4):
        assert chunks(reader, 6) == (published, 4 - published)
        publish(owner, A, 1, 4 * published, published)
    assert chunks(reader, 6) == (4, 0)
    # What the owner has published already it does not promise.
    owner.find(find(6, 1, A, promise=8))
    assert chunks(reader, 6) == (4, 2)
    counters = reader.stats().counters
    assert (counters["promised_chunks"], counters["promised_chunks_arrived"]) == (6, 4)
    owner.promise(m.Promise(8))
    assert chunks(reader, 6) == (4, 0)


def test_a_promise_that_comes_late_leaves_out_what_can_be_read_already(stage: Stage) -> None:
    """In place what its own instance has; in a pool what all ranks have."""
    owner, reader = stage.client(), stage.client()
    share(owner, A, 2)
    assert owner.promise(m.Promise(1, keys(4), instance=A)).chunks == 2
    assert chunks(reader, 6) == (2, 2)
    publish(owner, A, 2, 8, 2)
    assert owner.promise(m.Promise(1, keys(4), instance=A)).chunks == 0
    # Another instance computes these chunks for itself.
    assert reader.promise(m.Promise(1, keys(4), instance=B)).chunks == 4
    pooled = keys(3, start=1 << 40)
    memory = make_memfd(1 << 20)
    owner.add_segment(info("s", 1 << 20), memory)
    os.close(memory)

    def store(rank: int, some: list[m.ChunkKey]) -> None:
        owner.commit(owner.reserve(m.of_rank(some, rank), KIB).reservation)

    store(0, pooled[:2])
    store(1, pooled[:1])
    assert owner.promise(m.Promise(2, pooled, 2)).chunks == 2
    store(1, pooled[1:2])
    found = reader.find(find(3, 2, start=1 << 40, pool_only=True))
    assert len(found.pooled) == 2
    assert found.coming.chunks == 1
    store(1, pooled[2:])
    store(0, pooled[2:])
    assert reader.find(find(3, 2, start=1 << 40, pool_only=True, promise=2)).pooled == bytes(
        [1] * 3
    )
    assert owner.stats().counters["promised_chunks"] == 2 + 4 + 2


def test_a_promise_from_before_a_reset_is_refused(stage: Stage) -> None:
    """The answer names the epoch, with which the next one is taken."""
    owner, reader = stage.client(), stage.client()
    owner.clear(NAMESPACE, reset=True)
    owner.find(find(4, 1, A, promise=1))
    assert chunks(reader, 4) == (0, 4)
    refused = owner.promise(m.Promise(1, keys(4)))
    assert (refused.chunks, refused.epoch > 0) == (0, True)
    assert chunks(reader, 4) == (0, 0)
    assert owner.promise(m.Promise(2, keys(4), epoch=refused.epoch)) == m.Promised(4, refused.epoch)
    assert chunks(reader, 4) == (0, 4)


def test_a_promise_ends_when_withdrawn_or_replaced_or_its_client_is_gone(stage: Stage) -> None:
    owner, reader = stage.client(), stage.client()
    assert owner.promise(m.Promise(1, keys(1) * 2)).chunks == 1, "a chunk that is named twice"
    owner.promise(m.Promise(1, keys(4)))
    assert chunks(reader, 6) == (0, 4)
    owner.promise(m.Promise(1, keys(2)))
    assert chunks(reader, 6) == (0, 2)
    owner.promise(m.Promise(1, []))
    assert chunks(reader, 6) == (0, 0)
    owner.promise(m.Promise(2, keys(3)))
    owner.clear(NAMESPACE)
    assert chunks(reader, 6) == (0, 0)
    # Who begins to compute takes the promise over.
    owner.promise(m.Promise(3, keys(3)))
    reader.promise(m.Promise(1, keys(1)))
    assert chunks(reader, 6) == (0, 0)
    assert chunks(owner, 6) == (0, 1)
    reader.promise(m.Promise(1, []))
    # All of the client's, and nobody else's.
    owner.promise(m.Promise(4, keys(3)))
    reader.promise(m.Promise(0, []))
    assert chunks(reader, 6) == (0, 3)
    owner.promise(m.Promise(0, []))
    assert chunks(reader, 6) == (0, 0)
    owner.promise(m.Promise(4, keys(3)))
    owner.close()
    eventually(lambda: chunks(reader, 6) == (0, 0))
    assert reader.stats().counters["promised_chunks_broken"] > 0


def made(clock: FakeClock) -> Service:
    return Service(1, now=clock)


def store(service: Service, some: list[m.ChunkKey]) -> None:
    reserved = asked(service, ALICE, m.Reserve(some, KIB))
    asked(service, ALICE, m.Commit(reserved.reservation))


def test_what_a_queued_request_has_promised_passes_to_one_that_begins() -> None:
    """Not at once, for the first may begin as well; and not what a step has begun to compute."""
    clock = FakeClock()
    told = made(clock).promises

    def intends(client: Peer, chunks: int, begins: bool) -> bool:
        """Whether this client's request computes the chunks, by the answer to its look-up."""
        coming = told.coming(client, keys(chunks), begins)
        if coming is None:
            told.intend(client, 1, dict.fromkeys(keys(chunks), 0), 1, begins)
        return coming is None

    assert intends(ALICE, 4, begins=False)
    clock.advance(m.QUEUED_SECONDS)
    assert not intends(BOB, 4, begins=True)
    assert intends(ALICE, 4, begins=True), "asked again: it begins"
    clock.advance(m.QUEUED_SECONDS)
    assert not intends(BOB, 4, begins=True)
    clock.advance(0.01)
    assert not intends(BOB, 4, begins=False), "it waits in a queue as well"
    assert intends(BOB, 3, begins=True)
    assert not intends(ALICE, 4, begins=True)
    told.begin(BOB, m.Promise(1, keys(3)), dict.fromkeys(keys(3), 0))
    clock.advance(m.QUEUED_SECONDS * 2)
    assert not intends(ALICE, 4, begins=True)
    assert intends(BOB, 4, begins=True), "the last one that Alice had promised, too"
    assert not intends(ALICE, 4, begins=False)


def test_a_promise_that_is_quiet_for_long_is_dropped() -> None:
    clock = FakeClock()
    service = made(clock)
    asked(service, ALICE, m.Promise(1, keys(2), begun=False))
    clock.advance(Promises.QUIET_SECONDS - 1)
    service.promises.arrived(keys(1))
    clock.advance(Promises.QUIET_SECONDS - 1)
    service.tick()
    told = service.promises.coming(BOB, keys(1, start=1))
    assert (told.quiet, told.begun) == (Promises.QUIET_SECONDS - 1, True)
    clock.advance(2)
    service.tick()
    assert service.promises.coming(BOB, keys(1, start=1)) is None
    assert len(service.promises) == 0


def test_a_chunk_that_one_of_its_ranks_has_stored_is_a_promise_s_progress() -> None:
    """Whoever waits for it sees that its owner goes on. All ranks' end the promise, and one that
    gets no slot.
    """
    clock = FakeClock()
    service = made(clock)
    add_region(service, info("s", 1 << 20, "gpu-0"))
    asked(service, ALICE, m.Promise(1, keys(1), ranks=2))
    for rank, quiet in ((1, 0.0), (2, 5.0)):
        clock.advance(5)
        store(service, keys(1, rank))
        assert service.promises.coming(BOB, keys(1)).quiet == quiet
    store(service, keys(1))
    assert service.promises.coming(BOB, keys(1)) is None
    asked(service, ALICE, m.Promise(2, keys(1, start=1), ranks=2))
    asked(service, ALICE, m.Reserve(keys(1, 1, start=1), 2 << 20))
    assert service.promises.coming(BOB, keys(1, start=1)) is None, "it got no slot"
    asked(service, ALICE, m.Clear())


def test_promises_are_bounded() -> None:
    service = made(FakeClock())
    for first in range(1 << 30, (1 << 30) + 2 * m.MAX_KEYS, m.MAX_KEYS):
        many = [chunk_key(first + at) for at in range(m.MAX_KEYS)]
        service.promises.intend(BOB, 1, many, 1, False)
    assert len(service.promises) == m.MAX_KEYS, "look-ups of one request for ever other chunks"
    for number in range(2 * Promises.MAX_PROMISED // m.MAX_KEYS):
        first = number * m.MAX_KEYS
        many = [chunk_key(first + at) for at in range(m.MAX_KEYS)]
        asked(service, ALICE, m.Promise(number, many))
    assert len(service.promises) == Promises.MAX_PROMISED
    asked(service, ALICE, m.Clear())
    assert len(service.promises) == 0
