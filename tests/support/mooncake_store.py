"""Starts a Mooncake store: a master and providers of host memory, in processes of their own on
127.0.0.1.

The programs come with Mooncake's package, and are started as users start them.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Sequence
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from soak.forked import stopped

from benchmarks.processes import HOST, free_ports
from vcache_backend.children import Program, until
from vcache_backend.config import ByteSize, MooncakeConfig, OffloadConfig

READY_SECONDS = 60.0


def missing() -> str:
    """Why there can be no store on this machine; empty if there can."""
    for package in ("mooncake", "xxhash"):
        if find_spec(package) is None:
            return f"{package} is not installed (pip install 'vcache-backend[mooncake]')"
    probe = [sys.executable, "-c", "import mooncake.store"]
    # In a process of its own: in this one the library must not be loaded before its settings are
    # made.
    done = subprocess.run(probe, capture_output=True, text=True, timeout=READY_SECONDS, check=False)
    return done.stderr.strip().splitlines()[-1] if done.returncode else ""


class Part(Program):
    """The master or a provider; `start` returns when it is ready."""

    def __init__(self, log: Path, program: str, flags: dict[str, Any], **environment: str) -> None:
        # Our clients' own settings are not for these programs.
        theirs = {name: value for name, value in os.environ.items() if not name.startswith("MC_")}
        command = [_path(program), *(f"--{name}={value}" for name, value in flags.items())]
        super().__init__(program, command, log, theirs | environment)

    def start(self) -> None:
        super().start()
        self.until(self.ready, READY_SECONDS)

    def ready(self) -> bool:
        """Whether it can be used."""
        raise NotImplementedError

    def restart(self) -> None:
        """Start again on the same ports. A master then knows no objects; providers join it by
        themselves within a second or two.
        """
        self.kill()
        self.start()

    def stop(self) -> None:
        """Have it hang, until `cont`."""
        self.signal(signal.SIGSTOP)
        until(lambda: not self.alive or stopped(self.pid), READY_SECONDS, 0.001)

    def cont(self) -> None:
        self.signal(signal.SIGCONT)


class Master(Part):
    """`mooncake_master`. more: its own flags, such as client_ttl=3."""

    def __init__(self, folder: Path, ports: Sequence[int], **more: Any) -> None:
        self.port, self.metrics_port = ports
        self.address = f"{HOST}:{self.port}"
        flags: dict[str, Any] = {"rpc_address": HOST, "rpc_port": self.port}
        flags |= {"metrics_host": HOST, "metrics_port": self.metrics_port}
        flags |= {"enable_metric_reporting": "false"} | more
        super().__init__(folder / f"master-{self.port}.log", "mooncake_master", flags)

    def ready(self) -> bool:
        return all(_listens(port) for port in (self.port, self.metrics_port))

    def ask(self, path: str) -> str:
        """The answer of its HTTP interface to a path such as /get_all_segments."""
        url = f"http://{HOST}:{self.metrics_port}{path}"
        with urllib.request.urlopen(url, timeout=READY_SECONDS) as answer:
            return str(answer.read().decode())

    def segments(self) -> dict[str, int]:
        """Bytes in use by the name of the segment."""
        try:
            listed = json.loads(self.ask("/get_segments_detail"))["segments"]
        except OSError:
            return {}
        return {segment["segment_name"]: segment["allocator_used_bytes"] for segment in listed}


class Provider(Part):
    """`mooncake_client`, lending `nbytes` to `master`'s store."""

    def __init__(self, folder: Path, port: int, master: Master, nbytes: int) -> None:
        self.master = master
        flags = {"host": HOST, "port": port, "master_server_address": master.address}
        flags |= {"metadata_server": "P2PHANDSHAKE"}
        flags |= {"protocol": "tcp", "global_segment_size": f"{nbytes} B", "local_buffer_size": 0}
        log = folder / f"provider-{port}.log"
        super().__init__(log, "mooncake_client", flags, MC_TCP_BIND_ADDRESS=HOST)

    def ready(self) -> bool:
        return self.segment in self.master.segments()

    @property
    def segment(self) -> str:
        """The master's name for the memory that it lends; empty before there is one."""
        _, found, rest = self.log.read_text(errors="replace").rpartition("server_name: ")
        line, ended, _ = rest.partition("\n")
        return line.replace(" port: ", ":").strip() if found and ended else ""

    def gone(self) -> bool:
        """Whether the master has noticed that this provider died, which it does after
        `client_ttl`.
        """
        return self.segment not in self.master.segments()


class Depot:
    """A master, and one provider for each of `providers`, in bytes. flags: the master's own."""

    def __init__(self, folder: Path, providers: Sequence[int], **flags: Any) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self.providers: list[Provider] = []
        self._undo = ExitStack()
        try:
            self.master = self._undo.enter_context(Master(folder, free_ports(2), **flags))
            for nbytes in providers:
                self.lend(nbytes)
        except BaseException:
            self._undo.close()
            raise

    def __enter__(self) -> Depot:
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def lend(self, nbytes: int) -> Provider:
        """One more provider."""
        (port,) = free_ports(1)
        provider = Provider(self._folder, port, self.master, nbytes)
        self.providers.append(self._undo.enter_context(provider))
        return provider

    def config(self, **more: Any) -> MooncakeConfig:
        """How to reach it, from this machine only."""
        values: dict[str, Any] = {"master": self.master.address, "hostname": HOST}
        return MooncakeConfig(**(values | more))

    def offload(self, **more: Any) -> OffloadConfig:
        """The configuration of a write-through offload tier on it. more: values of OffloadConfig;
        `mooncake`: values of MooncakeConfig.
        """
        values: dict[str, Any] = {"policy": "write_through", "min_bandwidth": ByteSize(0)}
        values["mooncake"] = self.config(**more.pop("mooncake", {}))
        return OffloadConfig(**(values | more))


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return probe.connect_ex((HOST, port)) == 0


def _path(program: str) -> str:
    beside = Path(sys.executable).parent / program
    return str(beside) if beside.exists() else shutil.which(program) or program
