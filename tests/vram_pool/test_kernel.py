"""The kernel equals its reference: on the CPU under Triton's interpreter, on a GPU compiled.
Destinations are poisoned first.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import triton
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from triton.runtime import interpreter

from vcache_backend.errors import LayoutError
from vcache_backend.vram_pool.copies import kernel, reference
from vcache_backend.vram_pool.copies.geometry import Int64s, PagedKV, Share
from vcache_backend.vram_pool.copies.kernel import Tuning
from vcache_backend.vram_pool.copies.plan import CopyPlan, of_kinds, plan_blocks

POISON = 0xA5
SMALL = Tuning(ctas=3, block_bytes=512, num_warps=4, stages=3)
REGISTERS = replace(SMALL, stages=1)
TUNINGS = pytest.mark.parametrize("tuning", [SMALL, REGISTERS], ids=["pipelined", "registers"])
DIRECTIONS = pytest.mark.parametrize("to_slot", [True, False], ids=["gather", "scatter"])
COMPILED = isinstance(kernel.copy_kernel, triton.JITFunction)
INTERPRETED = pytest.mark.skipif(
    COMPILED, reason="needs TRITON_INTERPRET=1, which GPU runs do not set"
)
DEVICES = [pytest.param("cpu", marks=INTERPRETED), pytest.param("cuda", marks=pytest.mark.gpu)]
DEVICE = pytest.mark.parametrize("device", DEVICES)


@pytest.fixture(autouse=True)
def _loops_under_numpy_2_4(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton 3.6's interpreter calls `int()` on arrays of one element for the bounds of a loop;
    numpy 2.4 refuses that.
    """
    patch = interpreter._patch_lang_tensor

    def patch_with_item(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patch_with_item)


def noise(shape: tuple[int, ...], dtype: torch.dtype, device: str, seed: int) -> Tensor:
    width, generator = shape[-1] * dtype.itemsize, torch.Generator().manual_seed(seed)
    raw = torch.randint(0, 256, (*shape[:-1], width), generator=generator)
    return raw.to(torch.uint8).to(device).view(dtype)


def cache(
    shape: tuple[int, ...],
    block_size: int,
    device: str,
    layers: int = 2,
    dtype: torch.dtype = torch.bfloat16,
) -> PagedKV:
    tensors = [noise(shape, dtype, device, layer) for layer in range(layers)]
    return PagedKV.describe(tensors, block_size)


def twin(kv: PagedKV) -> PagedKV:
    """The same cache at other addresses, so that one can be written by the kernel and one by the
    reference.
    """
    copies = [
        torch.empty_strided(page.shape, page.stride(), dtype=page.dtype, device=page.device)
        for page in kv.pages
    ]
    for copy, page in zip(copies, kv.pages, strict=True):
        copy.copy_(page)
    others = tuple(twin(other) for other in kv.others)
    return replace(kv, pages=tuple(copies), others=others)


def pages(kv: PagedKV) -> list[Tensor]:
    return [page for kind in kv.kinds for page in kind.pages]


def run_kernel(
    kv: PagedKV, copy: CopyPlan, slots: list[Tensor], to_slot: bool, tuning: Tuning
) -> int:
    """Returns the alignment."""
    addresses = np.array([slot.data_ptr() for slot in slots], dtype=np.int64)
    count = len(copy.blocks)
    for number, kind in enumerate(kv.kinds):
        plan, begin = copy.of(kv, number)
        table = np.empty((kernel.table_rows(kind, count), 3), dtype=np.int64)
        aligned = kernel.fill_slots(kind, plan, addresses + begin, table)
        there = torch.from_numpy(table).to(kv.device)
        kernel.launch(kind, count, there, to_origin=to_slot, tuning=tuning, aligned=aligned)
    return aligned


def launch(kv: PagedKV, rows: Int64s, origins: Int64s, to_origin: bool, tuning: Tuning) -> int:
    """Returns the alignment."""
    filled = np.empty((kernel.table_rows(kv, len(rows), len(origins)), 3), dtype=np.int64)
    aligned = kernel.fill_table(kv, rows, origins, filled)
    table = torch.from_numpy(filled).to(kv.device)
    more: dict[str, Any] = {"many": len(origins) > 1, "aligned": aligned}
    kernel.launch(kv, len(rows), table, to_origin=to_origin, tuning=tuning, **more)
    return aligned


def check(
    kv: PagedKV, copy: CopyPlan, slots: int, to_slot: bool, tuning: Tuning, shift: int = 0
) -> int:
    """Run both on equal, poisoned destinations and compare every byte, also those that must not
    change. Returns the slots' alignment.
    """
    nbytes = kv.chunk_bytes(copy.chunk_size)
    whole, expected, found = shift + nbytes + 64, kv, twin(kv)
    if to_slot:
        more = {"dtype": torch.uint8, "device": kv.device}
        ours = [torch.full((whole,), POISON, **more) for _ in range(slots)]
        theirs = [slot.clone() for slot in ours]
    else:
        ours = [noise((whole,), torch.uint8, str(kv.device), 100 + i) for i in range(slots)]
        theirs = ours
        for page in (*pages(expected), *pages(found)):
            page.fill_(POISON)
    right, mine = ([slot[shift : shift + nbytes] for slot in slots] for slots in (theirs, ours))
    (reference.gather if to_slot else reference.scatter)(expected, copy, right)
    aligned = run_kernel(found, copy, mine, to_slot, tuning)
    for mine, right in zip((*ours, *pages(found)), (*theirs, *pages(expected)), strict=True):
        assert torch.equal(mine, right)
    changed = any(bool((mine != POISON).any()) for mine in (ours if to_slot else pages(found)))
    assert changed == bool(copy.nbytes)
    return aligned


def some(kv: PagedKV, count: int, first: int = 0) -> CopyPlan:
    """A plan for chunks of two blocks: `count` blocks from anywhere, of which those from `first` on
    are wanted.
    """
    blocks = np.random.default_rng(0).permutation(kv.num_blocks)[:count]
    return plan_blocks(kv, 2 * kv.block_size, blocks, first)


def parts_apart(device: str) -> PagedKV:
    """Other layouts are one page a block, as those of the other tests: see test_paged."""
    kv = cache((2, 12, 4, 3, 20), 4, device, layers=3)
    assert kv.parts == 2
    return kv


def pages_of_several_sizes(device: str) -> PagedKV:
    """As DeepSeek V3.2 has them: latents and the indexer's keys. The third kind makes slots odd."""
    sizes = enumerate((656, 132, 656, 132, 5))
    caches = [noise((12, 1, 4, size), torch.uint8, device, layer) for layer, size in sizes]
    kv = PagedKV.describe(caches, 4)
    assert [kind.page_bytes for kind in kv.kinds] == [4 * 656, 4 * 132, 4 * 5]
    return kv


# A page is 4 tokens of so many fp16 numbers: from 8 bytes to a size that is a multiple neither of 16
# nor of the kernel's piece.
@pytest.mark.parametrize("made", [1, 64, 100, 129, parts_apart, pages_of_several_sizes])
@TUNINGS
@DIRECTIONS
@DEVICE
def test_kernel_equals_reference(made: Any, tuning: Tuning, to_slot: bool, device: str) -> None:
    kv = made(device) if callable(made) else cache((12, 4, made), 4, device, dtype=torch.float16)
    check(kv, some(kv, 5, first=1), 3, to_slot, tuning)


@pytest.mark.parametrize("shift", [0, 1, 2, 4, 8, 16])
@DIRECTIONS
@DEVICE
def test_slots_at_any_address_take_narrower_words(shift: int, to_slot: bool, device: str) -> None:
    kv = cache((12, 4, 64), 4, device)
    assert check(kv, some(kv, 4, first=1), 2, to_slot, SMALL, shift) == (shift & -shift or 16)


@pytest.mark.parametrize("ctas", [1, 7, 1000])
@TUNINGS
@DEVICE
def test_any_number_of_programs_moves_a_piece_once(ctas: int, tuning: Tuning, device: str) -> None:
    kv = cache((40, 4, 200), 4, device, layers=1)
    check(kv, some(kv, 6), 3, False, replace(tuning, ctas=ctas))


@DEVICE
def test_an_empty_plan_moves_nothing(device: str) -> None:
    kv = cache((12, 4, 64), 4, device)
    check(kv, some(kv, 2, first=2), 1, True, SMALL)


@DIRECTIONS
@DEVICE
def test_kernel_equals_reference_for_several_block_tables(to_slot: bool, device: str) -> None:
    first, second = (noise((24, 4, 3, 20), torch.bfloat16, device, layer) for layer in range(2))
    groups = [({"a": first, "b": second}, Share(4)), ({"c": first}, Share(4, 8))]
    kv = PagedKV.describe_groups(groups)
    assert kv.chunk_bytes(16) == 2 * 6 * kv.page_bytes
    ids = np.random.default_rng(3).permutation(24)[:12]
    ids[[1, 4, 10]] = -1
    check(kv, plan_blocks(kv, 16, ids), 2, to_slot, SMALL)


@DEVICE
def test_blocks_with_gaps_between_them_keep_what_lies_in_the_gaps(device: str) -> None:
    every = noise((12, 3, 4, 64), torch.bfloat16, device, 1)
    before = every.clone()
    kv = PagedKV.describe([every[:, 0], every[:, 2]], 4)
    slots = [noise((kv.chunk_bytes(8),), torch.uint8, device, 5)]
    run_kernel(kv, some(kv, 2), slots, False, SMALL)
    assert torch.equal(every[:, 1].view(torch.int16), before[:, 1].view(torch.int16))
    assert not torch.equal(every[:, 0].view(torch.int16), before[:, 0].view(torch.int16))


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
    with pytest.raises(LayoutError, match="is too large; move fewer chunks"):
        kernel.launch(kv, 1 << 30, torch.empty(0), to_origin=True, tuning=SMALL)


# ---- out of other KV caches, and out of them and slots at once


class Owners(NamedTuple):
    """KV caches of others, and their planes' addresses."""

    caches: list[PagedKV]
    origins: Int64s

    def rows(self, chosen: list[tuple[int, int, int]]) -> Int64s:
        """(owner, its block, the reader's block)."""
        strides = [int(kv.planes[0, 1]) for kv in self.caches]
        rows = [(owner, block * strides[owner], place) for owner, block, place in chosen]
        return np.array(rows, dtype=np.int64).reshape(-1, 3)


def owners(
    count: int, page_bytes: int, layers: int, device: str, gaps: list[int], shift: int = 0
) -> Owners:
    """Each with its own number of blocks, and `gaps[i]` bytes from the end of a block to the next
    one.
    """
    caches = []
    for owner in range(count):
        blocks, stride = 7 + 3 * owner, page_bytes + gaps[owner]
        shape, strides = (blocks, 1, page_bytes), (stride, page_bytes, 1)
        seeds, whole = [31 * owner + layer for layer in range(layers)], (shift + blocks * stride,)
        memories = [noise(whole, torch.uint8, device, seed) for seed in seeds]
        tensors = [memory.as_strided(shape, strides, shift) for memory in memories]
        caches.append(PagedKV.describe(tensors, 1))
    return Owners(caches, np.array([kv.planes[:, 0] for kv in caches]))


def taken(reader: PagedKV, there: Owners, chosen: list[tuple[int, int, int]]) -> list[Tensor]:
    """Poison the reader's pages. What they must be then: poison, and the owners' bytes in the
    places chosen. By indexing alone.
    """
    for page in reader.pages:
        page.fill_(POISON)
    pages = [page.clone() for page in reader.pages]
    for owner, block, place in chosen:
        for page, source in zip(pages, there.caches[owner].pages, strict=True):
            page[place] = source[block]
    return pages


def choose(count: int, there: Owners, reader: PagedKV, seed: int) -> list[tuple[int, int, int]]:
    random = np.random.default_rng(seed)
    places = random.permutation(reader.num_blocks)[:count].tolist()
    owned = [int(random.integers(len(there.caches))) for _ in places]
    blocks = [int(random.integers(there.caches[owner].num_blocks)) for owner in owned]
    return list(zip(owned, blocks, places, strict=True))


ONE_OWNER, FIVE = [(1, 512, 512, 3), (1, 513, 0, 1)], [(5, 8, 0, 3), (5, 512, 512, 3)]
FIVE += [(5, 1032, 24, 9), (5, 50, 2, 1), (5, 100, 3, 9)]


@pytest.mark.parametrize(("count", "page_bytes", "gaps", "ctas"), ONE_OWNER + FIVE)
@TUNINGS
@DEVICE
def test_blocks_of_other_caches_come_to_the_places_that_rows_name(
    count: int, page_bytes: int, gaps: int, ctas: int, tuning: Tuning, device: str
) -> None:
    there = owners(count, page_bytes, 3, device, [gaps * (owner + 1) for owner in range(count)])
    reader = owners(1, page_bytes, 3, device, [16]).caches[0]
    chosen = choose(6, there, reader, page_bytes + count)
    expected = taken(reader, there, chosen)
    launch(reader, there.rows(chosen), there.origins, False, replace(tuning, ctas=ctas))
    assert all(torch.equal(mine, right) for mine, right in zip(reader.pages, expected, strict=True))


@DEVICE
def test_each_kind_of_layers_has_its_part_of_one_table_aligned_for_the_kernel(device: str) -> None:
    """Two origins, whose blocks lie elsewhere in each kind of layers."""

    def made(seed: int) -> PagedKV:
        shapes = enumerate((9, 1, 4, size) for size in (656, 132, 5))
        layers = [noise(shape, torch.uint8, device, seed + at) for at, shape in shapes]
        return PagedKV.describe(layers, 4)

    owners_, reader = [made(10), made(20)], made(30)
    expected, sizes = twin(reader), [4 * size for size in (656, 132, 5)]
    chosen = (0, 8, 2), (1, 3, 7), (1, 0, 0)
    starts = [[block * size for size in sizes] for _, block, _ in chosen]
    pairs = zip(chosen, starts, strict=True)
    rows = np.array([[owner, at[0], place, *at[1:]] for (owner, _, place), at in pairs])
    origins = np.stack([np.concatenate([kind.planes[:, 0] for kind in kv.kinds]) for kv in owners_])
    parts = kernel.table_parts(reader, 3, 2)
    assert all(part.first % 2 == 0 for part in parts)
    assert all(one.end <= other.first for one, other in itertools.pairwise(parts))
    filled = np.empty((parts[-1].end, 3), dtype=np.int64)
    filling = zip(parts, of_kinds(reader, rows, origins), strict=True)
    aligned = [kernel.fill_table(*kind, filled[at.first : at.end]) for at, kind in filling]
    table = torch.from_numpy(filled).to(device)
    for part, bits in zip(parts, aligned, strict=True):
        there = table[part.first :]
        kernel.launch(part.kv, 3, there, to_origin=False, tuning=SMALL, many=True, aligned=bits)
    for (owner, _, place, *_), block in zip(rows.tolist(), (8, 3, 0), strict=True):
        for mine, theirs in zip(pages(expected), pages(owners_[owner]), strict=True):
            mine[place] = theirs[block]
    for mine, right in zip(pages(reader), pages(expected), strict=True):
        assert torch.equal(mine, right)


@settings(max_examples=60)
@given(st.data())
def test_the_reference_of_a_pull_is_what_indexing_gives(data: st.DataObject) -> None:
    page_bytes = data.draw(st.integers(1, 70))
    count = data.draw(st.integers(1, 4))
    layers = data.draw(st.integers(1, 3))
    gaps = data.draw(st.lists(st.integers(0, 40), min_size=count, max_size=count))
    there = owners(count, page_bytes, layers, "cpu", gaps)
    reader = owners(1, page_bytes, layers, "cpu", [data.draw(st.integers(0, 9))]).caches[0]
    chosen = choose(data.draw(st.integers(0, 7)), there, reader, data.draw(st.integers(0, 999)))
    expected = taken(reader, there, chosen)
    reference.pull(reader, there.rows(chosen), there.origins)
    assert all(torch.equal(mine, right) for mine, right in zip(reader.pages, expected, strict=True))


@pytest.mark.parametrize(
    ("shift", "gap", "aligned"),
    [(0, 0, 16), (8, 0, 8), (0, 8, 8), (4, 16, 4), (0, 2, 2), (1, 16, 1)],
)
@DEVICE
def test_words_are_as_wide_as_addresses_allow(
    shift: int, gap: int, aligned: int, device: str
) -> None:
    there = owners(2, 512, 2, device, [0, gap], shift)
    reader = owners(1, 512, 2, device, [0]).caches[0]
    chosen = [(0, 1, 0), (1, 3, 1), (1, 2, 5)]
    expected = taken(reader, there, chosen)
    assert launch(reader, there.rows(chosen), there.origins, False, SMALL) == aligned
    assert all(torch.equal(mine, right) for mine, right in zip(reader.pages, expected, strict=True))
