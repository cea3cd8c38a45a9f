"""Turns places in a paged KV cache into a list of block copies. Pure numpy: nothing is copied."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from vcache_backend.errors import LayoutError
from vcache_backend.vram_pool.copies.geometry import Int64s, PagedKV


class CopyPlan(NamedTuple):
    """The blocks that a copy moves."""

    numbers: Int64s
    """Of the blocks in a load or a store, ascending. Counted in the KV cache's blocks, of which
    several may make a block of the load."""
    ids: Int64s
    """The KV cache's blocks."""


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


def placed(kv: PagedKV, ids: Int64s, *, holes: bool = False) -> CopyPlan:
    """Plan to move these blocks of the KV cache, numbered from 0 on.

    With `holes`, or with several groups, blocks with a negative id are not moved; otherwise a
    negative id is an error. Raises LayoutError for ids outside of the KV cache."""
    numbers = np.arange(len(ids), dtype=np.int64)
    if (kv.shares or holes) and (missing := ids < 0).any():
        numbers, ids = numbers[~missing], ids[~missing]
    # Negative ids are large as unsigned numbers: one pass finds all wrong ids.
    if int(np.maximum.reduce(ids.view(np.uint64), initial=0)) >= kv.num_blocks and len(ids):
        raise _outside(kv, int(ids.min()), int(ids.max()))
    return CopyPlan(numbers, ids)


def _outside(kv: PagedKV, low: int, high: int) -> LayoutError:
    named = f"blocks {low} to {high}"
    return LayoutError(
        f"slot_mapping names {named} but the KV cache has {kv.num_blocks} blocks of "
        f"{kv.block_size} tokens"
    )


class Pages(NamedTuple):
    """Where the blocks of a load or a store lie outside of the KV cache."""

    planes: Int64s
    """For each plane of the KV cache the base of its pages, see `CopyJob.origins`. Parts of a copy
    with the same array share it."""
    offsets: Callable[[Int64s, int], Int64s]
    """Called with blocks (`CopyPlan.numbers`) and the number of a kind of layers; returns what to
    add to this kind's `planes`."""


def in_chunks(kv: PagedKV, chunk_size: int, addresses: Int64s, first: int = 0) -> Pages:
    """The blocks of chunks from number `first` on, each of which lies in one piece at its address.
    All such chunks have one array of planes."""
    each = kv.blocks_in(chunk_size)

    def offsets(numbers: Int64s, kind: int) -> Int64s:
        chunks, inside = np.divmod(numbers - first * each, each)
        its = kv.kinds[kind]
        found: Int64s = addresses[chunks] + inside * (its.parts * its.page_bytes)
        return found

    return Pages(chunk_planes(kv, chunk_size), offsets)


def in_blocks(
    planes: Int64s, strides: Sequence[int], blocks: Int64s, first: int, split: int
) -> Pages:
    """Blocks of another KV cache. planes: the address of each plane's block 0. strides: from block
    to block, of each kind of layers. blocks: of `split` blocks each, from number `first` on."""

    def offsets(numbers: Int64s, kind: int) -> Int64s:
        if split > 1:
            block, inside = np.divmod(numbers, split)
            ids = blocks[block - first] * split + inside
        else:
            ids = blocks[numbers - first]
        found: Int64s = ids * strides[kind]
        return found

    return Pages(planes, offsets)


def copy_rows(
    kv: PagedKV, plan: CopyPlan, parts: Sequence[tuple[Pages, int, int]]
) -> tuple[Int64s, Int64s]:
    """The rows and origins of a copy (see `CopyJob`). parts: where the blocks [first, stop) of the
    plan lie; together all blocks of the plan, in order."""
    rows = np.empty((len(plan.ids), 2 + len(kv.kinds)), dtype=np.int64)
    rows[:, 2] = plan.ids
    origins: dict[int, int] = {}
    bases: list[Int64s] = []
    bounds = np.searchsorted(plan.numbers, [part[1:] for part in parts]).tolist()
    for (pages, _, _), (begin, end) in zip(parts, bounds, strict=True):
        if id(pages.planes) not in origins:
            origins[id(pages.planes)] = len(bases)
            bases.append(pages.planes)
        rows[begin:end, 0] = origins[id(pages.planes)]
        for kind in range(len(kv.kinds)):
            found = pages.offsets(plan.numbers[begin:end], kind)
            rows[begin:end, 2 + kind if kind else 1] = found
    return rows, np.stack(bases)


def slot_rows(
    kv: PagedKV, chunk_size: int, plan: CopyPlan, addresses: Int64s
) -> tuple[Int64s, Int64s]:
    """`copy_rows` of a copy of chunks in slots at these addresses."""
    stop = len(addresses) * kv.blocks_in(chunk_size)
    return copy_rows(kv, plan, [(in_chunks(kv, chunk_size, addresses), 0, stop)])


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
    """Split a copy (see `CopyJob`) into one copy for each of `kv.kinds`, with rows of three
    columns."""
    first = 0
    for number, kind in enumerate(kv.kinds):
        end = first + len(kind.pages)
        yield kind, rows[:, [0, 2 + number, 2]] if number else rows[:, :3], origins[:, first:end]
        first = end
