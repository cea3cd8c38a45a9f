"""Finds a request's chunks in the pool, other instances and the offload tier. Runs in the
scheduler's thread.

`send` asks the server when a request arrives, while the scheduler does other work. `find` reads the
answer, or asks again if the answer is missing or too old."""

from __future__ import annotations

import logging
from time import monotonic
from typing import Any

from vcache_backend.errors import ServerTimeout, ServerUnavailable, VCacheError
from vcache_backend.protocol.client import Client
from vcache_backend.protocol.messages import (
    QUEUED_SECONDS,
    ChunkKey,
    Find,
    Found,
    InstanceId,
    ResidentRun,
    of_ranks,
)
from vcache_backend.transfer.keys import adapter_digest, state_keys

from ..telemetry.stats import Meter
from .adapters import Adapters
from .introduction import Introduction
from .tracked import FAILED, LATE, Answer, AnswerState, Question, Tracked

log = logging.getLogger("vllm.vcache")

LATE_SECONDS = 0.001
"""How long vLLM's scheduler waits for an answer in one step. A later answer is read in a later
step."""
AHEAD_SECONDS = 0.05
"""How long an answer may be read after the question was sent, unless vLLM has asked for it since.
An answer lacks chunks that were stored later."""


class Lookups:
    """Looks chunks up. Runs in the scheduler's thread.

    `send` and `find` wait up to `LATE_SECONDS` to send the question, and `find` as long again for
    the answer; twice, if the first answer names the promise of a queued request. `find` waits for
    whole server calls if the keys or the answer exceed one message, if the model keeps states, if
    vLLM read the answer too late, and to open another instance's table for the first time; and for
    one look-up in the offload tier."""

    def __init__(
        self, instance: Introduction, chunk_size: int, meter: Meter, parts: int = 0
    ) -> None:
        """parts: how many chunks a state occupies; 0 if the model keeps no states."""
        self._instance, self._size, self._meter, self._parts = instance, chunk_size, meter, parts
        self._adapters = Adapters()
        self._late = False
        """Whether the last answer that vLLM asked for was late."""
        self.epoch = 0
        """The namespace's epoch in the server's last answer."""

    def knows(self, lora_request: Any) -> bool:
        """Whether the adapter's requests may be cached: its files are identified."""
        return bool(self._adapters.content(lora_request))

    def forget(self, tracked: Tracked) -> None:
        """Drop the request's question and answer."""
        tracked.lookup.question = tracked.lookup.answer = None
        tracked.lookup.since = 0.0

    def rename(self, tracked: Tracked) -> None:
        """Drop the request's keys, too, since the version of the weights is in every key."""
        self.forget(tracked)
        tracked.lookup.keys = []

    def name(self, tracked: Tracked, whole: int) -> bool:
        """Compute the keys of the request's first `whole` chunks. False if the adapter cannot be
        identified."""
        request, adapter, made = tracked.request, b"", len(tracked.lookup.keys)
        if request.lora_request is not None:
            content = self._adapters.content(request.lora_request)
            if not content:
                return False
            adapter = adapter_digest(request.lora_request, content)
        if made < whole and self._instance.keys is not None:
            tracked.lookup.keys += self._instance.keys.keys(
                request.block_hashes, made, whole, self._instance.version, adapter
            )
        return True

    def send(self, tracked: Tracked, first: int, stop: int) -> None:
        """Ask the server for the chunks [first, stop) and return. `name` must have made the keys;
        `find` reads the answer."""
        client = self._instance.client
        if client is not None and tracked.lookup.question is None:
            try:
                self._send(client, tracked, first, stop, begins=False)
            except VCacheError as error:
                log.debug("look-up: %s", error)

    def find(self, tracked: Tracked, first: int, whole: int) -> Answer:
        """Look up the chunks [first, whole). `name` must have made the keys. After a `LATE` answer
        call again in the next step. `FAILED` if the server does not answer within the deadline of a
        call."""
        lookup, client, now = tracked.lookup, self._instance.client, monotonic()
        if lookup.question is not None and not lookup.since:
            # A late answer may be older: vLLM has asked for it.
            lookup.question = lookup.question if now < lookup.question.at + AHEAD_SECONDS else None
        answer = FAILED
        if client is not None:
            over = bool(lookup.since) and now > lookup.since + client.request_seconds
            try:
                answer = self._answer(client, tracked, first, whole, over)
            except VCacheError as error:
                answer = self._failed(error, late=bool(lookup.since))
        self._late = answer.state is AnswerState.LATE
        if self._late:
            lookup.since = lookup.since or now
            return answer
        lookup.since = 0.0
        if not answer.counted:
            self._count(client, tracked, answer, first, whole)
        return answer

    # ---- inside

    def _count(
        self, client: Client | None, tracked: Tracked, answer: Answer, first: int, whole: int
    ) -> None:
        """Count one look-up, and each token once, though vLLM asks again while the request waits
        for blocks."""
        answer.counted = True
        lookup, hits = tracked.lookup, max(min(answer.hits, whole) - first, 0)
        asked = max(whole - first - lookup.asked, 0) * self._size
        found = max(hits - lookup.found, 0) * self._size
        lookup.asked = max(lookup.asked, whole - first)
        lookup.found = max(lookup.found, hits)
        self._meter.looked_up(asked, found, answer.seconds)
        if client is not None:
            client.count(asked, found)

    def _answer(
        self, client: Client, tracked: Tracked, first: int, whole: int, over: bool
    ) -> Answer:
        """Return the last answer if it counts, otherwise the server's answer to the present
        question, sent now if necessary; `LATE` if late. over: stop waiting. VCacheError."""
        lookup, now = tracked.lookup, monotonic()
        while True:
            question = lookup.question
            if question is None:
                answer, promised = lookup.answer, tracked.promise.made
                if answer is not None and answer.counts(first, promised):
                    return answer
                lookup.answer = None
                try:
                    question = self._send(client, tracked, first, whole, begins=True)
                except ServerTimeout:
                    if over:
                        raise
                    return LATE
                if question is None:
                    return self._ask(client, tracked, first, whole)
                over = False
            # After a late answer the next answers are probably late, too.
            if not question.sent.arrives(0.0 if self._late else _patience(client)) and not over:
                return LATE
            lookup.question = None
            started = monotonic() - question.seconds
            try:
                reply = question.sent.answer(_patience(client) if over else 0.0)
            except ServerUnavailable:
                if over or lookup.since or question.at >= now:
                    raise
                # The question was sent ahead, on a connection that is lost.
                continue
            if reply.cut:
                return self._ask(client, tracked, first, whole)
            asked = question.first, question.stop, reply, question.at, started
            coming = reply.coming
            if coming is not None and not (coming.begun or question.begins):
                quiet = coming.quiet + monotonic() - question.at
                if tracked.promise.early and quiet > QUEUED_SECONDS:
                    # The other request is still queued, and this one begins.
                    continue
            answer = self._answered(client, tracked, *asked)
            if answer.counts(first):
                return answer
            if answer.covers(first):
                # vLLM has not come back for this answer in time, and might come back late again:
                # wait now.
                return self._ask(client, tracked, first, whole)

    def _send(
        self, client: Client, tracked: Tracked, first: int, stop: int, begins: bool
    ) -> Question | None:
        """Send a question. None if it does not fit into one message. VCacheError."""
        at = monotonic()
        sent = client.send_find(self._request(tracked, first, stop, begins), _patience(client))
        if sent is None:
            return None
        tracked.promise.made |= tracked.promise.early
        question = Question(sent, first, stop, at, monotonic() - at, begins)
        tracked.lookup.question = question
        tracked.lookup.since = 0.0
        return question

    def _ask(self, client: Client, tracked: Tracked, first: int, whole: int) -> Answer:
        """Ask the server, and wait for the answer. VCacheError."""
        at = monotonic()
        reply = client.find(self._request(tracked, first, whole, begins=True))
        return self._answered(client, tracked, first, whole, reply, at, at)

    def _failed(self, error: VCacheError, late: bool = False) -> Answer:
        """late: an earlier step has waited for the answer in vain."""
        log.debug("look-up: %s", error)
        self._meter.count("failures", 1, "late" if late else error.cause)
        return FAILED

    def _request(self, tracked: Tracked, first: int, stop: int, begins: bool) -> Find:
        own, keys = self._instance.publications, tracked.lookup.keys[first:stop]
        promise = tracked.promise.number if tracked.promise.early else 0
        name = own.instance if own is not None else InstanceId(b"")
        return Find(keys, self._instance.ranks, name, own is None, promise, begins)

    def _answered(
        self,
        client: Client,
        tracked: Tracked,
        first: int,
        stop: int,
        reply: Found,
        at: float,
        started: float,
    ) -> Answer:
        """Make and keep the `Answer` for chunks [first, stop) from the server's reply and the
        offload tier's hits."""
        instance = self._instance
        self.epoch = reply.epoch
        residents: list[ResidentRun] = []
        publications, tables, keys = instance.publications, instance.tables, tracked.lookup.keys
        keys = keys[first:stop]
        answered = chunks = len(reply.pooled)
        if publications is not None and tables is not None:
            chunks, residents = tables.unchanged(reply, publications.each, first)
        # Nothing can be loaded behind a chunk that has just been lost.
        coming = reply.coming if chunks == answered else None
        comes_to = first + answered + coming.chunks if coming is not None else 0
        if tracked.promise.early:
            tracked.promise.made = answered < len(keys) and reply.coming is None
        if self._parts and chunks:
            chunks = self._with_state(client, keys[:chunks])
        hits = chunks
        if not self._parts and instance.offload is not None:
            hits = instance.offload.extend(client, keys, chunks)
        seconds = monotonic() - started
        answer = Answer(first, first + hits, first + chunks, at, seconds, residents)
        answer.coming = coming
        answer.comes_to = comes_to
        tracked.lookup.answer = answer
        return answer

    def _with_state(self, client: Client, keys: list[ChunkKey]) -> int:
        """Shorten a hit to end at a chunk with a state, stored by all ranks. Returns the number of
        chunks left."""
        ranks = self._instance.ranks
        try:
            stored = client.contains(of_ranks(state_keys(keys, self._parts), ranks))
        except VCacheError as error:
            self._failed(error)
            return 0
        each = self._parts * ranks
        return next(
            (end // each for end in range(len(stored), 0, -each) if all(stored[end - each : end])),
            0,
        )


def _patience(client: Client) -> float:
    return min(LATE_SECONDS, client.request_seconds)
