"""Mooncake's client library behind a guard: what it needs from us so that it neither crashes nor hangs the process.

Measured with 0.3.13: a call before `setup` or after `close` is a segmentation fault, and so is `close`, or the end of the process,
during a call; a client in a forked child never answers. `setup` and `close` keep Python's lock: all threads stand still for 30 ms and
1 s, and where there is no master for 4.4 s and 13 s. So a `Client` is made only for a master that answers, by a thread of its own,
outlives its master, and is closed after its last call has returned, unless the master is gone.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from vcache_backend.errors import ConfigError
from vcache_backend.offload.store import Span, StoreDown

EXIT_SECONDS = 4.0
"""How long the end of the process waits for clients in use: more than a call takes that a hung provider has, and then `close`."""
CHECK_SECONDS = 1.0
"""How long a master may take to show that it lives, when a client is closed."""
OPEN_SECONDS = 30.0
"""More than any `setup` was seen to take (4.6 s, without a master)."""

_lock = threading.Lock()
_clients: list[Client] = []
"""All that are not closed: also those nobody wants any more but that are in a call."""
_openings = 0
"""How many are in `setup`."""
_owner: int | None = None
"""The process that made the first client. In its forked children the library is of no use."""


def load_library() -> Any:
    """The library's module. Raises ConfigError with what to install."""
    try:
        from mooncake import store
    except ImportError as error:
        if isinstance(error, ModuleNotFoundError) and (error.name or "").split(".")[0] == "mooncake":
            raise ConfigError("offload.store: mooncake needs its client: pip install vcache-backend[mooncake]") from error
        hint = " (apt install libibverbs1)" if "libibverbs" in str(error) else ""
        raise ConfigError(f"offload.store: Mooncake's client does not load: {error}{hint}") from error
    return store


class Client:
    """One connection to the store. Any thread; only in the process that opened it."""

    def __init__(self, raw: Any, master: str) -> None:
        self._raw = raw
        self._master = master
        # Its destructor closes it, wherever that happens to be.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(raw))
        self._idle = threading.Condition()
        self._calls = 0
        self._retired = False
        self._left = False
        self._done = threading.Event()

    @property
    def calls(self) -> int:
        """How many are under way."""
        return self._calls

    @contextmanager
    def call(self) -> Iterator[Any]:
        """The library's object, for one call. Raises StoreDown once `retire` was called."""
        with self._idle:
            if self._retired:
                raise StoreDown("the connection to Mooncake is closed")
            self._calls += 1
        try:
            yield self._raw
        finally:
            with self._idle:
                self._calls -= 1
                self._idle.notify_all()

    def retire(self) -> None:
        """No more calls; close it after the last one, in the background, if there is a master then. Idempotent, at once."""
        with self._idle:
            if self._retired:
                return
            self._retired = True
        threading.Thread(target=self._close, name="vcache-mooncake-close", daemon=True).start()

    def idle(self, seconds: float) -> bool:
        """Wait until no call is under way."""
        with self._idle:
            return self._idle.wait_for(lambda: self._calls == 0, max(0.0, seconds))

    def done(self, seconds: float) -> bool:
        """After `retire`: wait until it is closed, or was found to have no master and is left as it is."""
        return self._done.wait(max(0.0, seconds))

    def harmless(self, seconds: float) -> bool:
        """Wait until the library's clean-up at exit may run: this is closed, or could be."""
        if not self._retired:
            return self.idle(seconds) and self._answered()
        return self.done(seconds) and not self._left

    def _answered(self) -> bool:
        try:
            check_master(self._master, CHECK_SECONDS)
        except StoreDown:
            return False
        return True

    def _close(self) -> None:
        with self._idle:
            self._idle.wait_for(lambda: self._calls == 0)
        if self._answered():
            self._raw.close()
            ctypes.pythonapi.Py_DecRef(ctypes.py_object(self._raw))
            self._raw = None
            with _lock:
                _clients.remove(self)
        else:
            self._left = True
        self._done.set()


class _Opening:
    """One `setup`, in a thread of its own: the library's threads are its children, and may inherit what it does to signals."""

    def __init__(self, library: Any, settings: Mapping[str, str], memory: list[Span]) -> None:
        self._arguments = library, settings, memory
        self._lock = threading.Lock()
        self._abandoned = False
        self._client: Client | None = None
        self._error = ""
        self._done = threading.Event()

    def run(self, seconds: float) -> Client:
        threading.Thread(target=self._open, name="vcache-mooncake-open", daemon=True).start()
        self._done.wait(seconds)
        with self._lock:
            if self._client is not None:
                return self._client
            self._abandoned = True
            raise StoreDown(self._error or f"setup did not end within {seconds:g} s")

    def _open(self) -> None:
        global _openings
        client = None
        with _lock:
            _openings += 1
        try:
            client = _connect(*self._arguments)
        except Exception as error:  # noqa: BLE001 - outermost of its thread; whoever waits raises it
            self._error = str(error) or type(error).__name__
        with _lock:
            _openings -= 1
        with self._lock:
            self._client = client
            if client is not None and self._abandoned:
                client.retire()
        self._done.set()


def _connect(library: Any, settings: Mapping[str, str], memory: list[Span]) -> Client:
    raw = library.MooncakeDistributedStore()
    code = raw.setup(dict(settings))
    if code:
        # Such a client answers -600 to everything. Its destructor runs here.
        raise StoreDown(f"setup failed ({code})")
    client = Client(raw, settings["master_server_addr"])
    with _lock:
        _clients.append(client)
    for span in memory:
        with client.call():
            code = raw.register_buffer(span.address, span.nbytes)
        if code:
            client.retire()
            raise StoreDown(f"{span.nbytes} B of memory could not be registered ({code})")
    return client


def connect(library: Any, settings: Mapping[str, str], memory: list[Span], seconds: float = OPEN_SECONDS) -> Client:
    """A client that is set up, with `memory` registered. Raises StoreDown. Ask `check_master` first."""
    global _owner
    with _lock:
        if _owner is None:
            _owner = os.getpid()
            atexit.register(_leave)
    check_process()
    return _Opening(library, settings, memory).run(seconds)


def check_master(master: str, seconds: float) -> None:
    """Raises StoreDown unless something at HOST:PORT answers; without the library, so without stopping other threads.

    What is sent is no request of Mooncake's protocol: a master that lives hangs up on it.
    """
    host, _, port = master.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), seconds) as probe:
            probe.sendall(bytes(64))
            probe.recv(1)
    except ConnectionResetError:
        return
    except OSError as error:
        raise StoreDown(str(error)) from error


def check_process() -> None:
    """Raises StoreDown in a process forked from one that uses the library, where its threads are missing."""
    if _owner is not None and _owner != os.getpid():
        raise StoreDown("this process was forked from one that uses Mooncake")


def _leave() -> None:
    """At the end of the process: the library closes its clients, which must not happen to one in use, nor without a master."""
    if _owner != os.getpid():
        _skip_exit_handlers()
        return
    deadline = time.monotonic() + EXIT_SECONDS
    with _lock:
        left = list(_clients)
    if not all(client.harmless(deadline - time.monotonic()) for client in left) or _openings:
        _skip_exit_handlers()


def _skip_exit_handlers() -> None:
    """End with the exit status, but without the C handlers registered so far, of which one frees clients that are in a call."""
    libc = ctypes.CDLL(None)
    libc.on_exit(libc._exit, None)
