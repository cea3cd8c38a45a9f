"""The places of a request's blocks in a KV cache, by slots or by blocks, and plans of copies."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

from vcache_backend.errors import LayoutError
from vcache_backend.vram_pool.copies.geometry import (
    CopyPlan,
    Int64s,
    PagedKV,
    outside,
    placed,
    slot_rows,
)

SlotMapping = torch.Tensor | npt.NDArray[np.int64]


class BlockPlaces:
    """Places by block numbers: `blocks` lists blocks of `block_size` tokens each. A load or a store
    of chunks lists them chunk by chunk. Plans raise LayoutError for places outside the KV cache."""

    def __init__(
        self,
        kv: PagedKV,
        chunk_size: int,
        blocks: Sequence[int] | Int64s,
        block_size: int,
        skip: int = 0,
        *,
        holes: bool = False,
        counted: int = 0,
    ) -> None:
        """block_size: a multiple of the tensors' block size. skip: a load wants only
        `blocks[skip:]`. holes: negative blocks are not wanted; without `holes` a negative block is
        an error, unless several groups exist (`PagedKV.shares`). counted: only the blocks before
        this one count as tokens; 0: all blocks, of chunks with several groups those of the first
        group."""
        self.kv, self._size, self._holes = kv, chunk_size, holes or bool(kv.shares)
        self.split, self.total = block_size // kv.block_size, len(blocks)
        """How many of the tensors' blocks make one of `blocks`, and the number of these."""
        ids = np.array(blocks, dtype=np.int64)
        if self.split > 1:
            split = ids[:, None] * self.split + np.arange(self.split)
            ids = np.where(ids[:, None] < 0, -1, split).reshape(-1)
        self._ids: Int64s = ids
        self._skip, self._counted = skip * self.split, counted * self.split

    @cached_property
    def each(self) -> int:
        """How many of `blocks` make a chunk. LayoutError if chunks cut a block."""
        each, rest = divmod(self.kv.blocks_in(self._size), self.split)
        if rest:
            raise LayoutError(f"chunk_size {self._size} is not a multiple of the block size")
        return each

    def chunks(self, blocks: int) -> int:
        """How many leading chunks have no wanted block behind the leading `blocks` blocks."""
        return -(-blocks // self.each) if blocks == self.total else blocks // self.each

    def after(self, block: int) -> int:
        """The first wanted block, from this one on; `total` without one."""
        wanted = self._wanted
        if wanted is None:
            return block
        at = int(np.searchsorted(wanted, block))
        return int(wanted[at]) if at < len(wanted) else self.total

    @cached_property
    def _wanted(self) -> Int64s | None:
        """The wanted blocks; None: all."""
        lacking = self._ids < 0 if self._holes else np.zeros(len(self._ids), dtype=np.bool_)
        lacking[: self._skip] = True
        if not lacking.any():
            return None
        return np.flatnonzero(~lacking.reshape(-1, self.split).all(1))

    def load_plan(self, first: int, stop: int) -> CopyPlan:
        """Plan the copy of the wanted blocks among the blocks [first, stop)."""
        begin, end = max(first * self.split, self._skip), stop * self.split
        numbers, ids = placed(self.kv, self._ids[begin:end], holes=self._holes)
        return CopyPlan(numbers + begin, ids)

    def tokens(self, numbers: Int64s) -> int:
        """How many tokens blocks with these numbers count (`CopyPlan.numbers`)."""
        shares, count = self.kv.shares, len(numbers)
        if self._counted:
            count = int(np.searchsorted(numbers, self._counted))
        elif len(shares) > 1:
            inside = numbers % self.kv.blocks_in(self._size)
            count = int(np.count_nonzero(inside < shares[0].of(self._size)))
        return count * self.kv.block_size

    def store_rows(self, chunks: Sequence[int], addresses: Sequence[int]) -> tuple[Int64s, Int64s]:
        """Plan the copy of these chunks, which have places, into slots at these addresses: rows and
        origins, see `CopyJob`."""
        each = self.each * self.split
        rows = self._ids[: len(self._ids) // each * each].reshape(-1, each)
        plan = placed(self.kv, rows[list(chunks)].reshape(-1), holes=self._holes)
        return slot_rows(self.kv, self._size, plan, np.array(addresses, dtype=np.int64))

    def holds(self, chunk: int) -> bool:
        """Whether the whole chunk has a place: otherwise it cannot be stored."""
        each = self.each * self.split
        own = self._ids[chunk * each : (chunk + 1) * each]
        return len(own) == each and not (own < 0).any()

    def distinct(self) -> bool:
        ids = self._ids[self._skip :]
        return len(set(ids.tolist())) == len(ids) and bool(np.minimum.reduce(ids, initial=0) >= 0)

    def there(self, chunks: int) -> npt.NDArray[np.bool_]:
        """Shape (blocks,): whether each block of the leading `chunks` chunks has a place."""
        mask: npt.NDArray[np.bool_] = self._ids[: chunks * self.each * self.split] >= 0
        return mask


class SlotPlaces(BlockPlaces):
    """Places by a slot mapping: the tokens of chunk i are in `slots[starts[i] : starts[i] +
    chunk_size]`; -1: no place."""

    def __init__(
        self,
        kv: PagedKV,
        chunk_size: int,
        slots: Int64s,
        starts: Sequence[int],
        skip: int = 0,
        *,
        whole: bool = False,
    ) -> None:
        """skip: a load wants only the tokens of `slots[skip:]`. whole: round `skip` down to a
        block, and let plans raise LayoutError if wanted tokens do not fill a block; without `whole`
        such tokens are left out. LayoutError for slots outside of the KV cache."""
        block = kv.block_size
        self.slots, self._starts, self._begin = slots, starts, starts[0] if starts else 0
        self._first = skip // block * block if whole else skip
        ids = whole_blocks(kv, chunk_size, slots, starts, self._first)
        left_alone = -(-max(self._first - self._begin, 0) // block)
        super().__init__(kv, chunk_size, ids, block, left_alone, holes=not whole)

    @classmethod
    def of_chunks(
        cls, kv: PagedKV, chunk_size: int, slots: Int64s, first: int, stop: int
    ) -> SlotPlaces:
        """Return the places of the chunks from the chunk with token `first` up to chunk `stop`.
        ValueError if two tokens have one slot, LayoutError for slots outside of `kv`."""
        starts = range(first // chunk_size * chunk_size, stop * chunk_size, chunk_size)
        places = cls(kv, chunk_size, slots, starts, first)
        places._refuse_shared()
        return places

    def _refuse_shared(self) -> None:
        """Raise ValueError if two wanted tokens have one slot: readers would mix up their KV."""
        if self.distinct():
            return
        first = max(self._first, self._begin)
        wanted = self.slots[first : self._starts[-1] + self._size if self._starts else first]
        ordered = np.sort(wanted)
        twice = ordered[1:][(ordered[1:] == ordered[:-1]) & (ordered[1:] >= 0)]
        if len(twice):
            tokens = (first + np.flatnonzero(wanted == twice[0])[:2]).tolist()
            given = f"slot_mapping gives slot {twice[0]} to the tokens at {tokens}"
            raise ValueError(f"{given}; each token needs a slot of its own")

    def loaded(self, chunks: int) -> npt.NDArray[np.bool_]:
        """Shape of `slots`: the tokens that a load of the leading `chunks` chunks brings. Only for
        adjacent chunks in `slots`."""
        mask = np.zeros(len(self.slots), dtype=np.bool_)
        if chunks:
            blocks = np.repeat(self.there(chunks), self.kv.block_size)
            mask[self._begin : self._begin + chunks * self._size] = blocks
        return mask


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
        raise outside(kv, low // size, high // size)
    ids = np.full(count, -1, dtype=np.int64)
    ids[number] = np.where(whole.all(1), here, -1)
    return ids


# ---- arguments of calls


def first_wanted(mask: object, size: int) -> int:
    """Find the first wanted token of the mask; `size` without one. The mask None wants all.
    ValueError if False comes after True."""
    if mask is None:
        return 0
    expected = f"expected ({size},) torch.bool, one for each token"
    if not isinstance(mask, torch.Tensor):
        raise ValueError(f"mask is {type(mask).__name__}; {expected}")
    if mask.shape != (size,) or mask.dtype != torch.bool:
        raise ValueError(f"mask is {tuple(mask.shape)} {mask.dtype}; {expected}")
    try:
        wanted = int(mask.sum())
        prefix_only = bool(mask[size - wanted :].all())
    except RuntimeError as error:  # a meta tensor, for example
        raise ValueError(f"mask cannot be read: {error}") from error
    if not prefix_only:
        raise ValueError("mask must be False on a prefix and then True; it has False after True")
    return size - wanted


def as_slots(slot_mapping: SlotMapping, size: int, offset: int) -> npt.NDArray[np.int64]:
    """Convert a slot mapping to shape (size,), int64, with -1 before `offset`. slot_mapping: the
    slots of tokens [offset, size). ValueError."""
    try:
        offset = operator.index(offset)
        if isinstance(slot_mapping, torch.Tensor):
            slot_mapping = (slot_mapping.cpu() if slot_mapping.is_cuda else slot_mapping).numpy()
        given = np.asarray(slot_mapping)
    except Exception as error:  # whatever a foreign object raises
        raise ValueError(
            f"slot_mapping or offset {offset!r} cannot be read: {type(error).__name__}: {error}"
        ) from error
    if given.size and given.dtype.kind not in "iu":
        raise ValueError(f"slot_mapping has type {given.dtype}; expected integers")
    if given.size and given.dtype == np.uint64 and int(given.max()) >= 1 << 63:
        raise ValueError(f"slot_mapping names slot {given.max()}; expected 64-bit signed integers")
    slots = np.ascontiguousarray(given, dtype=np.int64)
    if slots.ndim != 1 or len(slots) != size - offset or offset < 0:
        raise ValueError(
            f"slot_mapping has shape {slots.shape}; expected ({size} tokens - offset {offset},)"
        )
    return slots if not offset else np.concatenate([np.full(offset, -1, dtype=np.int64), slots])
