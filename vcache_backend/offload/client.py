"""Starts the offload process (process.py), sends it calls with a deadline, and kills a process that
hangs. The verbs are in verbs.py."""

from __future__ import annotations

import logging
import os
import socket
import struct
import subprocess
import sys
import threading
from collections import deque
from concurrent.futures import Future
from contextlib import suppress
from itertools import count
from multiprocessing import Pipe
from typing import Any

import msgspec

from vcache_backend import threads
from vcache_backend.config import MooncakeConfig
from vcache_backend.errors import ConfigError, VCacheError
from vcache_backend.offload.verbs import StoreDown, StoreLost

log = logging.getLogger(__name__)

OPEN_SECONDS = 15.0
"""The deadline of loading the library and opening the store (4.6 s at most, without a master)."""
SEND_TIMEOUT = struct.pack("ll", 0, 50_000)
"""A `timeval`. How long a process may leave a call unread before it is killed: it reads at once."""
LAST_WORDS = 5
"""How many of the process's last lines of output are shown when it ends."""
LAST_WORDS_SECONDS = 1.0
"""How long to wait for these lines: a child of the process may keep the output open."""
ERRORS: dict[str, type[VCacheError]] = {"ConfigError": ConfigError, "StoreLost": StoreLost}


class OffloadProcess:
    """An offload process. Any thread of the parent.

    A call that takes too long kills the process. So once a call has returned or raised, nothing
    writes into the call's memory."""

    def __init__(self, config: MooncakeConfig, memory: int = -1) -> None:
        """Start the process, which loads the library. memory: a memfd with all buffers that calls
        name. ConfigError if the library does not load, StoreDown."""
        self._connection, theirs = Pipe()
        with theirs, socket.socket(fileno=os.dup(self._connection.fileno())) as ours:
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, SEND_TIMEOUT)
            settings = msgspec.json.encode(config).decode()
            command = [sys.executable, "-P", "-m", "vcache_backend.offload.process"]
            self._process = subprocess.Popen(
                [*command, str(theirs.fileno()), str(os.getpid()), str(memory), settings],
                pass_fds=[theirs.fileno(), *([memory] if memory >= 0 else [])],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
            )
        self._numbers, self._lock = count(1), threading.Lock()
        self._calls: dict[int, Future[Any]] = {}
        self._over = self._leaving = False
        self._last_words: deque[str] = deque(maxlen=LAST_WORDS)
        self._logger = threading.Thread(target=self._log, daemon=True)
        self._logger.start()
        threading.Thread(target=self._listen, daemon=True).start()
        try:
            self.call("load", seconds=OPEN_SECONDS)
        except VCacheError:
            self.kill()
            raise

    @property
    def alive(self) -> bool:
        return not (self._over or self._leaving)

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, verb: str, *arguments: Any) -> Future[Any]:
        """Send a call. Waits at most `SEND_TIMEOUT`. The future's result raises StoreDown."""
        call: Future[Any] = Future()
        with self._lock:
            if self._over:
                call.set_exception(StoreDown("the offload process has ended"))
                return call
            number = next(self._numbers)
            self._calls[number] = call
            try:
                self._connection.send_bytes(msgspec.msgpack.encode([number, verb, arguments]))
            except OSError:
                # Half a message may be sent. The listener fails the call.
                self._process.kill()
        return call

    def call(self, verb: str, *arguments: Any, seconds: float) -> Any:
        """Send a call and wait for the answer. After `seconds` the process is killed, and all calls
        fail. Raises StoreDown."""
        try:
            return self.ask(verb, *arguments).result(seconds)
        except TimeoutError:
            self.kill()
            late = f"{verb}: no answer in {seconds:g} s; the offload process was killed"
            raise StoreDown(late) from None

    def kill(self) -> None:
        """Kill the process and wait for its end. Running calls fail. Idempotent."""
        self._leaving = True
        self._process.kill()
        self._process.wait()

    # ---- the two threads

    def _listen(self) -> None:
        """Pass answers to callers until the process ends, and reap it."""
        ends, broken = False, (OSError, EOFError, msgspec.DecodeError)
        with threads.survives("the answers of the offload process"), suppress(*broken):
            while not ends:
                number, error, answer = msgspec.msgpack.decode(self._connection.recv_bytes())
                # The caller reports the reason.
                ends = error is not None and error[0] in ERRORS
                self._leaving |= ends
                call = self._calls.pop(number)
                if error is None:
                    call.set_result(answer)
                else:
                    call.set_exception(ERRORS.get(error[0], StoreDown)(error[1]))
        # Also after an error: a process whose answers nobody reads is started again.
        self._process.kill()
        code = self._process.wait()
        with self._lock:
            self._over = True
        self._logger.join(LAST_WORDS_SECONDS)
        said = " | ".join(self._last_words) or "it said nothing"
        last = f"the offload process ended ({code}): {said}"
        while self._calls:
            self._calls.popitem()[1].set_exception(StoreDown(last))
        if not self._leaving:
            log.warning("%s; it is started again", last)
        self._connection.close()

    def _log(self) -> None:
        """Log the library's output, for debugging."""
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                self._last_words.append(line.rstrip())
                log.debug("the offload process: %s", line.rstrip())


def remove_under(config: MooncakeConfig, start: str) -> int:
    """Remove all objects whose names begin with `start`. Returns how many. VCacheError."""
    process = OffloadProcess(config)
    try:
        process.call("open", seconds=OPEN_SECONDS)
        return int(process.call("remove_under", start, seconds=OPEN_SECONDS))
    finally:
        process.kill()
