"""The sources of a load's chunks, behind one interface: memory of this node (memory.py), the
offload tier, or the caller (held.py).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from vcache_backend.errors import VCacheError
from vcache_backend.metadata_server.messages import ChunkKey
from vcache_backend.transfer.load_stats import LoadStats
from vcache_backend.transfer.places import Places
from vcache_backend.transfer.session import Session
from vcache_backend.vram_pool.copies.copier import Completion, Mark
from vcache_backend.vram_pool.copies.planner import CopyPlan
from vcache_backend.vram_pool.copies.uploads import Uploader

if TYPE_CHECKING:
    from vcache_backend.offload.read import Fetch, Staged
    from vcache_backend.offload.tier import OffloadTier
    from vcache_backend.transfer.resident import ResidentChunk

CAUSES = {"absent": "store_absent", "bad": "store_bad", "timeout": "store_late"}
"""A load's cause, by the cause for which a fetch ended early. Others: `store`."""


class Settled(NamedTuple):
    """How many leading chunks are right, and the cause if not all are; empty if they are."""

    chunks: int
    cause: str = ""


@dataclass
class RunningCopy:
    """One copy under way into the KV cache: `count` chunks of a load from number `first` on.
    launched: by perf_counter."""

    first: int
    count: int
    plan: CopyPlan
    moving: Completion
    launched: float

    @property
    def seconds(self) -> float:
        """Seconds that the copy took. Only once it is over."""
        seconds = self.moving.seconds
        return perf_counter() - self.launched if seconds is None else seconds

    def tokens(self, first: int, count: int) -> int:
        """How many tokens it copies of the `count` chunks from number `first` on."""
        if count == self.count:
            return self.plan.tokens
        start = first - self.first
        begin, end = np.searchsorted(self.plan.blocks[:, 0], (start, start + count))
        return int(end - begin) * self.plan.block_size


@dataclass
class Part(ABC):
    """`count` consecutive chunks of a load, from number `first` on, which lie in one place. They
    stay readable until `settle` or `drop`. If nobody can know whether their copy is over, `lose` is
    called instead.

    copy: the copy that reads them, and perhaps other parts; set when it is launched."""

    context: LoadContext
    first: int
    count: int
    copy: RunningCopy = field(init=False)

    def keep(self) -> None:  # noqa: B027 - most need nothing
        """Called while the copy runs: make sure that the chunks stay readable, for example by
        renewing a lease.
        """

    @abstractmethod
    def settle(self) -> Settled:
        """Called once the copy is over: release what it used, and return how many chunks are
        right.
        """

    @abstractmethod
    def drop(self) -> None:
        """Release the chunks, which are not needed any more. No copy reads them."""

    def lose(self) -> None:  # noqa: B027 - most stay as they are
        """The chunks are not needed any more, but something may still be reading them."""

    def tokens(self, count: int) -> int:
        """How many tokens its leading `count` chunks bring."""
        return self.copy.tokens(self.first, count)

    @property
    def seconds(self) -> float:
        """Seconds of its share of the copy. Only once that is over."""
        return self.copy.seconds * self.tokens(self.count) / max(self.copy.plan.tokens, 1)


class Source(ABC):
    """One place that a load's chunks come from. In the worker's thread. `prepare` and `launch` wait
    for an answer of the server at most.

    cause: why nothing can come from here now; empty if the chunk is simply not here. may_have:
    whether calling `prepare` makes sense."""

    cause = ""
    may_have = False

    def expects(self, chunk: int) -> bool:
        """Whether this chunk is on its way from here."""
        return False

    def prepare(self, chunk: int) -> bool:
        """Begin to fetch chunks from this number on, if the source needs that. Returns whether any
        are on their way.
        """
        return False

    @abstractmethod
    def launch(self, chunk: int) -> Sequence[Part]:
        """Start the copy of the chunks from this number on that are available now. Returns them,
        in order; none if none are available."""

    def wait(self, seconds: float) -> bool:
        """Wait, at most so long, for what is being fetched. Returns False at once if nothing is."""
        return False

    @abstractmethod
    def cancel(self) -> None:
        """No further chunks are needed: release what is not under way. Idempotent."""


class LoadContext:
    """What the sources of one load share. mark: a point in the model's stream after which the
    places' previous owners have no work queued, so that copies may start there."""

    def __init__(
        self,
        session: Session,
        places: Places,
        keys: list[ChunkKey],
        mark: Mark | None,
        stats: LoadStats,
    ) -> None:
        self.session, self.places, self.keys, self.mark, self.stats = (
            session,
            places,
            keys,
            mark,
            stats,
        )
        self.idle_since = perf_counter()
        """Since when (perf_counter) the load has had nothing to do but wait."""
        self._planned: tuple[int, int, CopyPlan] | None = None
        self.resident: dict[int, ResidentChunk] = {}
        """Chunks that are still to be read from other instances' KV caches, by number."""
        self.fetched: list[int] = []
        """Numbers of the chunks that came from the offload tier."""
        self.epochs: set[int] = set()
        """The epochs in which the offload tier had stored those."""

    def plan(self, chunk: int, count: int) -> CopyPlan:
        """The plan to copy `count` chunks from this number on. The last one is cached."""
        if self._planned is None or self._planned[:2] != (chunk, count):
            with self.session.stats.timed("plan"):
                self._planned = chunk, count, self.places.load_plan(chunk, count)
        return self._planned[2]


@dataclass
class _OffloadedPart(Part):
    epochs: set[int]
    give_back: Callable[[], None]

    def settle(self) -> Settled:
        context, stop, seconds = self.context, self.first + self.count, self.copy.seconds
        self.give_back()
        keys, waited = context.keys[self.first : stop], perf_counter() - context.idle_since
        context.stats.offloaded(self.first, keys, self.tokens(self.count), waited, seconds)
        context.epochs |= self.epochs
        context.fetched += range(self.first, stop)
        return Settled(self.count)

    def drop(self) -> None:
        self.give_back()


def upload(
    context: LoadContext,
    uploader: Uploader,
    first: int,
    chunks: Sequence[Staged],
    give_back: Callable[[], None],
) -> list[Part]:
    """Launch the copy of chunks of the offload tier that are in host memory, from number `first`
    on. give_back: releases that memory; called once nothing reads it any more."""
    count, epochs = len(chunks), {chunk.epoch for chunk in chunks}
    part = _OffloadedPart(context, first, count, epochs, give_back)
    try:
        plan, started = context.plan(first, count), perf_counter()
        moving = uploader.scatter(context.places.kv, plan, chunks, context.mark)
    except VCacheError:
        # After any other error something may still be reading them, so they are never given back.
        part.drop()
        raise
    part.copy = RunningCopy(first, count, plan, moving, started)
    return [part]


class OffloadSource(Source):
    """Reads chunks from the offload tier, run by run, each ahead of its use. After a run that ended
    early it reads nothing more, since another attempt may fail, too."""

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
        stop = (
            next((other for other in range(chunk, len(keys)) if other in resident), len(keys))
            if resident
            else len(keys)
        )
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

    def launch(self, chunk: int) -> list[Part]:
        context, fetch, uploader = self._context, self._fetch, self._context.session.uploader
        if fetch is None or uploader is None or self._next != chunk:
            return []
        staged = fetch.ready(uploader.most)
        if not staged:
            return []
        self._next += len(staged)
        return upload(context, uploader, chunk, staged, lambda: fetch.give_back(staged))

    def wait(self, seconds: float) -> bool:
        if self._fetch is None:
            return False
        self._fetch.wait(seconds)
        return True

    def cancel(self) -> None:
        if self._fetch is not None:
            self._fetch.cancel()
        self._fetch = None
