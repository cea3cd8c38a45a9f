"""Finds chunks that will soon leave vLLM's KV cache, to be saved in the pool."""

from __future__ import annotations

from itertools import chain

import numpy as np
import numpy.typing as npt

from vcache_backend.protocol.messages import ChunkKey, Publish

from ..metadata import StepMetadata
from .block_pool import KVBlocks
from .publications import Publications

AHEAD_STEPS, AHEAD_SHARE = 3, 1 / 8
"""How many steps' worth of blocks at the head of vLLM's free queue are examined; or this share of
the KV cache if that is more, since a load takes more blocks than a step computes.

A step's saves are copied after the step. By then vLLM has planned the next step, with asynchronous
scheduling the next two. So only blocks that later steps take are saved in time."""
MOST_SAVED = 256
"""The most chunks that one step saves."""


class Victims:
    """Saves published chunks at the head of vLLM's free queue: see `plan`. Runs in the scheduler's
    thread.

    The queue is examined again only when a fifth of the examined blocks may be gone; other steps
    cost next to nothing."""

    def __init__(self, publications: Publications, step_blocks: int) -> None:
        """step_blocks: the most blocks that one step fills."""
        self._publications, self._each = publications, publications.each
        self._blocks: KVBlocks | None = None
        count = publications.blocks
        self._need = max(AHEAD_STEPS * step_blocks, int(AHEAD_SHARE * count))
        self._keys: dict[int, ChunkKey] = {}
        self._rows: npt.NDArray[np.uint32] = np.zeros((count, self._each), dtype=np.uint32)
        """By a chunk's first block: all of its blocks."""
        self._first: npt.NDArray[np.intp] = np.zeros(count, dtype=np.intp)
        self._published: npt.NDArray[np.uint64] = np.zeros(count, dtype=np.uint64)
        """By block: the first block of the chunk (`_first`), and the published generation."""
        self._saved: npt.NDArray[np.uint64] = np.zeros(count, dtype=np.uint64)
        """By a chunk's first block: the generation in which the chunk was saved; 0 once a block of
        the chunk was handed out or hit again. (Block 0 is vLLM's null block and in no chunk.)"""
        self._left = 0
        """The least number of examined blocks that are still in the queue."""

    def watch(self, blocks: KVBlocks) -> None:
        """Note vLLM's pool."""
        self._blocks = blocks

    def plan(self, meta: StepMetadata) -> None:
        """Add to `meta` the chunks that the step saves because a later step may overwrite them. The
        step must have all its blocks.

        A chunk is saved once, and again after another use: the pool may have lost the chunk
        meanwhile."""
        if self._blocks is None:
            return
        self._note(meta)
        if self._left < min(self._need, self._blocks.free):
            self._look(meta, self._blocks.head(self._need + self._need // 4))

    # ---- inside

    def _note(self, meta: StepMetadata) -> None:
        fresh = np.fromiter(chain.from_iterable(meta.fresh), dtype=np.intp)
        fresh = fresh[fresh >= 0]  # -1: a block that a load leaves out
        self._left -= len(fresh)
        self._saved[self._first[fresh]] = 0
        for publish in (spec.publish for spec in meta.publications):
            rows = np.frombuffer(publish.blocks, dtype="<u4").reshape(-1, self._each)
            generations = np.frombuffer(publish.generations, dtype="<u8")
            self._published[rows] = generations.reshape(rows.shape)
            self._first[rows] = rows[:, :1]
            self._rows[rows[:, 0]] = rows
            self._keys.update(zip(rows[:, 0].tolist(), publish.keys, strict=True))

    def _look(self, meta: StepMetadata, head: list[int]) -> None:
        """Choose the chunks to save. head: the next blocks that vLLM will hand out."""
        blocks, now = np.array(head, dtype=np.intp), self._publications.generations.counters
        self._left = len(blocks)
        held = np.flatnonzero(self._published[blocks] == now[blocks])
        first, at = np.unique(self._first[blocks[held]], return_index=True)
        order = np.argsort(at)
        first, at = first[order], held[at[order]]
        rows = self._rows[first]
        held_by = (self._first[rows] == first[:, None]) & (self._published[rows] == now[rows])
        whole = held_by.all(axis=1)
        first, at = first[whole], at[whole]
        new = np.flatnonzero(self._saved[first] != now[first])
        if len(new) > MOST_SAVED:
            # The next step saves the rest.
            self._left = int(at[new[MOST_SAVED]])
            new = new[:MOST_SAVED]
        if len(new):
            # vLLM frees a request's last chunk first: save the first chunk first.
            chosen = first[new][::-1]
            self._saved[chosen] = now[chosen]
            rows = self._rows[chosen]
            keys = [self._keys[first_block] for first_block in chosen.tolist()]
            packed = rows.astype("<u4").tobytes(), now[rows].astype("<u8").tobytes()
            own = self._publications
            # A valid generation belongs to the present epoch, as far as the scheduler knows.
            meta.victims = Publish(own.instance, 0, keys, *packed, own.epoch)
