"""Chooses which chunks to read in other instances' KV caches: checks the server's answer against
the instances' tables of generations.
"""

from __future__ import annotations

from vcache_backend.metadata_server.messages import Found, ResidentRun
from vcache_backend.resident.tables import Tables


def choose(found: Found, tables: Tables, each: int, first: int) -> tuple[int, list[ResidentRun]]:
    """Choose what to load: the number of leading chunks, and the runs to read in place. each:
    blocks of a chunk. first: the number of the answer's first chunk.

    Takes a chunk out of the first run, in the server's order, in which it seems unchanged since its
    publication. Only without one it takes the pool's copy."""
    runs = list[ResidentRun]()
    chunk = 0
    while chunk < len(found.pooled):
        having = (run for run in found.residents if run.first <= chunk < run.stop)
        made = (_right(run.cut(chunk, run.stop), tables, each) for run in having)
        run = next(filter(None, made), None)
        if run is not None:
            runs.append(run._replace(first=first + chunk))
            chunk += run.chunks
        elif found.pooled[chunk]:
            chunk += 1
        else:
            break
    return chunk, runs


def _right(run: ResidentRun, tables: Tables, each: int) -> ResidentRun | None:
    """Return the run's leading chunks that are unchanged since their publication. None if the first
    has changed.

    Looks only at a chunk's last block, which vLLM frees before the others: the load looks at all of
    them."""
    view = tables.view(run.instance)
    if view is None or not run.fits(each):
        return None
    count = view.leading_ends(run.blocks, run.generations, each)
    return run.cut(run.first, run.first + count) if count else None
