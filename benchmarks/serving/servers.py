"""The processes of one system: OpenAI servers, one a GPU, and what stands beside them. All of them
end with it.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from urllib.request import Request, urlopen

import msgspec

from vcache_backend.children import ChildFailed, Program, module, until
from vcache_backend.protocol.client import Client

from ..processes import HOST, PATIENT, free_ports, metadata_server
from ..vllm.instances import GIB
from ..vllm.settings import ENVIRONMENT, environment, lmcache_server
from .systems import SYSTEMS, Sizes, mooncake_peer, serve_arguments


class Servers:
    """Starts at once; `wait` until they answer.

    gpus: one for each server, or for each rank of the only one, by ordinal; a server sees all of
    them, its own first. folder: for logs. cache: for vLLM's compiled code. more: settings of
    vcache."""

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
        self.name, self._sizes, self._gpus, self._cache = name, sizes, gpus, cache
        self._share, self._lmcache = SYSTEMS[name].share, bool(SYSTEMS[name].lmcache)
        kv_gib = sizes.kv_bytes_of(SYSTEMS[name]) / GIB
        self.label = f"{SYSTEMS[name].label}, {kv_gib:.3g} GiB of KV cache a GPU"
        self.apart = SYSTEMS[name].apart
        self.prefills = sizes.prefills if self.apart else 0
        if self.prefills:
            self.label += f", {self.prefills} + {len(gpus) - self.prefills} servers"
        self._servers, self._theirs = list[Program](), list[Program]()
        self.ports = free_ports(1 if SYSTEMS[name].ranks else len(gpus))
        self._started = time.monotonic()
        with ExitStack() as undo:
            self._socket = Path()
            if self._share:
                server = metadata_server(folder / f"{name}_server.log", **ENVIRONMENT)
                self._socket = undo.enter_context(server)
            theirs = free_ports(2)
            self._http = theirs[1]
            if self._lmcache:
                log, size = folder / f"{name}_lmcache.log", (sizes.host_bytes, sizes.instances)
                told = log, theirs, sizes.scale.chunk, *size, SYSTEMS[name].lmcache
                self._theirs.append(undo.enter_context(lmcache_server(*told)))
            undo.callback(self._end)
            for index, port in enumerate(self.ports):
                side = {"socket": self._socket, "lmcache": theirs[0]}
                side |= {"more": more, "index": index}
                arguments = serve_arguments(name, sizes, model, port, side)
                command = module("vllm.entrypoints.openai.api_server", *arguments)
                log, given = folder / f"{name}_{index}.log", self._environment(index)
                self._servers.append(Program(f"{name}_{index}", command, log, given))
            self._undo = undo.pop_all()

    def __enter__(self) -> Servers:
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def wait(self, seconds: float) -> float:
        """Until all are healthy, at most so long from now, and 300 s from their start; the seconds
        since then. Raises ChildFailed for a process that ended or is late, or if LMCache is slow
        for want of shared memory.
        """
        until_then = min(time.monotonic() + seconds, self._started + 300.0)
        for server in self._theirs:
            # vLLM's would wait for one that has ended.
            up = partial(healthy, self._http, "/healthcheck")
            server.until(up, until_then - time.monotonic())
        for program, port in zip(self._servers, self.ports, strict=True):
            program.until(partial(healthy, port), until_then - time.monotonic())
        for server in self._theirs:
            # It does so where /dev/shm has no room. On the CPU that is its own way, too.
            if (slow := server.said("pickle")) and not self._sizes.scale.cpu:
                raise ChildFailed(f"{self.name}: KV would be pickled; {slow[0]}")
        return time.monotonic() - self._started

    def reset(self) -> None:
        """Empty all caches: vLLM's, what its connector reads, and our pool. Raises ChildFailed."""
        # Without a connector vLLM has none to reset, and would say that it failed.
        has = str(bool(self._share or self._lmcache)).lower()
        path = f"/reset_prefix_cache?reset_external={has}"
        for port in self.ports:
            if not until(partial(_reset, port, path), 10.0, 0.2):
                raise ChildFailed(f"{self.name} does not reset its caches; {self.said()}")
        if self._share:
            with Client(self._socket, PATIENT, reconnect=False) as client:
                client.clear()

    def said(self) -> str:
        """What vcache has last said in the servers' logs."""
        return " | ".join([line for each in self._servers for line in each.said()][-3:])

    def _environment(self, index: int) -> dict[str, str]:
        own = {"VLLM_SERVER_DEV_MODE": "1"}  # for `reset`
        system = SYSTEMS[self.name]
        if system.layout and not self._sizes.scale.cpu:
            own["VLLM_KV_CACHE_LAYOUT"] = system.layout
        if system.apart == "nixl":
            own |= {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_ports(1)[0])}
        if system.apart == "mooncake":
            bootstrap = mooncake_peer(self.ports[index])["remote_bootstrap_addr"].rpartition(":")[2]
            own |= {"VLLM_MOONCAKE_BOOTSTRAP_PORT": bootstrap, "VLLM_HOST_IP": HOST}
            own |= {"MC_INTRANODE_NVLINK": "1"}
        if not (cpu := self._sizes.scale.cpu):
            # Of those that this process sees: another run may have the others of the host.
            visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7").split(",")
            gpus = [visible[gpu] for gpu in (self._gpus[index], *self._gpus)]
            own["CUDA_VISIBLE_DEVICES"] = ",".join(dict.fromkeys(gpus))
        return environment(cpu, self._cache, **own)

    def _end(self) -> None:
        """SIGTERM first: a server then gives back what it has in `/dev/shm` and on the GPU."""
        for server in self._servers:
            server.signal(signal.SIGTERM)
        until(lambda: not any(server.alive for server in self._servers), 20.0, 0.1)
        for server in self._servers:
            server.kill()


def healthy(port: int, path: str = "/health") -> bool:
    try:
        fetch(port, path)
    except OSError:
        return False
    return True


def _reset(port: int, path: str) -> bool:
    """Whether a server has reset its caches. Not while blocks are in use."""
    return bool(msgspec.json.decode(fetch(port, path, b""))["success"])


def fetch(
    port: int, path: str, data: bytes | None = None, seconds: float = 10.0, **headers: str
) -> bytes:
    """data: POST it. OSError if the server does not answer in time, or with an error."""
    request = Request(f"http://{HOST}:{port}{path}", data, headers)
    with urlopen(request, timeout=seconds) as reply:
        body: bytes = reply.read()
    return body
