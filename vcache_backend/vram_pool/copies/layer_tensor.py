"""Recognises how one layer's KV tensor lies in memory: its pages, and the order of their bytes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from vcache_backend.config import KV_AXES
from vcache_backend.errors import LayoutError

DTYPES = (
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.uint8,
)
_KNOWN = {
    3: ("block token dim",),
    4: ("block head token dim", "block token head dim", "part block token dim"),
    5: (
        "part block token head dim",
        "block part token head dim",
        "part block head token dim",
        "block part head token dim",
    ),
}


class Layer(NamedTuple):
    """A layer's tensor as it lies in memory."""

    order: str
    """The order of a block's bytes and their dtype, as text."""
    planes: list[Tensor]
    """A plane for each part: uint8 (num_blocks, page_bytes)."""

    @property
    def kind(self) -> tuple[str, int, int]:
        return self.order, len(self.planes), self.planes[0].shape[1]


class LayerTensor:
    """Recognises how one layer's KV tensor lies in memory, from its shape and strides."""

    def __init__(self, name: str, tensor: Tensor, block_size: int) -> None:
        self.name, self.tensor, self.block_size = name, tensor, block_size

    def __str__(self) -> str:
        kv = self.tensor
        shape = f"shape {tuple(kv.shape)}, strides {kv.stride()}, {dtype_of(kv)} on {kv.device}"
        return f"{self.name} ({shape})"

    def error(self, why: str) -> LayoutError:
        return LayoutError(f"KV cache of {self} with block_size {self.block_size}: {why}")

    def described(self, axes: str | None) -> Layer:
        """Raises LayoutError. axes: see `PagedKV.describe`."""
        kv, item = self.tensor, self.tensor.element_size()
        if kv.dtype not in DTYPES or not kv.numel():
            raise self.error(
                "empty, or of a dtype vcache does not move; it moves bfloat16, float16, "
                "float32, fp8 and uint8"
            )
        names = self._named(axes) if axes is not None else self._recognised()
        block = names.index("block")
        inside = [axis for axis in range(kv.dim()) if axis != block]
        order, parts, apart = self._dense(inside), 1, 0
        if order is None and "part" in names:
            part = names.index("part")
            order = self._dense([axis for axis in inside if axis != part])
            parts, apart = kv.shape[part], kv.stride(part) * item
        if order is None:
            raise self.error("a block's bytes are not contiguous; pass the tensor vLLM allocated")
        page_bytes = math.prod(kv.shape[axis] for axis in order) * item
        blocks, stride = kv.shape[block], kv.stride(block) * item
        self._refuse_overlap(page_bytes, (blocks, stride), (parts, apart))
        text = [f"part{parts}"] * (parts > 1) + [f"{names[axis]}{kv.shape[axis]}" for axis in order]
        starts = (kv.data_ptr() + part * apart for part in range(parts))
        planes = [plane(kv, start, blocks, page_bytes, stride) for start in starts]
        return Layer(f"{'.'.join(text)} {dtype_of(kv)}", planes)

    def _named(self, axes: str) -> tuple[str, ...]:
        names, shape = tuple(axes.split()), self.tensor.shape
        known = len(set(names)) == len(names) and {"block", "token"} <= set(names) <= set(KV_AXES)
        fits = known and len(names) == len(shape)
        if not fits or shape[names.index("token")] != self.block_size:
            raise self.error(
                f"axes {axes!r} do not fit: needed are {len(shape)} different words of "
                f"{', '.join(KV_AXES)}, with block and a token axis of {self.block_size} among them"
            )
        return names

    def _recognised(self) -> tuple[str, ...]:
        shape = self.tensor.shape
        known = (tuple(axes.split()) for axes in _KNOWN.get(len(shape), ()))
        fits = [
            names
            for names in known
            if shape[names.index("token")] == self.block_size
            and ("part" not in names or shape[names.index("part")] == 2)
        ]
        if not fits:
            raise self.error(
                "no known layout has this shape; check block_size, or pass axes, such as 'block "
                "token head dim'"
            )
        if len(fits) == 1:
            return fits[0]
        raise self.error(
            "ambiguous; pass axes=" + " or ".join(repr(" ".join(names)) for names in fits)
        )

    def _dense(self, axes: Sequence[int]) -> list[int] | None:
        """`axes` without axes of size 1, outermost in memory first; None if the axes leave gaps in
        memory."""
        shape, stride = self.tensor.shape, self.tensor.stride()
        order = sorted((axis for axis in axes if shape[axis] > 1), key=lambda axis: stride[axis])
        expected = 1
        for axis in order:
            if stride[axis] != expected:
                return None
            expected *= shape[axis]
        return order[::-1]

    def _refuse_overlap(self, span: int, *counted: tuple[int, int]) -> None:
        """counted: how many pages there are, and how far apart, in each direction."""
        for count, stride in sorted(counted, key=lambda pair: pair[1]):
            if count > 1 and stride < span:
                raise self.error(f"pages of {span} B overlap: they are {stride} B apart")
            span += (count - 1) * stride


def dtype_of(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def plane(tensor: Tensor, start: int, blocks: int, nbytes: int, stride: int) -> Tensor:
    """The pages of `nbytes` bytes from address `start` on in the tensor's storage, as uint8."""
    storage = tensor.untyped_storage()
    raw = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
    return raw.as_strided((blocks, nbytes), (stride, 1), start - storage.data_ptr())


def span_of(block: Tensor) -> int:
    """Bytes from the beginning of a block's first number to the end of the last number."""
    steps = zip(block.shape, block.stride(), strict=True)
    return (1 + sum((size - 1) * stride for size, stride in steps)) * block.element_size()
