"""Where a load's blocks come from: this node's memory. The offload tier: offloaded.py.

Memory is read in one way, wherever it lies: find the slots or blocks, copy them, and compare their
generations afterwards (`vram_pool.generations`). A load counts in blocks. Another instance's KV
cache has single blocks, pool and offload tier have chunks of `BlockPlaces.each` blocks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import NamedTuple

import numpy as np

from vcache_backend.errors import VCacheError
from vcache_backend.protocol.messages import NUMBER_BYTES, POOL, ChunkKey, ResidentRun, SlotRun
from vcache_backend.resident.mappings import Neighbours
from vcache_backend.transfer.places import BlockPlaces
from vcache_backend.transfer.session import Session
from vcache_backend.transfer.stats import LoadStats, Origin, Read
from vcache_backend.vram_pool.copies.copier import Completion, CopyJob, Mark
from vcache_backend.vram_pool.copies.geometry import (
    Int64s,
    PagedKV,
    Pages,
    copy_rows,
    in_blocks,
    in_chunks,
)
from vcache_backend.vram_pool.generations import GenerationView

CHANGED = "changed"
"""The cause of a load that ended because generations had changed after the copy."""
PIN_SECONDS = 0.25
"""How long the server keeps the chunks of a load from eviction: until the copy, which waits for the
steps under way and takes milliseconds, is mostly over. After that a reused slot is a miss."""
Run = ResidentRun | SlotRun


class Place(NamedTuple):
    """Where a part's blocks are, and what is known of the memory."""

    pages: Pages
    origin: Origin
    local: bool = False
    """Whether the blocks are on the KV cache's device."""
    host: bool = False
    """Whether the blocks are in host memory that a GPU reads."""
    keep: object = None
    """Keeps the memory mapped."""


@dataclass(eq=False)
class LoadContext:
    """The part of a load that its sources use."""

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

    def begin_copy(self, parts: Sequence[Part]) -> None:
        """Start one copy of these parts, which only unwanted blocks lie between. After a
        VCacheError no part of the copy runs; after another exception, parts may."""
        session, places, split = self.session, self.places, self.places.split
        with session.stats.timed("plan"):
            plan = places.load_plan(parts[0].first, parts[-1].stop)
        spans = [(part.place.pages, part.first * split, part.stop * split) for part in parts]
        job = CopyJob(
            self.kv,
            *copy_rows(self.kv, plan, spans),
            keep=[part.place.keep for part in parts],
            local=all(part.place.local for part in parts),
            host=any(part.place.host for part in parts),
        )
        started = perf_counter()
        copy = self.pull(job)
        for part in parts:
            part.copy, part.launched, part.numbers = copy, started, plan.numbers

    def pull(self, job: CopyJob) -> Completion:
        """Start a copy into the KV cache."""
        return self.session.copier.copy(job, self.mark)


@dataclass(eq=False)
class Part(ABC):
    """The blocks [first, stop) of a load, in one place.

    Neither `settle` nor `drop` is called if nobody can know whether the copy is over."""

    context: LoadContext
    first: int
    stop: int
    place: Place
    copy: Completion = field(init=False, repr=False)
    """The copy of this part, and perhaps of other parts. The launch sets this and what follows."""
    launched: float = field(init=False)
    """By perf_counter."""
    numbers: Int64s = field(init=False, repr=False)
    """All blocks of the copy (`CopyPlan.numbers`)."""

    @abstractmethod
    def settle(self) -> tuple[int, str]:
        """After the copy: return how many leading blocks are right, and the cause if not all are.
        Release the memory."""

    def drop(self) -> None:  # noqa: B027 - mapped memory goes with the last reference
        """Release memory that is no longer needed. No copy reads it."""

    def brought(self, items: int, stop: int, waited: float | None = None) -> None:
        """Count the blocks before `stop`. items: their chunks, or blocks of another KV cache.
        waited: see `Read`."""
        seconds = self.copy.seconds
        if seconds is None:
            seconds = perf_counter() - self.launched
        bounds = self.first, stop, self.stop
        read = Read(self.place.origin, bounds, items, self.numbers, seconds, waited)
        self.context.stats.brought.append(read)


# ---- this node's memory


class _Known:
    """A run, and the blocks [first, stop) of the load that it has, `each` of them in a slot or
    block of the run."""

    def __init__(self, context: LoadContext, run: Run) -> None:
        pooled, total = isinstance(run, SlotRun), context.places.total
        self.context, self.run = context, run
        self.each = context.places.each if pooled else 1
        self.numbers = run.blocks
        self.count = len(self.numbers) // NUMBER_BYTES
        self.first = min(run.first * self.each, total)
        self.stop = min((run.first + self.count) * self.each, total)

    def cut(self, first: int, stop: int) -> _Known:
        """The slots or blocks [first, stop) of this run, counted from its first one."""
        begin = self.run.first
        return _Known(self.context, self.run.cut(begin + first, begin + stop))

    def after(self, count: int) -> int:
        """The load's first block behind the leading `count` slots or blocks."""
        return min((self.run.first + count) * self.each, self.stop)


@dataclass(eq=False)
class MemoryPart(Part):
    """Blocks in slots of a segment, or in blocks of a neighbour."""

    view: GenerationView = field(kw_only=True)
    known: _Known = field(kw_only=True)

    def settle(self) -> tuple[int, str]:
        known = self.known
        right = self.view.leading(known.numbers, known.run.generations)
        stop = max(known.after(right), self.first)
        if right:
            self.brought(right, stop)
        if stop == self.stop:
            return stop - self.first, ""
        self.context.stats.changed(self.place.origin, stop, self.stop, known.count - right)
        return stop - self.first, CHANGED


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
                self._known.append(_Known(self._context, run))
            elif neighbours is not None and run.fits():
                self._known.append(_Known(self._context, run))
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
        while at < places.total and not self.expects(at):
            part = self._take(at)
            if part is None and not parts and self._ask(block):
                part = self._take(at)
            if part is None:
                break
            parts.append(part)
            at = places.after(part.stop)
        if parts:
            self._context.begin_copy(parts)
        return parts

    def cancel(self) -> None:
        """Forget blocks that no copy reads. Idempotent."""
        self._known.clear()

    # ---- inside

    def _forget_before(self, block: int) -> None:
        if any(known.stop <= block for known in self._known):
            self._known = [known for known in self._known if known.stop > block]

    def _at(self, block: int) -> _Known | None:
        """The run to try next for this block."""
        self._forget_before(block)
        return next((known for known in self._known if known.first <= block), None)

    def _take(self, block: int) -> Part | None:
        """Take unchanged blocks of one place, from this number on. Forgets them, and blocks that
        have changed there: another place may have those."""
        context = self._context
        while (known := self._at(block)) is not None and not self.expects(block):
            here = known.cut(block // known.each - known.run.first, known.count)
            found, right, gone = self._located(here.run), 0, here.count
            if found is not None:
                right = found[0].leading(here.numbers, here.run.generations)
                gone = int(right < here.count)
            at, left = self._known.index(known), right + gone < here.count
            self._known[at : at + 1] = [here.cut(right + gone, here.count)] if left else []
            if gone:
                context.session.stats.count(reads_stale=gone)
            if found is not None and right:
                taken, (view, place) = here.cut(0, right), found
                return MemoryPart(context, block, taken.stop, place, view=view, known=taken)
        return None

    def _located(self, run: Run) -> tuple[GenerationView, Place] | None:
        """The generations and the place of a run; None if it cannot be read here."""
        return self._of_segment(run) if isinstance(run, SlotRun) else self._of_neighbour(run)

    def _of_neighbour(self, run: ResidentRun) -> tuple[GenerationView, Place] | None:
        neighbours, context = self._neighbours, self._context
        neighbour = None if neighbours is None else neighbours.get(run.instance)
        if neighbour is None or neighbour.split != context.places.split:
            return None
        shape, blocks = neighbour.shape, np.frombuffer(run.blocks, dtype=np.uint32)
        strides = [kind.stride for kind in shape.kinds]
        pages = in_blocks(
            neighbour.bases, strides, blocks.astype(np.int64), run.first, neighbour.split
        )
        name = f"the KV cache of instance {run.instance.hex()}"
        origin = Origin("resident", "blocks_resident", "bytes_resident", name, run.instance)
        local = shape.device == context.session.device.name
        return neighbour.view, Place(pages, origin, local, keep=neighbour)

    def _of_segment(self, run: SlotRun) -> tuple[GenerationView, Place] | None:
        context, session = self._context, self._context.session
        segment, device = session.pool.segment(run.segment), session.device
        nbytes = context.kv.chunk_bytes(session.chunk_size)
        slots = None if segment is None else segment.slot_offsets(run, nbytes)
        if segment is None or slots is None:
            self.cause = "segment"
            return None
        whole, local = segment.whole, segment.local
        counter = "own" if local else "peer"
        # Without a GPU, host memory of another name counts as a peer.
        on_host = device.medium == "host" and (device.ordinal is not None or local)
        tier = "host" if on_host else counter
        name = f"the pool on {segment.device}"
        origin = Origin(tier, "chunks_retrieved", f"bytes_{counter}", name, POOL)
        host = context.kv.device.type != "cpu" and whole.device.type == "cpu"
        pages = in_chunks(context.kv, session.chunk_size, whole.data_ptr() + slots, run.first)
        return segment.view, Place(pages, origin, local, host, whole)

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
            self._known += [_Known(context, part) for part in _renumbered(run, wanted)]
        return bool(pinned.runs)

    def _lacking(self, block: int) -> Sequence[int]:
        """The chunk of this block, and the later chunks that are not wholly known."""
        places, count = self._context.places, len(self._context.keys)
        if not count or (chunk := block // places.each) >= count:
            return []
        known = np.zeros(count * places.each, dtype=np.bool_)
        known[places.total :] = True
        for one in self._known:
            known[one.first : one.stop] = True
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
