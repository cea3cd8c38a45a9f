"""Where a load's chunks come from: this node's memory, and the offload tier.

Memory is read in one way, wherever it lies: find the slots or blocks, copy them, and compare their
generations afterwards (`vram_pool.generations`). A load counts in blocks. Another instance's KV
cache has single blocks, pool and offload tier have chunks of `BlockPlaces.each` blocks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from vcache_backend.errors import VCacheError
from vcache_backend.protocol.messages import NUMBER_BYTES, POOL, ChunkKey, ResidentRun, SlotRun
from vcache_backend.resident.mappings import Neighbour, Neighbours
from vcache_backend.transfer.places import BlockPlaces
from vcache_backend.transfer.session import Session
from vcache_backend.transfer.stats import LoadStats, Origin, Read
from vcache_backend.vram_pool.copies.copier import Completion, Mark
from vcache_backend.vram_pool.copies.geometry import Int64s, PagedKV
from vcache_backend.vram_pool.copies.plan import CopyPlan, chunk_planes, slot_offsets
from vcache_backend.vram_pool.devices import where
from vcache_backend.vram_pool.pool import PoolSegment

if TYPE_CHECKING:
    from vcache_backend.offload.tier import OffloadTier
    from vcache_backend.offload.transfers import Fetch

CHANGED = "changed"
"""The cause of a load that ended because generations had changed after the copy."""
CAUSES = {"absent": "store_absent", "bad": "store_bad", "timeout": "store_late"}
"""A load's cause, by the cause of a fetch that ended early. All other causes: `store`."""
PIN_SECONDS = 0.25
"""How long the server keeps the chunks of a load from eviction: until the copy, which waits for the
steps under way and takes milliseconds, is mostly over. After that a reused slot is a miss."""

OFFLOADED = Origin("store", "chunks_offload", "bytes_offload", "the offload tier")
Run = ResidentRun | SlotRun


class Settled(NamedTuple):
    """How many leading blocks are right, and the cause if some are not."""

    blocks: int
    cause: str = ""


class Place(NamedTuple):
    """Where the pages of a part's blocks begin, and what is known of the memory."""

    planes: Int64s
    """For each plane of the KV cache, see `Copier.pull`. Parts with the same array share it."""
    offsets: Callable[[Int64s, int], Int64s]
    """Called with blocks of the load (`CopyPlan.numbers`), and the number of a kind of layers;
    returns what to add to this kind's `planes`."""
    origin: Origin
    local: bool = False
    """Whether the blocks are on the KV cache's device."""
    host: bool = False
    """Whether the blocks are in host memory that a GPU reads."""
    keep: object = None
    """Keeps the memory mapped."""


@dataclass
class RunningCopy:
    """A running copy of a load's blocks. launched: by perf_counter."""

    plan: CopyPlan
    moving: Completion
    launched: float

    @property
    def seconds(self) -> float:
        """Seconds that the copy took. Only after the copy."""
        seconds = self.moving.seconds
        return perf_counter() - self.launched if seconds is None else seconds


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

    def end(self, chunk: int) -> int:
        """The first block behind the chunks before this one."""
        return min(chunk * self.places.each, self.places.total)

    def launch(self, parts: Sequence[Part]) -> None:
        """Start one copy of these parts, which only unwanted blocks lie between. After a
        VCacheError no part of the copy runs; after another exception, parts may."""
        session = self.session
        try:
            with session.stats.timed("plan"):
                plan = self.places.load_plan(parts[0].first, parts[-1].stop)
            rows, origins = _rows(self.places, plan, parts)
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
        copy = RunningCopy(plan, moving, started)
        for part in parts:
            part.copy = copy


@dataclass(eq=False)
class Part(ABC):
    """The blocks [first, stop) of a load, in one place.

    The blocks stay readable until `settle` or `drop`. Neither is called if nobody can know whether
    the copy is over."""

    context: LoadContext
    first: int
    stop: int
    place: Place
    copy: RunningCopy = field(init=False, repr=False)
    """The copy of this part, and perhaps of other parts; set by the launch."""

    @abstractmethod
    def settle(self) -> Settled:
        """Release the memory after the copy, and return how many blocks are right."""

    @abstractmethod
    def drop(self) -> None:
        """Release memory that is no longer needed. No copy reads it."""

    def brought(self, items: int, stop: int, waited: float | None = None) -> None:
        """Count the blocks before `stop`. items: their chunks, or blocks of another KV cache.
        waited: see `LoadStats.brought`."""
        copy, context, numbers = self.copy, self.context, self.copy.plan.numbers
        places, bounds = context.places, np.array([self.first, stop, self.stop])
        first, end, last = np.searchsorted(numbers, bounds * places.split).tolist()
        read = Read(
            first=self.first,
            stop=stop,
            items=items,
            tokens=places.tokens(numbers[:end]) - places.tokens(numbers[:first]),
            nbytes=(end - first) * context.kv.block_bytes,
            # Its share.
            seconds=copy.seconds * (last - first) / max(len(numbers), 1),
        )
        context.stats.later(context.stats.brought, self.place.origin, read, waited)


def _rows(places: BlockPlaces, plan: CopyPlan, parts: Sequence[Part]) -> tuple[Int64s, Int64s]:
    """The table of a copy, see `Copier.pull`."""
    kinds = range(len(places.kv.kinds))
    rows = np.empty((len(plan.ids), 2 + len(kinds)), dtype=np.int64)
    rows[:, 2] = plan.ids
    origins: dict[int, int] = {}
    bases: list[Int64s] = []
    bounds = np.array([(part.first, part.stop) for part in parts]) * places.split
    for part, (begin, end) in zip(
        parts, np.searchsorted(plan.numbers, bounds).tolist(), strict=True
    ):
        planes, numbers = part.place.planes, plan.numbers[begin:end]
        if id(planes) not in origins:
            origins[id(planes)] = len(bases)
            bases.append(planes)
        rows[begin:end, 0] = origins[id(planes)]
        for kind in kinds:
            rows[begin:end, 2 + kind if kind else 1] = part.place.offsets(numbers, kind)
    return rows, np.stack(bases)


def _in_slots(context: LoadContext, first: int, slots: Int64s, *of: Any) -> Place:
    """slots: the address of each chunk from number `first` on, which lies in one piece. of: the
    rest of the place."""
    kv, size = context.kv, context.session.chunk_size

    def offsets(numbers: Int64s, kind: int) -> Int64s:
        return slot_offsets(kv, size, kind, numbers - first * kv.blocks_in(size), slots)

    return Place(chunk_planes(kv, size), offsets, *of)


def _in_blocks(context: LoadContext, neighbour: Neighbour, run: ResidentRun) -> Place:
    blocks = np.frombuffer(run.blocks, dtype=np.uint32).astype(np.int64)
    split = neighbour.split

    def offsets(numbers: Int64s, kind: int) -> Int64s:
        if split > 1:
            block, inside = np.divmod(numbers, split)
            ids = blocks[block - run.first] * split + inside
        else:
            ids = blocks[numbers - run.first]
        found: Int64s = ids * neighbour.shape.kinds[kind].stride
        return found

    name = f"the KV cache of instance {run.instance.hex()}"
    origin = Origin("resident", "blocks_resident", "bytes_resident", name, run.instance)
    local = neighbour.shape.device == context.session.device.name
    return Place(neighbour.bases, offsets, origin, local)


# ---- this node's memory


@dataclass(eq=False)
class MemoryPart(Part):
    """Blocks in slots of a segment, or in blocks of a neighbour, between `enter` and `leave`."""

    memory: PoolSegment | Neighbour = field(kw_only=True)
    run: Run = field(kw_only=True)

    def settle(self) -> Settled:
        try:
            right = self.memory.right(*_packed(self.run))
        finally:
            self.memory.leave()
        stop = max(_stop(self.context, self.run, right), self.first)
        if right:
            self.brought(right, stop)
        if stop == self.stop:
            return Settled(stop - self.first)
        self.context.stats.changed(self.place.origin, stop, self.stop, _count(self.run) - right)
        return Settled(stop - self.first, CHANGED)

    def drop(self) -> None:
        self.memory.leave()


def _packed(run: Run) -> tuple[bytes, bytes]:
    """The numbers of the run's slots or blocks, and their generations."""
    return run.slots if isinstance(run, SlotRun) else run.blocks, run.generations


def _count(run: Run) -> int:
    return run.chunks if isinstance(run, SlotRun) else len(run.blocks) // NUMBER_BYTES


def _stop(context: LoadContext, run: Run, count: int | None = None) -> int:
    """The load's first block behind the run's leading `count` slots or blocks; all by default."""
    stop = run.first + (_count(run) if count is None else count)
    return context.end(stop) if isinstance(run, SlotRun) else min(stop, context.places.total)


class _Known(NamedTuple):
    """A run, and the blocks [first, stop) of the load that it has."""

    first: int
    stop: int
    run: Run


class MemorySource:
    """Other instances' KV caches and the pool. Runs in the worker's thread.

    Forgets blocks when their copy starts, when they prove to be gone, and when a later block is
    asked for: a load never goes back. cause: why no chunk can come from the pool now; empty if
    the pool simply lacks the chunk."""

    def __init__(
        self,
        context: LoadContext,
        runs: Sequence[Run] = (),
        neighbours: Neighbours | None = None,
    ) -> None:
        """runs: where blocks and chunks are; of several places for a block, the first is tried
        first. Begins to map the KV caches."""
        self._context, self._neighbours = context, neighbours
        self._known = list[_Known]()
        self.extend(runs)
        self._unasked = bool(self._known and context.keys)
        self.cause = ""

    def extend(self, runs: Sequence[Run]) -> None:
        """Further places, to be tried behind those that are known."""
        neighbours = self._neighbours
        for run in runs:
            if isinstance(run, SlotRun):
                self._known.append(self._spanned(run))
            elif neighbours is not None and run.fits():
                self._known.append(self._spanned(run))
                neighbours.expects(run.instance)

    def expects(self, block: int) -> bool:
        """Whether this block's KV cache is still being mapped."""
        known, neighbours = self._at(block), self._neighbours
        if known is None or neighbours is None or isinstance(known.run, SlotRun):
            return False
        return neighbours.expects(known.run.instance)

    def next(self, block: int) -> int | None:
        """Return the first block that is known to be here, from number `block` on."""
        self._forget_before(block)
        return max(block, min(known.first for known in self._known)) if self._known else None

    def has(self, block: int) -> bool:
        """Whether this source is known to have the block, or the pool is still to be asked."""
        return self._unasked or self._at(block) is not None

    def launch(self, block: int) -> Sequence[Part]:
        """Start one copy of the available blocks, from this number on. Returns the blocks' parts.

        Asks the server where the first chunks are in the pool, unless their place is known. The
        copy does not wait for later ones."""
        places, parts, at = self._context.places, list[Part](), block
        try:
            while at < places.total and not self.expects(at):
                part = self._take(at)
                if part is None and not parts and self._ask(block):
                    part = self._take(at)
                if part is None:
                    break
                parts.append(part)
                at = places.after(part.stop)
        except BaseException:
            for part in parts:
                part.drop()
            raise
        if parts:
            self._context.launch(parts)
        return parts

    def cancel(self) -> None:
        """Forget blocks that no copy reads. Idempotent."""
        self._known.clear()

    # ---- inside

    def _spanned(self, run: Run) -> _Known:
        end, stop = self._context.end, _stop(self._context, run)
        return _Known(end(run.first) if isinstance(run, SlotRun) else run.first, stop, run)

    def _forget_before(self, block: int) -> None:
        if any(known.stop <= block for known in self._known):
            self._known = [known for known in self._known if known.stop > block]

    def _at(self, block: int) -> _Known | None:
        """The run to try next for this block."""
        self._forget_before(block)
        return next((known for known in self._known if known.first <= block), None)

    def _take(self, block: int) -> Part | None:
        """Take unchanged blocks of one place, from this number on. Forgets blocks that have changed
        there: another place may have them."""
        context = self._context
        while (known := self._at(block)) is not None and not self.expects(block):
            run = known.run
            first = block // context.places.each if isinstance(run, SlotRun) else block
            here = run.cut(first, run.stop)
            found = self._located(here)
            if found is None:
                self._forget(known, first, _count(here))
                continue
            memory, place = found
            right = memory.right(*_packed(here))
            if not right or not memory.enter():
                self._forget(known, first, max(right, 1))
                continue
            self._forget(known, first + right, int(right < _count(here)))
            these = here.cut(first, first + right)
            stop = _stop(context, these)
            return MemoryPart(context, block, stop, place, memory=memory, run=these)
        return None

    def _forget(self, known: _Known, before: int, lost: int) -> None:
        """Forget the run's slots or blocks before this number, and the next `lost` ones, which are
        gone."""
        run, first = known.run, before + lost
        at = next(at for at, one in enumerate(self._known) if one is known)
        left = [self._spanned(run.cut(first, run.stop))] if first < run.stop else []
        self._known[at : at + 1] = left
        if lost:
            self._context.session.stats.count(reads_stale=lost)

    def _located(self, run: Run) -> tuple[Neighbour | PoolSegment, Place] | None:
        """The memory and the place of a run; None if it cannot be read here."""
        return self._of_segment(run) if isinstance(run, SlotRun) else self._of_neighbour(run)

    def _of_neighbour(self, run: ResidentRun) -> tuple[Neighbour, Place] | None:
        neighbours, context = self._neighbours, self._context
        neighbour = None if neighbours is None else neighbours.get(run.instance)
        if neighbour is None or neighbour.split != context.places.split:
            return None
        return neighbour, _in_blocks(context, neighbour, run)

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
        name = f"the pool on {segment.mapped.device}"
        origin = Origin(tier, "chunks_retrieved", f"bytes_{counter}", name, POOL)
        host = context.kv.device.type != "cpu" and whole.device.type == "cpu"
        addresses = whole.data_ptr() + slots
        return segment, _in_slots(context, run.first, addresses, origin, local, host, whole)

    def _ask(self, block: int) -> bool:
        """Ask the server where in the pool the chunks are, from this block's on, whose place is not
        known. Returns whether it says so of the first."""
        context, session = self._context, self._context.session
        self._unasked, self.cause = False, ""
        wanted = self._lacking(block)
        if not wanted:
            return False
        if not session.client.connected:
            self.cause = "server"
            return False
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
            self._known += map(self._spanned, _renumbered(run, wanted))
        return bool(pinned.runs)

    def _lacking(self, block: int) -> Sequence[int]:
        """The chunk of this block, and the later chunks that are not wholly known."""
        places, count = self._context.places, len(self._context.keys)
        if not count or (chunk := block // places.each) >= count:
            return []
        known = np.zeros(count * places.each, dtype=np.bool_)
        known[places.total :] = True
        for first, stop, _ in self._known:
            known[first:stop] = True
        lacking = np.flatnonzero(~known.reshape(count, -1)[chunk + 1 :].all(axis=1))
        return [chunk, *(chunk + 1 + lacking).tolist()]


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

    chunks: range = field(kw_only=True)
    epoch: int = field(kw_only=True)
    give_back: Callable[[], None] = field(kw_only=True)

    def settle(self) -> Settled:
        context = self.context
        self.give_back()
        self.brought(len(self.chunks), self.stop, perf_counter() - context.idle_since)
        context.epochs.add(self.epoch)
        context.fetched += self.chunks
        return Settled(self.stop - self.first)

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
        """Chunks: the next one of the fetch, and the first one behind it."""

    def expects(self, block: int) -> bool:
        """Whether this block's chunk is being fetched."""
        fetch = self._fetch
        if fetch is None or self._next != block // self._context.places.each:
            return False
        if not fetch.over:
            return True
        if self._next < self._stop:
            self.may_have = False
            self.cause = CAUSES.get(fetch.cause, "store")
        self.cancel()
        return False

    def prepare(self, block: int) -> bool:
        """Begin to fetch chunks from this block's on. Waits at most for the server's answer.
        Returns whether chunks are being fetched."""
        context, each = self._context, self._context.places.each
        chunk = block // each
        lacks = block >= context.places.total or chunk >= len(context.keys)
        if not self.may_have or lacks or self._fetch is not None:
            return self._fetch is not None
        known = self._memory.next(block)
        if known == block:
            return False
        try:
            stop = None if known is None else -(-known // each)
            fetch = context.session.fetch(context.keys[chunk:stop])
        except VCacheError as error:
            context.session.miss("fetch", error)
            fetch = None
            self.cause = error.cause
        if fetch is None:
            self.may_have = False
            return False
        self._fetch = fetch
        self._next = chunk
        self._stop = chunk + len(fetch.keys)
        return True

    def launch(self, block: int) -> Sequence[Part]:
        """Start the copy of the arrived chunks, from this block on. Returns the chunks' part."""
        context, fetch, chunk = self._context, self._fetch, block // self._context.places.each
        if fetch is None or self._next != chunk or not (arrived := fetch.ready()):
            return []
        self._next += len(arrived)
        slots = np.array([one.chunk.address for one in arrived], dtype=np.int64)
        host = context.kv.device.type != "cpu"
        part = OffloadedPart(
            context,
            block,
            context.end(self._next),
            _in_slots(context, chunk, slots, OFFLOADED, False, host),
            chunks=range(chunk, self._next),
            epoch=fetch.epoch,
            give_back=partial(fetch.give_back, arrived),
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
