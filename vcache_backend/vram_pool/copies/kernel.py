"""A Triton kernel that copies all layers and all chunks of a request in one launch. Reference:
`copier.copy_pages`.

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

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from vcache_backend.vram_pool import cuda_driver
from vcache_backend.vram_pool.copies.geometry import Int64s, PagedKV, alignment, of_kinds
from vcache_backend.vram_pool.copies.kernel_graph import KernelGraph
from vcache_backend.vram_pool.cuda_driver import Driver

_COLUMNS = tl.constexpr(3)


def thread_blocks(*, local: bool, host: bool = False, most: int = 0) -> int:
    """How many thread blocks a copy gets. local: all pages are on the KV cache's GPU. host: some
    are in host memory. most: a limit, unless 0.

    Found by sweeps on H200s. Only many reach the bandwidth of the own memory. 64 fill NVLink at
    every size. 16 keep a PCIe link busy, and leave the other SMs to the model: 8, 32 and 64 are as
    fast, and vLLM's own kernel for host memory uses 12."""
    chosen = 264 if local else 16 if host else 64
    return min(chosen, most) if most else chosen


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


class TablePart(NamedTuple):
    """A kind's part of a copy's table, for the launch that copies this kind of layers."""

    kv: PagedKV
    first: int
    """The part's first row."""
    blocks: int
    many: bool
    """Whether the table has several origins."""
    aligned: int
    """The alignment of the origins' pages, up to 16 bytes."""


def table_rows(kv: PagedKV, blocks: int, origins: int) -> int:
    """The rows of a copy's table, for all kinds of layers."""
    return sum(_part_rows(kind, blocks, origins) for kind in kv.kinds)


def _part_rows(kv: PagedKV, blocks: int, origins: int) -> int:
    planes = len(kv.pages)
    rows = planes + blocks + (-(-origins * planes // 3) if origins > 1 else 0)
    # The kernel is compiled for tables aligned to 16 bytes, and a row has 24 bytes.
    return rows + rows % 2


def fill_table(kv: PagedKV, rows: Int64s, origins: Int64s, table: Int64s) -> list[TablePart]:
    """Write the kernel's table for the copy of `rows`: see `CopyJob`. table: (rows, 3), at
    least `table_rows` of them."""
    parts, first = list[TablePart](), 0
    for kind, its_rows, bases in of_kinds(kv, rows, origins):
        planes = len(kind.pages)
        part, end = table[first:], planes + len(rows)
        part[:planes, :2] = kind.planes
        part[:planes, 2] = bases[0]
        part[planes:end, :2] = its_rows[:, 1:]
        if len(origins) > 1:
            part[planes:end, 2] = its_rows[:, 0] * planes + end * 3
            part.reshape(-1)[end * 3 : end * 3 + bases.size] = bases.reshape(-1)
        aligned = alignment(
            int(np.bitwise_or.reduce(its_rows[:, 1], initial=0)),
            int(np.bitwise_or.reduce(bases, axis=None)),
        )
        parts.append(TablePart(kind, first, len(rows), len(origins) > 1, aligned))
        first += _part_rows(kind, len(rows), len(origins))
    return parts


def launch(
    part: TablePart,
    table: Tensor,
    *,
    to_origin: bool,
    ctas: int,
    block_bytes: int = 16 << 10,
    stream: int | None = None,
) -> None:
    """Launch the copy of one part on the current device, which must hold the KV cache. Returns at
    once. The first use compiles the kernel.

    table: (rows, 3) int64, filled by `fill_table`, contiguous, on the current device; the table
    must live until the kernel has run. to_origin: copy out of the KV cache (gather), otherwise into
    the KV cache. ctas: see `thread_blocks`. block_bytes: a thread block moves at most so many bytes
    at a time. stream: a stream's handle; None: the current stream. Raises SegmentError."""
    kv, planes = part.kv, len(part.kv.pages)
    aligned = alignment(kv.aligned, part.aligned)
    if stream is None:
        stream = torch.cuda.current_stream().cuda_stream if kv.device.type == "cuda" else 0
    what = kv.page_bytes, planes, aligned, block_bytes, to_origin, part.many
    kernel = _compiled(*what, kv.device, stream)
    pieces = part.blocks * planes * kernel.shape["PIECES"]
    grid, own = max(1, min(ctas, pieces)), table[part.first :]
    if kernel.graph is None:  # Triton's interpreter
        copy_kernel[grid, 1, 1](own, part.blocks, **kernel.shape)
    else:
        kernel.graph.launch(own.data_ptr(), part.blocks, thread_blocks=grid)


class _Kernel(NamedTuple):
    """The kernel for a KV cache."""

    shape: dict[str, Any]
    """The compile-time arguments."""
    graph: KernelGraph | None
    """None under Triton's interpreter."""


@lru_cache
def _compiled(
    page_bytes: int,
    planes: int,
    aligned: int,
    block_bytes: int,
    to_origin: bool,
    many: bool,
    device: torch.device,
    stream: int,
) -> _Kernel:
    """The kernel, compiled, for launches on one stream. Cached, since at each launch
    `copy_kernel[grid]` would bind and specialise the arguments and look up the kernel.

    Words are as wide, up to 8 bytes, as all sizes and addresses allow."""
    word, piece = min(8, aligned), _piece(page_bytes, block_bytes)
    shape = {
        "PLANES": planes,
        "PAGE_WORDS": page_bytes // word,
        "BLOCK": piece // word,
        "PIECES": triton.cdiv(page_bytes, piece),
        "WORD": {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64}[word],
        "ALIGN": aligned,
        "TO_ORIGIN": to_origin,
        "MANY": many,
        # Three pieces are on their way into shared memory, 48 KiB in each thread block.
        "STAGES": 4,
        # A thread moves at least 16 bytes; with more threads, several would move the same bytes.
        "num_warps": max(1, min(4, piece // (32 * 16))),
    }
    if not isinstance(copy_kernel, triton.JITFunction):
        return _Kernel(shape, None)
    with torch.cuda.device(device):
        compiled = copy_kernel.warmup(torch.int64, 1, grid=(1,), **shape)
        table = torch.empty((1, 3), dtype=torch.int64, device=device)
        constants = [shape[name] for name in copy_kernel.arg_names[2:]]

        def capture(stream: int) -> None:
            compiled[1, 1, 1](table, 1, *constants, stream=stream)

        return _Kernel(shape, KernelGraph(cuda_driver.load(), capture, stream))


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
    EVEN: tl.constexpr = PAGE_WORDS % BLOCK == 0
    BYTES: tl.constexpr = BLOCK * (WORD.primitive_bitwidth // 8)
    total = blocks * PLANES * PIECES
    offsets = tl.arange(0, BLOCK)
    first, step = tl.program_id(0), tl.num_programs(0)
    # Through shared memory: with num_stages the compiler turns the loads of table and data into
    # asynchronous copies, several iterations ahead.
    for unit in tl.range(first, total, step, num_stages=STAGES):
        source, target, piece = _locate(
            table, unit, total - 1, blocks, PLANES, PIECES, BYTES, TO_ORIGIN, MANY
        )
        value = _read(source, piece, offsets, PAGE_WORDS, EVEN, WORD, ALIGN)
        _write(target, value, piece, offsets, PAGE_WORDS, EVEN, WORD, ALIGN)
