"""A process that holds a store's client for another one: `python -m vcache_backend.offload.gateway FD`.

The library below is not ours. It keeps the interpreter's lock while it connects (4.4 s without a master, measured) and while it
disconnects, may take half a minute for one call, and crashes where it is used after its end. All of that happens here, where nobody
computes tokens; what the calls read and write is memory shared with the parent. See isolated.py for the other side.

One frame a message, MessagePack: `[id, what, arguments]` from the parent, `[id, error or None, answer]` back, in any order. Ends with
its parent, or when that closes the socket.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec

from vcache_backend.config import MooncakeConfig
from vcache_backend.errors import VCacheError
from vcache_backend.metadata_server.wire import HEADER_BYTES, FrameReader, Receiver
from vcache_backend.offload.jobs import Workers
from vcache_backend.offload.store import ObjectStore, Span, StoreDown

THREADS = 16
PARENT_SECONDS = 1.0
"""How often it looks whether the parent is still there."""
LEAVE_SECONDS = 1.0
"""How long leaving the store may take once the parent is gone."""
TRANSFERS = frozenset(("put", "get_into"))
REMOVALS = frozenset(("remove", "remove_under"))
NICENESS = 10
"""How much more than the rest the threads that wait for a transfer step back. On two cores 512 MiB came 15 % faster; at 19 a load waited
0.3 s where others computed."""
Place = tuple[int, int, int]
"""Number of a shared memory, byte in it, bytes."""


def framed(message: Any) -> bytes:
    """A message as it goes over the socket."""
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(HEADER_BYTES, "little") + body


class Gateway:
    """Serves one parent. Requests are answered by `THREADS` threads, so that one that hangs holds up no other."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock, self._sending = sock, threading.Lock()
        self._store: ObjectStore | None = None
        self._memory: list[tuple[int, mmap.mmap]] = []
        self._workers = Workers("gateway", THREADS, 1 << 16)
        self._transfers = Workers("gateway-transfer", THREADS, 1 << 16, _step_back)
        self._removals = Workers("gateway-remove", 1, 1 << 16)

    def serve(self) -> None:
        """Until the parent is gone."""
        reader, receiver = FrameReader(), Receiver()
        while True:
            data, fds = receiver.receive(self._sock)
            if not data:
                return
            for fd in fds:
                self._map(fd)
            for body in reader.feed(data):
                number, what, arguments = msgspec.msgpack.decode(body)
                workers = self._transfers if what in TRANSFERS else self._removals if what in REMOVALS else self._workers
                workers.submit(lambda n=number, w=what, a=arguments: self._answer(n, w, a))  # type: ignore[misc]

    def leave(self) -> None:
        if self._store is not None:
            self._store.close(LEAVE_SECONDS)

    # ---- requests

    def make(self, kind: str, settings: dict[str, Any]) -> None:
        """The store, not open yet."""
        assert kind == "mooncake", kind
        from vcache_backend.offload.mooncake import MooncakeStore

        self._store = MooncakeStore(
            msgspec.convert(settings, MooncakeConfig, strict=False, dec_hook=lambda kind, value: kind(value))
        )

    def open(self) -> None:
        self._the_store().open()

    def register(self, number: int) -> None:
        address, memory = self._memory[number]
        self._the_store().register(Span(address, len(memory)))

    def contains_prefix(self, names: list[str]) -> int:
        return self._the_store().contains_prefix(names)

    def put(self, names: list[str], places: list[Place]) -> list[str]:
        return [outcome.value for outcome in self._the_store().put(names, self._spans(places))]

    def get_into(self, names: list[str], places: list[Place]) -> list[int]:
        return self._the_store().get_into(names, self._spans(places))

    def remove(self, names: list[str]) -> None:
        self._the_store().remove(names)

    def remove_under(self, start: str) -> int:
        return self._the_store().remove_under(start)

    def stats(self) -> dict[str, Any]:
        return self._the_store().stats()

    # ---- inside

    def _the_store(self) -> ObjectStore:
        if self._store is None:
            raise StoreDown("no store was made yet")
        return self._store

    def _answer(self, number: int, what: str, arguments: list[Any]) -> None:
        calls: dict[str, Callable[..., Any]] = {
            name: getattr(self, name)
            for name in ("make", "open", "register", "contains_prefix", "put", "get_into", "remove", "remove_under", "stats")
        }
        error, answer = None, None
        try:
            answer = calls[what](*arguments)
        except VCacheError as known:
            error = [type(known).__name__, str(known)]
        except Exception as unknown:  # noqa: BLE001 - the parent must not wait for an answer that never comes
            error = ["StoreDown", f"{what}: {type(unknown).__name__}: {unknown}"]
        # Whether the store still is open is what a parent asks most.
        is_open = self._store is not None and self._store.is_open
        with self._sending:
            self._sock.sendall(framed([number, error, answer, is_open]))

    def _map(self, fd: int) -> None:
        # Populated, so that no page is missing in the middle of a transfer.
        memory = mmap.mmap(fd, os.fstat(fd).st_size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        os.close(fd)
        self._memory.append((ctypes.addressof(ctypes.c_char.from_buffer(memory)), memory))

    def _spans(self, places: list[Place]) -> list[Span]:
        """Addresses here. Raises StoreDown for what is not in shared memory."""
        spans = []
        for number, start, nbytes in places:
            address, memory = self._memory[number]
            if not 0 <= start <= start + nbytes <= len(memory):
                raise StoreDown(f"bytes {start} to {start + nbytes} of a memory of {len(memory)}")
            spans.append(Span(address + start, nbytes))
        return spans


def _step_back() -> None:
    """The library's transfers are moved by threads of its own, while the one that called spins, a core full, until they are through
    (0.3.13: 100 % of the time, measured). Where there are not cores enough it takes the core that moves the bytes, or computes."""
    # Of this thread alone: that is what Linux does.
    os.nice(NICENESS)


def _end_with(parent: int) -> None:
    """In a thread: end when the parent has, though a process that it forked may still hold the other end of the socket."""
    while os.getppid() == parent:
        time.sleep(PARENT_SECONDS)
    os._exit(0)


def main() -> None:
    # Ctrl-C is for the parent, with which this ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    logging.basicConfig(level=logging.WARNING, format="vcache gateway: %(message)s")
    with socket.socket(fileno=int(sys.argv[1])) as sock:
        gateway = Gateway(sock)
        with suppress(OSError):
            gateway.serve()
        # The library may keep the interpreter's lock meanwhile: the kernel ends what takes too long.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, 2 * LEAVE_SECONDS)
        gateway.leave()
    # Not by way of the library's own clean-up: calls may be under way.
    os._exit(0)


if __name__ == "__main__":
    main()
