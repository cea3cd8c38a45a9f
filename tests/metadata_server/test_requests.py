"""A real server spoken to by hand: sockets and the `msgpack` package, every request type, literal
arrays.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
from model import FakeClock, chunk_key
from processes import PATIENT, Child, Raw, Stage, eventually, stage
from server_cases import asked

from vcache_backend.errors import MAX_LINE_CHARS
from vcache_backend.metadata_server.processes import Peer, ProcessId
from vcache_backend.metadata_server.report import MAX_COMPARED
from vcache_backend.metadata_server.requests import Service
from vcache_backend.metadata_server.slots import SLAB_SLOTS
from vcache_backend.protocol import messages as m
from vcache_backend.protocol.client import Client

KIB = 1 << 10
A, B, C, D, E = (chunk_key(n) for n in range(5))


@pytest.fixture
def server(alone: Stage) -> Child:
    return alone.server()


@pytest.fixture
def stage_(alone: Stage, server: Child) -> Iterator[Stage]:
    """The clients of the server. It is left with no descriptor of theirs."""
    before = len(server.fds())
    with stage(alone.path.parent) as made:
        yield made
    with Raw(alone.path) as raw:
        for segment in raw.ask("list_segments")[1]:
            raw.ask("drop_segment", segment[0])
    eventually(lambda: len(server.fds()) <= before)


@pytest.fixture
def raw(stage_: Stage) -> Raw:
    return stage_.raw()


@pytest.fixture
def worker(raw: Raw, memfd: int) -> Raw:
    """A connection on whose node one host segment has room for four chunks of 1 KiB."""
    assert raw.ask("add_segment", "s0", "host", "host", 4 * KIB, fds=(memfd,)) == ["count", 0]
    return raw


def hello(stage: Stage, layout: dict[str, str], device: str = "host") -> list[Any]:
    """What a new connection of an instance is answered."""
    return stage.raw(hello=False).hello(layout, device)


def put(raw: Raw, *keys: bytes) -> list[Any]:
    _, reservation, _, slots, *_ = raw.ask("reserve", list(keys), KIB)
    assert raw.ask("commit", reservation, []) == ["count", len(keys)]
    return slots


# ---- the protocol, message by message


def test_each_request_and_its_answer(stage_: Stage, worker: Raw, server: Child, memfd: int) -> None:
    """As literal arrays. What the answers say is the directory's tests' business."""
    name, run_id, mismatches = worker.welcome
    assert (name, mismatches) == ("welcome", [])
    assert isinstance(run_id, int)
    assert worker.hello()[::2] == ["error", False]
    segment = ["s0", "host", "host", 4096, 0, 0, 0]
    assert worker.ask("list_segments") == ["segments", [segment], 0, []]
    assert worker.ask("open_segment", "s0") == ["opened", segment]
    assert os.fstat(worker.fds[-2]).st_ino == os.fstat(memfd).st_ino
    assert os.fstat(worker.fds[-1]).st_ino == os.fstat(worker.fds[0]).st_ino
    assert worker.ask("lend", 5 * KIB) == ["count", KIB]
    name, reservation, seconds, slots, reason, _ = worker.ask("reserve", [A, B], KIB)
    expected = ("reserved", 30.0, "", [["s0", 0, KIB], ["s0", KIB, KIB]])
    assert (name, seconds, reason, slots) == expected
    assert worker.ask("commit", reservation, []) == ["count", 2]
    assert worker.ask("abort", worker.ask("reserve", [C], KIB)[1]) == ["count", 1]
    assert worker.ask("reserve", [A, C], 5 * KIB)[3] == [m.Refusal.EXISTS, m.Refusal.TOO_LARGE]
    hashes = b"".join([key[8:24] for key in (A, B, C)])
    found = ["found", 2, 1, b"\1\1", []]
    assert worker.ask("find", A[:8], hashes, 1, 1)[:5] == found
    found = ["found", 2, 2, b"\1", []]
    assert worker.ask("find", A[:8], bytes(16) + hashes[:16], 2, 5)[:5] == found
    assert worker.ask("contains", [A, D]) == ["present", [True, False], 0]
    name, runs, _ = worker.ask("pin", [A, B, C], 2.0)
    # In each slab of this segment is one slot.
    packed = [bytes(m.NUMBER_BYTES), SLAB_SLOTS.to_bytes(m.NUMBER_BYTES, "little")]
    assert [run[:2] + run[3:] for run in runs] == [
        [0, packed[0], "s0", 0, 0, KIB],
        [1, packed[1], "s0", SLAB_SLOTS, KIB, KIB],
    ]
    assert [len(run[2]) for run in runs] == [m.GENERATION_BYTES] * 2
    assert worker.ask("pin", [C]) == ["pinned", [], 0]
    assert worker.ask("remove", [A, D]) == ["count", 1]
    cleared = [worker.ask("clear", space) for space in (b"another!", b"namespac", b"")]
    assert cleared == [["count", 0], ["count", 1], ["count", 0]]
    assert worker.ask("report", "info", "all is well") == ["count", 1]
    assert worker.ask("drop_segment", "s0") == ["count", 0]
    eventually(lambda: not any("vcache-test" in name for name in server.fds()))
    assert worker.ask("drop_segment", "s0")[0] == worker.ask("open_segment", "s0")[0] == "error"


def test_a_reset_raises_the_epoch_of_one_namespace_or_of_all(stage_: Stage, worker: Raw) -> None:
    other = b"another!" + A[8:]
    names = b"namespac".hex(), b"another!".hex(), "no digits", ""
    clients = [stage_.client(layout={"model": "llama", "namespace": name}) for name in names]

    def epochs() -> list[int]:
        return [worker.ask("contains", [key])[2] for key in (A, other)]

    before = epochs()
    assert worker.ask("clear", b"namespac", True) == ["count", 0]
    first, theirs = epochs()
    assert (first > before[0], theirs) == (True, before[1])
    # Each client hears of its own with its heartbeats.
    assert [client.heartbeat().epoch for client in clients] == [first, *before[1:] * 3]
    # It comes with room and with places, too.
    put(worker, A)
    assert [worker.ask("reserve", [A], KIB)[-1], worker.ask("pin", [A])[-1]] == [first, first]
    worker.ask("clear", b"", True)
    assert first < epochs()[0] == epochs()[1]
    assert {client.heartbeat().epoch for client in clients} == {*epochs()}


def test_a_dropped_segment_is_the_one_handed_out(worker: Raw, server: Child, memfd: int) -> None:
    """The number of a closed descriptor could be anybody's by then."""
    for message in (["open_segment", "s0"], ["drop_segment", "s0"]):
        worker.send(*message)
    opened, dropped = worker.receive(), worker.receive()
    assert (opened[0], dropped) == ("opened", ["count", 0])
    assert os.fstat(worker.fds[-2]).st_ino == os.fstat(memfd).st_ino
    eventually(lambda: not any("vcache-test" in name for name in server.fds()))


def test_who_cannot_share_is_told_why(stage_: Stage, caplog: pytest.LogCaptureFixture) -> None:
    """The one that joins says it in its own log; the statistics say it as long as both are
    there.
    """
    layout = {"model": "llama", "extra.hash_root": "17", "namespace": "aa", "pp_rank": "0"}
    assert hello(stage_, layout)[2] == []
    strange = layout | {"extra.hash_root": "-4", "namespace": "bb"}
    other = Client(stage_.path, PATIENT, layout=strange, reconnect=False)
    here = f"pid {os.getpid()} on host"
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith(f"vcache: another instance of 'llama' ({here}) does not share")
    assert "extra.hash_root: '-4' here, '17' there" in line
    assert "same PYTHONHASHSEED" in line
    assert hello(stage_, {"model": "qwen", "namespace": "cc"})[2] == []
    next_stage = hello(stage_, layout | {"pp_rank": "1", "namespace": "dd"})
    # The stages of one instance are no mismatch.
    assert ["'17' here, '-4' there" in line for line in next_stage[2]] == [True]
    (mismatch,) = other.stats().mismatches
    assert (mismatch.model, mismatch.field) == ("llama", "extra.hash_root")
    assert dict(mismatch.values)["-4"] == [here]
    assert "PYTHONHASHSEED" in mismatch.advice
    with stage_.client() as looking:
        other.close()
        eventually(lambda: not looking.stats().mismatches)


def test_no_layout_is_anybody_else_s_trouble(stage_: Stage, server: Child) -> None:
    """Without a model, with names for a terminal, or as large as a frame: its own hello may be
    refused, every other one is not.
    """
    assert hello(stage_, {"namespace": "aa"})[0] == hello(stage_, {})[0] == "welcome"
    victim = {"model": "llama", "namespace": "aa"}
    for layout in ({**victim, "\x1b[2J": "x"}, dict.fromkeys(map(str, range(65)), "x")):
        assert "hello of protocol" in hello(stage_, layout)[1]
    assert hello(stage_, {}, device="\x1b]0;owned\x07")[0] == "error"
    with stage_.client() as looking:
        before = looking.stats().rss_bytes
        for number in range(100):
            large = {**victim, "namespace": str(number), "long": "x" * 190_000 + str(number)}
            assert hello(stage_, large)[0] == "welcome"
        assert looking.stats().rss_bytes < before + (8 << 20), "all of what they said is kept"
        (mismatch,) = looking.stats().mismatches
        assert (mismatch.field, len(mismatch.values)) == ("long", MAX_COMPARED)
    said = hello(stage_, victim)
    assert (said[0], len(said[2])) == ("welcome", 8)
    assert len(str(said)) < 8 * MAX_LINE_CHARS


# ---- one client's requests and the others'


def test_a_claim_keeps_others_from_lending_the_same_bytes_for_a_while() -> None:
    clock = FakeClock()
    service = Service(1, now=clock)
    first, second, third = (Peer(n, ProcessId(n, n), "gpu-0", "host") for n in range(3))
    other = Peer(3, ProcessId(3, 3), "gpu-1", "host")
    for peer in (first, second, third, other):
        service.layouts.add(peer, {})

    def lend(peer: Peer, nbytes: int = 100) -> m.Reply:
        return asked(service, peer, m.Lend(nbytes))

    assert [lend(peer) for peer in (first, second, other)] == list(map(m.Count, (100, 0, 100)))
    clock.now += 121
    assert [lend(peer) for peer in (third, first)] == [m.Count(100), m.Count(0)]
    service.disconnect(third)
    assert lend(second, 60) == m.Count(60)
