"""Chooses which chunks to read in other instances' KV caches: checks the server's answer against
the instances' tables of generations.
"""

from __future__ import annotations

import numpy as np

from vcache_backend.metadata_server.messages import Found, Resident
from vcache_backend.resident.tables import Tables

Replica = tuple[bytes, bytes, bytes]
"""A chunk in a KV cache: the instance, the blocks (uint32) and their generations (uint64), packed
as in the protocol.
"""


def choose(found: Found, tables: Tables, each: int) -> tuple[int, dict[int, Replica]]:
    """Choose what to load: the number of leading chunks, and the replicas to read in place, by
    chunk number. each: blocks of a chunk.

    Takes a chunk's first replica, in the server's order, that is unchanged since its publication.
    Only without one it takes the pool's copy."""
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
                (
                    replica
                    for replica in found.residents[chunk][1:]
                    if _holds(found, tables, each, [replica])
                ),
                None,
            )
            if other is not None:
                chosen[chunk] = _replica(found, other)
            elif not found.pooled[chunk]:
                break
            chunk += 1
    return chunk, chosen


def _leading(found: Found, tables: Tables, each: int, first: int) -> int:
    """Count the chunks from `first` on whose first replica is unchanged and lies in the same
    instance.
    """
    residents = found.residents
    if not residents[first]:
        return 0
    owner, stop = residents[first][0].instance, first + 1
    while stop < len(residents) and residents[stop] and residents[stop][0].instance == owner:
        stop += 1
    return _holds(found, tables, each, [replicas[0] for replicas in residents[first:stop]])


def _holds(found: Found, tables: Tables, each: int, replicas: list[Resident]) -> int:
    """Count the leading replicas that are unchanged since their publication. All must lie in one
    instance.
    """
    view = tables.view(found.instances[replicas[0].instance])
    if view is None:
        return 0
    blocks = np.frombuffer(b"".join([replica.blocks for replica in replicas]), dtype="<u4")
    generations = np.frombuffer(
        b"".join([replica.generations for replica in replicas]), dtype="<u8"
    )
    return view.leading(blocks, generations, each)


def _replica(found: Found, resident: Resident) -> Replica:
    return found.instances[resident.instance], resident.blocks, resident.generations
