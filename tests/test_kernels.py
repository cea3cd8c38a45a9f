"""The kernel equals its reference: on the CPU under Triton's interpreter, on a GPU compiled. Destinations are poisoned first."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import triton
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from triton.runtime import interpreter

from vcache_backend.errors import LayoutError
from vcache_backend.vram_pool import kernels, reference
from vcache_backend.vram_pool.kernels import Tuning
from vcache_backend.vram_pool.paged import PagedKV
from vcache_backend.vram_pool.planner import CopyPlan, Piece, plan

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


def mapping(blocks: int, block_size: int, used: int, seed: int = 0) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    ids = np.random.default_rng(seed).permutation(blocks)[:used]
    return (ids[:, None] * block_size + np.arange(block_size)).reshape(-1)


# A page is 4 tokens of `words` fp16 numbers: from 8 bytes to a size that is no multiple of 16 nor of the kernel's piece.
@pytest.mark.parametrize("words", [1, 64, 100, 129])
@TUNINGS
@DIRECTIONS
@DEVICE
def test_the_kernel_equals_the_reference_for_odd_page_sizes(words: int, tuning: Tuning, to_slot: bool, device: str) -> None:
    kv = cache((12, 4, words), 4, device, dtype=torch.float16)
    copy = plan(kv, 8, mapping(12, 4, 6), [Piece(0, 0, 0, 8), Piece(1, 8, 3, 8), Piece(2, 16, 0, 5)])
    assert len(copy.blocks) == 4
    assert len(copy.tokens) == 4 + 1 - 1 - 2
    check(kv, copy, 3, to_slot, tuning)


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
    places = mapping(12, 4, 6)
    places[17], places[18] = places[18], places[17]
    copy = plan(kv, 8, places, [Piece(1, 0, 2, 8), Piece(0, 8, 0, 8), Piece(2, 16, 0, 7)])
    assert len(copy.blocks)
    assert len(copy.tokens)
    check(kv, copy, 3, to_slot, SMALL)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.uint8, torch.float32], ids=str)
@DIRECTIONS
@DEVICE
def test_the_kernel_moves_bytes_whatever_they_mean(dtype: torch.dtype, to_slot: bool, device: str) -> None:
    kv = cache((12, 4, 3, 20), 4, device, dtype=dtype)
    check(kv, plan(kv, 8, mapping(12, 4, 4), [Piece(0, 0, 1, 8), Piece(1, 8, 0, 8)]), 2, to_slot, SMALL)


@pytest.mark.parametrize("shift", [0, 1, 2, 4, 8, 16])
@DIRECTIONS
@DEVICE
def test_slots_at_any_address_take_narrower_words(shift: int, to_slot: bool, device: str) -> None:
    kv = cache((12, 4, 64), 4, device)
    check(kv, plan(kv, 8, mapping(12, 4, 4), [Piece(0, 0, 1, 8), Piece(1, 8, 0, 8)]), 2, to_slot, SMALL, shift)


@pytest.mark.parametrize("ctas", [1, 2, 7, 64, 1000])
@TUNINGS
@DEVICE
def test_any_number_of_programs_moves_every_piece_once(ctas: int, tuning: Tuning, device: str) -> None:
    kv = cache((40, 4, 200), 4, device, layers=1)
    copy = plan(kv, 8, mapping(40, 4, 6), [Piece(slot, slot * 8, slot % 2, 8) for slot in range(3)])
    check(kv, copy, 3, False, replace(tuning, ctas=ctas))


@DEVICE
def test_tokens_at_another_position_of_their_block_find_their_place_in_the_chunk(device: str) -> None:
    kv = cache((2, 12, 4, 3, 20), 4, device)
    copy = plan(kv, 8, np.arange(7, 15, dtype=np.int64), [Piece(0, 0, 0, 8)])
    assert not len(copy.blocks)
    for to_slot in (True, False):
        check(kv, copy, 1, to_slot, SMALL)


@DEVICE
def test_whole_blocks_only_moves_whole_blocks(device: str) -> None:
    kv = replace(cache((12, 4, 64), 4, device), tokens=None)
    copy = plan(kv, 8, mapping(12, 4, 4), [Piece(0, 0, 1, 8), Piece(1, 8, 0, 8)])
    for to_slot in (True, False):
        check(kv, copy, 2, to_slot, SMALL)


@DEVICE
def test_an_empty_plan_moves_nothing(device: str) -> None:
    kv = cache((12, 4, 64), 4, device)
    check(kv, plan(kv, 8, mapping(12, 4, 2), [Piece(0, 0, 3, 3)]), 1, True, SMALL)


@DEVICE
def test_blocks_with_gaps_between_them_keep_what_lies_in_the_gaps(device: str) -> None:
    every = noise((12, 3, 4, 64), torch.bfloat16, device, 1)
    before = every.clone()
    kv = PagedKV.describe([every[:, 0], every[:, 2]], 4)
    slots = [noise((kv.chunk_bytes(8),), torch.uint8, device, 5)]
    run_kernel(kv, plan(kv, 8, mapping(12, 4, 2), [Piece(0, 0, 0, 8)]), slots, False, SMALL)
    assert torch.equal(every[:, 1].view(torch.int16), before[:, 1].view(torch.int16))
    assert not torch.equal(every[:, 0].view(torch.int16), before[:, 0].view(torch.int16))


@given(st.data())
@settings(max_examples=15)
@pytest.mark.skipif(COMPILED, reason="needs TRITON_INTERPRET=1, which GPU runs do not set")
def test_a_chunk_that_is_stored_and_retrieved_elsewhere_has_the_same_bytes(data: st.DataObject) -> None:
    kv, other = cache((12, 4, 3, 20), 4, "cpu"), cache((12, 4, 3, 20), 4, "cpu", dtype=torch.float16)
    start = data.draw(st.integers(0, 8))
    here, there = (mapping(12, 4, 4, data.draw(st.integers(0, 99))) for _ in "ab")
    shift = data.draw(st.integers(0, 3))
    there = there - shift
    there[there < 0] = -1
    slots = [torch.full((kv.chunk_bytes(8),), POISON, dtype=torch.uint8) for _ in range(2)]
    run_kernel(kv, plan(kv, 8, here, [Piece(0, 0, 0, 8), Piece(1, 8, 0, 8)]), slots, True, SMALL)
    copy = plan(other, 8, there, [Piece(0, 0, start, 8), Piece(1, 8, 0, 8)])
    run_kernel(other, copy, slots, False, SMALL)
    covered = copy.covered(16)
    assert covered.tolist() == [token >= start and there[token] != -1 for token in range(16)]
    mine, theirs = (torch.stack([page.view(12, 4, 120) for page in side.pages]) for side in (kv, other))
    for token in np.flatnonzero(covered).tolist():
        source, target = divmod(int(here[token]), 4), divmod(int(there[token]), 4)
        assert torch.equal(mine[:, source[0], source[1]], theirs[:, target[0], target[1]])


def test_addresses_beyond_32_bits_survive_the_table() -> None:
    kv = cache((12, 4, 64), 4, "cpu")
    copy = plan(kv, 8, mapping(12, 4, 2), [Piece(0, 0, 0, 8)])
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
    copy = plan(kv, 16, (ids[:, None] * 4 + np.arange(4)).reshape(-1), [Piece(0, 0, 0, 16)])
    reference.scatter(kv, copy, slots)
    if not COMPILED:
        kv.pages[0][ids] = POISON
        run_kernel(kv, copy, slots, False, SMALL)
    for virtual, block in enumerate(ids.tolist()):
        assert torch.equal(kv.pages[0][block], slots[0][virtual * page : (virtual + 1) * page])


def test_a_copy_of_too_many_pieces_is_refused() -> None:
    kv = cache((12, 4, 64), 4, "cpu")
    copy = plan(kv, 8, mapping(12, 4, 2), [Piece(0, 0, 0, 8)])
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
