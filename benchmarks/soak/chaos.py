"""Runs the soak: workers, a server, a pool that is far too small for them, and the mishaps."""

from __future__ import annotations

import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import msgspec

from vcache_backend.config import (
    ByteSize,
    ClientConfig,
    Config,
    EngineConfig,
    OffloadConfig,
    PoolConfig,
    ServerConfig,
)

from ..forked import SECONDS, Forked, Waker, hear
from ..mooncake_store import Depot
from .mishaps import LONGEST_STOP, Mishaps, NodeMishaps
from .node import Node
from .store import FLAGS, STORE_BYTES, TIMES, StoreMishaps
from .worker import CHUNK_BYTES, CHUNK_TOKENS, Outcomes, Settings, run

POOL_CHUNKS = 10
"""Chunks in each worker's segment; all prompts together have 64."""
SEGMENTS = 3
"""Devices that lend to the pool; further workers share one with an earlier one."""
FAMILIES, STORE_FAMILIES = 16, 600
"""Families of prompts, without and with a store; the latter's together exceed the store, too."""
STOPS = 0.004
"""Share of the copies in which a worker stops itself."""
QUICK = ClientConfig(
    connect_seconds=0.5,
    request_seconds=0.5,
    control_seconds=1.0,
    heartbeat_seconds=0.2,
    retry_seconds=0.05,
)
PROGRESS_SECONDS = 15.0


class Found(msgspec.Struct, frozen=True):
    """A wrong byte and what had happened before it, newest last."""

    at: float
    wrong: str
    before: list[str]


class Soak:
    """Everything of one run. The context manager ends and removes all of it."""

    def __init__(
        self,
        seed: int,
        workers: int,
        only: Sequence[str] = (),
        trusting: bool = False,
        store: bool = False,
    ) -> None:
        """only: kinds of mishaps; all by default. trusting: workers believe that every lease held,
        and that every object is right. store: with an offload tier, to which the mishaps happen
        instead of to the server."""
        self.outcomes, self.found, self.died, self._waker = (
            Outcomes(),
            list[Found](),
            0,
            Waker(str(seed), LONGEST_STOP),
        )
        self._seed, self._trusting = seed, trusting
        self._started, self._errors, self._starts = time.monotonic(), list[BaseException](), 0
        with ExitStack() as undo:
            self._folder = Path(
                undo.enter_context(tempfile.TemporaryDirectory(prefix="vcache-soak-"))
            )
            self._node = Node(self._folder / "node", self._folder / "server.log")
            undo.callback(self._node.kill)
            self._node.restart()
            self._depot = (
                undo.enter_context(Depot(self._folder, STORE_BYTES, **FLAGS)) if store else None
            )
            self._workers: list[Forked] = []
            undo.callback(self._kill_all)
            self._workers += [self._start(number) for number in range(workers)]
            self.mishaps: Mishaps = (
                NodeMishaps(self._node, self._pids, str(seed), only)
                if self._depot is None
                else StoreMishaps(self._node, self._depot, self._pids, str(seed), only)
            )
            self._undo = undo.pop_all()

    def __enter__(self) -> Soak:
        return self

    def __exit__(self, *_: object) -> None:
        self.mishaps.end()
        self._undo.close()

    @property
    def stops(self) -> int:
        """How often workers were stopped, by themselves or from outside."""
        return self._waker.stops

    @property
    def servers_ended(self) -> int:
        """How many servers ended by themselves."""
        return self._node.ended

    def run(self, over: Callable[[Outcomes, float], bool], pause: float) -> float:
        """Run until `over(outcomes, seconds)` is true. Returns the seconds. Raises errors of the
        soak itself.
        """
        mishaps = threading.Thread(target=self._torment, args=(pause,), daemon=True)
        self._started = shown = time.monotonic()
        mishaps.start()
        while not over(self.outcomes, time.monotonic() - self._started) and not self._errors:
            self._hear()
            self._waker.look(self._pids())
            if time.monotonic() - shown > PROGRESS_SECONDS:
                shown = time.monotonic()
                self._show()
        self.mishaps.end()
        mishaps.join(SECONDS)
        if self._errors:
            raise self._errors[0]
        return time.monotonic() - self._started

    def _show(self) -> None:
        outcomes, seconds = self.outcomes, time.monotonic() - self._started
        said = (
            f"{outcomes.verified:,} verified retrieves, {outcomes.wrong} wrong, "
            f"{outcomes.refused:,} refused"
        )
        print(
            f"{seconds:5.0f} s: {said}, {sum(self.mishaps.counts.values())} mishaps",
            file=sys.stderr,
            flush=True,
        )

    # ---- workers

    def _start(self, number: int) -> Forked:
        self._starts += 1
        config = Config(
            server=ServerConfig(socket=str(self._node.path)),
            client=QUICK,
            pool=PoolConfig(
                device=f"host:{number % SEGMENTS}",
                segment_bytes=ByteSize(POOL_CHUNKS * CHUNK_BYTES),
            ),
            engine=EngineConfig(chunk_size=CHUNK_TOKENS),
            offload=OffloadConfig()
            if self._depot is None
            else self._depot.offload(**TIMES, promote=number % 4 < 2),
        )
        log = str(self._folder / f"worker{number}.log")
        families, stops = (FAMILIES, STOPS) if self._depot is None else (STORE_FAMILIES, 0.0)
        settings = Settings(
            config,
            self._starts,
            f"{self._seed} {self._starts}",
            log,
            families,
            stops,
            self._trusting,
        )
        return Forked(run, settings, Path(log))

    def _kill_all(self) -> None:
        for worker in self._workers:
            worker.kill()

    def _pids(self) -> list[int]:
        return [worker.pid for worker in self._workers]

    def _hear(self) -> None:
        """Count what workers report, and replace those that were killed."""
        for number, served in hear(self._workers):
            if served is not None:
                self.outcomes.add(served.outcomes)
                at = time.monotonic() - self._started
                self.found += [
                    Found(round(at, 1), wrong, list(self.mishaps.recent)) for wrong in served.wrong
                ]
                continue
            worker = self._workers[number]
            if worker.pid not in self.mishaps.killed:
                self.died += 1
                print(worker.tail(), file=sys.stderr, flush=True)
            worker.kill()
            self._workers[number] = self._start(number)

    def _torment(self, pause: float) -> None:
        """Cause mishaps until the end. An exception here is the soak's own fault, and ends it."""
        try:
            self.mishaps.run(pause)
        except BaseException as error:  # noqa: BLE001 - raised by `run`
            self._errors.append(error)
