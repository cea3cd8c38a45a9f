"""examples/prefill_proxy.py before servers that answer, refuse, break off and say nonsense. Before real
ones: test_disaggregated_prefill."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import import_module
from importlib.util import find_spec
from threading import Event, Thread
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
from processes import ROOT, SECONDS, Child, eventually

from benchmarks.processes import free_ports
from vcache_backend.integration.vllm.requests import read_params

PROXY = ROOT / "examples" / "prefill_proxy.py"
FAILED = "the prefill server failed"
"""What the proxy says."""

pytestmark = pytest.mark.skipif(find_spec("aiohttp") is None, reason="needs aiohttp")


class Asked(BaseHTTPRequestHandler):
    """A request to a `Server`."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        server: Any = self.server
        asked: dict[str, Any] = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server.failures += bool(server.fails)
        server.asked.append(asked)
        server.connections.add(self.client_address)
        server.ready(asked)
        self.send_response(server.fails or 200)
        if server.breaks_off:
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            self.wfile.write(b"5\r\nhello\r\n")
            self.close_connection = True
            return
        self.send_header("Content-Length", str(len(server.says)))
        self.end_headers()
        self.wfile.write(server.says)

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


class Server(ThreadingHTTPServer):
    """Answers, or fails, and keeps what it is asked. ready: called before it answers."""

    request_queue_size = 256
    fails, breaks_off = 0, False
    """fails: the status that it answers, if not 0."""
    failures, says = 0, b"{}"

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Asked)
        self.asked: list[dict[str, Any]] = []
        self.connections: set[Any] = set()
        self.ready: Callable[[dict[str, Any]], object] = lambda _: None
        self.url = f"http://127.0.0.1:{self.server_port}"
        Thread(target=self.serve_forever, daemon=True).start()

    def handle_error(self, *_: object) -> None:
        """The proxy may hang up."""


@pytest.fixture
def servers() -> Iterator[list[Server]]:
    """Two for prefill, two for decode."""
    with ExitStack() as undo:
        made = [undo.enter_context(Server()) for _ in range(4)]
        for one in made:
            undo.callback(one.shutdown)
        yield made


@contextmanager
def proxy(prefill: list[str], decode: list[str], *more: str) -> Iterator[tuple[int, Child]]:
    """Its port."""
    (port,) = free_ports(1)
    command = [sys.executable, str(PROXY), "--prefill", *prefill, "--decode", *decode]
    with Child([*command, "--port", str(port), *more]) as child:
        child.expect("serves on")
        yield port, child


def ask(port: int, body: bytes = b'{"prompt": "a"}', path: str = "/v1/completions") -> int:
    """The status."""
    with (
        suppress(HTTPError),
        urlopen(Request(f"http://127.0.0.1:{port}{path}", body), None, SECONDS),
    ):
        return 200
    return 502


def send(port: int, prompt: str) -> socket.socket:
    """A request of which nothing is read yet."""
    body = json.dumps({"prompt": prompt}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}\r\n\r\n"
    made = socket.create_connection(("127.0.0.1", port), SECONDS)
    made.sendall(head.encode() + body)
    return made


def test_the_proxy_leaves_wrong_parameters_to_the_decode_server() -> None:
    """Here nobody answers as one, which the client is told. What is no object, or too deep to read,
    is refused.
    """
    servers = [f"http://127.0.0.1:{number}" for number in free_ports(2)]
    odd = ["text", 5, [1], {"vcache": "text"}, {"vcache": [1]}]
    bodies = [json.dumps({"prompt": "a", "kv_transfer_params": one}).encode() for one in odd]
    expected = [(502, "the decode server at")] * len(odd) + [(400, "the body must be")]
    with proxy(servers[:1], servers[1:]) as (port, _):
        for body, (code, said) in zip([*bodies, b"[" * 100_000], expected, strict=True):
            with pytest.raises(HTTPError) as raised:
                urlopen(Request(f"http://127.0.0.1:{port}/v1/completions", body), timeout=SECONDS)
            with raised.value as error:
                assert (error.code, error.read().decode().startswith(said)) == (code, True)


def test_two_prefill_servers_and_two_decode_servers_are_asked_in_turn(
    servers: list[Server],
) -> None:
    """Whoever of the first fails is left out, and the others' prompts are still announced."""

    def prefilled() -> bool:
        """The prefill servers have been asked as often as the others, and each failure was said."""
        before, behind = (
            sum(len(one.asked) for one in pair) for pair in (servers[:2], servers[2:])
        )
        return before >= behind and child.said().count(FAILED) >= servers[0].failures

    for one in servers[2:]:
        # With the decode server's answer the proxy gives the prefill server's up.
        one.ready = lambda _: eventually(prefilled)
    urls = [one.url for one in servers]
    with proxy(urls[:2], urls[2:]) as (port, child):

        def asks(count: int) -> list[int]:
            """How many requests each of them has got behind these."""
            assert [ask(port) for _ in range(count)] == [200] * count
            return [len(one.asked) for one in servers]

        assert asks(4) == [2, 2, 2, 2]
        servers[0].fails = 503
        asks(2)
        child.expect(FAILED)
        assert asks(4)[1] == 7
        announced = [one["kv_transfer_params"] for one in servers[2].asked + servers[3].asked]
        assert len(announced) == 10


def test_however_many_wait_each_has_its_prompt_computed(servers: list[Server]) -> None:
    """The decode server answers none before; the prefill server has all of them at once."""
    prefill, decode, many = servers[0], servers[2], 120
    for one in (prefill, decode):
        one.ready = lambda _: eventually(lambda: len(prefill.asked) == many, every=0.1)
    with proxy([prefill.url], [decode.url]) as (port, _), ExitStack() as undo:
        clients = [undo.enter_context(send(port, str(number))) for number in range(many)]
        answers = [client.recv(12) for client in clients]
        assert answers == [b"HTTP/1.1 200"] * many


def test_an_answer_that_breaks_off_breaks_off_at_the_client(servers: list[Server]) -> None:
    """Nothing that is no part of it follows, and the client need not wait for more."""
    servers[2].breaks_off = True
    with proxy([servers[0].url], [servers[2].url]) as (port, child), send(port, "a") as client:
        with client.makefile("rb") as reader:
            assert reader.read().endswith(b"\r\n\r\n5\r\nhello\r\n")
        child.expect("request 1: the decode server failed")


def test_a_decode_server_that_refuses_is_left_out(servers: list[Server]) -> None:
    """It has the fewest requests, as it keeps none, and would get all of the next ones. If it is the
    only one it is asked again."""
    (port,) = free_ports(1)
    prefill, decode, done = [servers[0].url], servers[2], Event()
    nobody = f"http://127.0.0.1:{port}"
    decode.ready = lambda asked: asked["prompt"] != "long" or done.wait(SECONDS)
    with proxy(prefill, [decode.url, nobody]) as (port, _), send(port, "long") as client:
        eventually(lambda: decode.asked)
        assert [ask(port) for _ in range(4)] == [502, 200, 200, 200]
        with urlopen(f"http://127.0.0.1:{port}/health", None, SECONDS) as reply:
            assert reply.status == 200
        done.set()
        assert client.recv(12) == b"HTTP/1.1 200"
    with proxy(prefill, [nobody]) as (port, _):
        assert [ask(port) for _ in range(2)] == [502, 502]


def test_a_request_that_a_server_cannot_answer_leaves_the_others_announced(
    servers: list[Server],
) -> None:
    """One client could otherwise keep all others from the prefill server."""
    prefill, decode = servers[0], servers[2]
    prefill.fails = 500
    with proxy([prefill.url], [decode.url], "--order", "prefill-first") as (port, child):
        assert ask(port) == 200
        child.expect(FAILED)
        prefill.fails = 0
        assert ask(port) == 200
    assert ["kv_transfer_params" in asked for asked in decode.asked] == [False, True]


WAITS, STORES_NOT = {"announced": True, "wait_seconds": 2}, {"store": False}
WISHES = {
    "null": (None, {"vcache": {"announced": True, "wait_seconds": 5.0}}),
    "false": (False, False),
    "a list": ([], []),
    "its own wait": ({"vcache": WAITS}, {"vcache": WAITS}),
    "no store": ({"vcache": STORES_NOT}, {"vcache": STORES_NOT}),
}
"""A client's `kv_transfer_params`, and what the decode server gets."""


@pytest.mark.parametrize("case", WISHES)
def test_what_is_announced_to_whom(servers: list[Server], case: str) -> None:
    """A decode server does not wait for what nobody stores, nor a prefill server for itself."""
    prefill, decode, (given, expected) = servers[0], servers[2], WISHES[case]
    stores = case != "no store"
    decode.ready = lambda _: eventually(lambda: prefill.asked or not stores)
    body = json.dumps({"prompt": "a", "kv_transfer_params": given}).encode()
    with proxy([prefill.url], [decode.url]) as (port, _):
        assert ask(port, body) == 200
    assert decode.asked[0]["kv_transfer_params"] == expected
    assert bool(prefill.asked) == stores
    assert "announced" not in json.dumps(prefill.asked)


def test_a_body_that_is_not_compressed_as_it_says_is_refused(servers: list[Server]) -> None:
    with proxy([servers[0].url], [servers[2].url]) as (port, child):
        asked = Request(f"http://127.0.0.1:{port}/v1/completions", b"{}")
        asked.add_header("Content-Encoding", "gzip")
        with pytest.raises(HTTPError) as raised:
            urlopen(asked, timeout=SECONDS)
        with raised.value as error:
            assert error.code == 400
        assert "Traceback" not in child.said()


@pytest.mark.parametrize("order", ["together", "prefill-first"])
def test_a_prefill_server_may_say_what_is_no_text(servers: list[Server], order: str) -> None:
    servers[0].fails, servers[0].says = 500, b"\xff\xfe"
    with proxy([servers[0].url], [servers[2].url], "--order", order) as (port, child):
        servers[2].ready = lambda _: eventually(lambda: FAILED in child.said())
        assert ask(port) == 200


def test_the_prefill_server_is_asked_for_no_log_probabilities(servers: list[Server]) -> None:
    """What vLLM refuses without them goes, too."""
    protocol = pytest.importorskip("vllm.entrypoints.openai.chat_completion.protocol")
    prefill, decode = servers[0], servers[2]
    decode.ready = lambda _: eventually(lambda: prefill.asked)
    wishes = {"logprobs": True, "top_logprobs": 3, "logprob_token_ids": [5]}
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 9, **wishes}
    with proxy([prefill.url], [decode.url]) as (port, _):
        assert ask(port, json.dumps(body).encode(), "/v1/chat/completions") == 200
    assert decode.asked[0].items() >= body.items()
    assert protocol.ChatCompletionRequest.model_validate(prefill.asked[0]).logprobs is False


@pytest.mark.parametrize("seconds", ["-1", "601", "nan"])
def test_a_wait_that_no_decode_server_takes_is_refused(seconds: str) -> None:
    """Each request would be served uncached."""
    with pytest.raises(ValueError, match="wait_seconds"):
        read_params({"vcache": {"wait_seconds": float(seconds)}})
    command = [sys.executable, str(PROXY), "--prefill", "http://a", "--decode", "http://b"]
    with Child([*command, f"--wait-seconds={seconds}"]) as child:
        child.expect("--wait-seconds must be from 0 to 600")
        assert child.status() == 2


# ---- in this process


def inside(
    monkeypatch: pytest.MonkeyPatch,
    servers: list[Server],
    steps: Callable[[Any, Callable[[], Any]], Any],
    *middlewares: Any,
) -> None:
    """Run `steps` with a proxy in this process, and what asks it once."""
    from aiohttp import ClientSession, ServerDisconnectedError, web

    monkeypatch.syspath_prepend(str(PROXY.parent))
    made = import_module("prefill_proxy").Proxy([servers[0].url], [servers[2].url], "together", 5.0)

    async def run() -> None:
        app = made.application()
        app.middlewares.extend(middlewares)
        runner = web.AppRunner(app)
        await runner.setup()
        (port,) = free_ports(1)
        await web.TCPSite(runner, "127.0.0.1", port).start()
        async with ClientSession() as session:

            async def once() -> None:
                url = f"http://127.0.0.1:{port}/v1/completions"
                with suppress(ServerDisconnectedError):
                    async with session.post(url, json={"prompt": "a"}) as reply:
                        await reply.read()

            await steps(made, once)
        await runner.cleanup()

    asyncio.run(run())


def test_a_client_that_leaves_is_no_failure_of_the_decode_server(
    servers: list[Server], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from aiohttp import web

    @web.middleware
    async def leaves(request: Any, handler: Any) -> Any:
        request.transport.close()
        return await handler(request)

    async def steps(proxy: Any, once: Any) -> None:
        await once()
        async with asyncio.timeout(SECONDS):
            while proxy.decode[0].running or not servers[2].asked:
                await asyncio.sleep(0.01)
        assert not proxy.decode[0].paused_until

    inside(monkeypatch, servers, steps, leaves)
    assert "failed" not in capsys.readouterr().out


def test_each_request_has_a_connection_of_its_own(
    servers: list[Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM closes connections after errors and after some seconds: a request that is just being sent
    would fail."""

    async def steps(_: Any, once: Any) -> None:
        for _ in range(3):
            await once()
        assert len(servers[2].connections) == 3

    inside(monkeypatch, servers, steps)
