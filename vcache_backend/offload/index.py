"""Which chunks are below: asked in one batch, not asked again for a while where they are not, and not at all where it does not pay."""

from __future__ import annotations

import time
from collections.abc import Sequence

from vcache_backend.config import OffloadConfig
from vcache_backend.metadata_server.client import Client
from vcache_backend.metadata_server.messages import ChunkKey
from vcache_backend.offload import objects
from vcache_backend.offload.access import Access
from vcache_backend.offload.fetch import Bandwidth
from vcache_backend.offload.recent import Recent
from vcache_backend.transfer.keys import of_all_ranks

MOST_REMEMBERED = 1 << 16
KNOWN_SECONDS = 60.0


class Index:
    """Look-ups in the store. Any thread. None waits longer than `lookup_seconds`, and none where the store is not usable.

    bandwidth: what loads bring, to be compared with `min_bandwidth`; whoever loads in another process may set its value.
    """

    def __init__(self, config: OffloadConfig, access: Access, on_gpu: bool) -> None:
        """on_gpu: where the KV caches are."""
        self._config, self._access, self._least = config, access, config.least_bandwidth(on_gpu)
        self._absent = Recent(config.negative_seconds, MOST_REMEMBERED, time.monotonic)
        self.below = Recent(KNOWN_SECONDS, MOST_REMEMBERED, time.monotonic)
        """Chunks that were written or read lately: not to be written again."""
        self.bandwidth = Bandwidth()
        self.epoch = 0
        """Of the namespace, as the server last said."""
        self._next_try = 0.0

    @property
    def usable(self) -> bool:
        return self._access.usable

    def hear(self, epoch: int) -> None:
        """The namespace is in this epoch. What was found out in another is forgotten."""
        if epoch != self.epoch:
            self.epoch = epoch
            self._absent.clear()
            self.below.clear()

    def known_absent(self, key: ChunkKey) -> bool:
        """Was it found to be absent a short while ago?"""
        return key in self._absent

    def too_slow(self) -> bool:
        """Is computing taken to be faster than the store? Not so for one look-up every `retry_max_seconds`, to find out."""
        least, value = self._least, self.bandwidth.value
        if not least or value is None or value >= least:
            return False
        now = time.monotonic()
        if now < self._next_try:
            return True
        self._next_try = now + self._config.retry_max_seconds
        return False

    def contains_prefix(self, keys: Sequence[ChunkKey], epoch: int) -> int:
        """How many leading chunks are below, as far as can be told in time. epoch: the server's answer to who asked it just now."""
        self.hear(epoch)
        asked = self._absent.first(keys)
        if not asked or not self.usable:
            return 0
        found = self._access.ask([objects.name(key, epoch) for key in keys[:asked]])
        if found is not None and found < asked:
            self.absent(keys[found : found + 1])
            # Of those behind it nobody said anything.
            self.below.discard(keys[found:asked])
        return found or 0

    def continued(self, client: Client, keys: Sequence[ChunkKey], ranks: int, found: int) -> int:
        """How many leading chunks can be loaded, given that the pool has the first `found` and not the next one, by all `ranks` ranks
        (keys of rank 0). Those after it may lie here or there. Raises VCacheError if the pool does not answer."""
        rest = keys[found:]
        if not rest or not self.usable or rest[0] in self._absent or self.too_slow():
            return found
        shards = of_all_ranks(rest, ranks)
        pooled = client.present(shards)
        missing = [index for index, there in enumerate(pooled.present) if not there]
        below = self.contains_prefix([shards[index] for index in missing], pooled.epoch)
        whole = missing[below] if below < len(missing) else len(shards)
        return found + whole // ranks

    def absent(self, keys: Sequence[ChunkKey]) -> None:
        """These are not below."""
        self._absent.add(keys)
        self.below.discard(keys)

    def written(self, keys: Sequence[ChunkKey]) -> None:
        """These are, from now on."""
        self._absent.discard(keys)
        self.below.add(keys)
