"""Describes vLLM's paged KV cache for copies: pages of opaque bytes at raw addresses.

A *page* is the contiguous bytes of one (layer, block, part). A part is K or V, if K and V lie
apart. The pages of one layer and part are a *plane*: equally far apart, block by block. A chunk
holds the layers in order, for each layer the blocks, and for each block the parts: the page of
(layer, v-th block of the chunk, part) begins at `((layer * blocks_per_chunk + v) * parts + part) *
page_bytes`. If layers differ in page size, a chunk first holds all layers of the first layer's kind
in this way, then the layers of the next kind, and so on."""

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


def alignment(*values: int) -> int:
    """The largest power of two, up to 16, that divides all of `values`: the bytes that one access
    may move."""
    bits = 16
    for value in values:
        bits |= value
    return bits & -bits


# ---- one layer


class _Layer(NamedTuple):
    """A layer's tensor as it lies in memory."""

    order: str
    """The order of a block's bytes and their dtype, as text."""
    planes: list[Tensor]
    """A plane for each part: uint8 (num_blocks, page_bytes)."""

    @property
    def kind(self) -> tuple[str, int, int]:
        return self.order, len(self.planes), self.planes[0].shape[1]


class _LayerTensor:
    """Recognises how one layer's KV tensor lies in memory, from its shape and strides."""

    def __init__(self, name: str, tensor: Tensor, block_size: int) -> None:
        self.name, self.tensor, self.block_size = name, tensor, block_size

    def __str__(self) -> str:
        kv = self.tensor
        shape = f"shape {tuple(kv.shape)}, strides {kv.stride()}, {_dtype(kv)} on {kv.device}"
        return f"{self.name} ({shape})"

    def error(self, why: str) -> LayoutError:
        return LayoutError(f"KV cache of {self} with block_size {self.block_size}: {why}")

    def described(self, axes: str | None) -> _Layer:
        """Raises LayoutError. axes: see `PagedKV.describe`."""
        kv, item = self.tensor, self.tensor.element_size()
        if kv.dtype not in DTYPES or not kv.numel():
            raise self.error(
                "empty, or of a dtype vcache does not move; it moves bfloat16, float16, "
                "float32, fp8 and uint8"
            )
        if kv.is_meta:
            raise self.error("it has no memory")
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
        planes = [_plane(kv, start, blocks, page_bytes, stride) for start in starts]
        return _Layer(f"{'.'.join(text)} {_dtype(kv)}", planes)

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


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _plane(tensor: Tensor, start: int, blocks: int, nbytes: int, stride: int) -> Tensor:
    """The pages of `nbytes` bytes from address `start` on in the tensor's storage, as uint8."""
    storage = tensor.untyped_storage()
    raw = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
    return raw.as_strided((blocks, nbytes), (stride, 1), start - storage.data_ptr())


def _span(block: Tensor) -> int:
    """Bytes from the beginning of a block's first number to the end of the last number."""
    steps = zip(block.shape, block.stride(), strict=True)
    return (1 + sum((size - 1) * stride for size, stride in steps)) * block.element_size()


# ---- all layers


class Share(NamedTuple):
    """The part of a chunk that belongs to a group of layers with a block table of its own."""

    block_size: int
    """Tokens of a block."""
    tail: int = 0
    """The part has blocks for the chunk's last `tail` tokens; 0: for all."""

    def of(self, chunk_size: int) -> int:
        """The number of the part's blocks in a chunk of `chunk_size` tokens."""
        return (self.tail or chunk_size) // self.block_size


@dataclass(frozen=True, eq=False)
class PagedKV:
    """The geometry of one worker's KV cache. Keeps the cache's memory alive. Immutable; any
    thread."""

    name: str
    """The order of bytes in a chunk as text, without the number of blocks; equal in all processes
    that may share."""
    dtype: str
    """The type of the numbers; several types are joined by +."""
    block_size: int
    """Tokens of a block."""
    parts: int
    pages: tuple[Tensor, ...]
    """For each layer and part (layer-major) a uint8 view (num_blocks, page_bytes) of vLLM's
    memory. Of the first kind alone."""
    shares: tuple[Share, ...] = ()
    """A Share for each group of layers, if there are several groups. All groups lie in the same
    planes, and each block belongs to one group at a time. A chunk holds the blocks of the first
    group, then the blocks of the second group, and so on."""
    others: tuple[PagedKV, ...] = ()
    """The layers of further kinds, kind by kind."""

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
            else ((f"layer {number}", tensor) for number, tensor in enumerate(kvcaches))
        )
        layers = [_LayerTensor(name, tensor, block_size) for name, tensor in named]
        if not layers:
            raise LayoutError("no KV caches were given; pass one tensor for each layer")
        first, blocks = layers[0], 0
        kinds: dict[tuple[str, int, int], list[Tensor]] = {}
        for layer in layers:
            here = layer.tensor.device == first.tensor.device
            found = layer.described(axes) if here else None
            if found is None or len(found.planes[0]) != (blocks or len(found.planes[0])):
                raise layer.error(f"its blocks are not those of {first}")
            blocks = len(found.planes[0])
            kinds.setdefault(found.kind, []).extend(found.planes)
        described = [
            cls(order, order.rpartition(" ")[2], block_size, parts, tuple(planes))
            for (order, parts, _), planes in kinds.items()
        ]
        if len(described) == 1:
            return described[0]
        return replace(
            described[0],
            dtype="+".join(dict.fromkeys(kv.dtype for kv in described)),
            name=" + ".join(f"{kv.layers} x {kv.name}" for kv in described),
            others=tuple(described[1:]),
        )

    @classmethod
    def describe_groups(
        cls, groups: Sequence[tuple[Mapping[str, Tensor], Share]], *, axes: str | None = None
    ) -> PagedKV:
        """Recognise several groups of layers. This worker may have no layers of a group. If the
        pages have several sizes, a block of all layers is one page.

        Raises LayoutError like `describe`, and if the groups do not lie in the same memory."""
        held = [(layers, share.block_size) for layers, share in groups if layers]
        if not held:
            raise LayoutError("no KV caches were given; pass one tensor for each layer")
        shares = tuple(share for _, share in groups)
        sizes = {_span(tensor[0]) for layers, _ in held for tensor in layers.values()}
        if len(held) > 1 and len(sizes) > 1:
            one = cls._of_whole_blocks([layers for layers, _ in held], shares[0].block_size)
            return replace(one, shares=shares)
        found = [cls.describe(layers, size, axes=axes) for layers, size in held]
        widest = max(found, key=lambda kv: kv.layers)
        for kv, (layers, _) in zip(found, held, strict=True):
            if kv.parts != widest.parts or kv.places != widest.places[: len(kv.pages)]:
                raise LayoutError(
                    "KV caches of several block tables must lie in the same memory, but "
                    f"{next(iter(layers))} and its group have "
                    f"{kv.layers} layers of {kv.name}, others {widest.layers} of {widest.name}, "
                    "or lie elsewhere"
                )
        name = " + ".join(dict.fromkeys(kv.name for kv in found))
        return replace(widest, name=name, block_size=shares[0].block_size, shares=shares)

    @classmethod
    def _of_whole_blocks(cls, groups: Sequence[Mapping[str, Tensor]], block_size: int) -> PagedKV:
        """Describe groups whose blocks hold the layers' pages side by side, in an order of each
        group. Raises LayoutError if a block is not one piece of memory."""
        layers = [(name, tensor) for group in groups for name, tensor in group.items()]
        first = min((tensor for _, tensor in layers), key=Tensor.data_ptr)
        stride, count = first.stride(0) * first.element_size(), len(first)
        nbytes, order = 0, blake2b(digest_size=16)
        for group in groups:
            order.update(b"group")
            for name, tensor in group.items():
                begin = tensor.data_ptr() - first.data_ptr()
                nbytes = max(nbytes, begin + _span(tensor[0]))
                table = tensor.stride(0) * tensor.element_size(), len(tensor)
                same = tensor.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
                if not same or table != (stride, count) or nbytes > stride:
                    raise LayoutError(
                        f"the pages of several block tables have several sizes, and those of "
                        f"{name} do not lie beside the others' in one block"
                    )
                text = f"{begin} {tuple(tensor.shape[1:])} {tensor.stride()[1:]} {tensor.dtype};"
                order.update(text.encode())
        dtypes = "+".join(dict.fromkeys(_dtype(tensor) for _, tensor in layers))
        page = _plane(first, first.data_ptr(), count, nbytes, stride)
        return cls(f"block{nbytes} {order.hexdigest()}", dtypes, block_size, 1, (page,))

    def with_states(self, groups: Sequence[Mapping[str, Tensor]], split: int) -> PagedKV:
        """This KV cache with further groups, whose layers keep a state in each block's page.

        split: how many blocks of this KV cache make a block of the states. Raises LayoutError if
        the states do not lie in the same planes."""
        pages, stride, room = list(self.pages), int(self.planes[0, 1]), split * self.page_bytes
        whole = self.parts == 1 and (split == 1 or stride == self.page_bytes)
        for layers in groups:
            for number, (layer, states) in enumerate(layers.items()):
                start, apart = states.data_ptr(), states.stride(0) * states.element_size()
                if number == len(pages):
                    pages.append(_plane(states, start, self.num_blocks, self.page_bytes, stride))
                here = pages[number].data_ptr(), split * stride, self.num_blocks // split
                if not whole or _span(states[0]) > room or (start, apart, len(states)) != here:
                    raise LayoutError(
                        f"the state of {layer} does not lie in pages of {room} B beside others"
                    )
        return replace(self, pages=tuple(pages))

    @cached_property
    def device(self) -> torch.device:
        return self.pages[0].device

    @cached_property
    def layers(self) -> int:
        """Layers of the first kind."""
        return len(self.pages) // self.parts

    @cached_property
    def page_bytes(self) -> int:
        """Of the first kind."""
        return int(self.pages[0].shape[1])

    @cached_property
    def num_blocks(self) -> int:
        return int(self.pages[0].shape[0])

    @property
    def places(self) -> list[tuple[object, ...]]:
        """Of each plane: device, blocks, page size, address, bytes from block to block."""
        return [(p.device, *p.shape, p.data_ptr(), p.stride(0)) for p in self.pages]

    @cached_property
    def planes(self) -> Int64s:
        """(layers * parts, 2): the address of each view in `pages`, and the bytes from block to
        block."""
        return np.array([(page.data_ptr(), page.stride(0)) for page in self.pages], dtype=np.int64)

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
        return sum(len(kv.pages) * kv.page_bytes for kv in self.kinds)

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
