"""What this instance shares in place, as its scheduler knows it: the generations of its blocks, and which chunks lie in them."""

from __future__ import annotations

import secrets
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from vcache_backend.metadata_server.messages import INSTANCE_BYTES, MAX_PUBLISHED, ChunkKey, Found, Heard, InstanceId
from vcache_backend.resident import pins
from vcache_backend.resident.generations import Generations, GenerationView
from vcache_backend.resident.tables import Tables
from vcache_backend.transfer.resident import ResidentChunk

from .duplicates import Duplicates
from .hints import Hints
from .metadata import PublicationSpec
from .replicas import Replica, choose
from .resident_pool import GENERATIONS, NUMBERS, ResidentPool
from .tracked import NEVER, Tracked

Lies = tuple[Sequence[int], Sequence[int]]
"""A chunk's blocks, and their generations."""


class Publications:
    """In the scheduler's thread. instance: this start of this engine, among all that there ever were. each: vLLM's blocks of a chunk.

    sequence: of the next publication; one of before a reset has a lower one. epoch: the one in which everything was computed that is
    published; `heard`: the one that it is now. hints: what others have read, once vLLM has shown its pool.
    """

    def __init__(self, blocks: int, each: int) -> None:
        """blocks: of vLLM's pool. SegmentError if there is no memory for the table."""
        self.instance = InstanceId(secrets.token_bytes(INSTANCE_BYTES))
        self.blocks, self.each, self.sequence = blocks, each, 1
        self.lead = each
        """Of a chunk's blocks the first ones, which every reader needs."""
        self._places = [1]
        """Of each block table: how many of the places that requests are counted in are one of its blocks."""
        self.epoch = self.heard = 0
        self.generations = Generations(self.instance, blocks)
        self.pins = pins.Pins(self.generations) if pins.possible() else None
        """What readers ask this instance not to hand out."""
        self.retract: Callable[[int], None] = lambda sequence: None
        """Told after a reset: publications of a lower sequence are void."""
        self._told: dict[ChunkKey, Lies] = {}
        """Where the chunks were published last, which is where others look: all of their blocks, and in which generations."""
        self._filling = array(NUMBERS)
        """Blocks that the step that is being planned fills, as far as they are not so in the table yet."""
        self._pool: ResidentPool | None = None
        self.hints: Hints | None = None
        self.duplicates: Duplicates | None = None
        """What others have as well, once vLLM has shown its pool."""
        self.view: Callable[[bytes], GenerationView | None] = lambda instance: None
        """Another instance's generations, once there is a server to ask."""

    @property
    def watches(self) -> bool:
        """Whether vLLM has shown its block pool. What it hands out before is not known to be anybody's."""
        return self._pool is not None

    def watch(self, pool: Any) -> None:
        """pool: vLLM's `BlockPool`. ValueError if it has other blocks than were told."""
        if pool.num_gpu_blocks != self.blocks:
            raise ValueError(f"vLLM's pool has {pool.num_gpu_blocks} blocks, its KV cache {self.blocks}")
        self.duplicates = Duplicates(pool, self.generations, self.each, lambda instance: self.view(instance))
        self._pool = ResidentPool(pool, self.generations, self._reset, self.pins, self.duplicates.give_way)
        self.hints = Hints(pool, self.generations, self.each)

    def reset(self) -> None:
        """Nothing that was computed, or is being computed, is what was asked for any more."""
        self._void_all()
        self._reset()

    def hear(self, heard: Heard) -> None:
        """What the server says, for `learn`. Any thread."""
        self.heard = heard.epoch
        if self.hints is not None:
            self.hints.hear(heard)

    def learn(self) -> bool:
        """Take note of what was heard; True if the namespace was reset. What this instance computed before is not to be found by others,
        however long vLLM's own cache, which nobody has reset, goes on with it."""
        if self.hints is not None:
            self.hints.apply()
        heard = self.heard
        if heard == self.epoch:
            return False
        self._void_all()
        self.epoch = heard
        return True

    def choose(self, tracked: Tracked, found: Found, tables: Tables, first: int) -> tuple[int, dict[int, Replica]]:
        """What others have of the request's chunks from number `first` on: see `replicas.choose`."""
        return choose(found, tables, self.each)

    def read(self, residents: Mapping[int, Replica], chunks: int) -> list[ResidentChunk]:
        """What a load of so many chunks reads of these, which are numbered from its first one on, in as few pieces as one likes."""
        lies: dict[bytes, tuple[list[bytes], list[bytes]]] = {}
        for owner, blocks, generations in residents.values():
            of_owner = lies.setdefault(owner, ([], []))
            of_owner[0].append(blocks)
            of_owner[1].append(generations)
        return [ResidentChunk.unpacked(owner, *map(b"".join, both)) for owner, both in lies.items()]

    def loads(self, tracked: Tracked, first: int) -> None:
        """The request has got all its blocks, and fills the places from number `first` on by a load."""
        if self._pool is not None:
            tracked.loaded, tracked.resets = first, self._pool.resets

    def begin(self, tracked: Tracked, computed: int) -> None:
        """The step, which is planned, is the first with these blocks of the request, as many places of which as `computed` hold its tokens:
        those that it has hit in vLLM's cache, and those that it has loaded.

        vLLM's cache knows blocks even if no step writes them: what no step's plan filled stays void, and nothing behind it is published.
        """
        if self._pool is None:
            return
        loaded, tracked.loaded = tracked.loaded, NEVER
        late = loaded < NEVER and tracked.resets != self._pool.resets
        tracked.resets, tracked.evicted, tracked.filled = self._pool.resets, self._pool.evicted, min(loaded, computed)
        self._fill()
        tracked.generations = [array(GENERATIONS) for _ in tracked.rows]
        if tracked.filled:
            for generations, row, each in zip(tracked.generations, tracked.rows, self._places, strict=True):
                generations.frombytes(self.generations.counters[row[: tracked.filled // each]].tobytes())
        if late or (tracked.filled and not self._right(tracked)):
            tracked.filled = NEVER

    def fill(self, tracked: Tracked, places: int) -> None:
        """The step, which is planned, writes the last of the request's leading `places`: from then on these hold what they stand for."""
        if self._pool is None or not self._counts(tracked):
            return
        coming = array(GENERATIONS, [self.generations.coming])
        for row, generations, each in zip(tracked.rows, tracked.generations, self._places, strict=True):
            filled = row[tracked.filled // each : places // each]
            generations += coming * len(filled)
            self._filling += filled
        tracked.filled = places

    def planned(self) -> None:
        """The step has all blocks that it gets."""
        if self._pool is not None and self.hints is not None:
            self._fill()
            self._pool.planned()
            self.hints.planned()

    def complete(self, tracked: Tracked, first: int, ready: int, loads: bool, loaded: bool) -> list[PublicationSpec]:
        """Publish the request's chunks [first, ready) once the step is over, which has all of their tokens computed; but none that was
        published already, and none behind a block that has got another owner or another meaning since the request got it.

        loads: the step loads, too. loaded: all of these were found, here or elsewhere.
        """
        if self._pool is None or self._pool.broken:
            return []
        self._counts(tracked)
        (row,), (generations,), each, made = tracked.rows, tracked.generations, self.each, list[PublicationSpec]()
        stop = min(ready, len(generations) // each)
        lies = [(row[at : at + each], generations[at : at + each]) for at in range(first * each, stop * each, each)]
        fresh = self._fresh(tracked, enumerate(lies, first))
        before = row[: stop * each].tolist() if loads else []
        for some in (fresh[at : at + MAX_PUBLISHED] for at in range(0, len(fresh), MAX_PUBLISHED)):
            blocks, stand = (b"".join(part) for part in zip(*(one for _, one in some), strict=True))
            made.append(self._spec(tracked, [tracked.keys[chunk] for chunk, _ in some], blocks, stand, before, loaded))
        return made

    def forget(self, tracked: Tracked, first: int) -> None:
        """Nobody knows what was published of the request: publish it again when it is computed, again from place `first` on."""
        for key in tracked.keys:
            self._told.pop(key, None)
        if first < tracked.filled < NEVER:
            for generations, each in zip(tracked.generations, self._places, strict=True):
                del generations[first // each :]
            tracked.filled = first

    def close(self) -> None:
        """Idempotent."""
        pins, self.pins = self.pins, None
        if pins is not None:
            pins.close()
        self.generations.close()

    # ---- inside

    def _fresh(self, tracked: Tracked, lies: Iterable[tuple[int, Lies]]) -> list[tuple[int, Lies]]:
        """Those of the request's chunks, by number, that were not published, or elsewhere later; they are from now on."""
        fresh = [(chunk, one) for chunk, one in lies if self._told.get(tracked.keys[chunk]) != one]
        if len(self._told) > self.blocks:
            # Most of it is gone. What is not is published again when it is hit.
            self._told.clear()
        self._told.update((tracked.keys[chunk], one) for chunk, one in fresh)
        return fresh

    def _fill(self) -> None:
        if self._filling:
            self.generations.filled(self._filling)
            self._filling = array(NUMBERS)

    def _counts(self, tracked: Tracked) -> bool:
        """Whether what the request computes now can be published; not behind a block that somebody has evicted, nor after a reset."""
        assert self._pool is not None
        if tracked.resets != self._pool.resets:
            tracked.generations, tracked.filled = [array(GENERATIONS) for _ in tracked.rows], NEVER
        elif tracked.evicted != self._pool.evicted:
            self._fill()
            tracked.evicted = self._pool.evicted
            if not self._right(tracked):
                tracked.filled = NEVER
        return tracked.filled < NEVER

    def _right(self, tracked: Tracked) -> bool:
        """Whether the request's blocks, as far as they are known, hold what it builds on; what is behind the first that does not is not
        known any more."""
        (row,), (generations,) = tracked.rows, tracked.generations
        there = np.array(generations)
        lost = (self.generations.counters[row[: len(there)]] != there) | (there & np.uint64(1) == 1)
        if lost.any():
            del generations[int(lost.argmax()) :]
            return False
        return True

    def _spec(
        self, tracked: Tracked, keys: list[ChunkKey], blocks: bytes, generations: bytes, before: list[int], loaded: bool
    ) -> PublicationSpec:
        self.sequence += 1
        name, sequence = tracked.request.request_id, self.sequence - 1
        return PublicationSpec(name, keys, blocks, generations, sequence, before, self.epoch, loaded)

    def _void_all(self) -> None:
        (self.generations if self._pool is None else self._pool).void_all()

    def _reset(self) -> None:
        self.retract(self.sequence)
