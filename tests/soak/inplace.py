"""An instance that shares in place, without vLLM: a KV cache that others read, and whose blocks are
constantly handed out and rewritten.

An owner computes chunks. A reader loads them out of others' KV caches, compares each byte, and
publishes its copies. Both stop themselves at any step of the protocol."""

from __future__ import annotations

import random
import secrets
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection

import numpy as np

from vcache_backend.errors import VCacheError
from vcache_backend.protocol.messages import (
    HASH_BYTES,
    INSTANCE_BYTES,
    BlockRun,
    BlockTable,
    ChunkKey,
    Find,
    Found,
    InstanceId,
    Join,
    ResidentRun,
)
from vcache_backend.resident.mappings import Neighbours, Tables
from vcache_backend.resident.own_cache import cache_shape, show_cache
from vcache_backend.transfer.keys import TokenHasher
from vcache_backend.transfer.load import Load
from vcache_backend.transfer.places import BlockPlaces
from vcache_backend.transfer.publisher import Publisher
from vcache_backend.transfer.session import Session
from vcache_backend.vram_pool.copies.copier import Mark
from vcache_backend.vram_pool.exports import HostExportable
from vcache_backend.vram_pool.generations import Generations, UInt64s

from .living import Living, Settings, Slowly, live_as
from .memory import (
    CHUNK_TOKENS,
    EACH,
    FAMILIES,
    MOST_CHUNKS,
    POISON,
    Memory,
    content,
    hashes_of,
    keys_of,
)

BLOCKS = 8 * MOST_CHUNKS * EACH
OFTEN = 20
"""How many times as often an owner stops itself at rare steps."""
SLOW, SLOW_SECONDS = 0.1, 0.01
"""Share of the copies that go block by block, and the most seconds that one pauses in all."""
REMEMBERED = 0.05
"""Share of the look-ups that use an earlier answer; while there is no server, all do."""
OFFLINE_SECONDS = 0.02
"""How long an instance leaves the core to whoever starts the server again."""
PATIENCE_SECONDS = 60.0


@dataclass
class Written:
    """The end of a model's step, which may still be to come."""

    over: bool

    def reached(self) -> bool:
        return self.over

    def wait(self, timeout_s: float) -> bool:
        until = time.monotonic() + timeout_s
        while not self.over and time.monotonic() < until:
            time.sleep(0.001)
        return self.over


class Instance(Living):
    """The KV cache of an instance, its blocks, and its name at the server."""

    def __init__(self, settings: Settings, dice: random.Random) -> None:
        super().__init__(settings, dice)
        self._late = settings.role == "owner" and settings.control == "counted late"
        exportable = HostExportable()
        with exportable.context():
            self.memory = Memory(BLOCKS)
        self.words = self.memory.words
        self.session = Session(settings.config, self.memory.layout, anonymous=True)
        self.kv, self.client = self.session.bind(self.memory.tensors), self.session.client
        self.instance = InstanceId(secrets.token_bytes(INSTANCE_BYTES))
        self.table, self.free = Generations(self.instance, BLOCKS), deque(range(BLOCKS))
        self.table.void_all()
        self.epoch = self._heard = 0
        self.client.on_return.append(self._join)
        self.client.on_beat.append(self._listen)
        with suppress(VCacheError):
            self._join()
        (region,) = exportable.allocations()
        shown = cache_shape(self.kv, region, self.session.device)
        self.shown = show_cache(self.client, self.instance, 0, shown, region)
        self.publisher = Publisher(self.client, self.session.stats, self.instance, 0, BLOCKS)
        self.hasher = TokenHasher(self.session.namespace, CHUNK_TOKENS)

    def _join(self) -> None:
        prefix = self.session.namespace.prefix
        full = [BlockTable("full")]
        self.client.join(Join(self.instance, prefix, BLOCKS, 1, EACH, full), self.table.fd)

    def _listen(self) -> None:
        """Ask for the namespace's epoch; publications of another epoch are refused. The server also
        raises the epoch by itself, if it may have missed a reset."""
        with suppress(VCacheError):
            self._heard = self.client.heartbeat().epoch

    def learn(self) -> None:
        """Void what was computed before a reset."""
        if self._heard != self.epoch:
            self.table.void_all()
            self.epoch = self._heard

    def some_prompt(self) -> list[ChunkKey]:
        """The keys of a random prompt; some prompts are more popular than others."""
        family = min(self.dice.randrange(FAMILIES), self.dice.randrange(FAMILIES))
        return keys_of(self.hasher, family)[: self.dice.randint(1, MOST_CHUNKS)]

    def allocate(self, count: int) -> tuple[list[int], UInt64s]:
        """So many blocks, and their new generations. From here on nobody may believe what they held
        before.
        """
        blocks = [self.free.popleft() for _ in range(count)]
        if self._late:
            return blocks, np.full(len(blocks), self.table.coming, dtype=np.uint64)
        # As beside vLLM's pool; what is published of it is told when they are written.
        self.table.void(blocks)
        self.table.filled(blocks)
        return blocks, self.table.counters[blocks]

    def publish(
        self, keys: list[ChunkKey], blocks: list[int], generations: UInt64s, written: Mark
    ) -> None:
        """Publish these blocks, the first ones of the chunks, once they are written."""
        numbers, counts = np.array(blocks, dtype="<u4"), generations.astype("<u8")
        hashes = hashes_of(keys)[: HASH_BYTES * len(blocks)]
        run = BlockRun(0, numbers.tobytes(), counts.tobytes(), 0, hashes)
        self.publisher.submit([run], self.epoch, written)

    def close(self) -> None:
        self.publisher.close()
        self.shown.close()
        self.table.close()
        self.session.close()


class Owner(Instance):
    """Computes chunk after chunk, more than its blocks can hold."""

    def round(self) -> None:
        self.learn()
        keys = self.some_prompt()
        blocks, generations = self.allocate(len(keys) * EACH)
        self.step("handed out")
        written = Written(self.settings.control == "published early")
        self.publish(keys, blocks, generations, written)
        if written.over:
            # As long as a step of a model may take.
            time.sleep(0.02)
        self._write(keys, blocks)
        if self._late:
            self.table.void(blocks)
            self.table.filled(blocks)
        self.step("before publication")
        written.over = True
        self.free.extend(blocks)
        if not self._late:
            self._mishap(blocks[-EACH:], self.dice.random())
        time.sleep(self.dice.uniform(0, 0.004))

    def _mishap(self, blocks: list[int], chance: float) -> None:
        if chance < 0.02:
            # A load into these blocks failed: they are computed again where they are, and nothing
            # of it is told.
            self.table.void(blocks)
            self.step("evicted", OFTEN)
            self.words[:, blocks] = POISON
        elif chance < 0.025:
            # What is there does not count any more, and here its bytes say so.
            self.table.void_all()
            self.step("reset", OFTEN)
            self.words[:] = POISON
        elif chance < 0.026:
            # As where blocks cannot be counted any more.
            self.table.give_up()
            self.step("given up", OFTEN)
            self.words[:] = POISON
            self.over = True

    def _write(self, keys: list[ChunkKey], blocks: list[int]) -> None:
        """Write the chunks page by page, as slowly as a model would."""
        for number, key in enumerate(keys):
            here = blocks[number * EACH : (number + 1) * EACH]
            for plane, pages in enumerate(content(key, self.epoch)):
                for block, page in zip(here, pages, strict=True):
                    self.words[plane, block] = page
            self.step("writing")
            if self.dice.random() < 0.3:
                time.sleep(0.0003)


class Reader(Instance):
    """Loads blocks, compares them, and publishes its copies for others."""

    def __init__(self, settings: Settings, dice: random.Random) -> None:
        super().__init__(settings, dice)
        self.session.copier = Slowly(self.session.copier, self, SLOW, SLOW_SECONDS)  # type: ignore[assignment]
        self.neighbours = Neighbours(self.client, self.session.device, self.kv, 0)
        self.tables = Tables(self.client)
        self._found: dict[ChunkKey, Found] = {}

    def round(self) -> None:
        self.learn()
        keys, outcomes = self.some_prompt(), self.told.outcomes
        found = self._look_up(keys)
        self.step("looked up")
        count, runs = self._unchanged(found)
        if not count:
            return
        blocks, generations = self.allocate(count)
        # A byte that a copy does not write is noticed.
        self.words[:, blocks] = POISON
        self.step("before launch")
        stats = self.session.stats
        before = stats.counted("reads_").get("refused", 0)
        load = self._load(blocks, runs)
        load.run(PATIENCE_SECONDS)
        loaded = load.filled
        self.step("behind the verdict")
        outcomes.loads += bool(loaded)
        outcomes.causes[load.cause] += 1
        outcomes.reuse_hits += stats.counted("reads_").get("refused", 0) > before
        if wrong := self.memory.wrong(blocks[:loaded], keys, found.epoch):
            self.loaded_wrong(f"{wrong:,} bytes of {loaded} blocks from {runs}")
        elif loaded and found.epoch == self.epoch:
            self.publish(keys, blocks[:loaded], generations[:loaded], Written(over=True))
        self.free.extend(blocks)

    def _unchanged(self, found: Found) -> tuple[int, list[ResidentRun]]:
        """How many leading blocks are unchanged, mostly up to any number, and where."""
        most, count, runs = min(found.end, self.dice.randint(1, 2 * found.end + 1)), 0, []
        while count < most:
            for run in (run for run in found.residents if run.first <= count < run.stop):
                here = run.cut(count, min(run.stop, most))
                if right := self.tables.leading(here):
                    runs.append(here.cut(count, count + right))
                    count += right
                    break
            else:
                break
        return count, runs

    def _load(self, blocks: list[int], runs: Sequence[ResidentRun]) -> Load:
        return Load(
            self.session,
            BlockPlaces(self.kv, self.session.chunk_size, blocks, self.kv.block_size),
            [],
            mark=self.session.copier.mark(),
            runs=runs,
            neighbours=self.neighbours,
        )

    def _look_up(self, keys: list[ChunkKey]) -> Found:
        hashes = hashes_of(keys)
        old = self._found.get(keys[-1])
        if old is not None and self.dice.random() < REMEMBERED:
            return old
        try:
            prefix, limit = self.session.namespace.prefix, len(keys) * EACH
            question = Find(prefix, hashes, EACH, limit, instance=self.instance)
            found = self._found[keys[-1]] = self.client.find(question)
        except VCacheError:
            time.sleep(OFFLINE_SECONDS)
            return old or Found(0, 0)
        return found


def live(settings: Settings, pipe: Connection) -> None:
    """The main function of an instance's process."""
    live_as(Owner if settings.role == "owner" else Reader, settings, pipe)
