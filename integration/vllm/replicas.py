"""Chooses which chunks to read out of other instances' KV caches: checks the server's answer
against their tables of generations.
"""

from __future__ import annotations

import numpy as np

from vcache_backend.metadata_server.messages import Found, Resident
from vcache_backend.resident.tables import Tables

from .groups import Groups

Replica = tuple[bytes, bytes, bytes]
"""A chunk in an instance's KV cache: the instance, its blocks (uint32) and their generations
(uint64), packed as in the protocol.
"""


def choose(found: Found, tables: Tables, each: int) -> tuple[int, dict[int, Replica]]:
    """How many leading chunks can be loaded, and those of them that are read in place, by number.
    each: blocks of a chunk.

    Takes the first of a chunk's replicas, in the server's order, that is still as it was published;
    the pool's copy only without one."""
    chosen: dict[int, Replica] = {}
    chunk = 0
    while chunk < len(found.residents):
        run = _leading(found, tables, each, chunk)
        for number in range(chunk, chunk + run):
            chosen[number] = _replica(found, found.residents[number][0])
        chunk += run
        if chunk == len(found.residents):
            break
        if not run:
            other = next(
                (one for one in found.residents[chunk][1:] if _holds(found, tables, each, [one])),
                None,
            )
            if other is not None:
                chosen[chunk] = _replica(found, other)
            elif not found.pooled[chunk]:
                break
            chunk += 1
    return chunk, chosen


def choose_with_windows(
    found: Found, tables: Tables, groups: Groups
) -> tuple[int, int, dict[int, Replica]]:
    """How many leading chunks can be loaded, how many could be if others had kept the windows, and
    those read in place, by number.

    Takes the replica with the most of a chunk's blocks, if it has those that every hit needs; if
    the pool has the chunk, only a replica with all of its blocks."""
    count, each = len(found.residents), groups.blocks
    right = np.zeros((count, each), dtype=np.bool_)
    right[np.frombuffer(found.pooled, dtype=np.bool_)[:count]] = True
    most, chosen = [each - 0.5 if pooled else 0.0 for pooled in found.pooled], dict[int, Replica]()
    for owner, instance in enumerate(found.instances):
        ones = [
            (chunk, one)
            for chunk, here in enumerate(found.residents)
            for one in here
            if one.instance == owner
        ]
        view = tables.view(instance) if ones else None
        blocks = np.frombuffer(b"".join([one.blocks for _, one in ones]), dtype="<u4")
        generations = np.frombuffer(b"".join([one.generations for _, one in ones]), dtype="<u8")
        if view is None or not len(blocks) == len(generations) == len(ones) * each:
            continue
        for (chunk, one), row in zip(
            ones, view.right(blocks, generations).reshape(-1, each), strict=True
        ):
            if row[: groups.lead].all() and (has := int(row.sum())) > most[chunk]:
                right[chunk], most[chunk], chosen[chunk] = row, has, _replica(found, one)
    hits, reached = groups.reach(right)
    return hits, reached, {chunk: replica for chunk, replica in chosen.items() if chunk < hits}


def _leading(found: Found, tables: Tables, each: int, first: int) -> int:
    """How many chunks from number `first` on have a right first replica, all in one instance."""
    residents = found.residents
    if not residents[first]:
        return 0
    owner, stop = residents[first][0].instance, first + 1
    while stop < len(residents) and residents[stop] and residents[stop][0].instance == owner:
        stop += 1
    return _holds(found, tables, each, [one[0] for one in residents[first:stop]])


def _holds(found: Found, tables: Tables, each: int, ones: list[Resident]) -> int:
    """How many of these replicas, all in one instance, are still as they were published, up to the
    first that is not.
    """
    view = tables.view(found.instances[ones[0].instance])
    if view is None:
        return 0
    blocks = np.frombuffer(b"".join([one.blocks for one in ones]), dtype="<u4")
    generations = np.frombuffer(b"".join([one.generations for one in ones]), dtype="<u8")
    return view.leading(blocks, generations, each)


def _replica(found: Found, one: Resident) -> Replica:
    return found.instances[one.instance], one.blocks, one.generations
