"""The process that instances of vLLM are forked from: it imports vLLM once for a test session, which takes longer than an engine's start.

It is `vllm_cases.py` run as a program. An instance has its own environment, folder, pipes, log and session, as if it had been
started from the command line; it dies with the one it was forked from, and that one with the tests.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import io
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

IMPORT_SECONDS = 120.0
END_SECONDS = 10.0
_REQUEST_BYTES = 1 << 20
_PR_SET_PDEATHSIG = 1
_IMPORTED = ("vllm.v1.engine.llm_engine", "vllm.v1.engine.core", "vllm.v1.worker.cpu_worker", "vllm.model_executor.models.llama")
"""What every instance imports, and nothing that plugins change."""


class Born:
    """An instance's process, the leader of a session: its standard input and output, as files without a buffer."""

    def __init__(self, pid: int, stdin: int, stdout: int) -> None:
        self.pid, self.stdin, self.stdout = pid, io.FileIO(stdin, "w"), io.FileIO(stdout, "r")
        self._end: int | None = None
        # It may have ended already.
        with suppress(ProcessLookupError):
            self._end = os.pidfd_open(pid)

    def ended(self, seconds: float = 0.0) -> bool:
        """Has it ended, within so many seconds from now?"""
        return self._end is None or bool(select.select([self._end], [], [], seconds)[0])

    def kill(self) -> None:
        """SIGKILL for all of the session, and gone. Idempotent."""
        if self.stdin.closed:
            return
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        assert self.ended(END_SECONDS), f"process {self.pid} does not end"
        if self._end is not None:
            os.close(self._end)
        self.stdin.close()
        self.stdout.close()


class Nursery:
    """Seen from the tests."""

    def __init__(self, program: Path, environment: dict[str, str]) -> None:
        self._socket, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(IMPORT_SECONDS)
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 - `close` closes it
        libc = ctypes.CDLL(None)
        with there:
            self._process = subprocess.Popen(
                [sys.executable, str(program), str(there.fileno())],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=self._said,
                stderr=self._said,
                pass_fds=[there.fileno()],
                preexec_fn=lambda: libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL),
            )

    def fork(self, folder: Path, environment: dict[str, str], arguments: dict[str, Any], log: Path) -> Born:
        """An instance's process in `folder`. Returns once vLLM is imported."""
        request = json.dumps({"folder": str(folder), "environment": environment, "arguments": arguments}).encode()
        assert len(request) <= _REQUEST_BYTES
        their_in, stdin = os.pipe()
        stdout, their_out = os.pipe()
        with log.open("wb") as file:
            try:
                socket.send_fds(self._socket, [request], [their_in, their_out, file.fileno()])
                answer = self._socket.recv(_REQUEST_BYTES)
                assert answer, f"no vLLM; it said {self._last_words()}"
            except BaseException:
                os.close(stdin)
                os.close(stdout)
                raise
            finally:
                os.close(their_in)
                os.close(their_out)
        return Born(int(answer), stdin, stdout)

    def close(self) -> None:
        self._process.kill()
        self._process.wait(END_SECONDS)
        self._socket.close()
        self._said.close()

    def _last_words(self) -> str:
        self._said.seek(0)
        return self._said.read().decode(errors="replace")[-3000:]


@functools.cache
def nursery(program: Path) -> Nursery:
    """This process's. Its environment is that of its first instance but for what each brings."""
    given = {name: value for name, value in os.environ.items() if name not in ("TRITON_INTERPRET", "VCACHE_CONFIG")}
    made = Nursery(program, {**given, "OMP_NUM_THREADS": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"})
    atexit.register(made.close)
    return made


def rear(fd: int, serve: Callable[[dict[str, Any]], None]) -> None:
    """Inside it: import vLLM, then fork a process for each request; that calls `serve` with its arguments and ends."""
    for name in _IMPORTED:
        __import__(name)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    with socket.socket(fileno=fd) as tests:
        while True:
            message, fds, _, _ = socket.recv_fds(tests, _REQUEST_BYTES, 3)
            if not message:
                return
            request = json.loads(message)
            sys.stdout.flush()
            sys.stderr.flush()
            pid = os.fork()
            if pid == 0:
                tests.close()
                try:
                    _become(request, fds)
                    serve(request["arguments"])
                finally:
                    os._exit(1)
            for each in fds:
                os.close(each)
            tests.send(str(pid).encode())


def _become(request: dict[str, Any], fds: list[int]) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.setsid()
    for to, each in enumerate(fds):
        os.dup2(each, to)
        os.close(each)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
