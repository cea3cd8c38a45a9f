"""Finds a request's chunks in the pool, in other instances' KV caches and in the offload tier.

`send` asks the server when a request arrives, while the scheduler does other work. `find` reads the
answer, or asks again if the answer is missing or too old. See `waits` for what follows from it."""

from __future__ import annotations

import logging
from time import monotonic

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

from .adapters import Adapters
from .instance import InstanceContext
from .requests import FAILED, LATE, PROMISED_SECONDS, Answer, AnswerState, Question, Tracked
from .telemetry.stats import Meter

log = logging.getLogger("vllm.vcache")

LATE_SECONDS = 0.001
"""How long vLLM's scheduler waits for an answer in one step. A later answer is read in a later
step."""


class Lookups:
    """Looks chunks up. Runs in the scheduler's thread.

    `send` and `find` wait up to `LATE_SECONDS` to send the question, and `find` as long again for
    the answer; twice, if the first answer names the promise of a queued request. `find` waits for
    whole server calls if the keys or the answer exceed one message, if the model keeps states, if
    vLLM read the answer too late, and to open another instance's table for the first time; and for
    one look-up in the offload tier."""

    def __init__(self, context: InstanceContext, meter: Meter) -> None:
        self._context, self._meter = context, meter
        self._adapters = Adapters()
        self._late = False
        """Whether the last answer that vLLM asked for was late."""
        self.epoch = 0
        """The namespace's epoch in the server's last answer."""

    def identifies(self, adapter: object) -> bool:
        """Whether the requests of a LoRA adapter may be cached: its files are identified."""
        return bool(self._adapters.content(adapter))

    def forget(self, tracked: Tracked) -> None:
        """Drop the request's question and answer."""
        tracked.lookup.question = tracked.lookup.answer = tracked.lookup.late_since = None

    def rename(self, tracked: Tracked) -> None:
        """Drop the request's keys, too, since the version of the weights is in every key."""
        self.forget(tracked)
        tracked.lookup.keys = []

    def name(self, tracked: Tracked, chunks: int) -> bool:
        """Make the keys of the request's first `chunks` chunks. False if the adapter cannot be
        identified."""
        request, adapter, made = tracked.request, b"", len(tracked.lookup.keys)
        if request.lora_request is not None:
            content = self._adapters.content(request.lora_request)
            if not content:
                return False
            adapter = adapter_digest(request.lora_request, content)
        if made < chunks and self._context.keys is not None:
            tracked.lookup.keys += self._context.keys.keys(
                request.block_hashes, made, chunks, self._context.version, adapter
            )
        return True

    def send(self, tracked: Tracked, first: int, stop: int) -> None:
        """Ask the server for the chunks [first, stop) and return. `name` must have made the keys;
        `find` reads the answer."""
        client = self._context.client
        if client is not None and tracked.lookup.question is None:
            try:
                self._send(client, tracked, first, stop, begins=False)
            except VCacheError as error:
                log.debug("look-up: %s", error)

    def ask_again(self, tracked: Tracked, first: int, stop: int) -> bool:
        """Like `send`, in place of earlier answers. False if nobody can be asked."""
        self.forget(tracked)
        self.send(tracked, first, stop)
        return tracked.lookup.question is not None

    def find(self, tracked: Tracked, first: int, stop: int) -> Answer:
        """Look up the chunks [first, stop). `name` must have made the keys. After a `LATE` answer
        call again in the next step. `FAILED` if the server does not answer within the deadline of a
        call."""
        lookup, client, now = tracked.lookup, self._context.client, monotonic()
        late_since, question = lookup.late_since, lookup.question
        if question is not None and late_since is None and now > question.at + PROMISED_SECONDS:
            lookup.question = None
        answer = FAILED
        if client is not None:
            over = late_since is not None and now > late_since + client.request_seconds
            try:
                answer = self._answer(client, tracked, first, stop, over)
            except VCacheError as error:
                answer = self._failed(error, late=late_since is not None)
        self._late = answer.state is AnswerState.LATE
        if self._late:
            lookup.late_since = late_since or now
            return answer
        lookup.late_since = None
        if not answer.counted:
            self._count(tracked, answer, first, stop)
        return answer

    # ---- inside

    def _count(self, tracked: Tracked, answer: Answer, first: int, stop: int) -> None:
        """Count one look-up, and each token once, though vLLM asks again while the request waits
        for blocks."""
        answer.counted = True
        lookup, hits = tracked.lookup, max(min(answer.hits, stop) - first, 0)
        asked = max(stop - first - lookup.asked, 0) * self._context.chunk_size
        found = max(hits - lookup.found, 0) * self._context.chunk_size
        lookup.asked = max(lookup.asked, stop - first)
        lookup.found = max(lookup.found, hits)
        self._meter.looked_up(asked, found, answer.seconds)
        if self._context.client is not None:
            self._context.client.count(asked, found)

    def _answer(
        self, client: Client, tracked: Tracked, first: int, stop: int, over: bool
    ) -> Answer:
        """Return the last answer if it counts, otherwise the server's answer to the present
        question, sent now if necessary; `LATE` if late. over: stop waiting. VCacheError."""
        lookup, now = tracked.lookup, monotonic()
        while True:
            question = lookup.question
            if question is None:
                answer = lookup.answer
                if answer is not None and answer.counts(first, tracked.promise.made):
                    return answer
                lookup.answer = None
                try:
                    question = self._send(client, tracked, first, stop, begins=True)
                except ServerTimeout:
                    if over:
                        raise
                    return LATE
                if question is None:
                    return self._ask(client, tracked, first, stop)
                over = False
            # After a late answer the next answers are probably late, too.
            if not question.sent.arrives(0.0 if self._late else _patience(client)) and not over:
                return LATE
            lookup.question = None
            started = monotonic() - question.seconds
            try:
                reply = question.sent.answer(_patience(client) if over else 0.0)
            except ServerUnavailable:
                if over or lookup.late_since is not None or question.at >= now:
                    raise
                # The question was sent ahead, on a connection that is lost.
                continue
            if reply.cut:
                return self._ask(client, tracked, first, stop)
            if tracked.promise.early and _is_queued(question, reply):
                # The other request is still queued, and this one begins.
                continue
            at = question.at, started
            answer = self._answered(client, tracked, question.first, question.stop, reply, *at)
            if answer.counts(first):
                return answer
            if answer.covers(first):
                # vLLM has not come back for this answer in time, and might come back late again:
                # wait now.
                return self._ask(client, tracked, first, stop)

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
        tracked.lookup.question, tracked.lookup.late_since = question, None
        return question

    def _ask(self, client: Client, tracked: Tracked, first: int, stop: int) -> Answer:
        """Ask the server, and wait for the answer. VCacheError."""
        at = monotonic()
        reply = client.find(self._request(tracked, first, stop, begins=True))
        return self._answered(client, tracked, first, stop, reply, at, at)

    def _failed(self, error: VCacheError, late: bool = False) -> Answer:
        """late: an earlier step has waited for the answer in vain."""
        log.debug("look-up: %s", error)
        self._meter.count("failures", 1, "late" if late else error.cause)
        return FAILED

    def _request(self, tracked: Tracked, first: int, stop: int, begins: bool) -> Find:
        own, keys = self._context.publications, tracked.lookup.keys[first:stop]
        promise = tracked.promise.number if tracked.promise.early else 0
        name = own.instance if own is not None else InstanceId(b"")
        return Find(keys, self._context.ranks, name, own is None, promise, begins)

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
        context, keys = self._context, tracked.lookup.keys[first:stop]
        self.epoch = reply.epoch
        residents: list[ResidentRun] = []
        answered = chunks = len(reply.pooled)
        if context.publications is not None and context.tables is not None:
            chunks, residents = context.tables.unchanged(reply, context.publications.each, first)
        # Nothing can be loaded behind a chunk that has just been lost.
        coming = reply.coming if chunks == answered else None
        if tracked.promise.early:
            tracked.promise.made = answered < len(keys) and reply.coming is None
        if context.groups.parts and chunks:
            chunks = self._with_state(client, keys[:chunks])
        hits = chunks
        if not context.groups.parts and context.offload is not None:
            hits = context.offload.extend(client, keys, chunks)
        answer = Answer(first, first + hits, first + chunks, at, monotonic() - started, residents)
        if coming is not None:
            answer.coming, answer.comes_to = coming, first + answered + coming.chunks
        tracked.lookup.answer = answer
        return answer

    def _with_state(self, client: Client, keys: list[ChunkKey]) -> int:
        """Shorten a hit to end at a chunk with a state, stored by all ranks. Returns the number of
        chunks left."""
        ranks, parts = self._context.ranks, self._context.groups.parts
        try:
            stored = client.contains(of_ranks(state_keys(keys, parts), ranks))
        except VCacheError as error:
            self._failed(error)
            return 0
        each = parts * ranks
        ends = range(len(stored), 0, -each)
        return next((end // each for end in ends if all(stored[end - each : end])), 0)


def _is_queued(question: Question, reply: Found) -> bool:
    """Whether the chunks are promised by a request that is still queued, which gives way to a
    request that begins. The question did not say that its request begins."""
    coming = reply.coming
    if coming is None or coming.begun or question.begins:
        return False
    return coming.quiet + monotonic() - question.at > QUEUED_SECONDS


def _patience(client: Client) -> float:
    return min(LATE_SECONDS, client.request_seconds)
