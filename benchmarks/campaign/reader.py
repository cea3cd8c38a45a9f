"""A reader of the campaign in place."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection

from integration.vllm.in_place.replicas import choose
from vcache_backend.errors import VCacheError
from vcache_backend.metadata_server.messages import ChunkKey, Find, Found, ResidentRun
from vcache_backend.resident.neighbours import Neighbours
from vcache_backend.resident.tables import Tables
from vcache_backend.transfer.load import Load
from vcache_backend.transfer.places import BlockPlaces

from .instance import Instance, Owner, Written
from .living import Settings, Slowly, live_as
from .memory import EACH, POISON

SLOW, SLOW_SECONDS = 0.1, 0.01
"""Share of the copies that go block by block, and the most seconds that one pauses in all."""
REMEMBERED = 0.05
"""Share of the look-ups that use an earlier answer; while there is no server, all do."""
OFFLINE_SECONDS = 0.02
PATIENCE_SECONDS = 60.0


class Reader(Instance):
    """Loads chunks, compares them, and publishes its copies for others."""

    def __init__(self, settings: Settings, dice: random.Random) -> None:
        super().__init__(settings, dice)
        self.session.copier = Slowly(self.session.copier, self, SLOW, SLOW_SECONDS)
        self.neighbours = Neighbours(self.client, self.session.device, self.kv, 0)
        self.tables = Tables(self.client)
        self._found: dict[tuple[ChunkKey, ChunkKey], Found] = {}

    def round(self) -> None:
        self.learn()
        keys, outcomes = self.some_prompt(), self.told.outcomes
        found = self._look_up(keys)
        self.step("looked up")
        count, runs = choose(found, self.tables, EACH, 0)
        if not count:
            return
        keys = keys[:count]
        blocks, generations = self.allocate(count)
        # A byte that a copy does not write is noticed.
        self.words[:, blocks] = POISON
        self.step("before launch")
        stats = self.session.stats
        before = stats.counted("chunks_").get("refused", 0)
        load = self._load(keys, blocks, runs)
        loaded = load.run(PATIENCE_SECONDS)
        self.step("behind the verdict")
        outcomes.loads += bool(loaded)
        outcomes.causes[load.cause] += 1
        outcomes.reuse_hits += stats.counted("chunks_").get("refused", 0) > before
        if self.memory.wrong(blocks, keys[:loaded], found.epoch):
            self.loaded_wrong(self._describe(keys[:loaded], blocks, runs, found.epoch))
        elif loaded and found.epoch == self.epoch:
            mine = slice(loaded * EACH)
            self.publish(keys[:loaded], blocks[mine], generations[mine], Written(over=True))
        self.pool.free_blocks(blocks)

    def _load(self, keys: list[ChunkKey], blocks: list[int], runs: Sequence[ResidentRun]) -> Load:
        return Load(
            self.session,
            BlockPlaces(self.kv, self.session.chunk_size, blocks, self.kv.block_size),
            keys,
            mark=self.session.copier.mark(),
            residents=runs,
            neighbours=self.neighbours,
        )

    def _look_up(self, keys: list[ChunkKey]) -> Found:
        asked = keys[0], keys[-1]
        old = self._found.get(asked)
        if old is not None and self.dice.random() < REMEMBERED:
            return old
        try:
            found = self._found[asked] = self.client.find(Find(keys, 1, self.instance))
        except VCacheError:
            # Whoever starts the server again needs the core.
            time.sleep(OFFLINE_SECONDS)
            return old or Found(b"")
        return found

    def _describe(
        self, keys: list[ChunkKey], blocks: list[int], runs: Sequence[ResidentRun], epoch: int
    ) -> str:
        """A description of the first wrong chunk. Call it before anything overwrites the blocks."""
        wrong = [self.memory.wrong(blocks[n * EACH :], [key], epoch) for n, key in enumerate(keys)]
        number = next(n for n, count in enumerate(wrong) if count)
        run = next(run for run in runs if run.first <= number < run.stop).cut(number, number + 1)
        ids = memoryview(run.blocks).cast("I").tolist()
        generations = memoryview(run.generations).cast("Q").tolist()
        view = self.tables.view(run.instance)
        now = "gone" if view is None else view.counters[ids].tolist()
        return (
            f"chunk {number} of {len(keys)}, {wrong[number]} bytes, from {run.instance.hex()}'s "
            f"blocks {ids}, generations {generations}, now {now}"
        )


def live(settings: Settings, pipe: Connection) -> None:
    """The main function of an instance's process."""
    live_as(Owner if settings.role == "owner" else Reader, settings, pipe)
