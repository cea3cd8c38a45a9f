"""Loads out of other instances' KV caches, for the tests: owners with known content in memory that
others map, in this process or in one of their own, a reader with a session, and copies that stop
half-way."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import neighbour_cases
import numpy as np
import torch
from engine_cases import Copied, Node
from kv_cases import CHUNK, SMALL, Cache, layout_of, prompt
from neighbour_cases import Owner, instance, mapped
from processes import PATIENT, Worker, eventually
from torch import Tensor

from vcache_backend.protocol.messages import ChunkKey, ResidentRun
from vcache_backend.resident.mappings import Neighbour, Neighbours
from vcache_backend.transfer.keys import TokenHasher
from vcache_backend.transfer.load import Load
from vcache_backend.transfer.places import BlockPlaces
from vcache_backend.transfer.session import Session
from vcache_backend.transfer.store import store
from vcache_backend.vram_pool.copies.copier import Completion, CopyJob, HostCopier, Mark


def owner(here: Node, name: int = 1, **more: Any) -> Owner:
    """In this process."""
    made = Owner(here.path, PATIENT, instance(name), **more)
    here.undo.callback(made.close)
    return made


def owner_apart(here: Node, name: int = 1, device: str = "host") -> Worker:
    """In a process of its own."""
    return neighbour_cases.owner(here.stage, name, device=device)


class StoppingCopier(HostCopier):
    """Its pulls call `half_way` in the middle, and are over once `finished` is set. pulls: how many
    rows each had. local: of each pull."""

    def __init__(self) -> None:
        self.half_way: Callable[[], None] = lambda: None
        self.finished = threading.Event()
        self.finished.set()
        self.pulls: list[int] = []
        self.local: list[bool] = []

    def copy(self, job: CopyJob, after: Mark | None = None) -> Completion:
        if job.to_origin:
            return super().copy(job, after)
        self.pulls.append(len(job.rows))
        self.local.append(job.local)
        half = len(job.rows) // 2
        super().copy(job._replace(rows=job.rows[:half]))
        self.half_way()
        super().copy(job._replace(rows=job.rows[half:]))
        return Copied(self.finished, job)


class Reader:
    """A session with a KV cache, whose vLLM has blocks of `split` of the tensors', and its
    neighbours. copier: of host memory.
    """

    def __init__(
        self, here: Node, split: int = 1, segment_bytes: int = 0, device: str = "host"
    ) -> None:
        self.cache = Cache(device=device)
        self.copier = StoppingCopier()
        self.size = SMALL.block_size * split
        copier = self.copier if device.startswith("host") else None
        config = here.config(device, segment_bytes)
        self.session = Session(config, layout_of(self.cache), copier=copier)
        here.undo.callback(self.session.close)
        self.kv = self.session.bind(self.cache.tensors)
        self.neighbours = Neighbours(self.session.client, self.session.device, self.kv, 0)
        here.undo.callback(self.neighbours.close)
        self.hasher = TokenHasher(self.session.namespace, CHUNK)

    def keys(self, tokens: Tensor) -> list[ChunkKey]:
        return self.hasher.keys(tokens)

    def blocks(self, tokens: int) -> list[int]:
        """The places of a request of so many tokens: vLLM's blocks, anywhere."""
        most = self.kv.num_blocks * self.kv.block_size // self.size
        return np.random.default_rng(5).permutation(most)[: tokens // self.size].tolist()

    def slots(self, tokens: int) -> Tensor:
        blocks = torch.tensor(self.blocks(tokens), dtype=torch.int64)
        return (blocks[:, None] * self.size + torch.arange(self.size)).reshape(-1)

    def put(self, tokens: Tensor, chunks: Sequence[int]) -> None:
        """Into the pool: these chunks of it."""
        self.cache.fill(tokens, self.slots(len(tokens)))
        keys = self.keys(tokens)
        for chunk in chunks:
            assert store(self.session, self._places(len(tokens)), keys, [chunk]) is not None
        assert self.session.flush()
        self.cache.poison()

    def _places(self, tokens: int) -> BlockPlaces:
        return BlockPlaces(self.kv, CHUNK, self.blocks(tokens), self.size)

    def load(
        self,
        tokens: Tensor,
        residents: Sequence[ResidentRun],
        known: bool = True,
        keys: bool = True,
    ) -> Load:
        """Not advanced yet. Into poisoned blocks. known: the owners' KV caches are mapped already.
        keys: there may be chunks in the pool.
        """
        self.cache.poison()
        for one in residents:
            if known:
                mapped(self.neighbours, one.instance)
        resident = {"runs": residents, "neighbours": self.neighbours}
        mark, at = self.session.copier.mark(), self._places(len(tokens))
        return Load(self.session, at, self.keys(tokens) if keys else [], mark=mark, **resident)

    def check(self, load: Load, tokens: Tensor) -> int:
        """How many blocks are right, none of whose bytes is wrong."""
        count = load.filled * self.size
        assert load.loaded == min(count // CHUNK, len(load.keys))
        assert self.cache.wrong(tokens[:count], self.slots(len(tokens))[:count]) == 0
        return load.filled

    def loaded(
        self, tokens: Tensor, residents: Sequence[ResidentRun], known: bool = True
    ) -> tuple[int, str]:
        """A load to its end: how many blocks, and why not all."""
        load = self.load(tokens, residents, known)
        load.run(10)
        return self.check(load, tokens), load.cause

    def forgotten(self, owner: bytes) -> weakref.ref[Neighbour]:
        """The owner's KV cache, as long as a copy refers to it."""
        left = weakref.ref(self.neighbours._mapped.pop(owner))
        gc.collect()
        return left

    @property
    def stats(self) -> dict[str, Any]:
        """Of blocks in other KV caches."""
        return self.session.stats.snapshot()["resident"]

    def knows(self, *names: int) -> None:
        """These owners have shown all."""
        for name in names:
            eventually(lambda name=name: self.neighbours.get(instance(name)))  # type: ignore[misc]


def beside(here: Node, chunks: int, **more: Any) -> tuple[Owner, Reader, Tensor, ResidentRun]:
    """An owner, a reader that knows it, tokens, and where the owner has computed their chunks.
    more: of the reader.
    """
    one, reader, tokens = owner(here), Reader(here, **more), prompt(chunks * CHUNK)
    return one, reader, tokens, one.compute(tokens, list(range(2 * chunks)))
