"""Which KV layouts are recognised, what they become, and what is refused, by name."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from vcache_backend.errors import LayoutError
from vcache_backend.vram_pool.copies.geometry import PagedKV
from vcache_backend.vram_pool.copies.layer_tensor import DTYPES

BLOCKS, BLOCK, HEADS, DIM = 10, 16, 8, 64
PAGE = BLOCK * HEADS * DIM * 2


def kv(
    *shape: int, memory: tuple[int, ...] | None = None, dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """A tensor of `shape` whose axes lie in memory in the order `memory`, outermost first."""
    order = memory or tuple(range(len(shape)))
    inverse = [order.index(axis) for axis in range(len(shape))]
    return torch.zeros([shape[axis] for axis in order], dtype=dtype).permute(inverse)


LONG = {"p": 2, "b": BLOCKS, "t": BLOCK, "h": HEADS, "d": DIM, "k": 2 * DIM, "l": 576, "1": 1}
"""How long an axis is: part, block, token, head, dim; K and V in one; a latent; one head."""


# Name, axes of the tensor, the same in memory (outermost first) if that differs, parts, order of
# bytes.
LAYOUTS = [
    ("parts outermost", "pbthd", "", 2, "part2.token16.head8.dim64"),
    ("parts outermost, HND strides", "pbthd", "pbhtd", 2, "part2.head8.token16.dim64"),
    ("parts first, blocks outermost", "pbthd", "bpthd", 1, "part2.token16.head8.dim64"),
    ("blocks first, parts outermost", "bpthd", "pbthd", 2, "part2.token16.head8.dim64"),
    ("blocks outermost", "bpthd", "", 1, "part2.token16.head8.dim64"),
    ("heads before tokens, parts outermost", "pbhtd", "", 2, "part2.head8.token16.dim64"),
    ("packed, HND", "bhtk", "", 1, "head8.token16.dim128"),
    ("packed, tokens first", "bthk", "", 1, "token16.head8.dim128"),
    ("elements of a head apart", "bhtd", "bhdt", 1, "head8.dim64.token16"),
    ("MLA", "btl", "", 1, "token16.dim576"),
    ("one head", "b1td", "", 1, "token16.dim64"),
]


def of(axes: str, memory: str = "") -> Tensor:
    """A tensor of these axes."""
    return kv(*(LONG[axis] for axis in axes), memory=tuple(map(axes.index, memory or axes)))


@pytest.mark.parametrize(
    ("axes", "memory", "parts", "order"),
    [row[1:] for row in LAYOUTS],
    ids=[row[0] for row in LAYOUTS],
)
def test_a_known_layout_is_its_tensors_bytes(
    axes: str, memory: str, parts: int, order: str
) -> None:
    tensor = of(axes, memory)
    tensor.copy_(torch.randn(tensor.shape))
    found = PagedKV.describe([tensor, torch.clone(tensor)], BLOCK)
    expected = (2, parts, BLOCKS, f"{order} bfloat16")
    assert (found.layers, found.parts, found.num_blocks, found.name) == expected
    assert found.page_bytes == tensor.numel() * 2 // BLOCKS // parts
    assert found.chunk_bytes(2 * BLOCK) == 2 * 2 * (tensor.numel() // BLOCKS) * 2
    block_axis = 0 if tensor.shape[0] == BLOCKS else 1
    for block in (0, 3, BLOCKS - 1):
        stored = torch.cat([page[block] for page in found.pages[:parts]])
        # The block's elements in the order of their addresses.
        one = tensor.select(block_axis, block)
        order_ = sorted(range(one.dim()), key=one.stride, reverse=True)
        assert torch.equal(stored, one.permute(order_).contiguous().view(torch.uint8).reshape(-1))
    for (base, stride), page in zip(found.planes.tolist(), found.pages, strict=True):
        assert (page.data_ptr(), page.stride(0)) == (base, stride)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_page_has_the_bytes_of_its_dtype_and_its_name(dtype: torch.dtype) -> None:
    found = PagedKV.describe([kv(BLOCKS, BLOCK, HEADS, DIM, dtype=dtype)], BLOCK)
    assert found.page_bytes == BLOCK * HEADS * DIM * dtype.itemsize
    assert found.dtype == str(dtype).removeprefix("torch.")
    assert found.name.endswith(f" {found.dtype}")


def test_heads_as_many_as_tokens_are_ambiguous_until_axes_are_named() -> None:
    tensor = kv(BLOCKS, BLOCK, BLOCK, DIM)
    said = "ambiguous; pass axes='block head token dim' or 'block token head dim'"
    with pytest.raises(LayoutError, match=said):
        PagedKV.describe([tensor], BLOCK)
    axes = "block head token dim", "block token head dim"
    names = [PagedKV.describe([tensor], BLOCK, axes=one).name for one in axes]
    assert names == ["head16.token16.dim64 bfloat16", "token16.head16.dim64 bfloat16"]


def test_two_rows_of_blocks_are_not_taken_for_two_blocks_of_heads() -> None:
    said = "ambiguous; pass axes='block head token dim' or 'part block token dim'"
    with pytest.raises(LayoutError, match=said):
        PagedKV.describe([kv(2, BLOCKS, BLOCK, DIM)], BLOCK)


def refused(tensor: Tensor, axes: str | None = None) -> str:
    with pytest.raises(LayoutError) as caught:
        PagedKV.describe({"model.layers.0": tensor}, BLOCK, axes=axes)
    return str(caught.value)


@pytest.mark.parametrize(
    ("tensor", "why"),
    [
        (kv(BLOCKS, DIM), "no known layout"),
        (kv(BLOCKS, 3, BLOCK, HEADS, DIM), "no known layout"),
        (kv(1, 2, BLOCKS, BLOCK, HEADS, DIM), "no known layout"),
        (kv(BLOCKS, BLOCK, HEADS, DIM, dtype=torch.int64), "a dtype vcache does not move"),
        (kv(0, BLOCK, HEADS, DIM), "empty"),
        (kv(BLOCKS, BLOCK, HEADS, 2 * DIM)[..., :DIM], "not contiguous"),
        (kv(BLOCKS, BLOCK, 2 * HEADS, DIM)[:, :, ::2], "not contiguous"),
        (kv(1, BLOCK, HEADS, DIM).expand(BLOCKS, -1, -1, -1), "overlap"),
        (kv(1, BLOCKS, BLOCK, HEADS, DIM).expand(2, -1, -1, -1, -1), "overlap"),
    ],
)
def test_what_is_not_known_is_refused(tensor: Tensor, why: str) -> None:
    assert why in refused(tensor)


MISFITS = ["block", "block token head", "block token head head", "token block head dim", ""]


@pytest.mark.parametrize("axes", MISFITS)
def test_axes_that_do_not_fit_are_refused(axes: str) -> None:
    assert f"axes {axes!r}" in refused(kv(BLOCKS, BLOCK, HEADS, DIM), axes=axes)


@pytest.mark.parametrize(
    "other",
    [kv(BLOCKS + 1, BLOCK, HEADS, DIM), kv(BLOCKS, BLOCK, HEADS, DIM).to("meta")],
    ids=["blocks", "device"],
)
def test_layers_with_other_blocks_are_refused(other: Tensor) -> None:
    with pytest.raises(LayoutError, match=r"layer 1 .*: its blocks are not those of layer 0 "):
        PagedKV.describe([kv(BLOCKS, BLOCK, HEADS, DIM), other], BLOCK)
