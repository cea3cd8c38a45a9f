"""The copy kernel against the copy engine: slots of real segments (VMM) between two GPUs and in
host memory, and others' KV caches.

Both are timed with CUDA events, one copy at a time, in turn. Our kernel moves scattered pages of a
paged KV cache, as the engine does (`CudaCopier`); the copy engine moves the same number of
contiguous bytes. All bytes are compared before any timing."""

from __future__ import annotations

import statistics
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from vcache_backend.vram_pool import regions
from vcache_backend.vram_pool.copies.copier import Completion, CopyJob
from vcache_backend.vram_pool.copies.cuda_copier import CudaCopier
from vcache_backend.vram_pool.copies.geometry import PagedKV, placed, slot_rows
from vcache_backend.vram_pool.devices import Device, resolve

from .results import Row, row

MIB = 1 << 20
BLOCK_SIZE = 16
CHUNK = 256
PAGE_BYTES = 32 << 10
RUNS = 31


class Case(NamedTuple):
    """A copy of `nbytes`. into, out: by our kernel, into a paged KV cache and out of it. read,
    write: as many bytes by the copy engine, contiguous, in the same directions."""

    nbytes: int
    into: Callable[[CudaCopier], Completion]
    out: Callable[[CudaCopier], Completion]
    read: Callable[[], object]
    write: Callable[[], object]


def slots(owner: Device, reader: Device, nbytes: int) -> Case:
    """Slots in a new segment of `owner`, one a chunk; on `reader` layers of (2, blocks, 16, 8, 128)
    bf16: pages of 32 KiB for K and for V, blocks in random order."""
    with regions.create(owner, nbytes) as owned:
        whole = regions.map_segment(owned.info, owned.fd, reader)[:nbytes]
    torch.cuda.set_device(reader.ordinal)
    gpu = torch.device("cuda", reader.ordinal or 0)
    layers = 1 if nbytes < 32 * MIB else 16
    chunk_bytes = layers * (CHUNK // BLOCK_SIZE) * 2 * PAGE_BYTES
    blocks = nbytes // chunk_bytes * (CHUNK // BLOCK_SIZE)
    shape = (2, blocks + 7, BLOCK_SIZE, 8, 128)
    caches = [torch.randn(shape, device=gpu).to(torch.bfloat16) for _ in range(layers)]
    kv = PagedKV.describe(caches, BLOCK_SIZE)
    ids = np.random.default_rng(0).permutation(blocks + 7)[:blocks]
    local = owner.name == reader.name and reader.medium == "cuda"
    addresses = whole.data_ptr() + np.arange(0, nbytes, chunk_bytes, dtype=np.int64)
    rows = slot_rows(kv, CHUNK, placed(kv, ids), addresses)
    job = CopyJob(kv, *rows, whole, local=local, host=whole.device.type == "cpu")
    flat = torch.empty(nbytes, dtype=torch.uint8, device=gpu)
    case = Case(
        nbytes,
        lambda copier: copier.copy(job),
        lambda copier: copier.copy(job._replace(to_origin=True)),
        lambda: flat.copy_(whole, non_blocking=True),
        lambda: whole.copy_(flat, non_blocking=True),
    )
    # Out to the segment and back into poisoned blocks: every byte must be what it was.
    copier, before = CudaCopier(reader.ordinal or 0), [cache.clone() for cache in caches]
    _wait(case.out(copier))
    for cache in caches:
        cache[:, torch.from_numpy(ids).to(gpu)] = float("nan")
    _wait(case.into(copier))
    for cache, saved in zip(caches, before, strict=True):
        if not torch.equal(cache.view(torch.int16), saved.view(torch.int16)):
            raise RuntimeError("the copy moved wrong bytes; nothing is measured")
    return case


def in_place(owners: list[Device], reader: Device, nbytes: int) -> Case:
    """KV caches of others, in memory that they exported: 32 layers of (blocks, 2, 16, 8, 128) bf16,
    pages of 64 KiB, on all sides; blocks in random order, `nbytes` of them from each owner.
    """
    layers, page_bytes = 32, 2 * PAGE_BYTES
    each = nbytes // (layers * page_bytes)
    blocks, mapped = each * len(owners), []
    for owner in owners:
        with regions.create(owner, nbytes) as owned:
            mapped.append(regions.map_segment(owned.info, owned.fd, reader))
    torch.cuda.set_device(reader.ordinal)
    device = f"cuda:{reader.ordinal}"
    caches = [
        torch.zeros((blocks + 7, 2, BLOCK_SIZE, 8, 128), dtype=torch.bfloat16, device=device)
        for _ in range(layers)
    ]
    kv = PagedKV.describe(caches, BLOCK_SIZE, axes="block part token head dim")
    order, sources = np.random.default_rng(0), [memory[:nbytes] for memory in mapped]
    rows = np.zeros((blocks, 3), dtype=np.int64)
    rows[:, 0] = np.arange(blocks) // each
    rows[:, 1] = np.concatenate([order.permutation(each) for _ in owners]) * page_bytes
    rows[:, 2] = order.permutation(blocks + 7)[:blocks]
    planes = np.arange(layers, dtype=np.int64) * each * page_bytes
    origins = np.stack([source.data_ptr() + planes for source in sources])
    flats = [torch.empty(nbytes, dtype=torch.uint8, device=device) for _ in owners]

    def pull(copier: CudaCopier) -> Completion:
        return copier.copy(CopyJob(kv, rows, origins, mapped))

    def read() -> None:
        for flat, source in zip(flats, sources, strict=True):
            flat.copy_(source, non_blocking=True)

    # Every page must be the owner's.
    for source in sources:
        source.copy_(torch.randint(0, 255, (nbytes,), dtype=torch.uint8, device=device))
    _wait(pull(CudaCopier(reader.ordinal or 0)))
    for number, source in enumerate(sources):
        _, ids, places = torch.from_numpy(rows[rows[:, 0] == number]).to(device).T
        pages = source.view(layers, -1, page_bytes)
        for page, theirs in zip(kv.pages, pages, strict=True):
            if not torch.equal(page[places], theirs[ids // page_bytes]):
                raise RuntimeError("the copy moved wrong bytes; nothing is measured")
    return Case(len(owners) * nbytes, pull, pull, read, read)


def _wait(completion: Completion) -> Completion:
    if not completion.wait(10):
        raise RuntimeError("a copy did not end within 10 s")
    return completion


def engine_seconds(work: Callable[[], object]) -> float:
    """GPU time of one copy-engine copy on the current stream; the stream is kept busy until all of
    it is queued.
    """
    event = partial(torch.cuda.Event, enable_timing=True)
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
    with regions.create(owner, nbytes) as owned:
        whole = regions.map_segment(owned.info, owned.fd, reader)
    target = torch.empty(nbytes, dtype=torch.uint8, device=f"cuda:{reader.ordinal}")
    source = whole[:nbytes]
    pull = partial(target.copy_, source, non_blocking=True)
    return nbytes / statistics.median([engine_seconds(pull) for _ in range(RUNS + 3)][3:]) / 1e9


def copier_seconds(work: Callable[[], Completion]) -> float:
    """GPU time of one copy of ours, from the launch of its kernel until the last bytes are in
    place.
    """
    torch.cuda._sleep(500_000)  # type: ignore[no-untyped-call]
    return _wait(work()).seconds or 0.0


def later_kernels(copier: CudaCopier, case: Case) -> Row:
    """How fast the GPU begins kernels after 16 copies. Directly launched ones on two streams would
    slow down all later ones, until the GPU runs another process: see `KernelGraph`. The current
    stream launches as many."""
    another = "import torch; torch.ones(1, device='cuda').cpu()"
    graph, number = torch.cuda.CUDAGraph(), torch.ones(64, device="cuda")
    with torch.cuda.graph(graph):
        for _ in range(400):
            number.add_(1)

    def seconds() -> list[float]:
        return [engine_seconds(graph.replay) for _ in range(RUNS)]

    subprocess.run([sys.executable, "-c", another], check=True, timeout=60)
    seconds()
    before = seconds()
    for _ in range(16):
        number.add_(1)
        _wait(case.into(copier))
    what = "a graph of 400 small kernels, after 16 copies; reference: before them"
    micros = [[1e6 * each for each in samples] for samples in (seconds(), before)]
    return row("later_kernels", "us", *micros, what=what, at_most=1.05)


def run() -> list[Row]:
    """All copy cases; needs two GPUs with peer access for those between GPUs."""
    first, host = resolve("cuda:0"), resolve("host", "cuda:0")
    copier, rows = CudaCopier(0), list[Row]()

    def add(name: str, case: Case, how: str, floor: float, store: bool = False) -> None:
        """The row of GB/s, RUNS samples each; the copy engine and ours take turns."""
        ours, engine = (case.out, case.write) if store else (case.into, case.read)
        works = partial(copier_seconds, partial(ours, copier)), partial(engine_seconds, engine)
        for work in works * 3:
            work()
        rates: list[list[float]] = [[], []]
        for _ in range(RUNS):
            for work, samples in zip(works, rates, strict=True):
                samples.append(case.nbytes / work() / 1e9)
        what = f"{case.nbytes // MIB} MiB {how}; reference: the copy engine, contiguous"
        rows.append(row(name, "GB/s", *rates, what=what, at_least=floor))

    peers = [resolve(f"cuda:{number}") for number in range(1, torch.cuda.device_count())]
    how = f"from a segment on the peer into scattered {PAGE_BYTES >> 10}-KiB pages"
    for mib, floor in ((256, 0.95), (4, 0.90)) if peers else ():
        add(f"peer_retrieve_{mib}MiB", slots(peers[0], first, mib * MIB), how, floor)
    how = "into scattered 64-KiB pages of 32 tensors"
    if peers:
        case = in_place(peers[:1], first, 256 * MIB)
        add("inplace_copy_256MiB", case, f"out of a KV cache on the peer {how}", 0.93)
    if len(peers) > 2:
        case = in_place(peers[:3], first, 256 * MIB)
        add("inplace_copy_3_owners", case, f"out of KV caches on 3 peers {how}", 0.93)
    own = slots(first, first, 256 * MIB)
    add("local_store_256MiB", own, "into the own segment", 0.85, store=True)
    rows.append(later_kernels(copier, own))
    locked = slots(host, host, 256 * MIB)
    add("host_retrieve_256MiB", locked, "out of locked host memory", 0.85)
    add("host_store_256MiB", locked, "into locked host memory", 0.85, store=True)
    return rows
