"""Describes vLLM's paged KV cache for copies, pages of opaque bytes at raw addresses, and plans the
copies. Pure arithmetic: nothing is copied.

A *page* is the contiguous bytes of one (layer, block, part). A part is K or V, if K and V lie
apart. The pages of one layer and part are a *plane*: equally far apart, block by block. A chunk
holds the layers in order, for each layer the blocks, and for each block the parts: the page of
(layer, v-th block of the chunk, part) begins at `((layer * blocks_per_chunk + v) * parts + part) *
page_bytes`. If layers differ in page size, a chunk first holds all layers of the first layer's kind
in this way, then the layers of the next kind, and so on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from hashlib import blake2b
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vcache_backend.errors import LayoutError
from vcache_backend.vram_pool.copies.layer_tensor import LayerTensor, dtype_of, plane, span_of

Int64s = npt.NDArray[np.int64]


def alignment(*values: int) -> int:
    """The largest power of two, up to 16, that divides all of `values`: the bytes that one access
    may move."""
    bits = 16
    for value in values:
        bits |= value
    return bits & -bits


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
        layers = [LayerTensor(name, tensor, block_size) for name, tensor in named]
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
        sizes = {span_of(tensor[0]) for layers, _ in held for tensor in layers.values()}
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
                nbytes = max(nbytes, begin + span_of(tensor[0]))
                table = tensor.stride(0) * tensor.element_size(), len(tensor)
                same = tensor.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
                if not same or table != (stride, count) or nbytes > stride:
                    raise LayoutError(
                        f"the pages of several block tables have several sizes, and those of "
                        f"{name} do not lie beside the others' in one block"
                    )
                text = f"{begin} {tuple(tensor.shape[1:])} {tensor.stride()[1:]} {tensor.dtype};"
                order.update(text.encode())
        dtypes = "+".join(dict.fromkeys(dtype_of(tensor) for _, tensor in layers))
        page = plane(first, first.data_ptr(), count, nbytes, stride)
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
                    pages.append(plane(states, start, self.num_blocks, self.page_bytes, stride))
                here = pages[number].data_ptr(), split * stride, self.num_blocks // split
                if not whole or span_of(states[0]) > room or (start, apart, len(states)) != here:
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


# ---- copies


class CopyPlan(NamedTuple):
    """The blocks that a copy moves."""

    numbers: Int64s
    """Of the blocks in a load or a store, ascending. Counted in the KV cache's blocks, of which
    several may make a block of the load."""
    ids: Int64s
    """The KV cache's blocks."""


def placed(kv: PagedKV, ids: Int64s, *, holes: bool = False) -> CopyPlan:
    """Plan to move these blocks of the KV cache, numbered from 0 on.

    With `holes`, or with several groups, blocks with a negative id are not moved; otherwise a
    negative id is an error. Raises LayoutError for ids outside of the KV cache."""
    numbers = np.arange(len(ids), dtype=np.int64)
    if (kv.shares or holes) and (missing := ids < 0).any():
        numbers, ids = numbers[~missing], ids[~missing]
    # Negative ids are large as unsigned numbers: one pass finds all wrong ids.
    if int(np.maximum.reduce(ids.view(np.uint64), initial=0)) >= kv.num_blocks and len(ids):
        raise outside(kv, int(ids.min()), int(ids.max()))
    return CopyPlan(numbers, ids)


def outside(kv: PagedKV, low: int, high: int) -> LayoutError:
    named = f"blocks {low} to {high}"
    return LayoutError(
        f"slot_mapping names {named} but the KV cache has {kv.num_blocks} blocks of "
        f"{kv.block_size} tokens"
    )


class Pages(NamedTuple):
    """Where the blocks of a load or a store lie outside of the KV cache."""

    planes: Int64s
    """For each plane of the KV cache the base of its pages, see `CopyJob.origins`. Parts of a copy
    with the same array share it."""
    offsets: Callable[[Int64s, int], Int64s]
    """Called with blocks (`CopyPlan.numbers`) and the number of a kind of layers; returns what to
    add to this kind's `planes`."""


def in_chunks(kv: PagedKV, chunk_size: int, addresses: Int64s, first: int = 0) -> Pages:
    """The blocks of chunks from number `first` on, each of which lies in one piece at its address.
    All such chunks have one array of planes."""
    each = kv.blocks_in(chunk_size)

    def offsets(numbers: Int64s, kind: int) -> Int64s:
        chunks, inside = np.divmod(numbers - first * each, each)
        its = kv.kinds[kind]
        found: Int64s = addresses[chunks] + inside * (its.parts * its.page_bytes)
        return found

    return Pages(chunk_planes(kv, chunk_size), offsets)


def in_blocks(
    planes: Int64s, strides: Sequence[int], blocks: Int64s, first: int, split: int
) -> Pages:
    """Blocks of another KV cache. planes: the address of each plane's block 0. strides: from block
    to block, of each kind of layers. blocks: of `split` blocks each, from number `first` on."""

    def offsets(numbers: Int64s, kind: int) -> Int64s:
        if split > 1:
            block, inside = np.divmod(numbers, split)
            ids = blocks[block - first] * split + inside
        else:
            ids = blocks[numbers - first]
        found: Int64s = ids * strides[kind]
        return found

    return Pages(planes, offsets)


def copy_rows(
    kv: PagedKV, plan: CopyPlan, parts: Sequence[tuple[Pages, int, int]]
) -> tuple[Int64s, Int64s]:
    """The rows and origins of a copy (see `CopyJob`). parts: where the blocks [first, stop) of the
    plan lie; together all blocks of the plan, in order."""
    rows = np.empty((len(plan.ids), 2 + len(kv.kinds)), dtype=np.int64)
    rows[:, 2] = plan.ids
    origins: dict[int, int] = {}
    bases: list[Int64s] = []
    bounds = np.searchsorted(plan.numbers, [part[1:] for part in parts]).tolist()
    for (pages, _, _), (begin, end) in zip(parts, bounds, strict=True):
        if id(pages.planes) not in origins:
            origins[id(pages.planes)] = len(bases)
            bases.append(pages.planes)
        rows[begin:end, 0] = origins[id(pages.planes)]
        for kind in range(len(kv.kinds)):
            found = pages.offsets(plan.numbers[begin:end], kind)
            rows[begin:end, 2 + kind if kind else 1] = found
    return rows, np.stack(bases)


def slot_rows(
    kv: PagedKV, chunk_size: int, plan: CopyPlan, addresses: Int64s
) -> tuple[Int64s, Int64s]:
    """`copy_rows` of a copy of chunks in slots at these addresses."""
    stop = len(addresses) * kv.blocks_in(chunk_size)
    return copy_rows(kv, plan, [(in_chunks(kv, chunk_size, addresses), 0, stop)])


@lru_cache(maxsize=16)
def chunk_planes(kv: PagedKV, chunk_size: int) -> Int64s:
    """Shape (planes,): the offset of each plane's first page in a chunk, for the planes of all
    kinds. Cached and read-only."""
    blocks, begin, offsets = kv.blocks_in(chunk_size), 0, list[Int64s]()
    for kind in kv.kinds:
        layer, part = np.divmod(np.arange(len(kind.pages), dtype=np.int64), kind.parts)
        offsets.append(begin + (layer * blocks * kind.parts + part) * kind.page_bytes)
        begin += kind.block_bytes * blocks
    planes: Int64s = np.concatenate(offsets)
    planes.flags.writeable = False
    return planes


def of_kinds(
    kv: PagedKV, rows: Int64s, origins: Int64s
) -> Iterator[tuple[PagedKV, Int64s, Int64s]]:
    """Split a copy (see `CopyJob`) into one copy for each of `kv.kinds`, with rows of three
    columns."""
    first = 0
    for number, kind in enumerate(kv.kinds):
        end = first + len(kind.pages)
        yield kind, rows[:, [0, 2 + number, 2]] if number else rows[:, :3], origins[:, first:end]
        first = end
