"""A Mooncake store for a benchmark: a master and providers of host memory, in processes of their own on 127.0.0.1.

Their binaries come with the package. Every wait has a deadline, and none outlives this process.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from vcache_backend.config import ByteSize, MooncakeConfig, OffloadConfig

HOST = "127.0.0.1"
START_SECONDS = 30.0
PROVIDER_SECONDS = 0.3
"""How long a provider takes to have lent its memory once it listens, and more."""
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


def missing() -> str:
    """Why there can be no store on this machine; empty if there can."""
    for package in ("mooncake", "xxhash"):
        if find_spec(package) is None:
            return f"{package} is not installed (pip install 'vcache-backend[mooncake]')"
    probe = [sys.executable, "-c", "import mooncake.store"]
    # In a process of its own: here it must not be loaded before its settings are made.
    done = subprocess.run(probe, capture_output=True, text=True, timeout=START_SECONDS, check=False)
    return done.stderr.strip().splitlines()[-1] if done.returncode else ""


class Program:
    """One process of the store, its log in a file. Leaving the depot kills it."""

    def __init__(self, log: Path, command: Sequence[str], ready: Callable[[], bool], **environment: str) -> None:
        self._log, self._command, self._ready = log, command, ready
        # What our own clients set for themselves is not for others.
        self._environment = _without_ours(os.environ) | environment
        self.restart()

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def restart(self) -> None:
        """Start it, again; returns when it is ready. Raises RuntimeError, with the end of its log, if it is not in time."""
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._environment,
                preexec_fn=_die_with_parent,
            )
        deadline = time.monotonic() + START_SECONDS
        while not self._ready():
            if not self.alive or time.monotonic() > deadline:
                self.kill()
                raise RuntimeError(f"{self._command[0]} did not start: {self._log.read_text(errors='replace')[-1500:]}")
            time.sleep(0.02)

    def kill(self) -> None:
        """SIGKILL, and reaped. Idempotent."""
        self._process.kill()
        self._process.wait(START_SECONDS)

    def stop(self) -> None:
        """From now on it hangs."""
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._process.send_signal(signal.SIGCONT)


class Depot:
    """A master, and one provider for each of `providers`, in bytes. flags: the master's own, such as client_ttl=3."""

    def __init__(self, folder: Path, providers: Sequence[int], **flags: Any) -> None:
        self._undo, self.providers = ExitStack(), list[Program]()
        port, metrics, *others = free_ports(2 + len(providers))
        self.address, self._metrics = f"{HOST}:{port}", f"http://{HOST}:{metrics}/metrics"
        flags = {
            "rpc_address": HOST,
            "rpc_port": port,
            "metrics_host": HOST,
            "metrics_port": metrics,
            "enable_metric_reporting": "false",
        } | flags
        try:
            command = [_program("mooncake_master"), *(f"--{name}={value}" for name, value in flags.items())]
            self.master = Program(folder / "master.log", command, lambda: listens(port) and listens(metrics))
            self._undo.callback(self.master.kill)
            for number, (nbytes, own) in enumerate(zip(providers, others, strict=True)):
                self._lend(folder / f"provider{number}.log", nbytes, own)
        except BaseException:
            self._undo.close()
            raise
        time.sleep(PROVIDER_SECONDS)

    def __enter__(self) -> Depot:
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def _lend(self, log: Path, nbytes: int, port: int) -> None:
        flags = {
            "host": HOST,
            "port": port,
            "master_server_address": self.address,
            "metadata_server": "P2PHANDSHAKE",
            "protocol": "tcp",
            "global_segment_size": f"{nbytes} B",
            "local_buffer_size": 0,
        }
        command = [_program("mooncake_client"), *(f"--{name}={value}" for name, value in flags.items())]
        self.providers.append(Program(log, command, lambda: listens(port), MC_TCP_BIND_ADDRESS=HOST))
        self._undo.callback(self.providers[-1].kill)

    def objects(self) -> int:
        """How many the store has, those included that are being written."""
        with urllib.request.urlopen(self._metrics, timeout=START_SECONDS) as answer:
            lines = answer.read().decode().splitlines()
        return int(next(line.split()[1] for line in lines if line.startswith("master_key_count ")))

    def offload(self, **more: Any) -> OffloadConfig:
        """A tier on it, write_through; `more` of OffloadConfig's values."""
        mooncake = MooncakeConfig(master=self.address, hostname=HOST, local_buffer_bytes=ByteSize(0))
        values: dict[str, Any] = {"policy": "write_through", "min_bandwidth": ByteSize(0), "mooncake": mooncake}
        return OffloadConfig(**(values | more))


def free_ports(count: int) -> list[int]:
    """Ports of this host that nobody listens on, below those the kernel gives to connections."""
    ports: list[int] = []
    while len(ports) < count:
        port = 20_000 + secrets.randbelow(12_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind((HOST, port))
            if port not in ports:
                ports.append(port)
    return ports


def listens(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return probe.connect_ex((HOST, port)) == 0


def _program(name: str) -> str:
    beside = Path(sys.executable).parent / name
    return str(beside) if beside.exists() else shutil.which(name) or name


def _without_ours(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if not name.startswith("MC_")}


def _die_with_parent() -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
