"""What the scheduler's half knows of one request: what it wants, what can be loaded of it, what its steps have filled."""

from __future__ import annotations

from array import array
from math import inf
from time import monotonic
from typing import Any

import msgspec

from vcache_backend.metadata_server.channel import Sent
from vcache_backend.metadata_server.messages import ChunkKey, Count, Found, Leased

from .metadata import HeldLease
from .replicas import Replica
from .request_params import RequestParams

NEVER = 1 << 62
"""Blocks that no request has."""
FRESH_SECONDS = 0.5
"""How long the answer of a look-up counts for a request that vLLM could not schedule at once."""


class Answer(msgspec.Struct):
    """What can be loaded of a request, as of the time `at`: the chunks [first, hits), those before `pooled` from the pool, the others
    from the offload tier. lease: on those of the pool. residents: those that lie in others' KV caches, by number. seconds: spent on
    asking. counted: whether the metrics have it."""

    first: int
    hits: int
    pooled: int
    at: float
    seconds: float
    lease: HeldLease | None = None
    residents: dict[int, Replica] = {}
    counted: bool = False

    @property
    def offloaded(self) -> bool:
        """Whether some of it lies in the offload tier."""
        return self.hits > self.pooled

    def counts(self, first: int, lease: bool) -> bool:
        """Whether it still says what can be loaded from chunk `first` on. lease: under one."""
        if self.first > first or self.hits < first:
            return False
        now = monotonic()
        if lease and self.lease is not None:
            return self.pooled > first and self.lease.deadline - now > self.lease.seconds / 2
        # A synchronous load needs a lease, unless there is nothing to load, or not from the pool alone.
        useless = lease and self.hits > first and not self.offloaded
        return not useless and self.at + FRESH_SECONDS > now

    def lease_from(self, first: int) -> HeldLease | None:
        """The lease, with the locations of chunk `first` and those after it."""
        lease = self.lease
        if lease is None or first == self.first:
            return lease
        return msgspec.structs.replace(lease, locations=lease.locations[(first - self.first) * lease.ranks :])

    def residents_of(self, first: int, stop: int) -> dict[int, Replica]:
        """Those of the chunks [first, stop), numbered from the first one of them."""
        return {chunk - first: replica for chunk, replica in self.residents.items() if first <= chunk < stop}


NO_ANSWER = Answer(0, 0, 0, -inf, 0.0, counted=True)


class Question(msgspec.Struct):
    """What was sent ahead for the chunks [0, stop), at the time `at`."""

    sent: Sent[Count] | Sent[Leased] | Sent[Found]
    stop: int
    at: float
    seconds: float


class Tracked(msgspec.Struct):
    """One request. loads: whether it may take anything from the pool. consumes: remove what it has loaded. local: its tokens in vLLM's own
    cache when it was matched; `supplied`: with those that we load. stored: chunks from its start that are in the pool or on their way;
    `complete_at`: with how many tokens computed one more is complete, never if it stores none. loading: an asynchronous load is under way.
    pinned: what it loads stays where it is, so that the load may be synchronous. junction: so many chunks others have begun with, too,
    whose windows there are gone. outdated: see `Leftovers`.

    generations: of its leading blocks, in each block table, those in which they hold what the request has computed, or found. filled: how
    many places (`Completions.place`) its steps have filled, or `NEVER`: what it computes now is not to be published. loaded: the first
    place that a load fills, until a step runs. resets, evicted: see `ResidentPool`, when `generations` were right; or see `Leftovers`, when
    a load began. copies: by their first block, the chunks that it reads in others' KV caches."""

    request: Any
    params: RequestParams
    loads: bool
    consumes: bool
    keys: list[ChunkKey] = []
    rows: list[array[int]] = []
    generations: list[array[int]] = []
    filled: int = 0
    loaded: int = NEVER
    resets: int = 0
    evicted: int = 0
    copies: list[tuple[int, Replica]] = []
    local: int = 0
    supplied: int = 0
    stored: int = 0
    complete_at: float = inf
    question: Question | None = None
    answer: Answer | None = None
    loading: bool = False
    pinned: bool = False
    outdated: bool = False
    junction: int = 0
