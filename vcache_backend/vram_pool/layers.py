"""Recognises how one layer's KV tensor lies in memory, from its shape and strides."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

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


@dataclass(frozen=True)
class Arrangement:
    """How one layer lies in memory. Sizes and strides in bytes."""

    name: str
    parts: int
    part_stride: int
    num_blocks: int
    block_stride: int
    page_bytes: int

    @property
    def kind(self) -> tuple[str, int, int]:
        return self.name, self.parts, self.page_bytes


class LayerTensor:
    """A layer's tensor, with the layer's name for error messages."""

    def __init__(self, name: str, tensor: Tensor, block_size: int) -> None:
        self.name, self.tensor, self.block_size = name, tensor, block_size

    def __str__(self) -> str:
        kv = self.tensor
        dtype = str(kv.dtype).removeprefix("torch.")
        return (
            f"{self.name} (shape {tuple(kv.shape)}, strides {kv.stride()}, {dtype} on {kv.device})"
        )

    def error(self, why: str) -> LayoutError:
        return LayoutError(f"KV cache of {self} with block_size {self.block_size}: {why}")

    def pages(self, a: Arrangement) -> list[Tensor]:
        kv = self.tensor
        if kv.is_meta:
            raise self.error("it has no memory")
        start = kv.storage_offset() * kv.element_size()
        raw = torch.empty(0, dtype=torch.uint8, device=kv.device).set_(kv.untyped_storage())
        shape, stride = (a.num_blocks, a.page_bytes), (a.block_stride, 1)
        return [
            raw.as_strided(shape, stride, start + part * a.part_stride) for part in range(a.parts)
        ]

    def arrangement(self, axes: str | None) -> Arrangement:
        kv = self.tensor
        if kv.dtype not in DTYPES or not kv.numel():
            raise self.error(
                "empty, or of a dtype vcache does not move; it moves bfloat16, float16, "
                "float32, fp8 and uint8"
            )
        names = self._named(axes) if axes is not None else self._recognised()
        block, item = names.index("block"), kv.element_size()
        part = names.index("part") if "part" in names else None
        inside = [axis for axis in range(kv.dim()) if axis != block]
        order = self._dense(inside)
        if order is None and part is not None:
            order = self._dense([axis for axis in inside if axis != part])
        else:
            part = None
        if order is None:
            raise self.error("a block's bytes are not contiguous; pass the tensor vLLM allocated")
        sizes = [(names[axis], kv.shape[axis]) for axis in order]
        page_bytes = math.prod(size for _, size in sizes) * item
        parts = 1 if part is None else kv.shape[part]
        part_stride = 0 if part is None else kv.stride(part) * item
        text = ".".join(
            f"{name}{size}" for name, size in ([("part", parts)] if parts > 1 else []) + sizes
        )
        name = f"{text} {str(kv.dtype).removeprefix('torch.')}"
        found = Arrangement(
            name, parts, part_stride, kv.shape[block], kv.stride(block) * item, page_bytes
        )
        self._refuse_overlap(found)
        return found

    def _named(self, axes: str) -> tuple[str, ...]:
        names, shape = tuple(axes.split()), self.tensor.shape
        if len(set(names)) < len(names) or not {"block", "token"} <= set(names) <= set(KV_AXES):
            raise self.error(
                f"axes {axes!r} must be different words of {', '.join(KV_AXES)}, with block and "
                "token among them"
            )
        if len(names) != len(shape) or shape[names.index("token")] != self.block_size:
            raise self.error(
                f"axes {axes!r} do not fit: {len(shape)} axes are needed, and a token axis of "
                f"{self.block_size}"
            )
        return names

    def _recognised(self) -> tuple[str, ...]:
        shape = self.tensor.shape
        fits = []
        for names in (tuple(known.split()) for known in _KNOWN.get(len(shape), ())):
            if shape[names.index("token")] == self.block_size and (
                "part" not in names or shape[names.index("part")] == 2
            ):
                fits.append(names)
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

    def _refuse_overlap(self, a: Arrangement) -> None:
        blocks = (a.num_blocks, a.block_stride)
        span = a.page_bytes
        for count, stride in sorted([blocks, (a.parts, a.part_stride)], key=lambda pair: pair[1]):
            if count > 1 and stride < span:
                raise self.error(f"pages of {span} B overlap: they are {stride} B apart")
            span += (count - 1) * stride
