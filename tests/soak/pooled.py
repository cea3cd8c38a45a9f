"""A worker of the soak: an engine that retrieves into poisoned blocks, checks every byte of its
memory, and stores, until it is killed."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection

import numpy as np

from vcache_backend.engine import VCacheEngine
from vcache_backend.errors import VCacheError
from vcache_backend.protocol.messages import ChunkKey
from vcache_backend.transfer import sources
from vcache_backend.vram_pool.copies.copier import HostCopier

from . import memory
from .inplace import OFFLINE_SECONDS, SLOW, SLOW_SECONDS
from .living import Living, Settings, Slowly, live_as
from .memory import BLOCK_SIZE, CHUNK_TOKENS, EACH, MOST_CHUNKS, POISON, Memory

BLOCKS = 2 * MOST_CHUNKS * EACH
FAMILIES = 16
REMOVED = 0.01
"""Share of the rounds that remove a prompt's chunks from the pool."""


class Worker(Living):
    """Every block of its KV cache holds poison between requests."""

    def __init__(self, settings: Settings, dice: random.Random) -> None:
        super().__init__(settings, dice)
        # Nothing is pinned: slots are used again under every slow load.
        sources.PIN_SECONDS = 0.0
        self._memory = Memory(BLOCKS)
        self._memory.words[:] = POISON
        copier = Slowly(HostCopier(), self, SLOW, SLOW_SECONDS)
        self._engine = VCacheEngine(settings.config, self._memory.layout, copier=copier)  # type: ignore[arg-type]
        self._engine.register(self._memory.tensors)
        self._refused = 0
        """Chunks that had changed after their copy, so far."""

    def round(self) -> None:
        dice, engine, words = self.dice, self._engine, self._memory.words
        family = min(dice.randrange(FAMILIES), dice.randrange(FAMILIES))
        tokens = memory.prompt(family, dice.randint(1, MOST_CHUNKS))
        blocks = dice.sample(range(BLOCKS), len(tokens) // BLOCK_SIZE)
        slots = np.add.outer(np.array(blocks) * BLOCK_SIZE, np.arange(BLOCK_SIZE)).ravel()
        keys = engine.keys(tokens)
        mask = engine.retrieve(tokens, None, self._memory.tensors, slots)
        got = int(mask.sum())
        if not bool(mask[:got].all()) or got % CHUNK_TOKENS:
            raise AssertionError(f"what was retrieved is no prefix of chunks: {mask.tolist()}")
        refused = engine._session.stats.counted("reads_").get("refused", 0)
        self.told.outcomes.reuse_hits += refused > self._refused
        self._refused = refused
        self._check(blocks, keys[: got // CHUNK_TOKENS])
        if not (got or engine._session.client.connected):
            # Leave the core to the process that starts the server again.
            time.sleep(OFFLINE_SECONDS)
        words[:, blocks] = memory.contents(keys)
        engine.store(tokens, mask.logical_not(), self._memory.tensors, slots)
        words[:] = POISON
        if dice.random() < REMOVED:
            with suppress(VCacheError):
                engine._session.client.remove(keys)

    def _check(self, blocks: Sequence[int], keys: Sequence[ChunkKey]) -> None:
        """Compare the whole memory with what it must hold: these chunks in the first of the blocks,
        poison elsewhere."""
        outcomes, words, loaded = self.told.outcomes, self._memory.words, len(keys) * EACH
        outcomes.loads += bool(keys)
        # A load that was refused may have left something in the blocks that do not count.
        words[:, blocks[loaded:]] = POISON
        want = words.copy()
        want[:] = POISON
        want[:, blocks[:loaded]] = memory.contents(keys)
        if nbytes := memory.differing(words, want):
            plane, block, word = (int(each[0]) for each in (words != want).nonzero())
            where = f"plane {plane}, block {block}, word {word}"
            self.loaded_wrong(f"{nbytes:,} bytes, the first in {where}")


def live(settings: Settings, pipe: Connection) -> None:
    """The main function of a worker's process."""
    live_as(Worker, settings, pipe)
