"""Reads chunks in other instances' KV caches, and verifies them by their blocks' generations."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from vcache_backend.protocol.messages import ResidentRun
from vcache_backend.resident.neighbours import Neighbour, Neighbours
from vcache_backend.transfer.memory import MemoryPart
from vcache_backend.transfer.sources import LoadContext, Settled
from vcache_backend.vram_pool.copies.geometry import Int64s


@dataclass
class _ResidentPart(MemoryPart):
    """A part that is read between `enter` and `leave`, while the neighbour stays mapped."""

    neighbour: Neighbour
    run: ResidentRun

    def origin(self) -> tuple[object, Int64s]:
        return self.neighbour, self.neighbour.bases

    def offsets(self, chunks: Int64s, inside: Int64s, number: int) -> Int64s:
        kv, split = self.context.places.kv.kinds[number], self.neighbour.split
        blocks = np.frombuffer(self.run.blocks, dtype=np.uint32).astype(np.int64)
        parts = blocks[:, None] * split + np.arange(split)
        ids = parts.reshape(self.count, -1)[chunks, inside // (kv.parts * kv.page_bytes)]
        offsets: Int64s = ids * self.neighbour.shape.kinds[number].stride
        return offsets

    def settle(self) -> Settled:
        seconds, run = self.seconds, self.run
        try:
            right = self.neighbour.view.leading(run.blocks, run.generations, self.neighbour.each)
        finally:
            self.neighbour.leave()
        stats = self.context.stats
        if right:
            brought = right, self.tokens(right), seconds
            stats.later(stats.resident, self.first, run.instance, *brought)
        if right < self.count:
            stats.refused(self.first + right, run.instance, self.count - right)
            return Settled(right, "changed")
        return Settled(right)

    def drop(self) -> None:
        self.neighbour.leave()


class ResidentRuns:
    """A load's chunks in other instances' KV caches. Runs in the worker's thread.

    Forgets a chunk when its copy starts, when the chunk proves to be gone, and when a later chunk
    is asked for: a load never goes back."""

    def __init__(self, runs: Iterable[ResidentRun], neighbours: Neighbours) -> None:
        """Begin to map the owners' KV caches. runs: in the order of chunks."""
        self._runs, self._neighbours = deque(runs), neighbours
        for instance in {run.instance for run in self._runs}:
            neighbours.expects(instance)

    def missing(self, chunks: int) -> list[int]:
        """Return which of the load's `chunks` chunks are not here."""
        missing = np.ones(chunks, dtype=np.bool_)
        for run in self._runs:
            missing[run.first : run.stop] = False
        numbers: list[int] = np.flatnonzero(missing).tolist()
        return numbers

    def next(self, chunk: int) -> int | None:
        """Return the first chunk here from number `chunk` on."""
        while self._runs and self._runs[0].stop <= chunk:
            self._runs.popleft()
        return max(chunk, self._runs[0].first) if self._runs else None

    def expects(self, chunk: int) -> bool:
        """Whether this chunk's KV cache is still being mapped."""
        return self.next(chunk) == chunk and self._neighbours.expects(self._runs[0].instance)

    def take(self, chunk: int, context: LoadContext) -> MemoryPart | None:
        """Take unchanged chunks of one neighbour, from this number on. Forgets chunks that the
        neighbour has lost; other sources may have them."""
        if self.next(chunk) != chunk:
            return None
        run = self._runs[0]
        neighbour = self._neighbours.get(run.instance)
        here = context.places.kv.blocks_in(context.session.chunk_size)
        if (
            neighbour is None
            or not run.fits(neighbour.each)
            or neighbour.each * neighbour.split != here
        ):
            lost = [other for other in self._runs if other.instance == run.instance]
            self._runs = deque(other for other in self._runs if other.instance != run.instance)
            context.session.stats.count(chunks_stale=sum(other.chunks for other in lost))
            return None
        run = run.cut(chunk, run.stop)
        count = neighbour.view.leading(run.blocks, run.generations, neighbour.each)
        self._runs[0] = run.cut(chunk + max(count, 1), run.stop)
        if not count or not neighbour.enter():
            context.session.stats.count(chunks_stale=max(count, 1))
            return None
        local = neighbour.shape.device == context.session.device.name
        right = run.cut(chunk, chunk + count)
        return _ResidentPart(context, chunk, count, (), local, neighbour, right)

    def clear(self) -> None:
        self._runs.clear()
