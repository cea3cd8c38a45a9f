"""Where the chunks of a request lie in a KV cache, by slots or by blocks, and the copies from there and to there."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Protocol

import numpy as np
import numpy.typing as npt

from vcache_backend.errors import LayoutError
from vcache_backend.vram_pool.paged import PagedKV
from vcache_backend.vram_pool.planner import CopyPlan, plan_blocks, plan_chunks

Int64s = npt.NDArray[np.int64]


class Places(Protocol):
    """Places of consecutive chunks, numbered from 0. All plans raise LayoutError for places outside of the KV cache."""

    kv: PagedKV

    def load_plan(self, first: int, count: int) -> CopyPlan:
        """The copy of `count` chunks from number `first` on, as far as they are wanted, out of slots 0, 1, ..."""
        ...

    def store_plan(self, chunks: Sequence[int]) -> CopyPlan:
        """The copy of these chunks into slots 0, 1, ..."""
        ...

    def holds(self, chunk: int) -> bool:
        """Whether the chunk has a place for each of its tokens, and nothing of it is left alone, so that it can be stored from here."""
        ...


class BlockPlaces:
    """By block numbers: chunk i is the i-th row of `blocks`, whose blocks have `block_size` tokens (those of the tensors, or several)."""

    def __init__(
        self,
        kv: PagedKV,
        chunk_size: int,
        blocks: Sequence[int] | Int64s,
        block_size: int,
        skip: int = 0,
        stop: int | None = None,
    ) -> None:
        """skip, stop: a load wants `blocks[skip:stop]` only. Of several groups (`PagedKV.shares`) negative ones are not wanted."""
        self.kv, self._size = kv, chunk_size
        self._each, parts = kv.blocks_in(chunk_size), block_size // kv.block_size
        ids = np.array(blocks, dtype=np.int64)
        if parts > 1:
            ids = np.where(ids[:, None] < 0, -1, ids[:, None] * parts + np.arange(parts)).reshape(-1)
        self._ids: Int64s = ids
        self._skip, self._stop = skip * parts, (len(blocks) if stop is None else stop) * parts

    def load_plan(self, first: int, count: int) -> CopyPlan:
        start = first * self._each
        ids = self._ids[start : min(start + count * self._each, self._stop)]
        return plan_blocks(self.kv, self._size, ids, min(max(self._skip - start, 0), len(ids)))

    def store_plan(self, chunks: Sequence[int]) -> CopyPlan:
        rows = self._ids[: len(self._ids) // self._each * self._each].reshape(-1, self._each)
        return plan_blocks(self.kv, self._size, rows[list(chunks)].reshape(-1))

    def holds(self, chunk: int) -> bool:
        own = self._ids[chunk * self._each : (chunk + 1) * self._each]
        return (chunk + 1) * self._each <= self._stop and not (own < 0).any()

    def distinct(self) -> bool:
        """Whether no two chunks, nor two places in one, have the same block."""
        ids = self._ids.tolist()
        return len(set(ids)) == len(ids)


class SlotPlaces:
    """By a slot mapping: the tokens of chunk i have their places at `slots[starts[i] : starts[i] + chunk_size]`, -1 for none."""

    def __init__(
        self, kv: PagedKV, chunk_size: int, slots: Int64s, starts: Sequence[int], skip: int = 0, *, whole: bool = False
    ) -> None:
        """skip: a load leaves the tokens before this one alone. whole: it then begins with the whole block that this one is in, and
        raises LayoutError where a token it wants is not in a whole block; otherwise it leaves such tokens out."""
        self.kv, self.slots = kv, slots
        self._skip = skip // kv.block_size * kv.block_size if whole else skip
        self._size, self._starts, self._whole = chunk_size, starts, whole
        self._begin = starts[0] if starts else 0
        self._blocks = self._as_blocks()
        """The same by blocks, which is planned several times as fast: the rule for vLLM's requests."""

    def _as_blocks(self) -> BlockPlaces | None:
        """None if the chunks are not one behind the other, or not made of whole blocks in order."""
        starts, size, block = self._starts, self._size, self.kv.block_size
        mapping = self.slots[self._begin : self._begin + len(starts) * size]
        if not starts or len(mapping) < len(starts) * size or size % block:
            return None
        if not (isinstance(starts, range) and starts.step == size) and any(b - a != size for a, b in pairwise(starts)):
            return None
        ids = mapping[::block] // block
        # Every block from its first place to its last, in order; -1 is a block's first place, too, where it has only one.
        whole = (ids * block)[:, None] + np.arange(block)
        if whole.tobytes() != mapping.tobytes() or np.minimum.reduce(ids) < 0:
            return None
        return BlockPlaces(self.kv, size, ids, block, -(-max(self._skip - self._begin, 0) // block))

    def refuse_shared(self) -> None:
        """ValueError if two of the tokens that are wanted have one slot: the KV of one of them would be taken for the other's."""
        if self._blocks is not None and self._blocks.distinct():
            return
        first = max(self._skip, self._begin)
        wanted = self.slots[first : self._starts[-1] + self._size if self._starts else first]
        ordered = np.sort(wanted)
        twice = ordered[1:][(ordered[1:] == ordered[:-1]) & (ordered[1:] >= 0)]
        if len(twice):
            tokens = (first + np.flatnonzero(wanted == twice[0])[:2]).tolist()
            raise ValueError(f"slot_mapping gives slot {twice[0]} to the tokens at {tokens}; each token needs a slot of its own")

    def load_plan(self, first: int, count: int) -> CopyPlan:
        if self._blocks is not None:
            return self._blocks.load_plan(first, count)
        size, skip, starts = self._size, self._skip, self._starts[first : first + count]
        copy = plan_chunks(self.kv, size, self.slots, starts, skip)
        if self._whole:
            wanted = sum(size - min(max(skip - at, 0), size) for at in starts) if skip > starts[0] else len(starts) * size
            if copy.nbytes * size != wanted * self.kv.chunk_bytes(size):
                raise LayoutError(f"of {wanted} tokens from token {starts[0]} on some have no place in the KV cache")
        return copy

    def loaded(self, chunks: int) -> npt.NDArray[np.bool_]:
        """Shape of `slots`: which tokens a load of the leading `chunks` chunks brings."""
        if self._blocks is None:
            return self.load_plan(0, chunks).covered(len(self.slots))
        mask, block = np.zeros(len(self.slots), dtype=np.bool_), self.kv.block_size
        first = self._begin - (self._begin - max(self._skip, self._begin)) // block * block
        mask[first : self._begin + chunks * self._size] = True
        return mask

    def store_plan(self, chunks: Sequence[int]) -> CopyPlan:
        if self._blocks is not None:
            return self._blocks.store_plan(chunks)
        return plan_chunks(self.kv, self._size, self.slots, [self._starts[chunk] for chunk in chunks])

    def holds(self, chunk: int) -> bool:
        start = self._starts[chunk]
        if start < self._skip or self._blocks is not None:
            return start >= self._skip
        return bool(plan_chunks(self.kv, self._size, self.slots, [start]).complete(1).all())
