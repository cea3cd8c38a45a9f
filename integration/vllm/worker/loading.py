"""A load in a worker."""

from __future__ import annotations

import time
from typing import NamedTuple

from vcache_backend.resident.neighbours import Neighbours
from vcache_backend.transfer import load as transfer
from vcache_backend.transfer.places import BlockPlaces
from vcache_backend.transfer.session import Session
from vcache_backend.vram_pool.copies.copier import Mark
from vcache_backend.vram_pool.copies.geometry import PagedKV

from ..metadata import LoadSpec


class Attached(NamedTuple):
    """The parts that all loads and stores of a worker share. block_size: tokens of the blocks that
    vLLM numbers; each may be several blocks of the tensors."""

    session: Session
    kv: PagedKV
    block_size: int
    neighbours: Neighbours | None = None

    @property
    def per_chunk(self) -> int:
        """The number of vLLM's blocks in a chunk."""
        return self.kv.blocks_in(self.session.chunk_size) * self.kv.block_size // self.block_size

    def places(self, blocks: list[int]) -> BlockPlaces:
        """The places of chunks whose blocks have these numbers in vLLM, chunk by chunk."""
        return BlockPlaces(self.kv, self.session.chunk_size, blocks, self.block_size)


class Loading(transfer.Load):
    """The load of one request's blocks."""

    def __init__(self, worker: Attached, spec: LoadSpec, mark: Mark) -> None:
        """mark: a point in the model's stream behind all work of the blocks' earlier owners."""
        session = worker.session
        super().__init__(
            session,
            worker.places(spec.blocks),
            session.own(spec.keys),
            mark=mark,
            offload=spec.offload,
            name=spec.request_id,
            runs=spec.residents,
            neighbours=worker.neighbours,
        )
        self.began = time.time_ns()
        self.worker, self.spec = worker, spec

    @property
    def invalid(self) -> list[int]:
        """The blocks (vLLM's numbers) that the finished load has not filled; empty if cancelled."""
        if not self.cause or self.cause == transfer.CANCELLED:
            return []
        missed = self.spec.blocks[self.loaded * self.worker.per_chunk :]
        return [block for block in missed if block >= 0]

    @property
    def failure(self) -> str:
        """The metrics' name for the cause of a failure."""
        absent = "store" if self.spec.offload else "changed"
        return absent if self.cause == transfer.ABSENT else self.cause
