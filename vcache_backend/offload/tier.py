"""The tier as a worker has it: look-ups, reads and background writes of one rank's chunks, in one place."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from typing import Any

from vcache_backend.config import Config, OffloadConfig
from vcache_backend.errors import ConfigError, VCacheError
from vcache_backend.metadata_server.client import Client
from vcache_backend.metadata_server.messages import ChunkKey, Location
from vcache_backend.offload import codecs, objects
from vcache_backend.offload.access import Access
from vcache_backend.offload.fetch import Fetch, Source, buffer_bytes
from vcache_backend.offload.index import Index
from vcache_backend.offload.isolated import IsolatedStore
from vcache_backend.offload.jobs import Workers
from vcache_backend.offload.staging import Ring
from vcache_backend.offload.store import ObjectStore
from vcache_backend.offload.writer import DROPPED, Sink, Writer
from vcache_backend.transfer.layout import Layout
from vcache_backend.transfer.stats import EngineStats
from vcache_backend.vram_pool.devices import Device
from vcache_backend.vram_pool.slots import SlotView

log = logging.getLogger(__name__)

MOST_BUFFERS = 256
"""Of one direction; more would not be faster."""
CHECKERS = 4
"""Threads at most that hash and decode what came, beside the calls; one for each four cores. One hashes 10 GB/s on an H200's host, where
4 GB/s came over loopback; codecs are slower. On two cores, which the transfer fills, a second one made reading slower (0.72 of the
library's speed instead of 0.80, medians of six runs)."""
_BACKLOG = 1 << 14
CLOSE_SECONDS = 3.0


class Tier:
    """What one worker reads from and writes to the offload tier.

    Look-ups in any thread; `bind` and `fetch` in the worker's thread; `offer` in any. Nothing waits for the store but threads of the
    tier's own and whoever waits for a `Fetch`, and nothing raises for what the store does.
    """

    def __init__(self, config: Config, layout: Layout, rank: int, device: Device, stats: EngineStats) -> None:
        self._config, self._settings, self._stats = config, config.offload, stats
        self._namespace, self._rank, self._device = layout.namespace(), rank, device
        self._codec = codecs.make(config.offload.codec, codecs.Geometry(layout.dtype, layout.head_dim))
        self.access = Access(config.offload, make_store(config.offload), stats)
        self.index = Index(config.offload, self.access, device.ordinal is not None)
        # What came back may be another master, which knows no object.
        self.access.on_back = self.doubt
        self._source: Source | None = None
        self._writer: Writer | None = None
        self._client: Client | None = None
        self._readers = Workers("vcache-offload-read", config.offload.readers, _BACKLOG)
        self._checkers = Workers("vcache-offload-check", max(1, min(CHECKERS, len(os.sched_getaffinity(0)) // 4)), _BACKLOG)
        self._rings: list[Ring] = []
        self._bound = 0
        self.promotes = config.offload.promote

    def bind(self, chunk_bytes: int, views: Callable[[Sequence[Location]], list[SlotView]]) -> None:
        """The size of a chunk is known: make the buffers, once. Raises ConfigError where there is no memory for them."""
        if self._bound == chunk_bytes:
            return
        if self._bound:
            raise ConfigError(f"chunks of {chunk_bytes:,} B; the offload tier was made ready for chunks of {self._bound:,} B")
        size = buffer_bytes(self._codec, chunk_bytes)
        count = min(self._settings.staging_bytes // size, 2 * MOST_BUFFERS)
        if count < 4:
            need = f"offload.staging_bytes must be at least {4 * size:,}, four chunks of {size:,} B each"
            raise ConfigError(f"{need}; it is {int(self._settings.staging_bytes):,}")
        pinned = self._device.ordinal is not None
        try:
            writing, reading = Ring(size, count // 2, pinned), Ring(size, count - count // 2, pinned)
        except (RuntimeError, OSError) as error:
            raise ConfigError(f"no {count * size:,} B of host memory for offload.staging_bytes: {error}") from error
        self._rings = [writing, reading]
        for ring in self._rings:
            self.access.store.register(ring.span, ring.fd)
        fingerprint, settings = self._namespace.fingerprint, self._settings
        self._source = Source(
            self.access,
            self._readers,
            self._checkers,
            reading,
            self._codec,
            fingerprint,
            chunk_bytes,
            settings.get_seconds,
            self._stats,
            self.index.absent,
            self.index.bandwidth,
        )
        # A connection of its own: what happens here must not make a request wait.
        self._client = Client(self._config.server.path, self._config.client, self._device.name, self._device.medium)
        sink = Sink(
            self.access,
            writing,
            self._codec,
            fingerprint,
            self._rank,
            chunk_bytes,
            self._client,
            views,
            self._device.ordinal,
            self._stats,
            self.index,
        )
        self._writer = Writer(sink, settings.writers, settings.queue_chunks, saves=settings.policy == "on_evict")
        self._bound = chunk_bytes
        log.info("offload tier: %s; %d buffers of %s B, %s", settings, count, f"{size:,}", "pinned" if pinned else "host")

    def doubt(self) -> None:
        """What was written may not be there any more. Any thread."""
        self.index.below.clear()
        if self._writer is not None:
            self._writer.doubt()

    def fetch(self, keys: Sequence[ChunkKey], epoch: int) -> Fetch | None:
        """Begin to read these, as they were stored in `epoch`; None where nothing can come."""
        self.index.hear(epoch)
        if self._source is None or not keys or not self.index.usable:
            return None
        return Fetch(self._source, keys, epoch)

    def offer(self, keys: Sequence[ChunkKey]) -> None:
        """These are in the pool from now on. Never blocks."""
        if self._writer is not None:
            self._writer.offer(keys)

    def known(self, keys: Sequence[ChunkKey]) -> None:
        """These were read from the store just now: it has them."""
        self.index.written(keys)

    def forget(self, keys: Sequence[ChunkKey]) -> None:
        """Remove these from the store, soon."""
        self.index.absent(keys)
        self.access.forget([objects.name(key, self.index.epoch) for key in keys])

    def flush(self, seconds: float) -> bool:
        """Wait until what was offered is written or dropped; False if it is not after so many seconds."""
        return self._writer is None or self._writer.flush(seconds)

    def snapshot(self) -> dict[str, Any]:
        """Counters and the state of the store, as plain values."""
        counted = self._stats.counted("offload_")
        bandwidth = self.index.bandwidth.value
        return {
            "usable": self.access.usable,
            "breaker": {"open": self.access.breaker.is_open, "opened": self.access.breaker.opened},
            "policy": self._settings.policy,
            "codec": self._codec.name,
            "written": counted.get("written", 0),
            "dropped": {reason: counted.get(f"dropped_{reason}", 0) for reason in DROPPED},
            "late": counted.get("late", 0),
            "read_gb_per_s": None if bandwidth is None else bandwidth / 1e9,
            "store": self.access.store.stats(),
        }

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """Let writes under way end, within so many seconds, and leave. Idempotent."""
        if self._writer is not None:
            self._writer.close(seconds)
        self.access.close()
        # Their calls have failed by now.
        self._readers.close(seconds)
        self._checkers.close(seconds)
        for ring in self._rings:
            ring.close()
        if self._client is not None:
            self._client.close()


def make_store(config: OffloadConfig) -> ObjectStore:
    """The store that the configuration names."""
    return IsolatedStore(config)


def make_index(config: OffloadConfig, on_gpu: bool, stats: EngineStats) -> tuple[Access, Index] | None:
    """For who only looks up: the store and its index. None where the tier is off, or cannot be had, which is logged."""
    if config.policy == "off":
        return None
    try:
        access = Access(config, make_store(config), stats)
    except VCacheError as error:
        log.error("no offload tier: %s", error)
        return None
    return access, Index(config, access, on_gpu)
