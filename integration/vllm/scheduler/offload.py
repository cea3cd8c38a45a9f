"""The offload tier as the connector's scheduler half sees it."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from vcache_backend.config import OffloadConfig
from vcache_backend.errors import VCacheError
from vcache_backend.metadata_server.client import Client
from vcache_backend.metadata_server.messages import ChunkKey
from vcache_backend.transfer.session import make_tier
from vcache_backend.transfer.stats import EngineStats

from ..metadata import Link

log = logging.getLogger("vllm.vcache")


class OffloadLookup:
    """Looks chunks up in the offload tier. Runs in the scheduler's thread; each call waits at most
    `offload.lookup_seconds`.

    No hits while the scheduler or any worker cannot reach the tier."""

    def __init__(self, config: OffloadConfig, ranks: int, on_gpu: bool) -> None:
        """ranks: shards of a chunk. on_gpu: whether the KV caches are on GPUs."""
        self._tier = make_tier(config, EngineStats(), on_gpu)
        self._ranks = ranks
        self._links: dict[int, Link] = {}

    @property
    def usable(self) -> bool:
        tier = self._tier
        return (
            tier is not None and tier.usable and all(link.usable for link in self._links.values())
        )

    def extend(self, client: Client, keys: Sequence[ChunkKey], found: int) -> int:
        """Return how many leading chunks pool and offload tier have. found: how many of them the
        pool has.
        """
        if self._tier is None or found >= len(keys) or not self.usable:
            return found
        try:
            return self._tier.extend(client, keys, self._ranks, found)
        except VCacheError as error:
            log.debug("look-up in the offload tier: %s", error)
            return found

    def note(self, links: Mapping[int, Link]) -> None:
        """Note how workers reach the store now, by worker number."""
        self._links |= links
        rates = [link.bandwidth for link in self._links.values() if link.bandwidth is not None]
        if self._tier is not None and rates:
            # All workers load their shards at once, so the slowest decides when a chunk is loaded.
            self._tier.bandwidth = min(rates) * self._ranks

    def close(self) -> None:
        """Idempotent."""
        if self._tier is not None:
            self._tier.close()
        self._tier = None
