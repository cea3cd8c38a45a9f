"""The copy kernel against the copy engine, in real segments (VMM) between two GPUs, interleaved in one run.

Both sides are timed with CUDA events around back-to-back repetitions, so that neither pays for the host. The kernel moves
scattered pages of a paged KV cache, the copy engine the same number of contiguous bytes. Bytes are compared before any timing.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import torch

from vcache_backend.metadata_server.messages import SegmentInfo
from vcache_backend.vram_pool import kernels, segment
from vcache_backend.vram_pool.devices import Device, resolve
from vcache_backend.vram_pool.paged import PagedKV
from vcache_backend.vram_pool.planner import CopyPlan, Piece, plan
from vcache_backend.vram_pool.segment import MappedSegment

from .results import Row, row

MIB = 1 << 20
BLOCK_SIZE = 16
CHUNK = 256
PAGE_BYTES = 32 << 10
RUNS = 15


class Case(msgspec.Struct, frozen=True):
    """A paged KV cache on `reader`, a segment on `owner`, and a plan that moves `nbytes` between them."""

    reader: Device
    kv: PagedKV
    mapped: MappedSegment
    copy: CopyPlan
    table: torch.Tensor
    aligned: int
    contiguous: tuple[torch.Tensor, torch.Tensor]

    def kernel(self, to_slot: bool, tuning: kernels.Tuning) -> None:
        kernels.launch(self.kv, self.copy, self.table, to_slot=to_slot, tuning=tuning, aligned=self.aligned)

    def copy_engine(self, to_slot: bool) -> None:
        flat, segment_bytes = self.contiguous
        target, source = (segment_bytes, flat) if to_slot else (flat, segment_bytes)
        target.copy_(source, non_blocking=True)


def case(owner: Device, reader: Device, nbytes: int) -> Case:
    """Layers of (2, blocks, 16, 8, 128) bf16: pages of 32 KiB for K and for V, blocks in random order, one slot a chunk."""
    torch.cuda.set_device(reader.ordinal)
    layers = 1 if nbytes < 32 * MIB else 16
    chunk_bytes = layers * (CHUNK // BLOCK_SIZE) * 2 * PAGE_BYTES
    chunks = nbytes // chunk_bytes
    blocks = chunks * (CHUNK // BLOCK_SIZE)
    shape = (2, blocks + 7, BLOCK_SIZE, 8, 128)
    caches = [torch.randn(shape, device=f"cuda:{reader.ordinal}").to(torch.bfloat16) for _ in range(layers)]
    kv = PagedKV.describe(caches, BLOCK_SIZE)
    with segment.create(owner, nbytes) as owned:
        mapped = segment.map_segment(SegmentInfo(owned.id, owned.device, owned.medium, owned.nbytes), owned.fd, reader)
    ids = np.random.default_rng(0).permutation(blocks + 7)[:blocks]
    slots = (ids[:, None] * BLOCK_SIZE + np.arange(BLOCK_SIZE)).reshape(-1).astype(np.int64)
    copy = plan(kv, CHUNK, slots, [Piece(i, i * CHUNK, 0, CHUNK) for i in range(chunks)])
    addresses = np.array([mapped.address(i * chunk_bytes, chunk_bytes) for i in range(chunks)], dtype=np.int64)
    host = np.empty((kernels.table_rows(kv, copy), 3), dtype=np.int64)
    aligned = kernels.fill_table(kv, copy, addresses, host)
    table = torch.from_numpy(host).to(f"cuda:{reader.ordinal}")
    flat = torch.empty(nbytes, dtype=torch.uint8, device=f"cuda:{reader.ordinal}")
    made = Case(reader, kv, mapped, copy, table, aligned, (flat, mapped.tensor(0, nbytes)))
    _check(made, caches)
    return made


def _check(made: Case, caches: list[torch.Tensor]) -> None:
    """Out to the segment and back into poisoned blocks: every byte must be what it was."""
    before = [cache.clone() for cache in caches]
    tuning = kernels.tuning_for(local=False)
    made.kernel(True, tuning)
    torch.cuda.synchronize()
    touched = torch.from_numpy(np.unique(made.copy.blocks[:, 2])).to(caches[0].device)
    for cache in caches:
        cache[:, touched] = float("nan")
    made.kernel(False, tuning)
    torch.cuda.synchronize()
    for cache, saved in zip(caches, before, strict=True):
        if not torch.equal(cache.view(torch.int16), saved.view(torch.int16)):
            raise RuntimeError("the copy kernel moved wrong bytes; nothing is measured")


def event() -> Any:
    """A CUDA event that keeps the time (torch does not type its constructor)."""
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def hold(cycles: int) -> None:
    """Keep the current stream busy while the host queues what is to be timed."""
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]


def gpu_seconds(work: Callable[[], None], repeat: int) -> float:
    """Seconds of one `work()` on the current stream, from events around `repeat` of them."""
    start, end = event(), event()
    hold(2_000_000)
    start.record()
    for _ in range(repeat):
        work()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3 / repeat


def interleaved(works: list[Callable[[], None]], nbytes: int, runs: int = RUNS) -> list[list[float]]:
    """GB/s of each, `runs` samples, one after the other in turn."""
    repeat = max(2, min(20, (2 << 30) // nbytes))
    for work in works:
        gpu_seconds(work, 2)
    samples: list[list[float]] = [[] for _ in works]
    for _ in range(runs):
        for work, rates in zip(works, samples, strict=True):
            rates.append(nbytes / gpu_seconds(work, repeat) / 1e9)
    return samples


def run() -> list[Row]:
    """All copy cases; needs two GPUs with peer access for those between GPUs."""
    rows = []
    first = resolve("cuda:0")
    if torch.cuda.device_count() > 1:
        second = resolve("cuda:1")
        for nbytes, name, floor in ((256 * MIB, "256MiB", 0.95), (32 * MIB, "32MiB", 0.95), (4 * MIB, "4MiB", 0.90)):
            rows += _peer(case(second, first, nbytes), name, floor)
        rows.append(_both_ways(case(second, first, 256 * MIB), case(first, second, 256 * MIB)))
    rows.append(_local(case(first, first, 256 * MIB)))
    return rows


def _peer(made: Case, name: str, floor: float) -> list[Row]:
    nbytes = made.copy.nbytes
    tuning = kernels.tuning_for(local=False)
    bounded = kernels.tuning_for(local=False, max_ctas=32)
    engine, kernel, small = interleaved(
        [lambda: made.copy_engine(False), lambda: made.kernel(False, tuning), lambda: made.kernel(False, bounded)], nbytes
    )
    what = f"pull {name} from the peer's segment into scattered 32-KiB pages, {{}} CTAs; reference: copy engine, contiguous"
    rows = [row(f"peer_retrieve_{name}", "GB/s", kernel, engine, what=what.format(tuning.ctas), at_least=floor)]
    if name == "256MiB":
        rows.append(row(f"peer_retrieve_{name}_32cta", "GB/s", small, engine, what=what.format(bounded.ctas), at_least=0.90))
    return rows


def _local(made: Case) -> Row:
    nbytes = made.copy.nbytes
    tuning = kernels.tuning_for(local=True)
    engine, kernel = interleaved([lambda: made.copy_engine(True), lambda: made.kernel(True, tuning)], nbytes)
    what = f"gather 256 MiB of scattered 32-KiB pages into the own segment, {tuning.ctas} CTAs; reference: contiguous device copy"
    return row("local_store_256MiB", "GB/s", kernel, engine, what=what, at_least=0.85)


def _both_ways(left: Case, right: Case) -> Row:
    """Each GPU pulls from the other at the same time; GB/s of both together, from the events of the slower one."""
    nbytes = left.copy.nbytes
    tuning = kernels.tuning_for(local=False)

    def together(work: Callable[[Case], None], repeat: int = 8) -> float:
        events = []
        for made in (left, right):
            torch.cuda.set_device(made.reader.ordinal)
            hold(4_000_000)
            events.append((event(), event()))
            events[-1][0].record()
            for _ in range(repeat):
                work(made)
            events[-1][1].record()
        seconds = []
        for made, (start, end) in zip((left, right), events, strict=True):
            torch.cuda.set_device(made.reader.ordinal)
            end.synchronize()
            seconds.append(float(start.elapsed_time(end)) / 1e3)
        return 2 * nbytes * repeat / max(seconds) / 1e9

    works: list[Callable[[Case], None]] = [lambda made: made.copy_engine(False), lambda made: made.kernel(False, tuning)]
    samples = [[together(work) for work in works] for _ in range(RUNS + 1)][1:]
    engine, kernel = ([pair[i] for pair in samples] for i in range(2))
    what = f"both GPUs pull 256 MiB from each other at once, sum; reference: the copy engine doing the same ({statistics.median(engine):.0f})"
    return row("both_ways_256MiB", "GB/s", kernel, engine, what=what, at_least=0.90)
