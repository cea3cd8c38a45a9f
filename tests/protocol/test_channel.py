"""The client against servers that answer late, wrongly, or not at all: a server of a few lines, on
a real socket.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any

import msgpack
import msgspec
import pytest
from engine_cases import raising
from model import chunk_key
from processes import PATIENT, QUICK, SECONDS, Stage, eventually
from server_cases import CLIENT

from vcache_backend import errors
from vcache_backend.errors import Refused, ServerTimeout, ServerUnavailable, VCacheError
from vcache_backend.protocol import messages as m
from vcache_backend.protocol import sockets
from vcache_backend.protocol.channel import Channel, Sent
from vcache_backend.protocol.client import Client

A, B = chunk_key(1), chunk_key(2)
KIB = 1 << 10
WELCOME = ["welcome", 77, []]
Answer = Callable[[list[Any]], Any]


class ScriptedServer:
    """Answers hello properly and everything else with what `answer(request)` returns: a message,
    raw bytes, or None for silence.
    """

    def __init__(self, path: Path, answer: Answer) -> None:
        self.answer = answer
        self.seen: list[list[Any]] = []
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(str(path))
        self._listener.listen()
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def hang_up(self) -> None:
        """On the first who came."""
        self._sockets[0].shutdown(socket.SHUT_RDWR)

    def said_all_to_the_first(self) -> None:
        """Wait until it has no more to say to the first who came, who has hung up."""
        self._threads[1].join(SECONDS)
        assert not self._threads[1].is_alive()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for sock in self._sockets:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(SECONDS)
            assert not thread.is_alive()
        for sock in self._sockets:
            sock.close()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            self._sockets.append(sock)
            self._threads.append(threading.Thread(target=self._serve, args=(sock,), daemon=True))
            self._threads[-1].start()

    def _serve(self, sock: socket.socket) -> None:
        with suppress(OSError):
            while data := sock.recv(m.MAX_MESSAGE_BYTES):
                request = msgpack.unpackb(data)
                self.seen.append(request)
                ours = {"hello": WELCOME, "list_segments": ["segments", [], 0, []]}
                reply = ours[request[0]] if request[0] in ours else self.answer(request)
                if reply is not None:
                    data = reply if isinstance(reply, bytes) else msgpack.packb(reply)
                    sock.send(data)


def find(*keys: m.ChunkKey) -> m.Find:
    return m.Find(keys[0][:8], b"".join([key[8:24] for key in keys]), 1, len(keys))


Scripted = Callable[[Answer], ScriptedServer]


@pytest.fixture
def scripted(alone: Stage) -> Scripted:
    def start(answer: Answer) -> ScriptedServer:
        server = ScriptedServer(alone.path, answer)
        alone.undo.callback(server.close)
        return server

    return start


# ---- every call, against the real server


def test_what_is_refused_leaves_the_connection_as_it_is(alone: Stage) -> None:
    """By the server, or before it is sent, since it is too large."""
    alone.server()
    client = alone.client()
    with pytest.raises(Refused, match="segment nowhere was dropped"):
        client.open_segment(m.SegmentId("nowhere"))
    with pytest.raises(errors.ProtocolError, match=r"200,\d\d\d B exceed 200,000 B"):
        client.open_segment(m.SegmentId("s" * m.MAX_MESSAGE_BYTES))
    assert client.connected
    assert client.lookup([A]) == client.connections_lost == 0


# ---- servers that do wrong


def test_a_layout_that_is_no_text_is_trouble_and_raises_nothing(stage: Stage) -> None:
    """As of a model in a folder whose name is not UTF-8."""
    assert "surrogates not allowed" in stage.client(layout={"model": "\udcff"}).trouble


def test_a_late_answer_is_never_taken_for_another_s(alone: Stage, scripted: Scripted) -> None:
    given_up = threading.Event()

    def answer(request: list[Any]) -> list[Any]:
        if request[1] == [A]:
            given_up.wait(SECONDS)
            return ["count", 1]
        return ["count", 2]

    server = scripted(answer)
    client = alone.client(msgspec.structs.replace(PATIENT, request_seconds=0.25))
    with pytest.raises(ServerTimeout, match=r"did not answer Remove\(1 keys\) in \d[\d.]* s"):
        client.remove([A])
    given_up.set()
    server.said_all_to_the_first()

    def count() -> int:
        with suppress(VCacheError):
            return client.remove([B])
        return 0

    assert eventually(count) == 2


def test_a_late_answer_is_logged_as_one_and_rarely(
    alone: Stage, scripted: Scripted, caplog: pytest.LogCaptureFixture
) -> None:
    """The server is there: it lets the client connect again, and nothing is said of its absence."""
    scripted(lambda request: None)
    hasty = msgspec.structs.replace(QUICK, request_seconds=0.05, heartbeat_seconds=30)
    client = alone.client(hasty)
    # One beat comes behind each reconnection, and on a busy machine its answer is late, too.
    client.on_beat.clear()
    for _ in range(3):
        with pytest.raises(ServerTimeout):
            client.remove([A])
        eventually(lambda: client.connected)
    # Asked ahead, and given up by a call that waits no longer.
    sent = client.send_find(find(A), SECONDS)
    assert sent is not None
    assert not sent.arrives(0.05)
    with pytest.raises(ServerTimeout) as raised:
        sent.answer(0.0)
    assert " in 0 s" not in str(raised.value)
    eventually(lambda: client.connected)
    (line,) = warnings(caplog)
    assert "did not answer Remove(1 keys) in " in line
    assert client.connections_lost == 4


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]


def test_each_answer_to_what_was_sent_ahead_is_its_own(alone: Stage, scripted: Scripted) -> None:
    """Fetched in any order, or read on the way by whoever calls next; an answer nobody fetches is
    no other one's.
    """
    pooled = {A[8:24]: b"\1", B[8:24]: b"\2\2"}

    def answer(request: list[Any]) -> list[Any]:
        if request[0] != "find":
            return ["present", [True]]
        return ["found", 1, 1, pooled[request[2]], [], 0, False, None]

    scripted(answer)
    client = alone.client(PATIENT)

    def sent(key: m.ChunkKey) -> Sent[m.Found]:
        question = client.send_find(find(key), SECONDS)
        assert question is not None
        return question

    first, second = sent(A), sent(B)
    assert (second.answer().pooled, first.over, first.answer().pooled) == (b"\2\2", True, b"\1")
    third, fourth = sent(B), sent(A)
    assert client.contains([A]) == [True]
    expected = (True, True, b"\2\2", b"\1")
    assert (third.over, fourth.over, third.answer().pooled, fourth.answer().pooled) == expected
    sent(B)
    assert client.find(find(A)).pooled == b"\1"
    assert client.send_find(find(*[A] * (m.MAX_HASHES + 1)), SECONDS) is None


def test_answers_that_nobody_reads_yet_hold_up_neither_server_nor_client(alone: Stage) -> None:
    """As when thousands of requests arrive before vLLM's next step: the answers are more than a
    socket holds.
    """
    alone.server()
    client = alone.client(PATIENT)
    sent = [client.send_find(find(*[A] * 100), SECONDS) for _ in range(5000)]
    assert [one for one in sent if one is None or one.answer().pooled] == []
    assert not client.connections_lost


def test_what_was_sent_ahead_is_lost_with_its_connection(alone: Stage, scripted: Scripted) -> None:
    server = scripted(lambda request: None)
    client = alone.client(QUICK)
    sent = client.send_find(find(A), SECONDS)
    assert sent is not None
    server.hang_up()
    eventually(lambda: client.connections_lost)
    assert sent.over
    with pytest.raises(ServerUnavailable):
        sent.answer()


COUNTS: list[Any] = [["verdict", True], ["count", "many"], b"\xc1", b"", b"\x91" * (1 << 16)]
COUNTS += [bytes(m.MAX_MESSAGE_BYTES + 1), ["error", "go away", True]]
FINDS = [["found", -1, 0], ["found", 0, -16]]  # a scheduler would ask again and again
FINDS += [["found", 0, 0, b"", [], 0, False, None, [[b"o" * 16, bytes(2 * m.COPY.size - 1)]]]]
WRONG = [(False, reply) for reply in COUNTS] + [(True, reply) for reply in FINDS]


@pytest.mark.parametrize(("finds", "reply"), WRONG, ids=lambda one: repr(one)[:30])
def test_a_wrong_answer_ends_the_connection(
    alone: Stage, scripted: Scripted, finds: bool, reply: Any
) -> None:
    scripted(lambda request: reply)
    client = alone.client(QUICK, reconnect=False)
    with pytest.raises(VCacheError):
        client.find(find(A)) if finds else client.remove([A])
    assert not client.connected


def test_later_versions_may_say_more(alone: Stage, scripted: Scripted) -> None:
    scripted(lambda request: ["count", 3] * 5)
    assert alone.client(QUICK, reconnect=False).remove([A]) == 3


def test_an_interrupted_call_leaves_no_answer_behind_for_the_next(
    alone: Stage, scripted: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal handler may raise anywhere, also between a request and its answer."""
    answers = {A: 1, B: 2}
    scripted(lambda request: ["count", answers[request[1][0]]])
    client = alone.client(PATIENT)
    original = sockets.Receiver.receive

    def interrupted(self: sockets.Receiver, sock: socket.socket) -> Any:
        monkeypatch.setattr(sockets.Receiver, "receive", original)
        raise KeyboardInterrupt

    monkeypatch.setattr(sockets.Receiver, "receive", interrupted)
    with pytest.raises(KeyboardInterrupt):
        client.remove([A])
    eventually(lambda: client.connected)
    assert client.remove([B]) == 2


def test_a_connection_that_a_call_ends_is_no_later_one(alone: Stage, scripted: Scripted) -> None:
    """The server says goodbye, the heartbeat notices, and there is a new connection before the call
    has come to its end.
    """
    goodbye = ["error", "go away", True]
    server = scripted(lambda request: goodbye)
    client = alone.client(msgspec.structs.replace(QUICK, heartbeat_seconds=0.02))

    class Slow:
        """The client's lock, whose user is held up behind it until there is a second connection."""

        def __init__(self, lock: Any) -> None:
            self.acquire, self._lock = lock.acquire, lock

        def release(self) -> None:
            self._lock.release()
            if threading.current_thread() is threading.main_thread():
                client._lock = self._lock
                server.hang_up()
                eventually(lambda: client.connections_lost and client.connected)

    client._lock = Slow(client._lock)  # type: ignore[assignment]
    with pytest.raises(Refused, match="go away"):
        client.lookup([A])
    assert (client.connected, client.connections_lost) == (True, 1)


# ---- its own life


def test_a_call_under_way_ends_when_its_client_is_closed(alone: Stage, scripted: Scripted) -> None:
    server = scripted(lambda request: None)
    config = msgspec.structs.replace(PATIENT, request_seconds=10 * SECONDS)
    client = alone.client(config, reconnect=False)
    errors: list[Exception] = []

    def ask() -> None:
        try:
            client.lookup([A])
        except VCacheError as error:
            errors.append(error)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    eventually(lambda: any(request[0] == "find" for request in server.seen))
    client.close()
    thread.join(SECONDS)
    assert [type(error) for error in errors] == [ServerUnavailable]


def test_a_forked_child_cannot_disturb_its_parent_s_connection(alone: Stage) -> None:
    alone.server()
    child = alone.script(
        f"""
{CLIENT}
from vcache_backend.errors import ServerUnavailable
pid = os.fork()
if pid == 0:
    try:
        client.lookup([b"x" * 26])
    except ServerUnavailable:
        client.close()
        os._exit(7)
    os._exit(1)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
assert client.lookup([b"x" * 26]) == 0
print("both fine")
"""
    )
    child.expect("both fine")


# ---- its thread outlives an exception anywhere in its loop


def test_a_client_goes_on_to_beat_and_to_return(alone: Stage) -> None:
    """To a server that was killed, with its hooks called."""
    server, beats, returns = alone.server(), list[int](), list[int]()
    client = Client(alone.path, QUICK)
    client.on_beat.append(lambda: beats.append(1))
    client.on_return.append(lambda: returns.append(1))
    names = "_try_connect _no_connection"
    places = [(Channel, name) for name in names.split()]
    for (where, name), behind in product(places, (False, True)):
        before = len(returns)
        with raising(where, name, behind):
            server.kill()
        # Not before: a client that connects at once has nothing to raise.
        server = alone.server()
        eventually(lambda before=before: client.connected and len(returns) > before)
        count = len(beats)
        eventually(lambda count=count: len(beats) > count)
    client.close()
    assert not client._keeper.is_alive()
