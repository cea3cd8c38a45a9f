"""Copies between the KV cache and chunks that begin anywhere among a request's tokens."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from vcache_backend.transfer.chunk_io import ChunkIO
from vcache_backend.vram_pool.paged import PagedKV
from vcache_backend.vram_pool.planner import CopyPlan, Piece, plan, plan_chunks

Slots = npt.NDArray[np.int64]


def planned(io: ChunkIO, kv: PagedKV, starts: list[int], slots: Slots, skip: int) -> CopyPlan:
    """The copy of chunks that begin with tokens `starts`, but for tokens before `skip`, out of views or slots 0, 1, ..."""
    size = io.chunk_size
    with io.stats.timed("plan"):
        if starts and starts == list(range(starts[0], starts[0] + size * len(starts), size)):
            return plan_chunks(kv, size, slots, starts[0], len(starts), max(skip - starts[0], 0))
        pieces = [Piece(i, at, min(max(skip - at, 0), size), size) for i, at in enumerate(starts)]
        return plan(kv, size, slots, pieces)


def is_whole(io: ChunkIO, kv: PagedKV, copy: CopyPlan, starts: list[int], skip: int) -> bool:
    """Does the plan move every token that is wanted?"""
    size = io.chunk_size
    tokens = sum(size - min(max(skip - at, 0), size) for at in starts)
    return copy.nbytes * size == tokens * kv.chunk_bytes(size)
