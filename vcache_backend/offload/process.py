"""The offload process, `python -m vcache_backend.offload.process FD PARENT MEMORY SETTINGS`. Only
this process loads Mooncake; client.py starts it.

The library may hang, crash or hold the GIL, but not in the process that computes tokens. A caller
that has waited too long kills the offload process, which ends all calls.

A message is MessagePack in a frame of multiprocessing's: `[number, verb, arguments]` from the
parent, `[number, error, answer]` back, in any order. Calls read and write the parent's memory. The
process ends with its parent."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import msgspec

from vcache_backend.config import MooncakeConfig
from vcache_backend.errors import VCacheError
from vcache_backend.offload.verbs import Mooncake

THREADS = 16
PARENT_SECONDS = 1.0
"""How often the process checks that the parent is alive."""
NICENESS = 10
"""The niceness of threads that wait for a transfer. On two cores 512 MiB came 15 % faster. With
niceness 19, a load waited 0.3 s beside computing threads."""


class OffloadService:
    """Runs the calls of one parent. Look-ups do not wait for transfers."""

    def __init__(self, connection: Connection, store: Mooncake) -> None:
        self._connection, self._sending = connection, threading.Lock()
        self._store = store
        asks = ThreadPoolExecutor(THREADS, "ask")
        transfers = ThreadPoolExecutor(THREADS, "transfer", initializer=_step_back)
        self._threads = dict.fromkeys(("load", "open", "exist", "remove", "remove_under"), asks)
        self._threads |= dict.fromkeys(("put", "get"), transfers)

    def serve(self) -> None:
        while True:
            number, verb, arguments = msgspec.msgpack.decode(self._connection.recv_bytes())
            call = getattr(self._store, verb)
            self._threads[verb].submit(self._answer, number, verb, call, arguments)

    def _answer(
        self, number: int, verb: str, call: Callable[..., Any], arguments: Sequence[Any]
    ) -> None:
        error, answer = None, None
        try:
            answer = call(*arguments)
        except VCacheError as known:
            error = [type(known).__name__, str(known)]
        except Exception as unknown:  # noqa: BLE001
            # The parent must not wait for an answer that never comes.
            error = ["StoreDown", f"{verb}: {type(unknown).__name__}: {unknown}"]
        if error is not None:
            # The error may contain a file name that is not text.
            error[1] = error[1].encode(errors="replace").decode()
        with self._sending:
            self._connection.send_bytes(msgspec.msgpack.encode([number, error, answer]))


def _step_back() -> None:
    """Lower this thread's priority. The library moves bytes in its own threads, and the calling
    thread spins meanwhile (0.3.13). With few cores, the calling thread would take their time."""
    # Linux changes the niceness of this thread only.
    os.nice(NICENESS)


def _end_with(parent: int) -> None:
    """End this process once the parent has ended. Runs in a thread. A process that the parent
    forked may keep the socket open."""
    while os.getppid() == parent:
        time.sleep(PARENT_SECONDS)
    os._exit(0)


def main() -> None:
    # Ctrl-C is for the parent, and this process ends after the parent.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    fd, parent, memory = (int(argument) for argument in sys.argv[1:4])
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    settings = msgspec.json.decode(sys.argv[4], type=MooncakeConfig)
    with suppress(OSError, EOFError):
        OffloadService(Connection(fd), Mooncake(settings, memory)).serve()
    # Skip the library's own clean-up: calls may be running.
    os._exit(0)


if __name__ == "__main__":
    main()
