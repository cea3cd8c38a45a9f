"""What the pool, and the offload tier, have of a request's chunks: look-ups and leases, from the scheduler's thread.

A question may be sent when its request arrives (`send`), while the scheduler has other things to do; `find` then reads the answer, or
asks. An answer counts for `FRESH_SECONDS`, one under a lease for half of the lease.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from math import inf
from time import monotonic, perf_counter

import msgspec

from vcache_backend.errors import VCacheError
from vcache_backend.metadata_server.channel import Sent
from vcache_backend.metadata_server.client import Client
from vcache_backend.metadata_server.messages import GRACE_SECONDS, ChunkKey, Count, Found, Leased, of_ranks
from vcache_backend.transfer.keys import adapter_digest, state_keys

from .adapters import Adapters
from .introduction import Introduction
from .metadata import HeldLease, LoadSpec
from .replicas import Replica
from .request_params import NOTHING
from .stats import Meter
from .tracked import NO_ANSWER, Answer, Question, Tracked

log = logging.getLogger("vllm.vcache")

AHEAD_SECONDS = 0.05
"""How long a question that was sent ahead is worth its answer: what others stored meanwhile is not in it."""
AGED_SECONDS = GRACE_SECONDS / 2
"""A lease given longer ago is renewed before vLLM counts on it: the server may be gone, and the copy would need its word."""


class Lookups:
    """Nothing waits longer than a call of the client and one of the offload tier's may."""

    def __init__(self, instance: Introduction, chunk_size: int, meter: Meter, parts: int = 0) -> None:
        """parts: chunks that a state takes; 0: the model keeps none."""
        self._instance, self._size, self._meter, self._parts = instance, chunk_size, meter, parts
        self._adapters = Adapters()

    def name(self, tracked: Tracked, whole: int) -> bool:
        """Make the keys of the first `whole` chunks known; False if nothing of the request may be cached, now or later."""
        request, adapter, known = tracked.request, b"", len(tracked.keys)
        if request.lora_request is not None:
            content = self._adapters.content(request.lora_request)
            if not content:
                tracked.params, tracked.loads, tracked.complete_at = NOTHING, False, inf
                return False
            adapter = adapter_digest(request.lora_request, content)
        if known < whole and self._instance.keys is not None:
            tracked.keys += self._instance.keys.keys(request.block_hashes, known, whole, adapter)
        return True

    def send(self, tracked: Tracked, stop: int, lease: bool) -> None:
        """Ask for the chunks [0, stop), which are named, and leave the answer to `find`. lease: under one."""
        client, started = self._instance.client, perf_counter()
        if client is None or tracked.question is not None:
            return
        at, keys = monotonic(), tracked.keys[:stop]
        try:
            sent = client.send_acquire(keys, self._instance.ranks) if lease and not self._parts else self._send(client, keys)
        except VCacheError as error:
            log.debug("look-up: %s", error)
            return
        if sent is not None:
            tracked.question = Question(sent, stop, at, perf_counter() - started)

    def find(self, tracked: Tracked, first: int, whole: int, lease: bool) -> Answer:
        """What can be loaded of the chunks [first, whole), which are named; without hits if nobody can say.

        lease: for a synchronous load, which is to be under a lease from now on, since vLLM counts on it. There is none where the
        worker cannot read all of it at once; then, and otherwise, the load is asynchronous.
        """
        question = tracked.question
        if question is not None and question.at + AHEAD_SECONDS > monotonic():
            self._read(tracked, question)
        answer = tracked.answer
        # Where the state is that a hit ends with is not known before: its lease comes last.
        at_once = lease and not self._parts
        if answer is None or not answer.counts(first, at_once or (lease and answer.lease is not None)):
            self.drop(tracked)
            answer = self._ask(tracked, first, whole, at_once)
        elif not lease:
            self.drop(tracked)
        if lease and not at_once and answer.lease is None and answer.hits > first:
            self._hold(tracked, answer)
        self._renew(tracked, answer)
        self._count(tracked, answer, first, whole)
        return answer

    def look(self, tracked: Tracked, first: int, whole: int) -> Answer:
        """`find` without a lease, asked now, for a request whose chunks somebody else may still compute. It is not counted."""
        return self._ask(tracked, first, whole, lease=False)

    def gone(self, instance: bytes) -> bool:
        """Whether nothing can be read of what this instance has; some microseconds."""
        tables = self._instance.tables
        return tables is None or tables.view(instance) is None

    def pin(self, tracked: Tracked, answer: Answer, first: int) -> bool:
        """Whether the chunks from `first` on, all in KV caches that the worker has mapped, stay as they are until a synchronous load has
        them."""
        pinning, mapped, shared = self._instance.pinning, self._instance.mapped, self._instance.shared
        residents = answer.residents_of(first, answer.hits)
        if pinning is None or shared is None or len(residents) < answer.hits - first:
            return False
        if not all(one[0] in mapped for one in residents.values()):
            return False
        return pinning.pin(tracked.request.request_id, shared.read(residents, answer.hits - first))

    def unpin(self, names: AbstractSet[str]) -> None:
        """The synchronous loads of these requests are over, or do not come."""
        if names and self._instance.pinning is not None:
            self._instance.pinning.release(names)

    def over(self, loads: Sequence[LoadSpec]) -> None:
        """All workers are done with these synchronous loads: what was kept for them may go."""
        self.unpin({load.request_id for load in loads if load.pinned})
        for load in loads:
            if load.lease is not None and self._instance.courier is not None:
                self._instance.courier.release(load.lease.id)

    def drop(self, tracked: Tracked) -> None:
        """End a lease that nobody reads under, in the background."""
        question, answer, courier = tracked.question, tracked.answer, self._instance.courier
        tracked.question = None
        if courier is None:
            return
        if question is not None and question.sent.kind is Leased:
            courier.release_asked(question.sent)
        if answer is not None and answer.lease is not None:
            courier.release(answer.lease.id)
            answer.lease = None

    # ---- inside

    def _count(self, tracked: Tracked, answer: Answer, first: int, whole: int) -> None:
        if not answer.counted:
            answer.counted = True
            found = max(min(answer.hits, whole) - first, 0)
            self._meter.looked_up((whole - first) * self._size, found * self._size, answer.seconds)
            log.debug("look-up %s: %d of %d chunks", tracked.request.request_id, found, whole - first)

    def _ask(self, tracked: Tracked, first: int, whole: int, lease: bool) -> Answer:
        client, started, at = self._instance.client, perf_counter(), monotonic()
        tracked.answer = None
        if client is None:
            return NO_ANSWER
        keys = tracked.keys[first:whole]
        try:
            reply = client.acquire(keys, self._instance.ranks) if lease else self._look_up(client, keys)
        except VCacheError as error:
            return self._failed(error)
        return self._answered(tracked, first, whole, reply, at, started)

    def _read(self, tracked: Tracked, question: Question) -> None:
        """Note the answer to what was sent ahead, if there is one."""
        started = perf_counter() - question.seconds
        try:
            reply = question.sent.answer()
        except VCacheError as error:
            # It may come yet: `drop` ends the lease then.
            self._failed(error)
            return
        tracked.question = None
        if isinstance(reply, Found) and reply.cut:
            # There may be more of it than one message tells.
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
        return client.send_lookup(keys, ranks) if shared is None else client.send_find(keys, ranks, shared.instance)

    def _look_up(self, client: Client, keys: list[ChunkKey]) -> Found | int:
        shared = self._instance.shared
        ranks = self._instance.ranks
        return client.lookup(keys, ranks) if shared is None else client.find(keys, ranks, shared.instance)

    def _answered(
        self, tracked: Tracked, first: int, stop: int, reply: Found | Leased | int, at: float, started: float
    ) -> Answer:
        """The server's answer for the chunks [first, stop), with what the offload tier has of them."""
        instance, residents = self._instance, dict[int, Replica]()
        if isinstance(reply, Found):
            found, residents = self._chosen(tracked, reply, first)
        else:
            found = reply if isinstance(reply, int) else len(reply.locations) // instance.ranks
        if self._parts and found:
            found = self._with_state(tracked.keys[first : first + found])
        pooled = hits = first + found
        if not self._parts and instance.offload is not None and instance.client is not None and pooled < stop:
            hits = first + instance.offload.extend(instance.client, tracked.keys[first:stop], found)
        answer = tracked.answer = Answer(first, hits, pooled, at, perf_counter() - started, residents=residents)
        if isinstance(reply, Leased):
            # What lies in the offload tier is under none.
            self._lease(tracked, answer, reply, at, hits - first)
        return answer

    def _with_state(self, keys: list[ChunkKey]) -> int:
        """How many of these chunks a hit may have, which ends where the state is there too, on all ranks."""
        instance, names = self._instance, state_keys(keys, self._parts)
        try:
            there = instance.client.contains(of_ranks(names, instance.ranks)) if instance.client is not None else []
        except VCacheError as error:
            self._failed(error)
            return 0
        each = self._parts * instance.ranks
        return next((end // each for end in range(len(there), 0, -each) if all(there[end - each : end])), 0)

    def _hold(self, tracked: Tracked, answer: Answer) -> None:
        """One lease on all chunks of the answer and the state behind them, or none."""
        instance, at, keys = self._instance, monotonic(), tracked.keys[answer.first : answer.hits]
        keys += state_keys(keys[-1:], self._parts)
        try:
            if instance.client is not None:
                self._lease(tracked, answer, instance.client.acquire(keys, instance.ranks), at, len(keys))
        except VCacheError as error:
            self._failed(error)

    def _renew(self, tracked: Tracked, answer: Answer) -> None:
        """An aged lease has its time, and its grace, again from now on, or it is none."""
        client, held, at = self._instance.client, answer.lease, monotonic()
        if held is None or at < held.deadline - held.seconds + AGED_SECONDS:
            return
        try:
            if client is not None and client.renew(held.id):
                answer.lease = msgspec.structs.replace(held, deadline=at + held.seconds)
                return
        except VCacheError as error:
            self._failed(error)
        self.drop(tracked)

    def _lease(self, tracked: Tracked, answer: Answer, reply: Leased, at: float, wanted: int) -> None:
        """What the answer counts on from now on, unless it has less than the `wanted` chunks, or some that the worker cannot read."""
        ranks, there = self._instance.ranks, {location.segment for location in reply.locations}
        if reply.lease:
            answer.lease = HeldLease(reply.lease, reply.locations, at + reply.seconds, reply.seconds, ranks)
            if len(reply.locations) < wanted * ranks or not there <= self._instance.readable:
                self.drop(tracked)

    def _chosen(self, tracked: Tracked, reply: Found, first: int) -> tuple[int, dict[int, Replica]]:
        """How many leading chunks there are, and those that are read in place. first: the number of the first one asked for."""
        shared, tables = self._instance.shared, self._instance.tables
        if shared is None or tables is None:
            return 0, {}
        # It grows with each reset, and an answer may be read late.
        shared.heard = max(shared.heard, reply.epoch)
        found, chosen = shared.choose(tracked, reply, tables, first)
        return found, {first + chunk: replica for chunk, replica in chosen.items()}
