"""The memory source of a load: reads all available chunks of this node's memory in one launch."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np

from vcache_backend.transfer.sources import LoadContext, Part, launch
from vcache_backend.vram_pool.copies.copier import Completion
from vcache_backend.vram_pool.copies.geometry import Int64s, PagedKV
from vcache_backend.vram_pool.copies.plan import CopyPlan
from vcache_backend.vram_pool.regions import SlotView

if TYPE_CHECKING:
    from vcache_backend.transfer.pooled import Pooled
    from vcache_backend.transfer.resident_runs import ResidentRuns


@dataclass
class MemoryPart(Part):
    """Chunks in memory of this node. views: their slots, if they lie in slots. local: the chunks
    are on the KV cache's device."""

    views: Sequence[SlotView]
    local: bool

    @abstractmethod
    def origin(self) -> tuple[object, Int64s]:
        """Return an object that identifies the chunks' memory, and the bases of the memory's
        planes, see `Copier.pull`. Parts with the same object share bases."""

    @abstractmethod
    def offsets(self, chunks: Int64s, inside: Int64s, number: int) -> Int64s:
        """Offsets of blocks in bytes, for kind `number` of the KV cache's layers. chunks: the
        blocks' chunks, counted from `first`. inside: the blocks' offsets in the kind's part of a
        chunk."""


def _begun(context: LoadContext, plan: CopyPlan, parts: list[MemoryPart]) -> Completion:
    session, kv = context.session, context.places.kv
    views = [view for part in parts for view in part.views]
    if len(views) == parts[-1].first + parts[-1].count - parts[0].first:
        return session.copier.scatter(kv, plan, views, context.mark)
    rows, origins = _rows(kv, plan, parts)
    local = all(part.local for part in parts)
    return session.copier.pull(kv, rows, origins, context.mark, (parts, views), local=local)


def _rows(kv: PagedKV, plan: CopyPlan, parts: list[MemoryPart]) -> tuple[Int64s, Int64s]:
    inside = [plan.offsets(kv, number) for number in range(len(kv.kinds))]
    rows = np.empty((len(plan.blocks), 2 + len(inside)), dtype=np.int64)
    rows[:, 2] = plan.blocks[:, 2]
    numbers: dict[int, int] = {}
    bases: list[Int64s] = []
    chunks = list(accumulate((part.count for part in parts), initial=0))
    bounds = np.searchsorted(plan.blocks[:, 0], chunks).tolist()
    for part, start, begin, end in zip(parts, chunks, bounds, bounds[1:], strict=False):
        origin, planes = part.origin()
        if id(origin) not in numbers:
            numbers[id(origin)] = len(bases)
            bases.append(planes)
        rows[begin:end, 0] = numbers[id(origin)]
        for number, offsets in enumerate(inside):
            rows[begin:end, 2 + number if number else 1] = part.offsets(
                plan.blocks[begin:end, 0] - start, offsets[begin:end], number
            )
    return rows, np.stack(bases)


class MemorySource:
    """The pool and other instances' KV caches as one source. Runs in the worker's thread."""

    def __init__(self, context: LoadContext, pool: Pooled, residents: ResidentRuns | None) -> None:
        self._context, self.pool, self._residents = context, pool, residents

    def expects(self, chunk: int) -> bool:
        """Whether this chunk's KV cache is still being mapped."""
        return self._residents is not None and self._residents.expects(chunk)

    def has(self, chunk: int) -> bool:
        """Whether this source is known to have the chunk."""
        residents = self._residents
        return (residents is not None and residents.next(chunk) == chunk) or self.pool.has(chunk)

    def launch(self, chunk: int) -> Sequence[Part]:
        """Start one copy of the available chunks, from this number on. Returns the chunks' parts.

        Asks the server for a lease for the first part only, so that the copy need not wait for
        later parts."""
        parts: list[MemoryPart] = []
        at, residents = chunk, self._residents
        try:
            while at < len(self._context.keys) and not self.expects(at):
                part = residents.take(at, self._context) if residents is not None else None
                if part is None and (not parts or residents is not None):
                    part = self.pool.take(at, ask=not parts)
                if part is None:
                    break
                parts.append(part)
                at += part.count
        except BaseException:
            for part in parts:
                part.drop()
            raise
        if parts:
            launch(self._context, parts, lambda plan: _begun(self._context, plan, parts))
        return parts

    def cancel(self) -> None:
        """Release chunks that no copy reads. Idempotent."""
        if self._residents is not None:
            self._residents.clear()
        self.pool.cancel()
