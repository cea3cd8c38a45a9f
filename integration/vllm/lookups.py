"""Look-ups: which of a request's chunks the pool, other instances and the offload tier have. In the
scheduler's thread.

`send` asks when a request arrives, while the scheduler does other work; `find` reads that answer,
or asks itself. An answer is used for `FRESH_SECONDS`."""

from __future__ import annotations

import logging
from time import monotonic, perf_counter
from typing import Any

from vcache_backend.errors import VCacheError
from vcache_backend.metadata_server.channel import Sent
from vcache_backend.metadata_server.client import Client
from vcache_backend.metadata_server.messages import (
    ChunkKey,
    Count,
    Found,
    of_ranks,
)
from vcache_backend.transfer.keys import adapter_digest, state_keys

from .adapters import Adapters
from .introduction import Introduction
from .replicas import Run
from .stats import Meter
from .tracked import NO_ANSWER, Answer, Question, Tracked

log = logging.getLogger("vllm.vcache")

AHEAD_SECONDS = 0.05
"""How long after it was sent a question's answer is still read: chunks stored since are not in
it.
"""


class Lookups:
    """In the scheduler's thread. Nothing waits longer than one call of the client and one of the
    offload tier.
    """

    def __init__(
        self, instance: Introduction, chunk_size: int, meter: Meter, parts: int = 0
    ) -> None:
        """parts: chunks that one state takes; 0 if the model keeps no states."""
        self._instance, self._size, self._meter, self._parts = instance, chunk_size, meter, parts
        self._adapters = Adapters()

    def knows(self, lora_request: Any) -> bool:
        """Whether it is known what this adapter does, so that requests with it may be cached."""
        return bool(self._adapters.content(lora_request))

    def forget(self, tracked: Tracked) -> None:
        """What was asked of the request, and answered, does not count any more."""
        tracked.lookup.question = tracked.lookup.answer = None

    def name(self, tracked: Tracked, whole: int) -> bool:
        """Compute the keys of the request's first `whole` chunks. False if its adapter is not
        known.
        """
        request, adapter, known = tracked.request, b"", len(tracked.lookup.keys)
        if request.lora_request is not None:
            content = self._adapters.content(request.lora_request)
            if not content:
                return False
            adapter = adapter_digest(request.lora_request, content)
        if known < whole and self._instance.keys is not None:
            tracked.lookup.keys += self._instance.keys.keys(
                request.block_hashes, known, whole, adapter
            )
        return True

    def send(self, tracked: Tracked, stop: int) -> None:
        """Ask for the chunks [0, stop), whose keys are known; `find` reads the answer."""
        client, started = self._instance.client, perf_counter()
        if client is None or tracked.lookup.question is not None:
            return
        at, keys = monotonic(), tracked.lookup.keys[:stop]
        try:
            sent = self._send(client, keys)
        except VCacheError as error:
            log.debug("look-up: %s", error)
            return
        if sent is not None:
            tracked.lookup.question = Question(sent, stop, at, perf_counter() - started)

    def find(self, tracked: Tracked, first: int, whole: int) -> Answer:
        """What can be loaded of the chunks [first, whole), whose keys are known. No hits if the
        server does not answer.
        """
        question = tracked.lookup.question
        if question is not None and question.at + AHEAD_SECONDS > monotonic():
            self._read(tracked, question)
        answer, tracked.lookup.question = tracked.lookup.answer, None
        if answer is None or not answer.counts(first):
            answer = self._ask(tracked, first, whole)
        self._count(tracked, answer, first, whole)
        return answer

    def look(self, tracked: Tracked, first: int, whole: int) -> Answer:
        """Ask now for chunks that another instance may still be computing. Not counted in the
        metrics.
        """
        return self._ask(tracked, first, whole)

    def gone(self, instance: bytes) -> bool:
        """Whether this instance's KV cache can no longer be read. Takes some microseconds."""
        tables = self._instance.tables
        return tables is None or tables.view(instance) is None

    # ---- inside

    def _count(self, tracked: Tracked, answer: Answer, first: int, whole: int) -> None:
        """Count a look-up, and each of the request's tokens once: vLLM asks again while the request
        waits for blocks.
        """
        if not answer.counted:
            answer.counted = True
            found = max(min(answer.hits, whole) - first, 0)
            asked, hit = tracked.lookup.asked, tracked.lookup.promised
            tracked.lookup.asked, tracked.lookup.promised = (
                max(asked, whole - first),
                max(hit, found),
            )
            more, more_found = tracked.lookup.asked - asked, tracked.lookup.promised - hit
            self._meter.looked_up(more * self._size, more_found * self._size, answer.seconds)
            if self._instance.client is not None:
                self._instance.client.looked_up(more * self._size, more_found * self._size)
            log.debug(
                "look-up %s: %d of %d chunks", tracked.request.request_id, found, whole - first
            )

    def _ask(self, tracked: Tracked, first: int, whole: int) -> Answer:
        client, started, at = self._instance.client, perf_counter(), monotonic()
        tracked.lookup.answer = None
        if client is None:
            return NO_ANSWER
        keys = tracked.lookup.keys[first:whole]
        try:
            reply = self._look_up(client, keys)
        except VCacheError as error:
            return self._failed(error)
        return self._answered(tracked, first, whole, reply, at, started)

    def _read(self, tracked: Tracked, question: Question) -> None:
        """Note the answer to a question sent ahead, if it has come."""
        started = perf_counter() - question.seconds
        try:
            reply = question.sent.answer()
        except VCacheError as error:
            self._failed(error)
            return
        tracked.lookup.question = None
        if isinstance(reply, Found) and reply.cut:
            # One message did not hold the whole answer: ask again.
            return
        given = reply.count if isinstance(reply, Count) else reply
        self._answered(tracked, 0, question.stop, given, question.at, started)

    def _failed(self, error: VCacheError) -> Answer:
        log.debug("look-up: %s", error)
        self._meter.count("failures", 1, "server")
        return NO_ANSWER

    def _send(self, client: Client, keys: list[ChunkKey]) -> Sent[Count] | Sent[Found] | None:
        shared = self._instance.shared
        ranks = self._instance.ranks
        return (
            client.send_lookup(keys, ranks)
            if shared is None
            else client.send_find(keys, ranks, shared.instance)
        )

    def _look_up(self, client: Client, keys: list[ChunkKey]) -> Found | int:
        shared = self._instance.shared
        ranks = self._instance.ranks
        return (
            client.lookup(keys, ranks)
            if shared is None
            else client.find(keys, ranks, shared.instance)
        )

    def _answered(
        self,
        tracked: Tracked,
        first: int,
        stop: int,
        reply: Found | int,
        at: float,
        started: float,
    ) -> Answer:
        """Note the server's reply for the chunks [first, stop), extended by what the offload tier
        has.
        """
        instance, residents = self._instance, list[Run]()
        if isinstance(reply, Found):
            found, residents = self._chosen(reply, first)
        else:
            found = reply
        if self._parts and found:
            found = self._with_state(tracked.lookup.keys[first : first + found])
        pooled = hits = first + found
        if (
            not self._parts
            and instance.offload is not None
            and instance.client is not None
            and pooled < stop
        ):
            hits = first + instance.offload.extend(
                instance.client, tracked.lookup.keys[first:stop], found
            )
        answer = tracked.lookup.answer = Answer(
            first, hits, pooled, at, perf_counter() - started, residents
        )
        return answer

    def _with_state(self, keys: list[ChunkKey]) -> int:
        """How many of these chunks a hit may have: it must end where all ranks have stored the
        state, too.
        """
        instance, names = self._instance, state_keys(keys, self._parts)
        try:
            there = (
                instance.client.contains(of_ranks(names, instance.ranks))
                if instance.client is not None
                else []
            )
        except VCacheError as error:
            self._failed(error)
            return 0
        each = self._parts * instance.ranks
        return next(
            (end // each for end in range(len(there), 0, -each) if all(there[end - each : end])), 0
        )

    def _chosen(self, reply: Found, first: int) -> tuple[int, list[Run]]:
        """How many leading chunks can be loaded, and those read in place. first: the
        number of the first one asked for.
        """
        shared, tables = self._instance.shared, self._instance.tables
        if shared is None or tables is None:
            return 0, []
        # The epoch only grows, and an older answer may be read late.
        shared.heard = max(shared.heard, reply.epoch)
        found, chosen = shared.choose(reply, tables)
        return found, [run._replace(first=first + run.first) for run in chosen]
