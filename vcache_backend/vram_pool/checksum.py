"""Checksums of chunks: a slot whose bytes changed after its commit is seen when it is loaded.

A sealed slot is the chunk, filled up to a multiple of 16 bytes, and a trailer of two 64-bit lanes, little-endian:

    lane = seed + sum over pieces p and columns c of P[p] * C[c] * word[p, c]    (modulo 2^64)

with the chunk as 32-bit words, 4,096 columns a piece of 16 KiB, the last piece filled up with zeros. The seeds are BLAKE2b-128 of
chunk key and length, so a slot that holds another chunk does not fit either. P and C are odd and different in both lanes:
SplitMix64's outputs for p and c. The sum may be taken in any order, so every device computes the same bits.

This is multilinear hashing (Carter and Wegman 1979) modulo 2^64 over 32-bit words as in Lemire and Kaser, "Strongly universal string
hashing is fast" (2014), keeping all 64 bits, in two levels. A change within one word is always seen, as odd factors are
invertible. A change that does not depend on the factors, in words whose lowest changed bit is bit t, passes one lane with a
probability of at most (65 - t) * 2^(t - 62) over random odd factors: below 2^-25 in the worst case, where nothing but the
highest bits of words changed, so below 2^-50 for both lanes; noise passes both with some 2^-127. The factors are public: this is a
guard against corruption, not against somebody who forges chunks.
"""

# Triton's decorator and torch.cuda's streams and events have no types.
# mypy: allow-untyped-calls, allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from functools import cache
from hashlib import blake2b
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl
from torch import Tensor

from vcache_backend.errors import LayoutError
from vcache_backend.vram_pool import cuda_driver, kernels
from vcache_backend.vram_pool.copier import Completion, Finished
from vcache_backend.vram_pool.cuda_copier import CudaCompletion
from vcache_backend.vram_pool.slots import SlotView

NAME = "ml64x2-1"
"""Of this construction: part of the layout of those who use it."""
TRAILER_BYTES = 16
ALIGNMENT = 16
"""Of slots and trailers, in bytes."""
MAX_BYTES = 1 << 33
"""Of a chunk: kernels count its words in 32 bits."""
COLUMNS = 4096

UInt64s = npt.NDArray[np.uint64]

_ROWS = 16
"""Pieces that the host widens to 64 bits at a time: 512 KiB."""
_GOLDEN, _MIX1, _MIX2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_PIECE_SALTS = 0x243F6A8885A308D3, 0x13198A2E03707344
_COLUMN_SALTS = 0xA4093822299F31D0, 0x082EFA98EC4E6C89
"""Of each lane: the fraction of pi."""


def sealed_bytes(nbytes: int) -> int:
    """Bytes of a slot for a chunk of `nbytes` and its trailer. Raises LayoutError unless that is a positive multiple of 8."""
    if nbytes <= 0 or nbytes % 8 or nbytes > MAX_BYTES:
        raise LayoutError(
            f"a chunk of {nbytes:,} B has no checksum: expected a multiple of 8 up to {MAX_BYTES:,}; set engine.checksum: false"
        )
    return _trailer_at(nbytes) + TRAILER_BYTES


def _trailer_at(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def seeds(keys: Sequence[bytes], nbytes: int) -> UInt64s:
    """(keys, 2): what the lanes of these chunks, `nbytes` long, start from."""
    length = nbytes.to_bytes(8, "little")
    digests = [blake2b(key + length, digest_size=TRAILER_BYTES, person=b"vcache-check-1").digest() for key in keys]
    return np.frombuffer(b"".join(digests), dtype="<u8").astype(np.uint64).reshape(-1, 2)


def sums(chunk: npt.NDArray[np.uint8]) -> UInt64s:
    """(2,): the lanes of a chunk without their seeds. chunk: contiguous, a multiple of 8 bytes; it is not copied."""
    words = chunk.view("<u4")
    whole = len(words) // COLUMNS
    columns = np.zeros((2, COLUMNS), dtype=np.uint64)
    pieces = words[: whole * COLUMNS].reshape(whole, COLUMNS)
    for first in range(0, whole, _ROWS):
        wide = pieces[first : first + _ROWS].astype(np.uint64)
        factors = _factors(np.arange(first, first + len(wide)), _PIECE_SALTS)
        columns += np.einsum("lp,pc->lc", factors, wide)
    rest = words[whole * COLUMNS :]
    columns[:, : len(rest)] += _factors(np.array([whole]), _PIECE_SALTS) * rest.astype(np.uint64)
    total: UInt64s = np.sum(columns * _column_factors(), axis=1, dtype=np.uint64)
    return total


@cache
def _column_factors() -> UInt64s:
    return _factors(np.arange(COLUMNS), _COLUMN_SALTS)


def _factors(indices: npt.NDArray[np.int64], salts: tuple[int, int]) -> UInt64s:
    """(2, indices): odd numbers. The output function of SplitMix64 (Steele, Lea and Flood 2014), started at the lane's salt."""
    z = np.array(salts, dtype=np.uint64)[:, None] + (indices.astype(np.uint64) + np.uint64(1)) * np.uint64(_GOLDEN)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(_MIX1)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(_MIX2)
    odd: UInt64s = (z ^ (z >> np.uint64(31))) | np.uint64(1)
    return odd


class Look(NamedTuple):
    """A look at slots, under way until `over`. bad: then, the numbers of the slots that do not fit, ascending; asked once."""

    over: Completion
    bad: Callable[[], list[int]]


class Sealer(Protocol):
    """Seals slots and checks them. `keys[i]` is the key of the chunk of `nbytes` in `slots[i]`.

    Both calls raise LayoutError, and do nothing, where a slot is too small for chunk and trailer or not aligned to 16 bytes, or
    `nbytes` is not one for `sealed_bytes`. `copy`, one of a copier, comes before, on the device. Slots are held until the work is over.
    """

    def prepare(self) -> None:
        """Make ready, so that no request waits for it. Optional."""
        ...

    def seal(self, slots: Sequence[SlotView], keys: Sequence[bytes], nbytes: int, copy: Completion) -> Completion:
        """Write the trailers. Only once the completion is done may others read the slots."""
        ...

    def verify(self, slots: Sequence[SlotView], keys: Sequence[bytes], nbytes: int, copy: Completion) -> Look:
        """Compare the slots with their trailers."""
        ...


def make_sealer(ordinal: int | None, max_ctas: int = 0) -> Sealer:
    """The sealer of a GPU's ordinal, or of host memory (None). max_ctas: bound on thread blocks at slots of other GPUs; 0: none."""
    return HostSealer() if ordinal is None else CudaSealer(ordinal, max_ctas)


class HostSealer:
    """Slots in host memory, in the caller's thread; copies there end before their call returns."""

    def prepare(self) -> None:
        """Nothing is compiled."""

    def seal(self, slots: Sequence[SlotView], keys: Sequence[bytes], nbytes: int, copy: Completion) -> Finished:
        started = time.perf_counter()
        for trailer, right in self._trailers(slots, keys, nbytes):
            trailer[:] = right
        return Finished(time.perf_counter() - started)

    def verify(self, slots: Sequence[SlotView], keys: Sequence[bytes], nbytes: int, copy: Completion) -> Look:
        bad = [i for i, (trailer, right) in enumerate(self._trailers(slots, keys, nbytes)) if (trailer != right).any()]
        return Look(Finished(0.0), lambda: bad)

    def _trailers(self, slots: Sequence[SlotView], keys: Sequence[bytes], nbytes: int) -> Iterator[tuple[UInt64s, UInt64s]]:
        """The trailer of each slot, in place, and what is right for its bytes."""
        check(slots, keys, nbytes)
        at = _trailer_at(nbytes)
        for slot, seed in zip(slots, seeds(keys, nbytes), strict=True):
            raw = slot.tensor.numpy()
            yield raw[at : at + TRAILER_BYTES].view("<u8"), seed + sums(raw[:nbytes])


def check(slots: Sequence[SlotView], keys: Sequence[bytes], nbytes: int) -> None:
    """LayoutError unless every slot has room for a chunk and its trailer, in its place, and a key."""
    need = sealed_bytes(nbytes)
    if len(slots) != len(keys):
        raise LayoutError(f"{len(slots)} slots were given with {len(keys)} keys")
    for i, slot in enumerate(slots):
        if slot.nbytes < need:
            raise LayoutError(f"a chunk with its checksum needs {need:,} B but slot {i} has {slot.nbytes:,} B")
        if slot.address % ALIGNMENT:
            raise LayoutError(f"slot {i} at {slot.address:#x} is not aligned to {ALIGNMENT} B")


# ---- GPUs

BLOCK = COLUMNS // 2
"""64-bit words of a piece."""
CTAS, PEER_CTAS = 132, 64
"""Thread blocks for slots on the reader's GPU and on others. One fills an SM's registers; 64 fill the links, see `kernels.PEER`."""
STAGES, NUM_WARPS = 4, 8


class CudaSealer:
    """Slots that GPU `ordinal` can reach, on two streams of its own, one for stores and one for loads."""

    def __init__(self, ordinal: int, max_ctas: int = 0) -> None:
        self.device, self.max_ctas = torch.device("cuda", ordinal), max_ctas
        with torch.cuda.device(self.device):
            self._stores, self._loads = torch.cuda.Stream(), torch.cuda.Stream()
        self._driver = cuda_driver.load()
        self._tables: list[kernels.Table] = []
        self._under_way: list[CudaCompletion] = []

    def prepare(self) -> None:
        for seal in (True, False):
            _compiled(seal, self.device)

    def seal(self, slots: Sequence[SlotView], keys: Sequence[bytes], nbytes: int, copy: Completion) -> Completion:
        return self._run(slots, keys, nbytes, copy, seal=True)[0]

    def verify(self, slots: Sequence[SlotView], keys: Sequence[bytes], nbytes: int, copy: Completion) -> Look:
        over, table = self._run(slots, keys, nbytes, copy, seal=False)

        def bad() -> list[int]:
            found: list[int] = np.flatnonzero(table.array[: len(slots), 1:].any(axis=1)).tolist()
            # The table of a look is free once its answer was read.
            self._tables.append(table)
            return found

        return Look(over, bad)

    def _run(
        self, slots: Sequence[SlotView], keys: Sequence[bytes], nbytes: int, copy: Completion, *, seal: bool
    ) -> tuple[CudaCompletion, kernels.Table]:
        check(slots, keys, nbytes)
        # What a kernel uses must live until it ends, even if the caller gave up and dropped its completion.
        self._under_way = [earlier for earlier in self._under_way if not earlier.done()]
        local, rows = all(slot.local for slot in slots), len(slots)
        ctas = CTAS if local else min(PEER_CTAS, self.max_ctas or PEER_CTAS)
        side = self._stores if seal else self._loads
        with torch.cuda.device(self.device) if torch.cuda.current_device() != self.device.index else nullcontext():
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            table = self._table(rows, side)
            fill_table(slots, keys, nbytes, table.array[:rows])
            try:
                table.upload(rows, self._driver, side.cuda_stream)
                if isinstance(copy, CudaCompletion):
                    side.wait_event(copy.end)
                start.record(side)
                launch(table.there, rows, nbytes, seal=seal, ctas=ctas, stream=side.cuda_stream)
                if not seal:
                    self._driver.copy_async(table.array.ctypes.data, table.there.data_ptr(), rows * 24, side.cuda_stream)
                end.record(side)
            except BaseException:
                # A kernel that nobody waits for must not run behind the caller's back.
                side.synchronize()
                raise
        completion = CudaCompletion(self.device, start, end, tuple(slots), table, self._tables if seal else [])
        self._under_way.append(completion)
        return completion, table

    def _table(self, rows: int, side: torch.cuda.Stream) -> kernels.Table:
        """A table that nothing uses: an earlier one, or one in memory from the stream's own pool, see `CudaCopier._table`."""
        while self._tables:
            with suppress(IndexError):  # another thread took it
                table = self._tables.pop()
                if table.rows >= rows:
                    return table
        with torch.cuda.stream(side):
            return kernels.Table(max(256, 1 << (rows - 1).bit_length()), self.device, self._driver)


def fill_table(slots: Sequence[SlotView], keys: Sequence[bytes], nbytes: int, table: npt.NDArray[np.int64]) -> None:
    """The kernels' table, a row for each slot: its address, and the lanes' seeds, to which the kernel adds."""
    table[:, 0] = [slot.address for slot in slots]
    table[:, 1:] = seeds(keys, nbytes).view(np.int64)


def launch(table: Tensor, rows: int, nbytes: int, *, seal: bool, ctas: int, stream: int | None = None) -> None:
    """Work on the slots of the first `rows` rows of a filled table, on the current device, which must be the table's.

    Afterwards the rows' lanes are the trailers, which are in the slots (`seal`), or what they differ by from those in the slots: 0
    where a slot fits. `stream`: a stream's handle; None: the current one. Returns at once; compiles at the first use.
    """
    if not rows:
        return
    words, trailer = nbytes // 8, _trailer_at(nbytes) // 8
    pieces = -(-words // BLOCK)
    grid, few = (min(ctas, rows * pieces), 1, 1), (-(-rows // _ROWS_OF_TRAILERS), 1, 1)
    if not isinstance(sum_kernel, triton.JITFunction):  # Triton's interpreter
        sum_kernel[grid](table, rows, words, trailer, seal, STAGES)
        if seal:
            trailer_kernel[few](table, rows, trailer, _ROWS_OF_TRAILERS)
        return
    add, write = _compiled(seal, table.device)
    add[grid](table, rows, words, trailer, seal, STAGES, stream=stream)
    if seal:
        write[few](table, rows, trailer, _ROWS_OF_TRAILERS, stream=stream)


_ROWS_OF_TRAILERS = 128


@cache
def _compiled(seal: bool, device: torch.device) -> tuple[Any, Any]:
    """Both kernels. Looked up once, see `kernels._compiled`."""
    with torch.cuda.device(device):
        add = sum_kernel.warmup(torch.int64, 1, 1, 1, seal, STAGES, grid=(1,), num_warps=NUM_WARPS)
        write = trailer_kernel.warmup(torch.int64, 1, 1, _ROWS_OF_TRAILERS, grid=(1,))
    return add, write


_PIECE = tl.constexpr(BLOCK)
_GOLDEN_T, _MIX1_T, _MIX2_T = tl.constexpr(_GOLDEN), tl.constexpr(_MIX1), tl.constexpr(_MIX2)
_PIECE_SALT_0, _PIECE_SALT_1 = tl.constexpr(_PIECE_SALTS[0]), tl.constexpr(_PIECE_SALTS[1])
_COLUMN_SALT_0, _COLUMN_SALT_1 = tl.constexpr(_COLUMN_SALTS[0]), tl.constexpr(_COLUMN_SALTS[1])


@triton.jit
def _factor(index, SALT: tl.constexpr):
    z = tl.full([1], SALT, tl.uint64) + (tl.cast(index, tl.uint64) + 1) * tl.full([1], _GOLDEN_T, tl.uint64)
    z = (z ^ (z >> 30)) * tl.full([1], _MIX1_T, tl.uint64)
    z = (z ^ (z >> 27)) * tl.full([1], _MIX2_T, tl.uint64)
    return (z ^ (z >> 31)) | 1


@triton.jit
def _add_piece(low_0, high_0, low_1, high_1, word, piece):
    low, high = word & 0xFFFFFFFF, word >> 32
    factor_0, factor_1 = _factor(piece, _PIECE_SALT_0), _factor(piece, _PIECE_SALT_1)
    return low_0 + low * factor_0, high_0 + high * factor_0, low_1 + low * factor_1, high_1 + high * factor_1


@triton.jit
def _fold(low, high, SALT: tl.constexpr):
    column = 2 * tl.arange(0, _PIECE)
    return tl.sum(low * _factor(column, SALT) + high * _factor(column + 1, SALT), 0).to(tl.int64)


# Not compiled again for counts of 1 or multiples of 16: a request would wait for it.
@triton.jit(do_not_specialize=["rows", "words", "trailer"])
def sum_kernel(table, rows, words, trailer, SEAL: tl.constexpr, STAGES: tl.constexpr):
    """Add the lanes of each slot of `words` 64-bit words to its row; unless `SEAL`, subtract its trailer, `trailer` words in.

    Each program takes an equal run of all pieces of all slots. The factor of a piece is applied at once, those of the columns
    to what a program has of a slot: in the loop there are four products of 32 by 64 bits for 64 bits of the chunk.
    """
    pieces, whole = tl.cdiv(words, _PIECE), words // _PIECE
    program, programs = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    begin, end = program * (rows * pieces) // programs, (program + 1) * (rows * pieces) // programs
    offsets = tl.arange(0, _PIECE)
    for slot in range((begin // pieces).to(tl.int32), tl.cdiv(end, pieces).to(tl.int32)):
        row = table + tl.cast(slot, tl.int64) * 3
        address = tl.load(row)
        first = tl.maximum(begin - tl.cast(slot, tl.int64) * pieces, 0).to(tl.int32)
        last = tl.minimum(end - tl.cast(slot, tl.int64) * pieces, pieces).to(tl.int32)
        low_0 = tl.zeros([_PIECE], tl.uint64)
        high_0 = tl.zeros([_PIECE], tl.uint64)
        low_1 = tl.zeros([_PIECE], tl.uint64)
        high_1 = tl.zeros([_PIECE], tl.uint64)
        for piece in tl.range(first, tl.minimum(last, whole), num_stages=STAGES):
            start = address + tl.cast(piece, tl.int64) * (_PIECE * 8)
            # The hint stands on the pointers, as in `kernels._words`.
            pointers = tl.max_contiguous(tl.multiple_of(start.to(tl.pointer_type(tl.uint64)) + offsets, 16), _PIECE)
            low_0, high_0, low_1, high_1 = _add_piece(low_0, high_0, low_1, high_1, tl.load(pointers), piece)
        if last > whole:
            pointers = (address + whole.to(tl.int64) * (_PIECE * 8)).to(tl.pointer_type(tl.uint64)) + offsets
            word = tl.load(pointers, offsets < words - whole * _PIECE, 0)
            low_0, high_0, low_1, high_1 = _add_piece(low_0, high_0, low_1, high_1, word, whole)
        sum_0 = _fold(low_0, high_0, _COLUMN_SALT_0)
        sum_1 = _fold(low_1, high_1, _COLUMN_SALT_1)
        if not SEAL:  # noqa: SIM102 - decided when it is compiled
            if first == 0:
                there = (address + trailer.to(tl.int64) * 8).to(tl.pointer_type(tl.int64))
                sum_0 -= tl.load(there)
                sum_1 -= tl.load(there + 1)
        tl.atomic_add(row + 1, sum_0, sem="relaxed")
        tl.atomic_add(row + 2, sum_1, sem="relaxed")


@triton.jit(do_not_specialize=["rows", "trailer"])
def trailer_kernel(table, rows, trailer, ROWS: tl.constexpr):
    """Write the lanes of each row behind its slot's chunk. After `sum_kernel`, on the same stream."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    lanes = table + row.to(tl.int64) * 3
    address = tl.load(lanes, row < rows, 0) + trailer.to(tl.int64) * 8
    there = address.to(tl.pointer_type(tl.int64))
    tl.store(there, tl.load(lanes + 1, row < rows, 0), row < rows)
    tl.store(there + 1, tl.load(lanes + 2, row < rows, 0), row < rows)
