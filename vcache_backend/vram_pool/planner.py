"""From places in a paged KV cache to a list of block copies. Pure numpy: nothing is copied here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from vcache_backend.errors import LayoutError
from vcache_backend.vram_pool.paged import Int64s, PagedKV

Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class CopyPlan:
    """What one launch moves, in either direction. Immutable; may be used from any thread.

    blocks: (n, 3) int64: slot index, byte offset in the slot of the virtual block (layer 0, part 0), block id.
    index: (n,) int64: where the block's first token stands in the slot mapping, or among the tokens of the chunks.
    nbytes: bytes read, which are the bytes written. tokens: of several groups, those whose first group's blocks are moved. each: blocks
    of a chunk.
    """

    chunk_size: int
    block_size: int
    blocks: Int64s
    index: Int64s
    nbytes: int
    tokens: int
    each: int

    def covered(self, total: int) -> Bools:
        """Shape (total,): which of `total` tokens this plan moves."""
        mask = np.zeros(total, dtype=np.bool_)
        mask[(self.index[:, None] + np.arange(self.block_size)).reshape(-1)] = True
        return mask

    def complete(self, slots: int) -> Bools:
        """Shape (slots,): which of the request's slots are moved wholly. A store must skip every chunk that is not."""
        whole: Bools = np.bincount(self.blocks[:, 0], minlength=slots) == self.each
        return whole


def plan_chunks(kv: PagedKV, chunk_size: int, slot_mapping: Int64s, starts: Sequence[int], skip: int = 0) -> CopyPlan:
    """Plan chunks in slots 0, 1, ..., whose tokens stand at `slot_mapping[starts[i] : starts[i] + chunk_size]`.

    slot_mapping: (tokens,) int64, `block id * block_size + token in block`, -1 for no place. A block is moved if and only if its
    tokens lie in one block, in order, none of them before `slot_mapping[skip]`: a backend may arrange a block as it likes, so it
    is not taken apart. Raises LayoutError: a place outside of the KV cache, a chunk outside of the mapping, a chunk size that is
    no multiple of the block size.
    """
    each, size = kv.blocks_in(chunk_size), kv.block_size
    if len(starts) and not 0 <= min(starts) <= max(starts) <= len(slot_mapping) - chunk_size:
        raise LayoutError(
            f"chunks of {chunk_size} tokens from {list(starts)} on are not in a slot mapping of {len(slot_mapping)}"
        )
    index: Int64s = (np.array(starts, dtype=np.int64)[:, None] + np.arange(each) * size).reshape(-1)
    number = np.flatnonzero(index >= skip)
    places = slot_mapping[index[number][:, None] + np.arange(size)]
    low, high = int(places.min(initial=-1)), int(places.max(initial=-1))
    if low < -1 or high >= kv.num_blocks * size:
        raise _outside(kv, low // size, high // size)
    ids = places[:, 0] // size
    whole = np.flatnonzero((ids >= 0) & (places == (ids * size)[:, None] + np.arange(size)).all(1))
    rows, _ = _consecutive(kv, chunk_size, len(index))
    return _plan(kv, chunk_size, rows[number[whole]], ids[whole], index[number[whole]])


def plan_blocks(kv: PagedKV, chunk_size: int, ids: Int64s, first: int = 0, stop: int | None = None) -> CopyPlan:
    """Plan whole blocks: block `i` of consecutive chunks in slots 0, 1, ... has its place at block `ids[i]` of the KV cache.

    Only the blocks [first, stop) are moved, all from `first` on by default; the places of others do not matter. Where there are several
    groups, a negative id is no place. Raises LayoutError like `plan_chunks`, and where `ids` has no place for a block that is wanted.
    """
    stop = len(ids) if stop is None else stop
    if not 0 <= first <= stop <= len(ids):
        raise LayoutError(f"blocks {first} to {stop} are wanted of {len(ids)}")
    rows, index = _consecutive(kv, chunk_size, stop)
    rows, ids, index = rows[first:], ids[first:stop], index[first:]
    if kv.shares and (missing := ids < 0).any():
        rows, ids, index = rows[~missing], ids[~missing], index[~missing]
    return _plan(kv, chunk_size, rows, ids, index)


def _plan(kv: PagedKV, chunk_size: int, rows: Int64s, ids: Int64s, index: Int64s) -> CopyPlan:
    """rows: of each block, whose id is yet to be set."""
    # Unsigned, a negative number is a large one: one pass finds both.
    if int(np.maximum.reduce(ids.view(np.uint64), initial=0)) >= kv.num_blocks and len(ids):
        raise _outside(kv, int(ids.min()), int(ids.max()))
    blocks = rows.copy()
    blocks[:, 2] = ids
    count, stride = len(ids), kv.parts * kv.page_bytes
    if kv.shares:
        count = int((blocks[:, 1] < kv.shares[0].of(chunk_size) * stride).sum())
    nbytes, each = kv.layers * stride * len(ids), kv.blocks_in(chunk_size)
    return CopyPlan(chunk_size, kv.block_size, blocks, index, nbytes, count * kv.block_size, each)


def _consecutive(kv: PagedKV, chunk_size: int, count: int) -> tuple[Int64s, Int64s]:
    """What the plans of the first `count` blocks of consecutive chunks have in common: their rows without ids, and their `index`. Both
    are shared: they stay as they are."""
    rows, index = _common(kv.blocks_in(chunk_size), kv.parts * kv.page_bytes, kv.block_size, max(1024, 1 << count.bit_length()))
    return rows[:count], index[:count]


@lru_cache(maxsize=16)
def _common(each: int, stride: int, block_size: int, count: int) -> tuple[Int64s, Int64s]:
    number = np.arange(count, dtype=np.int64)
    slot, virtual = np.divmod(number, each)
    rows, index = np.stack([slot, virtual * stride, number], axis=1), number * block_size
    rows.flags.writeable = index.flags.writeable = False
    return rows, index


def _outside(kv: PagedKV, low: int, high: int) -> LayoutError:
    named = f"blocks {low} to {high}"
    return LayoutError(f"slot_mapping names {named} but the KV cache has {kv.num_blocks} blocks of {kv.block_size} tokens")


@lru_cache
def plane_offsets(planes: int, parts: int, blocks: int, page_bytes: int) -> Int64s:
    """Shape (1, planes): where in a chunk of so many blocks the first page of each plane is. Not to be written to."""
    layer, part = np.divmod(np.arange(planes, dtype=np.int64), parts)
    offsets: Int64s = ((layer * blocks * parts + part) * page_bytes)[None]
    offsets.flags.writeable = False
    return offsets
