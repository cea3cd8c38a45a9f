"""A Mooncake store: a master and providers of host memory, in processes of their own on 127.0.0.1; nodes and engines on it.

The programs come with the package.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from vcache_backend.config import ByteSize, Config, EngineConfig, MooncakeConfig, OffloadConfig, PoolConfig, ServerConfig
from vcache_backend.engine import VCacheEngine

from .kv import KV
from .processes import HOST, PATIENT, START_SECONDS, Child, Program, free_ports, metadata_server, module

PROVIDER_SECONDS = 0.3
"""How long a provider takes to have lent its memory once it listens, and more."""


def missing() -> str:
    """Why there can be no store on this machine; empty if there can."""
    for package in ("mooncake", "xxhash"):
        if find_spec(package) is None:
            return f"{package} is not installed (pip install 'vcache-backend[mooncake]')"
    probe = [sys.executable, "-c", "import mooncake.store"]
    # In a process of its own: here it must not be loaded before its settings are made.
    done = subprocess.run(probe, capture_output=True, text=True, timeout=START_SECONDS, check=False)
    return done.stderr.strip().splitlines()[-1] if done.returncode else ""


class Part(Program):
    """The master or a provider; `start` returns when it is ready."""

    def __init__(self, log: Path, command: Sequence[str], ready: Callable[[], bool], **environment: str) -> None:
        self._ready = ready
        # What our own clients set for themselves is not for others.
        theirs = {name: value for name, value in os.environ.items() if not name.startswith("MC_")}
        super().__init__(command[0], command, log, theirs | environment)

    def start(self) -> None:
        super().start()
        self.until(self._ready)


class Depot:
    """A master, and one provider for each of `providers`, in bytes. flags: the master's own, such as client_ttl=3."""

    def __init__(self, folder: Path, providers: Sequence[int], **flags: Any) -> None:
        port, metrics, *others = free_ports(2 + len(providers))
        self.address, self._metrics = f"{HOST}:{port}", f"http://{HOST}:{metrics}/metrics"
        own = {"rpc_address": HOST, "rpc_port": port, "metrics_host": HOST, "metrics_port": metrics}
        command = [_program("mooncake_master"), *_flags(own | {"enable_metric_reporting": "false"} | flags)]
        with ExitStack() as undo:
            self.master = undo.enter_context(Part(folder / "master.log", command, lambda: listens(port) and listens(metrics)))
            self.providers = [
                undo.enter_context(self._provider(folder / f"provider{number}.log", nbytes, own_port))
                for number, (nbytes, own_port) in enumerate(zip(providers, others, strict=True))
            ]
            self._undo = undo.pop_all()
        time.sleep(PROVIDER_SECONDS)

    def __enter__(self) -> Depot:
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def _provider(self, log: Path, nbytes: int, port: int) -> Part:
        flags = {"host": HOST, "port": port, "master_server_address": self.address, "metadata_server": "P2PHANDSHAKE"}
        flags |= {"protocol": "tcp", "global_segment_size": f"{nbytes} B", "local_buffer_size": 0}
        command = [_program("mooncake_client"), *_flags(flags)]
        return Part(log, command, lambda: listens(port), MC_TCP_BIND_ADDRESS=HOST)

    def objects(self) -> int:
        """How many the store has, those included that are being written."""
        with urllib.request.urlopen(self._metrics, timeout=START_SECONDS) as answer:
            lines = answer.read().decode().splitlines()
        return int(next(line.split()[1] for line in lines if line.startswith("master_key_count ")))

    def offload(self, **more: Any) -> OffloadConfig:
        """An offload tier on it, write_through; `more` of OffloadConfig's values."""
        mooncake = MooncakeConfig(master=self.address, hostname=HOST)
        values: dict[str, Any] = {"policy": "write_through", "min_bandwidth": ByteSize(0), "mooncake": mooncake}
        return OffloadConfig(**(values | more))


class Site:
    """A store, nodes with a metadata server each, engines on them. Everything ends with the context."""

    def __init__(self, *providers: int, **flags: Any) -> None:
        """providers: bytes that each one lends. flags: the master's own."""
        with ExitStack() as undo:
            self.folder = Path(undo.enter_context(tempfile.TemporaryDirectory(prefix="vcache-bench-")))
            self.depot = undo.enter_context(Depot(self.folder, providers, **flags))
            self._undo = undo.pop_all()

    def __enter__(self) -> Site:
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def node(self) -> Path:
        """A metadata server's socket."""
        return self._undo.enter_context(metadata_server())

    def raw(self, nbytes: int) -> Child:
        """Mooncake's own client, with so much memory for objects."""
        command = module("benchmarks.mooncake_raw", self.depot.address, str(nbytes))
        child = self._undo.enter_context(Child("raw client", command, self.folder / "raw.log"))
        child.answer(START_SECONDS)
        return child

    def engine(self, node: Path, kv: KV, pool_bytes: int, offload: OffloadConfig | None) -> VCacheEngine:
        """With an open offload tier, or none."""
        config = Config(
            server=ServerConfig(socket=str(node)),
            client=PATIENT,
            pool=PoolConfig(device=kv.device, segment_bytes=ByteSize(pool_bytes)),
            engine=EngineConfig(chunk_size=kv.size.chunk_tokens),
            offload=offload or OffloadConfig(),
        )
        made = self._undo.enter_context(VCacheEngine(config, kv.layout))
        made.register(kv.tensors)
        if offload is not None:
            until(lambda: made.get_stats()["offload"]["usable"])
        return made


def until(what: Callable[[], Any], seconds: float = 60.0) -> None:
    """Wait for it. Raises RuntimeError after so many seconds."""
    deadline = time.monotonic() + seconds
    while not what():
        if time.monotonic() > deadline:
            raise RuntimeError(f"not so within {seconds:g} s")
        time.sleep(0.01)


def listens(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return probe.connect_ex((HOST, port)) == 0


def _flags(values: dict[str, Any]) -> list[str]:
    return [f"--{name}={value}" for name, value in values.items()]


def _program(name: str) -> str:
    beside = Path(sys.executable).parent / name
    return str(beside) if beside.exists() else shutil.which(name) or name
