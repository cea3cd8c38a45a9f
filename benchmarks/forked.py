"""Processes that are killed and stopped often: forked from one that has imported everything, since imports take seconds."""

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
from typing import Any, Self, TypeVar

import msgspec
import torch

from .processes import die_with_parent, stopped

S = TypeVar("S")
SECONDS = 60.0


class Counts(msgspec.Struct):
    """What such a process counts, and tells from time to time: numbers and Counters."""

    def add(self, more: Self) -> None:
        for name in self.__struct_fields__:
            setattr(self, name, getattr(self, name) + getattr(more, name))


class Forked:
    """A process that lives `life`, with a pipe to it. heard: when it said something last."""

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
        self.pid, self.heard = self._process.pid, time.monotonic()

    def kill(self) -> None:
        """Reaped. Idempotent."""
        self._process.kill()
        self._process.join(SECONDS)
        self.pipe.close()

    def tail(self) -> str:
        """The end of its log."""
        said = self.log.read_bytes()[-1500:].decode(errors="replace") if self.log.exists() else ""
        return f"process {self.pid} ended or is silent; {self.log} ends with:\n{said}"


def begin(log: str) -> None:
    """At the beginning of such a process: it ends with who started it, writes what it says to its log, and uses one thread of torch's."""
    die_with_parent()
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for output in (1, 2):
        os.dup2(file, output)
    torch.set_num_threads(1)


def hear(processes: Sequence[Forked], silence: float = SECONDS) -> Iterator[tuple[int, Any]]:
    """What processes have said by now, with their numbers; None of one that has ended, or was silent for so long. Waits a moment."""
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
            if pid not in self._wakes and stopped(pid):
                self._wakes[pid] = now + self._dice.uniform(0, self._longest)
                self.stops += 1
        for pid in [pid for pid, at in self._wakes.items() if at < now]:
            del self._wakes[pid]
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
