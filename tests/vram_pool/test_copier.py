"""What a copier promises: byte order, sizes, completions and, on a GPU, the order of copies and
other work.
"""

# torch.cuda's streams have no types.
# mypy: allow-untyped-calls

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from vcache_backend.errors import LayoutError, VCacheError
from vcache_backend.vram_pool.copies.copier import Copier, HostCopier
from vcache_backend.vram_pool.copies.cuda_copier import CudaCompletion, CudaCopier
from vcache_backend.vram_pool.copies.geometry import PagedKV
from vcache_backend.vram_pool.copies.plan import CopyPlan, plan_blocks
from vcache_backend.vram_pool.regions import SlotView

POISON = 0xA5
Make = Callable[[], Copier]
BLOCK, CHUNK = 4, 8


def tensors(device: str = "cpu") -> list[Tensor]:
    """Three layers of twelve blocks."""
    generator = torch.Generator().manual_seed(3)
    noise = [torch.randint(-99, 99, (2, 12, BLOCK, 2, 20), generator=generator) for _ in range(3)]
    return [layer.half().to(device) for layer in noise]


def slots_of(kv: PagedKV, count: int, device: str = "cpu", chunk_size: int = CHUNK) -> list[Tensor]:
    more = {"dtype": torch.uint8, "device": device}
    return [torch.full((kv.chunk_bytes(chunk_size),), POISON, **more) for _ in range(count)]


def views(slots: list[Tensor], local: bool = True) -> list[SlotView]:
    return [SlotView.over(slot, local=local) for slot in slots]


def all_are(tensors: list[Tensor], value: int) -> bool:
    return all(bool((tensor == value).all()) for tensor in tensors)


def fill(tensors: list[Tensor], value: int) -> None:
    for tensor in tensors:
        tensor.fill_(value)


def raw(page: Tensor) -> Tensor:
    return page.contiguous().view(torch.uint8).reshape(-1)


# ---- bytes


COPIERS = pytest.mark.parametrize(
    ("device", "make"),
    [("cpu", HostCopier), pytest.param("cuda", lambda: CudaCopier(0), marks=pytest.mark.gpu)],
    ids=["host", "cuda"],
)


def layers(device: str, seed: int) -> list[Tensor]:
    """Latents and indexer's keys in turn, as DeepSeek V3.2 has them, and one more key."""
    random_ = torch.Generator().manual_seed(seed)
    shapes = [(12, 1, BLOCK, size) for size in (656, 132, 656, 132, 132)]
    noise = [torch.randint(256, shape, generator=random_) for shape in shapes]
    return [layer.to(torch.uint8).to(device) for layer in noise]


@COPIERS
def test_layers_with_pages_of_several_sizes_move_together(device: str, make: Make) -> None:
    """A chunk is the layers of the first size, then those of the second, out of a slot and out of
    another KV cache, both at any block."""
    caches, copier = layers(device, 1), make()
    kv, ids = PagedKV.describe(caches, BLOCK), [7, 3, 4, 5]
    copier.prepare(kv)
    copy, slots = plan_blocks(kv, CHUNK, np.array(ids)), slots_of(kv, 2, device)
    assert copier.gather(kv, copy, views(slots)).wait(10)
    by_kind = [caches[layer] for layer in (0, 2, 1, 3, 4)]
    pages = [[raw(cache[block]) for cache in by_kind for block in two] for two in ((7, 3), (4, 5))]
    expected = list(map(torch.cat, pages))
    assert all(torch.equal(slot, right) for slot, right in zip(slots, expected, strict=True))
    assert copy.nbytes == 2 * len(expected[0])

    mine = layers(device, 2)
    before, here = [cache.clone() for cache in mine], PagedKV.describe(mine, BLOCK)
    chosen = plan_blocks(here, CHUNK, np.array([1, 9, 0, 2]), 1)
    assert copier.scatter(here, chosen, views(slots)).wait(10)
    # The other KV cache's blocks lie elsewhere in each kind of layers.
    rows = [[0, 5 * BLOCK * 656, 8, 5 * BLOCK * 132], [1, 7 * BLOCK * 656, 6, 7 * BLOCK * 132]]
    third = layers(device, 3)
    both = by_kind, [third[layer] for layer in (0, 2, 1, 3, 4)]
    origins = np.array([[cache.data_ptr() for cache in owner] for owner in both])
    assert copier.pull(here, np.array(rows), origins).wait(10)
    for cache, old, source, other in zip(mine, before, caches, third, strict=True):
        for block, there in ((9, 3), (0, 4), (2, 5), (8, 5)):
            old[block] = source[there]
        old[6] = other[7]
        assert torch.equal(cache, old)
    with pytest.raises(LayoutError, match="rows of 4 and origins of 5 planes are needed"):
        copier.pull(here, np.array(rows)[:, :3], origins)


# ---- what is refused


def request(device: str = "cpu") -> tuple[PagedKV, CopyPlan, list[Tensor]]:
    kv = PagedKV.describe(tensors(device), BLOCK)
    copy = plan_blocks(kv, CHUNK, np.array([7, 3, 4, 5]))
    return kv, copy, slots_of(kv, 2, device)


@COPIERS
def test_a_slot_smaller_than_a_chunk_is_refused_and_nothing_moves(device: str, make: Make) -> None:
    kv, copy, slots = request(device)
    short = [slots[0], slots[1][:-1]]
    with pytest.raises(LayoutError, match=r"a chunk needs 3,840 B but slot 1 has 3,839 B"):
        make().gather(kv, copy, views(short))
    assert bool((slots[0] == POISON).all())


@COPIERS
@pytest.mark.parametrize(
    ("row", "why"),
    [
        ((1, 0, 3), "origins 0 to 1, but there are 1"),
        ((0, 0, 12), "blocks 0 to 12, but there are 12"),
        ((-1, 0, 3), "origins -1"),
    ],
)
def test_a_pull_to_no_block_or_from_no_origin_is_refused(
    device: str, make: Make, row: tuple[int, int, int], why: str
) -> None:
    kv, _, _ = request(device)
    before = [page.clone() for page in kv.pages]
    with pytest.raises(LayoutError, match=why):
        make().pull(kv, np.array([(0, 0, 0), row]), kv.planes[None, :, 0])
    said = r"origins of 6 planes are needed; given are \(2, 3\) and \(1, 5\)"
    with pytest.raises(LayoutError, match=said):
        make().pull(kv, np.array([(0, 0, 0), (0, 0, 1)]), kv.planes[None, :5, 0])
    assert all(torch.equal(page, was) for page, was in zip(kv.pages, before, strict=True))


# ---- completions


@COPIERS
def test_a_completion_tells_when_and_how_long(device: str, make: Make) -> None:
    kv, copy, slots = request(device)
    copier = make()
    completion = copier.gather(kv, copy, views(slots))
    assert completion.wait(10)
    assert completion.done()
    assert completion.seconds is not None
    assert 0 < completion.seconds < 10
    copier.drain()
    copier.drain()


class FakeEvent:
    """A CUDA event at our seam: not reached until told, or broken."""

    def __init__(self) -> None:
        self.reached = False
        self.error: RuntimeError | None = None

    def query(self) -> bool:
        if self.error:
            raise self.error
        return self.reached

    def elapsed_time(self, end: FakeEvent) -> float:
        return 1.5


class Held:
    """Something a copy uses."""


def under_way(held: object) -> tuple[CudaCompletion, FakeEvent]:
    end = FakeEvent()
    return CudaCompletion(torch.device("cuda", 0), FakeEvent(), end, held), end  # type: ignore[arg-type]


def test_a_wait_ends_at_its_deadline() -> None:
    completion, _ = under_way(Held())
    for timeout in (0.0, 0.02):
        assert not completion.wait(timeout)
    assert completion.seconds is None


def test_what_a_copy_uses_is_held_until_it_is_over() -> None:
    held = Held()
    alive = weakref.ref(held)
    completion, end = under_way(held)
    del held
    gc.collect()
    assert not completion.done()
    assert alive() is not None
    end.reached = True
    assert completion.done()
    assert alive() is None


def test_a_device_that_failed_is_one_of_our_errors() -> None:
    completion, end = under_way(Held())
    end.error = RuntimeError("an illegal memory access was encountered")
    with pytest.raises(VCacheError, match="copy on cuda:0: an illegal memory access"):
        completion.wait(1)


# ---- on a GPU: equality, and order with other work

LONG = 200_000_000
"""Cycles for which `torch.cuda._sleep` keeps a stream busy: about a tenth of a second."""


def large(layers: int = 8) -> tuple[list[Tensor], PagedKV, CopyPlan, list[Tensor]]:
    """64 MiB in 32-KiB pages on the current GPU, large enough that a copy takes a while."""
    caches = [
        torch.randint(0, 255, (256, 16, 8, 256), dtype=torch.uint8, device="cuda")
        for _ in range(layers)
    ]
    kv = PagedKV.describe(caches, 16)
    copy = plan_blocks(kv, 256, np.random.default_rng(0).permutation(256))
    return caches, kv, copy, slots_of(kv, 16, "cuda", 256)


@pytest.mark.gpu
def test_what_a_pull_reads_is_held_until_it_is_over() -> None:
    _, kv, _, _ = large(1)
    _, other, _, _ = large(1)
    held = Held()
    alive = weakref.ref(held)
    rows = np.stack(
        [np.zeros(256, dtype=np.int64), np.arange(256) * other.planes[0, 1], np.arange(256)], axis=1
    )
    copier = CudaCopier(0)
    copier.prepare(kv)
    # The collection of garbage takes longer than `LONG`.
    torch.cuda._sleep(20 * LONG)
    pulled = copier.pull(kv, rows, other.planes[None, :, 0], None, held)
    del held
    gc.collect()
    assert not pulled.done()
    assert alive() is not None
    assert pulled.wait(10)
    assert alive() is None
    assert torch.equal(kv.pages[0], other.pages[0])


@pytest.mark.gpu
def test_blocks_overwritten_right_after_a_store_do_not_reach_the_slot() -> None:
    caches, kv, copy, slots = large()
    fill(caches, 7)
    copier = CudaCopier(0, max_ctas=1)
    completion = copier.gather(kv, copy, [view._replace(local=False) for view in views(slots)])
    fill(caches, 8)
    assert completion.wait(10)
    assert all_are(slots, 7)


@pytest.mark.gpu
def test_a_retrieve_leaves_earlier_readers_the_old_bytes_and_gives_later_ones_the_new() -> None:
    caches, kv, copy, slots = large()
    for cache, slot in zip(caches * 2, slots, strict=True):
        cache.fill_(7)
        slot.fill_(8)
    torch.cuda._sleep(LONG)
    earlier = [cache.clone() for cache in caches]
    completion = CudaCopier(0).scatter(kv, copy, views(slots))
    later = [cache.clone() for cache in caches]
    assert completion.wait(10)
    assert all_are(earlier, 7)
    assert all_are(later, 8)


@pytest.mark.gpu
def test_a_new_table_does_not_lie_where_queued_work_still_writes() -> None:
    """torch hands a freed tensor's memory out again at once, while the work that uses it is still
    queued. A copy's table is written without waiting for that work."""
    caches, kv, copy, slots = large()
    fill(caches, 7)
    copier = CudaCopier(0)
    copier.prepare(kv)
    torch.cuda.empty_cache()
    torch.cuda.synchronize()
    freed = [torch.empty(1024 * 24, dtype=torch.uint8, device="cuda") for _ in range(64)]
    torch.cuda._sleep(LONG)
    for tensor in freed:
        tensor.fill_(0)
    del freed, tensor
    completion = copier.gather(kv, copy, views(slots))
    assert not completion.done()
    assert completion.wait(10)
    assert all_are(slots, 7)


@pytest.mark.gpu
def test_the_order_holds_for_a_stream_of_the_callers() -> None:
    caches, kv, copy, slots = large()
    torch.cuda.synchronize()
    mine = torch.cuda.Stream()
    with torch.cuda.stream(mine):
        torch.cuda._sleep(LONG)
        fill(caches, 9)
        completion = CudaCopier(0).gather(kv, copy, views(slots))
        fill(caches, 1)
    assert completion.wait(10)
    assert all_are(slots, 9)


@pytest.mark.gpu
def test_tables_of_copies_that_wait_in_line_are_not_overwritten() -> None:
    caches, kv, _, _ = large(1)
    copier = CudaCopier(0)
    torch.cuda._sleep(LONG)
    stored = []
    for block in range(64):
        copy = plan_blocks(kv, 16, np.array([block]))
        slots = slots_of(kv, 1, "cuda", 16)
        stored.append((copier.gather(kv, copy, views(slots)), slots[0]))
    for block, (completion, slot) in enumerate(stored):
        assert completion.wait(10)
        assert torch.equal(slot, caches[0][block].reshape(-1))


@pytest.mark.gpu(count=2)
def test_slots_on_another_gpu_are_read_and_written_from_a_thread_on_the_first() -> None:
    with torch.cuda.device(1):
        caches, kv, copy, _ = large()
    slots = [slot.to("cuda:0") for slot in slots_of(kv, 16, "cuda:1", 256)]
    # A plain copy makes torch open peer access both ways.
    torch.empty(1, device="cuda:0").copy_(torch.empty(1, device="cuda:1"))
    torch.empty(1, device="cuda:1").copy_(torch.empty(1, device="cuda:0"))
    assert torch.cuda.current_device() == 0
    copier = CudaCopier(1)
    assert copier.gather(kv, copy, views(slots, local=False)).wait(10)
    before = [cache.clone() for cache in caches]
    for cache in caches:
        cache.zero_()
    torch.cuda.synchronize(1)
    assert copier.scatter(kv, copy, views(slots, local=False)).wait(10)
    assert all(torch.equal(cache, right) for cache, right in zip(caches, before, strict=True))
