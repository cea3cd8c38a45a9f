"""OwnPromises the chunks that this instance's requests compute, so that others wait for them, and
measures how long a chunk takes."""

from __future__ import annotations

from math import inf
from time import monotonic

from vcache_backend.config import Config
from vcache_backend.metadata_server.messages import ChunkKey

from .introduction import Introduction
from .lookups import Lookups
from .tracked import NEVER, Tracked

LEAST_MEASURED = 4
"""The fewest chunks of a request whose prefill is measured."""
WEIGHT = 0.3
"""The weight of the newest measurement."""


class Pace:
    """How long this instance takes for a chunk, from a request's first step to its first token.
    Other requests of the same steps are included: they would slow the next prefill down, too.

    chunk_seconds: 0.0 before the first measurement."""

    def __init__(self) -> None:
        self.chunk_seconds = 0.0
        self._measured: Tracked | None = None
        self._chunks, self._since = 0, 0.0

    def begun(self, tracked: Tracked, chunks: int) -> None:
        """Note that a request's first step computes the first of `chunks` chunks. One request at a
        time is measured."""
        if self._measured is None and chunks >= LEAST_MEASURED:
            self._measured, self._chunks, self._since = tracked, chunks, monotonic()

    def look(self) -> None:
        """Finish the measurement if its request has its first token. Called in every step."""
        measured = self._measured
        if measured is not None and measured.request.num_output_tokens > 0:
            new = (monotonic() - self._since) / self._chunks
            old = self.chunk_seconds or new
            self.chunk_seconds, self._measured = old + WEIGHT * (new - old), None

    def ended(self, tracked: Tracked) -> None:
        """Note that a request has ended or lost its blocks."""
        if tracked is self._measured:
            self.look()
            self._measured = None


class OwnPromises:
    """Runs in the scheduler's thread, and never waits."""

    def __init__(
        self,
        config: Config,
        instance: Introduction,
        lookups: Lookups,
        pace: Pace,
        hashes: int,
        step_tokens: int,
    ) -> None:
        """hashes: vLLM's block hashes of a chunk. step_tokens: the most tokens of a step."""
        self._instance, self._lookups, self._pace = instance, lookups, pace
        self._size, self._hashes = config.engine.chunk_size, hashes
        self._prompts_only = config.connector.store == "prompt"
        self._step_chunks = step_tokens / self._size

    def begun(self, tracked: Tracked, computed: int) -> None:
        """Promise the request's chunks from token `computed` on: its first step with its present
        blocks is planned."""
        first, outbox, promise = computed // self._size, self._instance.outbox, tracked.promise
        stop = self._whole(tracked) if promise.number else 0
        if outbox is None or (first >= stop and not promise.made):
            return
        keys = list[ChunkKey]()
        if first < stop and self._lookups.name(tracked, stop):
            keys = tracked.lookup.keys[first:stop]
        chunk, chunks = self._pace.chunk_seconds, len(keys)
        step = chunk * min(self._step_chunks, chunks)
        outbox.promise(promise.number, keys, self._instance.ranks, chunk, step)
        promise.made, promise.stop = bool(keys), stop
        self._pace.begun(tracked, chunks)

    def ended(self, tracked: Tracked) -> None:
        """Withdraw what the request has promised and will not compute: it ended or lost its
        blocks."""
        self._pace.ended(tracked)
        made, outbox = tracked.promise.made, self._instance.outbox
        if made and outbox is not None and tracked.store.stored < tracked.promise.stop:
            outbox.promise(tracked.promise.number, [], self._instance.ranks, 0.0, 0.0)
        tracked.promise.made = False

    def _whole(self, tracked: Tracked) -> int:
        """How many chunks the request has that are stored once its present tokens are computed."""
        request = tracked.request
        if (
            tracked.store.complete_at == inf
            or tracked.resident.filled == NEVER
            or tracked.leftover.outdated
        ):
            return 0
        limit = request.num_prompt_tokens if self._prompts_only else request.num_tokens
        return min(limit // self._size, len(request.block_hashes) // self._hashes)
