"""The demo's processes: a metadata server, and workers, each with a paged KV cache and an engine
but no model.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import torch

from vcache_backend.config import (
    ByteSize,
    ClientConfig,
    Config,
    EngineConfig,
    PoolConfig,
    ServerConfig,
)
from vcache_backend.demo.cache import Fault, PagedCache
from vcache_backend.demo.content import Shape, block_digests
from vcache_backend.engine import VCacheEngine
from vcache_backend.errors import VCacheError
from vcache_backend.metadata_server.client import Client
from vcache_backend.metadata_server.server import serve
from vcache_backend.transfer.layout import Layout
from vcache_backend.vram_pool.devices import resolve
from vcache_backend.vram_pool.segment import map_segment

CHUNKS = 8
"""Whole chunks of each prompt. A few tokens follow them."""
SECONDS = 60.0
"""The most that an answer may take. The first one includes importing torch, perhaps on a busy
core.
"""
KILL_SECONDS = 10.0
LONGEST_FOLDER = 70
"""Characters. If the path of the folder for temporary files has as many, /tmp is used: a socket's
path has at most 107 bytes.
"""

_spawn = multiprocessing.get_context("spawn")


class DemoError(VCacheError):
    """A process of the demo did not start, did not answer in time, or ended."""


class Done(msgspec.Struct, frozen=True):
    """A worker's answer. After `retrieve`: leading chunks retrieved, the seconds that took, and
    what the check found.
    """

    chunks: int = 0
    seconds: float = 0.0
    faults: list[Fault] = []


@contextmanager
def workers(
    config: Config, devices: list[str], shape: Shape, segment_bytes: int
) -> Iterator[list[DemoWorker]]:
    """Start a metadata server and a worker on each device, and yield the workers when they are
    ready. All end with the block.

    segment_bytes: what each worker lends to the pool. Raises DemoError.
    """
    roomy = tempfile.gettempdir() if len(tempfile.gettempdir()) < LONGEST_FOLDER else "/tmp"
    with (
        tempfile.TemporaryDirectory(prefix="vcache-demo-", dir=roomy) as folder,
        ExitStack() as undo,
    ):
        common = Config(
            server=ServerConfig(socket=str(Path(folder) / "vcache.sock")),
            client=ClientConfig(connect_seconds=5.0, request_seconds=10.0, control_seconds=30.0),
            engine=EngineConfig(chunk_size=config.engine.chunk_size),
        )
        server = undo.enter_context(_process(_serve, common, os.getpid()))
        deadline = time.monotonic() + SECONDS
        while not common.server.path.exists():
            if not server.is_alive() or time.monotonic() > deadline:
                raise DemoError(
                    f"the metadata server does not answer (exit code {server.exitcode})"
                )
            time.sleep(0.02)
        started = []
        for number, device in enumerate(devices):
            pool = PoolConfig(
                device=device, segment_bytes=ByteSize(segment_bytes), max_ctas=config.pool.max_ctas
            )
            ours, theirs = _spawn.Pipe()
            with theirs:
                own = msgspec.structs.replace(common, pool=pool)
                process = undo.enter_context(_process(_work, theirs, number, own, shape))
            started.append(DemoWorker(f"worker {number}", undo.enter_context(ours), process))
        for worker in started:
            worker.answer()
        yield started


@contextmanager
def _process(target: Callable[..., None], *arguments: Any) -> Iterator[BaseProcess]:
    """Run `target` in a child that ends with the block. Ctrl-C reaches this process only; during
    the start it is raised afterwards.
    """
    process = _spawn.Process(target=target, args=arguments, daemon=True)
    resource_tracker.ensure_running()  # now, since starting it later would unblock the signal
    came = list[int]()
    before = signal.signal(signal.SIGINT, lambda number, frame: came.append(number))
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])  # the child inherits this
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
        signal.signal(signal.SIGINT, before)
    try:
        if came:
            raise KeyboardInterrupt
        yield process
    finally:
        process.terminate()
        process.join(KILL_SECONDS)
        process.kill()
        process.join(KILL_SECONDS)


class DemoWorker:
    """The parent's side of a worker process. One thread."""

    def __init__(self, name: str, pipe: Connection, process: BaseProcess) -> None:
        self.name, self._pipe, self._process = name, pipe, process

    def ask(self, verb: Literal["store", "retrieve", "damage"], prompt: int) -> Done:
        """Have it store, retrieve or damage prompt number `prompt`. Returns its answer. Raises
        DemoError: it failed, ended, or is late.
        """
        with suppress(OSError):  # if it has ended, its last answer may still say why
            self._pipe.send((verb, prompt))
        return self.answer()

    def answer(self) -> Done:
        """Wait for its next answer. The first one says that its engine runs and its segment is in
        the pool. Raises DemoError.
        """
        if not self._pipe.poll(SECONDS):
            raise DemoError(f"{self.name} gave no answer in {SECONDS:g} s")
        try:
            answer: Done | str = self._pipe.recv()
        except (EOFError, OSError):
            self._process.join(1.0)
            raise DemoError(f"{self.name} ended with exit code {self._process.exitcode}") from None
        if isinstance(answer, str):
            raise DemoError(f"{self.name} failed:\n{answer}")
        return answer


# ---- in the children


def _serve(config: Config, parent: int) -> None:
    """Run the metadata server. It gets SIGTERM if the demo's process is killed
    (PR_SET_PDEATHSIG).
    """
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    if os.getppid() == parent:
        serve(config.server)


def _work(pipe: Connection, number: int, config: Config, shape: Shape) -> None:
    """Run a worker: answer until the pipe ends, or until an exception, whose traceback is the last
    answer.
    """
    torch.set_num_threads(1)
    try:
        cache = _DemoCache(number, config, shape)
        with cache.engine:
            pipe.send(Done())
            while True:
                verb, prompt = pipe.recv()
                pipe.send(getattr(cache, verb)(*cache.prompt(prompt)))
    except (EOFError, ConnectionError):
        return
    except Exception:  # noqa: BLE001 (the process's outermost loop)
        pipe.send(traceback.format_exc())


class _DemoCache:
    """A worker's KV cache and engine. `store`, `retrieve` and `damage` take what `prompt`
    returns.
    """

    def __init__(self, number: int, config: Config, shape: Shape) -> None:
        self.number, self.config, self.chunk_size = number, config, config.engine.chunk_size
        self.tokens = CHUNKS * self.chunk_size + shape.block_size // 2
        self.device = torch.device(
            config.pool.device if config.pool.device.startswith("cuda") else "cpu"
        )
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        self.kv = PagedCache(shape, 2 * self.tokens // shape.block_size, self.device, number)
        layout = Layout.of(
            self.kv.kvcaches, shape.block_size, model="vcache-demo", chunk_size=self.chunk_size
        )
        self.engine = VCacheEngine(config, layout)

    def prompt(self, number: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """A prompt's tokens, the digests of its blocks, and their places. Workers differ in the
        places alone.
        """
        tokens = np.random.default_rng(number).integers(0, 128_000, self.tokens)
        digests = block_digests(tokens, self.kv.shape.block_size)
        places = np.random.default_rng([number, self.number]).permutation(self.kv.blocks)[
            : len(digests)
        ]
        return (
            torch.from_numpy(tokens),
            torch.from_numpy(digests).to(self.device),
            torch.from_numpy(places).to(self.device),
        )

    def store(self, tokens: torch.Tensor, digests: torch.Tensor, places: torch.Tensor) -> Done:
        """Write the prompt's KV, as a model would, store it, and poison its blocks again."""
        self.kv.prefill(places, digests)
        self.engine.store(tokens, None, self.kv.kvcaches, self.kv.slots(places, len(tokens)))
        if not self.engine.flush(SECONDS / 2):
            raise DemoError("a store was not committed")
        self.kv.forget(places)
        return Done()

    def retrieve(self, tokens: torch.Tensor, digests: torch.Tensor, places: torch.Tensor) -> Done:
        """Look the prompt up, retrieve it into poisoned blocks, and check every byte of the whole
        cache.
        """
        found, slots = self.engine.lookup(tokens), self.kv.slots(places, len(tokens))
        self._synchronize()
        started = time.perf_counter()
        mask = self.engine.retrieve(tokens, None, self.kv.kvcaches, slots)
        self._synchronize()
        seconds, came = time.perf_counter() - started, int(mask.sum())
        failures = self.engine.get_stats()["failures"]
        if came != found or not mask[:came].all() or failures:
            raise DemoError(
                f"lookup promised {found} tokens, retrieve brought {came}; failures: {failures or 'none'}"
            )
        faults = self.kv.faults(places, digests, came // self.kv.shape.block_size)
        self.kv.forget(places)
        return Done(came // self.chunk_size, seconds, faults)

    def damage(self, tokens: torch.Tensor, digests: torch.Tensor, places: torch.Tensor) -> Done:
        """Invert one byte in the pool, in the middle of the prompt's first chunk."""
        reader = resolve(self.config.pool.device)
        with Client(
            self.config.server.path, self.config.client, reader.name, reader.medium, reconnect=False
        ) as client:
            leased = client.acquire(self.engine.keys(tokens)[:1])
            info, fd = client.open_segment(leased.locations[0].segment)
            with os.fdopen(fd), map_segment(info, fd, reader) as mapped:
                mapped.tensor(
                    leased.locations[0].offset + leased.locations[0].length // 2, 1
                ).bitwise_not_()
            client.release(leased.lease)
        return Done()

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
