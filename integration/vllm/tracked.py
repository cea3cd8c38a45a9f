"""What the scheduler's half knows of one request: what it wants, what can be loaded of it, what its
steps have filled.
"""

from __future__ import annotations

from array import array
from math import inf
from time import monotonic
from typing import Any

import msgspec

from vcache_backend.metadata_server.channel import Sent
from vcache_backend.metadata_server.messages import ChunkKey, Count, Found

from .replicas import Run, within
from .request_params import RequestParams
from .resident_pool import GENERATIONS

NEVER = 1 << 62
"""More blocks than any request has: the place or the number of tokens is never reached."""
FRESH_SECONDS = 0.5
"""How long a look-up's answer is used for a request that vLLM could not schedule at once."""


class Answer(msgspec.Struct):
    """What can be loaded of a request as of `at` (time.monotonic): the chunks [first, hits).

    pooled: chunks before this number are in the pool or in KV caches, the others in the offload
    tier. residents: the chunks that lie in others' KV caches. seconds: spent on asking. counted: whether the metrics have it."""

    first: int
    hits: int
    pooled: int
    at: float
    seconds: float
    residents: list[Run] = []
    counted: bool = False

    @property
    def offloaded(self) -> bool:
        """Whether some of it lies in the offload tier."""
        return self.hits > self.pooled

    def counts(self, first: int) -> bool:
        """Whether the answer can still be used for the chunks from `first` on."""
        return self.first <= first <= self.hits and self.at + FRESH_SECONDS > monotonic()

    def residents_of(self, first: int, stop: int) -> list[Run]:
        """Those of the chunks [first, stop), numbered from the first one of them."""
        return within(self.residents, first, stop)


NO_ANSWER = Answer(0, 0, 0, -inf, 0.0, counted=True)


class Question(msgspec.Struct):
    """A question sent ahead for the chunks [0, stop), at the time `at` (time.monotonic). seconds:
    what sending took.
    """

    sent: Sent[Count] | Sent[Found]
    stop: int
    at: float
    seconds: float


class LookupState(msgspec.Struct):
    """What `Lookups` knows of a request, which alone writes it.

    keys: of its leading chunks. question: sent ahead, and not answered yet. asked, promised: its
    chunks that the metrics count as looked up, and as found."""

    keys: list[ChunkKey] = []
    question: Question | None = None
    answer: Answer | None = None
    asked: int = 0
    promised: int = 0


class StoreState(msgspec.Struct):
    """What `Completions` knows of a request, which alone writes it.

    rows: its blocks, by block table. stored: chunks from its start that are stored, published or on
    their way. complete_at: the number of computed tokens that completes one more chunk; infinite if
    it stores nothing more."""

    rows: list[array[int]] = []
    stored: int = 0
    complete_at: float = inf


class ResidentState(msgspec.Struct):
    """What `Publications` knows of a request, which alone writes it.

    generations: those in which its leading blocks hold what it has computed or found. filled: how
    many blocks its steps have filled; `NEVER`: publish nothing of what it computes now. loaded: the
    first block that a load fills, until a step runs. resets, evicted: the counters of
    `ResidentPool` when `generations` were right."""

    generations: array[int] = msgspec.field(default_factory=lambda: array(GENERATIONS))
    filled: int = 0
    loaded: int = NEVER
    resets: int = 0
    evicted: int = 0


class LeftoverState(msgspec.Struct):
    """What `Leftovers` knows of a request, which alone writes it.

    outdated: it goes on with KV from before a reset. resets: how many there had been when its load
    began."""

    outdated: bool = False
    resets: int = 0


class Tracked(msgspec.Struct):
    """One request of vLLM's, as `SchedulerSide` knows it, and what its parts know.

    loads: whether it may load anything. local: its tokens in vLLM's own cache when it was matched.
    supplied: those and the tokens that we load. loading: its load is under way. copies: the chunks
    that it reads in others' KV caches; `Duplicates` writes it."""

    request: Any
    params: RequestParams
    loads: bool
    local: int = 0
    supplied: int = 0
    loading: bool = False
    lookup: LookupState = msgspec.field(default_factory=LookupState)
    store: StoreState = msgspec.field(default_factory=StoreState)
    resident: ResidentState = msgspec.field(default_factory=ResidentState)
    leftover: LeftoverState = msgspec.field(default_factory=LeftoverState)
    copies: list[Run] = []
