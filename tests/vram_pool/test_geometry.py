"""Whole KV caches: several kinds of layers, several block tables."""

from __future__ import annotations

import pytest
import torch
from test_layer_tensor import BLOCK, BLOCKS, DIM, HEADS, PAGE, kv
from torch import Tensor

from vcache_backend.errors import LayoutError
from vcache_backend.vram_pool.copies.geometry import PagedKV, Share


@pytest.mark.parametrize(
    "other",
    [
        kv(BLOCKS, BLOCK, HEADS, 2 * DIM),
        kv(BLOCKS, BLOCK, HEADS, DIM, memory=(0, 2, 1, 3)),
        kv(BLOCKS, BLOCK, HEADS, DIM, dtype=torch.float16),
    ],
    ids=["page size", "order", "dtype"],
)
def test_layers_that_differ_are_described_kind_by_kind(other: Tensor) -> None:
    first = kv(BLOCKS, BLOCK, HEADS, DIM)
    found = PagedKV.describe([first, other, first.clone()], BLOCK)
    one, two = (PagedKV.describe([tensor], BLOCK) for tensor in (first, other))
    assert found.name == f"2 x {one.name} + 1 x {two.name}"
    # A codec of the offload tier must not take the one for the other.
    assert found.dtype == ("bfloat16+float16" if other.dtype == torch.float16 else "bfloat16")
    kinds = [(kind.layers, kind.page_bytes, kind.others) for kind in found.kinds]
    assert kinds == [(2, one.page_bytes, ()), (1, two.page_bytes, ())]
    assert found.chunk_bytes(64) == 4 * (2 * one.page_bytes + two.page_bytes)
    assert found.kinds[1].pages[0].data_ptr() == other.data_ptr()
    table = PagedKV.describe_groups([({"a": first, "b": other}, Share(BLOCK, 32))])
    assert table.chunk_bytes(64) == 2 * (one.page_bytes + two.page_bytes)
    nbytes = [kind.chunk_bytes(64) for kind in table.kinds]
    assert nbytes == [2 * one.page_bytes, 2 * two.page_bytes]


def test_several_block_tables_must_lie_in_the_same_memory() -> None:
    one, two = kv(BLOCKS, BLOCK, HEADS, DIM), kv(BLOCKS, BLOCK, HEADS, DIM)
    full = {"a": one, "b": two}, Share(BLOCK)
    found = PagedKV.describe_groups([full, ({"c": one}, Share(BLOCK, 32)), ({}, Share(BLOCK, 16))])
    assert (found.layers, found.chunk_bytes(64)) == (2, 2 * (4 + 2 + 1) * PAGE)
    assert found.name == PagedKV.describe([one], BLOCK).name
    # One table's blocks may be longer where a token has fewer bytes.
    longer = one.view(BLOCKS, 2 * BLOCK, HEADS // 2, DIM)
    found = PagedKV.describe_groups([full, ({"c": longer}, Share(2 * BLOCK))])
    assert (found.block_size, found.chunk_bytes(64)) == (BLOCK, 2 * (4 + 2) * PAGE)
    elsewhere, larger = kv(BLOCKS, BLOCK, HEADS, DIM), kv(BLOCKS, BLOCK, HEADS, 2 * DIM)
    strides = one.stride(0), HEADS // 2 * DIM, DIM, 1
    padded = one.as_strided((BLOCKS, BLOCK, HEADS // 2, DIM), strides)
    for other in (elsewhere, one[1:], one[:-1]):
        said = "must lie in the same memory, but c and its group have 1 layers"
        with pytest.raises(LayoutError, match=said):
            PagedKV.describe_groups([full, ({"c": other}, Share(BLOCK))])
    for other in (larger, padded):
        with pytest.raises(LayoutError, match="those of [abc] do not lie beside the others'"):
            PagedKV.describe_groups([full, ({"c": other}, Share(BLOCK))])
    with pytest.raises(LayoutError, match="no KV caches"):
        PagedKV.describe_groups([({}, Share(BLOCK))])


def test_pages_side_by_side_in_one_block_are_one_page_for_all_block_tables() -> None:
    """As DeepSeek V4 has them: another order and other sizes in each table."""
    memory = torch.zeros(BLOCKS, 100, dtype=torch.uint8)

    def page(begin: int, tokens: int, size: int, dtype: torch.dtype = torch.uint8) -> Tensor:
        rows = memory[:, begin : begin + tokens * size * dtype.itemsize]
        return rows.view(dtype).view(BLOCKS, 1, tokens, size)

    full, window = {"a": page(0, 4, 10), "b": page(40, 4, 5)}, {"c": page(0, 2, 20, torch.float16)}
    tables = [(full, Share(8)), (window, Share(2, 6))]
    found = PagedKV.describe_groups(tables)
    assert (found.layers, found.page_bytes, found.num_blocks) == (1, 80, BLOCKS)
    assert (found.dtype, found.chunk_bytes(16)) == ("uint8+float16", (2 + 3) * 80)
    assert found.planes.tolist() == [[memory.data_ptr(), 100]]
    memory[3] = torch.arange(100)
    assert found.pages[0][3].tolist() == list(range(80))
    turned = {"a": page(20, 4, 10), "b": page(0, 4, 5)}
    other = PagedKV.describe_groups([(turned, Share(8)), (window, Share(2, 6))])
    assert (other.page_bytes, other.name == found.name) == (80, False)
    with pytest.raises(LayoutError, match="those of c do not lie beside"):
        PagedKV.describe_groups([tables[0], ({"c": page(0, 2, 20)[1:]}, Share(2))])


def test_a_chunk_is_whole_blocks() -> None:
    found = PagedKV.describe([kv(BLOCKS, BLOCK, HEADS, DIM)], BLOCK)
    assert found.chunk_bytes(64) == 4 * PAGE
    for size in (40, 0, -64):
        with pytest.raises(LayoutError, match=f"{size} is not a multiple of the KV block size 16"):
            found.chunk_bytes(size)
