"""Processes that are killed and stopped often: forked from one that has imported everything, since imports take seconds."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TypeVar

S = TypeVar("S")
SECONDS = 60.0


class Forked:
    """A process that lives `life`, with a pipe to it."""

    _context = multiprocessing.get_context("forkserver")
    _lock = threading.Lock()

    def __init__(self, life: Callable[[S, Connection], None], settings: S, log: Path) -> None:
        """log: where it writes what it says."""
        self.log = log
        with self._lock:
            self._context.set_forkserver_preload([life.__module__])
            self.pipe, theirs = self._context.Pipe()
            self._process = self._context.Process(target=life, args=(settings, theirs), daemon=True)
            self._process.start()
            theirs.close()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def kill(self) -> None:
        """Reaped. Idempotent."""
        self._process.kill()
        self._process.join(SECONDS)
        self.pipe.close()

    def tail(self, size: int = 1500) -> str:
        """The end of its log."""
        said = self.log.read_bytes()[-size:].decode(errors="replace") if self.log.exists() else ""
        return f"process {self.pid} ended or is silent; {self.log} ends with:\n{said}"


class Waker:
    """Sends SIGCONT to who is stopped, by whomever, some time later. One thread. stops: how often."""

    def __init__(self, seed: str, longest: float) -> None:
        """longest: seconds until then."""
        self._dice, self._longest, self._wakes = random.Random(f"wake {seed}"), longest, dict[int, float]()
        self.stops = 0

    def look(self, pids: list[int]) -> None:
        """To be called often."""
        now = time.monotonic()
        for pid in pids:
            if pid not in self._wakes and _stopped(pid):
                self._wakes[pid] = now + self._dice.uniform(0, self._longest)
                self.stops += 1
        for pid in [pid for pid, at in self._wakes.items() if at < now]:
            del self._wakes[pid]
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def _stopped(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except OSError:
        return False
