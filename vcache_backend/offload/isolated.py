"""A store whose client lives in a process of its own, so that what its library does to a process is done to that one."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Sequence
from itertools import count
from typing import Any

import msgspec

from vcache_backend.config import OffloadConfig
from vcache_backend.errors import ConfigError, VCacheError
from vcache_backend.metadata_server.wire import FrameReader, Receiver
from vcache_backend.offload import objects
from vcache_backend.offload.gateway import Place, framed
from vcache_backend.offload.store import Put, Span, StoreDown

log = logging.getLogger(__name__)

STATS_SECONDS = 1.0
LAST_WORDS = 5
"""Lines of the process's that are shown if it ends."""
OPEN_SECONDS = 15.0
"""More than any opening was seen to take (4.6 s, without a master)."""


def clear(config: OffloadConfig, namespace: bytes) -> int:
    """Remove all chunks of a namespace, or of all of them if it is empty, for who does nothing else: how many objects. Raises
    ConfigError, StoreDown, within OPEN_SECONDS and `call_seconds`."""
    store = IsolatedStore(config)
    try:
        store.open()
        return store.remove_under(objects.start(namespace))
    finally:
        store.close(0.0)


class _Call:
    """One that waits for its answer."""

    def __init__(self) -> None:
        self.done = threading.Event()
        self.error: tuple[str, str] | None = None
        self.answer: Any = None


class _Child:
    """The process and its socket. Ended for good by whatever goes wrong with it: nothing of it writes after `end`."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs:
            arguments = [sys.executable, "-m", "vcache_backend.offload.gateway", str(theirs.fileno())]
            self.process = subprocess.Popen(
                arguments,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
            )
        self._sock = ours
        self._sending = threading.Lock()
        self._calls: dict[int, _Call] = {}
        self._numbers = count(1)
        self._over = threading.Event()
        self.is_open = False
        self._said: deque[str] = deque(maxlen=LAST_WORDS)
        threading.Thread(target=self._listen, name="vcache-gateway", daemon=True).start()
        threading.Thread(target=self._hear, name="vcache-gateway-log", daemon=True).start()

    @property
    def alive(self) -> bool:
        return not self._over.is_set()

    def call(self, what: str, arguments: Sequence[Any], seconds: float, fds: Sequence[int] = (), fatal: bool = True) -> Any:
        """The answer, or StoreDown; after so many seconds the process is killed, if that is `fatal`, and all it was doing is over."""
        number, call = next(self._numbers), _Call()
        self._calls[number] = call
        try:
            data = framed([number, what, arguments])
            with self._sending:
                if fds:
                    sent = socket.send_fds(self._sock, [data], list(fds))
                    data = data[sent:]
                self._sock.sendall(data)
        except OSError as error:
            self.end()
            raise StoreDown(f"the gateway process ended: {error}") from error
        if not call.done.wait(seconds):
            if not fatal:
                raise StoreDown(f"{what}: no answer in {seconds:g} s")
            self.end()
            raise StoreDown(f"{what}: no answer in {seconds:g} s; the gateway process was killed")
        if call.error is not None:
            kind, text = call.error
            raise ConfigError(text) if kind == "ConfigError" else StoreDown(text)
        return call.answer

    def leave(self) -> None:
        """Let it end by itself, in the background."""
        self.is_open = False
        self._over.set()
        self._shut()

    def end(self) -> None:
        """Kill it, and wait until it is gone: its memory is nobody's but ours then."""
        self.is_open = False
        self.process.kill()
        self.process.wait()
        self._over.set()
        self._shut()
        self._fail_all()

    def _shut(self) -> None:
        # Wakes the listening thread; closing would not.
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError as error:
            log.debug("gateway: %s", error)

    def _listen(self) -> None:
        """In a thread of its own: hand out answers, and reap the process."""
        reader, receiver = FrameReader(), Receiver()
        try:
            while True:
                data, _ = receiver.receive(self._sock)
                if not data:
                    break
                for body in reader.feed(data):
                    number, error, answer, is_open = msgspec.msgpack.decode(body)
                    self.is_open = is_open and self.alive
                    call = self._calls.pop(number, None)
                    if call is not None:
                        call.error, call.answer = (tuple(error) if error else None), answer
                        call.done.set()
        except (OSError, VCacheError, msgspec.DecodeError) as error:
            log.debug("gateway: %s", error)
        asked = self._over.is_set()
        self.is_open = False
        self._over.set()
        self._sock.close()
        code = self.process.wait()
        self._fail_all()
        if not asked:
            log.warning(
                "the gateway process to the store ended (%d); it is started again. It said: %s", code, " | ".join(self._said)
            )

    def _hear(self) -> None:
        """In a thread of its own: what the library says, for who wants to know."""
        assert self.process.stderr is not None
        with self.process.stderr as lines:
            for line in lines:
                self._said.append(line.rstrip())
                log.debug("gateway: %s", line.rstrip())

    def _fail_all(self) -> None:
        while self._calls:
            _, call = self._calls.popitem()
            call.error = "StoreDown", "the gateway process ended"
            call.done.set()


class IsolatedStore:
    """A ObjectStore in a gateway process. A look-up or transfer that takes longer than `call_seconds` ends the process, and a new one
    is opened.

    Memory must be registered with its fd, and nothing else may be put from or read into. When a call has returned or raised, nothing
    writes into its memory any more.
    """

    def __init__(self, config: OffloadConfig) -> None:
        self._config = config
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._child: _Child | None = None
        self._memory: list[tuple[Span, int]] = []
        self._closed = False
        self._started = 0

    @property
    def is_open(self) -> bool:
        child = self._child
        return child is not None and child.is_open and os.getpid() == self._pid

    @property
    def pid(self) -> int | None:
        """Of the gateway process."""
        child = self._child
        return child.process.pid if child is not None and child.alive else None

    def open(self) -> None:
        self._check()
        with self._lock:
            if self._child is None or not self._child.alive:
                self._child = self._start()
            child = self._child
        child.call("open", [], OPEN_SECONDS)

    def register(self, memory: Span, fd: int = -1) -> None:
        self._check()
        with self._lock:
            self._memory.append((memory, fd))
            child, number = self._child, len(self._memory) - 1
        if child is not None and child.alive:
            try:
                child.call("register", [number], OPEN_SECONDS, [fd])
            except StoreDown as error:
                log.debug("register: %s", error)
                child.end()

    def contains_prefix(self, names: Sequence[str]) -> int:
        return int(self._opened().call("contains_prefix", [names], self._config.call_seconds))

    def put(self, names: Sequence[str], sources: Sequence[Span]) -> list[Put]:
        answers = self._opened().call("put", [names, self._places(sources)], self._config.call_seconds)
        return [Put(answer) for answer in answers]

    def get_into(self, names: Sequence[str], targets: Sequence[Span]) -> list[int]:
        return list(self._opened().call("get_into", [names, self._places(targets)], self._config.call_seconds))

    def remove(self, names: Sequence[str]) -> None:
        # No memory is at stake, so that one that takes longer than it is waited for may go on.
        self._opened().call("remove", [names], self._config.call_seconds, fatal=False)

    def remove_under(self, start: str) -> int:
        return int(self._opened().call("remove_under", [start], self._config.call_seconds, fatal=False))

    def stats(self) -> dict[str, Any]:
        mine = {"gateway": self.pid, "gateways_started": self._started}
        try:
            return dict(self._opened().call("stats", [], STATS_SECONDS, fatal=False)) | mine
        except StoreDown as error:
            return {"state": "down", "last_error": str(error)} | mine

    def close(self, seconds: float) -> bool:
        """At once: the process leaves the store by itself. What it still does is done in memory of its own or shared."""
        with self._lock:
            self._closed = True
            child, self._child = self._child, None
        if child is not None and os.getpid() == self._pid:
            child.leave()
        return True

    # ---- inside

    def _start(self) -> _Child:
        """A new process that knows its store and its memory. Under the lock."""
        child = _Child()
        self._started += 1
        try:
            settings = msgspec.to_builtins(self._config.mooncake, enc_hook=int)
            child.call("make", [self._config.store, settings], OPEN_SECONDS)
            for number, (_, fd) in enumerate(self._memory):
                child.call("register", [number], OPEN_SECONDS, [fd])
        except VCacheError:
            child.end()
            raise
        return child

    def _check(self) -> None:
        if self._closed or os.getpid() != self._pid:
            raise StoreDown(
                "the store was closed" if self._closed else "this process was forked from the one that uses the store"
            )

    def _opened(self) -> _Child:
        self._check()
        child = self._child
        if child is None or not child.is_open:
            raise StoreDown("the store is not open")
        return child

    def _places(self, spans: Sequence[Span]) -> list[Place]:
        places = []
        for address, nbytes in spans:
            for number, (memory, _) in enumerate(self._memory):
                if memory.address <= address and address + nbytes <= memory.address + memory.nbytes:
                    places.append((number, address - memory.address, nbytes))
                    break
            else:
                raise StoreDown(f"{nbytes:,} B at {address:#x} are not in registered memory")
        return places
