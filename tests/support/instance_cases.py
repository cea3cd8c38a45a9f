"""Instances that share in place, for the tests: what their schedulers and workers show, over real
connections, without any vLLM.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Sequence
from typing import Any

from model import chunk_key
from processes import make_memfd

from vcache_backend.protocol import generation_table
from vcache_backend.protocol import messages as m
from vcache_backend.protocol.client import Client
from vcache_backend.seals import sealed

NAMESPACE = b"namespac"
PAGE = 64
EACH = 4


def instance_id(number: int) -> m.InstanceId:
    return m.InstanceId(number.to_bytes(16, "big"))


def make_table(instance: bytes, blocks: int = 64, generation: int = 2) -> int:
    """A generation table's memfd, in which all blocks have this generation: nobody can write."""
    fd, memory = sealed("test", generation_table.nbytes(blocks), generation_table.SEALS)
    with memory:
        memory[: generation_table.HEADER.size] = generation_table.header(instance, blocks)
        memory[mmap.PAGESIZE : mmap.PAGESIZE + 8 * blocks] = counts(*[generation] * blocks)
    return fd


def shape(blocks: int = 64, layers: int = 2) -> m.CacheShape:
    """Layers of two parts."""
    planes = [plane * blocks * PAGE for plane in range(2 * layers)]
    kinds, nbytes = [m.LayerKind(layers, 2, PAGE, PAGE)], len(planes) * blocks * PAGE
    return m.CacheShape("host", "host", "tokens heads", kinds, blocks, 16, planes, nbytes)


def numbers(*blocks: int) -> bytes:
    return struct.pack(f"<{len(blocks)}I", *blocks)


def counts(*generations: int) -> bytes:
    return struct.pack(f"<{len(generations)}Q", *generations)


def prompt(chunks: int, start: int = 0, each: int = EACH) -> bytes:
    """The hashes of a prompt's chunks from number `start` on."""
    every = range(start * each, (start + chunks) * each)
    return b"".join([number.to_bytes(16, "big") for number in every])


def keys(count: int, rank: int = 0, start: int = 0, each: int = EACH) -> list[m.ChunkKey]:
    """The keys of the same prompt's chunks."""
    ends = [(number + 1) * each - 1 for number in range(start, start + count)]
    return [chunk_key(end, rank, NAMESPACE) for end in ends]


def find(
    chunks: int,
    ranks: int = 1,
    instance: bytes = b"",
    start: int = 0,
    each: int = EACH,
    **more: Any,
) -> m.Find:
    """A question for the same prompt's chunks."""
    limit = more.pop("limit", chunks * each)
    hashes = prompt(chunks, start, each)
    return m.Find(NAMESPACE, hashes, each, limit, ranks, m.InstanceId(instance), **more)


def block_run(
    chunks: int,
    first: int = 0,
    start: int = 0,
    generation: int = 2,
    each: int = EACH,
    table: int = 0,
) -> m.BlockRun:
    """The same prompt's chunks from number `start` on, in blocks from `first` on."""
    count = chunks * each
    blocks, generations = numbers(*range(first, first + count)), counts(*[generation] * count)
    hashes = prompt(chunks, start, each)
    return m.BlockRun(start * each, blocks, generations, table, hashes)


FULL = [m.BlockTable("full")]


def join(
    client: Client,
    name: bytes,
    blocks: int = 64,
    ranks: int = 1,
    each: int = EACH,
    tables: Sequence[m.BlockTable] = FULL,
) -> None:
    """Show a table, as a scheduler does."""
    table = make_table(name, blocks)
    try:
        named = m.InstanceId(name)
        client.join(m.Join(named, NAMESPACE, blocks, ranks, each, list(tables)), table)
    finally:
        os.close(table)


def show(client: Client, name: bytes, rank: int = 0, layers: int = 2, blocks: int = 64) -> None:
    """Show a cache, as a worker does."""
    what = shape(blocks, layers)
    memory = make_memfd(what.nbytes)
    try:
        client.show_cache(name, rank, what, memory)
    finally:
        os.close(memory)


def publish(
    client: Client,
    instance: bytes,
    chunks: int,
    first: int = 0,
    start: int = 0,
    rank: int = 0,
    epoch: int = 0,
    **more: Any,
) -> int:
    """Publish a run of chunks. Returns how many blocks were taken."""
    run = block_run(chunks, first, start, **more)
    return client.publish(m.Publish(m.InstanceId(instance), rank, [run], epoch))


def share(client: Client, instance: bytes, chunks: int = 3, first: int = 0) -> None:
    """All of it: an instance of one rank that has published so many chunks, in blocks from `first`
    on.
    """
    join(client, instance)
    show(client, instance)
    assert publish(client, instance, chunks, first) == chunks * EACH
