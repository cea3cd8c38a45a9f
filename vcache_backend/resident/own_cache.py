"""Describes a worker's KV cache, and shares the exported memory through the server."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from vcache_backend.errors import LayoutError
from vcache_backend.protocol import messages as m
from vcache_backend.protocol.client import Client, Standing
from vcache_backend.vram_pool.copies.geometry import PagedKV
from vcache_backend.vram_pool.devices import Device
from vcache_backend.vram_pool.exports import Region


def cache_shape(kv: PagedKV, region: Region, device: Device) -> m.CacheShape:
    """Describe `kv`, whose pages lie in `region` on `device`, for readers.

    Raises LayoutError if `kv` is on another kind of device, pages lie outside of the region, planes
    have different strides, or planes or kinds are too many."""
    if (kv.device.type == "cuda") != (device.medium == "cuda"):
        raise LayoutError(
            f"the KV cache lies on {kv.device}, the pool on {device.name}; shared in place they "
            "must not differ: set pool.device: auto"
        )
    kinds, planes = list[m.LayerKind](), list[int]()
    for kind in kv.kinds:
        strides = {int(stride) for _, stride in kind.planes}
        if len(strides) != 1:
            raise LayoutError(f"the layers' blocks are {sorted(strides)} B apart, not equally far")
        kinds.append(m.LayerKind(kind.layers, kind.parts, kind.page_bytes, strides.pop()))
        planes += _offsets(kind, region)
    if len(planes) > m.MAX_PLANES or len(kinds) > m.MAX_KINDS:
        most = f"at most {m.MAX_PLANES} of {m.MAX_KINDS} are shared"
        raise LayoutError(f"the KV cache has {len(planes)} planes of {len(kinds)} kinds; {most}")
    return m.CacheShape(
        device=device.name,
        medium=device.medium,
        layout=kv.name,
        kinds=kinds,
        num_blocks=kv.num_blocks,
        block_size=kv.block_size,
        planes=planes,
        nbytes=region.nbytes,
    )


def _offsets(kind: PagedKV, region: Region) -> Iterator[int]:
    """Each plane's offset in the region. Raises LayoutError."""
    first, last = region.address, region.address + region.nbytes
    for number, (address, stride) in enumerate(kind.planes.tolist()):
        end = address + (kind.num_blocks - 1) * stride + kind.page_bytes
        if address < first or end > last:
            layer, part = divmod(number, kind.parts)
            where = f"at [{address:#x}, {end:#x}), not in [{first:#x}, {last:#x}), what is exported"
            raise LayoutError(f"layer {layer}, part {part} of the KV cache lies {where}")
        yield address - first


def check_shape(shape: m.CacheShape, blocks: int, kv: PagedKV, device: Device) -> None:
    """Raise LayoutError unless a cache of this shape, with `blocks` blocks of vLLM, can be copied
    into `kv` on `device` page by page.

    The shape may come from a hostile peer. After the check, all pages lie inside `nbytes`."""
    peer = (
        shape.layout,
        [(kind.layers, kind.parts, kind.page_bytes) for kind in shape.kinds],
        shape.block_size,
        shape.medium,
    )
    own = [(kind.layers, kind.parts, kind.page_bytes) for kind in kv.kinds]
    ours = kv.name, own, kv.block_size, device.medium
    if peer != ours:
        names = "layout", "layers, parts and bytes a page", "block size", "medium"
        wrong = [
            f"{name} {a}, here {b}" for name, a, b in zip(names, peer, ours, strict=True) if a != b
        ]
        raise LayoutError("its KV cache has " + "; ".join(wrong))
    if blocks < 1 or shape.num_blocks < 1 or shape.num_blocks % blocks:
        raise LayoutError(f"its cache has {shape.num_blocks:,} blocks for {blocks:,} generations")
    if reason := shape.misfit():
        raise LayoutError(f"its KV cache has {reason}")


def show_cache(
    client: Client, instance: bytes, rank: int, shape: m.CacheShape, region: Region
) -> Standing:
    """Share this worker's KV cache through the server until `close`, until which the caller keeps
    the region's fd open."""
    show = partial(client.show_cache, instance, rank, shape, region.fd)
    return Standing(client, show, "this KV cache is not shared in place")
