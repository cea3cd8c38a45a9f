"""Chooses which chunks to read in other instances' KV caches: checks the server's answer against
the instances' tables of generations.
"""

from __future__ import annotations

from itertools import islice
from operator import attrgetter

from vcache_backend.metadata_server.messages import GENERATION_BYTES, NUMBER_BYTES, Found, Resident
from vcache_backend.resident.tables import Tables
from vcache_backend.transfer.resident import ResidentRun


def choose(found: Found, tables: Tables, each: int, first: int) -> tuple[int, list[ResidentRun]]:
    """Choose what to load: the number of leading chunks, and the runs to read in place. each:
    blocks of a chunk. first: the number of the answer's first chunk.

    Takes a chunk's first replica, in the server's order, that seems unchanged since its
    publication. Only without one it takes the pool's copy."""
    runs = list[ResidentRun]()
    chunk = 0
    while chunk < len(found.residents):
        others = ([other] for other in found.residents[chunk][1:])
        candidates = [_alike(found.residents, chunk), *others]
        made = (_right(found, tables, each, first + chunk, those) for those in candidates)
        run = next(filter(None, made), None)
        if run is not None:
            runs.append(run)
            chunk += run.chunks
        elif found.pooled[chunk]:
            chunk += 1
        else:
            break
    return chunk, runs


def _alike(residents: list[list[Resident]], first: int) -> list[Resident]:
    """The first replicas of the chunks from number `first` on, as long as they lie in
    one instance.
    """
    alike = list[Resident]()
    instance = residents[first][0].instance if residents[first] else -1
    for replicas in islice(residents, first, None):
        if not replicas or replicas[0].instance != instance:
            break
        alike.append(replicas[0])
    return alike


def _right(
    found: Found, tables: Tables, each: int, first: int, replicas: list[Resident]
) -> ResidentRun | None:
    """Make a run of the leading replicas that are unchanged since their publication. None if the
    first has changed.

    Looks only at a chunk's last block, which vLLM frees before the others: the load looks at all of
    them. first: the number of the first chunk. All replicas must lie in one instance."""
    if not replicas:
        return None
    instance = found.instances[replicas[0].instance]
    view = tables.view(instance)
    number, counter = each * NUMBER_BYTES, each * GENERATION_BYTES
    # All chunks of an instance have as many blocks.
    if view is None or (len(replicas[0].blocks), len(replicas[0].generations)) != (number, counter):
        return None
    blocks = b"".join(map(attrgetter("blocks"), replicas))
    generations = b"".join(map(attrgetter("generations"), replicas))
    count = view.leading_ends(blocks, generations, each)
    if not count:
        return None
    blocks, generations = blocks[: count * number], generations[: count * counter]
    return ResidentRun(first, count, instance, blocks, generations)
