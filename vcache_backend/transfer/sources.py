"""Where a load's chunks come from: this node's memory, and the offload tier.

Memory is read in one way, wherever it lies: find the chunks' slots or blocks, copy them, and
compare their generations afterwards (`vram_pool.generations`). A chunk of the pool is one slot, a
chunk in another instance's KV cache is several blocks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from vcache_backend.errors import VCacheError
from vcache_backend.protocol.messages import ChunkKey, ResidentRun, SlotRun
from vcache_backend.resident.mappings import Neighbour, Neighbours
from vcache_backend.transfer.places import BlockPlaces
from vcache_backend.transfer.session import Session
from vcache_backend.transfer.stats import LoadStats, Origin
from vcache_backend.vram_pool.copies.copier import Completion, Mark
from vcache_backend.vram_pool.copies.geometry import Int64s, PagedKV
from vcache_backend.vram_pool.copies.plan import CopyPlan, chunk_planes
from vcache_backend.vram_pool.devices import where
from vcache_backend.vram_pool.pool import PoolSegment

if TYPE_CHECKING:
    from vcache_backend.offload.tier import OffloadTier
    from vcache_backend.offload.transfers import Fetch

CHANGED = "changed"
"""The cause of a load that ended because a chunk's generations had changed after its copy."""
CAUSES = {"absent": "store_absent", "bad": "store_bad", "timeout": "store_late"}
"""A load's cause, by the cause of a fetch that ended early. All other causes: `store`."""
PIN_SECONDS = 0.25
"""How long the server keeps the chunks of a load from eviction: until the copy, which waits for the
steps under way and takes milliseconds, is mostly over. After that a reused slot is a miss."""

OFFLOADED = Origin("store", "offload", "offload", "the offload tier")
Run = ResidentRun | SlotRun


class Settled(NamedTuple):
    """How many leading chunks are right, and the cause if some are not."""

    chunks: int
    cause: str = ""


class Place(NamedTuple):
    """Where the pages of a part's chunks begin, and what is known of the memory."""

    planes: Int64s
    """For each plane of the KV cache, see `Copier.pull`. Parts with the same array share it."""
    offsets: Callable[[Int64s, Int64s, int], Int64s]
    """Called with the blocks' chunks (counted from the part's first), the blocks' offsets in one
    kind's part of a chunk, and the kind's number; returns what to add to `planes`."""
    origin: Origin
    local: bool = False
    """Whether the chunks are on the KV cache's device."""
    host: bool = False
    """Whether the chunks are in host memory that a GPU reads."""
    keep: object = None
    """Keeps the memory mapped."""


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


@dataclass(eq=False)
class LoadContext:
    """The common state of a load's sources."""

    session: Session
    places: BlockPlaces
    keys: list[ChunkKey]
    mark: Mark | None
    """A point in the model's stream behind all work of the places' previous owners, where copies
    may start."""
    stats: LoadStats
    idle_since: float = field(default_factory=perf_counter)
    """The time (perf_counter) since which the load only waits."""
    fetched: list[int] = field(default_factory=list)
    """Numbers of the chunks from the offload tier."""
    epochs: set[int] = field(default_factory=set)
    """In which the tier stored them."""

    @property
    def kv(self) -> PagedKV:
        return self.places.kv

    def launch(self, parts: Sequence[Part]) -> None:
        """Start one copy of these consecutive parts. After a VCacheError no part of the copy runs;
        after another exception, parts may."""
        first, count, session = parts[0].first, sum(part.count for part in parts), self.session
        try:
            with session.stats.timed("plan"):
                plan = self.places.load_plan(first, count)
            rows, origins = _rows(self.kv, plan, parts)
            local, host = (
                all(part.place.local for part in parts),
                any(part.place.host for part in parts),
            )
            started = perf_counter()
            moving = session.copier.pull(
                self.kv, rows, origins, self.mark, tuple(parts), local=local, host=host
            )
        except VCacheError:
            for part in parts:
                part.drop()
            raise
        copy = RunningCopy(first, count, plan, moving, started)
        for part in parts:
            part.copy = copy


@dataclass(eq=False)
class Part(ABC):
    """`count` consecutive chunks of a load, from number `first` on, in one place.

    The chunks stay readable until `settle` or `drop`. Neither is called if nobody can know whether
    the copy is over."""

    context: LoadContext
    first: int
    count: int
    place: Place
    copy: RunningCopy = field(init=False, repr=False)
    """The copy of this part, and perhaps of other parts; set by the launch."""

    @abstractmethod
    def settle(self) -> Settled:
        """Release the chunks after the copy, and return how many of them are right."""

    @abstractmethod
    def drop(self) -> None:
        """Release chunks that are no longer needed. No copy reads them."""

    def brought(self, count: int, waited: float | None = None) -> None:
        """Count the leading `count` chunks. waited: see `LoadStats.brought`."""
        copy, stats = self.copy, self.context.stats
        tokens = copy.tokens(self.first, count)
        seconds = copy.seconds * self.count / copy.count  # its share
        stats.later(stats.brought, self.place.origin, self.first, count, tokens, seconds, waited)


def _rows(kv: PagedKV, plan: CopyPlan, parts: Sequence[Part]) -> tuple[Int64s, Int64s]:
    """The table of a copy, see `Copier.pull`."""
    insides = [plan.offsets(kv, number) for number in range(len(kv.kinds))]
    rows = np.empty((len(plan.blocks), 2 + len(insides)), dtype=np.int64)
    rows[:, 2] = plan.blocks[:, 2]
    numbers: dict[int, int] = {}
    bases: list[Int64s] = []
    chunks = list(accumulate((part.count for part in parts), initial=0))
    bounds = np.searchsorted(plan.blocks[:, 0], chunks).tolist()
    for part, start, begin, end in zip(parts, chunks, bounds, bounds[1:], strict=False):
        planes, offsets = part.place.planes, part.place.offsets
        if id(planes) not in numbers:
            numbers[id(planes)] = len(bases)
            bases.append(planes)
        rows[begin:end, 0] = numbers[id(planes)]
        for number, inside in enumerate(insides):
            rows[begin:end, 2 + number if number else 1] = offsets(
                plan.blocks[begin:end, 0] - start, inside[begin:end], number
            )
    return rows, np.stack(bases)


def _in_slots(context: LoadContext, slots: Int64s, *of: Any) -> Place:
    """slots: the address of each chunk, which lies in one piece. of: the rest of the place."""
    planes = chunk_planes(context.kv, context.session.chunk_size)
    return Place(planes, lambda chunks, inside, kind: slots[chunks] + inside, *of)


def _in_blocks(context: LoadContext, neighbour: Neighbour, run: ResidentRun) -> Place:
    blocks = np.frombuffer(run.blocks, dtype=np.uint32).astype(np.int64)
    parts = blocks[:, None] * neighbour.split + np.arange(neighbour.split)
    ids = parts.reshape(run.chunks, -1)

    def offsets(chunks: Int64s, inside: Int64s, number: int) -> Int64s:
        kv, stride = context.kv.kinds[number], neighbour.shape.kinds[number].stride
        found: Int64s = ids[chunks, inside // (kv.parts * kv.page_bytes)] * stride
        return found

    name = f"the KV cache of instance {run.instance.hex()}"
    origin = Origin("resident", "resident", "resident", name, run.instance)
    local = neighbour.shape.device == context.session.device.name
    return Place(neighbour.bases, offsets, origin, local)


# ---- this node's memory


@dataclass(eq=False)
class MemoryPart(Part):
    """Chunks in slots of a segment, or in blocks of a neighbour, between `enter` and `leave`."""

    memory: PoolSegment | Neighbour = field(kw_only=True)
    run: Run = field(kw_only=True)

    def settle(self) -> Settled:
        try:
            right = self.memory.right(*_packed(self.run))
        finally:
            self.memory.leave()
        if right:
            self.brought(right)
        if right == self.count:
            return Settled(right)
        self.context.stats.changed(self.place.origin, self.first + right, self.count - right)
        return Settled(right, CHANGED)

    def drop(self) -> None:
        self.memory.leave()


def _packed(run: Run) -> tuple[bytes, bytes]:
    """The numbers of the run's slots or blocks, and their generations."""
    return run.slots if isinstance(run, SlotRun) else run.blocks, run.generations


class MemorySource:
    """Other instances' KV caches and the pool. Runs in the worker's thread.

    Forgets a chunk when its copy starts, when the chunk proves to be gone, and when a later chunk
    is asked for: a load never goes back. cause: why no chunk can come from the pool now; empty if
    the pool simply lacks the chunk."""

    def __init__(
        self,
        context: LoadContext,
        runs: Sequence[Run] = (),
        neighbours: Neighbours | None = None,
    ) -> None:
        """runs: where chunks are; of several places for a chunk, the first is tried first. Begins
        to map the KV caches."""
        self._context, self._neighbours = context, neighbours
        self._runs = [run for run in runs if neighbours or not isinstance(run, ResidentRun)]
        self._unasked = bool(self._runs)
        self.cause = ""
        for run in self._runs:
            if isinstance(run, ResidentRun) and neighbours is not None:
                neighbours.expects(run.instance)

    def expects(self, chunk: int) -> bool:
        """Whether this chunk's KV cache is still being mapped."""
        run, neighbours = self._at(chunk), self._neighbours
        if not isinstance(run, ResidentRun) or neighbours is None:
            return False
        return neighbours.expects(run.instance)

    def next(self, chunk: int) -> int | None:
        """Return the first chunk that is known to be here, from number `chunk` on."""
        self._forget_before(chunk)
        return max(chunk, min(run.first for run in self._runs)) if self._runs else None

    def has(self, chunk: int) -> bool:
        """Whether this source is known to have the chunk, or the pool is still to be asked."""
        return self._unasked or self._at(chunk) is not None

    def launch(self, chunk: int) -> Sequence[Part]:
        """Start one copy of the available chunks, from this number on. Returns the chunks' parts.

        Asks the server where the first chunks are in the pool, unless their place is known. The
        copy does not wait for later ones."""
        parts, at = list[Part](), chunk
        try:
            while at < len(self._context.keys) and not self.expects(at):
                part = self._take(at)
                if part is None and not parts and self._ask(chunk):
                    part = self._take(at)
                if part is None:
                    break
                parts.append(part)
                at += part.count
        except BaseException:
            for part in parts:
                part.drop()
            raise
        if parts:
            self._context.launch(parts)
        return parts

    def cancel(self) -> None:
        """Forget chunks that no copy reads. Idempotent."""
        self._runs.clear()

    # ---- inside

    def _forget_before(self, chunk: int) -> None:
        if any(run.stop <= chunk for run in self._runs):
            self._runs = [run for run in self._runs if run.stop > chunk]

    def _at(self, chunk: int) -> Run | None:
        """The run to try next for this chunk."""
        self._forget_before(chunk)
        return next((run for run in self._runs if run.first <= chunk), None)

    def _take(self, chunk: int) -> Part | None:
        """Take unchanged chunks of one place, from this number on. Forgets chunks that have changed
        there: another place may have them."""
        while (run := self._at(chunk)) is not None and not self.expects(chunk):
            here = run.cut(chunk, run.stop)
            found = self._located(here)
            if found is None:
                self._forget(run, chunk, here.chunks)
                continue
            memory, place = found
            right = memory.right(*_packed(here))
            if not right or not memory.enter():
                self._forget(run, chunk, max(right, 1))
                continue
            self._forget(run, chunk + right, int(right < here.chunks))
            these = here.cut(chunk, chunk + right)
            return MemoryPart(self._context, chunk, right, place, memory=memory, run=these)
        return None

    def _forget(self, run: Run, before: int, lost: int) -> None:
        """Forget the run's chunks before this number, and the next `lost` ones, which are gone."""
        at, first = next(at for at, one in enumerate(self._runs) if one is run), before + lost
        self._runs[at : at + 1] = [run.cut(first, run.stop)] if first < run.stop else []
        if lost:
            self._context.session.stats.count(chunks_stale=lost)

    def _located(self, run: Run) -> tuple[Neighbour | PoolSegment, Place] | None:
        """The memory and the place of a run; None if it cannot be read here."""
        return self._of_segment(run) if isinstance(run, SlotRun) else self._of_neighbour(run)

    def _of_neighbour(self, run: ResidentRun) -> tuple[Neighbour, Place] | None:
        neighbours, context = self._neighbours, self._context
        neighbour = None if neighbours is None else neighbours.get(run.instance)
        here = context.kv.blocks_in(context.session.chunk_size)
        if neighbour is None or neighbour.each * neighbour.split != here:
            return None
        fits = run.fits(neighbour.each)
        return (neighbour, _in_blocks(context, neighbour, run)) if fits else None

    def _of_segment(self, run: SlotRun) -> tuple[PoolSegment, Place] | None:
        context, device = self._context, self._context.session.device
        segment = context.session.pool.segment(run.segment)
        nbytes = context.kv.chunk_bytes(context.session.chunk_size)
        slots = None if segment is None else segment.slot_offsets(run, nbytes)
        if segment is None or slots is None:
            self.cause = "segment"
            return None
        whole, local = segment.mapped.whole, segment.local
        tier, counter = where(device, device.name if local else ""), "own" if local else "peer"
        origin = Origin(tier, "retrieved", counter, f"the pool on {segment.mapped.device}")
        host = context.kv.device.type != "cpu" and whole.device.type == "cpu"
        addresses = whole.data_ptr() + slots
        return segment, _in_slots(context, addresses, origin, local, host, whole)

    def _ask(self, chunk: int) -> bool:
        """Ask the server where in the pool the chunks are, from this number on, whose place is not
        known. Returns whether it says so of the first."""
        context, session = self._context, self._context.session
        self._unasked, self.cause = False, ""
        if not session.client.connected:
            self.cause = "server"
            return False
        wanted: Sequence[int] = range(chunk, len(context.keys))
        if self._runs:
            known = np.zeros(len(context.keys), dtype=np.bool_)
            for run in self._runs:
                known[run.first : run.stop] = True
            wanted = [chunk, *(chunk + 1 + np.flatnonzero(~known[chunk + 1 :])).tolist()]
        started = perf_counter()
        try:
            with session.stats.timed("pin"):
                pinned = session.client.pin([context.keys[one] for one in wanted], PIN_SECONDS)
        except VCacheError as error:
            session.miss("pin", error)
            self.cause = error.cause
            return False
        finally:
            context.stats.metadata_seconds += perf_counter() - started
        for run in pinned.runs:
            self._runs += _renumbered(run, wanted)
        return bool(pinned.runs)


def _renumbered(run: SlotRun, numbers: Sequence[int]) -> list[SlotRun]:
    """Split a run at gaps: its chunk `i` is number `numbers[i]` of the load."""
    here, first = np.array(numbers[run.first : run.stop]), run.first
    ends = [*(np.flatnonzero(np.diff(here) != 1) + 1).tolist(), len(here)]
    starts = [0, *ends[:-1]]
    return [
        run.cut(first + start, first + end).numbered(int(here[start]))
        for start, end in zip(starts, ends, strict=True)
    ]


# ---- the offload tier


@dataclass(eq=False)
class OffloadedPart(Part):
    """Chunks that have arrived in the tier's buffers."""

    epoch: int = field(kw_only=True)
    give_back: Callable[[], None] = field(kw_only=True)

    def settle(self) -> Settled:
        context = self.context
        self.give_back()
        self.brought(self.count, perf_counter() - context.idle_since)
        context.epochs.add(self.epoch)
        context.fetched += range(self.first, self.first + self.count)
        return Settled(self.count)

    def drop(self) -> None:
        self.give_back()


class OffloadSource:
    """Reads chunks from the offload tier, run by run, ahead of their use. After a run that ended
    early, reads no more, since another run may fail, too. Runs in the worker's thread.

    cause: why no chunk can come from the tier now; empty if the tier simply lacks the chunk.
    may_have: whether calling `prepare` makes sense."""

    def __init__(self, context: LoadContext, tier: OffloadTier, memory: MemorySource) -> None:
        """memory: the tier is not asked for chunks that are known to be there."""
        self._context, self.tier, self.may_have = context, tier, True
        self._memory = memory
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
        stop = self._memory.next(chunk)
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
        slots = np.array([one.chunk.address for one in arrived], dtype=np.int64)
        host = context.kv.device.type != "cpu"
        place = _in_slots(context, slots, OFFLOADED, False, host)
        give_back = partial(fetch.give_back, arrived)
        part = OffloadedPart(
            context, chunk, len(arrived), place, epoch=fetch.epoch, give_back=give_back
        )
        context.launch([part])
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
