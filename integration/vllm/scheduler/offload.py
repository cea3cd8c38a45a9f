"""The offload tier in the connector's scheduler half."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from vcache_backend.errors import VCacheError
from vcache_backend.protocol.client import Client
from vcache_backend.protocol.messages import ChunkKey

from ..metadata import Link

if TYPE_CHECKING:
    from vcache_backend.offload.tier import OffloadTier

log = logging.getLogger("vllm.vcache")


class OffloadLookup:
    """Looks chunks up in the offload tier. Runs in the scheduler's thread; each call waits at most
    `offload.lookup_seconds`.

    No hits while the scheduler or any worker cannot reach the tier."""

    def __init__(self, tier: OffloadTier, ranks: int) -> None:
        """ranks: shards of a chunk."""
        self._tier = tier
        self._ranks = ranks
        self._links: dict[int, Link] = {}

    @property
    def usable(self) -> bool:
        return self._tier.usable and all(link.usable for link in self._links.values())

    def extend(self, client: Client, keys: Sequence[ChunkKey], found: int) -> int:
        """Return how many leading chunks the pool and the offload tier have. found: how many the
        pool has."""
        try:
            return self._tier.extend(client, keys, self._ranks, found) if self.usable else found
        except VCacheError as error:
            log.debug("look-up in the offload tier: %s", error)
            return found

    def note(self, links: Mapping[int, Link]) -> None:
        """Note the workers' present connections to the store, by worker number."""
        self._links |= links
        rates = [link.bandwidth for link in self._links.values() if link.bandwidth is not None]
        if rates:
            # All workers load their shards at once, so the slowest worker decides when a chunk is
            # loaded.
            self._tier.bandwidth = min(rates) * self._ranks

    def close(self) -> None:
        """Idempotent."""
        self._tier.close()
