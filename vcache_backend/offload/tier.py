"""The offload tier of one process: looks up, reads, and writes chunks in the background, unless
loading is slower than computing."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

from vcache_backend.config import Config, OffloadConfig
from vcache_backend.errors import ConfigError, SegmentError, VCacheError
from vcache_backend.offload import objects
from vcache_backend.offload.objects import Format
from vcache_backend.offload.store import Store
from vcache_backend.offload.transfers import (
    Fetch,
    Reader,
    Writer,
    batch_chunks,
    staging,
)
from vcache_backend.protocol.client import Client
from vcache_backend.protocol.messages import ChunkKey, of_ranks
from vcache_backend.transfer.layout import Layout
from vcache_backend.transfer.stats import EngineStats
from vcache_backend.vram_pool.devices import Device
from vcache_backend.vram_pool.pool import Pool

log = logging.getLogger(__name__)


class OffloadTier:
    """The offload tier in one process. `bind` and `fetch` run in the worker's thread, other methods
    in any thread. Only look-ups wait for the store, up to `lookup_seconds`. No failure of the store
    raises."""

    def __init__(self, config: OffloadConfig, stats: EngineStats, on_gpu: bool) -> None:
        """Open the tier for look-ups. Waits at most 3 s for the store, whose process starts in half
        a second: vLLM's first request may need the tier. The background thread keeps trying.
        on_gpu: the KV caches are on a GPU."""
        self._settings, self._stats, self._store = config, stats, Store(config, stats)
        self._least, self._next_try = config.least_bandwidth(on_gpu), 0.0
        self.bandwidth: float | None = None
        """Bytes of KV a second over recent loads; None before the first load."""
        self._links: dict[int, tuple[bool, float | None]] = {}
        """In a scheduler, which loads nothing: the `link` of each worker, by number."""
        self._reader: Reader | None = None
        self._writer: Writer | None = None
        self.promotes = config.promote
        """Whether loaded chunks should be stored in the pool."""
        self._store.wait(3.0)

    def bind(
        self, config: Config, layout: Layout, device: Device, chunk_bytes: int, pool: Pool
    ) -> None:
        """Make the buffers for chunks of these KV caches, once. pool: maps
        segments.

        ConfigError if memory is lacking."""
        if self._reader is not None:
            return
        settings, store, stats = self._settings, self._store, self._stats
        form = Format(layout.namespace().fingerprint, chunk_bytes)
        size = form.object_bytes
        # More buffers would not be faster.
        count = min(settings.staging_bytes // size, 512)
        if count < 4:
            need = f"must be at least {4 * size:,}, four chunks of {size:,} B each"
            given = int(settings.staging_bytes)
            raise ConfigError(f"offload.staging_bytes {need}; it is {given:,}")
        try:
            buffers = staging(store.memory, size, count, device.ordinal)
        except (SegmentError, OSError) as error:
            lacks = f"no {count * size:,} B of host memory for offload.staging_bytes"
            raise ConfigError(f"{lacks}: {error}") from error
        # Reading gets the buffers that writing does not need.
        batch = min(batch_chunks(chunk_bytes), count // 2)
        client = Client(config.server.path, config.client, device.name, device.medium)
        seconds = settings.get_seconds
        self._reader = Reader(store, stats, form, buffers[batch:], seconds, self._measured)
        self._writer = Writer(store, stats, form, buffers[:batch], client, pool)
        log.info("offload tier: %s; %d buffers of %s B", settings, count, f"{size:,}")

    # ---- look-ups

    @property
    def usable(self) -> bool:
        """Whether look-ups, and the workers that load, can reach the store. Returns at once."""
        return self._store.usable and all(usable for usable, _ in self._links.values())

    @property
    def link(self) -> tuple[bool, float | None]:
        """A worker's connection to the store: whether it is usable, and its bandwidth, rounded so
        that not every read is news for the scheduler."""
        rate = self.bandwidth
        return self.usable, float(f"{rate:.2g}") if rate is not None else None

    def note(self, links: Mapping[int, tuple[bool, float | None]], ranks: int) -> None:
        """Note changed links of workers. All `ranks` ranks load their shards of a chunk at once, so
        the slowest worker decides when the chunk is loaded."""
        self._links |= links
        if rates := [rate for _, rate in self._links.values() if rate is not None]:
            self.bandwidth = min(rates) * ranks

    def lookup(self, keys: Sequence[ChunkKey], epoch: int) -> int:
        """Count the store's leading chunks, within `lookup_seconds`. epoch: of the namespace."""
        return self._store.lookup([objects.name(key, epoch) for key in keys]) or 0

    def extend(self, client: Client, keys: Sequence[ChunkKey], ranks: int, found: int) -> int:
        """Count the leading chunks that all `ranks` ranks can load from pool and store. found: how
        many leading chunks the pool has. keys: of rank 0."""
        rest = keys[found:]
        if not rest or not self.usable or self._too_slow():
            return found
        shards = of_ranks(rest, ranks)
        try:
            pooled = client.present(shards)
        except VCacheError as error:
            log.debug("look-up in the offload tier: %s", error)
            return found
        missing = [index for index, present in enumerate(pooled.present) if not present]
        below = self.lookup([shards[index] for index in missing], pooled.epoch)
        whole = missing[below] if below < len(missing) else len(shards)
        return found + whole // ranks

    def _measured(self, nbytes: int, seconds: float, least: int = 1 << 20) -> None:
        """Note that a load of `nbytes` bytes took `seconds`. A load of fewer than `least` bytes
        does not count."""
        if nbytes >= least and seconds > 0:
            rate = nbytes / seconds
            self.bandwidth = rate if self.bandwidth is None else 0.5 * self.bandwidth + 0.5 * rate

    def _too_slow(self) -> bool:
        """Whether computing is faster than loading. At times False, to measure again."""
        if not self._least or self.bandwidth is None or self.bandwidth >= self._least:
            return False
        now = time.monotonic()
        if now < self._next_try:
            return True
        self._next_try = now + self._settings.longest_pause
        return False

    # ---- reads and writes

    def fetch(self, keys: Sequence[ChunkKey], epoch: int) -> Fetch | None:
        """Begin to read chunks stored in `epoch`; None if the store is not usable."""
        if self._reader is None or not keys or not self.usable:
            return None
        return Fetch(self._reader, keys, epoch)

    def offer(self, keys: Sequence[ChunkKey]) -> None:
        """Write chunks that are now in the pool, in the background. Never blocks."""
        if (writer := self._writer) is not None:
            writer.offer(keys)

    # ---- the rest

    def flush(self, seconds: float) -> bool:
        """Wait until all offered chunks are written or dropped; False after `seconds`."""
        return (writer := self._writer) is None or writer.flush(seconds)

    def snapshot(self) -> dict[str, Any]:
        """What was counted, such as `written` chunks, and the store's state."""
        return {"usable": self.usable, **self._stats.counted("offload_"), **self._store.snapshot()}

    def close(self, seconds: float = 3.0) -> None:
        """Close the store after running writes have ended, within `seconds`. Idempotent."""
        if self._writer is not None:
            self._writer.close(seconds)
        self._store.close()
        if self._reader is not None:
            self._reader.close()
        # The staging memory goes with the last load that uses it.
        self._reader = self._writer = None
