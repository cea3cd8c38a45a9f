"""What the engine's tests share: copiers that tests control, worker processes, and a node with a
real server.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import processes
import pytest
import torch
from kv_cases import CHUNK, FLASH, SMALL, Arrangement, Cache, Sizes, layout_of, places
from processes import PATIENT, QUICK, SECONDS, Child, Stage, eventually, with_torch

from vcache_backend import config as configuration
from vcache_backend.config import ByteSize, ClientConfig, Config, PoolConfig, ServerConfig
from vcache_backend.engine import VCacheEngine
from vcache_backend.protocol.client import Client
from vcache_backend.transfer.layout import Layout
from vcache_backend.vram_pool.copies.copier import Completion, CopyJob, HostCopier, Mark

ROOMY = 1 << 20
"""A segment that holds every chunk of most tests."""


# ---- copiers that tests control


class UnfinishedCopier(HostCopier):
    """Its stores are complete only once `finished` is set: the bytes are in place, the device has
    not said so.
    """

    def __init__(self) -> None:
        self.finished = threading.Event()

    def copy(self, job: CopyJob, after: Mark | None = None) -> Completion:
        finished = super().copy(job, after)
        return Copied(self.finished) if job.to_origin else finished


class Copied:
    """A completion that waits for an event of a test, and holds the job until then."""

    seconds = None

    def __init__(self, finished: threading.Event, job: CopyJob | None = None) -> None:
        self._finished, self._job = finished, job

    def done(self) -> bool:
        if self._finished.is_set():
            self._job = None
        return self._finished.is_set()

    def wait(self, timeout_s: float) -> bool:
        return self._finished.wait(timeout_s)


class Awaited(Copied):
    """It is over once somebody has waited for it, as one on a GPU may be."""

    def wait(self, timeout_s: float) -> bool:
        self._finished.set()
        return True


# ---- worker processes


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker process is started with. visible: the GPUs it sees; empty: those that this
    process sees. apart: see `processes.Worker`. kv_device: where its KV cache lies, if not on the pool's device."""

    config: Config
    arrangement: Arrangement
    sizes: Sizes
    visible: str = ""
    apart: processes.Apart | None = None
    kv_device: str = ""


class WorkerLoop:
    """The inside of a worker process: a cache and an engine. Every method is a command."""

    def __init__(self, setup: Setup) -> None:
        torch.set_num_threads(1)
        if setup.visible:
            # CUDA looks at it when it is first used, which in a process that was just forked is yet
            # to come.
            os.environ["CUDA_VISIBLE_DEVICES"] = setup.visible
        device = setup.kv_device or setup.config.pool.device
        if device.startswith("cuda"):
            torch.cuda.set_device(device)
        self.cache = Cache(setup.arrangement, setup.sizes, device)
        layout = layout_of(self.cache, setup.config.engine.chunk_size)
        self.engine = VCacheEngine(setup.config, layout, kv_device=setup.kv_device)

    def store(self, tokens: torch.Tensor, slots: torch.Tensor) -> None:
        """Prefill and store, with a GPU's stream in a hurry: the kernels that write the KV have not
        run yet when `store` is called, and the blocks are overwritten right behind it."""
        self.cache.fill(tokens, slots)  # its kernels are loaded now
        self.cache.poison()
        there = self.cache.here(tokens), self.cache.here(slots)
        if self.engine.device.ordinal is not None:
            torch.cuda._sleep(50_000_000)  # some 30 ms in which the fill below stays queued
        self.cache.fill(*there)
        self.engine.store(tokens, None, self.cache.tensors, slots)
        self.cache.poison()

    def flush(self) -> bool:
        return self.engine.flush(SECONDS)

    def lookup(self, tokens: torch.Tensor) -> int:
        return self.engine.lookup(tokens)

    def retrieve(self, tokens: torch.Tensor, slots: torch.Tensor) -> Retrieved:
        """Into a poisoned cache, read by kernels queued right behind; every byte of it is
        checked.
        """
        self.cache.poison()
        mask = self.engine.retrieve(tokens, None, self.cache.tensors, slots)
        seen, here = self.cache.copy(), slots[mask]
        return Retrieved(int(mask.sum()), seen.holds_only(tokens[mask], here))

    def mapped(self) -> int:
        """How many segments it reads."""
        return len(self.engine._session.pool.mapped())

    def stats(self) -> dict[str, Any]:
        return self.engine.get_stats()

    def lives_in(self) -> tuple[int, str, str, str]:
        """Of whom, and in which namespaces; it is their first process."""
        assert os.getpid() == 1
        kinds = "net", "pid", "time"
        return os.getuid(), *(os.readlink(f"/proc/self/ns/{name}") for name in kinds)


class Retrieved(NamedTuple):
    """right: the tokens' KV is where it should be, and nothing else of the cache was touched."""

    tokens: int
    right: bool


class Worker(processes.Worker):
    """A worker process, seen from outside. It has its engine when this returns."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        on_gpu = (setup.kv_device or setup.config.pool.device).startswith("cuda")
        more = {"patience": 120.0 if on_gpu else SECONDS, "apart": setup.apart}
        super().__init__(with_torch(), WorkerLoop, setup, start_seconds=120.0, **more)
        try:
            self.made()
        except BaseException:
            self.close()
            raise


# ---- a node


class Node:
    """One node: a real metadata server, engines of this process, worker processes; closed in the
    right order.
    """

    def __init__(self, folder: Path, client: ClientConfig = PATIENT) -> None:
        self.stage = Stage(folder)
        self.path = self.stage.path
        self.client_config = client
        self.undo = ExitStack()

    def serve(self, **options: Any) -> Child:
        """Start (or start again) the server; `options` of its section of the configuration."""
        self.server = self.stage.server(**options)
        return self.server

    def config(self, device: str, segment_bytes: int = 0, chunk_size: int = CHUNK) -> Config:
        return Config(
            server=ServerConfig(socket=str(self.path)),
            client=self.client_config,
            pool=PoolConfig(device=device, segment_bytes=ByteSize(segment_bytes)),
            engine=configuration.EngineConfig(chunk_size=chunk_size),
        )

    def engine(self, device: str, segment_bytes: int, layout: Layout, **more: Any) -> VCacheEngine:
        """An engine of this process. more: of VCacheEngine."""
        made = VCacheEngine(self.config(device, segment_bytes), layout, **more)
        return self.undo.enter_context(made)

    def worker(
        self,
        device: str,
        segment_bytes: int = 0,
        arrangement: Arrangement = FLASH,
        sizes: Sizes = SMALL,
        chunk_size: int = CHUNK,
        **more: Any,
    ) -> Worker:
        """A worker process on `device`. more: `visible`, `apart`, `kv_device` (see Setup)."""
        more |= {"config": self.config(device, segment_bytes, chunk_size), "sizes": sizes}
        return self.undo.enter_context(Worker(Setup(arrangement=arrangement, **more)))

    def client(self) -> Client:
        """A bystander's connection."""
        return self.stage.client()


@contextmanager
def node(folder: Path, client: ClientConfig = PATIENT) -> Iterator[Node]:
    made = Node(folder, client)
    # These tensors are tiny: a second thread costs milliseconds where others run tests beside
    # these.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with made.stage.undo, made.undo:
        made.undo.callback(torch.set_num_threads, threads)
        yield made


def put(engine: VCacheEngine, cache: Cache, tokens: torch.Tensor) -> None:
    """Prefill into `cache`, store, and wait until it is visible."""
    slots = places(cache.sizes, len(tokens))
    cache.fill(tokens, slots)
    engine.store(tokens, None, cache.tensors, slots)
    assert engine.flush(SECONDS)


def get(engine: VCacheEngine, cache: Cache, tokens: torch.Tensor, seed: int = 1) -> int:
    """Retrieve into poisoned blocks; how many tokens came. Fails unless every byte of the whole
    cache is as it should be.
    """
    cache.poison()
    slots = places(cache.sizes, len(tokens), seed)
    mask = engine.retrieve(tokens, None, cache.tensors, slots)
    count = int(mask.sum())
    assert mask[:count].all()
    assert cache.holds_only(tokens[mask], slots[mask])
    return count


class Pair:
    """A writer that lends a segment on host:a, a reader on host:b that lends nothing, and a cache
    of each.
    """

    def __init__(self, here: Node, arrangement: Arrangement = FLASH, chunks: int = 0) -> None:
        self.mine, self.theirs = Cache(arrangement), Cache(arrangement)
        self.layout = layout_of(self.mine)
        self.writer = here.engine("host:a", chunks * self.mine.chunk_bytes or ROOMY, self.layout)
        self.reader = here.engine("host:b", 0, self.layout)


def said(caplog: pytest.LogCaptureFixture, text: str = "", level: int = 0) -> list[str]:
    lines = [record.getMessage() for record in caplog.records if record.levelno >= level]
    return [line for line in lines if text in line]


def counts(client: Client) -> tuple[int, int]:
    """Reservations, and slots in quarantine."""
    stats = client.stats()
    return stats.reservations, sum(stats.quarantined_slots.values())


# ---- fixtures, for modules that name them in `__all__`


@pytest.fixture
def pair(fresh: Node) -> Pair:
    return Pair(fresh)


@pytest.fixture
def fresh(tmp_path: Path) -> Iterator[Node]:
    """A node whose server this test has for itself."""
    with node(tmp_path) as made:
        made.serve()
        yield made


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Node]:
    """A node on which everything is noticed quickly. No server yet."""
    with node(tmp_path, QUICK) as made:
        yield made


@pytest.fixture
def served(here: Node) -> Node:
    here.serve()
    return here


# ---- threads


@contextmanager
def raising(owner: Any, name: str, behind: bool = False, times: int = 1) -> Iterator[None]:
    """The first calls raise in any thread but this one, before or behind the work. Fails if there
    were fewer."""
    original, left = getattr(owner, name), times

    def raises(*given: Any) -> Any:
        nonlocal left
        fails = left > 0 and threading.current_thread() is not threading.main_thread()
        left -= fails
        answer = None if fails and not behind else original(*given)
        if fails:
            raise RuntimeError(f"on purpose, in {name}")
        return answer

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, raises)
        yield
        try:
            eventually(lambda: left <= 0)
        except AssertionError as error:
            raise AssertionError(f"nobody called {name}") from error
