"""What the plugin does with chunks of the offload tier: counts them, reads them, and puts them into the pool again."""

from __future__ import annotations

from collections.abc import Sequence

from vcache_backend.errors import VCacheError
from vcache_backend.metadata_server.messages import ChunkKey
from vcache_backend.offload.fetch import Fetch, Staged
from vcache_backend.offload.staging import Buffer
from vcache_backend.transfer.chunk_io import ChunkIO
from vcache_backend.vram_pool.copier import Completion
from vcache_backend.vram_pool.paged import PagedKV
from vcache_backend.vram_pool.planner import CopyPlan

from .host_memory import HostMemory
from .memory import FetchedObj, Form
from .plans import Slots, is_whole, planned

HELD_SHARE = 8
"""Memory objects hold so many times `offload.staging_bytes` of host memory, at most; that much once is kept for next time."""
COPY_SECONDS = 10.0
_WAIT_SECONDS = 0.05
_LEFT: list[tuple[Completion, Sequence[Staged]]] = []
"""Copies that did not end, and the bytes they may still read."""


class Below:
    """The offload tier, as a `PoolWorker` has it; where there is none, it has nothing. Nothing raises for what the store or
    the server does.

    counts: may a look-up promise what is below? What is promised and does not come has to be recomputed, and not every vLLM does so
    rightly (see `Instance.recomputes`).
    """

    def __init__(self, io: ChunkIO, staging_bytes: int) -> None:
        self.io, self.counts = io, True
        self.memory = HostMemory(HELD_SHARE * staging_bytes, staging_bytes)

    @property
    def there(self) -> bool:
        return self.io.tier is not None

    def continued(self, names: list[ChunkKey], found: int) -> int:
        """How many leading chunks of this rank can be loaded: the pool has `found`. Any thread."""
        try:
            return self.io.continued(names, 1, found)
        except VCacheError as error:
            self.io.miss("lookup", error)
            return found

    def fetch(self, names: Sequence[ChunkKey]) -> Fetch | None:
        """Begin to read the leading run that the pool has not; to be loaded, taken or cancelled. Any thread."""
        if not names or not self.there:
            return None
        try:
            return self.io.fetch(names)
        except VCacheError as error:
            self.io.miss("fetch", error)
            return None

    def forget(self, names: Sequence[ChunkKey]) -> None:
        """Remove chunks from the store, soon."""
        if self.io.tier is not None:
            self.io.tier.forget(names)

    # ---- at once into the KV cache

    def load(self, kv: PagedKV, fetch: Fetch, start: int, slots: Slots, skip: int) -> int:
        """Put what comes into the KV cache, the first chunk at token `start`: how many leading chunks are in place. In the worker's
        main thread, which waits `offload.get_seconds` for the next chunk, and no longer."""
        size = self.io.chunk_size
        starts = list(range(start, start + len(fetch.keys) * size, size))

        def of(done: int, count: int) -> CopyPlan:
            return planned(self.io, kv, starts[done : done + count], slots, skip)

        if not is_whole(self.io, kv, of(0, len(starts)), starts, skip):
            return 0
        count = self.io.load_fetched(kv, fetch, of)
        if count:
            self._loaded(kv, fetch.keys[:count], {fetch.epoch}, starts[:count], slots, skip)
        return count

    def rescue(self, kv: PagedKV, names: Sequence[ChunkKey], starts: list[int], slots: Slots, skip: int) -> int:
        """`load` chunks that were promised out of the pool and have left it: how many leading ones are in place."""
        size = self.io.chunk_size
        if starts != list(range(starts[0], starts[0] + len(starts) * size, size)):
            return 0
        fetch = self.fetch(names)
        try:
            return self.load(kv, fetch, starts[0], slots, skip) if fetch is not None else 0
        finally:
            if fetch is not None:
                fetch.cancel()

    # ---- as memory objects

    def objects(self, form: Form, fetch: Fetch) -> list[FetchedObj]:
        """Wait for what comes, as `load` does: chunks in memory of their own. Any thread."""
        taken: list[FetchedObj] = []
        try:
            while not fetch.over:
                chunks = fetch.ready(1)
                if not chunks:
                    fetch.wait(_WAIT_SECONDS)
                    continue
                try:
                    obj = self._object(form, chunks[0])
                finally:
                    fetch.give_back(chunks)
                if obj is None:
                    break
                taken.append(obj)
        finally:
            fetch.cancel()
        return taken

    def _object(self, form: Form, staged: Staged) -> FetchedObj | None:
        try:
            memory = self.memory.take(staged.chunk.numel())
        except RuntimeError as error:
            self.io.miss("fetch", error)
            return None
        if memory is None:
            return None
        return FetchedObj(form, staged.key, staged.epoch, memory.copy_(staged.chunk), self.io.device.ordinal)

    def load_objects(self, kv: PagedKV, part: list[tuple[FetchedObj, int]], slots: Slots, skip: int) -> int | None:
        """`objects` into the KV cache, each from its token on, as `PoolWorker.load` does."""
        step = self.io.most_staged
        for i in range(0, len(part), step):
            objs, starts = [obj for obj, _ in part[i : i + step]], [start for _, start in part[i : i + step]]
            copy = planned(self.io, kv, starts, slots, skip)
            if not is_whole(self.io, kv, copy, starts, skip) or any(obj.memory is None for obj in objs):
                self.io.stats.failed("offload_load")
                return starts[0]
            staged = [
                Staged(obj.key, obj.epoch, memory, Buffer(-1, memory)) for obj in objs if (memory := obj.memory) is not None
            ]
            scattered = self.io.upload(kv, copy, staged)
            if not self.io.complete(scattered, COPY_SECONDS):
                _LEFT.append((scattered, staged))
                self.io.stats.failed("offload_load")
                return starts[0]
            self._loaded(kv, [obj.key for obj in objs], {obj.epoch for obj in objs}, starts, slots, skip)
        return None

    # ---- afterwards

    def _loaded(
        self, kv: PagedKV, names: Sequence[ChunkKey], epochs: set[int], starts: list[int], slots: Slots, skip: int
    ) -> None:
        """These, stored in `epochs`, are in the KV cache: count them, and store those that are there as a whole in the pool."""
        size = self.io.chunk_size
        self.io.note_fetched(names, sum(size - min(max(skip - at, 0), size) for at in starts))
        whole = [(name, at) for name, at in zip(names, starts, strict=True) if at >= skip]
        if not whole or not self.io.promotes or len(epochs) > 1:
            return
        try:
            self.io.store(kv, [name for name, _ in whole], [at for _, at in whole], slots, [], fetched_in=min(epochs))
        except (VCacheError, RuntimeError) as error:
            self.io.miss("promote", error)
