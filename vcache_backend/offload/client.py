"""The parent's side of the offload process (process.py has its verbs): started, asked with a deadline, killed where it hangs."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from multiprocessing.connection import Connection
from multiprocessing.reduction import send_handle
from queue import SimpleQueue
from typing import Any

import msgspec

from vcache_backend.config import MooncakeConfig
from vcache_backend.errors import ConfigError, VCacheError
from vcache_backend.offload.process import StoreDown, StoreLost

log = logging.getLogger(__name__)

OPEN_SECONDS = 15.0
"""More than loading the library or opening the store was seen to take (4.6 s, without a master)."""
LEAVE_SECONDS = 2.0
LAST_WORDS = 5
"""Lines of the process's that are shown if it ends."""
ERRORS: dict[str, type[VCacheError]] = {"ConfigError": ConfigError, "StoreLost": StoreLost}


class Call:
    """One that was asked, and its answer."""

    def __init__(self, then: Callable[[Call], None]) -> None:
        self._done, self._then = threading.Event(), then
        self._answer: Any = None
        self.error: VCacheError | None = None

    @property
    def done(self) -> bool:
        return self._done.is_set()

    def wait(self, seconds: float) -> bool:
        """Wait, at most so long: whether it is done."""
        return self._done.wait(seconds)

    def result(self) -> Any:
        """The answer, once it is done. Raises what the call raised."""
        if self.error is not None:
            raise self.error
        return self._answer

    def finish(self, error: tuple[str, str] | None, answer: Any) -> None:
        if error is not None:
            kind, text = error
            self.error = ERRORS.get(kind, StoreDown)(text)
        self._answer = answer
        self._done.set()
        self._then(self)


class OffloadProcess:
    """One life of the process. Any thread; only in the process that started it.

    When a call has returned or raised, nothing writes into its memory any more: one that takes too long ends with the process.
    """

    def __init__(self, config: MooncakeConfig) -> None:
        """Start it and have it load the library. Raises ConfigError where that does not load, StoreDown."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "vcache_backend.offload.process", str(theirs.fileno()), str(os.getpid())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
            )
        self._connection = Connection(ours.detach())
        self._outbox: SimpleQueue[tuple[bytes, int] | None] = SimpleQueue()
        self._numbers = count(1)
        self._lock = threading.Lock()
        self._calls: dict[int, Call] = {}
        self._over = self._leaving = False
        self._last_words: deque[str] = deque(maxlen=LAST_WORDS)
        self.opened = False
        """For who opened the store: that it did."""
        self._sender, *others = (threading.Thread(target=work, daemon=True) for work in (self._send, self._listen, self._log))
        for thread in (self._sender, *others):
            thread.start()
        try:
            self.call("load", msgspec.to_builtins(config, enc_hook=int), seconds=OPEN_SECONDS)
        except VCacheError:
            self.kill()
            raise

    @property
    def alive(self) -> bool:
        return not (self._over or self._leaving)

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, verb: str, *arguments: Any, fd: int = -1, then: Callable[[Call], None] = lambda call: None) -> Call:
        """Have a call made. Never blocks. then: told once it is done, in another thread."""
        call, number = Call(then), next(self._numbers)
        with self._lock:
            if not self._over:
                self._calls[number] = call
        if self._over:
            self._calls.pop(number, None)
            call.finish(("StoreDown", "the offload process has ended"), None)
        self._outbox.put((msgspec.msgpack.encode([number, verb, arguments]), fd))
        return call

    def call(self, verb: str, *arguments: Any, seconds: float, fd: int = -1, fatal: bool = True) -> Any:
        """The answer. Raises StoreDown; after so many seconds the process is killed, if that is `fatal`, with all it was doing."""
        call = self.ask(verb, *arguments, fd=fd)
        if not call.wait(seconds):
            late = f"{verb}: no answer in {seconds:g} s"
            if fatal:
                self.kill()
            raise StoreDown(f"{late}; the offload process was killed" if fatal else late)
        return call.result()

    def share(self, fd: int) -> None:
        """Have the memory of a memfd mapped, which places then name by its number: 0, 1, ... The fd stays the caller's."""
        self.call("share", seconds=OPEN_SECONDS, fd=fd)

    def leave(self) -> None:
        """Let it end by itself, in the background, within LEAVE_SECONDS. Calls under way fail. At once."""
        self._leaving = True
        self._outbox.put((msgspec.msgpack.encode([0, "leave", []]), -1))
        killer = threading.Timer(LEAVE_SECONDS, self._process.kill)
        killer.daemon = True
        killer.start()

    def kill(self) -> None:
        """And wait until it is gone: its memory is nobody's but ours then. Idempotent."""
        self._leaving = True
        self._process.kill()
        self._process.wait()

    # ---- its three threads

    def _send(self) -> None:
        """So that a process which reads nothing holds up nobody who asks."""
        with suppress(OSError):
            while (message := self._outbox.get()) is not None:
                data, fd = message
                self._connection.send_bytes(data)
                if fd >= 0:
                    send_handle(self._connection, fd, self.pid)

    def _listen(self) -> None:
        """Hand out answers, and reap the process."""
        try:
            while True:
                number, error, answer = msgspec.msgpack.decode(self._connection.recv_bytes())
                lost = error is not None and error[0] == "StoreLost"
                self._leaving = self._leaving or lost
                call = self._calls.pop(number, None)
                if call is not None:
                    call.finish(error, answer)
                if lost:
                    break
        except (OSError, EOFError, msgspec.DecodeError) as error:
            log.debug("the offload process: %s", error)
        self._process.kill()
        code = self._process.wait()
        with self._lock:
            self._over = True
        self._outbox.put(None)
        last = f"the offload process ended ({code}): {' | '.join(self._last_words) or 'it said nothing'}"
        while self._calls:
            _, call = self._calls.popitem()
            call.finish(("StoreDown", last), None)
        if not self._leaving:
            log.warning("%s; it is started again", last)
        self._sender.join()
        self._connection.close()

    def _log(self) -> None:
        """What the library says, for who wants to know."""
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                self._last_words.append(line.rstrip())
                log.debug("the offload process: %s", line.rstrip())


def remove_under(config: MooncakeConfig, start: str) -> int:
    """Remove all objects whose names begin so, for who does nothing else: how many. Raises ConfigError, StoreDown."""
    process = OffloadProcess(config)
    try:
        process.call("open", seconds=OPEN_SECONDS)
        return int(process.call("remove_under", start, seconds=OPEN_SECONDS))
    finally:
        process.kill()
