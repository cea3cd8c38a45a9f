"""What the benchmarks of the offload tier share: a store, nodes with a metadata server each, engines, Mooncake's own client."""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from vcache_backend.config import ByteSize, Config, EngineConfig, OffloadConfig, PoolConfig, ServerConfig
from vcache_backend.engine import VCacheEngine
from vcache_backend.transfer.layout import Layout
from vcache_backend.vram_pool.paged import PagedKV

from .mooncake_depot import Depot
from .processes import PATIENT, Child, metadata_server, module

BLOCK_SIZE = 16
SECONDS = 60.0
GIB = 1 << 30
DEVICE = "cuda:0" if torch.cuda.is_available() else "host"


class Size(NamedTuple):
    """A KV cache and how much of it moves. The default: Llama-3.1-8B's, whose chunks are 32 MiB."""

    layers: int = 32
    heads: int = 8
    dim: int = 128
    chunks: int = 16
    chunk_tokens: int = 256

    @property
    def tokens(self) -> int:
        return self.chunks * self.chunk_tokens

    @property
    def chunk_bytes(self) -> int:
        return self.chunk_tokens * self.layers * 2 * self.heads * self.dim * 2

    @property
    def nbytes(self) -> int:
        return self.chunks * self.chunk_bytes


class Site:
    """A store, nodes with a metadata server each, engines on them. Everything ends with the context."""

    def __init__(self, *providers: int, **flags: Any) -> None:
        """providers: bytes that each one lends. flags: the master's own."""
        self._undo = ExitStack()
        with self._undo:
            self.folder = Path(self._undo.enter_context(tempfile.TemporaryDirectory(prefix="vcache-bench-")))
            self.depot = self._undo.enter_context(Depot(self.folder, providers, **flags))
            self._undo = self._undo.pop_all()

    def __enter__(self) -> Site:
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def node(self) -> Path:
        """A metadata server's socket."""
        return self._undo.enter_context(metadata_server())

    def raw(self, nbytes: int) -> Child:
        """Mooncake's own client, with so much memory for objects."""
        command = module("benchmarks.mooncake_raw", self.depot.address, str(nbytes))
        child = self._undo.enter_context(Child("raw client", command, self.folder / "raw.log"))
        child.answer(SECONDS)
        return child

    def engine(self, node: Path, kv: KV, pool_bytes: int, offload: OffloadConfig | None) -> VCacheEngine:
        """With an open tier, or none."""
        config = Config(
            server=ServerConfig(socket=str(node)),
            client=PATIENT,
            pool=PoolConfig(device=kv.device, segment_bytes=ByteSize(pool_bytes)),
            engine=EngineConfig(chunk_size=kv.size.chunk_tokens),
            offload=offload or OffloadConfig(),
        )
        made = self._undo.enter_context(VCacheEngine(config, kv.layout))
        made.register(kv.tensors)
        if offload is not None:
            until(lambda: made.get_stats()["offload"]["usable"])
        return made


class KV:
    """A paged KV cache that holds `size`, in blocks that lie anywhere, with contents told by their place."""

    def __init__(self, size: Size, seed: int = 0, device: str = "host") -> None:
        self.size, self.device, dice = size, device, torch.Generator().manual_seed(seed)
        self._blocks = torch.randperm(size.tokens // BLOCK_SIZE, generator=dice)
        shape = (2, len(self._blocks), BLOCK_SIZE, size.heads, size.dim)
        where = "cpu" if device == "host" else device
        self.tensors = [torch.randint(0, 255, shape, generator=dice).to(where, torch.bfloat16) for _ in range(size.layers)]
        self.slots = (self._blocks[:, None] * BLOCK_SIZE + torch.arange(BLOCK_SIZE)).reshape(-1)
        name = PagedKV.describe(self.tensors, BLOCK_SIZE).name
        self.layout = Layout(
            model="benchmark",
            dtype="bfloat16",
            layers=size.layers,
            kv_heads=size.heads,
            head_dim=size.dim,
            block_size=BLOCK_SIZE,
            kv_layout=name,
            chunk_size=size.chunk_tokens,
        )

    def poison(self) -> None:
        for tensor in self.tensors:
            tensor.fill_(float("nan"))

    def holds(self, other: KV) -> bool:
        """Whether every token here is what it is there."""
        return all(
            torch.equal(mine[:, self._blocks], its[:, other._blocks])
            for mine, its in zip(self.tensors, other.tensors, strict=True)
        )


_prompts = itertools.count(1)


def prompt(tokens: int) -> torch.Tensor:
    """One that nobody has seen."""
    return torch.arange(tokens) + next(_prompts) * 10_000_000


def until(what: Callable[[], Any], seconds: float = SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        if time.monotonic() > deadline:
            raise RuntimeError(f"not so within {seconds:g} s")
        time.sleep(0.01)


def timed(call: Callable[[], Any]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def synchronize() -> None:
    """Wait for the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


@contextmanager
def threads(count: int) -> Iterator[None]:
    """torch's, for a while. More than there are idle cores make a copy many times slower."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    yield
    torch.set_num_threads(before)
