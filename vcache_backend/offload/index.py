"""Looks chunks up in the store in one batch, unless loading is slower than computing."""

from __future__ import annotations

import time
from collections.abc import Sequence

from vcache_backend.config import OffloadConfig
from vcache_backend.metadata_server.client import Client
from vcache_backend.metadata_server.messages import ChunkKey, of_ranks
from vcache_backend.offload import objects
from vcache_backend.offload.store import Store

MEASURED_BYTES = 1 << 20
"""A load of fewer bytes does not count as a measurement of the bandwidth."""


class Index:
    """Looks up the offload tier's chunks. Any thread.

    bandwidth: bytes of KV a second over recent loads; None before the first load. A scheduler,
    which loads nothing itself, sets it."""

    def __init__(self, config: OffloadConfig, store: Store, on_gpu: bool) -> None:
        self._config, self._store, self._least = config, store, config.least_bandwidth(on_gpu)
        self.bandwidth: float | None = None
        self._next_try = 0.0

    @property
    def usable(self) -> bool:
        """Whether look-ups can reach the store. Returns at once."""
        return self._store.usable

    def measured(self, nbytes: int, seconds: float) -> None:
        """Note that a load of `nbytes` bytes took `seconds`."""
        if nbytes >= MEASURED_BYTES and seconds > 0:
            rate = nbytes / seconds
            self.bandwidth = rate if self.bandwidth is None else 0.5 * self.bandwidth + 0.5 * rate

    def too_slow(self) -> bool:
        """Whether computing is faster than loading. False now and then, to measure again."""
        if not self._least or self.bandwidth is None or self.bandwidth >= self._least:
            return False
        now = time.monotonic()
        if now < self._next_try:
            return True
        self._next_try = now + self._config.longest_pause
        return False

    def lookup(self, keys: Sequence[ChunkKey], epoch: int) -> int:
        """Count the store's leading chunks, within `lookup_seconds`. epoch: the namespace's."""
        return self._store.lookup([objects.name(key, epoch) for key in keys]) or 0

    def extend(self, client: Client, keys: Sequence[ChunkKey], ranks: int, found: int) -> int:
        """Count the leading chunks that all `ranks` ranks can load from pool and store. found: how
        many of them the pool has before the first it lacks. keys: rank 0's. VCacheError if the
        server does not answer."""
        rest = keys[found:]
        if not rest or not self.usable or self.too_slow():
            return found
        shards = of_ranks(rest, ranks)
        pooled = client.present(shards)
        missing = [index for index, present in enumerate(pooled.present) if not present]
        below = self.lookup([shards[index] for index in missing], pooled.epoch)
        whole = missing[below] if below < len(missing) else len(shards)
        return found + whole // ranks
