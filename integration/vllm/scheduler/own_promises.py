"""Promises chunks that this instance's requests compute: other instances may wait for them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from math import inf
from queue import SimpleQueue
from time import sleep
from typing import NamedTuple

from vcache_backend import threads
from vcache_backend.config import Config
from vcache_backend.errors import VCacheError
from vcache_backend.metadata_server.messages import ChunkKey, InstanceId, Promise

from ...doubts import UntrustedBlocks
from .introduction import Introduction
from .lookups import Lookups
from .pace import LONGEST_SECONDS, Pace
from .tracked import NEVER, Tracked

log = logging.getLogger("vllm.vcache")

LATER_SECONDS = 0.02
"""How long a promise waits, so that the sending thread does not take the interpreter from the step
being planned."""


class _Unsent(NamedTuple):
    """A `messages.Promise` to be sent, for the chunks [first, stop) of a request's keys."""

    number: int
    keys: Sequence[ChunkKey] = ()
    first: int = 0
    stop: int = 0
    epoch: int = 0
    begun: bool = True


class OwnPromises:
    """Runs in the scheduler's thread, and never waits. A thread sends the promises after
    `LATER_SECONDS`: waking this thread costs less than a call of `Outbox`."""

    def __init__(
        self,
        config: Config,
        instance: Introduction,
        lookups: Lookups,
        pace: Pace,
        untrusted: UntrustedBlocks,
        hashes: int,
        step_tokens: int,
    ) -> None:
        """hashes: vLLM's block hashes of a chunk. step_tokens: the most tokens of a step."""
        self._instance, self._lookups, self._pace = instance, lookups, pace
        self._untrusted = untrusted
        self._size, self._hashes = config.engine.chunk_size, hashes
        self._prompts_only = config.connector.store == "prompt"
        self._step_chunks = step_tokens / self._size
        self._unsent: SimpleQueue[_Unsent | None] = SimpleQueue()
        threads.start(self._send, "vcache-promises")

    def begun(self, tracked: Tracked, computed: int) -> None:
        """Promise the request's chunks from token `computed` on: its first step with its present
        blocks is planned. Does nothing if less than a chunk is left, for example after a hit."""
        if chunks := self._confirm(tracked, computed, begun=True):
            self._pace.begun(tracked, chunks)

    def loads(self, tracked: Tracked) -> None:
        """Confirm the promise of the chunks behind a load that begins: no other request takes it
        over meanwhile. Does nothing for a load from the offload tier, which may take long."""
        answer = tracked.lookup.answer
        if tracked.promise.made and answer is not None and not answer.offloaded:
            self._confirm(tracked, tracked.supplied, begun=False)

    def ended(self, tracked: Tracked) -> None:
        """Withdraw the promise of a request that ended or lost its blocks, unless it was kept."""
        self._pace.ended(tracked)
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
        self._unsent.put(_Unsent(promise.number, keys, first, stop, epoch, begun))
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
        chunk = self._pace.chunk_seconds
        # Other requests may fill the step.
        step = min(chunk * self._step_chunks, LONGEST_SECONDS)
        terms = promise.epoch, chunk, step, promise.begun
        answer = client.promise(Promise(promise.number, keys, self._instance.ranks, name, *terms))
        if keys:
            self._lookups.epoch = answer.epoch
