"""Where the chunks of a load come from, behind one small interface: memory of this node (memory.py), the offload tier, or a caller."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, NamedTuple

from vcache_backend.errors import VCacheError
from vcache_backend.metadata_server.messages import ChunkKey
from vcache_backend.transfer.load_stats import LoadStats
from vcache_backend.transfer.places import Places
from vcache_backend.transfer.session import Session
from vcache_backend.vram_pool.copier import Completion, Mark
from vcache_backend.vram_pool.planner import CopyPlan

if TYPE_CHECKING:
    from vcache_backend.offload.read import Fetch, Staged
    from vcache_backend.offload.tier import OffloadTier
    from vcache_backend.transfer.resident import ResidentChunk

CAUSES = {"absent": "store_absent", "bad": "store_bad", "timeout": "store_late"}
"""Of a load that ends, by why a fetch ended early; `store` is the rest."""


class Settled(NamedTuple):
    """How many leading chunks are right, and why not all; empty if they are."""

    chunks: int
    cause: str = ""


@dataclass
class Part(ABC):
    """Consecutive chunks on their way, from number `first` on: one copy."""

    context: LoadContext
    first: int
    count: int
    plan: CopyPlan
    moving: Completion
    launched: float

    def keep(self) -> None:  # noqa: B027 - most need nothing
        """Its copy takes long: see to it that its bytes stay."""

    @abstractmethod
    def settle(self) -> Settled:
        """Its copy is over, and whatever it needed is given back: how much of it is right."""

    @abstractmethod
    def drop(self) -> None:
        """Its copy is over, and nobody wants it: give back what it needed."""

    @property
    def pooled(self) -> Sequence[int]:
        """Numbers of its chunks that may be in the pool."""
        return range(self.first, self.first + self.count)

    @property
    def tokens(self) -> int:
        """Those that are wanted of it."""
        return self.plan.tokens

    @property
    def seconds(self) -> float:
        """What its copy took, which is over."""
        seconds = self.moving.seconds
        return perf_counter() - self.launched if seconds is None else seconds


class Source(ABC):
    """One place that chunks of a load come from. One thread, the worker's; only `wait` waits.

    cause: why nothing comes from here now; empty where it is simply not here. may_have: whether `prepare` is worth a try.
    """

    cause = ""
    may_have = False

    def expects(self, chunk: int) -> bool:
        """Whether this chunk is on its way from here."""
        return False

    def prepare(self, chunk: int) -> bool:
        """Begin to bring chunks from this number on, if that takes preparation; whether any are on their way."""
        return False

    @abstractmethod
    def launch(self, chunk: int) -> Part | None:
        """Start the copy of the chunks from this number on that are here now; None if there are none."""

    def wait(self, seconds: float) -> bool:
        """Wait, at most so long, for what is being prepared; False, at once, if nothing is."""
        return False

    @abstractmethod
    def cancel(self) -> None:
        """Nothing more is wanted. Idempotent."""


class LoadContext:
    """What the sources of one load share. mark: a point in the model's stream; who owned the places before has no work queued
    after it."""

    def __init__(self, session: Session, places: Places, keys: list[ChunkKey], mark: Mark | None, stats: LoadStats) -> None:
        self.session, self.places, self.keys, self.mark, self.stats = session, places, keys, mark, stats
        self.idle_since = perf_counter()
        """Since when the load has had nothing to do but wait."""
        self._planned: tuple[int, int, CopyPlan] | None = None
        self.resident: dict[int, ResidentChunk] = {}
        """By number, those that are still to come out of other instances' KV caches."""
        self.fetched: list[int] = []
        """Numbers of the chunks that came from the offload tier."""
        self.epochs: set[int] = set()
        """In which they were stored there."""

    def settled_offloaded(self, part: Part, epochs: set[int], seconds: float) -> None:
        """A part that came from the offload tier is in place. seconds: of its copy."""
        keys = self.keys[part.first : part.first + part.count]
        self.stats.offloaded(part.first, keys, part.tokens, perf_counter() - self.idle_since, seconds)
        self.epochs |= epochs
        self.fetched += range(part.first, part.first + part.count)

    def plan(self, chunk: int, count: int) -> CopyPlan:
        """The copy of so many chunks from this number on; one that was asked for just before is not made again."""
        if self._planned is None or self._planned[:2] != (chunk, count):
            with self.session.stats.timed("plan"):
                self._planned = chunk, count, self.places.load_plan(chunk, count)
        return self._planned[2]


@dataclass
class _StagedPart(Part):
    fetch: Fetch
    staged: list[Staged]

    def settle(self) -> Settled:
        seconds = self.seconds
        self.drop()
        self.context.settled_offloaded(self, {staged.epoch for staged in self.staged}, seconds)
        return Settled(self.count)

    def drop(self) -> None:
        self.fetch.give_back(self.staged)


class OffloadSource(Source):
    """Chunks in the offload tier, run by run, each on its way before it is needed. After a run that ended early nothing more is read:
    what failed once may fail again."""

    def __init__(self, context: LoadContext, tier: OffloadTier) -> None:
        self._context, self.tier, self.may_have = context, tier, True
        self._fetch: Fetch | None = None
        self._next = self._stop = 0

    def expects(self, chunk: int) -> bool:
        fetch = self._fetch
        if fetch is None or self._next != chunk:
            return False
        if not fetch.over:
            return True
        if self._next < self._stop:
            self.may_have, self.cause = False, CAUSES.get(fetch.cause, "store")
        self.cancel()
        return False

    def prepare(self, chunk: int) -> bool:
        if not self.may_have or chunk >= len(self._context.keys) or self._fetch is not None:
            return self._fetch is not None
        keys, resident = self._context.keys, self._context.resident
        stop = next((other for other in range(chunk, len(keys)) if other in resident), len(keys)) if resident else len(keys)
        if stop == chunk:
            return False
        try:
            fetch = self._context.session.fetch(keys[chunk:stop])
        except VCacheError as error:
            self._context.session.miss("fetch", error)
            fetch, self.cause = None, "server"
        if fetch is None:
            self.may_have = False
            return False
        self._fetch = fetch
        self._next, self._stop = chunk, chunk + len(fetch.keys)
        return True

    def launch(self, chunk: int) -> Part | None:
        context, fetch, uploader = self._context, self._fetch, self._context.session.uploader
        if fetch is None or uploader is None or self._next != chunk:
            return None
        staged = fetch.ready(uploader.most)
        if not staged:
            return None
        self._next += len(staged)
        try:
            plan, started = context.plan(chunk, len(staged)), perf_counter()
            moving = uploader.scatter(context.places.kv, plan, staged, context.mark)
        except VCacheError:
            # After any other error nobody knows whether something reads them: they are lost.
            fetch.give_back(staged)
            raise
        return _StagedPart(context, chunk, len(staged), plan, moving, started, fetch, staged)

    def wait(self, seconds: float) -> bool:
        if self._fetch is None:
            return False
        self._fetch.wait(seconds)
        return True

    def cancel(self) -> None:
        if self._fetch is not None:
            self._fetch.cancel()
        self._fetch = None
