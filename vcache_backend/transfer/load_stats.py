"""Counts the tokens that one load has brought, by place, and the time that it took."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from vcache_backend.vram_pool.devices import where
from vcache_backend.vram_pool.paged import PagedKV

if TYPE_CHECKING:
    from vcache_backend.transfer.session import Session

log = logging.getLogger(__name__)


class LoadStats:
    """Counts for one load, and adds to the session's counters. One thread.

    tokens: by place: see `devices.where`, and "resident" (another instance's KV cache), "store"
    (the offload tier). metadata_seconds: asking the server. data_seconds: copying, and waiting for
    the offload tier."""

    def __init__(self, session: Session, kv: PagedKV, name: str, chunks: int) -> None:
        """name: the request, for the log. chunks: how many the whole load has."""
        self._session, self._name, self.chunks = session, name, chunks
        self.token_bytes = kv.chunk_bytes(session.chunk_size) // session.chunk_size
        self.tokens: Counter[str] = Counter()
        self.metadata_seconds = self.data_seconds = 0.0

    def pooled(self, first: int, own: int, count: int, tokens: int, seconds: float) -> None:
        """Count `count` loaded chunks of the pool, from number `first` on, and their `tokens`
        wanted tokens.

        own: how many chunks lay on the reader's own device. seconds: the duration of the copy."""
        device = self._session.device
        # Split tokens in proportion to chunks, since of the first and last chunk only a part may be
        # wanted. The sum is exact.
        of_own, each = tokens * own // count, tokens * self.token_bytes // count
        for owner, brought in ((device.name, of_own), ("", tokens - of_own)):
            if brought:
                self.tokens[where(device, owner)] += brought
        self.data_seconds += seconds
        stats = self._session.stats
        stats.add_time("retrieve_copy", seconds)
        stats.count(
            chunks_retrieved=count,
            tokens_retrieved=tokens,
            bytes_own=own * each,
            bytes_peer=(count - own) * each,
        )
        if log.isEnabledFor(logging.DEBUG):
            said = (
                "%s from the pool, %d of them on %s, asking the server %.2f ms, copy %.2f "
                "ms, the lease held"
            )
            log.debug(
                said,
                self._which(first, count),
                own,
                device,
                1e3 * self.metadata_seconds,
                1e3 * seconds,
            )

    def resident(self, first: int, owner: bytes, count: int, tokens: int, seconds: float) -> None:
        """Like `pooled`, for chunks read in the KV cache of instance `owner`."""
        self.data_seconds += seconds
        self.tokens["resident"] += tokens
        stats, nbytes = self._session.stats, tokens * self.token_bytes
        stats.add_time("retrieve_copy", seconds)
        stats.count(chunks_resident=count, tokens_retrieved=tokens, bytes_resident=nbytes)
        stats.read_from(owner, nbytes)
        if log.isEnabledFor(logging.DEBUG):
            said = "%s from the KV cache of instance %s, copy %.2f ms, the generations held"
            log.debug(said, self._which(first, count), owner.hex(), 1e3 * seconds)

    def refused(self, first: int, owner: bytes, count: int) -> None:
        """Count `count` chunks, from number `first` on, whose blocks `owner` reused before the copy
        was over.
        """
        self._session.stats.count(chunks_refused=count)
        self._session.stats.read_from(owner, 0, count)
        log.debug(
            "%s changed in instance %s while they were read", self._which(first, count), owner.hex()
        )

    def offloaded(
        self, first: int, keys: Sequence[bytes], tokens: int, waited: float, seconds: float
    ) -> None:
        """Like `pooled`, for chunks of the offload tier. waited: seconds since the load had no
        other work.
        """
        self.data_seconds += waited
        self.tokens["store"] += tokens
        stats = self._session.stats
        stats.add_time("retrieve_copy", seconds)
        stats.count(
            chunks_offload=len(keys),
            tokens_retrieved=tokens,
            bytes_offload=tokens * self.token_bytes,
        )
        if log.isEnabledFor(logging.DEBUG):
            which = self._which(first, len(keys))
            log.debug(
                "%s from the offload tier, %.2f ms, of that copy %.2f ms",
                which,
                1e3 * waited,
                1e3 * seconds,
            )

    def _which(self, first: int, count: int) -> str:
        return f"hit {self._name}: chunks {first} to {first + count} of {self.chunks}"
