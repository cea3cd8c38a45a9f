"""The copy kernel against the copy engine: slots of real segments (VMM) between two GPUs and in
host memory, and others' KV caches.

Both are timed with CUDA events, one copy at a time, in turn. Our kernel moves scattered pages of a
paged KV cache, as the engine does (`CudaCopier`); the copy engine moves the same number of
contiguous bytes. All bytes are compared before any timing."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from vcache_backend.vram_pool import segment
from vcache_backend.vram_pool.copies.copier import Completion
from vcache_backend.vram_pool.copies.cuda_copier import CudaCopier
from vcache_backend.vram_pool.copies.planner import CopyPlan, plan_blocks
from vcache_backend.vram_pool.devices import Device, resolve
from vcache_backend.vram_pool.paged import Int64s, PagedKV
from vcache_backend.vram_pool.segment import MappedSegment
from vcache_backend.vram_pool.slots import SlotView

from .results import Row, row

MIB = 1 << 20
BLOCK_SIZE = 16
CHUNK = 256
PAGE_BYTES = 32 << 10
RUNS = 31


class Case(NamedTuple):
    """A paged KV cache on `reader`, slots in a segment, and a plan that moves `nbytes` between
    them.
    """

    reader: Device
    kv: PagedKV
    mapped: MappedSegment
    copy: CopyPlan
    slots: list[SlotView]
    flat: torch.Tensor

    def scatter(self, copier: CudaCopier) -> Completion:
        return copier.scatter(self.kv, self.copy, self.slots)

    def gather(self, copier: CudaCopier) -> Completion:
        return copier.gather(self.kv, self.copy, self.slots)

    def pull(self) -> None:
        """The copy engine: the same number of bytes out of the segment, contiguous."""
        self.flat.copy_(self.mapped.tensor(0, self.copy.nbytes), non_blocking=True)

    def push(self) -> None:
        """The copy engine, into the segment."""
        self.mapped.tensor(0, self.copy.nbytes).copy_(self.flat, non_blocking=True)


def case(owner: Device, reader: Device, nbytes: int) -> Case:
    """Slots in a new segment of `owner`, one a chunk; on `reader` layers of (2, blocks, 16, 8, 128)
    bf16: pages of 32 KiB for K and for V, blocks in random order."""
    with segment.create(owner, nbytes) as owned:
        mapped = segment.map_segment(owned.info, owned.fd, reader)
    torch.cuda.set_device(reader.ordinal)
    gpu = torch.device("cuda", reader.ordinal or 0)
    layers = 1 if nbytes < 32 * MIB else 16
    chunk_bytes = layers * (CHUNK // BLOCK_SIZE) * 2 * PAGE_BYTES
    chunks = nbytes // chunk_bytes
    blocks = chunks * (CHUNK // BLOCK_SIZE)
    shape = (2, blocks + 7, BLOCK_SIZE, 8, 128)
    caches = [torch.randn(shape, device=gpu).to(torch.bfloat16) for _ in range(layers)]
    kv = PagedKV.describe(caches, BLOCK_SIZE)
    ids = np.random.default_rng(0).permutation(blocks + 7)[:blocks]
    copy = plan_blocks(kv, CHUNK, ids)
    whole = mapped.tensor(0, mapped.nbytes)
    local = mapped.device == reader.name and reader.medium == "cuda"
    starts = range(0, nbytes, chunk_bytes)
    views = [
        SlotView(whole.data_ptr() + start, chunk_bytes, local, whole, start) for start in starts
    ]
    made = Case(reader, kv, mapped, copy, views, torch.empty(nbytes, dtype=torch.uint8, device=gpu))
    _check(made, caches)
    return made


def _check(made: Case, caches: list[torch.Tensor]) -> None:
    """Out to the segment and back into poisoned blocks: every byte must be what it was."""
    copier = CudaCopier(made.reader.ordinal or 0)
    before = [cache.clone() for cache in caches]
    if not made.gather(copier).wait(10):
        raise RuntimeError("the gather did not end")
    touched = torch.from_numpy(np.unique(made.copy.blocks[:, 2])).to(caches[0].device)
    for cache in caches:
        cache[:, touched] = float("nan")
    if not made.scatter(copier).wait(10):
        raise RuntimeError("the scatter did not end")
    for cache, saved in zip(caches, before, strict=True):
        if not torch.equal(cache.view(torch.int16), saved.view(torch.int16)):
            raise RuntimeError("the copy moved wrong bytes; nothing is measured")


class InPlaceCase(NamedTuple):
    """A paged KV cache on `reader`, and blocks of other KV caches, in memory that their owners
    exported. rows, origins: see `Copier.pull`.
    """

    reader: Device
    kv: PagedKV
    mapped: list[MappedSegment]
    rows: Int64s
    origins: Int64s
    flat: torch.Tensor

    @property
    def nbytes(self) -> int:
        return self.flat.numel()

    def move(self, copier: CudaCopier) -> Completion:
        return copier.pull(self.kv, self.rows, self.origins, None, self.mapped)

    def engine(self) -> None:
        """The copy engine: as many bytes out of each owner's memory, contiguous."""
        for part, mapped in zip(self.flat.chunk(len(self.mapped)), self.mapped, strict=True):
            part.copy_(mapped.tensor(0, part.numel()), non_blocking=True)


def in_place_case(owners: list[Device], reader: Device, nbytes: int) -> InPlaceCase:
    """32 layers of (blocks, 2, 16, 8, 128) bf16, pages of 64 KiB, on all sides; blocks in random
    order, `nbytes` of them from each owner.
    """
    layers, page_bytes = 32, 2 * PAGE_BYTES
    each = nbytes // (layers * page_bytes)
    blocks, mapped = each * len(owners), []
    for owner in owners:
        with segment.create(owner, nbytes) as owned:
            mapped.append(segment.map_segment(owned.info, owned.fd, reader))
    torch.cuda.set_device(reader.ordinal)
    device = f"cuda:{reader.ordinal}"
    caches = [
        torch.zeros((blocks + 7, 2, BLOCK_SIZE, 8, 128), dtype=torch.bfloat16, device=device)
        for _ in range(layers)
    ]
    kv = PagedKV.describe(caches, BLOCK_SIZE, axes="block part token head dim")
    order = np.random.default_rng(0)
    for memory in mapped:
        filling = torch.randint(0, 255, (nbytes,), dtype=torch.uint8, device=device)
        memory.tensor(0, nbytes).copy_(filling)
    rows = np.zeros((blocks, 3), dtype=np.int64)
    rows[:, 0] = np.arange(blocks) // each
    rows[:, 1] = np.concatenate([order.permutation(each) for _ in owners]) * page_bytes
    rows[:, 2] = order.permutation(blocks + 7)[:blocks]
    planes = np.arange(layers, dtype=np.int64) * each * page_bytes
    origins = np.stack([memory.tensor(0, nbytes).data_ptr() + planes for memory in mapped])
    flat = torch.empty(len(owners) * nbytes, dtype=torch.uint8, device=device)
    made = InPlaceCase(reader, kv, mapped, rows, origins, flat)
    _check_in_place(made)
    return made


def _check_in_place(made: InPlaceCase) -> None:
    """Every page must be the owner's."""
    for page in made.kv.pages:
        page.zero_()
    if not made.move(CudaCopier(made.reader.ordinal or 0)).wait(10):
        raise RuntimeError("the copy did not end")
    nbytes, pages, page_bytes = made.nbytes // len(made.mapped), made.kv.pages, made.kv.page_bytes
    for number, memory in enumerate(made.mapped):
        there = memory.tensor(0, nbytes).view(len(pages), -1, page_bytes)
        rows = made.rows[made.rows[:, 0] == number]
        ids, places = (
            torch.from_numpy(rows[:, column].copy()).to(made.flat.device) for column in (1, 2)
        )
        for page, source in zip(pages, there, strict=True):
            if not torch.equal(page[places], source[ids // page_bytes]):
                raise RuntimeError("the copy moved wrong bytes; nothing is measured")


def event() -> Any:
    """A CUDA event that keeps the time (torch does not type its constructor)."""
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def engine_seconds(work: Callable[[], object]) -> float:
    """GPU time of one copy-engine copy on the current stream; the stream is kept busy until all of
    it is queued.
    """
    start, end = event(), event()
    torch.cuda._sleep(500_000)  # type: ignore[no-untyped-call]
    start.record()
    work()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def peer_speed(nbytes: int) -> float:
    """GB/s of the copy engine pulling `nbytes` from a segment of GPU 0 to GPU 1, or within a single
    GPU: the median of RUNS.
    """
    owner, reader = resolve("cuda:0"), resolve(f"cuda:{min(1, torch.cuda.device_count() - 1)}")
    torch.cuda.set_device(reader.ordinal)
    with segment.create(owner, nbytes) as owned:
        mapped = segment.map_segment(owned.info, owned.fd, reader)
    target = torch.empty(nbytes, dtype=torch.uint8, device=f"cuda:{reader.ordinal}")
    source = mapped.tensor(0, nbytes)
    pull = partial(target.copy_, source, non_blocking=True)
    return nbytes / statistics.median([engine_seconds(pull) for _ in range(RUNS + 3)][3:]) / 1e9


def copier_seconds(work: Callable[[], Completion]) -> float:
    """GPU time of one copy of ours, from the launch of its kernel until the last bytes are in
    place.
    """
    torch.cuda._sleep(500_000)  # type: ignore[no-untyped-call]
    completion = work()
    if not completion.wait(10):
        raise RuntimeError("a copy did not end within 10 s")
    return completion.seconds or 0.0


def _measured(
    name: str,
    nbytes: int,
    engine: Callable[[], object],
    ours: Callable[[], Completion],
    what: str,
    floor: float,
) -> Row:
    """The row of GB/s, RUNS samples each; the copy engine and ours take turns."""
    works = partial(copier_seconds, ours), partial(engine_seconds, engine)
    for work in works * 3:
        work()
    rates: list[list[float]] = [[], []]
    for _ in range(RUNS):
        for work, samples in zip(works, rates, strict=True):
            samples.append(nbytes / work() / 1e9)
    text = f"{nbytes // MIB} MiB {what}; reference: the copy engine, contiguous"
    return row(name, "GB/s", *rates, what=text, at_least=floor)


def run() -> list[Row]:
    """All copy cases; needs two GPUs with peer access for those between GPUs."""
    first, host = resolve("cuda:0"), resolve("host", "cuda:0")
    copier, rows = CudaCopier(0), list[Row]()

    def add(name: str, made: Case, what: str, floor: float, by: CudaCopier = copier) -> None:
        """A read out of the segment."""
        ours = partial(made.scatter, by)
        rows.append(_measured(name, made.copy.nbytes, made.pull, ours, what, floor))

    def add_store(name: str, made: Case, what: str) -> None:
        ours = partial(made.gather, copier)
        rows.append(_measured(name, made.copy.nbytes, made.push, ours, what, 0.85))

    if torch.cuda.device_count() > 1:
        second = resolve("cuda:1")
        how = f"from a segment on the peer into scattered {PAGE_BYTES >> 10}-KiB pages"
        for mib, floor in ((256, 0.95), (32, 0.95), (4, 0.90)):
            made = case(second, first, mib * MIB)
            add(f"peer_retrieve_{mib}MiB", made, how, floor)
            if mib == 256:
                few = CudaCopier(0, max_ctas=32)
                add("peer_retrieve_256MiB_32cta", made, f"with 32 CTAs {how}", 0.90, few)
        others = [resolve(f"cuda:{number}") for number in range(1, torch.cuda.device_count())]
        for owners in [others[:1], *([others[:3]] if others[2:] else [])]:
            other = in_place_case(owners, first, 256 * MIB)
            ours = partial(other.move, copier)
            peers = f"KV caches on {len(owners)} peers" if owners[1:] else "a KV cache on the peer"
            how = f"out of {peers} into scattered 64-KiB pages of 32 tensors"
            name = "inplace_copy_" + (f"{len(owners)}_owners" if owners[1:] else "256MiB")
            rows.append(_measured(name, other.nbytes, other.engine, ours, how, 0.93))
    add_store("local_store_256MiB", case(first, first, 256 * MIB), "into the own segment")
    locked = case(host, host, 256 * MIB)
    add("host_retrieve_256MiB", locked, "out of locked host memory", 0.85)
    add_store("host_store_256MiB", locked, "into locked host memory")
    return rows
