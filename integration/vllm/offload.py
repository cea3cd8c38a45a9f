"""The offload tier as the connector's two halves see it: look-ups in the scheduler, one load's reads in a worker."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from vcache_backend.config import OffloadConfig
from vcache_backend.errors import VCacheError
from vcache_backend.metadata_server.client import Client
from vcache_backend.metadata_server.messages import ChunkKey
from vcache_backend.transfer.chunk_io import ChunkIO
from vcache_backend.transfer.stats import EngineStats

from .metadata import Link

if TYPE_CHECKING:
    from vcache_backend.offload.fetch import Fetch, Staged
    from vcache_backend.offload.tier import OffloadTier

log = logging.getLogger("vllm.vcache")

NOTICEABLE = 0.1
"""A bandwidth that changed by a smaller share is not worth a word."""
CAUSES = {"absent": "store_absent", "bad": "store_bad", "timeout": "store_late"}
"""Of a load that fails, by why a fetch ended early; `store` is the rest."""


class Below:
    """What the store has of a prompt, for the scheduler. Its one thread; nothing waits longer than `offload.lookup_seconds`.

    A store that cannot be had, or that one of the workers cannot read now, has nothing.
    """

    def __init__(self, config: OffloadConfig, ranks: int, on_gpu: bool) -> None:
        """ranks: shards of a chunk. on_gpu: where the KV caches are."""
        self._tier: OffloadTier | None = None
        self._ranks = ranks
        self._links: dict[int, Link] = {}
        if config.policy != "off":
            # Needs libraries of its own.
            from vcache_backend.offload.tier import open_tier

            self._tier = open_tier(config, EngineStats(), on_gpu)

    @property
    def usable(self) -> bool:
        tier = self._tier
        return tier is not None and tier.usable and all(link.usable for link in self._links.values())

    @property
    def bandwidth(self) -> float | None:
        """Bytes of KV a second that loads brought lately."""
        return self._tier.bandwidth if self._tier is not None else None

    def continued(self, client: Client, keys: Sequence[ChunkKey], found: int) -> int:
        """How many leading chunks can be loaded, given that the pool has the first `found` and not the next one."""
        if self._tier is None or found >= len(keys) or not self.usable:
            return found
        try:
            return self._tier.extend(client, keys, self._ranks, found)
        except VCacheError as error:
            log.debug("look-up below: %s", error)
            return found

    def hear(self, links: Mapping[int, Link]) -> None:
        """How workers reach the store now, by their numbers."""
        self._links |= links
        rates = [link.bandwidth for link in self._links.values() if link.bandwidth is not None]
        if self._tier is not None and rates:
            # All of them load at once, each its shard; a chunk is there when the slowest has it.
            self._tier.bandwidth = min(rates) * self._ranks

    def close(self) -> None:
        """Idempotent."""
        if self._tier is not None:
            self._tier.close()
        self._tier = None


def link(io: ChunkIO, last: Link) -> Link:
    """How this worker reaches the store. The `last` one, if there is no noticeable change."""
    if io.tier is None:
        return last
    usable, rate = io.tier.usable, io.tier.bandwidth
    known = last.bandwidth
    same = rate == known or (rate is not None and known is not None and abs(rate - known) < NOTICEABLE * known)
    return last if same and usable == last.usable else Link(usable, rate)


class Reading:
    """What one load reads from the store: the chunks that the pool has not, run by run, each on its way before it is needed.

    In the worker's main thread. Nothing waits but `wait`. allowed: may anything more come? cause: why not, or why less than was
    asked for.
    """

    def __init__(self, io: ChunkIO, keys: list[ChunkKey], allowed: bool) -> None:
        """allowed: whether anything may be there."""
        self._io, self._keys, self.allowed = io, keys, allowed
        self._fetch: Fetch | None = None
        self._last: Fetch | None = None
        self._next = self._stop = 0
        self.cause = ""
        self.epochs: set[int] = set()
        """Those that the chunks were stored in which came from here."""

    @property
    def under_way(self) -> bool:
        return self._fetch is not None

    def begin(self, start: int) -> bool:
        """Have the run of chunks from number `start` on read, unless the pool has that one. Is something on its way?"""
        if not self.allowed or start >= len(self._keys) or self._fetch is not None:
            return False
        try:
            fetch, cause = self._io.fetch(self._keys[start:]), "store"
        except VCacheError as error:
            self._io.miss("fetch", error)
            fetch, cause = None, "server"
        if fetch is None:
            self.allowed, self.cause = False, cause
            return False
        self._fetch = self._last = fetch
        self._next, self._stop = start, start + len(fetch.keys)
        return True

    def is_next(self, chunk: int) -> bool:
        """Is this chunk to come from here? After a run that ended early nothing more is read: what failed once may fail again."""
        fetch = self._fetch
        if fetch is None or self._next != chunk:
            return False
        if not fetch.over:
            return True
        if self._next < self._stop:
            self.allowed, self.cause = False, CAUSES.get(fetch.cause, "store")
        self.cancel()
        return False

    def ready(self) -> list[Staged]:
        """The next chunks that are here, as many as one copy takes. To be given back once that is complete."""
        chunks = self._fetch.ready(self._io.most_staged) if self._fetch is not None else []
        self._next += len(chunks)
        self.epochs |= {chunk.epoch for chunk in chunks}
        return chunks

    def give_back(self, chunks: Sequence[Staged]) -> None:
        """Nothing reads them any more."""
        if self._last is not None:
            self._last.give_back(chunks)

    def wait(self, seconds: float) -> bool:
        """Wait, at most so long, for the next chunk; False, at once, if none is on its way."""
        if self._fetch is None:
            return False
        self._fetch.wait(seconds)
        return True

    def cancel(self) -> None:
        """Nothing more is wanted of what is on its way. Idempotent."""
        if self._fetch is not None:
            self._fetch.cancel()
        self._fetch = None


def forget(io: ChunkIO, keys: Sequence[ChunkKey]) -> None:
    """Remove chunks from the store, soon."""
    if io.tier is not None:
        io.tier.forget(keys)
