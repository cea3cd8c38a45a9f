"""Chooses the chunks to read in other instances' KV caches: checks the server's answer against the
instances' generation tables."""

from __future__ import annotations

from collections import deque

from vcache_backend.metadata_server.messages import Found, ResidentRun
from vcache_backend.resident.tables import Tables


def choose(found: Found, tables: Tables, each: int, first: int) -> tuple[int, list[ResidentRun]]:
    """Choose the chunks to load. Returns the number of leading chunks, and the runs to read in
    place. each: blocks of a chunk. first: the number of the answer's first chunk.

    Takes a chunk from the first run, in the server's order, in which the chunk seems unchanged
    since its publication; without such a run, from the pool."""
    runs: list[ResidentRun] = []
    having: list[ResidentRun] = []
    later, chunk = deque(found.residents), 0
    while chunk < len(found.pooled):
        while later and later[0].first <= chunk:
            having.append(later.popleft())
        having = [run for run in having if run.stop > chunk]
        for run in having:
            if (right := _right(run, chunk, tables, each)) is not None:
                runs.append(right.numbered(first + chunk))
                chunk += right.chunks
                break
        else:
            if not found.pooled[chunk]:
                break
            chunk += 1
    return chunk, runs


def _right(run: ResidentRun, chunk: int, tables: Tables, each: int) -> ResidentRun | None:
    """Return the run's chunks from number `chunk` on that are unchanged since their publication.
    None if the first chunk has changed.

    Checks only a chunk's last block, which vLLM frees first: the load checks all blocks."""
    view = tables.view(run.instance)
    if view is None or not run.fits(each):
        return None
    count = view.leading_ends(run.blocks, run.generations, each, chunk - run.first)
    return run.cut(chunk, chunk + count) if count else None
