"""Looks chunks up in the store in one batch. Skips chunks that were absent a while ago, and all
look-ups if loading is slower than computing.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from vcache_backend.config import OffloadConfig
from vcache_backend.metadata_server.client import Client
from vcache_backend.metadata_server.messages import ChunkKey, of_ranks
from vcache_backend.offload import objects
from vcache_backend.offload.store import Store

MEASURED_BYTES = 1 << 20
"""A load of fewer bytes does not count as a measurement of the bandwidth."""
MOST_ABSENT = 1 << 16


class Recent:
    """A set that drops members `seconds` after they were added, and the oldest members beyond
    `bound`. Any thread.
    """

    def __init__(
        self, seconds: float, bound: int, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._seconds, self._bound, self._now = seconds, bound, now
        self._until: OrderedDict[ChunkKey, float] = OrderedDict()
        self._lock = threading.Lock()

    def add(self, keys: Iterable[ChunkKey]) -> None:
        until = self._now() + self._seconds
        with self._lock:
            for key in keys:
                self._until[key] = until
                self._until.move_to_end(key)
            while len(self._until) > self._bound:
                self._until.popitem(last=False)

    def clear(self) -> None:
        with self._lock:
            self._until.clear()

    def first(self, keys: Sequence[ChunkKey]) -> int:
        """The index of the first member among `keys`; `len(keys)` if none is a member."""
        if not self._until:
            return len(keys)
        return next((index for index, key in enumerate(keys) if key in self), len(keys))

    def __contains__(self, key: ChunkKey) -> bool:
        until = self._until.get(key)
        return until is not None and self._now() < until


class Index:
    """Looks up the offload tier's chunks. Any thread.

    bandwidth: bytes of KV a second over recent loads; None before the first load. A scheduler,
    which loads nothing itself, sets it. epoch: the namespace's, as the server last said."""

    def __init__(self, config: OffloadConfig, store: Store, on_gpu: bool) -> None:
        """on_gpu: whether the KV caches are on a GPU."""
        self._config, self._store, self._least = config, store, config.least_bandwidth(on_gpu)
        self._absent = Recent(config.negative_seconds, MOST_ABSENT)
        self.bandwidth: float | None = None
        self.epoch = 0
        self._next_try = 0.0

    @property
    def usable(self) -> bool:
        """Whether look-ups can reach the store. Returns at once."""
        return self._store.usable

    def note_epoch(self, epoch: int) -> None:
        """Note the namespace's epoch. A new epoch clears the list of absent chunks."""
        if epoch != self.epoch:
            self.epoch = epoch
            self._absent.clear()

    def may_have(self, key: ChunkKey) -> bool:
        """Whether the store is usable and did not lack the chunk recently."""
        return self.usable and key not in self._absent

    def measured(self, nbytes: int, seconds: float) -> None:
        """Note that a load of `nbytes` bytes took `seconds`."""
        if nbytes >= MEASURED_BYTES and seconds > 0:
            rate = nbytes / seconds
            self.bandwidth = rate if self.bandwidth is None else 0.5 * self.bandwidth + 0.5 * rate

    def too_slow(self) -> bool:
        """Whether computing is faster than loading. False now and then, to
        measure again.
        """
        if not self._least or self.bandwidth is None or self.bandwidth >= self._least:
            return False
        now = time.monotonic()
        if now < self._next_try:
            return True
        self._next_try = now + self._config.longest_pause
        return False

    def lookup(self, keys: Sequence[ChunkKey], epoch: int) -> int:
        """Count the store's leading chunks, within `lookup_seconds`. epoch: the namespace's."""
        self.note_epoch(epoch)
        asked = self._absent.first(keys)
        hits = self._store.lookup([objects.name(key, epoch) for key in keys[:asked]])
        if hits is not None and hits < asked:
            self.absent(keys[hits : hits + 1])
        return hits or 0

    def extend(self, client: Client, keys: Sequence[ChunkKey], ranks: int, found: int) -> int:
        """Count the leading chunks that all `ranks` ranks can load from pool and store. found: how
        many of them the pool has before the first it lacks. keys: rank 0's. VCacheError if the
        server does not answer.
        """
        rest = keys[found:]
        if not rest or not self.may_have(rest[0]) or self.too_slow():
            return found
        shards = of_ranks(rest, ranks)
        pooled = client.present(shards)
        missing = [index for index, present in enumerate(pooled.present) if not present]
        below = self.lookup([shards[index] for index in missing], pooled.epoch)
        whole = missing[below] if below < len(missing) else len(shards)
        return found + whole // ranks

    def absent(self, keys: Sequence[ChunkKey]) -> None:
        """Note chunks that the store lacks."""
        self._absent.add(keys)
