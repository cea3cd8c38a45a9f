"""A Triton kernel that copies all layers and all chunks of a request in one launch. Reference:
`reference.gather`, `.scatter`, `.pull`.

Its input is one int64 table with rows of three numbers, on the KV cache's device:

    planes    (layers * parts) rows: the address of block 0, the bytes from block to block, and the
              plane's base in origin 0
    blocks    the block's offset from its origin's bases, the block id, and the index in the table
              (in words) of its origin's first base
    origins   the bases of each origin, one origin after the other; left out if there is only one

An origin is memory in which the planes of a block lie at fixed distances. Either the origin is a KV
cache: its bases are addresses, and the offsets are multiples of the cache's stride. Or the origin
is all slots of all segments: its bases are the planes' offsets in a chunk, and the offsets are
addresses. Addresses are raw, so an origin may lie on any device that the executing device can
reach. If a copy has one origin, the rows of the planes hold the origin's bases: another look-up
before the first byte would slow down small copies.

A fixed number of programs strides over (plane, row, piece of a page). Pages are software-pipelined:
while a piece is written, the next pieces and their table rows are being read, which hides NVLink's
two microseconds."""

# Triton's decorator has no types, and its arguments are Triton's own.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from vcache_backend.errors import LayoutError
from vcache_backend.vram_pool.copies.geometry import Int64s, PagedKV, alignment
from vcache_backend.vram_pool.copies.plan import CopyPlan, plane_offsets
from vcache_backend.vram_pool.cuda_driver import Driver

_COLUMNS = tl.constexpr(3)


@dataclass(frozen=True)
class Tuning:
    """How a copy is spread over the GPU. The values were found by a sweep (until 2026-11-22 in
    `benchmarks/sweep_copy.py`).

    ctas: thread blocks of a launch. block_bytes: bytes that a thread block moves at a time, a power
    of two. num_warps: warps of 32 threads in a thread block. stages: 1 keeps the piece being read
    in registers; n >= 2 keeps n - 1 pieces in shared memory, so that `(stages - 1) * block_bytes`
    must stay under the 227 KiB of an SM. Cache modifiers and eviction hints were part of the sweep
    and made no difference beyond noise."""

    ctas: int
    block_bytes: int = 16 << 10
    num_warps: int = 4
    stages: int = 4


PEER = Tuning(ctas=64)
"""For origins on another GPU. 64 programs of four warps, with 48 KiB of shared memory each, fill
the links at every size: measured on two H200s over NVLink, see docs/benchmarks.md."""
LOCAL = Tuning(ctas=264, block_bytes=32 << 10, num_warps=16, stages=1)
"""For origins on the KV cache's GPU. Only many programs reach its memory's bandwidth; see
docs/benchmarks.md."""

HOST = Tuning(ctas=16)
"""For slots in host memory. 16 programs, with 48 KiB in flight in each, keep a PCIe link busy, and
leave the other SMs to the model. 8, 32 and 64 programs are as fast on an H200, see
docs/benchmarks.md; vLLM's own kernel for host memory uses 12."""


def tuning_for(*, local: bool, host: bool = False, max_ctas: int = 0) -> Tuning:
    """The tuning of a copy. local: all pages are on the KV cache's GPU. host: some are in host
    memory. max_ctas: limits `ctas`, unless 0."""
    chosen = LOCAL if local else HOST if host else PEER
    return replace(chosen, ctas=min(chosen.ctas, max_ctas)) if max_ctas else chosen


class Table:
    """Memory for the table of one copy at a time: `array` on the host, pinned, and `there` on the
    device. ready: an event for that copy."""

    def __init__(self, rows: int, device: torch.device, driver: Driver) -> None:
        self.rows = rows
        self.there = torch.empty((rows, 3), dtype=torch.int64, device=device)
        self._pinned = torch.empty((rows, 3), dtype=torch.int64, pin_memory=True)
        self.array: Int64s = self._pinned.numpy()
        self._addresses = self.there.data_ptr(), self._pinned.data_ptr()
        self.ready = driver.event()

    def upload(self, rows: int, driver: Driver, stream: int) -> None:
        """Queue the copy of the first `rows` rows to the device. The rows must not change until
        `stream` has copied them."""
        driver.copy_async(*self._addresses, rows * 24, stream)


def table_rows(kv: PagedKV, blocks: int, origins: int = 1) -> int:
    planes = len(kv.planes)
    return planes + blocks + (-(-origins * planes // 3) if origins > 1 else 0)


class TablePart(NamedTuple):
    """The rows [first, end) of a copy's table, for the launch that copies one kind of layers."""

    kv: PagedKV
    first: int
    end: int


def table_parts(kv: PagedKV, blocks: int, origins: int = 1) -> list[TablePart]:
    """Where the table of each of `kv.kinds` lies in the table of a copy of `blocks` blocks."""
    parts, end = list[TablePart](), 0
    for kind in kv.kinds:
        # The kernel is compiled for tables aligned to 16 bytes, and a row has 24 bytes.
        first = end + end % 2
        end = first + table_rows(kind, blocks, origins)
        parts.append(TablePart(kind, first, end))
    return parts


def fill_slots(kv: PagedKV, plan: CopyPlan, addresses: Int64s, table: Int64s) -> int:
    """Like `fill_table`, for a copy to or from slots, in half the time. addresses: (slots,) int64,
    the addresses of the plan's slots."""
    planes = len(kv.planes)
    table[:planes, :2] = kv.planes
    table[:planes, 2] = plane_offsets(
        planes, kv.parts, kv.blocks_in(plan.chunk_size), kv.page_bytes
    )
    table[planes:, 0] = addresses[plan.blocks[:, 0]] + plan.blocks[:, 1]
    table[planes:, 1] = plan.blocks[:, 2]
    table[planes:, 2] = 0
    return alignment(int(np.bitwise_or.reduce(addresses, initial=0)))


def fill_table(kv: PagedKV, rows: Int64s, origins: Int64s, table: Int64s) -> int:
    """Write the kernel's table for the copy of `rows`: see `Copier.pull`. Returns the alignment of
    the origins' pages, up to 16 bytes."""
    planes, end = len(kv.planes), len(kv.planes) + len(rows)
    table[:planes, :2] = kv.planes
    table[:planes, 2] = origins[0]
    table[planes:end, :2] = rows[:, 1:]
    table[planes:end, 2] = rows[:, 0] * planes + end * 3
    if len(origins) > 1:
        table.reshape(-1)[end * 3 : end * 3 + origins.size] = origins.reshape(-1)
    return alignment(
        int(np.bitwise_or.reduce(rows[:, 1], initial=0)),
        int(np.bitwise_or.reduce(origins, axis=None)),
    )


def launch(
    kv: PagedKV,
    blocks: int,
    table: Tensor,
    *,
    to_origin: bool,
    tuning: Tuning,
    many: bool = False,
    aligned: int = 16,
    stream: int | None = None,
) -> None:
    """Launch a copy of `blocks` blocks on the current device, which must hold the KV cache. The
    first use compiles the kernel.

    table: (rows, 3) int64, filled by `fill_table` or `fill_slots`, contiguous, on the current
    device; the table must live until the kernel has run. aligned: the result of `fill_table` or
    `fill_slots`. many: the table has several origins. to_origin: copy out of the KV cache (gather),
    otherwise into the KV cache. stream: a stream's handle; None: the current stream. Returns at
    once. Raises LayoutError for a copy of some 2^31 pieces or more."""
    planes = len(kv.planes)
    kernel = _compiled(
        kv.page_bytes, tuning, alignment(kv.aligned, aligned), planes, to_origin, many, kv.device
    )
    pieces = blocks * planes * kernel.shape["PIECES"]
    if pieces + 2 * tuning.ctas >= 1 << 31:
        nbytes = blocks * planes * kv.page_bytes
        raise LayoutError(
            f"a copy of {nbytes:,} B in {pieces:,} pieces is too large; move fewer chunks"
        )
    grid = (max(1, min(tuning.ctas, pieces)), 1, 1)
    if kernel.compiled is None:  # Triton's interpreter
        copy_kernel[grid](table, blocks, **kernel.shape)
    else:
        kernel.compiled[grid](table, blocks, *kernel.constants, stream=stream)


class _Kernel(NamedTuple):
    """The kernel for a KV cache and a tuning. shape: the compile-time arguments. constants: the
    same arguments in the launcher's order.

    compiled: None under Triton's interpreter."""

    shape: dict[str, Any]
    compiled: Any
    constants: tuple[Any, ...]


@lru_cache
def _compiled(
    page_bytes: int,
    tuning: Tuning,
    aligned: int,
    planes: int,
    to_origin: bool,
    many: bool,
    device: torch.device,
) -> _Kernel:
    """The compiled kernel. Cached, since at each launch `copy_kernel[grid]` would bind and
    specialise the arguments and look up the kernel."""
    shape = _shape(page_bytes, tuning, aligned) | {
        "PLANES": planes,
        "TO_ORIGIN": to_origin,
        "MANY": many,
    }
    if not isinstance(copy_kernel, triton.JITFunction):
        return _Kernel(shape, None, ())
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        compiled = copy_kernel.warmup(torch.int64, 1, grid=(1,), **shape)
    return _Kernel(shape, compiled, tuple(shape[name] for name in copy_kernel.arg_names[2:]))


def _shape(page_bytes: int, tuning: Tuning, aligned: int) -> dict[str, Any]:
    """The kernel's compile-time sizes. Words are as wide, up to 8 bytes, as all sizes and addresses
    allow."""
    word = min(8, aligned)
    block_bytes = _piece(page_bytes, tuning.block_bytes)
    return {
        "PAGE_WORDS": page_bytes // word,
        "BLOCK": block_bytes // word,
        "PIECES": triton.cdiv(page_bytes, block_bytes),
        "WORD": _WORDS[word],
        "ALIGN": aligned,
        "STAGES": tuning.stages,
        # A thread moves at least 16 bytes; with more threads, several would move the same bytes.
        "num_warps": max(1, min(tuning.num_warps, block_bytes // (32 * 16))),
    }


_WORDS = {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64}


def _piece(nbytes: int, most: int) -> int:
    """How many of `nbytes` contiguous bytes to move at a time: a power of two up to `most`. A
    divisor of `nbytes` needs no mask, and is taken unless it is less than half of the largest
    possible size."""
    exact, enough = nbytes & -nbytes, min(most, triton.next_power_of_2(nbytes))
    return int(min(exact, enough) if 2 * exact >= enough else enough)


@triton.jit
def _words(address, offsets, WORD: tl.constexpr, ALIGN: tl.constexpr):
    # The hints are on the pointers. Triton would lose hints on an address that a loop carries, and
    # with the hints the 16-byte accesses.
    pointers = address.to(tl.pointer_type(WORD)) + offsets
    return tl.max_contiguous(tl.multiple_of(pointers, ALIGN), offsets.shape[0])


@triton.jit
def _locate(
    table,
    unit,
    last,
    rows,
    PLANES,
    PIECES,
    PIECE_BYTES,
    TO_ORIGIN: tl.constexpr,
    MANY: tl.constexpr,
):
    """The source address, the destination address and the number within the page of the copy's
    piece `unit`; a `unit` above `last` counts as `last`."""
    unit = tl.minimum(unit, last)
    piece = unit % PIECES
    rest = unit // PIECES
    row = table + (PLANES + rest % rows) * _COLUMNS
    plane = table + rest // rows * _COLUMNS
    start = piece.to(tl.int64) * PIECE_BYTES
    page = tl.load(plane) + tl.load(row + 1) * tl.load(plane + 1) + start
    there = tl.load(row)
    if MANY:
        there += tl.load(table + tl.load(row + 2) + rest // rows)
    else:
        there += tl.load(plane + 2)
    there += start
    if TO_ORIGIN:
        return page, there, piece
    else:
        return there, page, piece


@triton.jit
def _read(address, piece, offsets, WORDS, EVEN: tl.constexpr, WORD, ALIGN):
    pointers = _words(address, offsets, WORD, ALIGN)
    if EVEN:
        return tl.load(pointers)
    else:
        inside = offsets < WORDS - piece * offsets.shape[0]
        return tl.load(pointers, mask=inside)


@triton.jit
def _write(address, value, piece, offsets, WORDS, EVEN: tl.constexpr, WORD, ALIGN):
    pointers = _words(address, offsets, WORD, ALIGN)
    if EVEN:
        tl.store(pointers, value)
    else:
        inside = offsets < WORDS - piece * offsets.shape[0]
        tl.store(pointers, value, mask=inside)


@triton.jit
def _blocks_through_registers(
    table,
    rows,
    PLANES,
    PAGE_WORDS,
    BLOCK: tl.constexpr,
    PIECES,
    WORD: tl.constexpr,
    ALIGN,
    TO_ORIGIN,
    MANY,
):
    EVEN: tl.constexpr = PAGE_WORDS % BLOCK == 0
    BYTES: tl.constexpr = BLOCK * (WORD.primitive_bitwidth // 8)
    first, step = tl.program_id(0), tl.num_programs(0)
    total = rows * PLANES * PIECES
    offsets = tl.arange(0, BLOCK)
    if first < total:
        source, target, piece = _locate(
            table, first, total - 1, rows, PLANES, PIECES, BYTES, TO_ORIGIN, MANY
        )
        value = _read(source, piece, offsets, PAGE_WORDS, EVEN, WORD, ALIGN)
        source, next_target, next_piece = _locate(
            table, first + step, total - 1, rows, PLANES, PIECES, BYTES, TO_ORIGIN, MANY
        )
        for unit in range(first + step, total, step):
            next_value = _read(source, next_piece, offsets, PAGE_WORDS, EVEN, WORD, ALIGN)
            source, later_target, later_piece = _locate(
                table, unit + step, total - 1, rows, PLANES, PIECES, BYTES, TO_ORIGIN, MANY
            )
            _write(target, value, piece, offsets, PAGE_WORDS, EVEN, WORD, ALIGN)
            value, target, piece = next_value, next_target, next_piece
            next_target, next_piece = later_target, later_piece
        _write(target, value, piece, offsets, PAGE_WORDS, EVEN, WORD, ALIGN)


@triton.jit
def _blocks_through_shared_memory(
    table,
    rows,
    PLANES,
    PAGE_WORDS,
    BLOCK: tl.constexpr,
    PIECES,
    WORD: tl.constexpr,
    ALIGN,
    TO_ORIGIN,
    MANY,
    STAGES: tl.constexpr,
):
    EVEN: tl.constexpr = PAGE_WORDS % BLOCK == 0
    BYTES: tl.constexpr = BLOCK * (WORD.primitive_bitwidth // 8)
    total = rows * PLANES * PIECES
    offsets = tl.arange(0, BLOCK)
    # With num_stages the compiler turns the loads of table and data into asynchronous copies,
    # several iterations ahead.
    for unit in tl.range(tl.program_id(0), total, tl.num_programs(0), num_stages=STAGES):
        source, target, piece = _locate(
            table, unit, total - 1, rows, PLANES, PIECES, BYTES, TO_ORIGIN, MANY
        )
        value = _read(source, piece, offsets, PAGE_WORDS, EVEN, WORD, ALIGN)
        _write(target, value, piece, offsets, PAGE_WORDS, EVEN, WORD, ALIGN)


# Without specialisation: otherwise a count of 1 or a multiple of 16 would compile the kernel again
# while a request waits.
@triton.jit(do_not_specialize=["blocks"])
def copy_kernel(
    table,
    blocks,
    PLANES: tl.constexpr,
    PAGE_WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
    PIECES: tl.constexpr,
    WORD: tl.constexpr,
    ALIGN: tl.constexpr,
    TO_ORIGIN: tl.constexpr,
    MANY: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Copy the table's blocks. Sizes are in words, strides in bytes; see the module's docstring."""
    if STAGES > 1:
        _blocks_through_shared_memory(
            table, blocks, PLANES, PAGE_WORDS, BLOCK, PIECES, WORD, ALIGN, TO_ORIGIN, MANY, STAGES
        )
    else:
        _blocks_through_registers(
            table, blocks, PLANES, PAGE_WORDS, BLOCK, PIECES, WORD, ALIGN, TO_ORIGIN, MANY
        )
