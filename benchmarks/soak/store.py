"""Mishaps of a Mooncake store, and of the processes through which workers use it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from vcache_backend.config import ByteSize
from vcache_backend.offload import objects
from vcache_backend.transfer.keys import TokenHasher

from ..mooncake_store import Depot, Part
from ..processes import Child, ChildFailed, module
from .mishaps import Mishaps
from .node import Node
from .worker import CHUNK_BYTES, CHUNK_TOKENS, MOST_CHUNKS, namespace, prompt, some_family

STORE_BYTES = (16 << 20, 16 << 20)
"""Bytes of each of two providers, of which four fifths get filled: not enough for all that is
stored.
"""
FLAGS: dict[str, Any] = {
    "client_ttl": 3,
    "default_kv_lease_ttl": 200,
    "eviction_high_watermark_ratio": 0.8,
}
"""The master's flags."""
CALL_SECONDS = 3.0
TIMES: dict[str, Any] = {
    "retry_seconds": 0.1,
    "lookup_seconds": 0.1,
    "get_seconds": 1.0,
    "call_seconds": CALL_SECONDS,
    "staging_bytes": ByteSize(4 << 20),
}
DAMAGED = 8
"""Prompts whose objects are damaged at once."""
FAMILIES = 100
"""The families that these are drawn from: those that are asked for most."""
OBJECT_BYTES = objects.HEADER_BYTES + CHUNK_BYTES
SHARES = {
    "objects damaged": 8,
    "provider killed": 2,
    "provider stopped": 3,
    "master killed": 1,
    "master stopped": 2,
    "gateway killed": 3,
    "gateway stopped": 2,
    "worker killed": 2,
}


class StoreMishaps(Mishaps):
    """Mishaps of the store's master, providers and objects, of the workers and of their offload
    processes.
    """

    def __init__(
        self,
        node: Node,
        depot: Depot,
        pids: Callable[[], list[int]],
        seed: str,
        only: Sequence[str] = (),
    ) -> None:
        super().__init__(node, pids, seed)
        self._depot, self._hasher = depot, TokenHasher(namespace(), CHUNK_TOKENS)
        self._vandal: Child | None = None
        self._folder = TemporaryDirectory(prefix="vcache-soak-vandal-")
        dice = self._dice
        acts: tuple[Callable[[], object], ...] = (
            self._damage,
            lambda: self._killed(dice.choice(depot.providers)),
            lambda: self._stopped(dice.choice(depot.providers)),
            lambda: self._killed(depot.master),
            lambda: self._stopped(depot.master),
            lambda: os.kill(self._gateway(), signal.SIGKILL),
            self._hang,
            self._kill_worker,
        )
        self._acts = {
            kind: (SHARES[kind], act)
            for kind, act in zip(SHARES, acts, strict=True)
            if kind in only or not only
        }

    def leave(self) -> None:
        if self._vandal is not None:
            self._vandal.kill()
        self._folder.cleanup()

    def _killed(self, part: Part) -> None:
        part.kill()
        self._over.wait(self._dice.uniform(0, 1))
        part.start()

    def _stopped(self, part: Part) -> None:
        part.stop()
        self._over.wait(self._dice.uniform(0, 3))
        part.cont()

    def _hang(self) -> None:
        """Stop an offload process, now and then for longer than a call may take: then it is
        replaced.
        """
        pid = self._gateway()
        os.kill(pid, signal.SIGSTOP)
        self._over.wait(self._dice.uniform(0, 1.5 * CALL_SECONDS))
        os.kill(pid, signal.SIGCONT)

    def _gateway(self) -> int:
        """The pid of some worker's offload process. ProcessLookupError if it has none now."""
        found = children(self._dice.choice(self._pids()))
        if not found:
            raise ProcessLookupError
        return found[0]

    def _damage(self) -> None:
        """Damage objects of a few prompts, through a client of its own, which may itself hang or
        lose its connection.
        """
        prompts = [prompt(some_family(self._dice, FAMILIES), MOST_CHUNKS) for _ in range(DAMAGED)]
        names = [objects.name(key) for tokens in prompts for key in self._hasher.keys(tokens)]
        try:
            if self._vandal is None:
                memory = str(DAMAGED * MOST_CHUNKS * OBJECT_BYTES)
                command = module("benchmarks.soak.vandal", self._depot.master.address, memory)
                self._vandal = Child("vandal", command, Path(self._folder.name, "log"))
                self._vandal.answer(20.0)
            how = self._dice.choice(["flip", "cut", "zero", "next"])
            self.counts["objects replaced"] += self._vandal.ask(
                "damage", 5.0, names=names, size=OBJECT_BYTES, how=how
            )
        except ChildFailed:
            if self._vandal is not None:
                self._vandal.kill()
            self._vandal = None


def children(pid: int) -> list[int]:
    """The pids of the processes that a process has started, in any thread."""
    found: list[int] = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            fields = stat.read_text().rpartition(")")[2].split()
            if int(fields[1]) == pid and fields[0] != "Z":
                found.append(int(stat.parent.name))
    return found
