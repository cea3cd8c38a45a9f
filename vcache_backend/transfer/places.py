"""The places of a request's chunks in a KV cache, by slots or by blocks, and plans of copies."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from vcache_backend.vram_pool.copies.geometry import Int64s, PagedKV
from vcache_backend.vram_pool.copies.plan import CopyPlan, plan_blocks, whole_blocks

SlotMapping = torch.Tensor | npt.NDArray[np.int64]


class BlockPlaces:
    """Places by block numbers: `blocks` lists the chunks' blocks, of `block_size` tokens each,
    chunk by chunk. Plans raise LayoutError for places outside the KV cache."""

    def __init__(
        self,
        kv: PagedKV,
        chunk_size: int,
        blocks: Sequence[int] | Int64s,
        block_size: int,
        skip: int = 0,
        *,
        holes: bool = False,
    ) -> None:
        """block_size: a multiple of the tensors' block size. skip: a load wants only
        `blocks[skip:]`. holes: negative blocks are not wanted; without `holes` a negative block is
        an error, unless several groups exist (`PagedKV.shares`)."""
        self.kv, self._size, self._holes = kv, chunk_size, holes
        self._each, parts = kv.blocks_in(chunk_size), block_size // kv.block_size
        ids = np.array(blocks, dtype=np.int64)
        if parts > 1:
            split = ids[:, None] * parts + np.arange(parts)
            ids = np.where(ids[:, None] < 0, -1, split).reshape(-1)
        self._ids: Int64s = ids
        self._skip = skip * parts

    def load_plan(self, first: int, count: int) -> CopyPlan:
        """Plan the copy of the wanted blocks of `count` chunks, from number `first` on, out of
        slots 0, 1, ..."""
        start = first * self._each
        ids = self._ids[start : start + count * self._each]
        skip = min(max(self._skip - start, 0), len(ids))
        return plan_blocks(self.kv, self._size, ids, skip, holes=self._holes)

    def store_plan(self, chunks: Sequence[int]) -> CopyPlan:
        """Plan the copy of these chunks into slots 0, 1, ..."""
        rows = self._ids[: len(self._ids) // self._each * self._each].reshape(-1, self._each)
        return plan_blocks(self.kv, self._size, rows[list(chunks)].reshape(-1), holes=self._holes)

    def holds(self, chunk: int) -> bool:
        """Whether the whole chunk has a place: otherwise it cannot be stored."""
        own = self._ids[chunk * self._each : (chunk + 1) * self._each]
        return len(own) == self._each and not (own < 0).any()

    def distinct(self) -> bool:
        ids = self._ids[self._skip :]
        return len(set(ids.tolist())) == len(ids) and bool(np.minimum.reduce(ids, initial=0) >= 0)

    def there(self, chunks: int) -> npt.NDArray[np.bool_]:
        """Shape (blocks,): whether each block of the leading `chunks` chunks has a place."""
        mask: npt.NDArray[np.bool_] = self._ids[: chunks * self._each] >= 0
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
