"""Child processes: programs that log, and children that answer commands. For `vcache prove`, the
benchmarks and the examples.

Every wait has a deadline, and no child outlives this process."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self, TypeVar

from vcache_backend.errors import VCacheError

T = TypeVar("T")
_libc = ctypes.CDLL(None, use_errno=True)


class ChildFailed(VCacheError):
    """A child answered with an error, was late, or ended. The message contains the end of its
    log.
    """

    @property
    def line(self) -> str:
        """Who has failed and how, and the last error in its log."""
        first, *log = str(self).splitlines()
        errors = [line for line in log if re.search("Error|No space|Killed", line)]
        last = [line for line in errors[-1:] or log[-1:] if line not in first]
        return " ".join([first.partition("; /")[0], *last])


def die_with_parent() -> None:
    """Called in a child: have it get SIGKILL when the thread that started it ends."""
    _libc.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


@contextmanager
def _uninterrupted() -> Iterator[Callable[[], None]]:
    """SIGINT and SIGTERM wait for the end of the block: Python loses what a handler raises in the
    middle of a fork. The child calls what this gives first."""
    held = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))

    def begin() -> None:
        die_with_parent()
        signal.pthread_sigmask(signal.SIG_SETMASK, held)

    try:
        yield begin
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, held)


class Program:
    """A process in a group of its own, killed with all that it started. Its output is appended to
    `log`. stdin: a descriptor for its standard input.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        log: Path,
        environment: Mapping[str, str] | None = None,
        stdin: int = subprocess.DEVNULL,
    ) -> None:
        self.name, self.log, self._command, self._stdin = name, log, command, stdin
        self._environment = dict(
            os.environ if environment is None else environment  # noqa: TID251 - handed on, not read
        )
        self.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def start(self) -> None:
        """Start it, also again after `kill`."""
        started = False
        try:
            with self.log.open("ab") as file, _uninterrupted() as begin:
                self._process = subprocess.Popen(
                    self._command,
                    env=self._environment,
                    stdin=self._stdin,
                    stdout=file,
                    stderr=file,
                    process_group=0,
                    preexec_fn=begin,
                )
                started = True
        except KeyboardInterrupt:  # it came meanwhile
            if started:
                self.kill()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def until(self, ready: Callable[[], Any], seconds: float = 30.0) -> None:
        """Wait until `ready()` is true. ChildFailed if the process ends, or after `seconds`, when
        it is killed.
        """
        until(lambda: not self.alive or ready(), seconds, 0.02)
        if not ready():
            self.kill()
            late = f"was not ready within {seconds:g} s, or ended"
            raise ChildFailed(f"{self.name} {late}; {self.tail()}")

    def signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL to the whole group, and reap. Idempotent."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait(30.0)

    def said(self, pattern: str = r"vcache.*(WARN|ERROR)|(WARN|ERROR).*vcache") -> list[str]:
        """The log's lines that match; by default what vcache warns of."""
        lines = self.log.read_text(errors="replace").splitlines()
        return [line for line in lines if re.search(pattern, line)]

    def tail(self) -> str:
        """The end of the log."""
        return f"{self.log} ends with:\n{self.log.read_bytes()[-1500:].decode(errors='replace')}"


class Child(Program):
    """A program that runs `answer_commands`. It has one end of a pipe for its standard input."""

    def __init__(
        self, name: str, command: Sequence[str], log: Path, environment: Mapping[str, str]
    ) -> None:
        self._pipe, theirs = Pipe()
        with theirs:
            super().__init__(name, command, log, environment, theirs.fileno())

    def kill(self) -> None:
        super().kill()
        self._pipe.close()

    def send(self, command: str, **arguments: Any) -> None:
        """Send a command; `answer` waits for its result."""
        try:
            self._pipe.send((command, arguments))
        except OSError as error:
            raise ChildFailed(f"{self.name}: {error}; {self.tail()}") from error

    def answer(self, seconds: float) -> Any:
        """The next answer. ChildFailed if it is an error, if the child is silent for `seconds`, or
        if it ends.

        A silent child is killed: its late answer would be taken for the next one.
        """
        deadline, error, answer = time.monotonic() + seconds, "ended", None
        with suppress(EOFError, OSError):
            # Processes that it has started may keep the pipe open behind its end.
            while not self._pipe.poll(0.2) and self.alive:
                if time.monotonic() > deadline:
                    self.kill()
                    error = "did not answer in time"
            if self._pipe.poll():
                error, answer = self._pipe.recv()
        if error == "ended":
            until(lambda: not self.alive, 1.0)
            error = f"ended with code {self._process.returncode}"
        if error:
            raise ChildFailed(f"{self.name}: {error}; {self.tail()}")
        return answer

    @property
    def has_answered(self) -> bool:
        """Whether `answer` would return, or raise, at once."""
        return self._pipe.poll() or not self.alive

    def ask(self, command: str, seconds: float = 60.0, **arguments: Any) -> Any:
        self.send(command, **arguments)
        return self.answer(seconds)


def answer_commands(make: Callable[[], Any]) -> None:
    """The main loop of a child: say that it is ready once `make` has returned the object with the
    commands, then answer until the pipe ends.

    It ends the process without clean-up, since threads of libraries could hold it up."""
    pipe, made = Connection(os.dup(0)), list[Any]()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)

    def answer(call: Callable[..., Any], **arguments: Any) -> None:
        try:
            reply = "", call(**arguments)
        except Exception as error:  # noqa: BLE001 - the parent decides what a failure costs
            traceback.print_exc()
            reply = f"{type(error).__name__}: {' '.join(str(error).split())}", None
        pipe.send(reply)

    answer(lambda: made.append(make()))
    with suppress(EOFError):
        while True:
            command, arguments = pipe.recv()
            answer(getattr(made[0], command), **arguments)
    sys.stderr.flush()
    os._exit(0)


def module(name: str, *arguments: str) -> list[str]:
    """The command line that runs a module with this Python."""
    return [sys.executable, "-P", "-m", name, *arguments]


def environment(**more: str) -> dict[str, str]:
    """This process's variables but vcache's own, and `more`."""
    ours = "VCACHE_CONFIG", "VCACHE_SOCKET"
    given = {**os.environ, **more}  # noqa: TID251 - handed on, not read
    return {name: value for name, value in given.items() if name not in ours}


class MetadataServer(Program):
    """A metadata server on a socket of its own, without chunks. It serves when `start` returns."""

    def __init__(self, path: Path, log: Path, environment: Mapping[str, str] | None = None) -> None:
        self.path = path
        command = module("vcache_backend", "serve", "--socket", str(path))
        super().__init__("metadata server", command, log, environment)

    def start(self) -> None:
        self.path.unlink(missing_ok=True)
        super().start()
        self.until(self._listens)

    def _listens(self) -> bool:
        """Whether a client can connect. The socket's path is there a moment earlier."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
            return not probe.connect_ex(str(self.path))


def until(what: Callable[[], T], seconds: float, every: float = 0.01) -> T:
    """Wait until `what()` is true, at most so many seconds. Its last answer."""
    deadline = time.monotonic() + seconds
    while not (answer := what()) and time.monotonic() < deadline:
        time.sleep(every)
    return answer
