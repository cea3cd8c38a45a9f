"""What one load has brought so far, by where it lay, and the time that took."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence

from vcache_backend.transfer.chunk_io import ChunkIO
from vcache_backend.vram_pool.slots import SlotView

from .stats import Meter

log = logging.getLogger("vllm.vcache")


class LoadStats:
    """In the worker's main thread. metadata_seconds: asking the server. data_seconds: copying, and waiting for the offload tier."""

    def __init__(self, io: ChunkIO, meter: Meter, request_id: str, chunks: int) -> None:
        """chunks: of the whole load."""
        self._io, self._meter = io, meter
        self._request_id, self._chunks = request_id, chunks
        self._tokens: Counter[str] = Counter()
        self.metadata_seconds = self.data_seconds = 0.0

    def pooled(self, first: int, views: Sequence[SlotView], tokens: int, seconds: float) -> None:
        """Chunks of the pool, from the load's chunk `first` on, are in place, `tokens` of them wanted. seconds: of their copy."""
        device, own = self._io.device, sum(view.local for view in views)
        here = "host" if device.ordinal is None else "own"
        # Of the first and the last chunk only a part may be wanted; in all it is every token.
        of_own = tokens * own // len(views)
        self._tokens += Counter({here: of_own, "peer": tokens - of_own})
        if log.isEnabledFor(logging.DEBUG):
            which = self._which(first, len(views))
            asking, copy = 1e3 * self.metadata_seconds, 1e3 * seconds
            said = "%s from the pool, %d of them on %s, asking the server %.2f ms, copy %.2f ms, the lease held"
            log.debug(said, which, own, device, asking, copy)

    def fetched(self, first: int, count: int, tokens: int, waited: float, seconds: float) -> None:
        """The same of chunks from the offload tier. waited: seconds since the load had nothing else to do."""
        self.data_seconds += waited
        self._tokens["store"] += tokens
        if log.isEnabledFor(logging.DEBUG):
            which = self._which(first, count)
            log.debug("%s from the offload tier, %.2f ms, of that copy %.2f ms", which, 1e3 * waited, 1e3 * seconds)

    def tell(self, token_bytes: int) -> None:
        """Tell the meter, once the load is over."""
        tokens = {tier: count for tier, count in self._tokens.items() if count}
        nbytes = {tier: count * token_bytes for tier, count in tokens.items()}
        self._meter.loaded(tokens, nbytes, self.metadata_seconds, self.data_seconds)

    @property
    def empty(self) -> bool:
        return not self._tokens.total()

    def _which(self, first: int, count: int) -> str:
        return f"hit {self._request_id}: chunks {first} to {first + count} of {self._chunks}"
