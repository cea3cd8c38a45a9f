"""Bytes through a slot of the pool and back: what comes wrong is seen and named, and the KV cache
is as before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from vllm_objects import BLOCK, BLOCKS

from vcache_backend.integration.round_trip import round_trip
from vcache_backend.vram_pool.copies.copier import Finished, HostCopier
from vcache_backend.vram_pool.copies.planner import CopyPlan
from vcache_backend.vram_pool.paged import PagedKV
from vcache_backend.vram_pool.slots import SlotView

CHUNK = 16


def layouts() -> dict[str, tuple[list[Tensor], dict[str, Any]]]:
    shape = (BLOCKS, BLOCK, 2, 8)
    outer = torch.zeros((BLOCKS, 3, *shape[1:]), dtype=torch.bfloat16)
    return {
        "K and V packed, tokens first": (list(torch.zeros((3, *shape)).bfloat16()), {}),
        "K and V apart": ([torch.zeros((2, *shape), dtype=torch.float16) for _ in range(2)], {}),
        "one latent row": ([torch.zeros((BLOCKS, BLOCK, 36), dtype=torch.uint8)], {}),
        "layers side by side": ([outer[:, layer] for layer in range(3)], {}),
        "fewer blocks than a chunk": (
            [torch.zeros((2, *shape[1:])) for _ in range(2)],
            {"axes": "block token head dim"},
        ),
    }


def described(name: str) -> PagedKV:
    tensors, options = layouts()[name]
    generator = torch.Generator().manual_seed(3)
    kv = PagedKV.describe(tensors, BLOCK, **options)
    for page in kv.pages:
        page.copy_(torch.randint(256, page.shape, dtype=torch.uint8, generator=generator))
    return kv


def contents(kv: PagedKV) -> list[Tensor]:
    return [page.clone() for page in kv.pages]


def slot(kv: PagedKV) -> SlotView:
    return SlotView.over(torch.full((kv.chunk_bytes(CHUNK),), 0x5A, dtype=torch.uint8), local=True)


@pytest.mark.parametrize("name", layouts())
def test_bytes_come_back_and_the_kv_cache_is_as_before(name: str) -> None:
    kv = described(name)
    before = contents(kv)
    assert round_trip(kv, HostCopier(), slot(kv), CHUNK) is None
    assert all(torch.equal(one, other) for one, other in zip(before, contents(kv), strict=True))


def faulty(after: str, then: Callable[..., None]) -> HostCopier:
    """A copier that does `then` after each copy of one direction, "gather" or "scatter"."""
    copier = HostCopier()
    whole = getattr(copier, after)

    def copied(*given: Any) -> Finished:
        done: Finished = whole(*given)
        then(*given)
        return done

    setattr(copier, after, copied)
    return copier


def flip_in_slot(kv: PagedKV, plan: CopyPlan, slots: Sequence[SlotView]) -> None:
    """Byte 5 of layer 1's second virtual block: block 2, as the last of the four goes first."""
    blocks = CHUNK // BLOCK
    slots[0].tensor[((1 * blocks + 1) * kv.parts) * kv.page_bytes + 5] ^= 1


def flip_in_cache(kv: PagedKV, plan: CopyPlan, slots: Sequence[SlotView]) -> None:
    kv.pages[2 * kv.parts][3, 7] ^= 0x80


def overrun(kv: PagedKV, plan: CopyPlan, slots: Sequence[SlotView]) -> None:
    kv.pages[0][CHUNK // BLOCK, 0] ^= 1


def fail(kv: PagedKV, plan: CopyPlan, slots: Sequence[SlotView]) -> None:
    raise RuntimeError("a launch that failed")


@pytest.mark.parametrize(
    ("after", "then", "said"),
    [
        ("gather", flip_in_slot, "gathered wrongly into the pool: layer 1, block 2, byte 5 is"),
        ("scatter", flip_in_cache, "scattered wrongly from the pool: layer 2, block 3, byte 7 is"),
        ("scatter", overrun, "scattered wrongly from the pool: layer 0, block 4, byte 0 is"),
        ("gather", fail, "failed: a launch that failed"),
    ],
)
def test_a_wrong_copy_is_seen_and_undone(after: str, then: Callable[..., None], said: str) -> None:
    kv = described("K and V packed, tokens first")
    before = contents(kv)
    answer = round_trip(kv, faulty(after, then), slot(kv), CHUNK)
    assert said in answer
    for one, other in zip(before, contents(kv), strict=True):
        assert torch.equal(one[:-1], other[:-1])


class Hung(Finished):
    def wait(self, timeout_s: float) -> bool:
        return False


def test_a_copy_that_does_not_end_is_given_up() -> None:
    class Stuck(HostCopier):
        def gather(self, kv: PagedKV, plan: CopyPlan, slots: Sequence[SlotView]) -> Finished:
            return Hung(0.0)

    kv = described("one latent row")
    before = contents(kv)
    assert round_trip(kv, Stuck(), slot(kv), CHUNK) == "gathering a chunk took longer than 10 s"
    assert torch.equal(before[0], contents(kv)[0])


@pytest.mark.gpu
def test_bytes_come_back_on_a_gpu() -> None:
    from vcache_backend.vram_pool.copies.cuda_copier import CudaCopier

    kv = PagedKV.describe(
        [torch.randn((BLOCKS, BLOCK, 2, 16), device="cuda:0").bfloat16() for _ in range(3)], BLOCK
    )
    before = contents(kv)
    there = SlotView.over(
        torch.zeros(kv.chunk_bytes(CHUNK), dtype=torch.uint8, device="cuda:0"), local=True
    )
    assert round_trip(kv, CudaCopier(0), there, CHUNK) is None
    assert all(torch.equal(one, other) for one, other in zip(before, contents(kv), strict=True))
