"""Describes vLLM's paged KV cache for copies: pages of opaque bytes at raw addresses.

A *page* is the contiguous bytes of one (layer, block, part). A part is K or V, if K and V lie
apart. A chunk holds the layers in order, for each layer the blocks, and for each block the parts:
the page of (layer, v-th block of the chunk, part) begins at `((layer * blocks_per_chunk + v) *
parts + part) * page_bytes`. If layers differ in page size, a chunk first holds all layers of the
first layer's kind in this way, then the layers of the next kind, and so on."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import blake2b
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vcache_backend.config import KV_AXES
from vcache_backend.errors import LayoutError

Int64s = npt.NDArray[np.int64]
MAX_WORD = 16


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


def alignment(*values: int) -> int:
    """The largest power of two, up to 16, that divides all of `values`: the bytes that one access
    may move."""
    bits = MAX_WORD
    for value in values:
        bits |= value
    return bits & -bits


class Share(NamedTuple):
    """The part of a chunk that belongs to a group of layers with a block table of its own.

    The part has blocks of `block_size` tokens, for the chunk's last `tail` tokens; 0: for all."""

    block_size: int
    tail: int = 0

    def of(self, chunk_size: int) -> int:
        """The number of the part's blocks in a chunk of `chunk_size` tokens."""
        return (self.tail or chunk_size) // self.block_size


@dataclass(frozen=True, eq=False)
class PagedKV:
    """The geometry of one worker's KV cache. Keeps the cache's memory alive. Immutable; any thread.

    dtype: the type of the numbers; several types are joined by +. name: the order of bytes in a
    chunk as text, without the number of blocks; equal in all processes that may share. pages: for
    each layer and part (layer-major) a uint8 view (num_blocks, page_bytes) of vLLM's memory.
    planes: (layers * parts, 2) int64: the address of each view, and the bytes from block to block.
    shares: a Share for each group of layers, if there are several groups. All groups lie in the
    same planes, and each block belongs to one group at a time. A chunk holds the blocks of the
    first group, then the blocks of the second group, and so on. others: the layers of further
    kinds, kind by kind; `layers`, `parts`, `page_bytes`, `pages` and `planes` describe the first
    kind alone."""

    device: torch.device
    dtype: str
    layers: int
    parts: int
    page_bytes: int
    block_size: int
    num_blocks: int
    name: str
    pages: tuple[Tensor, ...]
    planes: Int64s
    shares: tuple[Share, ...] = ()
    others: tuple[PagedKV, ...] = ()

    @classmethod
    def describe(
        cls,
        kvcaches: Sequence[Tensor] | Mapping[str, Tensor],
        block_size: int,
        *,
        axes: str | None = None,
    ) -> PagedKV:
        """Recognise the layout of `kvcaches`, a tensor for each layer, from shapes and strides.

        block_size: tokens of a block. axes: the names of the tensors' axes, words of `KV_AXES` with
        spaces between, such as `"part block token head dim"`; needed if the shapes are ambiguous.
        Raises LayoutError, which names the layer and what to pass: unknown, ambiguous, not dense,
        or layers with other blocks or on another device."""
        named = (
            kvcaches.items()
            if isinstance(kvcaches, Mapping)
            else ((f"layer {i}", kv) for i, kv in enumerate(kvcaches))
        )
        layers = [LayerTensor(name, tensor, block_size) for name, tensor in named]
        if not layers:
            raise LayoutError("no KV caches were given; pass one tensor for each layer")
        kinds: dict[tuple[str, int, int], list[tuple[LayerTensor, Arrangement]]] = {}
        for layer in layers:
            found = layer.arrangement(axes)
            kinds.setdefault(found.kind, []).append((layer, found))
            first = next(iter(kinds.values()))[0]
            if (layer.tensor.device, found.num_blocks) != (
                first[0].tensor.device,
                first[1].num_blocks,
            ):
                raise layer.error(f"its blocks are not those of {first[0]}")
        described = [cls._of_a_kind(alike, block_size) for alike in kinds.values()]
        if len(described) == 1:
            return described[0]
        return replace(
            described[0],
            dtype="+".join(dict.fromkeys(kv.dtype for kv in described)),
            name=" + ".join(f"{kv.layers} x {kv.name}" for kv in described),
            others=tuple(described[1:]),
        )

    @classmethod
    def _of_a_kind(
        cls, layers: Sequence[tuple[LayerTensor, Arrangement]], block_size: int
    ) -> PagedKV:
        tensor, first = layers[0][0].tensor, layers[0][1]
        pages = tuple(page for layer, found in layers for page in layer.pages(found))
        return cls(
            device=tensor.device,
            dtype=str(tensor.dtype).removeprefix("torch."),
            layers=len(layers),
            parts=first.parts,
            page_bytes=first.page_bytes,
            block_size=block_size,
            num_blocks=first.num_blocks,
            name=first.name,
            pages=pages,
            planes=np.array([(page.data_ptr(), page.stride(0)) for page in pages], dtype=np.int64),
        )

    @classmethod
    def describe_groups(
        cls, groups: Sequence[tuple[Mapping[str, Tensor], Share]], *, axes: str | None = None
    ) -> PagedKV:
        """Recognise several groups of layers. This worker may have no layers of a group. If the
        pages have several sizes, a block of all layers is one page.

        Raises LayoutError like `describe`, and if the groups do not lie in the same memory."""
        held = [layers for layers, _ in groups if layers]
        sizes = {_span(tensor[0]) for layers in held for tensor in layers.values()}
        if len(held) > 1 and len(sizes) > 1:
            shares = tuple(share for _, share in groups)
            return replace(cls._side_by_side(held, shares[0].block_size), shares=shares)
        found = {
            next(iter(layers)): cls.describe(layers, share.block_size, axes=axes)
            for layers, share in groups
            if layers
        }
        if not found:
            raise LayoutError("no KV caches were given; pass one tensor for each layer")
        widest = max(found.values(), key=lambda kv: kv.layers)
        for layer, kv in found.items():
            if kv.pitch != widest.pitch or (kv.planes != widest.planes[: len(kv.planes)]).any():
                raise LayoutError(
                    "KV caches of several block tables must lie in the same memory, but "
                    f"{layer} and its group have "
                    f"{kv.layers} layers of {kv.name}, others {widest.layers} of {widest.name}, "
                    "or lie elsewhere"
                )
        name = " + ".join(dict.fromkeys(kv.name for kv in found.values()))
        return replace(
            widest,
            name=name,
            block_size=groups[0][1].block_size,
            shares=tuple(share for _, share in groups),
        )

    @classmethod
    def _side_by_side(cls, groups: Sequence[Mapping[str, Tensor]], block_size: int) -> PagedKV:
        """Describe groups whose blocks hold the layers' pages side by side, in an order of each
        group. Raises LayoutError if a block is not one piece of memory."""
        tensors = [tensor for layers in groups for tensor in layers.values()]
        first = min(tensors, key=Tensor.data_ptr)
        base, storage = first.data_ptr(), first.untyped_storage()
        stride, count = first.stride(0) * first.element_size(), len(first)
        nbytes, order = 0, blake2b(digest_size=16)
        for layers in groups:
            order.update(b"group")
            for name, tensor in layers.items():
                begin = tensor.data_ptr() - base
                blocks = tensor.untyped_storage().data_ptr(), len(tensor)
                nbytes = max(nbytes, begin + _span(tensor[0]))
                if (
                    blocks != (storage.data_ptr(), count)
                    or tensor.stride(0) * tensor.element_size() != stride
                    or nbytes > stride
                ):
                    raise LayoutError(
                        f"the pages of several block tables have several sizes, and those of "
                        f"{name} do not lie beside the others' in one block"
                    )
                text = f"{begin} {tuple(tensor.shape[1:])} {tensor.stride()[1:]} {tensor.dtype};"
                order.update(text.encode())
        raw = torch.empty(0, dtype=torch.uint8, device=first.device).set_(storage)
        page = raw.as_strided((count, nbytes), (stride, 1), base - storage.data_ptr())
        types = dict.fromkeys(str(tensor.dtype).removeprefix("torch.") for tensor in tensors)
        return cls(
            device=first.device,
            dtype="+".join(types),
            layers=1,
            parts=1,
            page_bytes=nbytes,
            block_size=block_size,
            num_blocks=count,
            name=f"block{nbytes} {order.hexdigest()}",
            pages=(page,),
            planes=np.array([(base, stride)], dtype=np.int64),
        )

    def with_states(self, groups: Sequence[Mapping[str, Tensor]], split: int) -> PagedKV:
        """This KV cache with further groups, whose layers keep a state in each block's page.

        split: how many blocks of this KV cache make a block of the states. Raises LayoutError if
        the states do not lie in the same planes."""
        pages, stride, room = list(self.pages), int(self.planes[0, 1]), split * self.page_bytes
        for layers in groups:
            for number, (layer, states) in enumerate(layers.items()):
                start, apart = states.data_ptr(), states.stride(0) * states.element_size()
                if number == len(pages):
                    storage = states.untyped_storage()
                    raw = torch.empty(0, dtype=torch.uint8, device=self.device).set_(storage)
                    at = start - storage.data_ptr()
                    pages.append(
                        raw.as_strided((self.num_blocks, self.page_bytes), (stride, 1), at)
                    )
                fits = _span(states[0]) <= room and (split == 1 or stride == self.page_bytes)
                alike = (apart, len(states)) == (
                    split * stride,
                    self.num_blocks // split,
                ) and pages[number].data_ptr() == start
                if self.parts > 1 or not fits or not alike:
                    raise LayoutError(
                        f"the state of {layer} does not lie in pages of {room} B beside others"
                    )
        planes = np.array([(page.data_ptr(), page.stride(0)) for page in pages], dtype=np.int64)
        return replace(self, layers=len(pages) // self.parts, pages=tuple(pages), planes=planes)

    @property
    def pitch(self) -> tuple[torch.device, int, int, int]:
        """The properties that groups in the same memory have in common."""
        return self.device, self.parts, self.page_bytes, self.num_blocks

    @cached_property
    def kinds(self) -> tuple[PagedKV, ...]:
        """The layers, kind by kind. Layers of the same kind have equal pages, and one launch copies
        them."""
        if not self.others:
            return (self,)
        size, shares = self.block_size, self.shares
        others = (replace(kv, block_size=size, shares=shares) for kv in self.others)
        return (replace(self, others=()), *others)

    @cached_property
    def block_bytes(self) -> int:
        """Bytes of a block of the KV cache, in the layers of all kinds."""
        return sum(kv.layers * kv.parts * kv.page_bytes for kv in self.kinds)

    @cached_property
    def aligned(self) -> int:
        """The largest power of two, up to 16, that divides every page's address and size."""
        return alignment(self.page_bytes, *self.planes.reshape(-1).tolist())

    def chunk_bytes(self, chunk_size: int) -> int:
        """Bytes of a chunk of `chunk_size` tokens. Raises LayoutError if that is not a multiple of
        the block size."""
        return self.block_bytes * self.blocks_in(chunk_size)

    def blocks_in(self, chunk_size: int) -> int:
        """The blocks of a chunk, of all groups together. LayoutError like `chunk_bytes`."""
        shares = self.shares or (Share(self.block_size),)
        for size, _ in shares:
            if chunk_size <= 0 or chunk_size % size:
                raise LayoutError(
                    f"chunk_size {chunk_size} is not a multiple of the KV block size {size}; set "
                    "engine.chunk_size"
                )
        return sum(share.of(chunk_size) for share in shares)


def _span(block: Tensor) -> int:
    """Bytes from the beginning of a block's first number to the end of the last number."""
    steps = zip(block.shape, block.stride(), strict=True)
    return (1 + sum((size - 1) * stride for size, stride in steps)) * block.element_size()
