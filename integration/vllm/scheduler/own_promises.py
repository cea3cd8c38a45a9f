"""Promises chunks that this instance's requests compute: other instances may wait for them."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from math import inf
from queue import SimpleQueue
from time import monotonic, sleep
from typing import NamedTuple

from vcache_backend import threads
from vcache_backend.config import Config
from vcache_backend.errors import VCacheError
from vcache_backend.protocol.messages import ChunkKey, InstanceId, Promise

from ...doubts import UntrustedBlocks
from .introduction import Introduction
from .lookups import Lookups
from .tracked import NEVER, Tracked

log = logging.getLogger("vllm.vcache")

LATER_SECONDS = 0.02
"""How long a promise waits, so that the sending thread does not take the interpreter from the step
being planned."""
LEAST_MEASURED, RECENT = 4, 8
"""The fewest chunks of a prompt that is measured, and how many prompts the rate is the mean of."""
LONGEST_SECONDS = 60.0
"""The longest time for a prompt: only a stopped process takes longer."""


class PrefillRate:
    """How fast this instance has computed its last prompts, each from its first step to its first
    token, with other requests in the same steps. Measures one request at a time. Runs in the
    scheduler's thread.

    measured: the request that is being measured."""

    def __init__(self) -> None:
        self.measured: Tracked | None = None
        self._chunks, self._tokens, self._since = 0, 0, 0.0
        self._recent = deque[tuple[int, float]](maxlen=RECENT)
        """Chunks, and seconds, of the last prompts."""

    @property
    def chunk_seconds(self) -> float:
        """The mean time for a chunk; 0.0 before the first measurement."""
        chunks = sum(chunks for chunks, _ in self._recent)
        return sum(seconds for _, seconds in self._recent) / chunks if chunks else 0.0

    def begin(self, tracked: Tracked, chunks: int) -> None:
        """Note that the first step of a request is planned, which computes so many chunks."""
        if self.measured is None and chunks >= LEAST_MEASURED:
            self.measured, self._since = tracked, monotonic()
            self._chunks, self._tokens = chunks, tracked.request.num_output_tokens

    def look(self) -> None:
        """Finish the measurement if the request has a further token. Call it once a step."""
        measured = self.measured
        if measured is not None and measured.request.num_output_tokens > self._tokens:
            self._recent.append((self._chunks, min(monotonic() - self._since, LONGEST_SECONDS)))
            self.measured = None

    def end(self, tracked: Tracked) -> None:
        """Note that a request has ended or lost its blocks."""
        if tracked is self.measured:
            self.look()
            self.measured = None


class _Unsent(NamedTuple):
    """A `messages.Promise` to be sent, for the chunks [first, stop) of a request's keys."""

    number: int
    keys: Sequence[ChunkKey] = ()
    first: int = 0
    stop: int = 0
    epoch: int = 0
    chunk_seconds: float = 0.0
    begun: bool = True


class OwnPromises:
    """Runs in the scheduler's thread, and never waits. A thread sends the promises after
    `LATER_SECONDS`: waking this thread costs less than a call of `Outbox`."""

    def __init__(
        self,
        config: Config,
        instance: Introduction,
        lookups: Lookups,
        untrusted: UntrustedBlocks,
        hashes: int,
    ) -> None:
        """hashes: vLLM's block hashes of a chunk."""
        self.rate = PrefillRate()
        self._instance, self._lookups, self._untrusted = instance, lookups, untrusted
        self._size, self._hashes = config.engine.chunk_size, hashes
        self._prompts_only = config.connector.store == "prompt"
        self._unsent: SimpleQueue[_Unsent | None] = SimpleQueue()
        threads.start(self._send, "vcache-promises")

    def begun(self, tracked: Tracked, computed: int) -> None:
        """Promise the request's chunks from token `computed` on: its first step with its present
        blocks is planned. Does nothing if less than a chunk is left, for example after a hit."""
        if chunks := self._confirm(tracked, computed, begun=True):
            self.rate.begin(tracked, chunks)

    def on_load(self, tracked: Tracked) -> None:
        """Confirm the promise of the chunks behind a load that begins: no other request takes it
        over meanwhile. Does nothing for a load from the offload tier, which may take long."""
        answer = tracked.lookup.answer
        if tracked.promise.made and answer is not None and not answer.offloaded:
            self._confirm(tracked, tracked.supplied, begun=False)

    def ended(self, tracked: Tracked) -> None:
        """Withdraw the promise of a request that ended or lost its blocks, unless it was kept."""
        self.rate.end(tracked)
        promise = tracked.promise
        if promise.made and (not promise.stop or tracked.store.stored < promise.stop):
            self._unsent.put(_Unsent(promise.number))
        promise.made = False

    def close(self) -> None:
        """End the thread. Idempotent."""
        self._unsent.put(None)

    def _confirm(self, tracked: Tracked, computed: int, begun: bool) -> int:
        """Promise the request's chunks from token `computed` on, in place of its earlier promise.
        Returns the number of chunks."""
        first, promise = computed // self._size, tracked.promise
        stop = self._whole(tracked) if promise.number else 0
        if stop * self._size < computed + self._size and not promise.made:
            return 0
        if not self._lookups.name(tracked, stop):
            stop = 0
        own, keys = self._instance.publications, tracked.lookup.keys
        epoch = own.epoch if own is not None else self._lookups.epoch
        terms = epoch, self.rate.chunk_seconds, begun
        self._unsent.put(_Unsent(promise.number, keys, first, stop, *terms))
        promise.made = stop > first
        promise.stop = stop
        return max(0, stop - first)

    def _whole(self, tracked: Tracked) -> int:
        """The number of chunks that are stored once the request's present tokens are computed."""
        request = tracked.request
        if (
            tracked.store.complete_at == inf
            or tracked.resident.filled == NEVER
            or self._untrusted.untrusted_until(tracked.store.rows) == inf
        ):
            return 0
        limit = request.num_prompt_tokens if self._prompts_only else request.num_tokens
        whole: int = min(limit // self._size, len(request.block_hashes) // self._hashes)
        return whole

    def _send(self) -> bool:
        """A turn of the thread. Returns whether it is to end."""
        promise = self._unsent.get()
        if promise is None:
            return True
        if self._unsent.empty():
            sleep(LATER_SECONDS)
        try:
            self._tell(promise)
        except VCacheError as error:
            log.debug("promise: %s", error)
        return False

    def _tell(self, promise: _Unsent) -> None:
        client, own = self._instance.client, self._instance.publications
        if client is None or not client.connected:
            return
        keys = list(promise.keys[promise.first : promise.stop])
        name = own.instance if own is not None else InstanceId(b"")
        terms = promise.epoch, promise.chunk_seconds, promise.begun
        answer = client.promise(Promise(promise.number, keys, self._instance.ranks, name, *terms))
        if keys:
            self._lookups.epoch = answer.epoch
