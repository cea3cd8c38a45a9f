"""From a slot mapping to a list of block and token copies. Pure numpy: no tensor, no device, nothing is copied here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from vcache_backend.errors import LayoutError

Int64s = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


class TokenGeometry(NamedTuple):
    """Where one token's bytes lie in a page, all in bytes: `runs` runs of `run_bytes`, the r-th run of token t of the
    block at `t * token_stride + r * run_stride`."""

    runs: int
    run_bytes: int
    run_stride: int
    token_stride: int


class Geometry(Protocol):
    """The sizes the planner needs; `PagedKV` has them. `page_bytes` are the bytes of one (layer, block, part); `tokens` is
    None where a token may not be moved without the rest of its block."""

    @property
    def layers(self) -> int: ...
    @property
    def parts(self) -> int: ...
    @property
    def page_bytes(self) -> int: ...
    @property
    def block_size(self) -> int: ...
    @property
    def num_blocks(self) -> int: ...
    @property
    def tokens(self) -> TokenGeometry | None: ...


class Piece(NamedTuple):
    """The tokens [start, stop) of the chunk in slot `slot` of the request; chunk token j has its place at
    `slot_mapping[first + j]`. `first` may be negative as long as `first + start` is not. Pieces of one slot must not overlap."""

    slot: int
    first: int
    start: int
    stop: int


@dataclass(frozen=True, eq=False)
class CopyPlan:
    """What one launch moves, in either direction. Immutable; may be used from any thread.

    blocks: (n, 3) int64: slot index, byte offset in the slot of the virtual block (layer 0, part 0), block id.
    tokens: (m, 4) int64: slot index, byte offset in the slot of the token (layer 0, part 0, run 0), block id, byte offset of
        the token in its page of the KV cache.
    block_index, token_index: (n,), (m,) int64: where the row's first token stands in the slot mapping.
    nbytes: bytes read, which are the bytes written.
    """

    chunk_size: int
    block_size: int
    blocks: Int64s
    tokens: Int64s
    block_index: Int64s
    token_index: Int64s
    nbytes: int

    def covered(self, total: int) -> Bools:
        """Shape (total,): which tokens of a slot mapping of `total` tokens this plan moves."""
        mask = np.zeros(total, dtype=np.bool_)
        mask[(self.block_index[:, None] + np.arange(self.block_size)).reshape(-1)] = True
        mask[self.token_index] = True
        return mask

    def complete(self, slots: int) -> Bools:
        """Shape (slots,): which of the request's slots are moved wholly. A store must skip every chunk that is not."""
        moved = np.bincount(self.blocks[:, 0], minlength=slots) * self.block_size
        whole: Bools = moved + np.bincount(self.tokens[:, 0], minlength=slots) == self.chunk_size
        return whole


def plan_chunks(kv: Geometry, chunk_size: int, slot_mapping: Int64s, begin: int, chunks: int, skip: int = 0) -> CopyPlan:
    """`plan` for `chunks` consecutive whole chunks whose tokens stand at `slot_mapping[begin:]`, in slots 0, 1, ...; the first
    `skip` tokens of them are left alone. Several times as fast where every block is whole, as it is for vLLM's requests."""
    blocks = chunk_size // kv.block_size
    mapping = slot_mapping[begin : begin + chunks * chunk_size]
    if not (skip or chunk_size % kv.block_size or len(mapping) < chunks * chunk_size):
        places = mapping.reshape(-1, kv.block_size)
        first = places[:, 0]
        ids = first // kv.block_size
        # Every block from its first place to its last, in order.
        regular = np.array_equal(places, (ids * kv.block_size)[:, None] + np.arange(kv.block_size))
        if regular and first.min(initial=0) >= 0:
            _check_ids(kv, ids)
            rows = np.empty((chunks, blocks, 3), dtype=np.int64)
            rows[:, :, 0] = np.arange(chunks)[:, None]
            rows[:, :, 1] = np.arange(blocks) * (kv.parts * kv.page_bytes)
            rows[:, :, 2] = ids.reshape(chunks, blocks)
            index = begin + np.arange(len(ids)) * kv.block_size
            nbytes = kv.layers * kv.parts * len(ids) * kv.page_bytes
            none = np.empty(0, dtype=np.int64)
            return CopyPlan(chunk_size, kv.block_size, rows.reshape(-1, 3), none.reshape(0, 4), index, none, nbytes)
    firsts = range(begin, begin + chunks * chunk_size, chunk_size)
    pieces = [Piece(slot, at, min(max(begin + skip - at, 0), chunk_size), chunk_size) for slot, at in enumerate(firsts)]
    return plan(kv, chunk_size, slot_mapping, pieces)


def plan_blocks(kv: Geometry, chunk_size: int, ids: Int64s, first: int = 0, stop: int | None = None) -> CopyPlan:
    """Plan whole blocks: block `i` of consecutive chunks in slots 0, 1, ... has its place at block `ids[i]` of the KV cache.

    Only the blocks [first, stop) are moved, all from `first` on by default; the places of others do not matter. Raises LayoutError
    like `plan`, and where `ids` has no place for a block that is wanted.
    """
    if chunk_size <= 0 or chunk_size % kv.block_size:
        raise LayoutError(f"chunk_size {chunk_size} is no multiple of the KV block size {kv.block_size}; set engine.chunk_size")
    stop = len(ids) if stop is None else stop
    if not 0 <= first <= stop <= len(ids):
        raise LayoutError(f"blocks {first} to {stop} are wanted of {len(ids)}")
    wanted, index = ids[first:stop], np.arange(first, stop)
    _check_ids(kv, wanted)
    rows = np.empty((len(wanted), 3), dtype=np.int64)
    rows[:, 0], virtual = np.divmod(index, chunk_size // kv.block_size)
    rows[:, 1] = virtual * (kv.parts * kv.page_bytes)
    rows[:, 2] = wanted
    nbytes = kv.layers * kv.parts * len(wanted) * kv.page_bytes
    return CopyPlan(chunk_size, kv.block_size, rows, _NO_TOKENS[1], index * kv.block_size, _NO_TOKENS[0], nbytes)


def plan(kv: Geometry, chunk_size: int, slot_mapping: Int64s, pieces: Sequence[Piece]) -> CopyPlan:
    """Plan the copies of `pieces`. `slot_mapping`: (tokens,) int64, `block id * block_size + token in block`, -1 for no place.

    A block goes as one copy if and only if all its tokens are wanted and lie in one block, in order; what is left goes token by
    token, or stays out of the plan where `kv.tokens` is None. Tokens without a place are left out. Raises LayoutError: a
    place outside of the KV cache, a piece outside of its chunk or of the mapping, a chunk size that is no multiple of the
    block size. Then nothing is planned.
    """
    if chunk_size <= 0 or chunk_size % kv.block_size:
        raise LayoutError(f"chunk_size {chunk_size} is no multiple of the KV block size {kv.block_size}; set engine.chunk_size")
    wanted = _checked(pieces, chunk_size, len(slot_mapping))
    piece, virtual, index, ids = _whole_blocks(wanted, kv.block_size, slot_mapping)
    _check_ids(kv, ids)
    blocks = np.empty((len(ids), 3), dtype=np.int64)
    blocks[:, 0], blocks[:, 1], blocks[:, 2] = wanted.slot[piece], virtual * (kv.parts * kv.page_bytes), ids
    token_index, tokens = _NO_TOKENS
    if len(ids) * kv.block_size < int((wanted.stop - wanted.start).sum()):
        done = np.zeros((len(wanted.slot), chunk_size // kv.block_size), dtype=np.bool_)
        done[piece, virtual] = True
        token_index, tokens = _single_tokens(kv, wanted, slot_mapping, done)
    planes = kv.layers * kv.parts
    token_bytes = kv.tokens.runs * kv.tokens.run_bytes if kv.tokens else 0
    nbytes = planes * (len(blocks) * kv.page_bytes + len(tokens) * token_bytes)
    return CopyPlan(chunk_size, kv.block_size, blocks, tokens, index, token_index, nbytes)


class _Wanted(NamedTuple):
    """The pieces, a column each: contiguous, as picking from a column is several times faster than from a table."""

    slot: Int64s
    first: Int64s
    start: Int64s
    stop: Int64s


_NO_TOKENS = np.empty(0, dtype=np.int64), np.empty((0, 4), dtype=np.int64)


def _checked(pieces: Sequence[Piece], chunk_size: int, total: int) -> _Wanted:
    table = np.fromiter(chain.from_iterable(pieces), np.int64, 4 * len(pieces)).reshape(-1, 4)
    wanted = _Wanted(*table.T.copy())
    slot, first, start, stop = wanted
    bad = (slot < 0) | (start < 0) | (stop < start) | (stop > chunk_size) | (first + start < 0) | (first + stop > total)
    if bad.any():
        piece = Piece(*table[np.argmax(bad)].tolist())
        raise LayoutError(f"{piece} is outside of its chunk of {chunk_size} tokens or of a slot mapping of {total}")
    if len(set(slot.tolist())) < len(slot):
        order = np.lexsort((start, slot))
        before, after = table[order[:-1]], table[order[1:]]
        if ((before[:, 0] == after[:, 0]) & (before[:, 3] > after[:, 2])).any():
            raise LayoutError(f"pieces of one slot overlap: {[Piece(*row.tolist()) for row in table[order]]}")
    return wanted


def _spread(low: Int64s, counts: Int64s) -> tuple[Int64s, Int64s]:
    """For each piece i the numbers from low[i], counts[i] of them: which piece, which number."""
    piece = np.repeat(np.arange(len(counts)), counts)
    return piece, np.arange(len(piece)) + (low - np.cumsum(counts) + counts)[piece]


def _whole_blocks(wanted: _Wanted, size: int, slot_mapping: Int64s) -> tuple[Int64s, Int64s, Int64s, Int64s]:
    """The blocks that go as one copy: piece, virtual block in the chunk, index in the mapping of its first token, block id."""
    low = (wanted.start + (size - 1)) // size
    piece, virtual = _spread(low, np.maximum(wanted.stop // size - low, 0))
    index = wanted.first[piece] + virtual * size
    # A block is in order if no step inside it differs from 1: the number of such steps up to its two ends is the same.
    breaks = np.zeros(max(len(slot_mapping), 1), dtype=np.int32)
    np.cumsum(slot_mapping[1:] - slot_mapping[:-1] != 1, out=breaks[1:])
    head = slot_mapping[index]
    ids = head // size
    whole = (breaks[index + (size - 1)] == breaks[index]) & (ids * size == head) & (head >= 0)
    if whole.all():
        return piece, virtual, index, ids
    return piece[whole], virtual[whole], index[whole], ids[whole]


def _single_tokens(kv: Geometry, wanted: _Wanted, slot_mapping: Int64s, done: Bools) -> tuple[Int64s, Int64s]:
    """The wanted tokens with a place outside of the blocks marked in `done` (pieces, virtual blocks): index, rows."""
    size = kv.block_size
    piece, token = _spread(wanted.start, wanted.stop - wanted.start)
    left = ~done[piece, token // size]
    piece, token = piece[left], token[left]
    index = wanted.first[piece] + token
    place = slot_mapping[index]
    here = place != -1
    piece, token, index, place = piece[here], token[here], index[here], place[here]
    _check_ids(kv, place // size)
    if kv.tokens is None:
        return _NO_TOKENS
    stride = kv.tokens.token_stride
    # The chunk keeps a token where its own position puts it, the KV cache where the mapping says: the two may differ.
    rows = np.empty((len(place), 4), dtype=np.int64)
    rows[:, 0] = wanted.slot[piece]
    rows[:, 1] = token // size * (kv.parts * kv.page_bytes) + token % size * stride
    rows[:, 2], rows[:, 3] = place // size, place % size * stride
    return index, rows


def _check_ids(kv: Geometry, ids: Int64s) -> None:
    # Unsigned, a negative number is a large one: one pass finds both.
    if len(ids) and int(ids.view(np.uint64).max()) >= kv.num_blocks:
        named = f"blocks {ids.min()} to {ids.max()}"
        raise LayoutError(f"slot_mapping names {named} but the KV cache has {kv.num_blocks} blocks of {kv.block_size} tokens")
