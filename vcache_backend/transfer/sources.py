"""Where the chunks of a load come from: the pool, under a lease, or the offload tier. Both behind one small interface."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING

from vcache_backend.errors import VCacheError
from vcache_backend.metadata_server.messages import ChunkKey
from vcache_backend.transfer.checked import scatter
from vcache_backend.transfer.leases import FOREIGN, AskedLease, Lease
from vcache_backend.transfer.load_stats import LoadStats
from vcache_backend.transfer.places import Places
from vcache_backend.transfer.session import Session
from vcache_backend.vram_pool.copier import Completion, Mark
from vcache_backend.vram_pool.planner import CopyPlan
from vcache_backend.vram_pool.slots import SlotView

if TYPE_CHECKING:
    from vcache_backend.offload.read import Fetch, Staged
    from vcache_backend.offload.tier import OffloadTier

POLL_SECONDS = 0.0002
"""How often a load asks for chunks that another instance is still computing."""
CAUSES = {"absent": "store_absent", "bad": "store_bad", "timeout": "store_late"}
"""Of a load that ends, by why a fetch ended early; `store` is the rest."""


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
    def settle(self) -> str:
        """Its copy is over, and whatever it needed is given back: empty if its bytes are right, else why they are not."""

    @abstractmethod
    def drop(self) -> None:
        """Its copy is over, and nobody wants it: give back what it needed."""

    @property
    def tokens(self) -> int:
        """Those that are wanted of it."""
        return self.plan.nbytes // self.context.stats.token_bytes

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


class _LeasedRun:
    """Chunks under one lease, from number `first` on. users: parts of them that are under way, and one for those not launched yet."""

    def __init__(self, lease: Lease, first: int) -> None:
        self.lease, self.first, self.users = lease, first, 1

    def leave(self, session: Session) -> None:
        """One user less; the last one ends the lease."""
        self.users -= 1
        if not self.users:
            session.leases.release(self.lease)


@dataclass
class _LeasedPart(Part):
    run: _LeasedRun
    views: list[SlotView]

    def keep(self) -> None:
        lease = self.run.lease
        if lease.seconds_left < lease.seconds / 2:
            self.context.session.leases.renew(lease)

    def settle(self) -> str:
        context, seconds, started = self.context, self.seconds, perf_counter()
        self.run.users -= 1
        held = context.session.leases.verdict(self.run.lease, end=not self.run.users)
        context.stats.metadata_seconds += perf_counter() - started
        if not held:
            return "lease_lost"
        own = sum(view.local for view in self.views)
        context.stats.pooled(self.first, own, self.count, self.tokens, seconds)
        return ""

    def drop(self) -> None:
        self.run.leave(self.context.session)


class PoolSource(Source):
    """Chunks in the pool, each run of them under a lease. more: whether the next chunks may be there too, since the lease that was
    given was only asked for on those before them."""

    def __init__(self, context: LoadContext, lease: Lease | AskedLease | None, every: float) -> None:
        """lease: one that there is already or that was asked for, on chunks from number 0 on; another process's is the only one.
        every: seconds between two questions for chunks that are not there; 0: there is no need to bound them."""
        self._context, self._given, self._every = context, lease, every
        self._only = isinstance(lease, Lease) and lease.connection == FOREIGN
        self._run: _LeasedRun | None = None
        self._next_look = 0.0
        self.more = False

    def launch(self, chunk: int) -> Part | None:
        context, session = self._context, self._context.session
        if self._run is None:
            lease = self._lease(chunk)
            if lease is None:
                return None
            self._run = _LeasedRun(lease, chunk)
        run, self.cause = self._run, ""
        views = session.views(run.lease.locations[chunk - run.first :])
        if not views:
            self.cause = "segment"
            self._end_run()
            return None
        plan, started = context.plan(chunk, len(views)), perf_counter()
        run.users += 1
        try:
            keys = context.keys[chunk : chunk + len(views)]
            moving = scatter(session, context.places.kv, plan, views, keys, context.mark)
        except BaseException:
            # Whatever may still read the slots: nothing of it counts.
            run.users -= 1
            raise
        if chunk + len(views) == run.first + len(run.lease.locations):
            self._end_run()
        return _LeasedPart(context, chunk, len(views), plan, moving, started, run, views)

    def _end_run(self) -> None:
        """Nothing more is launched under the lease."""
        run, self._run = self._run, None
        if run is not None:
            run.leave(self._context.session)

    def _lease(self, chunk: int) -> Lease | None:
        """On the chunks from this number on, as far as they are there."""
        given, self._given = self._given, None
        self.cause, self.more = "", False
        if isinstance(given, AskedLease):
            if given.keys:
                # While the answer is on its way.
                self._context.plan(chunk, len(given.keys))
            lease = self._answered(given.fetch)
            asked = len(given.keys)
            self.more = lease is not None and len(lease.keys) == asked < len(self._context.keys)
            return lease
        if given is not None and given.keys[0] != self._context.keys[chunk]:
            self._context.session.leases.release(given)
            given = None
        if given is not None or self._only:
            return given
        session, now = self._context.session, time.monotonic()
        if self._every and now < self._next_look:
            return None
        self._next_look = now + self._every
        if not session.client.connected:
            self.cause = "server"
            return None
        return self._answered(lambda: session.leases.acquire(self._context.keys[chunk:]))

    def _answered(self, ask: Callable[[], Lease | None]) -> Lease | None:
        started = perf_counter()
        try:
            return ask()
        except VCacheError as error:
            self._context.session.miss("lease", error)
            self.cause = "server"
            return None
        finally:
            self._context.stats.metadata_seconds += perf_counter() - started

    def cancel(self) -> None:
        """End a lease that was given and not used."""
        self._end_run()
        given, self._given = self._given, None
        if isinstance(given, AskedLease):
            given.drop()
        elif given is not None:
            self._context.session.leases.release(given)


@dataclass
class _StagedPart(Part):
    fetch: Fetch
    staged: list[Staged]

    def settle(self) -> str:
        seconds = self.seconds
        self.drop()
        self.context.settled_offloaded(self, {staged.epoch for staged in self.staged}, seconds)
        return ""

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
        try:
            fetch = self._context.session.fetch(self._context.keys[chunk:])
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
