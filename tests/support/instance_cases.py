"""Instances that share in place, for the tests: what their schedulers and workers show, over real
connections, without any vLLM.
"""

from __future__ import annotations

import fcntl
import os
import struct
from collections.abc import Sequence

from model import chunk_key
from processes import make_memfd

from vcache_backend.protocol import messages as m
from vcache_backend.protocol.client import Client
from vcache_backend.seals import FUTURE_WRITE, RESIZING

NAMESPACE = b"namespac"
PAGE = 64
EACH = 4


def instance_id(number: int) -> m.InstanceId:
    return m.InstanceId(number.to_bytes(16, "big"))


def make_table(blocks: int) -> int:
    """A generation table's memfd: nobody but who has mapped it already can write."""
    fd = make_memfd(4096 + blocks * 8, seals=False)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, RESIZING | FUTURE_WRITE)
    return fd


def shape(blocks: int = 64, regions: int = 1) -> m.CacheShape:
    """Two layers of two parts in as many regions."""
    planes = [(plane % regions, plane // regions * blocks * PAGE) for plane in range(4)]
    kinds, sizes = [m.LayerKind(2, 2, PAGE, PAGE)], [4 * blocks * PAGE] * regions
    return m.CacheShape("host", "host", "tokens heads", kinds, blocks, 16, planes, sizes)


def numbers(*blocks: int) -> bytes:
    return struct.pack(f"<{len(blocks)}I", *blocks)


def counts(*generations: int) -> bytes:
    return struct.pack(f"<{len(generations)}Q", *generations)


def chunk_blocks(first: int, chunks: int = 1, each: int = EACH) -> bytes:
    """Numbers from `first` on."""
    return numbers(*range(first, first + chunks * each))


def chunk_generations(value: int, chunks: int = 1, each: int = EACH) -> bytes:
    return counts(*[value] * (chunks * each))


def join(client: Client, name: bytes, blocks: int = 64, ranks: int = 1, each: int = EACH) -> None:
    """Show a table, as a scheduler does."""
    table = make_table(blocks)
    try:
        client.join(name, NAMESPACE, blocks, ranks, each, table)
    finally:
        os.close(table)


def show(client: Client, name: bytes, rank: int = 0, regions: int = 1, blocks: int = 64) -> None:
    """Show a cache and its regions, as a worker does."""
    what = shape(blocks, regions)
    memories = [make_memfd(nbytes) for nbytes in what.regions]
    try:
        client.show_cache(name, rank, what, memories)
    finally:
        for memory in memories:
            os.close(memory)


def publish(
    client: Client,
    instance: bytes,
    keys: Sequence[m.ChunkKey],
    first: int = 0,
    generation: int = 2,
    sequence: int = 1,
    epoch: int = 0,
) -> int:
    """Publish chunks in blocks from `first` on."""
    size = len(keys)
    packed = chunk_blocks(first, size), chunk_generations(generation, size)
    return client.publish(m.Publish(m.InstanceId(instance), sequence, list(keys), *packed, epoch))


def share(client: Client, instance: bytes, count: int = 3, first: int = 0) -> None:
    """All of it: an instance of one rank that has published so many chunks, in blocks from `first`
    on.
    """
    join(client, instance)
    show(client, instance)
    assert publish(client, instance, keys(count), first) == count


def keys(count: int, rank: int = 0, start: int = 0) -> list[m.ChunkKey]:
    return [chunk_key(number, rank, NAMESPACE) for number in range(start, start + count)]
