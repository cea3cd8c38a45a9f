"""What the scheduler half knows of one request: its settings, look-ups, wait, blocks and stores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from time import monotonic
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from vcache_backend.errors import MAX_LINE_CHARS, printable
from vcache_backend.protocol.channel import Sent
from vcache_backend.protocol.messages import (
    QUEUED_SECONDS,
    Coming,
    Find,
    Found,
    ResidentRun,
)

if TYPE_CHECKING:
    from .metadata import LoadSpec
    from .model.groups import Span

FRESH_SECONDS, PROMISED_SECONDS = 0.5, QUEUED_SECONDS + 0.02
"""How long an answer counts: chunks are stored after it was made. The second number is for a
request that has promised chunks, since another request may have begun to compute them. It is
longer than `QUEUED_SECONDS`: a request that lacks blocks must not renew its promise before another
request may take it over. In between, two requests may compute the same chunks."""


# ---- settings


class RequestParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A request's own settings: `vcache` in its `kv_transfer_params`."""

    load: bool = True
    """The request may load chunks."""
    store: bool = True
    """The request may store chunks."""
    announced: bool = False
    """Another instance is about to compute this prompt, so wait for its chunks."""
    wait_seconds: Annotated[float, msgspec.Meta(ge=0, le=600)] = 10.0
    """How long an announced request waits at most."""


UNCACHED = RequestParams(load=False, store=False)
DEFAULT = RequestParams()


def read_params(params: object) -> RequestParams:
    """Read the settings from `kv_transfer_params`, an untrusted value from a client. ValueError
    names an unknown key or an impossible value, in one line that can be logged."""
    params = params or {}
    if not isinstance(params, Mapping):
        raise ValueError(f"kv_transfer_params: Expected an object, got {type(params).__name__}")
    given = params.get("vcache")
    if given is None:
        return DEFAULT
    try:
        return msgspec.convert(given, RequestParams)
    except ValueError as error:  # also of text that is not Unicode
        fault = printable(str(error), MAX_LINE_CHARS)
        raise ValueError(f"kv_transfer_params: vcache: {fault}") from error


# ---- look-ups


class Answer(msgspec.Struct):
    """The answer to a look-up. Chunks and tokens are counted from the prompt's start."""

    first: int
    """The first chunk that was looked up."""
    hits: int
    """Chunks [first, hits) can be loaded whole."""
    pooled: int
    """Hits below this number are in the pool or in KV caches, later hits in the offload tier."""
    at: float
    """When the question was sent (time.monotonic)."""
    seconds: float
    """How long the look-up took."""
    tokens: int = 0
    """How many leading tokens can be loaded."""
    residents: list[ResidentRun] = []
    """The hit's blocks in other instances' KV caches, counted from chunk `first`."""
    by_chunks: bool = True
    """Some chunks of the hit are in the pool."""
    found: int = 0
    """With several block tables in place: of how many leading tokens other instances have the
    blocks of all tables that attend to all tokens. A hit may end before."""
    whole: bool = False
    """The answer is about the whole prompt, whatever vLLM has: with several block tables in
    place."""
    coming: Coming | None = None
    """The chunks behind the hits that another instance is computing."""
    comes_to: int = 0
    """The chunk behind the last of `coming`."""
    epoch: int = 0
    """Of the namespace."""
    counted: bool = False
    """The metrics contain this answer."""

    @property
    def offloaded(self) -> bool:
        """Whether some chunks lie in the offload tier."""
        return self.hits > self.pooled

    def counts(self, first: int, promised: bool = False) -> bool:
        """Whether the answer is fresh enough, and covers the chunks from `first` on. promised: the
        request has promised the chunks behind the hits."""
        fresh = PROMISED_SECONDS if promised else FRESH_SECONDS
        return self.covers(first) and self.at + fresh > monotonic()

    def covers(self, first: int) -> bool:
        """Whether the answer says something about the chunk `first`."""
        return self.whole or self.first <= first <= self.hits

    def runs_of(self, span: Span, offset: int) -> list[ResidentRun]:
        """The residents in a load's span, numbered as blocks of the load. offset: the number of the
        answer's first block in the span's table."""
        stop = span.first + span.length
        return [
            run.cut(begin - offset, end - offset).numbered(span.at + begin - span.first)
            for run in self.residents
            if run.table == span.table
            if (begin := max(span.first, run.first + offset))
            < (end := min(stop, run.stop + offset))
        ]


LATE = Answer(0, 0, 0, 0.0, 0.0)
"""The answer has not come: ask again in the next step."""
FAILED = Answer(0, 0, 0, 0.0, 0.0, counted=True)
"""The answer did not come within the deadline, or there is no server."""


class Question(msgspec.Struct):
    """A look-up from chunk `first` on whose answer has not been read."""

    sent: Sent[Found]
    first: int
    at: float
    """When it was sent (time.monotonic)."""
    seconds: float
    """How long sending took."""
    begins: bool
    """vLLM was scheduling the request (see `Find`)."""
    most: int
    """Of how many leading tokens it asked."""
    probes: bool = False
    """Only one chunk was asked for: whether it has come (see `Lookups.probe`)."""


class LookupState(msgspec.Struct):
    """A request's look-ups. Only `Lookups` writes this state."""

    computed_with: tuple[bytes, ...] | None = None
    """Digests of the weights' version and the adapter; None until the request was named."""
    named: bytes = b""
    """Packed, the names of the blocks that it had by then: see `Lookups.hashes`."""
    last: bytes = b""
    """vLLM's hash of the last of these blocks."""
    question: Question | None = None
    probe: tuple[int, Find] | None = None
    """The last chunk for which `Lookups.probe` asked, and what it asked."""
    answer: Answer | None = None
    late_since: float | None = None
    """Since when vLLM comes back for a late answer (time.monotonic)."""
    failed: bool = False
    """The last answer was `FAILED`. The metrics count it once, though vLLM may ask in each step."""
    most: int = 0
    """How many leading tokens could be loaded when the request was last looked at."""
    chunks: int = 0
    """How many chunks hold these tokens."""
    asked: int = 0
    """Tokens that the metrics count as looked up."""
    found: int = 0
    """Tokens that the metrics count as hits."""


# ---- waits


class Wait(msgspec.Struct, frozen=True):
    """A wait for chunks that another instance computes, as `waits.decide` made it."""

    since: float
    """When it began (time.monotonic)."""
    bound: float
    """Its longest duration, and how long the owner may make no progress, in seconds."""
    began: int
    """How many leading chunks existed at the beginning."""
    target: int
    """How many leading chunks exist when the wait has succeeded."""
    promised: bool
    """The server has reported a promise."""
    gone: float | None = None
    """When the server first reported that the promise has ended; None: it has not."""
    asks: int | None = None
    """The chunk that is probed; None: the last one that the request waits for."""
    quiet: float = inf
    """Of an open load, which holds blocks: how long the owner may make no progress."""
    epoch: int = 0
    """Of an open load: the namespace's epoch, in which all its blocks were published."""

    @property
    def until(self) -> float:
        """The latest end (time.monotonic)."""
        return self.since + self.bound

    @property
    def probes(self) -> int:
        """The chunk that is probed."""
        return self.target - 1 if self.asks is None else self.asks


class WaitState(msgspec.Struct):
    """A request's wait, and its lead over other requests of this instance. Only `Waits` writes this
    state."""

    wait: Wait | None = None
    """The present wait."""
    waited: bool = False
    """A wait has begun. A request waits once."""
    asked: float = 0.0
    """When the server was last asked during the wait (time.monotonic)."""
    begun: bool = False
    """By the server's last answer somebody computes what the request waits for."""
    seconds: float = 0.0
    """How long the request has waited."""
    tokens: int = 0
    """How many tokens came during the wait."""
    end: str = ""
    """How the wait ended (`Meter.waited`)."""
    load_started: bool = False
    leads: bytes = b""
    """The name of the first chunk that the request loads or waits for. Other requests that lack
    this chunk may follow the request."""


# ---- blocks and stores


class StoreState(msgspec.Struct):
    """A request's blocks and stores. Only `StorePlanner` writes this state."""

    block_tables: list[list[int]] = []
    stored: int = 0
    """How many leading chunks are stored, or being stored."""
    written: int = 0
    """The least number of tokens in these blocks once the planned steps have run."""
    complete_at: float = inf
    """The number of computed tokens that completes the next chunk; in place without a pool, where
    vLLM's blocks count, a large one. Infinite if the request stores nothing more."""
    idle_until: float = 0.0
    """A step that reaches fewer tokens, and brings no blocks, completes nothing."""
    trusted_after: int = 0
    """The echo of the last step, up to the request's first one, in which another connector loaded:
    chunks are stored once the step is over (see `Resets`)."""

    def extend(self, added: Sequence[Sequence[int]]) -> None:
        """Note further blocks of each table."""
        for own, more in zip(self.block_tables, added, strict=True):
            own.extend(more)


BEGINS, LATER, UNLOADED = -1, -2, (-1, -1)


class InPlaceState(msgspec.Struct):
    """A request's blocks when KV caches are shared in place. Only `Publications` writes this
    state."""

    publishes: bool = True
    """False: further blocks stay void."""
    supplied: int = 0
    """How many hashes' blocks came from vLLM's cache or a load."""
    resets: int | None = None
    """`TrackedBlockPool.resets` when the request got its blocks; None before."""
    evicted: int = 0
    """`TrackedBlockPool.evicted` when the blocks were last checked. `BEGINS`: not yet, in the
    request's first step; `LATER`: in that step only blocks of windows and states."""
    filled: dict[int, int] = {}
    """By block table, the leading blocks that were published, or could have been."""
    had: int = 0
    """How many of `supplied` are to be checked in the request's first step."""
    loaded: tuple[int, int] = UNLOADED
    """`TrackedBlockPool.resets` and `evicted` when all blocks of the last load got generations,
    until the load has failed or the request's first step."""


class PromiseState(msgspec.Struct):
    """A request's promise to compute chunks. Only `Lookups` and `PromiseSender` write it."""

    number: int = 0
    """Names the promise for the server; 0: the request stores nothing."""
    early: bool = False
    """Look-ups promise, too."""
    made: bool = False
    """The server may hold a promise."""
    stop: int = 0
    """The chunks below this number are promised."""


class Tracked(msgspec.Struct):
    """The state of one of vLLM's requests."""

    request: Any
    params: RequestParams
    may_load: bool
    local: int = 0
    """Tokens in vLLM's own cache when vLLM last asked for hits."""
    supplied: int = 0
    """`local` and the tokens that we load."""
    load: LoadSpec | None = None
    """The load under way. It is open while the request's wait goes on: further blocks may come."""
    lookup: LookupState = msgspec.field(default_factory=LookupState)
    wait: WaitState = msgspec.field(default_factory=WaitState)
    promise: PromiseState = msgspec.field(default_factory=PromiseState)
    store: StoreState = msgspec.field(default_factory=StoreState)
    in_place: InPlaceState = msgspec.field(default_factory=InPlaceState)


class Beginning(msgspec.Struct, frozen=True):
    """A request that begins or resumes in a step, with its present block tables.

    computed: tokens before the step. whole: the same, but in whole blocks if the request goes on in
    a copy of a block that vLLM's own cache has."""

    tracked: Tracked
    block_tables: Sequence[Sequence[int]]
    computed: int
    whole: int
