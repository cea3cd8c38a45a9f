"""Reads chunks in other instances' KV caches, and verifies them by their blocks' generations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import repeat
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt

from vcache_backend.resident.neighbours import Neighbour, Neighbours
from vcache_backend.transfer.memory import MemoryPart
from vcache_backend.transfer.sources import LoadContext, Settled
from vcache_backend.vram_pool.paged import Int64s

UInt32s = npt.NDArray[np.uint32]
UInt64s = npt.NDArray[np.uint64]
_NUMBER, _GENERATION = np.dtype("<u4"), np.dtype("<u8")
"""Made once: parsing the types from text took almost half of the unpacking time."""


class ResidentChunk(NamedTuple):
    """One chunk in the KV cache of `instance`. blocks: the owner's block numbers, in order.
    generations: the blocks' generations at publication."""

    instance: bytes
    blocks: UInt32s
    generations: UInt64s

    @classmethod
    def many(cls, instance: bytes, count: int, blocks: bytes, generations: bytes) -> list[Self]:
        """Unpack `count` equally long chunks of one instance, packed together. ValueError."""
        rows = np.frombuffer(blocks, dtype=_NUMBER).reshape(count, -1)
        counters = np.frombuffer(generations, dtype=_GENERATION).reshape(count, -1)
        return list(map(cls, repeat(instance), rows, counters))


@dataclass
class _ResidentPart(MemoryPart):
    """A part between the neighbour's `enter` and `leave`, which keep the KV cache mapped."""

    neighbour: Neighbour
    blocks: UInt32s
    generations: UInt64s

    def origin(self) -> tuple[object, Int64s]:
        return self.neighbour, self.neighbour.bases

    def offsets(self, chunks: Int64s, inside: Int64s, number: int) -> Int64s:
        kv, split = self.context.places.kv.kinds[number], self.neighbour.split
        parts = self.blocks.astype(np.int64)[:, None] * split + np.arange(split)
        ids = parts.reshape(self.count, -1)[chunks, inside // (kv.parts * kv.page_bytes)]
        offsets: Int64s = ids * self.neighbour.shape.kinds[number].stride
        return offsets

    def settle(self) -> Settled:
        seconds = self.seconds
        try:
            right = self.neighbour.view.leading(self.blocks, self.generations, self.neighbour.each)
        finally:
            self.neighbour.leave()
        stats = self.context.stats
        if right:
            tokens = self.tokens(right)
            stats.resident(self.first, self.neighbour.instance, right, tokens, seconds)
        if right < self.count:
            stats.refused(self.first + right, self.neighbour.instance, self.count - right)
            return Settled(right, "changed")
        return Settled(right)

    def drop(self) -> None:
        self.neighbour.leave()


class ResidentChunks:
    """Takes chunks out of `LoadContext.resident` when their copies start, or when they turn out to
    be gone. Runs in the worker's thread."""

    def __init__(
        self, context: LoadContext, residents: Mapping[int, ResidentChunk], neighbours: Neighbours
    ) -> None:
        """Begin to map the owners' KV caches."""
        self._context, self._neighbours, self._chunks = context, neighbours, context.resident
        self._chunks.update(residents)
        for instance in {chunk.instance for chunk in residents.values()}:
            self._neighbours.expects(instance)

    def expects(self, chunk: int) -> bool:
        """Whether this chunk's KV cache is still being mapped."""
        resident = self._chunks.get(chunk)
        return resident is not None and self._neighbours.expects(resident.instance)

    def take(self, chunk: int) -> MemoryPart | None:
        """Take chunks from this number on that one neighbour has unchanged. Forgets chunks that the
        neighbour has lost; other sources may have them."""
        first = self._chunks.get(chunk)
        if first is None:
            return None
        neighbour = self._neighbours.get(first.instance)
        if neighbour is None or not neighbour.enter():
            chunks = self._chunks.items()
            self._forget([at for at, each in chunks if each.instance == first.instance])
            return None
        try:
            part = self._entered(chunk, neighbour)
        except BaseException:
            neighbour.leave()
            raise
        if part is None:
            neighbour.leave()
        return part

    def _entered(self, chunk: int, neighbour: Neighbour) -> MemoryPart | None:
        context, each = self._context, neighbour.each
        run: list[ResidentChunk] = []
        if each * neighbour.split == context.places.kv.blocks_in(context.session.chunk_size):
            while (resident := self._chunks.get(chunk + len(run))) is not None:
                if resident.instance != neighbour.instance:
                    break
                if not len(resident.blocks) == len(resident.generations) == each:
                    break
                run.append(resident)
        count = 0
        if run:
            blocks = np.concatenate([resident.blocks for resident in run])
            generations = np.concatenate([resident.generations for resident in run])
            count = neighbour.view.leading(blocks, generations, each)
        if not count:
            self._forget([chunk])
            return None
        for number in range(chunk, chunk + count):
            del self._chunks[number]
        local = neighbour.shape.device == context.session.device.name
        blocks, generations = blocks[: count * each], generations[: count * each]
        return _ResidentPart(context, chunk, count, (), local, neighbour, blocks, generations)

    def _forget(self, numbers: list[int]) -> None:
        for number in numbers:
            del self._chunks[number]
        self._context.session.stats.count(chunks_stale=len(numbers))
