"""Child processes that answer lines of JSON with lines of JSON. Every wait has a deadline, and no child outlives this process."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


class ChildFailed(RuntimeError):
    """A child said no, was late, or ended."""


def _die_with_parent() -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class Child:
    """A process in a group of its own, killed with all it started. What it says on standard error goes to `log`."""

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        self.name, self.log = name, log
        self._buffer = b""
        with log.open("ab") as file:
            self._process = subprocess.Popen(
                command,
                env=dict(environment),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                process_group=0,
                preexec_fn=_die_with_parent,
            )

    def __enter__(self) -> Child:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.kill()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        """SIGKILL to the whole group, and reap. Idempotent."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(20)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def send(self, command: str, **arguments: Any) -> None:
        """Hand in a command; `answer` waits for it."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps([command, arguments]).encode() + b"\n")
            self._process.stdin.flush()
        except (OSError, ValueError) as error:
            raise ChildFailed(f"{self.name}: {error}; {self.tail()}") from error

    def answer(self, seconds: float) -> Any:
        """The next answer. Raises ChildFailed: an error, silence for `seconds`, or the child's end, with the end of its log.

        A child that was silent is killed: what it said later would be taken for the next answer.
        """
        reply = json.loads(self._line(time.monotonic() + seconds))
        if "error" in reply:
            raise ChildFailed(f"{self.name}: {reply['error']}; {self.tail()}")
        return reply["answer"]

    def ask(self, command: str, seconds: float = 60.0, **arguments: Any) -> Any:
        self.send(command, **arguments)
        return self.answer(seconds)

    def tail(self, size: int = 1500) -> str:
        """The end of the log."""
        return f"{self.log} ends with:\n{self.log.read_bytes()[-size:].decode(errors='replace')}"

    def _line(self, deadline: float) -> bytes:
        assert self._process.stdout is not None
        while b"\n" not in self._buffer:
            left = deadline - time.monotonic()
            if left <= 0:
                self.kill()
                raise ChildFailed(f"{self.name} did not answer in time; {self.tail()}")
            ready, _, _ = select.select([self._process.stdout], [], [], min(left, 0.5))
            if ready:
                piece = os.read(self._process.stdout.fileno(), 1 << 20)
                self._buffer += piece
                if not piece:
                    raise ChildFailed(f"{self.name} ended; {self.tail()}")
            elif not self.alive:
                raise ChildFailed(f"{self.name} ended; {self.tail()}")
        line, self._buffer = self._buffer.split(b"\n", 1)
        return line
