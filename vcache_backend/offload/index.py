"""Looks chunks up in the store: in one batch, not again for a while if absent, and not at all if
loading is slower than computing.
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
"""A load of fewer says nothing about the bandwidth."""
MOST_ABSENT = 1 << 16


class Recent:
    """A set whose members leave it `seconds` after they were added, and the oldest when there are
    more than `bound`. Any thread.
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
        """The index of the first of `keys` that is a member; `len(keys)` if none is."""
        if not self._until:
            return len(keys)
        return next((index for index, key in enumerate(keys) if key in self), len(keys))

    def __contains__(self, key: ChunkKey) -> bool:
        until = self._until.get(key)
        return until is not None and self._now() < until


class Index:
    """Look-ups of the offload tier's chunks. Any thread.

    bandwidth: bytes of KV a second over recent loads; None before the first. A scheduler, whose
    workers load, sets it. epoch: the namespace's, as the server last said."""

    def __init__(self, config: OffloadConfig, store: Store, on_gpu: bool) -> None:
        """on_gpu: whether the KV caches are on a GPU."""
        self._config, self._store, self._least = config, store, config.least_bandwidth(on_gpu)
        self._absent = Recent(config.negative_seconds, MOST_ABSENT)
        self.bandwidth: float | None = None
        self.epoch = 0
        self._next_try = 0.0

    @property
    def usable(self) -> bool:
        """Whether look-ups reach the store now. Returns at once."""
        return self._store.usable

    def note_epoch(self, epoch: int) -> None:
        """Note the namespace's epoch. A new one forgets which chunks were absent."""
        if epoch != self.epoch:
            self.epoch = epoch
            self._absent.clear()

    def may_have(self, key: ChunkKey) -> bool:
        """Whether the store is usable and did not lack the chunk a moment ago."""
        return self.usable and key not in self._absent

    def measured(self, nbytes: int, seconds: float) -> None:
        """Note that a load of `nbytes` bytes took `seconds`."""
        if nbytes >= MEASURED_BYTES and seconds > 0:
            rate = nbytes / seconds
            self.bandwidth = rate if self.bandwidth is None else 0.5 * self.bandwidth + 0.5 * rate

    def too_slow(self) -> bool:
        """Whether computing is faster than loading. False once every `retry_max_seconds`, to
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
        """Count the leading chunks that the store has, within `lookup_seconds`. epoch: the
        namespace's.
        """
        self.note_epoch(epoch)
        asked = self._absent.first(keys)
        found = self._store.lookup([objects.name(key, epoch) for key in keys[:asked]])
        if found is not None and found < asked:
            self.absent(keys[found : found + 1])
        return found or 0

    def extend(self, client: Client, keys: Sequence[ChunkKey], ranks: int, found: int) -> int:
        """How many leading chunks all `ranks` ranks can load from pool and store, if the pool has
        the first `found` and not the next one. keys: rank 0's. Raises VCacheError if the server does
        not answer."""
        rest = keys[found:]
        if not rest or not self.may_have(rest[0]) or self.too_slow():
            return found
        shards = of_ranks(rest, ranks)
        pooled = client.present(shards)
        missing = [index for index, there in enumerate(pooled.present) if not there]
        below = self.lookup([shards[index] for index in missing], pooled.epoch)
        whole = missing[below] if below < len(missing) else len(shards)
        return found + whole // ranks

    def absent(self, keys: Sequence[ChunkKey]) -> None:
        """Note chunks that are not in the store."""
        self._absent.add(keys)
