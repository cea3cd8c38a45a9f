"""The common parts of a load's sources, and the offload tier as a source. The other source is this
node's memory (memory.py)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from vcache_backend.errors import VCacheError
from vcache_backend.protocol.messages import ChunkKey
from vcache_backend.transfer.places import BlockPlaces
from vcache_backend.transfer.session import Session
from vcache_backend.transfer.stats import LoadStats
from vcache_backend.vram_pool.copies.copier import Completion, Mark
from vcache_backend.vram_pool.copies.plan import CopyPlan

if TYPE_CHECKING:
    from vcache_backend.offload.tier import OffloadTier
    from vcache_backend.offload.transfers import Fetch
    from vcache_backend.transfer.resident_runs import ResidentRuns

CAUSES = {"absent": "store_absent", "bad": "store_bad", "timeout": "store_late"}
"""A load's cause, by the cause of a fetch that ended early. All other causes: `store`."""


class Settled(NamedTuple):
    """How many leading chunks are right, and the cause if some are not."""

    chunks: int
    cause: str = ""


@dataclass
class RunningCopy:
    """A running copy into the KV cache: `count` chunks of a load from number `first` on. launched:
    by perf_counter."""

    first: int
    count: int
    plan: CopyPlan
    moving: Completion
    launched: float

    @property
    def seconds(self) -> float:
        """Seconds that the copy took. Only after the copy."""
        seconds = self.moving.seconds
        return perf_counter() - self.launched if seconds is None else seconds

    def tokens(self, first: int, count: int) -> int:
        """How many tokens the copy brings of the `count` chunks from number `first` on."""
        if count == self.count:
            return self.plan.tokens
        start = first - self.first
        begin, end = np.searchsorted(self.plan.blocks[:, 0], (start, start + count))
        return int(end - begin) * self.plan.block_size


@dataclass
class Part(ABC):
    """`count` consecutive chunks of a load, from number `first` on, in one place.

    The chunks stay readable until `settle` or `drop`. `lose` is called instead if nobody can know
    whether the copy is over. copy: the copy of this part, and perhaps of other parts; set by the
    launch."""

    context: LoadContext
    first: int
    count: int
    copy: RunningCopy = field(init=False, repr=False)

    def keep(self) -> None:  # noqa: B027 - most parts need nothing
        """Keep the chunks readable while the copy runs, for example by renewing a lease."""

    @abstractmethod
    def settle(self) -> Settled:
        """Release the chunks after the copy, and return how many of them are right."""

    @abstractmethod
    def drop(self) -> None:
        """Release chunks that are no longer needed. No copy reads them."""

    def lose(self) -> None:  # noqa: B027 - most parts stay as they are
        """Give up chunks that are no longer needed, though a copy may still read them."""

    def tokens(self, count: int) -> int:
        """How many tokens the leading `count` chunks bring."""
        return self.copy.tokens(self.first, count)

    @property
    def seconds(self) -> float:
        """Seconds of this part's share of the copy, by chunks. Only after the copy."""
        return self.copy.seconds * self.count / self.copy.count


@dataclass(eq=False)
class LoadContext:
    """The common state of a load's sources.

    mark: a point in the model's stream behind all work of the places' previous owners, where copies
    may start. idle_since: the time (perf_counter) since which the load only waits. fetched: numbers
    of the chunks from the offload tier. epochs: in which the tier stored them."""

    session: Session
    places: BlockPlaces
    keys: list[ChunkKey]
    mark: Mark | None
    stats: LoadStats
    idle_since: float = field(default_factory=perf_counter)
    fetched: list[int] = field(default_factory=list)
    epochs: set[int] = field(default_factory=set)


def launch(
    context: LoadContext, parts: Sequence[Part], begin: Callable[[CopyPlan], Completion]
) -> None:
    """Plan one copy of these consecutive parts, and start it with `begin`. After a VCacheError no
    part of the copy runs; after another exception, parts may."""
    first, count = parts[0].first, sum(part.count for part in parts)
    try:
        with context.session.stats.timed("plan"):
            plan = context.places.load_plan(first, count)
        started = perf_counter()
        copy = RunningCopy(first, count, plan, begin(plan), started)
    except VCacheError:
        for part in parts:
            part.drop()
        raise
    except BaseException:
        for part in parts:
            part.lose()
        raise
    for part in parts:
        part.copy = copy


@dataclass
class _OffloadedPart(Part):
    epoch: int
    give_back: Callable[[], None]

    def settle(self) -> Settled:
        context, stop, seconds = self.context, self.first + self.count, self.copy.seconds
        self.give_back()
        waited = perf_counter() - context.idle_since
        brought = self.count, self.tokens(self.count), waited, seconds
        context.stats.later(context.stats.offloaded, self.first, *brought)
        context.epochs.add(self.epoch)
        context.fetched += range(self.first, stop)
        return Settled(self.count)

    def drop(self) -> None:
        self.give_back()


class OffloadSource:
    """Reads chunks from the offload tier, run by run, ahead of their use. After a run that ended
    early, reads no more, since another run may fail, too. Runs in the worker's thread.

    cause: why no chunk can come from the tier now; empty if the tier simply lacks the chunk.
    may_have: whether calling `prepare` makes sense."""

    def __init__(
        self, context: LoadContext, tier: OffloadTier, residents: ResidentRuns | None
    ) -> None:
        """residents: chunks for which the tier is not asked."""
        self._context, self.tier, self.may_have = context, tier, True
        self._residents = residents
        self.cause = ""
        self._fetch: Fetch | None = None
        self._next = self._stop = 0

    def expects(self, chunk: int) -> bool:
        """Whether this chunk is being fetched."""
        fetch = self._fetch
        if fetch is None or self._next != chunk:
            return False
        if not fetch.over:
            return True
        if self._next < self._stop:
            self.may_have = False
            self.cause = CAUSES.get(fetch.cause, "store")
        self.cancel()
        return False

    def prepare(self, chunk: int) -> bool:
        """Begin to fetch chunks from this number on. Waits at most for the server's answer. Returns
        whether chunks are being fetched."""
        if not self.may_have or chunk >= len(self._context.keys) or self._fetch is not None:
            return self._fetch is not None
        stop = None if self._residents is None else self._residents.next(chunk)
        if stop == chunk:
            return False
        try:
            fetch = self._context.session.fetch(self._context.keys[chunk:stop])
        except VCacheError as error:
            self._context.session.miss("fetch", error)
            fetch = None
            self.cause = error.cause
        if fetch is None:
            self.may_have = False
            return False
        self._fetch = fetch
        self._next = chunk
        self._stop = chunk + len(fetch.keys)
        return True

    def launch(self, chunk: int) -> Sequence[Part]:
        """Start the copy of the arrived chunks, from this number on. Returns the chunks' part."""
        context, fetch = self._context, self._fetch
        if fetch is None or self._next != chunk or not (arrived := fetch.ready()):
            return []
        self._next += len(arrived)
        give_back = partial(fetch.give_back, arrived)
        part = _OffloadedPart(context, chunk, len(arrived), fetch.epoch, give_back)
        slots, copier = [one.chunk for one in arrived], context.session.copier
        scatter = partial(copier.scatter, context.places.kv, slots=slots, after=context.mark)
        launch(context, [part], scatter)
        return [part]

    def wait(self, seconds: float) -> bool:
        """Wait at most `seconds` for a fetch. False at once if no chunk is being fetched."""
        if self._fetch is None or self._fetch.over:
            return False
        self._fetch.wait(seconds)
        return True

    def cancel(self) -> None:
        """Release chunks that no copy reads. Idempotent."""
        if self._fetch is not None:
            self._fetch.cancel()
        self._fetch = None
