"""Turns places in a paged KV cache into a list of block copies. Pure numpy: nothing is copied."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from vcache_backend.errors import LayoutError
from vcache_backend.vram_pool.copies.geometry import Int64s, PagedKV

Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class CopyPlan:
    """The blocks that one launch moves between whole slots and a KV cache. Immutable; any
    thread."""

    chunk_size: int
    """Tokens."""
    block_size: int
    """Tokens."""
    blocks: Int64s
    """(n, 3): slot index, byte offset in the slot of the block's first page (layer
    0, part 0, of the first kind), block id in the KV cache."""
    nbytes: int
    """Bytes to read, and to write."""
    blocks_per_chunk: int

    def complete(self, slots: int) -> Bools:
        """Shape (slots,): which slots have all their blocks in the plan. A store must skip every
        other chunk."""
        whole: Bools = np.bincount(self.blocks[:, 0], minlength=slots) == self.blocks_per_chunk
        return whole

    def offsets(self, kv: PagedKV, number: int) -> Int64s:
        """Shape (n,): the byte offset of each block's first page in the part of a chunk that holds
        kind `number` of `kv.kinds`."""
        if not number:
            return self.blocks[:, 1]
        kind = kv.kinds[number]
        return self.blocks[:, 1] // (kv.parts * kv.page_bytes) * (kind.parts * kind.page_bytes)


def whole_blocks(
    kv: PagedKV, chunk_size: int, slot_mapping: Int64s, starts: Sequence[int], skip: int = 0
) -> Int64s:
    """The KV cache's block for each block of the chunks with tokens `slot_mapping[starts[i] :
    starts[i] + chunk_size]`; -1: no block.

    slot_mapping: (tokens,) int64, `block id * block_size + token in block`, -1 for no place. A
    block has a place if all tokens of the block lie in one block of the KV cache, in order. A
    backend's arrangement of a block is unknown, so blocks are not split. Blocks with a token before
    `slot_mapping[skip]` get -1. Raises LayoutError: a place outside of the KV cache, a chunk
    outside of the mapping, a chunk size that is not a multiple of the block size."""
    each, size = kv.blocks_in(chunk_size), kv.block_size
    if len(starts) and not 0 <= min(starts) <= max(starts) <= len(slot_mapping) - chunk_size:
        raise LayoutError(
            f"chunks of {chunk_size} tokens from {list(starts)} on are not in a slot mapping of "
            f"{len(slot_mapping)}"
        )
    number: Int64s | slice = slice(None)
    if isinstance(starts, range) and starts.step == chunk_size and skip <= starts.start:
        count = len(starts) * each
        places = slot_mapping[starts.start : starts.start + count * size].reshape(-1, size)
    else:
        first: Int64s = (
            np.array(starts, dtype=np.int64)[:, None] + np.arange(each) * size
        ).reshape(-1)
        number, count = np.flatnonzero(first >= skip), len(first)
        places = slot_mapping[first[number][:, None] + np.arange(size)]
    here = places[:, 0] // size
    whole = places == (here * size)[:, None] + np.arange(size)
    if len(here) == count and whole.all() and np.minimum.reduce(here, initial=0) >= 0:
        return here
    low, high = int(places.min(initial=-1)), int(places.max(initial=-1))
    if low < -1 or high >= kv.num_blocks * size:
        raise _outside(kv, low // size, high // size)
    ids = np.full(count, -1, dtype=np.int64)
    ids[number] = np.where(whole.all(1), here, -1)
    return ids


def placed(kv: PagedKV, ids: Int64s, *, holes: bool = False) -> tuple[Int64s, Int64s]:
    """Which of these blocks of the KV cache are to be moved: their places in `ids`, and their ids.

    With `holes`, or with several groups, blocks with a negative id are not moved; otherwise a
    negative id is an error. Raises LayoutError for ids outside of the KV cache."""
    numbers = np.arange(len(ids), dtype=np.int64)
    if (kv.shares or holes) and (missing := ids < 0).any():
        numbers, ids = numbers[~missing], ids[~missing]
    # Negative ids are large as unsigned numbers: one pass finds all wrong ids.
    if int(np.maximum.reduce(ids.view(np.uint64), initial=0)) >= kv.num_blocks and len(ids):
        raise _outside(kv, int(ids.min()), int(ids.max()))
    return numbers, ids


def plan_blocks(kv: PagedKV, chunk_size: int, ids: Int64s, *, holes: bool = False) -> CopyPlan:
    """Plan the copy of whole blocks, between block `i` of the chunks in slots 0, 1, ..., counted
    through all slots, and block `ids[i]` of the KV cache. See `placed`."""
    each, stride = kv.blocks_in(chunk_size), kv.parts * kv.page_bytes
    rows = _rows(each, stride, max(1024, 1 << len(ids).bit_length()))
    numbers, ids = placed(kv, ids, holes=holes)
    blocks = rows[numbers]
    blocks[:, 2] = ids
    return CopyPlan(chunk_size, kv.block_size, blocks, kv.block_bytes * len(ids), each)


@lru_cache(maxsize=16)
def _rows(each: int, stride: int, count: int) -> Int64s:
    """The rows of a plan for the first `count` blocks of consecutive chunks, without the ids.
    Cached and read-only."""
    number = np.arange(count, dtype=np.int64)
    slot, virtual = np.divmod(number, each)
    rows: Int64s = np.stack([slot, virtual * stride, number], axis=1)
    rows.flags.writeable = False
    return rows


def _outside(kv: PagedKV, low: int, high: int) -> LayoutError:
    named = f"blocks {low} to {high}"
    return LayoutError(
        f"slot_mapping names {named} but the KV cache has {kv.num_blocks} blocks of "
        f"{kv.block_size} tokens"
    )


def slot_rows(kv: PagedKV, plan: CopyPlan, addresses: Int64s) -> tuple[Int64s, Int64s]:
    """The rows and the origin (see `Copier.pull`) of a copy between `kv` and slots that begin at
    these addresses: all slots are one origin, whose offsets are addresses."""
    starts = addresses[plan.blocks[:, 0]]
    rows = np.zeros((len(starts), 2 + len(kv.kinds)), dtype=np.int64)
    rows[:, 1] = starts + plan.blocks[:, 1]
    rows[:, 2] = plan.blocks[:, 2]
    for number in range(1, len(kv.kinds)):
        rows[:, 2 + number] = starts + plan.offsets(kv, number)
    return rows, chunk_planes(kv, plan.chunk_size)[None]


@lru_cache(maxsize=16)
def chunk_planes(kv: PagedKV, chunk_size: int) -> Int64s:
    """Shape (planes,): the offset of each plane's first page in a chunk, for the planes of all
    kinds. Cached and read-only."""
    blocks, begin, offsets = kv.blocks_in(chunk_size), 0, list[Int64s]()
    for kind in kv.kinds:
        layer, part = np.divmod(np.arange(len(kind.pages), dtype=np.int64), kind.parts)
        offsets.append(begin + (layer * blocks * kind.parts + part) * kind.page_bytes)
        begin += kind.block_bytes * blocks
    planes: Int64s = np.concatenate(offsets)
    planes.flags.writeable = False
    return planes


def of_kinds(
    kv: PagedKV, rows: Int64s, origins: Int64s
) -> Iterator[tuple[PagedKV, Int64s, Int64s]]:
    """Split a copy from or to any addresses (see `Copier.pull`) into one copy for each of
    `kv.kinds`, with rows of three columns."""
    first = 0
    for number, kind in enumerate(kv.kinds):
        end = first + len(kind.pages)
        yield kind, rows[:, [0, 2 + number, 2]] if number else rows[:, :3], origins[:, first:end]
        first = end
