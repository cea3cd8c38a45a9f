"""Sharing in place, the scheduler's half: the generations of this instance's blocks, and which
chunks are published in them.
"""

from __future__ import annotations

import secrets
from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from vcache_backend.metadata_server.messages import (
    INSTANCE_BYTES,
    MAX_PUBLISHED,
    ChunkKey,
    Found,
    Heard,
    InstanceId,
)
from vcache_backend.resident.generations import Generations, GenerationView
from vcache_backend.resident.tables import Tables

from .duplicates import Duplicates
from .hints import Hints
from .metadata import PublicationSpec
from .replicas import Replica, choose
from .resident_pool import GENERATIONS, NUMBERS, ResidentPool
from .tracked import NEVER, Tracked

Lies = tuple[Sequence[int], Sequence[int]]
"""A chunk's blocks, and their generations."""


class Publications:
    """In the scheduler's thread, except `hear`.

    instance: a random name for this start of this engine. each: vLLM's blocks of a chunk. sequence:
    the next publication's; a reset voids all lower ones. epoch: that of all that is published.
    heard: the namespace's epoch by the server's latest word. hints: None until vLLM has shown its
    pool."""

    def __init__(self, blocks: int, each: int) -> None:
        """blocks: those of vLLM's pool. each: vLLM's blocks of a chunk. SegmentError if there is no
        memory for the table.
        """
        self.instance = InstanceId(secrets.token_bytes(INSTANCE_BYTES))
        self.blocks, self.each, self.sequence = blocks, each, 1
        self.epoch = self.heard = 0
        self.generations = Generations(self.instance, blocks)
        self.retract: Callable[[int], None] = lambda sequence: None
        """Called on a reset: publications with a lower sequence are void."""
        self._told: dict[ChunkKey, Lies] = {}
        """Where each chunk was published last, which is where others look for it: its blocks and
        their generations.
        """
        self._filling = array(NUMBERS)
        """Blocks that the step being planned fills, and that the table does not show as filled
        yet.
        """
        self._pool: ResidentPool | None = None
        self.hints: Hints | None = None
        self.duplicates: Duplicates | None = None
        """None until vLLM has shown its pool."""
        self.view: Callable[[bytes], GenerationView | None] = lambda instance: None
        """Another instance's generations; None if it is gone, or no server is known yet."""

    @property
    def watches(self) -> bool:
        """Whether vLLM has shown its block pool. Without it, it is not known what the blocks
        hold.
        """
        return self._pool is not None

    def watch(self, pool: Any) -> None:
        """vLLM shows its `BlockPool`, before the first request. ValueError if its number of blocks
        is not the KV cache's.
        """
        if pool.num_gpu_blocks != self.blocks:
            raise ValueError(
                f"vLLM's pool has {pool.num_gpu_blocks} blocks, its KV cache {self.blocks}"
            )
        self.duplicates = Duplicates(
            pool, self.generations, self.each, lambda instance: self.view(instance)
        )
        self._pool = ResidentPool(pool, self.generations, self._reset, self.duplicates.give_way)
        self.hints = Hints(pool, self.generations, self.each)

    def reset(self) -> None:
        """Void all that was published, and all that the steps under way compute."""
        self._void_all()
        self._reset()

    def hear(self, heard: Heard) -> None:
        """Note what the server says, for the next `learn`. Any thread."""
        self.heard = heard.epoch
        if self.hints is not None:
            self.hints.hear(heard)

    def learn(self) -> bool:
        """Act on what was heard; True if the namespace was reset.

        After a reset others no longer find what this instance computed before it, though vLLM's own
        cache may still hit it."""
        if self.hints is not None:
            self.hints.apply()
        heard = self.heard
        if heard == self.epoch:
            return False
        self._void_all()
        self.epoch = heard
        return True

    def choose(self, found: Found, tables: Tables) -> tuple[int, dict[int, Replica]]:
        """See `replicas.choose`."""
        return choose(found, tables, self.each)

    def loads(self, tracked: Tracked, first: int) -> None:
        """A load will fill the request's blocks from number `first` on; the request has them
        all.
        """
        if self._pool is not None:
            tracked.loaded, tracked.resets = first, self._pool.resets

    def begin(self, tracked: Tracked, computed: int) -> None:
        """The step being planned is the first with these blocks of the request.

        computed: how many blocks hold its tokens already, from a hit in vLLM's cache or a load.
        vLLM's cache may also name blocks that no step has filled: these stay void, and nothing
        behind them is published."""
        if self._pool is None:
            return
        loaded, tracked.loaded = tracked.loaded, NEVER
        late = loaded < NEVER and tracked.resets != self._pool.resets
        tracked.resets, tracked.evicted, tracked.filled = (
            self._pool.resets,
            self._pool.evicted,
            min(loaded, computed),
        )
        self._fill()
        tracked.generations = array(GENERATIONS)
        if tracked.filled:
            known = self.generations.counters[tracked.rows[0][: tracked.filled]]
            tracked.generations.frombytes(known.tobytes())
        if late or (tracked.filled and not self._right(tracked)):
            tracked.filled = NEVER

    def fill(self, tracked: Tracked, blocks: int) -> None:
        """The step being planned fills the request's blocks up to number `blocks`."""
        if self._pool is None or not self._counts(tracked):
            return
        filled = tracked.rows[0][tracked.filled : blocks]
        tracked.generations += array(GENERATIONS, [self.generations.coming]) * len(filled)
        self._filling += filled
        tracked.filled = blocks

    def planned(self) -> None:
        """The step is planned, and has got all its blocks: show others what it fills."""
        if self._pool is not None and self.hints is not None:
            self._fill()
            self.hints.planned()

    def complete(
        self, tracked: Tracked, first: int, ready: int, loaded: bool
    ) -> list[PublicationSpec]:
        """What to publish of the request's chunks [first, ready) once the step that completes them
        is over.

        Leaves out chunks that were published already, and those behind a block that was handed out
        or voided since the request got it. loaded: the request loaded or hit all of these
        chunks."""
        if self._pool is None or self._pool.broken:
            return []
        self._counts(tracked)
        row, generations, each = tracked.rows[0], tracked.generations, self.each
        made = list[PublicationSpec]()
        stop = min(ready, len(generations) // each)
        lies = [
            (row[at : at + each], generations[at : at + each])
            for at in range(first * each, stop * each, each)
        ]
        fresh = self._fresh(tracked, enumerate(lies, first))
        for some in (fresh[at : at + MAX_PUBLISHED] for at in range(0, len(fresh), MAX_PUBLISHED)):
            blocks, stand = (b"".join(part) for part in zip(*(one for _, one in some), strict=True))
            made.append(
                self._spec(
                    tracked,
                    [tracked.keys[chunk] for chunk, _ in some],
                    blocks,
                    stand,
                    loaded,
                )
            )
        return made

    def forget(self, tracked: Tracked, first: int) -> None:
        """Forget what was published of the request, of which vLLM recomputes the blocks from number
        `first` on: publish it all again.
        """
        for key in tracked.keys:
            self._told.pop(key, None)
        if first < tracked.filled < NEVER:
            del tracked.generations[first:]
            tracked.filled = first

    def close(self) -> None:
        """Idempotent."""
        self.generations.close()

    # ---- inside

    def _fresh(self, tracked: Tracked, lies: Iterable[tuple[int, Lies]]) -> list[tuple[int, Lies]]:
        """Those of the request's chunks, by number, that are not published at this place yet. They
        count as published from now on.
        """
        fresh = [(chunk, one) for chunk, one in lies if self._told.get(tracked.keys[chunk]) != one]
        if len(self._told) > self.blocks:
            # Most of these chunks are gone. The others are published again when they are hit.
            self._told.clear()
        self._told.update((tracked.keys[chunk], one) for chunk, one in fresh)
        return fresh

    def _fill(self) -> None:
        if self._filling:
            self.generations.filled(self._filling)
            self._filling = array(NUMBERS)

    def _counts(self, tracked: Tracked) -> bool:
        """Whether what the request computes now can be published: not after a reset, nor behind a
        block that was evicted.
        """
        assert self._pool is not None
        if tracked.resets != self._pool.resets:
            tracked.generations, tracked.filled = array(GENERATIONS), NEVER
        elif tracked.evicted != self._pool.evicted:
            self._fill()
            tracked.evicted = self._pool.evicted
            if not self._right(tracked):
                tracked.filled = NEVER
        return tracked.filled < NEVER

    def _right(self, tracked: Tracked) -> bool:
        """Whether the request's known blocks still hold what it builds on. Forgets the first one
        that does not, and those behind it.
        """
        row, generations = tracked.rows[0], tracked.generations
        there = np.array(generations)
        lost = (self.generations.counters[row[: len(there)]] != there) | (there & np.uint64(1) == 1)
        if lost.any():
            del generations[int(lost.argmax()) :]
            return False
        return True

    def _spec(
        self,
        tracked: Tracked,
        keys: list[ChunkKey],
        blocks: bytes,
        generations: bytes,
        loaded: bool,
    ) -> PublicationSpec:
        self.sequence += 1
        name, sequence = tracked.request.request_id, self.sequence - 1
        return PublicationSpec(name, keys, blocks, generations, sequence, self.epoch, loaded)

    def _void_all(self) -> None:
        (self.generations if self._pool is None else self._pool).void_all()

    def _reset(self) -> None:
        self.retract(self.sequence)
