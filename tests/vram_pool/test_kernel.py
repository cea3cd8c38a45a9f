"""The kernel equals its reference: on the CPU under Triton's interpreter, on a GPU compiled. All
memory around a copy is compared, also what must not change."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import triton
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from triton.runtime import interpreter

from vcache_backend.vram_pool.copies import kernel
from vcache_backend.vram_pool.copies.copier import CopyJob, copy_pages
from vcache_backend.vram_pool.copies.geometry import Int64s, PagedKV, Share, placed, slot_rows
from vcache_backend.vram_pool.copies.kernel import TablePart

SMALL: dict[str, int] = {"ctas": 3, "block_bytes": 512}
DIRECTIONS = pytest.mark.parametrize("to_origin", [True, False], ids=["gather", "scatter"])
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


def noise(device: str, seed: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, shape, generator=generator).to(torch.uint8).to(device)


class World(NamedTuple):
    """A copy, and all memory around it."""

    kv: PagedKV
    memory: list[Tensor]
    rows: Int64s
    origins: Int64s


Make = Callable[[str], World]


def launch(world: World, to_origin: bool, **how: int) -> list[TablePart]:
    """how: of the launch, by default few thread blocks and small pieces."""
    kv, rows, origins = world.kv, world.rows, world.origins
    filled = np.empty((kernel.table_rows(kv, len(rows), len(origins)), 3), dtype=np.int64)
    parts, table = kernel.fill_table(kv, rows, origins, filled), torch.from_numpy(filled)
    assert all(part.first % 2 == 0 for part in parts), "tables are aligned to 16 bytes"
    for part in parts:
        kernel.launch(part, table.to(kv.device), to_origin=to_origin, **SMALL | how)
    return parts


def equal(make: Make, device: str, to_origin: bool, **how: int) -> int:
    """Runs both in equal worlds. Returns the origins' alignment."""
    right, before, mine = make("cpu"), make("cpu"), make(device)
    copy_pages(CopyJob(right.kv, right.rows, right.origins, to_origin=to_origin))
    parts = launch(mine, to_origin, **how)
    for expected, found in zip(right.memory, mine.memory, strict=True):
        assert torch.equal(expected, found.cpu())
    changed = [not torch.equal(*pair) for pair in zip(right.memory, before.memory, strict=True)]
    assert any(changed) == bool(len(right.rows))
    return parts[-1].aligned


# ---- slots


def dense(page: int, device: str, blocks: int = 12) -> tuple[PagedKV, list[Tensor]]:
    """Two layers with pages of so many bytes."""
    layers = [noise(device, layer, blocks, 4, page // 4) for layer in range(2)]
    return PagedKV.describe(layers, 4), layers


def parts_apart(device: str) -> tuple[PagedKV, list[Tensor]]:
    """Other layouts are one page a block, as those of the other tests: see test_geometry."""
    layers = [noise(device, layer, 2, 12, 4, 3, 40) for layer in range(3)]
    kv = PagedKV.describe(layers, 4)
    assert kv.parts == 2
    return kv, layers


def gaps_between_blocks(device: str) -> tuple[PagedKV, list[Tensor]]:
    every = noise(device, 1, 12, 3, 4, 128)
    return PagedKV.describe([every[:, 0], every[:, 2]], 4), [every]


def several_sizes(device: str, seed: int = 0) -> tuple[PagedKV, list[Tensor]]:
    """As DeepSeek V3.2 has them: latents and the indexer's keys. The third kind makes slots odd."""
    sizes = enumerate((656, 132, 656, 132, 5))
    layers = [noise(device, seed + layer, 12, 1, 4, size) for layer, size in sizes]
    kv = PagedKV.describe(layers, 4)
    assert [kind.page_bytes for kind in kv.kinds] == [4 * 656, 4 * 132, 4 * 5]
    return kv, layers


def several_tables(device: str) -> tuple[PagedKV, list[Tensor]]:
    first, second = (noise(device, layer, 12, 4, 3, 40) for layer in range(2))
    groups = [({"a": first, "b": second}, Share(4)), ({"c": first}, Share(4, 4))]
    return PagedKV.describe_groups(groups), [first, second]


def slots(made: Any, count: int, device: str, shift: int = 0, first: int = 0) -> World:
    """`count` blocks from anywhere and the slots of their chunks, from which those from `first` on
    are wanted."""
    kv, layers = made(device) if callable(made) else dense(made, device)
    ids = np.random.default_rng(0).permutation(kv.num_blocks)[:count]
    ids[:first] = -1
    plan = placed(kv, ids, holes=True)
    nbytes = shift + kv.chunk_bytes(8) + 64
    whole = [noise(device, 100 + slot, nbytes) for slot in range(-(-count // kv.blocks_in(8)))]
    addresses = np.array([slot.data_ptr() + shift for slot in whole], dtype=np.int64)
    return World(kv, layers + whole, *slot_rows(kv, 8, plan, addresses))


# From 4 bytes to a size that is a multiple neither of 16 nor of the kernel's piece.
SHAPES = [4, 512, 800, 1032, parts_apart, gaps_between_blocks, several_sizes, several_tables]


@pytest.mark.parametrize("made", SHAPES)
@DIRECTIONS
@DEVICE
def test_kernel_equals_reference(made: Any, to_origin: bool, device: str) -> None:
    equal(partial(slots, made, 6, first=1), device, to_origin)


@pytest.mark.parametrize("shift", [1, 2, 4, 8, 16])
@DIRECTIONS
@DEVICE
def test_slots_at_any_address_take_narrower_words(shift: int, to_origin: bool, device: str) -> None:
    make = partial(slots, 512, 4, shift=shift)
    assert equal(make, device, to_origin) == shift


@pytest.mark.parametrize("ctas", [1, 7, 1000])
@DEVICE
def test_any_number_of_programs_moves_a_piece_once(ctas: int, device: str) -> None:
    equal(partial(slots, 1600, 6), device, False, ctas=ctas)


@DEVICE
def test_an_empty_plan_moves_nothing(device: str) -> None:
    equal(partial(slots, 512, 2, first=2), device, True)


def test_a_block_far_from_the_first_one_is_addressed_in_64_bits() -> None:
    """A cache of 4 GiB and a little, of which only the touched pages are ever in memory."""
    blocks, page = (2 << 20) + 64, 2048
    kv = PagedKV.describe([torch.empty((blocks, 4, 256), dtype=torch.bfloat16)], 4)
    ids = np.array([blocks - 1, 0, (1 << 20) + 1, 1 << 20], dtype=np.int64)
    slot = noise("cpu", 3, 4, page)
    rows = slot_rows(kv, 16, placed(kv, ids), np.array([slot.data_ptr()]))
    runs = [lambda: copy_pages(CopyJob(kv, *rows))]
    if not COMPILED:
        runs.append(lambda: launch(World(kv, [], *rows), False) and None)
    for run in runs:
        kv.pages[0][ids] = 0xA5
        run()
        assert all(map(torch.equal, kv.pages[0][ids], slot))


# ---- other KV caches


def owners(sizes: Sequence[int], gaps: Sequence[int], device: str, shift: int = 0) -> World:
    """Six blocks out of other KV caches, each with its own number of blocks, and `gaps[i]` bytes
    from the end of a block to the next one; the last cache is the reader's. sizes: of the pages, by
    layer."""
    caches, memory = list[PagedKV](), list[Tensor]()
    for number, gap in enumerate((*gaps, 16)):
        blocks, layers = 7 + 3 * number, list[Tensor]()
        for layer, size in enumerate(sizes):
            stride, at = size + gap, 0 if number == len(gaps) else shift
            memory.append(noise(device, 31 * number + layer, at + blocks * stride))
            layers.append(memory[-1].as_strided((blocks, 1, size), (stride, size, 1), at))
        caches.append(PagedKV.describe(layers, 1))
    *there, kv = caches
    dice = np.random.default_rng(len(gaps))
    rows = []
    for place in dice.permutation(kv.num_blocks)[:6].tolist():
        owner = int(dice.integers(len(there)))
        block = int(dice.integers(there[owner].num_blocks))
        first, *more = (block * int(kind.planes[0, 1]) for kind in there[owner].kinds)
        rows.append([owner, first, place, *more])
    bases = [np.concatenate([kind.planes[:, 0] for kind in cache.kinds]) for cache in there]
    return World(kv, memory, np.array(rows, dtype=np.int64), np.stack(bases))


OWNERS = [([512] * 3, 1, 512, 1), ([513] * 3, 1, 0, 3), ([8] * 3, 5, 0, 1), ([512] * 3, 5, 512, 3)]
OWNERS += [([1032] * 3, 5, 24, 1), ([50] * 3, 5, 2, 3), ([100] * 3, 5, 3, 3)]
OWNERS += [([2624, 528, 20], 2, 0, 1)]


@pytest.mark.parametrize(("sizes", "count", "gap", "ctas"), OWNERS)
@DEVICE
def test_blocks_of_other_caches_come_to_the_places_that_rows_name(
    sizes: list[int], count: int, gap: int, ctas: int, device: str
) -> None:
    gaps = [gap * (owner + 1) for owner in range(count)]
    equal(partial(owners, sizes, gaps), device, False, ctas=ctas)


@pytest.mark.parametrize(
    ("shift", "gap", "aligned"),
    [(0, 0, 16), (8, 0, 8), (0, 8, 8), (4, 16, 4), (0, 2, 2), (1, 16, 1)],
)
@DEVICE
def test_words_are_as_wide_as_addresses_allow(
    shift: int, gap: int, aligned: int, device: str
) -> None:
    make = partial(owners, [512, 512], [gap, gap], shift=shift)
    assert equal(make, device, False) == aligned


# ---- the reference


@settings(max_examples=60)
@example(sizes=[1 << 16], gaps=[0], chosen=6, to_origin=False)
@example(sizes=[1 << 16], gaps=[0], chosen=6, to_origin=True)
@given(
    sizes=st.lists(st.integers(1, 70), min_size=1, max_size=3),
    gaps=st.lists(st.integers(0, 40), min_size=1, max_size=4),
    chosen=st.integers(0, 6),
    to_origin=st.booleans(),
)
def test_the_reference_is_what_indexing_gives(
    sizes: list[int], gaps: list[int], chosen: int, to_origin: bool
) -> None:
    world, right = owners(sizes, gaps, "cpu"), owners(sizes, gaps, "cpu").memory
    layers, seen = len(sizes), set[tuple[int, int]]()
    for number, (owner, offset, place, *_) in enumerate(world.rows[:chosen].tolist()):
        block = offset // (sizes[0] + gaps[owner])
        if to_origin and (owner, block) in seen:
            chosen = number  # nobody says which of two blocks is written last
            break
        seen.add((owner, block))
        for layer, size in enumerate(sizes):
            there = right[owner * layers + layer][block * (size + gaps[owner]) :][:size]
            here = right[len(gaps) * layers + layer][place * (size + 16) :][:size]
            (there if to_origin else here).copy_(here if to_origin else there)
    copy_pages(CopyJob(world.kv, world.rows[:chosen], world.origins, to_origin=to_origin))
    assert all(map(torch.equal, world.memory, right))
