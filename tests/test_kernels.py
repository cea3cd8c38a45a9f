"""The kernel equals its reference: on the CPU under Triton's interpreter, on a GPU compiled. Destinations are poisoned first."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import triton
from torch import Tensor
from triton.runtime import interpreter

from vcache_backend.errors import LayoutError
from vcache_backend.vram_pool import kernels, reference
from vcache_backend.vram_pool.kernels import Tuning
from vcache_backend.vram_pool.paged import PagedKV
from vcache_backend.vram_pool.planner import CopyPlan, plan_blocks

POISON = 0xA5
SMALL = Tuning(ctas=3, block_bytes=512, num_warps=4, stages=3)
REGISTERS = replace(SMALL, stages=1)
TUNINGS = pytest.mark.parametrize("tuning", [SMALL, REGISTERS], ids=["pipelined", "registers"])
DIRECTIONS = pytest.mark.parametrize("to_slot", [True, False], ids=["gather", "scatter"])
COMPILED = isinstance(kernels.copy_kernel, triton.JITFunction)
DEVICE = pytest.mark.parametrize(
    "device",
    [
        pytest.param("cpu", marks=pytest.mark.skipif(COMPILED, reason="needs TRITON_INTERPRET=1, which GPU runs do not set")),
        pytest.param("cuda", marks=pytest.mark.gpu),
    ],
)


@pytest.fixture(autouse=True)
def _loops_under_numpy_2_4(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton 3.6's interpreter calls `int()` on arrays of one element for the bounds of a loop; numpy 2.4 refuses that."""
    patch = interpreter._patch_lang_tensor

    def patch_with_item(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patch_with_item)


def noise(shape: tuple[int, ...], dtype: torch.dtype, device: str, seed: int) -> Tensor:
    raw = torch.randint(0, 256, (*shape[:-1], shape[-1] * dtype.itemsize), generator=torch.Generator().manual_seed(seed))
    return raw.to(torch.uint8).to(device).view(dtype)


def cache(shape: tuple[int, ...], block_size: int, device: str, layers: int = 2, dtype: torch.dtype = torch.bfloat16) -> PagedKV:
    return PagedKV.describe([noise(shape, dtype, device, layer) for layer in range(layers)], block_size)


def twin(kv: PagedKV) -> PagedKV:
    """The same cache at other addresses, so that one can be written by the kernel and one by the reference."""
    copies = [torch.empty_strided(page.shape, page.stride(), dtype=page.dtype, device=page.device) for page in kv.pages]
    for copy, page in zip(copies, kv.pages, strict=True):
        copy.copy_(page)
    planes = np.array([(page.data_ptr(), page.stride(0)) for page in copies], dtype=np.int64)
    return replace(kv, pages=tuple(copies), planes=planes)


def run_kernel(kv: PagedKV, copy: CopyPlan, slots: list[Tensor], to_slot: bool, tuning: Tuning) -> None:
    rows = np.empty((kernels.table_rows(kv, copy), 3), dtype=np.int64)
    aligned = kernels.fill_table(kv, copy, np.array([slot.data_ptr() for slot in slots], dtype=np.int64), rows)
    table = torch.from_numpy(rows).to(kv.device)
    kernels.launch(kv, copy, table, to_slot=to_slot, tuning=tuning, aligned=aligned)


def check(kv: PagedKV, copy: CopyPlan, slots: int, to_slot: bool, tuning: Tuning, shift: int = 0) -> None:
    """Run both on equal, poisoned destinations and compare every byte, also those that must not change."""
    nbytes = kv.chunk_bytes(copy.chunk_size)
    expected, found = kv, twin(kv)
    if to_slot:
        ours = [torch.full((shift + nbytes + 64,), POISON, dtype=torch.uint8, device=kv.device) for _ in range(slots)]
        theirs = [slot.clone() for slot in ours]
    else:
        ours = [noise((shift + nbytes + 64,), torch.uint8, str(kv.device), 100 + i) for i in range(slots)]
        theirs = ours
        for page in (*expected.pages, *found.pages):
            page.fill_(POISON)
    (reference.gather if to_slot else reference.scatter)(expected, copy, [slot[shift : shift + nbytes] for slot in theirs])
    run_kernel(found, copy, [slot[shift : shift + nbytes] for slot in ours], to_slot, tuning)
    for mine, right in zip((*ours, *found.pages), (*theirs, *expected.pages), strict=True):
        assert torch.equal(mine, right)
    changed = any(bool((mine != POISON).any()) for mine in (ours if to_slot else found.pages))
    assert changed == bool(copy.nbytes)


def some(kv: PagedKV, count: int, seed: int = 0, first: int = 0) -> CopyPlan:
    """A plan for chunks of two blocks: `count` blocks from anywhere, of which those from `first` on are wanted."""
    return plan_blocks(kv, 2 * kv.block_size, np.random.default_rng(seed).permutation(kv.num_blocks)[:count], first)


# A page is 4 tokens of `words` fp16 numbers: from 8 bytes to a size that is no multiple of 16 nor of the kernel's piece.
@pytest.mark.parametrize("words", [1, 64, 100, 129])
@TUNINGS
@DIRECTIONS
@DEVICE
def test_the_kernel_equals_the_reference_for_odd_page_sizes(words: int, tuning: Tuning, to_slot: bool, device: str) -> None:
    kv = cache((12, 4, words), 4, device, dtype=torch.float16)
    check(kv, some(kv, 5, first=1), 3, to_slot, tuning)


@pytest.mark.parametrize(
    ("shape", "strides"),
    [
        ((2, 12, 4, 3, 20), None),
        ((12, 2, 4, 3, 20), None),
        ((2, 12, 3, 4, 20), None),
        ((12, 3, 4, 40), None),
        ((12, 4, 3, 40), None),
        ((12, 4, 72), None),
        ((12, 3, 4, 40), (480, 40, 120, 1)),
    ],
    ids=[
        "parts outermost",
        "blocks outermost",
        "parts outermost HND",
        "packed HND",
        "packed NHD",
        "MLA",
        "packed NHD by strides",
    ],
)
@DIRECTIONS
@DEVICE
def test_the_kernel_equals_the_reference_for_every_layout(
    shape: tuple[int, ...], strides: tuple[int, ...] | None, to_slot: bool, device: str
) -> None:
    tensors = [noise(shape, torch.bfloat16, device, layer) for layer in range(3)]
    if strides:
        tensors = [tensor.as_strided(shape, strides) for tensor in tensors]
    kv = PagedKV.describe(tensors, 4)
    check(kv, some(kv, 5, first=1), 3, to_slot, SMALL)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.uint8, torch.float32], ids=str)
@DIRECTIONS
@DEVICE
def test_the_kernel_moves_bytes_whatever_they_mean(dtype: torch.dtype, to_slot: bool, device: str) -> None:
    kv = cache((12, 4, 3, 20), 4, device, dtype=dtype)
    check(kv, some(kv, 4, first=1), 2, to_slot, SMALL)


@pytest.mark.parametrize("shift", [0, 1, 2, 4, 8, 16])
@DIRECTIONS
@DEVICE
def test_slots_at_any_address_take_narrower_words(shift: int, to_slot: bool, device: str) -> None:
    kv = cache((12, 4, 64), 4, device)
    check(kv, some(kv, 4, first=1), 2, to_slot, SMALL, shift)


@pytest.mark.parametrize("ctas", [1, 2, 7, 64, 1000])
@TUNINGS
@DEVICE
def test_any_number_of_programs_moves_every_piece_once(ctas: int, tuning: Tuning, device: str) -> None:
    kv = cache((40, 4, 200), 4, device, layers=1)
    check(kv, some(kv, 6), 3, False, replace(tuning, ctas=ctas))


@DEVICE
def test_an_empty_plan_moves_nothing(device: str) -> None:
    kv = cache((12, 4, 64), 4, device)
    check(kv, some(kv, 2, first=2), 1, True, SMALL)


@DEVICE
def test_blocks_with_gaps_between_them_keep_what_lies_in_the_gaps(device: str) -> None:
    every = noise((12, 3, 4, 64), torch.bfloat16, device, 1)
    before = every.clone()
    kv = PagedKV.describe([every[:, 0], every[:, 2]], 4)
    slots = [noise((kv.chunk_bytes(8),), torch.uint8, device, 5)]
    run_kernel(kv, some(kv, 2), slots, False, SMALL)
    assert torch.equal(every[:, 1].view(torch.int16), before[:, 1].view(torch.int16))
    assert not torch.equal(every[:, 0].view(torch.int16), before[:, 0].view(torch.int16))


def test_addresses_beyond_32_bits_survive_the_table() -> None:
    kv = cache((12, 4, 64), 4, "cpu")
    copy = some(kv, 2)
    table = np.empty((kernels.table_rows(kv, copy), 3), dtype=np.int64)
    high = (1 << 46) + (5 << 32) + 16
    assert kernels.fill_table(kv, copy, np.array([high], dtype=np.int64), table) == 16
    assert table[2:, 0].tolist() == [high, high + kv.page_bytes]
    assert table[:2, 0].tolist() == [page.data_ptr() for page in kv.pages]


def test_a_block_far_from_the_first_one_is_addressed_in_64_bits() -> None:
    """A cache of 4 GiB and a little, of which only the touched pages are ever in memory."""
    blocks, page = (2 << 20) + 64, 2048
    kv = PagedKV.describe([torch.empty((blocks, 4, 256), dtype=torch.bfloat16)], 4)
    ids = np.array([blocks - 1, 0, (1 << 20) + 1, 1 << 20], dtype=np.int64)
    slots = [noise((4 * page,), torch.uint8, "cpu", 3)]
    copy = plan_blocks(kv, 16, ids)
    reference.scatter(kv, copy, slots)
    if not COMPILED:
        kv.pages[0][ids] = POISON
        run_kernel(kv, copy, slots, False, SMALL)
    for virtual, block in enumerate(ids.tolist()):
        assert torch.equal(kv.pages[0][block], slots[0][virtual * page : (virtual + 1) * page])


def test_a_copy_of_too_many_pieces_is_refused() -> None:
    kv = cache((12, 4, 64), 4, "cpu")
    copy = some(kv, 2)
    huge = replace(copy, blocks=np.broadcast_to(copy.blocks[:1], (1 << 30, 3)))
    with pytest.raises(LayoutError, match="is too large; move fewer chunks at once"):
        kernels.launch(kv, huge, torch.empty(0), to_slot=True, tuning=SMALL)


def test_tunings_are_chosen_by_place_and_bounded_by_max_ctas() -> None:
    for tuning, local in ((kernels.PEER, False), (kernels.LOCAL, True)):
        assert kernels.tuning_for(local=local) == tuning
        assert tuning.block_bytes & (tuning.block_bytes - 1) == 0
        assert (tuning.stages - 1) * tuning.block_bytes < 227 << 10
    assert kernels.tuning_for(local=False, max_ctas=5).ctas == 5
    assert kernels.tuning_for(local=False, max_ctas=4096) == kernels.PEER
