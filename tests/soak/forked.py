"""Processes that are often killed and started: forked from one that has imported everything, since
imports take seconds.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch

from vcache_backend.children import die_with_parent

S = TypeVar("S")
SECONDS = 180.0


class Forked(Generic[S]):
    """A process that runs `life` with its settings, and a pipe to it. heard: when it last reported
    (time.monotonic).
    """

    _context = multiprocessing.get_context("forkserver")
    _lock = threading.Lock()

    def __init__(self, life: Callable[[S, Connection], None], settings: S, log: Path) -> None:
        """log: the file for its output."""
        self.settings, self.log = settings, log
        with self._lock:
            self._context.set_forkserver_preload([life.__module__])
            self.pipe, theirs = self._context.Pipe()
            self._process = self._context.Process(target=life, args=(settings, theirs), daemon=True)
            self._process.start()
            theirs.close()
        assert self._process.pid is not None
        self.pid, self.heard = self._process.pid, time.monotonic()

    def kill(self) -> None:
        """Reaped. Idempotent."""
        self._process.kill()
        self._process.join(SECONDS)
        self.pipe.close()

    @property
    def status(self) -> int:
        """Its exit status, once it is reaped; negative if a signal ended it."""
        return self._process.exitcode or 0

    def tail(self) -> str:
        """The end of its log."""
        said = self.log.read_bytes()[-1500:].decode(errors="replace") if self.log.exists() else ""
        return f"process {self.pid} ended or is silent; {self.log} ends with:\n{said}"


def begin(log: str) -> None:
    """Called first in such a process: have it end with its parent, write its output to `log`, and
    use one torch thread.
    """
    die_with_parent()
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for output in (1, 2):
        os.dup2(file, output)
    torch.set_num_threads(1)


def hear(processes: Sequence[Forked[Any]], silence: float = SECONDS) -> Iterator[tuple[int, Any]]:
    """The reports that have come, each with its process's index; None for one that has ended, or
    was silent for `silence` seconds.

    Waits a moment if there are none.
    """
    ready = wait([process.pipe for process in processes], timeout=0.02)
    for number, process in enumerate(tuple(processes)):
        said = None
        if process.pipe in ready:
            with suppress(EOFError, OSError):
                said = process.pipe.recv()
                process.heard = time.monotonic()
        elif time.monotonic() < process.heard + silence:
            continue
        yield number, said


def stopped(pid: int) -> bool:
    """Whether the process is stopped by a signal, or by a debugger."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except OSError:
        return False


class Waker:
    """Sends SIGCONT to processes some time after they were stopped, by whatever cause. One
    thread.
    """

    def __init__(self, seed: str, longest: float) -> None:
        """longest: seconds that a process stays stopped, at most."""
        self._dice, self._longest = random.Random(f"wake {seed}"), longest
        self._wakes: dict[int, float] = {}

    def look(self, pids: list[int]) -> None:
        """Look for stopped processes, and wake those that are due. Call it often."""
        now = time.monotonic()
        for pid in pids:
            if pid not in self._wakes and stopped(pid):
                self._wakes[pid] = now + self._dice.uniform(0, self._longest)
        for pid in [pid for pid, at in self._wakes.items() if at < now]:
            del self._wakes[pid]
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
