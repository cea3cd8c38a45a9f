"""The metadata server of a soak, and the mishaps: what happens to it and to the instances."""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import msgspec

from vcache_backend.children import MetadataServer, until
from vcache_backend.config import ClientConfig
from vcache_backend.errors import VCacheError
from vcache_backend.protocol.client import Client

TIMES = {"reservation_seconds": 0.5, "spin_seconds": 0.0}
"""Short, so that processes that are stopped for a second or two exceed them."""
STOPPED, STARVED_SECONDS = 1.2, 2.0
"""The longest that a server is stopped, and any process is starved."""
END_SECONDS = 60.0


def server(folder: Path) -> MetadataServer:
    """A metadata server with short times on a socket of the folder."""
    file = folder / "server.yaml"
    file.write_bytes(msgspec.yaml.encode({"server": TIMES}))
    given = os.environ | {"VCACHE_CONFIG": str(file)}
    return MetadataServer(folder / "vcache.sock", folder / "server.log", given)


class Mishaps:
    """Causes random mishaps in a thread of its own, from `start` to `end`. However slow the machine,
    as much is done between two of them.

    counts: by kind. recent: the last ones. killed: the pids of instances that it has killed. ended:
    how many servers ended by themselves. done: loads and answers so far, as the main thread says.
    error: the soak's own fault, for that thread."""

    def __init__(
        self,
        server: MetadataServer,
        pids: Callable[[str], list[int]],
        seed: int,
        weights: Mapping[str, int],
    ) -> None:
        """pids: gives the pids of the live instances of a role. weights: of each kind. Kinds are
        "ROLE killed", "ROLE stopped" and "ROLE starved", the same of the server, "server
        terminated" and "namespaces reset"."""
        self.counts: Counter[str] = Counter()
        self.recent: list[str] = []
        self.killed: set[int] = set()
        self.ended = self.done = 0
        self.error: Exception | None = None
        self._server, self._pids, self._weights = server, pids, weights
        self._dice = random.Random(f"mishaps {seed}")
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self, pause: float) -> None:
        """Begin, unless it has begun. pause: loads and answers between two mishaps, on average."""
        if not self._thread.ident:
            self._pause = pause
            self._thread.start()

    def end(self) -> None:
        """End the thread. Idempotent. Raises what ended it."""
        self._over.set()
        if self._thread.ident:
            self._thread.join(END_SECONDS)
        self.look()

    def look(self) -> None:
        """Raise what has ended the thread, if anything has."""
        if self.error is not None:
            raise self.error

    def _run(self) -> None:
        try:
            kinds, weights, due = list(self._weights), list(self._weights.values()), 0.0
            while not self._over.wait(0.01):
                if self.done >= due:
                    self._happen(self._dice.choices(kinds, weights)[0])
                    due = self.done + self._dice.expovariate(1 / self._pause)
            # Here, since the server that this thread has started ends with it.
            self._look_at_server()
        except Exception as error:  # noqa: BLE001 - raised by the main thread
            self.error = error

    def _happen(self, kind: str) -> None:
        self._look_at_server()
        self.counts[kind] += 1
        self.recent = [*self.recent[-5:], kind]
        who, _, how = kind.partition(" ")
        with suppress(ProcessLookupError):
            if how == "reset":
                self._reset()
            elif who == "server" and how in ("killed", "terminated"):
                self._end_server(how)
            elif who == "server":
                self._stop_for_a_while(self._server.pid, how)
            else:
                self._hit(self._dice.choice(self._pids(who)), how)

    def _hit(self, pid: int, how: str) -> None:
        """Kill, stop or starve an instance. The main thread wakes those that are stopped."""
        if how == "killed":
            self.killed.add(pid)
            os.kill(pid, signal.SIGKILL)
        elif how == "stopped":
            os.kill(pid, signal.SIGSTOP)
        else:
            self._stop_for_a_while(pid, how)

    def _stop_for_a_while(self, pid: int, how: str) -> None:
        """Stop a process; or, if it is to be `starved`, let it run a fifth of the time, as where
        others use its cores."""
        starved = how == "starved"
        end = time.monotonic() + self._dice.uniform(0, STARVED_SECONDS if starved else STOPPED)
        while (left := end - time.monotonic()) > 0 and not self._over.is_set():
            os.kill(pid, signal.SIGSTOP)
            self._over.wait(0.02 if starved else left)
            os.kill(pid, signal.SIGCONT)
            self._over.wait(0.005)

    def _reset(self) -> None:
        """Reset all namespaces, as where weights change."""
        with (
            suppress(VCacheError),
            Client(self._server.path, ClientConfig(), reconnect=False) as client,
        ):
            client.clear(reset=True)

    def _end_server(self, how: str) -> None:
        if how == "terminated":
            self._server.signal(signal.SIGTERM)
            until(lambda: not self._server.alive, END_SECONDS)
        self._server.kill()
        self._over.wait(self._dice.uniform(0, 0.3))
        self._server.start()

    def _look_at_server(self) -> None:
        """If the server has ended by itself, count that, and start another one."""
        if not self._server.alive:
            self.ended += 1
            print(f"the server ended; {self._server.tail()}", file=sys.stderr, flush=True)
            self._server.kill()
            self._server.start()
