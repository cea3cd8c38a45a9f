"""One request's load: chunk by chunk as they come, from the pool under a lease or from below, and what did not hold is said."""

from __future__ import annotations

import logging
import time
from contextlib import suppress
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from vcache_backend.errors import VCacheError
from vcache_backend.metadata_server.messages import ChunkKey
from vcache_backend.transfer.chunk_io import ChecksumError, ChunkIO, Lease
from vcache_backend.vram_pool.copier import Completion, Mark
from vcache_backend.vram_pool.paged import PagedKV
from vcache_backend.vram_pool.planner import CopyPlan, plan_blocks
from vcache_backend.vram_pool.slots import SlotView

from .events import Events
from .keys import of_rank
from .load_stats import LoadStats
from .metadata import Granted, Load
from .offload import Reading, forget
from .stats import Meter

if TYPE_CHECKING:
    from vcache_backend.offload.fetch import Staged

log = logging.getLogger("vllm.vcache")

POLL_SECONDS = 0.0002
"""How often a load asks for chunks that another instance is still computing."""
Blocks = npt.NDArray[np.int64]


class Context:
    """What all loads of a worker share. block_size: tokens of vLLM's blocks, which may be several of the tensors'."""

    def __init__(
        self, io: ChunkIO, kv: PagedKV, chunk_size: int, block_size: int, rank: int, meter: Meter, events: Events
    ) -> None:
        self.io, self.kv, self.chunk_size, self.rank = io, kv, chunk_size, rank
        self.meter, self.events = meter, events
        self.per_chunk = chunk_size // block_size
        self._parts = block_size // kv.block_size

    def kernel_blocks(self, blocks: Blocks) -> Blocks:
        """The tensors' blocks that vLLM's are."""
        if self._parts == 1:
            return blocks
        ids: Blocks = (blocks[:, None] * self._parts + np.arange(self._parts)).reshape(-1)
        return ids

    def kernel_count(self, blocks: int) -> int:
        return blocks * self._parts


@dataclass
class _Part:
    """Chunks of the pool under one lease on their way: as many as it has views."""

    lease: Lease
    views: list[SlotView]
    scattered: Completion
    tokens: int


@dataclass
class _Upload:
    """Chunks from the offload tier on their way: out of its buffers, which are given back after that."""

    staged: list[Staged]
    scattered: Completion
    tokens: int


class Loading:
    """Brings the chunks of `load` into the KV cache. In the worker's main thread.

    `advance` does what can be done without waiting and says whether the load is over; `invalid` then has the blocks that are not
    filled, vLLM's numbers. A load is never over while something may still write into its blocks.
    """

    def __init__(self, context: Context, load: Load, mark: Mark | None) -> None:
        """mark: a point in the model's stream; who owned these blocks before has no work queued after it."""
        self.load, self.invalid, self.cancelled = load, list[int](), False
        self._context, self._mark = context, mark
        self._keys = of_rank(load.keys, context.rank)
        self._ids = context.kernel_blocks(np.array(load.blocks, dtype=np.int64))
        self._done, self._over = 0, False
        self._part: _Part | _Upload | None = None
        self._below = Reading(context.io, self._keys, load.below)
        self._fetched: list[int] = []
        self._waits_since = 0.0
        self._deadline = time.monotonic() + load.wait_seconds
        self._next_look = 0.0
        self._load_stats = LoadStats(context.io, context.meter, load.request_id, len(self._keys))
        self._cause = ""

    def advance(self) -> bool:
        """Go on as far as possible; is it over? Once it is, it stays so."""
        self._over = self._over or self._advance()
        if self._over:
            self._below.cancel()
        return self._over

    def _advance(self) -> bool:
        try:
            if self.cancelled:
                self._below.cancel()
            while self._done < len(self._keys):
                if self._part is None and self.cancelled:
                    return True
                if self._part is None and not self._launch():
                    return self._given_up()
                if self._part is not None and not self._settle():
                    return bool(self._cause)
            with suppress(Exception):
                self._tell()
        except ChecksumError:
            self._fail("checksum")
        except Exception as error:  # noqa: BLE001 - what is not known to be right is computed
            if self._part is not None and not _quiet(self._part.scattered):
                return False
            self._fail("copy")
            with suppress(Exception):
                self._context.io.miss("load", error)
        return True

    @property
    def launched(self) -> bool:
        """Is a copy under way, or the load over?"""
        return self._over or self._part is not None

    def abandon(self) -> None:
        """Nothing is to be waited for any more: what it had to bring is not there."""
        self._over = True
        self._below.cancel()
        self._fail("copy")

    def wait(self, seconds: float) -> None:
        """Wait, at most so long, until `advance` may have something to do."""
        if self._part is None:
            if not self._below.wait(seconds):
                time.sleep(min(seconds, POLL_SECONDS))
            return
        try:
            self._part.scattered.wait(seconds)
        except VCacheError:
            log.debug("a copy failed; `advance` will say so", exc_info=True)

    @property
    def epochs(self) -> set[int]:
        """Those that the chunks were stored in which came from below."""
        return self._below.epochs

    def to_promote(self) -> tuple[list[ChunkKey], Blocks, list[ChunkKey]]:
        """Once all of it is in place: the chunks that came from below and have all their blocks here, those blocks (vLLM's numbers, a row
        a chunk), and the chunks before the first of them."""
        each, load = self._context.per_chunk, self.load
        chunks = [chunk for chunk in self._fetched if (chunk + 1) * each <= load.stop]
        if not (chunks and load.promote) or len(self.epochs) > 1 or self.invalid or self.cancelled:
            return [], np.empty((0, each), dtype=np.int64), []
        blocks = np.array([load.blocks[chunk * each : (chunk + 1) * each] for chunk in chunks], dtype=np.int64)
        before = of_rank(load.prefix, self._context.rank) + self._keys[: chunks[0]]
        return [self._keys[chunk] for chunk in chunks], blocks, before

    # ---- inside

    def _launch(self) -> bool:
        """Start the copy of the next chunks that are there; False if there are none, now or at all."""
        if self._below.is_next(self._done):
            staged = self._below.ready()
            if staged:
                self._upload(staged)
            return bool(staged)
        if self._from_pool():
            self._below.begin(self._done + self._chunks_under_way())
            return True
        if not self._below.allowed:
            return False
        if self._below.begin(self._done):
            self._cause, self._waits_since = "", perf_counter()
            return False
        # Somebody may have put it into the pool between the two questions.
        return self._from_pool()

    def _chunks_under_way(self) -> int:
        part = self._part
        return 0 if part is None else len(part.views if isinstance(part, _Part) else part.staged)

    def _planned(self, count: int) -> tuple[CopyPlan, int]:
        """The copy of the next `count` chunks out of slots 0, 1, ..., and how many tokens of them are wanted."""
        context, load = self._context, self.load
        start, stop = self._done * context.per_chunk, (self._done + count) * context.per_chunk
        first, last = max(load.skip - start, 0), max(min(load.stop, stop) - start, 0)
        each = context.kernel_count
        ids = self._ids[each(start) : each(start + last)]
        copy = plan_blocks(context.kv, context.chunk_size, ids, min(each(first), len(ids)))
        return copy, max(last - first, 0) * (context.chunk_size // context.per_chunk)

    def _upload(self, staged: list[Staged]) -> None:
        try:
            copy, tokens = self._planned(len(staged))
        except BaseException:
            self._below.give_back(staged)
            raise
        try:
            scattered = self._context.io.upload(self._context.kv, copy, staged, self._mark)
        except VCacheError:
            # After any other error nobody knows whether something reads them: they are lost.
            self._below.give_back(staged)
            raise
        self._part, self._cause = _Upload(staged, scattered, tokens), ""

    def _from_pool(self) -> bool:
        """Lease the next chunks that the pool has, and start their copy; False if it has none."""
        context, load = self._context, self.load
        lease = self._lease() if load.granted is None else self._granted(load.granted)
        if lease is None:
            return False
        views = context.io.views(lease.locations)
        if not views:
            context.io.let_go(lease)
            self._cause = "segment"
            return False
        self._cause = ""
        try:
            copy, tokens = self._planned(len(views))
            after = self._mark if load.granted is None else None
            scattered = context.io.scatter(context.kv, copy, views, self._keys[self._done :], after)
        except VCacheError:
            context.io.let_go(lease)
            raise
        self._part = _Part(lease, views, scattered, tokens)
        return True

    def _lease(self) -> Lease | None:
        """On the chunks that are not loaded yet, as far as they are there."""
        io, now = self._context.io, time.monotonic()
        if self.load.wait_seconds and now < self._next_look:
            return None
        self._next_look = now + POLL_SECONDS
        if not io.client.connected:
            self._cause = "server"
            return None
        started = perf_counter()
        try:
            return io.lease(self._keys[self._done :])
        except VCacheError as error:
            io.miss("lease", error)
            self._cause = "server"
            return None
        finally:
            self._load_stats.metadata_seconds += perf_counter() - started

    def _granted(self, granted: Granted) -> Lease | None:
        """The scheduler's lease. Its locations are those of all chunks: it is of use once."""
        if self._done:
            return None
        return Lease(granted.lease, self._keys, granted.locations, granted.deadline, granted.seconds, -1)

    def _settle(self) -> bool:
        """Is the copy over, and did its lease hold? False if it is not over, or if the load has failed."""
        part, context = self._part, self._context
        assert part is not None
        try:
            if not part.scattered.done():
                if isinstance(part, _Part) and part.lease.seconds_left < part.lease.seconds / 2:
                    context.io.renew(part.lease)
                return False
        except VCacheError:
            self._part = None
            if isinstance(part, _Part):
                context.io.let_go(part.lease)
            else:
                self._below.give_back(part.staged)
            raise
        self._part = None
        if isinstance(part, _Upload):
            self._below.give_back(part.staged)
        elif not self._held(part):
            self._fail("lease_lost")
            return False
        count = self._take(part) if isinstance(part, _Part) else self._take_fetched(part)
        if self.load.consume:
            self._consume(count)
        self._done += count
        self._next_look, self._waits_since = 0.0, perf_counter()
        return True

    def _held(self, part: _Part) -> bool:
        self._load_stats.data_seconds += part.scattered.seconds or 0.0
        started = perf_counter()
        held = self._context.io.conclude(part.lease, ours=self.load.granted is None)
        self._load_stats.metadata_seconds += perf_counter() - started
        return held

    def _take(self, part: _Part) -> int:
        """Note that chunks of the pool are in place: how many."""
        self._context.io.note_retrieved(part.views, part.tokens)
        self._load_stats.pooled(self._done, part.views, part.tokens, part.scattered.seconds or 0.0)
        return len(part.views)

    def _take_fetched(self, part: _Upload) -> int:
        """Note that chunks from below are in place: how many."""
        start, count = self._done, len(part.staged)
        self._context.io.note_fetched(self._keys[start : start + count], part.tokens)
        self._load_stats.fetched(start, count, part.tokens, perf_counter() - self._waits_since, part.scattered.seconds or 0.0)
        self._fetched += range(start, start + count)
        return count

    def _consume(self, count: int) -> None:
        keys = self._keys[self._done : self._done + count]
        # What was written through is not to be found there either.
        forget(self._context.io, keys)
        try:
            self._context.io.client.remove(keys)
        except VCacheError as error:
            self._context.io.miss("consume", error)
            return
        for hashes in self.load.said[self._done : self._done + count]:
            self._context.events.removed(hashes)

    def _given_up(self) -> bool:
        """Nothing is copied, and nothing could be started: is that the end?"""
        if self._below.under_way:
            return False
        if not self._cause and time.monotonic() < self._deadline:
            return False
        self._fail(self._cause or self._below.cause or ("timeout" if self.load.wait_seconds else "lease_lost"))
        return True

    def _fail(self, cause: str) -> None:
        """What is not loaded by now is not valid."""
        self._cause = cause
        start = max(self._done * self._context.per_chunk, self.load.skip)
        self.invalid = self.load.blocks[start : self.load.stop]
        if self.cancelled:
            return
        tokens, request = self._tokens(len(self.invalid)), self.load.request_id
        log.warning("%d tokens of request %s are computed, not loaded: %s", tokens, request, cause)
        with suppress(Exception):  # a number too few
            if not self._load_stats.empty:
                self._tell()
            self._context.meter.failed(cause)
            if cause != "checksum":  # counted by the chunk, where it was found
                self._context.io.stats.failed(cause)

    def _tokens(self, blocks: int) -> int:
        return blocks * self._context.chunk_size // self._context.per_chunk

    def _tell(self) -> None:
        self._load_stats.tell(self._context.kv.chunk_bytes(self._context.chunk_size) // self._context.chunk_size)


def _quiet(copy: Completion) -> bool:
    """Does a copy write nothing any more? One that failed does not."""
    try:
        return copy.done()
    except VCacheError:
        return True
