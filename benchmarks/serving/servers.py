"""The processes of one system: OpenAI servers, one a GPU, and what stands beside them. All of them
end with it.
"""

from __future__ import annotations

import os
import re
import signal
import tempfile
import time
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from vcache_backend.config import ClientConfig
from vcache_backend.metadata_server.client import Client

from ..processes import ChildFailed, MetadataServer, Program, free_ports, module, until
from ..vllm.environment import CPU_ENVIRONMENT, ENVIRONMENT
from ..vllm.scale import GIB
from .systems import SYSTEMS, Sizes, mp_arguments, serve_arguments

START_SECONDS = 300.0
END_SECONDS = 20.0
COUNTERS = {
    "queries": "vllm:prefix_cache_queries_total",
    "own": "vllm:prefix_cache_hits_total",
    "external": "vllm:external_prefix_cache_hits_total",
    "preemptions": "vllm:num_preemptions_total",
}
"""Of vLLM's Prometheus endpoint, in tokens but for the last."""


class Servers:
    """Starts at once; `wait` until they answer.

    gpus: one for each server, by ordinal; a server sees all of them, its own first. One that is
    named twice has two servers. folder: for logs. cache: for vLLM's compiled code. more: settings
    of vcache."""

    def __init__(
        self,
        name: str,
        sizes: Sizes,
        gpus: Sequence[int],
        model: Path,
        folder: Path,
        cache: Path,
        more: Mapping[str, str],
    ) -> None:
        self.name, self._sizes, self._gpus, self._folder, self._cache = (
            name,
            sizes,
            gpus,
            folder,
            cache,
        )
        self._undo = ExitStack()
        self._programs: list[Program] = []
        self.ports = free_ports(len(gpus))
        self._started = time.monotonic()
        with ExitStack() as undo:
            # Not among the logs, which may be another run's too.
            self._own = Path(
                undo.enter_context(
                    tempfile.TemporaryDirectory(
                        prefix="vcache-serving-", ignore_cleanup_errors=True
                    )
                )
            )
            undo.callback(self._end)
            side = self._beside() | {"more": more}
            for index, port in enumerate(self.ports):
                arguments = serve_arguments(name, sizes, model, port, {**side, "index": index})
                command = module("vllm.entrypoints.openai.api_server", *arguments)
                log = folder / f"{name}_{index}.log"
                self._programs.append(
                    Program(f"{name}_{index}", command, log, self._environment(index))
                )
            self._undo = undo.pop_all()

    def __enter__(self) -> Servers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all. Idempotent; from any thread."""
        self._undo.close()

    def wait(self, seconds: float = START_SECONDS) -> float:
        """Until all are healthy; the seconds since their start. Raises ChildFailed for a process
        that ended or is late.
        """
        for program, port in zip(self._programs[-len(self.ports) :], self.ports, strict=True):
            left = seconds - (time.monotonic() - self._started)
            program.until(partial(healthy, port), left)
        if ended := [program for program in self._programs if not program.alive]:
            raise ChildFailed(f"{ended[0].name} ended; {ended[0].tail()}")
        self._wait_for_memory(seconds - (time.monotonic() - self._started))
        return time.monotonic() - self._started

    def _wait_for_memory(self, seconds: float) -> None:
        """Of the host, which our pool takes in the background: until it is all there, as a peer's
        is at its start.
        """
        system, deadline = SYSTEMS[self.name], time.monotonic() + seconds
        if not (system.ours and system.host):
            return
        wanted = int(self._sizes.host_gib * GIB) // len(self.ports) * len(self.ports)
        with Client(self._own / "vcache.sock", ClientConfig(), reconnect=False) as client:
            while (there := sum(info.nbytes for info in client.list_segments())) < wanted:
                if time.monotonic() > deadline:
                    raise ChildFailed(
                        f"{there:,} of {wanted:,} B of host memory are lent; {self.said()}"
                    )
                time.sleep(0.2)
        print(
            (
                f"  {self.name}: {wanted / GIB:g} GiB of host memory "
                f"{time.monotonic() - self._started:.0f} s after the start"
            ),
            flush=True,
        )

    def counters(self) -> dict[str, float]:
        """`COUNTERS`, of all servers together."""
        found = [counters(port) for port in self.ports]
        return {key: sum(one[key] for one in found) for key in COUNTERS}

    def said(self) -> str:
        """What vcache has last said in the servers' logs."""
        lines = [
            line
            for each in self._programs
            for line in each.log.read_text(errors="replace").splitlines()
        ]
        return " | ".join(
            [line for line in lines if "vcache" in line and ("WARN" in line or "ERROR" in line)][
                -3:
            ]
        )

    def _beside(self) -> dict[str, Any]:
        """Start what the system needs beside its servers. It is up long before they ask."""
        environment = {**os.environ, **ENVIRONMENT}
        if self.name == "mp":
            (port,) = free_ports(1)
            command = module(
                "lmcache.v1.multiprocess.server",
                *mp_arguments(self._sizes.scale, self._sizes.host_gib, port),
            )
            self._programs.append(
                Program("mp_server", command, self._folder / "mp_server.log", environment)
            )
            return {"port": port}
        if SYSTEMS[self.name].ours:
            path = self._own / "vcache.sock"
            self._programs.append(
                MetadataServer(path, self._folder / "vcache_server.log", environment)
            )
            return {"socket": path}
        return {}

    def _environment(self, index: int) -> dict[str, str]:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        # Of those that this process sees: another run may have the others of the host.
        gpus = [
            visible[gpu] if gpu < len(visible) and visible[gpu] else str(gpu) for gpu in self._gpus
        ]
        gpu = gpus[index]
        given = {
            **os.environ,
            **ENVIRONMENT,
            "VLLM_CACHE_ROOT": str(self._cache),
            # The ports that vLLM's processes take among themselves are looked for from here on.
            "VLLM_PORT": str(42000 + 400 * (int(gpu) if gpu.isdigit() else 0) + 100 * index),
        }
        if self._sizes.scale.cpu:
            return given | CPU_ENVIRONMENT
        others = [each for each in dict.fromkeys(gpus) if each != gpu]
        return given | {"CUDA_VISIBLE_DEVICES": ",".join([gpu, *others])}

    def _end(self) -> None:
        """The end of the servers, then of what they may still tell of it."""
        programs, self._programs = self._programs, []
        for group in (programs[-len(self.ports) :], programs[: -len(self.ports)]):
            _finish(group)


def _finish(programs: Sequence[Program]) -> None:
    """SIGTERM first: a server then gives back what it has in `/dev/shm` and on the GPU."""
    for program in programs:
        program.signal(signal.SIGTERM)
    until(lambda: not any(program.alive for program in programs), END_SECONDS, 0.1)
    for program in programs:
        program.kill()


def counters(port: int) -> dict[str, float]:
    """`COUNTERS` of the server on a port, over all its ranks."""
    text = _get(port, "/metrics").decode()
    return {key: counter(text, name) for key, name in COUNTERS.items()}


def counter(text: str, name: str) -> float:
    """A counter in Prometheus's text form, over all its labels."""
    pattern = rf"^{re.escape(name)}(?:\{{[^}}]*\}})? (\S+)$"
    return sum(float(value) for value in re.findall(pattern, text, re.MULTILINE))


def healthy(port: int) -> bool:
    try:
        _get(port, "/health")
    except OSError:
        return False
    return True


def _get(port: int, path: str) -> bytes:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as reply:
        body: bytes = reply.read()
    return body
