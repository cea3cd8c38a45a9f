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
from collections.abc import Sequence
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


def serve(connection: Connection, store: Mooncake) -> None:
    """Run the calls of the parent. Look-ups do not wait for transfers."""
    sending = threading.Lock()
    asks = ThreadPoolExecutor(THREADS, "ask")
    # Linux changes the niceness of a thread only. The library moves bytes in its own threads, and
    # the calling thread spins meanwhile (0.3.13): with few cores it would take their time.
    transfers = ThreadPoolExecutor(THREADS, "transfer", os.nice, (NICENESS,))

    def make(number: int, verb: str, arguments: Sequence[Any]) -> None:
        error, answer = None, None
        try:
            answer = getattr(store, verb)(*arguments)
        except Exception as raised:  # noqa: BLE001
            # The parent must not wait for an answer that never comes. The error may contain a file
            # name that is not text.
            kind = type(raised).__name__
            said = f"{raised}" if isinstance(raised, VCacheError) else f"{verb}: {kind}: {raised}"
            error = kind, said.encode(errors="replace").decode()
        with sending:
            connection.send_bytes(msgspec.msgpack.encode([number, error, answer]))

    while True:
        number, verb, arguments = msgspec.msgpack.decode(connection.recv_bytes())
        (transfers if verb in ("get", "put") else asks).submit(make, number, verb, arguments)


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
        serve(Connection(fd), Mooncake(settings, memory))
    # Skip the library's own clean-up: calls may be running.
    os._exit(0)


if __name__ == "__main__":
    main()
