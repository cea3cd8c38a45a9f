"""Instances that share in place, for the tests: a KV cache in memory that others can map, an owner
in a process of its own, and what a reader sees of it."""

from __future__ import annotations

import fcntl
import gc
import mmap
import os
import threading
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import torch
from instance_cases import instance_id as instance
from kv_cases import CHUNK, SMALL, Cache, Sizes
from processes import PATIENT, SECONDS, Stage, Worker, descriptors_of, eventually, with_torch

from vcache_backend import seals
from vcache_backend.config import ClientConfig
from vcache_backend.protocol.client import Client
from vcache_backend.protocol.messages import BlockTable, InstanceId, Join, ResidentRun
from vcache_backend.resident.mappings import Neighbour, Neighbours, Tables
from vcache_backend.resident.own_cache import cache_shape, show_cache
from vcache_backend.vram_pool import devices
from vcache_backend.vram_pool.copies.copier import Completion, Copier, CopyJob, HostCopier
from vcache_backend.vram_pool.copies.geometry import PagedKV
from vcache_backend.vram_pool.devices import Device
from vcache_backend.vram_pool.exports import Region
from vcache_backend.vram_pool.generations import Generations, GenerationView, UInt64s
from vcache_backend.vram_pool.regions import create, map_segment

HOST = Device("host", "host")
NAMESPACE = b"resident"
EACH = 2
"""Blocks of a chunk."""
TABLES = [BlockTable("full")]
"""One block table, for all layers."""


def mapped(neighbours: Neighbours, name: bytes) -> Neighbour | None:
    """The KV cache of `name`, once it is mapped or that has failed."""
    neighbours.get(name)
    eventually(lambda: name not in neighbours._coming)
    return neighbours._mapped.get(name)


def held_up(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """KV caches are mapped from now on once the event is set."""
    opens, view = threading.Event(), Tables.view
    monkeypatch.setattr(Tables, "view", lambda *given: opens.wait(SECONDS) and view(*given))
    return opens


def allocate(device: Device, nbytes: int, undo: ExitStack) -> tuple[Region, torch.Tensor]:
    """Memory that others can map: a memfd, or a GPU's. Its fd is closed with `undo`."""
    if device.medium == "cuda":
        owned = undo.enter_context(create(device, nbytes))
        whole = map_segment(owned.info, owned.fd, device)
        return Region(owned.fd, owned.nbytes, whole.data_ptr()), whole
    fd = os.memfd_create("vcache-kv-of-a-test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    undo.callback(os.close, fd)
    os.ftruncate(fd, nbytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals.RESIZING)
    memory = torch.frombuffer(mmap.mmap(fd, nbytes), dtype=torch.uint8)
    return Region(fd, nbytes, memory.data_ptr()), memory


class SharedCache(Cache):
    """A KV cache of the flash layout in memory that others can map."""

    def __init__(self, sizes: Sizes = SMALL, offset: int = 0, device: Device = HOST) -> None:
        """offset: bytes before the first layer."""
        self.device, self.undo = device, ExitStack()
        self.layer_bytes = 2 * 2 * int(np.prod(sizes[1:]))
        nbytes = sizes.layers * self.layer_bytes
        self.region, memory = allocate(device, offset + nbytes, self.undo)
        self._layers = list(memory[offset : offset + nbytes].split(self.layer_bytes))
        of_torch = f"cuda:{device.ordinal}" if device.medium == "cuda" else "cpu"
        super().__init__(sizes=sizes, device=of_torch)
        self.kv = PagedKV.describe(self.tensors, sizes.block_size)

    def _allocated(self, shape: list[int], device: torch.device) -> torch.Tensor:
        return self._layers.pop(0).view(shape)

    def close(self) -> None:
        """The memory goes with the tensors."""
        self.undo.close()

    def mark(self, block: int, value: int) -> None:
        """Fill a block: every byte of it, in all layers; each plane's differ."""
        for plane, page in enumerate(self.kv.pages):
            page[block] = (value + plane) % 256

    def held(self, block: int) -> int | None:
        """The value that it was marked with; None if its pages do not agree."""
        planes = [(page[block].int() - plane) % 256 for plane, page in enumerate(self.kv.pages)]
        values = torch.cat(planes).unique()
        return int(values) if len(values) == 1 else None


class Reader:
    """A worker with a KV cache of its own, and what it reads from."""

    def __init__(self, client: Client, device: Device = HOST, sizes: Sizes = SMALL) -> None:
        self.client, self.cache = client, SharedCache(sizes, device=device)
        self.neighbours = Neighbours(client, device, self.cache.kv, 0)

    def there(self, name: bytes) -> Neighbour:
        """Once its owner has shown all."""
        return eventually(lambda: self.neighbours.get(name))

    def close(self) -> None:
        self.neighbours.close()
        self.cache.close()


class Owner:
    """An instance whose KV cache others read, or a part of one: its scheduler, one of its workers,
    or both. split: blocks of the tensors in one of vLLM's."""

    def __init__(
        self,
        path: Path,
        config: ClientConfig,
        name: InstanceId,
        ranks: int = 1,
        rank: int | None = 0,
        scheduler: bool = True,
        sizes: Sizes = SMALL,
        device: str = "host",
        split: int = 1,
    ) -> None:
        where = devices.resolve(device)
        self.client = Client(path, config, where.name, where.medium)
        self.name, self.ranks, self.rank = name, ranks, rank
        self.size = sizes.block_size * split
        self.each = CHUNK // self.size
        self.cache = SharedCache(sizes, device=where)
        self.table = Generations(name, sizes.blocks // split)
        if scheduler:
            self.client.on_return.append(self.join)
            self.join()
        if rank is not None:
            shape = cache_shape(self.cache.kv, self.cache.region, where)
            self.shown = show_cache(self.client, name, rank, shape, self.cache.region)

    def join(self) -> None:
        size = self.table.blocks, self.ranks, self.each
        self.client.join(Join(InstanceId(self.name), NAMESPACE, *size, TABLES), self.table.fd)

    def write(self, blocks: Sequence[int], value: int) -> list[int]:
        """As vLLM does: the blocks are handed out, a step is planned, and they are written. Their
        generations.
        """
        self._hand_out(blocks)
        for block in blocks:
            self.cache.mark(block, value)
        return [int(number) for number in self._written(blocks)]

    def compute(self, tokens: torch.Tensor, blocks: Sequence[int]) -> ResidentRun:
        """The same with these tokens' KV. The blocks as others would find them."""
        self._hand_out(blocks)
        self.cache.fill(tokens, self.slots(blocks))
        ids, now = np.array(blocks, dtype=np.uint32), self._written(blocks)
        return ResidentRun(0, ids.tobytes(), now.tobytes(), 0, self.name)

    def reuse(self, block: int) -> None:
        """Another request gets this block, and writes it."""
        self.compute(torch.arange(self.size) + 77_000_000, [block])

    def slots(self, blocks: Sequence[int]) -> torch.Tensor:
        """Of vLLM's blocks."""
        return (torch.tensor(blocks)[:, None] * self.size + torch.arange(self.size)).reshape(-1)

    def _hand_out(self, blocks: Sequence[int]) -> None:
        self.table.void(blocks)
        self.table.filled(blocks)

    def _written(self, blocks: Sequence[int]) -> UInt64s:
        """Once they are: the blocks' generations."""
        if self.cache.device.medium == "cuda":
            torch.cuda.synchronize(self.cache.device.ordinal)
        return self.table.counters[list(blocks)].copy()

    def reads(self, name: InstanceId) -> bool:
        """Whether it has mapped the KV cache of another one, which it goes on to have."""
        self.neighbours = Neighbours(self.client, self.cache.device, self.cache.kv, self.rank or 0)
        return mapped(self.neighbours, name) is not None

    def leave(self) -> None:
        """The process lives on; the instance does not."""
        self.table.close()
        self.client.close()

    def close(self) -> None:
        self.shown.close()
        self.leave()
        self.cache.close()


def owner(stage: Stage, number: int = 1, config: ClientConfig = PATIENT, **more: object) -> Worker:
    """`Owner` in a process of its own. more: its arguments."""
    home = with_torch()
    given = stage.path, config, instance(number), more
    made = Worker(home, _part, *given, name=f"owner {number}")
    return stage.undo.enter_context(made).made()


def _part(path: Path, config: ClientConfig, name: InstanceId, more: dict[str, object]) -> Owner:
    torch.set_num_threads(1)
    return Owner(path, config, name, **more)  # type: ignore[arg-type]


def read(
    neighbour: Neighbour, cache: SharedCache, block: int, copier: Copier | None = None
) -> int | None:
    """Copy a block of the neighbour's into the first one of `cache`; what it held."""
    assert pull(neighbour, cache, block, copier or HostCopier()).wait(SECONDS)
    return cache.held(0)


def pull(neighbour: Neighbour, cache: SharedCache, block: int, copier: Copier) -> Completion:
    rows = np.array([[0, block * neighbour.shape.kinds[0].stride, 0]], dtype=np.int64)
    return copier.copy(CopyJob(cache.kv, rows, neighbour.bases[None], neighbour))


def still(view: GenerationView, blocks: Sequence[int], generations: Sequence[int]) -> bool:
    """Whether these are as they were published."""
    numbers = np.array(blocks, dtype=np.uint32), np.array(generations, dtype=np.uint64)
    return view.leading(*(one.tobytes() for one in numbers)) == len(blocks)


def kv_mapped(pid: int | None = None) -> int:
    """Mappings of KV caches of others in this process, or in the process `pid`."""
    lines = Path(f"/proc/{pid or 'self'}/maps").read_text().splitlines()
    return sum("memfd:vcache-kv-of-a-test" in line and " r--s " in line for line in lines)


def descriptors() -> Counter[str]:
    """How many of this process's file descriptors point to what. Of sockets no numbers: a client
    may have connected again.
    """
    gc.collect()
    return Counter(name.partition(":[")[0] for name in descriptors_of("self"))


def added_to(before: Counter[str]) -> Counter[str]:
    """Descriptors that were not there before."""
    return descriptors() - before


def threads() -> int:
    return sum(thread.name == "vcache-neighbours" for thread in threading.enumerate())
