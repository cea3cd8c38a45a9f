"""Messages: what our decoder makes of bytes nobody meant well, and what a real server does with
them.
"""

from __future__ import annotations

import select
import signal
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import msgpack
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from model import chunk_key
from processes import SECONDS, Child, Raw, Stage, eventually, running, stage

from vcache_backend.log_format import LineLimit
from vcache_backend.metadata_server import processes
from vcache_backend.protocol import messages as m
from vcache_backend.protocol import sockets

A = chunk_key(1)
INSTANCE, S = m.InstanceId(bytes(range(16))), m.SegmentId("s")
KIND = m.LayerKind(1, 2, 64, 64)
SHAPE = m.CacheShape("host", "host", "x", [KIND], 8, 16, [0, 512], 4096)
REQUESTS: list[m.AnyRequest] = [m.Hello(1, "GPU-1", "cuda", {"model": "llama"}), m.Stats()]
REQUESTS += [m.AddSegment(S, "host", "host", 4096), m.OpenSegment(S), m.DropSegment(S)]
REQUESTS += [m.ListSegments(1, 2, 3, 4, 5, 6, [m.Reads(INSTANCE, 5, 6, 7)], [S]), m.Lend(4096)]
REQUESTS += [m.Reserve([A], 1024), m.Commit(7, [A]), m.Abort(7), m.Clear(b"namespac")]
REQUESTS += [m.Pin([A], 2.0), m.Contains([A])]
REQUESTS += [m.Remove([A]), m.Report("warn", "slow")]
REQUESTS += [
    m.Join(INSTANCE, b"namespac", 64, 2, 4, [m.BlockTable("full"), m.BlockTable("window", 1, 9)])
]
REQUESTS += [m.ShowCache(INSTANCE, 1, SHAPE), m.OpenInstance(INSTANCE), m.OpenCache(INSTANCE, 1)]
RUN = m.BlockRun(3, bytes(4), bytes(8), 1, bytes(16))
REQUESTS += [m.Publish(INSTANCE, 1, [RUN], 9)]
REQUESTS += [m.Find(b"namespac", bytes(64), 2, 3, 2, INSTANCE)]
REQUESTS += [m.Promise(7, [A], 2, b"a" * 16, 3, 0.01, 0.25)]
SENT = [sockets.encode(request) for request in REQUESTS]


def packed(*message: Any) -> bytes:
    return msgpack.packb(list(message), use_bin_type=True)


def mutated(original: bytes, edits: list[tuple[int, int]]) -> bytes:
    data = bytearray(original)
    for at, byte in edits:
        data[at % len(data)] = byte
    return bytes(data)


BOMB = b"\x91" * (1 << 16)
"""Sixty-five thousand arrays within each other."""
NO_TEXT = b"\x91\xa1\x80"
"""A name that is no UTF-8."""
edits = st.lists(st.tuples(st.integers(0, 200), st.integers(0, 255)), min_size=1, max_size=6)
sent = st.sampled_from(SENT)
short, text = st.binary(max_size=30), st.text(max_size=9)
plain = st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats()
names = ["hello", "find", "reserve", "commit", "remove", "add_segment", "clear", "nothing", 5]
field = st.integers(-5, (1 << 64) - 1) | short | st.lists(short, max_size=3) | text
fields = st.lists(field, max_size=5)
hostile = st.one_of(
    st.binary(max_size=300),
    st.builds(mutated, sent, edits),
    st.builds(lambda whole, cut: whole[: cut % len(whole)], sent, st.integers(0, 500)),
    st.builds(lambda first, second: first + second, sent, st.binary(min_size=1, max_size=40)),
    st.recursive(
        plain | text | short,
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(text, inner, max_size=3),
        max_leaves=12,
    ).map(packed),
    st.builds(lambda name, more: packed(name, *more), st.sampled_from(names), fields),
)


# ---- a real server


@pytest.fixture(scope="module")
def stage_(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    with stage(tmp_path_factory.mktemp("wire")) as made:
        yield made


@pytest.fixture(scope="module")
def server(stage_: Stage) -> Child:
    """One server for all these tests: it has to survive them all."""
    return stage_.server()


@pytest.fixture(scope="module")
def bystander(stage_: Stage, server: Child) -> Raw:
    """A client that has nothing to do with it and must never notice."""
    return stage_.raw()


@pytest.fixture
def raw(stage_: Stage, server: Child) -> Iterator[Raw]:
    with Raw(stage_.path) as made:
        yield made


def undisturbed(bystander: Raw) -> bool:
    return bystander.ask("remove", [A]) == ["count", 0]


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=hostile, hello=st.booleans())
@example(data=BOMB, hello=True)
@example(data=NO_TEXT, hello=True)
@example(data=bytes(m.MAX_MESSAGE_BYTES + 1), hello=True)
def test_a_server_answers_hostile_bytes_with_an_error_or_a_closed_door(
    stage_: Stage, server: Child, bystander: Raw, data: bytes, hello: bool
) -> None:
    with Raw(stage_.path, hello) as guest:
        guest.send_bytes(data)
        guest.socket.shutdown(socket.SHUT_WR)
        while (reply := guest.receive()) is not None:
            assert isinstance(reply[0], str)
    assert undisturbed(bystander)
    assert server.alive


def test_too_long_a_message_is_answered_and_the_door_closed(raw: Raw, bystander: Raw) -> None:
    raw.send_bytes(bytes(m.MAX_MESSAGE_BYTES + 1))
    assert raw.receive() == ["error", "a message is longer than the limit of 200,000 B", True]
    assert raw.closed()
    assert undisturbed(bystander)


def test_nothing_is_served_before_the_right_hello(stage_: Stage, server: Child) -> None:
    """The second one has the shape of a later version."""
    ours = m.PROTOCOL_VERSION
    earlier, later = ["hello", 999, "host", "host", {}], ["hello", ours + 1, {"all": "changed"}]
    for first, why in (
        (earlier, f"protocol 999, server: {ours}; install the same vcache-backend"),
        (later, f"not a hello of protocol {ours}"),
        (["stats"], "not hello"),
    ):
        with Raw(stage_.path, hello=False) as guest:
            reply = guest.ask(*first)
            assert (reply[0], why in reply[1]) == ("error", True), reply
            assert guest.closed()


def test_fds_nobody_asked_for_are_closed(stage_: Stage, server: Child, memfd: int) -> None:
    with Raw(stage_.path) as guest:
        for _ in range(20):
            guest.send("remove", [A], fds=(memfd, memfd))
            assert guest.receive() == ["count", 0]
        reply = guest.ask("add_segment", "two", "host", "host", 4096, fds=(memfd, memfd))
        assert "2 fds came along" in reply[1]
        guest.send("remove", "no keys", fds=(memfd, memfd))
        assert guest.receive()[0] == "error"
        assert guest.ask("remove", [A]) == ["count", 0]
        eventually(lambda: not [name for name in server.fds() if "vcache-test" in name])
        for _ in range(20):
            guest.send("remove", [A], fds=(memfd,) * m.MAX_FDS)
            assert guest.receive() == ["count", 0]
        guest.send_bytes(b"no message", (memfd,))
    with Raw(stage_.path, hello=False) as guest:
        assert "2 fds came along" in guest.hello(fds=(memfd,) * 2)[1]
        assert guest.closed()
    eventually(lambda: not [name for name in server.fds() if "vcache-test" in name])


BAD = b"\xc1"


@pytest.mark.parametrize("messages", [[BAD], [BAD, BAD]], ids=["read", "unread"])
def test_a_close_that_waits_holds_up_nobody_else(alone: Stage, messages: list[bytes]) -> None:
    """As one that frees much memory takes long. Here it is a socket that lingers."""
    server, bystander = alone.server(), alone.raw()
    with alone.raw() as guest, socket.create_server(("127.0.0.1", 0)) as never_reads:
        with server.stopped(), socket.create_connection(never_reads.getsockname()) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 1000))
            sock.setblocking(False)
            with suppress(BlockingIOError):
                while True:
                    sock.send(bytes(1 << 16))
            for message in messages[:-1]:
                guest.send_bytes(message)
            guest.send_bytes(messages[-1], (sock.fileno(),))
        for _ in range(100):
            assert undisturbed(bystander)


def test_requests_in_one_breath_are_answered_in_order_also_when_some_are_refused(raw: Raw) -> None:
    wrong: list[list[Any]] = [["no_such_request"], ["find"], ["find", b"short", b"", 1, 0]]
    wrong += [["find", b"namespac", bytes(size), 1, 0, 4096] for size in (5, 80)]
    wrong += [["find", b"namespac", bytes(16 * (m.MAX_HASHES + 1)), 1, 0]]
    wrong += [["remove", [A] * (m.MAX_KEYS + 1)], ["reserve", [A], 0], ["reserve", [A], 1 << 60]]
    wrong += [["clear", b"more than eight bytes"], ["add_segment", "s", "host", "tape", 4096]]
    for message in (["remove", [A]], *wrong, ["contains", [A]]):
        raw.send(*message)
    first, *refused, last = [raw.receive() for _ in range(len(wrong) + 2)]
    assert (first[0], last[0]) == ("count", "present")
    assert [(answer[0], answer[2]) for answer in refused] == [("error", False)] * len(wrong)


def unread(raw: Raw, *message: Any) -> int:
    """Send a request as often as the server takes it, without reading an answer; how often."""
    sent = 0
    raw.socket.settimeout(0.3)
    with suppress(TimeoutError):
        while True:
            raw.send(*message)
            sent += 1
    raw.socket.settimeout(SECONDS)
    return sent


def test_answers_nobody_reads_are_not_made(stage_: Stage, raw: Raw) -> None:
    """A client that reads nothing is not read from; its requests wait, nobody else does, and all
    are answered once it reads.
    """

    def answered() -> int:
        return raw.ask("stats")[8]["Contains"][0]

    raw.ask("contains", [A])
    before, greedy = answered(), stage_.raw()
    sent = 0
    while more := unread(greedy, "contains", [A] * 500):
        # It takes no more, and not because it has had no turn.
        sent, _ = sent + more, answered()
    made = eventually(lambda: (first := answered()) == answered() and first) - before
    assert 0 < made < sent, "what waits for its reader costs no turn"
    assert [greedy.receive()[0] for _ in range(sent)] == ["present"] * sent


def test_one_client_more_than_there_are_descriptors_for_is_turned_away_with_a_reason(
    alone: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "raise_descriptor_limit", lambda: 93)
    with running(alone.path):
        first, _ = alone.raw(), alone.raw()
        third = alone.raw(hello=False)
        # The server may have closed it before the hello comes.
        gone = select.poll()
        gone.register(third.socket, select.POLLRDHUP)
        assert gone.poll(1000 * SECONDS)
        assert "2 clients are connected; raise the limit" in third.hello()[1]
        assert third.closed()
        first.close()
        eventually(lambda: alone.raw(hello=False).hello({})[0] == "welcome")


def test_clients_that_connect_in_a_loop_do_not_fill_the_log(alone: Stage) -> None:
    server, lines = alone.server(), LineLimit.LINES
    layout = {"model": "m", "namespace": "aa", "field": "x"}
    alone.raw(hello=False).hello(layout)
    for number in range(lines // 3):
        with Raw(alone.path, hello=False) as raw:
            other = layout | {"namespace": str(number), "field": str(number)}
            assert raw.hello(other)[0] == "welcome"
            raw.ask("report", "info", f"{number} " + "x" * 1000)
            raw.send_bytes(BAD)
            assert raw.closed()
        server.said()
    server.signal(signal.SIGTERM)
    _, said = server.wait()
    assert lines - 10 < said.count("\n") < lines + 30
