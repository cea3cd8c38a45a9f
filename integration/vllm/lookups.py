"""What the pool, and the offload tier, have of a request's chunks: the scheduler's connection, names, look-ups and leases.

A question may be sent when its request arrives (`send`), while the scheduler has other things to do; `find` then reads the answer, or
asks. An answer counts for `FRESH_SECONDS`, one under a lease for half of the lease.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from time import monotonic, perf_counter
from typing import Any

import msgspec

from vcache_backend.config import Config
from vcache_backend.errors import VCacheError
from vcache_backend.metadata_server.channel import Sent
from vcache_backend.metadata_server.client import Client
from vcache_backend.metadata_server.messages import ChunkKey, Count, Leased, SegmentId
from vcache_backend.transfer.keys import BlockHashKeys, adapter_digest
from vcache_backend.transfer.layout import checked_layout

from . import compat, model_spec
from .adapters import Adapters
from .metadata import HeldLease, Link, Shard
from .offload import OffloadLookup
from .request_params import NOTHING, RequestParams
from .stats import Meter

log = logging.getLogger("vllm.vcache")

INTRODUCTION_SECONDS = 10.0
"""How long the first request waits for the workers to say what they hold; they do in the first step, which runs no model."""
FRESH_SECONDS = 0.5
"""How long the answer of a look-up counts for a request that vLLM could not schedule at once."""


AHEAD_SECONDS = 0.05
"""How long a question that was sent ahead is worth its answer: what others stored meanwhile is not in it."""


class Answer(msgspec.Struct):
    """What can be loaded of a request, as of the time `at`: the chunks [first, hits), those before `pooled` from the pool, the others
    from the offload tier. lease: on those of the pool. seconds: spent on asking. counted: whether the metrics have it."""

    first: int
    hits: int
    pooled: int
    at: float
    seconds: float
    lease: HeldLease | None = None
    counted: bool = False

    @property
    def offloaded(self) -> bool:
        """Whether some of it lies in the offload tier."""
        return self.hits > self.pooled

    def lease_from(self, first: int) -> HeldLease | None:
        """The lease, with the locations of chunk `first` and those after it."""
        lease = self.lease
        if lease is None or first == self.first:
            return lease
        return msgspec.structs.replace(lease, locations=lease.locations[first - self.first :])


NO_ANSWER = Answer(0, 0, 0, -inf, 0.0, counted=True)


class _Question(msgspec.Struct):
    """What was sent ahead for the chunks [0, stop), at the time `at`."""

    sent: Sent[Count] | Sent[Leased]
    stop: int
    at: float
    seconds: float


@dataclass(slots=True)
class Tracked:
    """One request. local: its tokens in vLLM's own cache when it was matched. stored: chunks from its start that are in the pool or on
    their way; `complete_at`: with how many tokens computed one more is complete, never if it stores none. loading: an asynchronous
    load is under way. failed: one did not hold."""

    request: Any
    params: RequestParams
    keys: list[ChunkKey] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    local: int = 0
    stored: int = 0
    complete_at: float = inf
    question: _Question | None = None
    answer: Answer | None = None
    failed: bool = False
    loading: bool = False


class Lookups:
    """Finds chunks, from the scheduler's thread. Nothing waits longer than a call of the client and one of the offload tier's may.

    refused: why nothing is cached, empty if something is. ranks: shards of a chunk. readable: the segments that the worker can
    read, of an instance that has one.
    """

    def __init__(self, config: Config, model: model_spec.ModelSpec, hash_block: int, refused: str | None, meter: Meter) -> None:
        """hash_block: tokens that one of vLLM's block hashes stands for."""
        self._config, self._model, self._meter = config, model, meter
        self._size, self._hash_block = config.engine.chunk_size, hash_block
        self._shards: dict[tuple[int, int], model_spec.ShardSpec] = {}
        self._introduced_by = 0.0
        self._client: Client | None = None
        self._namer: BlockHashKeys | None = None
        self._adapters = Adapters()
        self._prefix = b""
        self._workers = model.pp_size * model.tp_size
        self.ranks = model.pp_size * (1 if model.use_mla else model.tp_size)
        self.offload: OffloadLookup | None = None
        if not refused:
            try:
                # Now, since it takes a moment in the background until it is there.
                self.offload = OffloadLookup(config.offload, self.ranks, model.device_type != "cpu")
            except Exception:  # the integration's outermost line: vLLM serves without
                log.exception("vcache: nothing is read from the offload tier")
        self.readable: frozenset[SegmentId] = frozenset()
        self.refused = ""
        if refused:
            self._refuse(refused)

    # ---- the instance

    @property
    def introduced(self) -> bool:
        """Whether it is known what every worker holds, or that nothing is cached."""
        return bool(self.refused) or len(self._shards) == self._workers

    def waits(self) -> bool:
        """Whether a request is to wait until all workers have said what they hold, for `INTRODUCTION_SECONDS` at most."""
        if self.introduced:
            return False
        self._introduced_by = self._introduced_by or monotonic() + INTRODUCTION_SECONDS
        if monotonic() > self._introduced_by:
            self._refuse(f"{len(self._shards)} of {self._workers} workers said what they hold")
        return not self.refused

    def introduce(self, shards: Mapping[tuple[int, int], Shard]) -> None:
        """What workers hold, by (pipeline rank, tensor rank)."""
        if not shards or self.introduced:
            return
        self._shards |= {rank: shard.spec for rank, shard in shards.items()}
        problems = sorted({shard.problem for shard in self._shards.values() if shard.problem})
        if problems:
            self._refuse("; ".join(problems))
        if self.offload is not None and (problems or not all(shard.offload for shard in shards.values())):
            self.offload.close()
            self.offload = None

    def open(self) -> bool:
        """Connect, once everything that names depend on is known: the engine runs, and every worker has said what it holds. Whether
        chunks can be named."""
        if self._namer is not None or self.refused:
            return not self.refused
        if not self.introduced:
            return False
        shards = [self._shards[rank] for rank in sorted(self._shards)]
        layout = checked_layout(self._config, model_spec.layout(self._model, shards, self._size, compat.hash_root()))
        namespace = layout.namespace()
        self._client = Client(
            self._config.server.path, self._config.client, layout=layout.fields() | {"namespace": str(namespace)}
        )
        self._prefix = namespace.prefix
        self._namer = BlockHashKeys(namespace, self._size // self._hash_block)
        if trouble := self._client.trouble:
            log.warning("vcache: %s; everything is computed until then", trouble)
        log.info("vcache: namespace %s, chunks of %d tokens, %d shards", namespace, self._size, self.ranks)
        return True

    def clear(self) -> bool:
        """Have no chunk of the namespace found again, in the pool or the offload tier; False if the server did not answer, or before the
        first step, when nobody knows which namespace that is."""
        if not self.open():
            return bool(self.refused)
        try:
            if self._client is not None:
                self._client.clear(self._prefix, reset=True)
        except VCacheError as error:
            log.warning("the pool was not cleared, so nothing is read from it: %s", error)
            return False
        return True

    @property
    def reads_offload(self) -> bool:
        """Whether a chunk that is not in the pool may lie in the offload tier."""
        return self.offload is not None and self.offload.usable

    def note_links(self, links: Mapping[int, Link]) -> None:
        """How workers reach the offload tier."""
        if self.offload is not None and links:
            self.offload.note(links)

    def close(self) -> None:
        """Idempotent."""
        if self._client is not None:
            self._client.close()
        if self.offload is not None:
            self.offload.close()

    # ---- names

    def whole(self, request: Any) -> int:
        """How many whole chunks the tokens of vLLM's `request` are, as far as they are hashed."""
        return self._namer.whole(request.block_hashes) if self._namer is not None else 0

    def name(self, tracked: Tracked, whole: int) -> bool:
        """Make the keys of the first `whole` chunks known; False if nothing of the request may be cached, now or later."""
        request, adapter = tracked.request, b""
        if request.lora_request is not None:
            content = self._adapters.content(request.lora_request)
            if not content:
                tracked.params, tracked.complete_at = NOTHING, inf
                return False
            adapter = adapter_digest(request.lora_request, content)
        if self._namer is not None and len(tracked.keys) < whole:
            tracked.keys += self._namer.keys(request.block_hashes, len(tracked.keys), whole, adapter)
        return True

    # ---- questions

    def send(self, tracked: Tracked, stop: int, lease: bool) -> None:
        """Ask for the chunks [0, stop), which are named, and leave the answer to `find`. lease: under one."""
        client, started = self._client, perf_counter()
        if client is None or not client.connected or tracked.question is not None:
            return
        at, keys = monotonic(), tracked.keys[:stop]
        try:
            sent = client.send_acquire(keys) if lease else client.send_lookup(keys, self.ranks)
        except VCacheError as error:
            log.debug("look-up: %s", error)
            return
        if sent is not None:
            tracked.question = _Question(sent, stop, at, perf_counter() - started)

    def find(self, tracked: Tracked, first: int, whole: int, lease: bool) -> Answer:
        """What can be loaded of the chunks [first, whole), which are named; without hits if nobody can say.

        lease: for a synchronous load, which is to be under a lease from now on, since vLLM counts on it. There is none where the
        worker cannot read all of it at once; then, and otherwise, the load is asynchronous.
        """
        question = tracked.question
        if question is not None and question.at + AHEAD_SECONDS > monotonic():
            self._read(tracked, question)
        answer = tracked.answer
        if answer is None or not _counts(answer, first, lease):
            self.drop(tracked)
            answer = self._ask(tracked, first, whole, lease)
        elif not lease:
            self._release(answer)
        if not answer.counted:
            self._count(tracked, answer, first, whole)
        return answer

    def drop(self, tracked: Tracked) -> None:
        """End a lease that nobody reads under."""
        question, tracked.question = tracked.question, None
        if question is not None and question.sent.kind is Leased:
            self._read(tracked, question)
        if tracked.answer is not None:
            self._release(tracked.answer)

    def forget(self, tracked: Tracked) -> None:
        """Answers of before count no more."""
        self.drop(tracked)
        tracked.answer = None

    # ---- inside

    def _ask(self, tracked: Tracked, first: int, whole: int, lease: bool) -> Answer:
        client, started, at = self._client, perf_counter(), monotonic()
        if client is None or not client.connected:
            return NO_ANSWER
        keys, tracked.answer = tracked.keys[first:whole], None
        try:
            reply = client.acquire(keys) if lease else client.lookup(keys, self.ranks)
        except VCacheError as error:
            return self._failed(error)
        return self._answered(tracked, first, whole, reply, at, started)

    def _read(self, tracked: Tracked, question: _Question) -> None:
        """Note the answer to what was sent ahead, if there is one."""
        tracked.question, started = None, perf_counter() - question.seconds
        try:
            reply = question.sent.answer()
        except VCacheError as error:
            self._failed(error)
            return
        self._answered(tracked, 0, question.stop, reply if isinstance(reply, Leased) else reply.count, question.at, started)

    def _failed(self, error: VCacheError) -> Answer:
        log.debug("look-up: %s", error)
        self._meter.count("failures", 1, "server")
        return NO_ANSWER

    def _answered(self, tracked: Tracked, first: int, stop: int, reply: Leased | int, at: float, started: float) -> Answer:
        """The server's answer for the chunks [first, stop), with what the offload tier has of them."""
        found = reply if isinstance(reply, int) else len(reply.locations)
        pooled = hits = first + found
        if self.offload is not None and self._client is not None and pooled < stop:
            hits = first + self.offload.extend(self._client, tracked.keys[first:stop], found)
        answer = tracked.answer = Answer(first, hits, pooled, at, perf_counter() - started)
        if isinstance(reply, Leased) and reply.lease:
            answer.lease = HeldLease(reply.lease, reply.locations, at + reply.seconds, reply.seconds)
            if answer.offloaded or not {location.segment for location in reply.locations} <= self.readable:
                self._release(answer)
        return answer

    def _release(self, answer: Answer) -> None:
        lease, answer.lease = answer.lease, None
        if lease is None or self._client is None:
            return
        try:
            self._client.send_release(lease.id)
        except VCacheError as error:
            log.debug("a lease ends by itself: %s", error)

    def _refuse(self, reason: str) -> None:
        self.refused = reason
        log.error("vcache caches nothing: %s. vLLM serves all the same", reason)

    def _count(self, tracked: Tracked, answer: Answer, first: int, whole: int) -> None:
        answer.counted = True
        asked, found = whole - first, max(min(answer.hits, whole) - first, 0)
        self._meter.count("lookup_asked_tokens", asked * self._size)
        self._meter.count("lookup_hit_tokens", found * self._size)
        self._meter.observe("lookup_seconds", answer.seconds)
        if log.isEnabledFor(logging.DEBUG):
            lie = f", {answer.hits - answer.pooled} of them in the offload tier" if answer.offloaded else ""
            name = tracked.request.request_id
            log.debug("look-up %s: %d of %d chunks%s, %.0f us", name, found, asked, lie, 1e6 * answer.seconds)


def _counts(answer: Answer, first: int, lease: bool) -> bool:
    """Whether an answer of before says what can be loaded from chunk `first` on."""
    if answer.first > first or answer.hits < first:
        return False
    now = monotonic()
    if lease and answer.lease is not None:
        return answer.pooled > first and answer.lease.deadline - now > answer.lease.seconds / 2
    # A synchronous load needs a lease, unless there is nothing to load, or not from the pool alone.
    useless = lease and answer.hits > first and not answer.offloaded
    return not useless and answer.at + FRESH_SECONDS > now
