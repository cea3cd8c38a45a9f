"""The processes of one system: two OpenAI servers, one a GPU, and what stands beside them. All of them end with it."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import sys
import tempfile
import time
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from ..vllm.fleet import ENVIRONMENT
from ..vllm.process import Child, ChildFailed
from .sizes import Sizes
from .systems import mp_arguments, serve_arguments

START_SECONDS = 300.0
END_SECONDS = 20.0
CPU_ENVIRONMENT = {"TORCH_COMPILE_DISABLE": "1"}
COUNTERS = {
    "queries": "vllm:prefix_cache_queries_total",
    "own": "vllm:prefix_cache_hits_total",
    "external": "vllm:external_prefix_cache_hits_total",
    "preemptions": "vllm:num_preemptions_total",
}
"""Of vLLM's Prometheus endpoint, in tokens but for the last."""


class Servers:
    """Starts at once; `wait` until they answer.

    gpus: the two GPUs by ordinal; each server sees both, its own first. folder: logs. cache: vLLM's compiled code, one folder a
    GPU. more: settings of vcache.
    """

    def __init__(
        self, name: str, sizes: Sizes, gpus: Sequence[int], model: Path, folder: Path, cache: Path, more: Mapping[str, str]
    ) -> None:
        self.name, self._sizes, self._gpus, self._folder, self._cache = name, sizes, gpus, folder, cache
        self._undo = ExitStack()
        self._children: list[Child] = []
        self.ports = [_free_port() for _ in gpus]
        self._started = time.monotonic()
        with ExitStack() as undo:
            undo.callback(self._end)
            side = self._beside(undo) | {"more": more}
            for index, port in enumerate(self.ports):
                arguments = serve_arguments(name, sizes, model, port, {**side, "index": index})
                module = "vllm.entrypoints.openai.api_server"
                self._child(f"{name}_{index}", module, arguments, self._environment(index, port))
            self._undo = undo.pop_all()

    def __enter__(self) -> Servers:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End all. Idempotent; from any thread."""
        self._undo.close()

    def wait(self, seconds: float = START_SECONDS) -> float:
        """Until both are healthy; the seconds since their start. Raises ChildFailed for a process that ended or is late."""
        for port in self.ports:
            while not _healthy(port):
                for child in self._children:
                    if not child.alive:
                        raise ChildFailed(f"{child.name} ended; {child.tail()}")
                if time.monotonic() - self._started > seconds:
                    late = self._children[-len(self.ports) + self.ports.index(port)]
                    raise ChildFailed(f"{late.name} is not up after {seconds:.0f} s; {late.tail()}")
                time.sleep(0.3)
        return time.monotonic() - self._started

    def counters(self) -> dict[str, float]:
        """`COUNTERS`, of both servers together."""
        texts = [_get(port, "/metrics").decode() for port in self.ports]
        return {key: sum(counter(text, name) for text in texts) for key, name in COUNTERS.items()}

    def _beside(self, undo: ExitStack) -> dict[str, Any]:
        """Start what the system needs beside its servers. It is up long before they ask."""
        environment = {**os.environ, **ENVIRONMENT}
        if self.name == "mp":
            port = _free_port()
            self._child("mp_server", "lmcache.v1.multiprocess.server", mp_arguments(self._sizes, port), environment)
            return {"port": port}
        if self.name != "vcache":
            return {}
        # Not among the logs: a journal beside the socket would bring another run's pool back.
        own = Path(tempfile.mkdtemp(prefix="vcache-serving-"))
        undo.callback(shutil.rmtree, own, ignore_errors=True)
        undo.callback(self._end)
        path = own / "vcache.sock"
        server = self._child("vcache_server", "vcache_backend.metadata_server", ["--socket", str(path)], environment)
        deadline = time.monotonic() + 20
        while not path.exists():
            if not server.alive or time.monotonic() > deadline:
                raise ChildFailed(f"no metadata server; {server.tail()}")
            time.sleep(0.02)
        return {"socket": path}

    def _child(self, name: str, module: str, arguments: Sequence[str], environment: Mapping[str, str]) -> Child:
        command = [sys.executable, "-m", f"{__package__}.quiet", module, *arguments]
        child = Child(name, command, environment, self._folder / f"{name}.log")
        self._children.append(child)
        return child

    def _environment(self, index: int, port: int) -> dict[str, str]:
        gpu = self._gpus[index]
        given = {
            **os.environ,
            **ENVIRONMENT,
            "VLLM_CACHE_ROOT": str(self._cache / f"serving_{gpu}"),
            # The ports that vLLM's processes take among themselves are looked for from here on.
            "VLLM_PORT": str(42000 + 400 * gpu),
        }
        if self._sizes.scale.cpu:
            return given | CPU_ENVIRONMENT
        others = [each for each in self._gpus if each != gpu]
        return given | {"CUDA_VISIBLE_DEVICES": ",".join(map(str, [gpu, *others]))}

    def _end(self) -> None:
        """The end of the servers, then of what they may still tell of it."""
        children, self._children = self._children, []
        for group in (children[-len(self.ports) :], children[: -len(self.ports)]):
            _finish(group)


def _finish(children: Sequence[Child]) -> None:
    """SIGTERM first: a server then gives back what it has in `/dev/shm` and on the GPU."""
    for child in children:
        if child.alive:
            with suppress(ProcessLookupError):
                os.kill(child.pid, signal.SIGTERM)
    deadline = time.monotonic() + END_SECONDS
    while any(child.alive for child in children) and time.monotonic() < deadline:
        time.sleep(0.1)
    for child in children:
        child.kill()


def counter(text: str, name: str) -> float:
    """A counter in Prometheus's text form, over all its labels."""
    pattern = rf"^{re.escape(name)}(?:\{{[^}}]*\}})? (\S+)$"
    return sum(float(value) for value in re.findall(pattern, text, re.MULTILINE))


def _healthy(port: int) -> bool:
    try:
        _get(port, "/health")
    except OSError:
        return False
    return True


def _get(port: int, path: str) -> bytes:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as reply:
        body: bytes = reply.read()
    return body


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
