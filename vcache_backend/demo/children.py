"""The demo's processes: started in a session of their own, spoken to with deadlines, killed at the end whatever happens."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing import Pipe
from pathlib import Path

import msgspec

from vcache_backend.demo.jobs import Failed, FromWorker, ToWorker
from vcache_backend.errors import VCacheError

SOCKET = "vcache.sock"
CONFIG = "vcache.yaml"
KILL_SECONDS = 10.0
_LAUNCHER = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 9)
if os.getppid() != int(sys.argv[1]):
    sys.exit(1)
os.execv(sys.executable, [sys.executable, "-m", *sys.argv[2:]])
"""
"""Sets PR_SET_PDEATHSIG to SIGKILL before it becomes the module: a demo that is killed cannot kill its children any more.
If the demo (the pid in front) is gone by then, no signal will come, and it ends itself."""


class DemoError(VCacheError):
    """A process of the demo did not start, did not answer in time, or ended."""


class Child:
    """A Python module running as a process of its own; what it prints goes to `log`."""

    def __init__(self, name: str, arguments: list[str], folder: Path, fds: tuple[int, ...] = ()) -> None:
        self.name, self.log = name, folder / f"{name.replace(' ', '-')}.log"
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-c", _LAUNCHER, str(os.getpid()), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, "VCACHE_SOCKET": str(folder / SOCKET), "VCACHE_CONFIG": str(folder / CONFIG)},
                pass_fds=fds,
                start_new_session=True,
            )

    def failure(self, what: str) -> DemoError:
        """An error that says what happened and how the child's log ends."""
        code = self.process.poll()
        state = "still runs" if code is None else f"ended with exit code {code}"
        tail = self.log.read_text(errors="replace").strip().splitlines()[-15:]
        return DemoError("\n  ".join([f"{self.name} {what} (it {state}); its log ends:", *tail]))

    def kill(self) -> None:
        """May be called again. Raises DemoError if the process is still there KILL_SECONDS later."""
        if self.process.poll() is None:
            self.process.kill()
        try:
            self.process.wait(KILL_SECONDS)
        except subprocess.TimeoutExpired:
            raise DemoError(f"{self.name} (pid {self.process.pid}) did not die within {KILL_SECONDS:g} s of SIGKILL") from None


class WorkerChild(Child):
    """A worker process and our end of its pipe."""

    def __init__(self, number: int, folder: Path) -> None:
        self._pipe, theirs = Pipe()
        with theirs:
            super().__init__(f"worker {number}", ["vcache_backend.demo.worker", str(theirs.fileno())], folder, (theirs.fileno(),))
        self._decoder = msgspec.msgpack.Decoder(FromWorker)

    def send(self, message: ToWorker) -> None:
        try:
            self._pipe.send_bytes(msgspec.msgpack.encode(message))
        except OSError:
            raise self.failure("takes no more messages") from None

    def receive(self, seconds: float) -> FromWorker:
        """The next answer. Raises DemoError: none within `seconds`, the worker ended, or it failed and says why."""
        if not self._pipe.poll(seconds):
            raise self.failure(f"gave no answer in {seconds:g} s")
        try:
            message: FromWorker = self._decoder.decode(self._pipe.recv_bytes())
        except (EOFError, OSError):
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(1.0)
            raise self.failure("closed its pipe") from None
        if isinstance(message, Failed):
            raise DemoError(f"{self.name} failed:\n{message.traceback}")
        return message

    def kill(self) -> None:
        self._pipe.close()
        super().kill()


@contextmanager
def children(workers: int, folder: Path, seconds: float) -> Iterator[list[WorkerChild]]:
    """A metadata server that answers on `folder`/SOCKET, configured by `folder`/CONFIG, and worker processes.

    None of them is left when the block ends, however it ends.
    """
    with ExitStack() as undo:
        server = Child("server", ["vcache_backend.metadata_server"], folder)
        undo.callback(server.kill)
        pool = []
        for number in range(workers):
            pool.append(WorkerChild(number, folder))
            undo.callback(pool[-1].kill)
        _await_socket(server, folder / SOCKET, seconds)
        yield pool


def _await_socket(server: Child, path: Path, seconds: float) -> None:
    """Return once the server accepts connections."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and server.process.poll() is None:
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(1.0)
            try:
                return probe.connect(str(path))
            except OSError:
                time.sleep(0.02)
    raise server.failure(f"does not accept connections on {path} after {seconds:g} s")
