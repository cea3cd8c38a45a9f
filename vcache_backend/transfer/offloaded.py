"""A load's chunks out of the offload tier, read ahead of their use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np

from vcache_backend.errors import VCacheError
from vcache_backend.transfer.sources import LoadContext, MemorySource, Part, Place
from vcache_backend.transfer.stats import Origin
from vcache_backend.vram_pool.copies.geometry import in_chunks

if TYPE_CHECKING:
    from vcache_backend.offload.tier import OffloadTier
    from vcache_backend.offload.transfers import Fetch

CAUSES = {"absent": "store_absent", "bad": "store_bad", "timeout": "store_late"}
"""A load's cause, by the cause of a fetch that ended early. All other causes: `store`."""
OFFLOADED = Origin("store", "chunks_offload", "bytes_offload", "the offload tier")


@dataclass(eq=False)
class OffloadedPart(Part):
    """Chunks that have arrived in the tier's buffers."""

    chunks: range = field(kw_only=True)
    epoch: int = field(kw_only=True)
    give_back: Callable[[], None] = field(kw_only=True)

    def settle(self) -> tuple[int, str]:
        context = self.context
        self.give_back()
        self.brought(len(self.chunks), self.stop, perf_counter() - context.idle_since)
        context.epochs.add(self.epoch)
        context.fetched += self.chunks
        return self.stop - self.first, ""

    def drop(self) -> None:
        self.give_back()


class OffloadSource:
    """Reads chunks from the offload tier, run by run, ahead of their use. After a run that ended
    early, reads no more, since another run may fail, too. Runs in the worker's thread.

    cause: why no chunk can come from the tier now; empty if the tier simply lacks the chunk.
    may_have: whether calling `prepare` makes sense."""

    def __init__(self, context: LoadContext, tier: OffloadTier, memory: MemorySource) -> None:
        """memory: the tier is not asked for chunks that are known to be there."""
        self._context, self.tier, self.may_have = context, tier, True
        self._memory = memory
        self.cause = ""
        self._fetch: Fetch | None = None
        self._next = self._stop = 0
        """Chunks: the next one of the fetch, and the first one behind it."""

    def expects(self, block: int) -> bool:
        """Whether this block's chunk is being fetched."""
        fetch = self._fetch
        if fetch is None or self._next != block // self._context.places.each:
            return False
        if not fetch.over:
            return True
        if self._next < self._stop:
            self.may_have = False
            self.cause = CAUSES.get(fetch.cause, "store")
        self.cancel()
        return False

    def prepare(self, block: int) -> bool:
        """Begin to fetch chunks from this block's on. Waits at most for the server's answer.
        Returns whether chunks are being fetched."""
        context, each = self._context, self._context.places.each
        chunk = block // each
        lacks = block >= context.places.total or chunk >= len(context.keys)
        if not self.may_have or lacks or self._fetch is not None:
            return self._fetch is not None
        known = self._memory.next(block)
        if known == block:
            return False
        try:
            stop = None if known is None else -(-known // each)
            fetch = context.session.fetch(context.keys[chunk:stop])
        except VCacheError as error:
            context.session.miss("fetch", error)
            fetch = None
            self.cause = error.cause
        if fetch is None:
            self.may_have = False
            return False
        self._fetch = fetch
        self._next = chunk
        self._stop = chunk + len(fetch.keys)
        return True

    def launch(self, block: int) -> Sequence[Part]:
        """Start the copy of the arrived chunks, from this block on. Returns the chunks' part."""
        context, fetch, chunk = self._context, self._fetch, block // self._context.places.each
        if fetch is None or self._next != chunk or not (arrived := fetch.ready()):
            return []
        self._next += len(arrived)
        addresses = np.array([buffer.chunk.data_ptr() for buffer in arrived], dtype=np.int64)
        pages = in_chunks(context.kv, context.session.chunk_size, addresses, chunk)
        part = OffloadedPart(
            context,
            block,
            min(self._next * context.places.each, context.places.total),
            Place(pages, OFFLOADED, host=context.kv.device.type != "cpu"),
            chunks=range(chunk, self._next),
            epoch=fetch.epoch,
            give_back=partial(fetch.give_back, arrived),
        )
        try:
            context.begin_copy([part])
        except VCacheError:
            part.drop()
            raise
        return [part]

    def wait(self, seconds: float) -> bool:
        """Wait at most `seconds` for a fetch. False at once if no chunk is being fetched."""
        if self._fetch is None or self._fetch.over:
            return False
        self._fetch.wait(seconds)
        return True

    def cancel(self) -> None:
        """Release chunks that no copy reads. Idempotent."""
        if self._fetch is not None:
            self._fetch.cancel()
        self._fetch = None
