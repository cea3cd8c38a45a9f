"""Real processes for the tests: a server, child programs, memfd segments. Everything has a deadline and dies with its test."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import msgpack

from vcache_backend.config import ClientConfig
from vcache_backend.metadata_server import messages as m
from vcache_backend.metadata_server.client import Client

ROOT = Path(__file__).resolve().parent.parent
SECONDS = 20.0
"""Nothing in these tests waits longer, however slow the machine."""
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


def eventually(what: Callable[[], Any], seconds: float = SECONDS) -> Any:
    """The first true answer of `what`; fails after `seconds`."""
    deadline = time.monotonic() + seconds
    while True:
        answer = what()
        if answer:
            return answer
        assert time.monotonic() < deadline, f"not true within {seconds:g} s"
        time.sleep(0.01)


class Child:
    """A process of this test. `expect` reads its standard output with a deadline; leaving the context kills and reaps it."""

    def __init__(self, arguments: list[str], **environment: str) -> None:
        self._buffer = b""
        paths = [str(ROOT), str(ROOT / "tests"), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
        self.process = subprocess.Popen(
            arguments,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1", **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            preexec_fn=_start,
        )
        self.pid = self.process.pid

    def __enter__(self) -> Child:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.kill()
        assert self.process.stdout is not None
        self.process.stdout.close()

    def expect(self, text: str, seconds: float = SECONDS) -> str:
        """The first line with `text`; fails if the child ends or takes longer."""
        assert self.process.stdout is not None
        deadline, seen = time.monotonic() + seconds, b""
        while True:
            while b"\n" in self._buffer:
                line, self._buffer = self._buffer.split(b"\n", 1)
                seen += line + b"\n"
                if text in line.decode():
                    return line.decode()
            ready, _, _ = select.select([self.process.stdout], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"no {text!r} within {seconds:g} s; the child said:\n{seen.decode()}"
            piece = os.read(self.process.stdout.fileno(), 1 << 16)
            assert piece, f"ended without {text!r} (exit status {self.process.wait(SECONDS)}); it said:\n{seen.decode()}"
            self._buffer += piece

    def wait(self, seconds: float = SECONDS) -> tuple[int, str]:
        """Its exit status and the rest of what it said."""
        assert self.process.stdout is not None
        out, _ = self.process.communicate(timeout=seconds)
        return self.process.returncode, (self._buffer + out).decode()

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL, and reaped. Idempotent."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(SECONDS)

    def descriptors(self, limit: int | None = None) -> set[int]:
        """Numbers of its open files; `limit` becomes its (soft) RLIMIT_NOFILE."""
        if limit is not None:
            _, hard = resource.prlimit(self.pid, resource.RLIMIT_NOFILE)
            resource.prlimit(self.pid, resource.RLIMIT_NOFILE, (limit, hard))
        return {int(fd) for fd in os.listdir(f"/proc/{self.pid}/fd")}

    def fds(self) -> list[str]:
        """What its file descriptors point to."""
        names = []
        for fd in os.listdir(f"/proc/{self.pid}/fd"):
            try:
                names.append(os.readlink(f"/proc/{self.pid}/fd/{fd}"))
            except FileNotFoundError:
                continue
        return names

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Hung, as far as anybody can tell."""
        self.signal(signal.SIGSTOP)
        eventually(lambda: Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T")
        try:
            yield
        finally:
            self.signal(signal.SIGCONT)


def _start() -> None:
    """In the child: die with the parent, and hear Ctrl-C also where a shell started the tests in the background."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def script(text: str, *arguments: str) -> Child:
    """A child that runs a few lines of Python; `sys.argv[1:]` are the arguments."""
    return Child([sys.executable, "-c", text, *arguments])


def start_server(path: Path, config: dict[str, Any] | None = None) -> Child:
    """A real metadata server, serving. `config` is its `server` section."""
    arguments = [sys.executable, "-m", "vcache_backend.metadata_server", "--socket", str(path)]
    if config:
        file = path.with_suffix(".yaml")
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        file.write_text("server:\n" + "".join(f"  {name}: {str(value).lower()}\n" for name, value in config.items()))
        arguments += ["--config", str(file)]
    child = Child(arguments)
    try:
        child.expect("serving")
    except BaseException:
        child.__exit__(None, None, None)
        raise
    return child


QUICK = ClientConfig(
    connect_seconds=0.5,
    request_seconds=0.25,
    control_seconds=0.5,
    heartbeat_seconds=0.1,
    retry_seconds=0.02,
    retry_max_seconds=0.1,
)
PATIENT = ClientConfig(connect_seconds=10, request_seconds=10, control_seconds=10, heartbeat_seconds=30)
"""For tests that are about something else: a slow machine must not open the breaker."""


class Stage:
    """A socket path, the servers started on it and the clients connected to it; closed in the right order."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "vcache.sock"
        self.undo = ExitStack()

    def server(self, **config: Any) -> Child:
        return self.undo.enter_context(start_server(self.path, config))

    def client(self, config: ClientConfig = PATIENT, device: str = "host", **more: Any) -> Client:
        return self.undo.enter_context(Client(self.path, config, device, "host", **more))

    def script(self, text: str, *arguments: str) -> Child:
        """A child with the socket's path as its first argument."""
        return self.undo.enter_context(script(text, str(self.path), *arguments))

    def raw(self, hello: bool = True) -> Raw:
        return self.undo.enter_context(Raw(self.path, hello))


@contextmanager
def stage(folder: Path) -> Iterator[Stage]:
    made = Stage(folder)
    with made.undo:
        yield made


# ---- segments


def make_memfd(nbytes: int, seals: bool = True) -> int:
    """Shared memory as a host segment is: sealed against shrinking and growing."""
    fd = os.memfd_create("vcache-test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, nbytes)
    if seals:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return fd


def info(name: str, nbytes: int, device: str = "host") -> m.SegmentInfo:
    return m.SegmentInfo(m.SegmentId(name), device, "host", nbytes)


def write_at(fd: int, place: m.Location, data: bytes) -> None:
    with mmap.mmap(fd, 0) as memory:
        memory[place.offset : place.offset + len(data)] = data


def read_at(fd: int, place: m.Location) -> bytes:
    with mmap.mmap(fd, 0) as memory:
        return memory[place.offset : place.offset + place.length]


# ---- the protocol as somebody else would speak it


class Raw:
    """The protocol by hand: a socket, four bytes of length, and the `msgpack` package. Nothing of ours."""

    def __init__(self, path: Path, hello: bool = True) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.settimeout(SECONDS)
        self.fds: list[int] = []
        try:
            self.socket.connect(str(path))
            self.welcome = self.ask("hello", 2, "host", "host", {}) if hello else None
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Raw:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        self.socket.close()
        while self.fds:
            os.close(self.fds.pop())

    def send(self, *message: Any, fds: tuple[int, ...] = ()) -> None:
        """A server that has closed the connection already may have said why: that is for `receive`."""
        body = msgpack.packb(list(message), use_bin_type=True)
        with suppress(BrokenPipeError):
            self.send_bytes(len(body).to_bytes(4, "little") + body, fds)

    def send_bytes(self, data: bytes, fds: tuple[int, ...] = ()) -> None:
        if fds:
            sent = socket.send_fds(self.socket, [data], list(fds))
            data = data[sent:]
        self.socket.sendall(data)

    def receive(self) -> list[Any] | None:
        """The next message, or None if the server closed the connection."""
        head = self._exactly(4)
        if head is None:
            return None
        body = self._exactly(int.from_bytes(head, "little"))
        message: list[Any] = msgpack.unpackb(body, raw=False, strict_map_key=False)
        return message

    def ask(self, *message: Any, fds: tuple[int, ...] = ()) -> list[Any] | None:
        """A message and its answer. If the server has closed the connection, the last it said, or None."""
        with suppress(BrokenPipeError):
            self.send(*message, fds=fds)
        return self.receive()

    def closed(self) -> bool:
        """Read to the end: does the server close (rather than leave us waiting)?"""
        try:
            while self.socket.recv(1 << 16):
                pass
        except ConnectionResetError:
            pass
        return True

    def _exactly(self, count: int) -> bytes | None:
        data = b""
        while len(data) < count:
            try:
                piece, fds, _, _ = socket.recv_fds(self.socket, count - len(data), 4)
            except ConnectionResetError:
                return None
            self.fds += fds
            if not piece:
                return None
            data += piece
        return data
