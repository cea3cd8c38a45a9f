"""Promises chunks that this instance computes: other instances may wait for them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from functools import partial
from math import inf
from time import monotonic
from typing import Any

from vcache_backend.protocol.client import Client
from vcache_backend.protocol.messages import InstanceId, Promise, chunk_keys
from vcache_backend.transfer.outbox import LATER_SECONDS, at_once

from .instance import InstanceContext
from .lookups import Lookups
from .requests import Tracked

LEAST_MEASURED, RECENT = 4, 8
"""The fewest chunks of a prompt that is measured, and how many prompts the rate is the mean of."""


class PrefillRate:
    """How fast this instance has computed its last prompts, each from its first step to its first
    token, with other requests in the same steps. Measures one request at a time. Runs in the
    scheduler's thread."""

    def __init__(self) -> None:
        self.measured: Tracked | None = None
        """The request that is being measured."""
        self.chunk_seconds = 0.0
        """The mean time for a chunk; 0.0 before the first measurement."""
        self._chunks, self._tokens, self._since = 0, 0, 0.0
        self._recent = deque[tuple[int, float]](maxlen=RECENT)
        """Chunks, and seconds, of the last prompts."""

    def begin(self, tracked: Tracked, chunks: int) -> None:
        """Note that the first step of a request is planned, which computes so many chunks."""
        if self.measured is None and chunks >= LEAST_MEASURED:
            self.measured, self._since = tracked, monotonic()
            self._chunks, self._tokens = chunks, tracked.request.num_output_tokens

    def look(self) -> None:
        """Finish the measurement if the request has a further token. Call it once a step."""
        measured = self.measured
        if measured is not None and measured.request.num_output_tokens > self._tokens:
            # Only a stopped process takes longer than a minute.
            self._recent.append((self._chunks, min(monotonic() - self._since, 60.0)))
            chunks, seconds = map(sum, zip(*self._recent, strict=True))
            self.measured, self.chunk_seconds = None, seconds / chunks

    def end(self, tracked: Tracked) -> None:
        """Note that a request has ended or lost its blocks."""
        if tracked is self.measured:
            self.look()
            self.measured = None


class PromiseSender:
    """Runs in the scheduler's thread, and never waits: the outbox sends the promises a little
    later."""

    def __init__(self, context: InstanceContext, lookups: Lookups) -> None:
        self.rate = PrefillRate()
        self._context, self._lookups = context, lookups

    def on_start(self, tracked: Tracked, computed: int) -> None:
        """Promise the request's chunks from token `computed` on: its first step with its present
        blocks is planned. Does nothing if less than a chunk is left, for example after a hit."""
        if chunks := self._promise(tracked, computed, begun=True):
            self.rate.begin(tracked, chunks)

    def on_load(self, tracked: Tracked) -> None:
        """Confirm the promise of the chunks behind a load that begins: no other request takes it
        over meanwhile. Does nothing for a load from the offload tier, which may take long."""
        answer = tracked.lookup.answer
        if tracked.promise.made and answer is not None and not answer.offloaded:
            self._promise(tracked, tracked.supplied, begun=False)

    def withdraw(self, tracked: Tracked) -> None:
        """Withdraw the promise of a request that ended or lost its blocks, unless it was kept."""
        self.rate.end(tracked)
        promise, own = tracked.promise, self._context.publications
        # Of windows vLLM keeps few blocks, so the server does not see that the chunks have come.
        seen = own is None or own.attends_to_all
        kept = seen and 0 < promise.stop <= self._stored(tracked)
        if promise.made and not kept:
            self._send(promise.number)
        promise.made = False

    def withdraw_all(self, requests: Iterable[Tracked]) -> None:
        """Withdraw the promises of these requests, and of those that have ended: after a reset
        their last blocks, if they are not published yet, stay void."""
        for tracked in requests:
            self.rate.end(tracked)
            tracked.promise.made = False
        self._send(0)

    # ---- inside

    def _stored(self, tracked: Tracked) -> int:
        """How many leading chunks are stored, published, or being stored."""
        if self._context.copies:
            return tracked.store.stored
        return tracked.store.written // self._context.chunk_size * tracked.in_place.publishes

    def _promise(self, tracked: Tracked, computed: int, begun: bool) -> int:
        """Promise the request's chunks from token `computed` on, in place of its earlier promise.
        Returns the number of chunks."""
        context, promise, size = self._context, tracked.promise, self._context.chunk_size
        first, stop = computed // size, self._stored_in_the_end(tracked) if promise.number else 0
        if stop * size < computed + size and not promise.made:
            return 0
        count = max(0, stop - first) if self._lookups.name(tracked) else 0
        each, own = context.names, context.publications
        hashes = self._lookups.hashes(tracked, first * each, (first + count) * each, context.unit)
        name = own.instance if own is not None else InstanceId(b"")
        terms = context.news.epoch, self.rate.chunk_seconds, begun
        self._send(promise.number, hashes, name, *terms)
        promise.made, promise.stop = bool(count), stop
        return count

    def _stored_in_the_end(self, tracked: Tracked) -> int:
        """The number of chunks that are stored once the request's present tokens are computed."""
        request, context = tracked.request, self._context
        if tracked.store.complete_at == inf or not tracked.in_place.publishes:
            return 0
        limit = request.num_prompt_tokens if context.prompts_only else request.num_tokens
        return int(min(limit // context.chunk_size, len(request.block_hashes) // context.hashes))

    def _send(self, number: int, hashes: bytes = b"", *terms: Any) -> None:
        """Promise the chunks that `hashes` are of; none: withdraw. terms: see `Promise`."""
        client, outbox = self._context.client, self._context.outbox
        if client is not None and outbox is not None and client.connected:
            # Later: the thread would take the interpreter from the step being planned.
            outbox.after(
                at_once, partial(self._tell, client, number, hashes, *terms), LATER_SECONDS
            )

    def _tell(self, client: Client, number: int, hashes: bytes, *terms: Any) -> None:
        """Runs in the outbox's thread."""
        context = self._context
        keys = chunk_keys(context.prefix, hashes, context.names)
        client.promise(Promise(number, keys, context.ranks, *terms))
