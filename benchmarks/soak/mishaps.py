"""The mishaps of a node, chosen at random by one thread."""

from __future__ import annotations

import os
import random
import resource
import signal
import socket
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from typing import Any

import msgspec

from vcache_backend.metadata_server import messages as m
from vcache_backend.metadata_server import wire

from .node import Node

KINDS = {
    "worker killed": 4,
    "worker stopped": 6,
    "server killed": 2,
    "server terminated": 1,
    "server stopped": 2,
    "clock set back": 1,
    "old ledger shown": 4,
    "ledger not writable": 2,
    "descriptors exhausted": 2,
    "started with few descriptors": 1,
    "lock and socket removed": 1,
    "hostile client": 4,
}
"""The weight of each kind."""
LONGEST_STOP = 3.0
"""The longest stop of a worker, in seconds: longer than leases and reservations last."""
SERVER_STOP = 1.2
HOUR_NS = 3600 * 10**9
KEPT = 8
"""Ledgers of earlier servers that are kept, to be shown later."""
HOSTILE = 6
"""Connections of one hostile client."""


class Mishaps:
    """Causes random mishaps; `run` does so in its thread until `end`. counts: by kind. recent: the
    last ones. killed: workers' pids.
    """

    def __init__(self, node: Node, pids: Callable[[], list[int]], seed: str) -> None:
        """pids: gives the pids of the live workers."""
        self.counts: Counter[str] = Counter()
        self.recent: list[str] = []
        self.killed: set[int] = set()
        self._node, self._pids, self._dice = node, pids, random.Random(f"mishaps {seed}")
        self._over = threading.Event()
        self._acts: dict[str, tuple[int, Callable[[], object]]] = {}
        """By kind: its weight, and what happens."""

    def run(self, pause: float) -> None:
        """Cause mishaps until `end`. pause: seconds between two of them, on average."""
        try:
            while not self._over.wait(self._dice.expovariate(1 / pause)):
                self.happen(
                    self._dice.choices(
                        list(self._acts), [share for share, _ in self._acts.values()]
                    )[0]
                )
        finally:
            self.leave()

    def happen(self, kind: str) -> None:
        """Cause one mishap of this kind now."""
        self._node.look()
        self.counts[kind] += 1
        self.recent = [*self.recent[-5:], kind]
        with suppress(ProcessLookupError):
            self._acts[kind][1]()

    def end(self) -> None:
        """Have `run` return. Any thread."""
        self._over.set()

    def leave(self) -> None:
        """Release what mishaps still hold."""

    def _kill_worker(self) -> None:
        pid = self._dice.choice(self._pids())
        self.killed.add(pid)
        os.kill(pid, signal.SIGKILL)

    def _stop_worker(self) -> None:
        """Stop a worker; the soak wakes it later."""
        os.kill(self._dice.choice(self._pids()), signal.SIGSTOP)


class NodeMishaps(Mishaps):
    """Mishaps of workers, of the metadata server, of its ledger and of its descriptors."""

    def __init__(
        self,
        node: Node,
        pids: Callable[[], list[int]],
        seed: str,
        only: Sequence[str] = (),
    ) -> None:
        """only: kinds; all by default."""
        super().__init__(node, pids, seed)
        self._hostile = ExitStack()
        self._ledgers: list[int] = []
        """Of earlier servers, and of this one."""
        acts: tuple[Callable[[], object], ...] = (
            self._kill_worker,
            self._stop_worker,
            self._kill_server,
            self._terminate_server,
            self._stop_server,
            self._set_clock,
            self._show_ledger,
            self._refuse_memory,
            self._take_descriptors,
            self._start_poor,
            self._remove_socket,
            self._attack,
        )
        self._acts = {
            kind: (KINDS[kind], act)
            for kind, act in zip(KINDS, acts, strict=True)
            if kind in only or not only
        }

    # ---- the server

    def _kill_server(self) -> None:
        self._node.kill()
        self._over.wait(self._dice.uniform(0, 0.3))
        self._node.restart()

    def _terminate_server(self) -> None:
        self._node.terminate()
        self._node.restart()

    def _stop_server(self) -> None:
        self._node.signal(signal.SIGSTOP)
        self._over.wait(self._dice.uniform(0, SERVER_STOP))
        self._node.signal(signal.SIGCONT)

    def _set_clock(self) -> None:
        """Restart the server with its clock set back, further each time."""
        self._node.kill()
        self._node.clock -= self._dice.randrange(HOUR_NS)
        self._node.restart()

    def _remove_socket(self) -> None:
        """Remove the lock, the socket or both, and start a second `serve` beside the first. New
        clients reach the second one.
        """
        lock, path = self._node.lock, self._node.path
        for file in self._dice.choice([[lock], [path], [lock, path]]):
            file.unlink(missing_ok=True)
        with self._node.replaced() as second:
            self.counts["a second server served"] += second
            for _ in range(2 * second):
                self._kill_worker()
            self._over.wait(second * self._dice.uniform(0.5, 3))
        if not path.exists():
            self._node.restart()

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
        limits = resource.prlimit(self._node.pid, resource.RLIMIT_FSIZE)
        with ExitStack() as undo:
            undo.callback(self._lift, self._node.pid, resource.RLIMIT_FSIZE, limits)
            most = self._dice.randrange(1 << 17)
            resource.prlimit(self._node.pid, resource.RLIMIT_FSIZE, (most, limits[1]))
            self._over.wait(self._dice.uniform(0.1, 1.5))
        if self._dice.random() < 0.5:
            self._node.kill()
        self._awake()

    # ---- its descriptors

    def _take_descriptors(self) -> None:
        """Limit the server's descriptors to as many as it has, or a few more; clients connect and
        stay, or leave it its last one. A worker is stopped meanwhile."""
        pid = self._node.pid
        before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        used = len(os.listdir(f"/proc/{pid}/fd"))
        with ExitStack() as undo:
            undo.callback(self._lift, pid, resource.RLIMIT_NOFILE, before)
            resource.prlimit(
                pid, resource.RLIMIT_NOFILE, (used + self._dice.choice([0, 1, 1, 2]), before[1])
            )
            for _ in range(self._dice.choice([0, 8])):
                self._connect(undo)
            if self._dice.random() < 0.5:
                self._stop_worker()
            self._over.wait(self._dice.uniform(0.3, 2.5))

    def _start_poor(self) -> None:
        """Kill the server, and start it with too few descriptors for all clients. It may also
        refuse to start.
        """
        self._node.kill()
        self.counts["no start with few descriptors"] += not self._node.start(
            self._dice.randint(8, 24)
        )
        self._over.wait(self._dice.uniform(0.3, 2.0))
        self._node.restart()

    def _lift(self, pid: int, what: int, limits: tuple[int, int]) -> None:
        with suppress(ProcessLookupError):
            resource.prlimit(pid, what, limits)

    def _awake(self) -> None:
        """See to it that a server runs again."""
        self._node.look()
        if not self._node.running:
            self._node.restart()

    # ---- hostile clients

    def _attack(self) -> None:
        """Open connections that send garbage, and valid messages with senseless contents. They stay
        until the next attack.
        """
        self.leave()
        with ExitStack() as undo:
            for _ in range(HOSTILE):
                made = self._connect(undo)
                if made is not None:
                    with suppress(OSError):
                        for packet in self._nonsense():
                            made.send(packet)
            self._hostile = undo.pop_all()

    def leave(self) -> None:
        self._hostile.close()

    def _connect(self, undo: ExitStack) -> socket.socket | None:
        made = undo.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        made.settimeout(0.1)
        with suppress(OSError):
            made.connect(str(self._node.path))
            return made
        return None

    def _nonsense(self) -> list[bytes]:
        dice, hello = self._dice, wire.encode(m.Hello(m.PROTOCOL_VERSION, "host", "host", {}))
        kinds: list[Callable[[], list[bytes]]] = [
            lambda: [dice.randbytes(dice.randrange(1, 1 << 16))],
            lambda: [hello, bytes(m.MAX_MESSAGE_BYTES + 1)],
            lambda: [hello, dice.randbytes(100)],
            lambda: [hello, *(msgspec.msgpack.encode(self._request()) for _ in range(200))],
        ]
        return dice.choice(kinds)()

    def _request(self) -> list[Any]:
        """A known request with senseless arguments. Not clear or reserve, which would be
        granted.
        """
        dice = self._dice
        names = [
            "commit",
            "abort",
            "lookup",
            "acquire",
            "renew",
            "release",
            "remove",
            "open_segment",
            "add_segment",
        ]
        names += [
            "join",
            "show_cache",
            "open_instance",
            "open_cache",
            "close_instance",
            "publish",
            "retract",
            "find",
        ]
        name = dice.choice(names)
        values: list[Callable[[], Any]] = [
            lambda: dice.getrandbits(62),
            lambda: dice.randrange(4096),
            lambda: [dice.randbytes(m.KEY_BYTES) for _ in range(dice.randrange(20))],
            lambda: dice.randbytes(8).hex(),
            lambda: None,
        ]
        return [name, *(dice.choice(values)() for _ in range(dice.randrange(4)))]
