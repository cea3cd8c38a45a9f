"""The scheduler half's record of one request: settings, look-up, blocks, load."""

from __future__ import annotations

from array import array
from enum import Enum
from functools import partial
from math import inf
from time import monotonic
from typing import Any

import msgspec

from vcache_backend.protocol.channel import Sent
from vcache_backend.protocol.messages import (
    QUEUED_SECONDS,
    ChunkKey,
    Coming,
    Found,
    ResidentRun,
)

from .request_params import RequestParams

NEVER = 1 << 62
"""More blocks than any request has, so the number is never reached."""
FRESH_SECONDS, PROMISED_SECONDS = 0.5, QUEUED_SECONDS + 0.02
"""How long a look-up's answer is used again for a request that vLLM could not schedule at once;
and, shorter, for a request that has promised chunks, since another request may have begun to
compute them. Longer than `QUEUED_SECONDS`: a request that lacks blocks must not renew its promise
before another request may take it over. In between, two requests may compute the same chunks."""


class AnswerState(Enum):
    """Of a look-up's answer. FAILED: no answer within the deadline, or no server. LATE: not here
    yet, so ask again in the next step."""

    HERE = 0
    FAILED = 1
    LATE = 2


class Answer(msgspec.Struct):
    """The result of a look-up at the time `at` (time.monotonic): chunks [first, hits) can be
    loaded. An answer that is not `HERE` has no hits.

    pooled: chunks below this number are in the pool or in KV caches, later chunks in the offload
    tier. residents: the chunks that lie in other instances' KV caches. seconds: how long the
    look-up took. coming: the chunks that another instance is computing, up to number `comes_to`.
    counted: the metrics already contain this answer."""

    first: int
    hits: int
    pooled: int
    at: float
    seconds: float
    residents: list[ResidentRun] = []
    coming: Coming | None = None
    comes_to: int = 0
    counted: bool = False
    state: AnswerState = AnswerState.HERE

    @property
    def offloaded(self) -> bool:
        """Whether some chunks lie in the offload tier."""
        return self.hits > self.pooled

    def counts(self, first: int, promised: bool = False) -> bool:
        """Whether the answer is fresh enough, and covers the chunks from `first` on. promised: the
        answer is used again, and the request has promised the chunks behind the hits."""
        fresh = PROMISED_SECONDS if promised else FRESH_SECONDS
        return self.covers(first) and self.at + fresh > monotonic()

    def covers(self, first: int) -> bool:
        """Whether the answer covers the chunk `first`."""
        return self.first <= first <= self.hits

    def residents_of(self, first: int, stop: int) -> list[ResidentRun]:
        """Cut the residents to the chunks [first, stop), and number the chunks from `first`."""
        return [
            run.cut(begin, end).numbered(begin - first)
            for run in self.residents
            if (begin := max(first, run.first)) < (end := min(stop, run.stop))
        ]


FAILED = Answer(0, 0, 0, 0.0, 0.0, counted=True, state=AnswerState.FAILED)
LATE = Answer(0, 0, 0, 0.0, 0.0, counted=True, state=AnswerState.LATE)


class Question(msgspec.Struct):
    """A look-up of the chunks [first, stop), sent at the time `at` (time.monotonic) and not read
    yet.

    seconds: how long sending took. begins: vLLM was scheduling the request (see `Find`)."""

    sent: Sent[Found]
    first: int
    stop: int
    at: float
    seconds: float
    begins: bool


class LookupState(msgspec.Struct):
    """A request's look-ups. Only `Lookups` writes this state.

    keys: the keys of the leading chunks. question: sent, and not answered yet. since: since when
    vLLM's scheduler comes back for a late answer (time.monotonic); 0.0 for no late answer. asked,
    found: the numbers of chunks that the metrics count as looked up and as hits."""

    keys: list[ChunkKey] = []
    question: Question | None = None
    answer: Answer | None = None
    since: float = 0.0
    asked: int = 0
    found: int = 0


class StoreState(msgspec.Struct):
    """A request's blocks and stores. Only `Completions` writes this state.

    rows: the blocks, by block table. stored: how many leading chunks are stored, published or being
    stored. complete_at: the number of computed tokens that completes the next chunk; infinite if
    the request stores no more chunks. written: the least number of tokens in these blocks once the
    planned steps have run."""

    rows: list[array[int]] = []
    stored: int = 0
    written: int = 0
    complete_at: float = inf


class ResidentState(msgspec.Struct):
    """A request's blocks when KV caches are shared in place. Only `Publications` writes this state.

    filled: how many blocks have been filled; `NEVER`: further blocks stay void. generations: of the
    leading blocks, up to the first void block. resets, evicted: the counters of `ResidentPool` when
    the request got its blocks (-1: never), and when the blocks were last read."""

    filled: int = 0
    generations: array[int] = msgspec.field(default_factory=partial(array, "Q"))
    resets: int = -1
    evicted: int = 0


class PromiseState(msgspec.Struct):
    """A request's promise to compute chunks. `SchedulerSide` sets `number` and `early` when the
    request arrives; afterwards only `Lookups` and `OwnPromises` write this state.

    number: names the promise for the server; 0: the request stores nothing. early: look-ups
    promise, too. made: the server may hold a promise. stop: the chunks below this number are
    promised."""

    number: int = 0
    early: bool = False
    made: bool = False
    stop: int = 0


class Wait(msgspec.Struct, frozen=True):
    """A request's wait for chunks that another instance computes, as `decide` made it.

    since: when it began (time.monotonic). bound: its longest duration, and how long the owner may
    make no progress, in seconds. began, target: how many leading chunks exist at the beginning, and
    at the end. promised: the server has reported a promise. gone: when the server first reported
    that the promise has ended; None: it has not."""

    since: float
    bound: float
    began: int
    target: int
    promised: bool
    gone: float | None = None

    @property
    def until(self) -> float:
        """The latest end (time.monotonic)."""
        return self.since + self.bound


class WaitState(msgspec.Struct):
    """A request's wait, and its lead over other requests of this instance. Only `Waits` writes this
    state.

    wait: None before the wait. asked: when the server was last asked (time.monotonic). over: the
    wait has ended; a request waits once. seconds, tokens, end: how long the request has waited, how
    many tokens came, and how the wait ended (`Meter.waited`). load_started: the request has begun a
    load. leads: the first chunk that the request loads or waits for; None: no chunk. Other requests
    that lack this chunk may follow the request."""

    wait: Wait | None = None
    asked: float = 0.0
    over: bool = False
    seconds: float = 0.0
    tokens: int = 0
    end: str = ""
    load_started: bool = False
    leads: ChunkKey | None = None

    @property
    def present(self) -> Wait | None:
        """The wait, unless it has ended."""
        return None if self.over else self.wait


class Tracked(msgspec.Struct):
    """The state of a vLLM request for `SchedulerSide` and its parts.

    may_load: the request may load chunks. local: tokens in vLLM's own cache when vLLM last asked
    for hits. supplied: `local` and the tokens that we load. loading: a load is under way. due: a
    step that reaches fewer tokens completes nothing; only `Completions` writes `due`."""

    request: Any
    params: RequestParams
    may_load: bool
    local: int = 0
    supplied: int = 0
    loading: bool = False
    due: float = 0.0
    lookup: LookupState = msgspec.field(default_factory=LookupState)
    store: StoreState = msgspec.field(default_factory=StoreState)
    resident: ResidentState = msgspec.field(default_factory=ResidentState)
    promise: PromiseState = msgspec.field(default_factory=PromiseState)
    wait: WaitState = msgspec.field(default_factory=WaitState)
