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


class OffloadTier:
    """What one process reads from and writes to the offload tier; nobody outside looks behind it.

    Look-ups in any thread; `bind` and `fetch` in the worker's thread; `offer` in any. Nothing waits for the store but threads of the
    tier's own and whoever waits for a `Fetch`, and nothing raises for what the store does.
    """

    def __init__(self, config: OffloadConfig, stats: EngineStats, on_gpu: bool) -> None:
        """Looks up only, until `bind`. on_gpu: where the KV caches are. Starts to reach the store, in the background."""
        self._settings, self._stats = config, stats
        self.access = Access(config, make_store(config), stats)
        self.index = Index(config, self.access, on_gpu)
        # What came back may be another master, which knows no object.
        self.access.on_back = self.doubt
        self._source: Source | None = None
        self._writer: Writer | None = None
        self._client: Client | None = None
        self._readers = Workers("vcache-offload-read", config.readers, _BACKLOG)
        self._checkers = Workers("vcache-offload-check", max(1, min(CHECKERS, len(os.sched_getaffinity(0)) // 4)), _BACKLOG)
        self._rings: list[Ring] = []
        self._bound = 0
        self.promotes = config.promote

    def bind(
        self,
        config: Config,
        layout: Layout,
        device: Device,
        chunk_bytes: int,
        views: Callable[[Sequence[Location]], list[SlotView]],
    ) -> None:
        """The chunks of this process's KV caches are known: make the buffers, once. In the worker's thread. views: addresses of slots.

        Raises ConfigError where there is no memory for them, CodecError where the codec is not for such KV.
        """
        if self._bound == chunk_bytes:
            return
        if self._bound:
            raise ConfigError(f"chunks of {chunk_bytes:,} B; the offload tier was made ready for chunks of {self._bound:,} B")
        codec = codecs.make(self._settings.codec, codecs.Geometry(layout.dtype, layout.head_dim))
        size = buffer_bytes(codec, chunk_bytes)
        count = min(self._settings.staging_bytes // size, 2 * MOST_BUFFERS)
        if count < 4:
            need = f"offload.staging_bytes must be at least {4 * size:,}, four chunks of {size:,} B each"
            raise ConfigError(f"{need}; it is {int(self._settings.staging_bytes):,}")
        pinned = device.ordinal is not None
        try:
            writing, reading = Ring(size, count // 2, pinned), Ring(size, count - count // 2, pinned)
        except (RuntimeError, OSError) as error:
            raise ConfigError(f"no {count * size:,} B of host memory for offload.staging_bytes: {error}") from error
        self._rings = [writing, reading]
        for ring in self._rings:
            self.access.store.register(ring.span, ring.fd)
        fingerprint, settings = layout.namespace().fingerprint, self._settings
        self._source = Source(
            self.access,
            self._readers,
            self._checkers,
            reading,
            codec,
            fingerprint,
            chunk_bytes,
            settings.get_seconds,
            self._stats,
            self.index.absent,
            self.index.bandwidth,
        )
        # A connection of its own: what happens here must not make a request wait.
        self._client = Client(config.server.path, config.client, device.name, device.medium)
        sink = Sink(
            self.access,
            writing,
            codec,
            fingerprint,
            chunk_bytes,
            self._client,
            views,
            device.ordinal,
            self._stats,
            self.index,
        )
        self._writer = Writer(sink, settings.writers, settings.queue_chunks)
        self._bound = chunk_bytes
        log.info("offload tier: %s; %d buffers of %s B, %s", settings, count, f"{size:,}", "pinned" if pinned else "host")

    def doubt(self) -> None:
        """What was written may not be there any more. Any thread."""
        self.index.below.clear()

    # ---- look-ups

    @property
    def usable(self) -> bool:
        """Whether look-ups reach the store now. Costs nothing to ask."""
        return self.index.usable

    @property
    def bandwidth(self) -> float | None:
        """Bytes of KV a second that came lately; None before the first load."""
        return self.index.bandwidth.value

    @bandwidth.setter
    def bandwidth(self, value: float | None) -> None:
        self.index.bandwidth.value = value

    def note_epoch(self, epoch: int) -> None:
        """The server said that the namespace is in this epoch. What was found out in another is forgotten."""
        self.index.hear(epoch)

    def lookup(self, keys: Sequence[ChunkKey], epoch: int) -> int:
        """How many leading chunks are there, as far as can be told within `lookup_seconds`. epoch: the server's answer to who asked it
        just now."""
        return self.index.contains_prefix(keys, epoch)

    def extend(self, client: Client, keys: Sequence[ChunkKey], ranks: int, found: int) -> int:
        """How many leading chunks can be loaded, given that the pool has the first `found` and not the next one, by all `ranks` ranks
        (keys of rank 0). Raises VCacheError if the pool does not answer."""
        return self.index.continued(client, keys, ranks, found)

    def fetch(self, keys: Sequence[ChunkKey], epoch: int) -> Fetch | None:
        """Begin to read these, as they were stored in `epoch`; None where nothing can come."""
        self.index.hear(epoch)
        if self._source is None or not keys or not self.may_have(keys[0]):
            return None
        return Fetch(self._source, keys, epoch)

    def may_have(self, key: ChunkKey) -> bool:
        """Whether it is worth asking: the store is usable, and this was not found to be absent a short while ago."""
        return self.index.usable and not self.index.known_absent(key)

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
            "codec": self._settings.codec,
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


def open_tier(config: OffloadConfig, stats: EngineStats, on_gpu: bool) -> OffloadTier | None:
    """The offload tier. None where it is off, or cannot be had, which is logged: the pool serves without."""
    if config.policy == "off":
        return None
    try:
        return OffloadTier(config, stats, on_gpu)
    except VCacheError as error:
        log.error("no offload tier: %s", error)
        return None
