"""Workers, a server and a pool that is far too small for them, and what happens to all three."""

from __future__ import annotations

import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import msgspec

from vcache_backend.config import ByteSize, ClientConfig, Config, EngineConfig, OffloadConfig, PoolConfig, ServerConfig

from ..forked import SECONDS, Forked, Waker
from ..mooncake_store import Depot
from .mishaps import LONGEST_STOP, Mishaps, NodeMishaps
from .node import Node
from .store import FLAGS, STORE_BYTES, TIMES, StoreMishaps
from .worker import CHUNK_BYTES, CHUNK_TOKENS, Outcomes, Served, Settings, run

POOL_CHUNKS = 10
"""Of each worker's segment; all prompts together have 64 chunks."""
SEGMENTS = 3
"""Devices that lend to the pool; further workers share one with an earlier one."""
FAMILIES, STORE_FAMILIES = 16, 600
"""Of prompts; in the second case all together are more than the store holds, too."""
STOPS = 0.004
"""Share of the copies in which a worker stops itself."""
QUICK = ClientConfig(
    connect_seconds=0.5,
    request_seconds=0.5,
    control_seconds=1.0,
    heartbeat_seconds=0.2,
    retry_seconds=0.05,
    retry_max_seconds=0.2,
)
WAKE_SECONDS = 0.02
PROGRESS_SECONDS = 15.0


class Found(msgspec.Struct, frozen=True):
    """A wrong byte and what had happened before it, newest last."""

    at: float
    wrong: str
    before: list[str]


class Worker(Forked):
    """A worker process."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(run, settings, Path(settings.log))

    def serve(self, lasting: float) -> Served:
        """Raises EOFError or OSError if the process is gone, or silent for SECONDS."""
        self.pipe.send(lasting)
        if not self.pipe.poll(SECONDS):
            raise TimeoutError(f"worker {self.pid} is silent")
        served = self.pipe.recv()
        assert isinstance(served, Served)
        return served


class Soak:
    """Everything of one run; nothing of it is left behind the context."""

    def __init__(
        self, seed: int, workers: int, disk: Path | None, only: Sequence[str] = (), trusting: bool = False, store: bool = False
    ) -> None:
        """disk: an empty folder on a small file system of its own, for socket and journal. only: kinds of mishaps, all by default.
        trusting: workers that take every lease for one that held, and every object for a right one. store: with an offload tier, to
        which the mishaps happen, and not to the server."""
        self.outcomes, self.found, self.died, self._waker = Outcomes(), list[Found](), 0, Waker(str(seed), LONGEST_STOP)
        self._seed, self._trusting, self._lock = seed, trusting, threading.Lock()
        self._over, self._nobody_works = threading.Event(), threading.Event()
        self._started, self._errors, self._starts = time.monotonic(), list[BaseException](), 0
        with ExitStack() as undo:
            self._folder = Path(undo.enter_context(tempfile.TemporaryDirectory(prefix="vcache-soak-")))
            self._node = Node(disk or self._folder / "node", self._folder / "server.log")
            undo.callback(self._node.kill)
            self._node.restart()
            self._depot = undo.enter_context(Depot(self._folder, STORE_BYTES, **FLAGS)) if store else None
            self._workers: list[Worker] = []
            undo.callback(self._kill_all)
            self._workers += [self._start(number) for number in range(workers)]
            for worker in self._workers:
                worker.serve(lasting=0.0)
            self.mishaps: Mishaps = (
                NodeMishaps(self._node, disk, self._pids, str(seed), only)
                if self._depot is None
                else StoreMishaps(self._node, self._depot, self._pids, str(seed), only)
            )
            self._undo = undo.pop_all()

    def __enter__(self) -> Soak:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()
        self._undo.close()

    @property
    def stops(self) -> int:
        """Of workers, by themselves or from outside."""
        return self._waker.stops

    @property
    def servers_ended(self) -> int:
        """That nobody had told to."""
        return self._node.ended

    def run(self, over: Callable[[Outcomes, float], bool], pause: float) -> float:
        """Until `over` says so of what was counted and of the seconds that took: how many. Raises what went wrong in the soak itself."""
        jobs: list[Callable[[], None]] = [lambda number=number: self._work(number) for number in range(len(self._workers))]  # type: ignore[misc]
        jobs += [lambda: self.mishaps.run(pause)]
        threads = [threading.Thread(target=self._guarded, args=(job,), daemon=True) for job in jobs]
        waker = threading.Thread(target=self._guarded, args=(self._wake,), daemon=True)
        self._started = shown = time.monotonic()
        for thread in (*threads, waker):
            thread.start()
        while not over(self.outcomes, time.monotonic() - self._started) and not self._errors:
            time.sleep(0.05)
            if time.monotonic() - shown > PROGRESS_SECONDS:
                shown = time.monotonic()
                self._show()
        self._stop()
        for thread in threads:
            thread.join(SECONDS)
        self._nobody_works.set()
        waker.join(SECONDS)
        if self._errors:
            raise self._errors[0]
        return time.monotonic() - self._started

    def _show(self) -> None:
        outcomes, seconds = self.outcomes, time.monotonic() - self._started
        said = f"{outcomes.verified:,} verified retrieves, {outcomes.wrong} wrong, {outcomes.refused:,} refused"
        print(f"{seconds:5.0f} s: {said}, {sum(self.mishaps.counts.values())} mishaps", file=sys.stderr, flush=True)

    def _stop(self) -> None:
        self._over.set()
        self.mishaps.end()

    # ---- workers

    def _start(self, number: int) -> Worker:
        self._starts += 1
        config = Config(
            server=ServerConfig(socket=str(self._node.path)),
            client=QUICK,
            pool=PoolConfig(device=f"host:{number % SEGMENTS}", segment_bytes=ByteSize(POOL_CHUNKS * CHUNK_BYTES)),
            engine=EngineConfig(chunk_size=CHUNK_TOKENS),
            offload=OffloadConfig() if self._depot is None else self._depot.offload(**TIMES, promote=number % 4 < 2),
        )
        log = str(self._folder / f"worker{number}.log")
        families, stops = (FAMILIES, STOPS) if self._depot is None else (STORE_FAMILIES, 0.0)
        return Worker(Settings(config, self._starts, f"{self._seed} {self._starts}", log, families, stops, self._trusting))

    def _kill_all(self) -> None:
        for worker in self._workers:
            worker.kill()

    def _pids(self) -> list[int]:
        return [worker.pid for worker in self._workers]

    def _work(self, number: int) -> None:
        """Let one worker serve, start another one when it is killed, and count."""
        while not self._over.is_set():
            worker = self._workers[number]
            try:
                served = worker.serve(lasting=0.5)
            except (EOFError, OSError):
                if worker.pid not in self.mishaps.killed:
                    self.died += 1
                    print(worker.tail(), file=sys.stderr, flush=True)
                worker.kill()
                self._workers[number] = self._start(number)
                continue
            with self._lock:
                self.outcomes.add(served.outcomes)
                at = time.monotonic() - self._started
                self.found += [Found(round(at, 1), wrong, list(self.mishaps.recent)) for wrong in served.wrong]

    def _wake(self) -> None:
        while not self._nobody_works.wait(WAKE_SECONDS):
            self._waker.look(self._pids())

    def _guarded(self, job: Callable[[], None]) -> None:
        """What fails here is the soak's own fault, and ends it."""
        try:
            job()
        except BaseException as error:  # noqa: BLE001 - raised by `run`
            self._errors.append(error)
            self._stop()
