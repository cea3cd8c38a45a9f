"""What every copier promises: byte order, sizes, completions. The order of copies and other work on
a GPU: test_cuda_copier."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from vcache_backend.vram_pool.copies.copier import Copier, CopyJob, HostCopier
from vcache_backend.vram_pool.copies.cuda_copier import CudaCopier
from vcache_backend.vram_pool.copies.geometry import Int64s, PagedKV, placed, slot_rows

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


def rows_of(
    kv: PagedKV, ids: list[int], slots: list[Tensor], holes: bool = False
) -> tuple[Int64s, Int64s]:
    addresses = np.array([slot.data_ptr() for slot in slots])
    return slot_rows(kv, CHUNK, placed(kv, np.array(ids), holes=holes), addresses)


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
    slots = slots_of(kv, 2, device)
    assert copier.copy(CopyJob(kv, *rows_of(kv, ids, slots), slots, to_origin=True)).wait(10)
    by_kind = [caches[layer] for layer in (0, 2, 1, 3, 4)]
    pages = [[raw(cache[block]) for cache in by_kind for block in two] for two in ((7, 3), (4, 5))]
    expected = list(map(torch.cat, pages))
    assert all(torch.equal(slot, right) for slot, right in zip(slots, expected, strict=True))

    mine = layers(device, 2)
    before, here = [cache.clone() for cache in mine], PagedKV.describe(mine, BLOCK)
    chosen = rows_of(here, [-1, 9, 0, 2], slots, holes=True)
    assert copier.copy(CopyJob(here, *chosen, slots)).wait(10)
    # The other KV cache's blocks lie elsewhere in each kind of layers.
    rows = [[0, 5 * BLOCK * 656, 8, 5 * BLOCK * 132], [1, 7 * BLOCK * 656, 6, 7 * BLOCK * 132]]
    third = layers(device, 3)
    both = by_kind, [third[layer] for layer in (0, 2, 1, 3, 4)]
    origins = np.array([[cache.data_ptr() for cache in owner] for owner in both])
    assert copier.copy(CopyJob(here, np.array(rows), origins)).wait(10)
    for cache, old, source, other in zip(mine, before, caches, third, strict=True):
        for block, there in ((9, 3), (0, 4), (2, 5), (8, 5)):
            old[block] = source[there]
        old[6] = other[7]
        assert torch.equal(cache, old)


# ---- completions


@COPIERS
def test_a_completion_tells_when_and_how_long(device: str, make: Make) -> None:
    kv, copier = PagedKV.describe(tensors(device), BLOCK), make()
    slots = slots_of(kv, 2, device)
    completion = copier.copy(CopyJob(kv, *rows_of(kv, [7, 3, 4, 5], slots), slots, to_origin=True))
    assert completion.wait(10)
    assert completion.done()
    assert completion.seconds is not None
    assert 0 < completion.seconds < 10
    copier.drain()
    copier.drain()
