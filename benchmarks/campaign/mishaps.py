"""The mishaps of a campaign: what happens to its instances, and to the metadata server."""

from __future__ import annotations

import os
import random
import resource
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from typing import ClassVar

from vcache_backend.config import ClientConfig
from vcache_backend.errors import VCacheError
from vcache_backend.metadata_server import messages as m
from vcache_backend.metadata_server import wire
from vcache_backend.metadata_server.client import Client

from .node import Node

STOPPED, STARVED_SECONDS = 1.2, 2.0
"""The longest that a server is stopped, and any process is starved."""
END_SECONDS = 60.0
HOUR_NS = 3600 * 10**9
KEPT = 8
"""Ledgers of earlier servers that are kept, to be shown later."""


class Mishaps:
    """Causes random mishaps in a thread of its own, from `start` to `end`.

    counts: by kind. recent: the last ones. killed: the pids of instances that it has killed."""

    def __init__(
        self, node: Node, pids: Callable[[str], list[int]], seed: int, weights: Mapping[str, int]
    ) -> None:
        """pids: gives the pids of the live instances of a role. weights: of each kind. Kinds are
        "ROLE killed", "ROLE stopped" and "ROLE starved", the same of the server, and those of
        `_ACTS`."""
        self.counts: Counter[str] = Counter()
        self.recent: list[str] = []
        self.killed: set[int] = set()
        self.error: BaseException | None = None
        """The campaign's own fault, for its main thread to raise."""
        self._node, self._pids, self._weights = node, pids, weights
        self._dice = random.Random(f"mishaps {seed}")
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._ledgers: list[int] = []
        """Of earlier servers, and of this one."""

    def start(self, pause: float) -> None:
        """Begin, unless it has begun. pause: seconds between two mishaps, on average."""
        if not self._thread.ident:
            self._pause = pause
            self._thread.start()

    def end(self) -> None:
        """End the thread. Idempotent."""
        self._over.set()
        if self._thread.ident:
            self._thread.join(END_SECONDS)

    def _run(self) -> None:
        try:
            while not self._over.wait(self._dice.expovariate(1 / self._pause)):
                kinds, weights = list(self._weights), list(self._weights.values())
                self._happen(self._dice.choices(kinds, weights)[0])
            # Here, since the server that this thread has started ends with it.
            self._node.look()
        except BaseException as error:  # noqa: BLE001 - raised by the main thread
            self.error = error

    def _happen(self, kind: str) -> None:
        self._node.look()
        self.counts[kind] += 1
        self.recent = [*self.recent[-5:], kind]
        who, _, how = kind.partition(" ")
        with suppress(ProcessLookupError):
            if kind in self._ACTS:
                self._ACTS[kind](self)
            elif who == "server":
                self._stop_for_a_while(self._node.pid, how)
            else:
                self._hit(self._dice.choice(self._pids(who)), how)

    def _hit(self, pid: int, how: str) -> None:
        """Kill, stop or starve an instance. The campaign's main thread wakes those that are
        stopped."""
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
        until = time.monotonic() + self._dice.uniform(0, STARVED_SECONDS if starved else STOPPED)
        while (left := until - time.monotonic()) > 0 and not self._over.is_set():
            os.kill(pid, signal.SIGSTOP)
            self._over.wait(0.02 if starved else left)
            os.kill(pid, signal.SIGCONT)
            self._over.wait(0.005)

    # ---- the server

    def _kill_server(self) -> None:
        self._node.kill()
        self._over.wait(self._dice.uniform(0, 0.3))
        self._node.restart()

    def _terminate_server(self) -> None:
        self._node.terminate()
        self._node.restart()

    def _set_clock(self) -> None:
        """Restart the server with its clock set back, further each time."""
        self._node.kill()
        self._node.clock -= self._dice.randrange(HOUR_NS)
        self._node.restart()

    def _reset(self) -> None:
        """Reset all namespaces, as where weights change."""
        with (
            suppress(VCacheError),
            Client(self._node.path, ClientConfig(), reconnect=False) as client,
        ):
            client.clear(reset=True)

    # ---- its ledger

    def _show_ledger(self) -> None:
        """As a client that was stopped for long: show the server, or the next one, a ledger that
        is the server's own, or older. Keep the server's.
        """
        if self._dice.random() < 0.5:
            self._node.kill()
            self._node.restart()
        with ExitStack() as undo:
            client = self._connect(undo)
            if client is None:
                return
            hello = wire.encode(m.Hello(m.PROTOCOL_VERSION, "host", "host", {}))
            shown = [self._dice.choice(self._ledgers)] if self._ledgers else []
            with suppress(OSError):
                socket.send_fds(client, [hello], shown)
                self._ledgers += socket.recv_fds(client, m.MAX_MESSAGE_BYTES, 4)[1]
        while len(self._ledgers) > KEPT:
            os.close(self._ledgers.pop(0))

    def _refuse_memory(self) -> None:
        """Let the ledger grow no more, for a while. Half of the servers end before that is over."""
        with self._limited(resource.RLIMIT_FSIZE, self._dice.randrange(1 << 17)):
            self._over.wait(self._dice.uniform(0.1, 1.5))
        if self._dice.random() < 0.5:
            self._node.restart()

    def _take_descriptors(self) -> None:
        """Limit the server's descriptors to as many as it has, or a few more; clients connect and
        stay, or leave it its last one. A worker is stopped meanwhile."""
        most = len(os.listdir(f"/proc/{self._node.pid}/fd")) + self._dice.choice([0, 1, 1, 2])
        with ExitStack() as undo, self._limited(resource.RLIMIT_NOFILE, most):
            for _ in range(self._dice.choice([0, 8])):
                self._connect(undo)
            if self._dice.random() < 0.5:
                self._hit(self._dice.choice(self._pids("worker")), "stopped")
            self._over.wait(self._dice.uniform(0.3, 2.5))

    @contextmanager
    def _limited(self, what: int, most: int) -> Iterator[None]:
        """Limit what the server may have of a resource while the context lasts."""
        pid = self._node.pid
        before = resource.prlimit(pid, what)
        resource.prlimit(pid, what, (most, before[1]))
        try:
            yield
        finally:
            with suppress(ProcessLookupError):
                resource.prlimit(pid, what, before)

    def _connect(self, undo: ExitStack) -> socket.socket | None:
        made = undo.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        made.settimeout(0.1)
        with suppress(OSError):
            made.connect(str(self._node.path))
            return made
        return None

    _ACTS: ClassVar[Mapping[str, Callable[[Mishaps], None]]] = {
        "server killed": _kill_server,
        "server terminated": _terminate_server,
        "clock set back": _set_clock,
        "namespaces reset": _reset,
        "old ledger shown": _show_ledger,
        "ledger not writable": _refuse_memory,
        "descriptors exhausted": _take_descriptors,
    }
