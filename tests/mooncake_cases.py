"""A real Mooncake store for tests: a master and providers of memory, in processes of their own, on free ports of 127.0.0.1.

They are the binaries of the package, started as users start them. Every wait has a deadline; every process dies with its test. Import
the fixtures you use: `depot` (shared by the whole session: leave it as it is), and `own_depot` (to be broken).
"""

from __future__ import annotations

import json
import mmap
import os
import secrets
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

import pytest
from processes import SECONDS, Child, free_ports

from vcache_backend.config import ByteSize, MooncakeConfig, OffloadConfig
from vcache_backend.offload.client import OffloadProcess
from vcache_backend.offload.verbs import STORED, StoreDown

BIN = Path(sys.executable).parent
MIB = 1 << 20


def _missing() -> str:
    """Why there is no Mooncake here; empty if there is. Asked of another process: this one must not load it before its settings."""
    if find_spec("mooncake") is None:
        return "needs mooncake-transfer-engine-non-cuda"
    done = subprocess.run(
        [sys.executable, "-c", "import mooncake.store"], capture_output=True, text=True, timeout=60, check=False
    )
    return "" if done.returncode == 0 else f"needs mooncake.store: {done.stderr.strip().splitlines()[-1]}"


MISSING = _missing()
needs_mooncake = pytest.mark.skipif(bool(MISSING), reason=MISSING or "Mooncake is here")


class Process:
    """A program of the package, its log in a file. Killed, stopped and continued by hand; leaving the context kills it."""

    def __init__(self, log: Path, arguments: Sequence[str], **environment: str) -> None:
        self.log = log
        self._arguments = list(arguments)
        self._environment = environment
        self.child = self._start()

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *reason: object) -> None:
        self.close()

    def _start(self) -> Child:
        # What our own client sets for itself is not for others. A log in a pipe would stop the process once the pipe is full.
        clean = [piece for name in os.environ if name.startswith("MC_") for piece in ("-u", name)]
        clean += [f"{name}={value}" for name, value in self._environment.items()]
        return Child(["/usr/bin/env", *clean, "/bin/sh", "-c", 'exec "$@" >>"$0" 2>&1', str(self.log), *self._arguments])

    @property
    def pid(self) -> int:
        return self.child.pid

    def said(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def kill(self) -> None:
        """SIGKILL, and reaped."""
        self.child.close()

    close = kill

    def stop(self) -> None:
        """From now on it hangs."""
        self.child.stop()

    def cont(self) -> None:
        self.child.cont()

    def ready(self, what: Callable[[], Any]) -> None:
        """Wait until `what` is true; fails, with what the process said, if it ends or takes too long."""
        deadline = time.monotonic() + SECONDS
        while not what():
            assert self.child.process.poll() is None, f"ended: {self.said()}"
            assert time.monotonic() < deadline, f"not ready within {SECONDS:g} s: {self.said()}"
            time.sleep(0.01)


class Master(Process):
    """`mooncake_master`, serving when this returns. `flags` are its own, such as client_ttl=3."""

    def __init__(self, folder: Path, **flags: Any) -> None:
        self.port, self.metrics_port = free_ports(2)
        flags = {
            "rpc_address": "127.0.0.1",
            "rpc_port": self.port,
            "metrics_host": "127.0.0.1",
            "metrics_port": self.metrics_port,
            "enable_metric_reporting": False,
        } | flags
        arguments = [str(BIN / "mooncake_master"), *(f"--{name}={str(value).lower()}" for name, value in flags.items())]
        super().__init__(folder / f"master-{self.port}.log", arguments)
        try:
            self.ready(self._serves)
        except BaseException:
            self.close()
            raise

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def restart(self) -> None:
        """A new one on the same ports, which knows no object. Providers join it by themselves, within a second or two."""
        self.kill()
        self.child = self._start()
        self.ready(self._serves)

    def ask(self, path: str) -> str:
        """An answer of its HTTP interface, such as /get_all_segments."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics_port}{path}", timeout=SECONDS) as answer:
            return str(answer.read().decode())

    def segments(self) -> dict[str, int]:
        """Bytes in use by the name of the segment."""
        try:
            listed = json.loads(self.ask("/get_segments_detail"))["segments"]
        except OSError:
            return {}
        return {segment["segment_name"]: segment["allocator_used_bytes"] for segment in listed}

    def _serves(self) -> bool:
        for port in (self.port, self.metrics_port):
            with socket.socket() as probe:
                probe.settimeout(1)
                if probe.connect_ex(("127.0.0.1", port)):
                    return False
        return True


class Provider(Process):
    """`mooncake_client`, lending `nbytes` to `master`'s store; in use when this returns."""

    def __init__(self, master: Master, nbytes: int, folder: Path) -> None:
        (port,) = free_ports(1)
        self.master = master
        flags = {
            "host": "127.0.0.1",
            "port": port,
            "master_server_address": master.address,
            "metadata_server": "P2PHANDSHAKE",
            "protocol": "tcp",
            "global_segment_size": f"{nbytes} B",
            "local_buffer_size": "0",
        }
        arguments = [str(BIN / "mooncake_client"), *(f"--{name}={value}" for name, value in flags.items())]
        super().__init__(folder / f"provider-{port}.log", arguments, MC_TCP_BIND_ADDRESS="127.0.0.1")
        try:
            self.ready(lambda: self.name in master.segments())
        except BaseException:
            self.close()
            raise

    @property
    def name(self) -> str:
        """Of its segment, as the master knows it; empty before it has one."""
        host, found, rest = self.said().partition("server_name: ")
        return rest.split("\n", 1)[0].replace(" port: ", ":").strip() if found and host and "\n" in rest else ""

    def gone(self) -> bool:
        """Has the master taken notice that this one died? It does after `client_ttl`."""
        return self.name not in self.master.segments()


class Depot:
    """A master, and a provider for each of `providers`, in bytes. `flags` are the master's."""

    def __init__(self, folder: Path, providers: Sequence[int] = (64 * MIB,), **flags: Any) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._undo = ExitStack()
        self.providers: list[Provider] = []
        try:
            self.master: Master = self._undo.enter_context(Master(folder, **flags))
            for nbytes in providers:
                self.lend(nbytes)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Depot:
        return self

    def __exit__(self, *reason: object) -> None:
        self.close()

    def close(self) -> None:
        self._undo.close()

    def lend(self, nbytes: int) -> Provider:
        """One more provider."""
        provider: Provider = self._undo.enter_context(Provider(self.master, nbytes, self.folder))
        self.providers.append(provider)
        return provider

    def config(self, **more: Any) -> MooncakeConfig:
        """How to reach it, from this machine only."""
        return MooncakeConfig(**({"master": self.master.address, "hostname": "127.0.0.1"} | more))

    def offload(self, **more: Any) -> OffloadConfig:
        """A tier on it: write_through, with `more` of OffloadConfig's values; `mooncake` is a dict of MooncakeConfig's."""
        mooncake = self.config(**more.pop("mooncake", {}))
        return OffloadConfig(**({"policy": "write_through", "min_bandwidth": ByteSize(0), "mooncake": mooncake} | more))


class Raw:
    """The store itself, past everything of ours but its process: objects as bytes. Leaving the context kills the process."""

    def __init__(self, config: MooncakeConfig, nbytes: int = 8 * MIB) -> None:
        """nbytes: the most that one call puts or gets."""
        self._fd = os.memfd_create("raw")
        os.ftruncate(self._fd, nbytes)
        self.memory = mmap.mmap(self._fd, nbytes)
        self.process = OffloadProcess(config, self._fd)

    def __enter__(self) -> Self:
        try:
            self.call("open")
        except StoreDown:
            self.__exit__()
            raise
        return self

    def __exit__(self, *reason: object) -> None:
        self.process.kill()
        os.close(self._fd)

    def call(self, verb: str, *arguments: Any, seconds: float = SECONDS) -> Any:
        return self.process.call(verb, *arguments, seconds=seconds)

    def there(self, names: Sequence[str]) -> list[bool]:
        return list(self.call("exist", names))

    def put(self, names: Sequence[str], objects: Sequence[bytes]) -> list[str]:
        """STORED, FULL or FAILED for each."""
        places, at = [], 0
        for data in objects:
            self.memory[at : at + len(data)] = data
            places.append((at, len(data)))
            at += len(data)
        return list(self.call("put", names, places))

    def get(self, names: Sequence[str], nbytes: int = MIB) -> list[bytes]:
        """Objects of at most so many bytes; empty where there is none."""
        self.memory[:] = bytes(len(self.memory))
        sizes = self.call("get", names, [(number * nbytes, nbytes) for number in range(len(names))])
        return [self.memory[number * nbytes : number * nbytes + size] for number, size in enumerate(sizes)]

    def remove(self, names: Sequence[str]) -> None:
        self.call("remove", names)

    def change(self, name: str, change: Callable[[bytearray], bytearray]) -> None:
        """Put other bytes in the place of an object."""
        (data,) = self.get([name])
        self.remove([name])
        assert self.put([name], [bytes(change(bytearray(data)))]) == [STORED]


def new_names(count: int) -> list[str]:
    """Names of objects that nobody has seen."""
    stem = secrets.token_hex(8)
    return [f"vcache1/{stem}{number:04x}" for number in range(count)]


@pytest.fixture(scope="session")
def depot(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Depot]:
    """Shared by the session: two providers of 128 MiB. Do not break it."""
    with Depot(tmp_path_factory.mktemp("mooncake"), (128 * MIB, 128 * MIB)) as made:
        yield made


@pytest.fixture
def own_depot(tmp_path: Path) -> Iterator[Depot]:
    """A test's own, one provider of 64 MiB, to be broken. A dead provider is forgotten after 3 s, not 10."""
    with Depot(tmp_path / "mooncake", (64 * MIB,), client_ttl=3) as made:
        yield made
