"""A reader of the in-place campaign; and the main function of both kinds of instance."""

from __future__ import annotations

import os
import random
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from integration.vllm.in_place.replicas import Replica, by_chunk, choose
from vcache_backend.errors import VCacheError
from vcache_backend.metadata_server.messages import ChunkKey, Find, Found
from vcache_backend.resident.neighbours import Neighbours
from vcache_backend.resident.tables import Tables
from vcache_backend.transfer import pooled, resident
from vcache_backend.transfer.load import Load
from vcache_backend.transfer.places import BlockPlaces
from vcache_backend.transfer.resident import ResidentChunk
from vcache_backend.transfer.sources import Settled
from vcache_backend.vram_pool.copies.copier import Completion, Copier
from vcache_backend.vram_pool.paged import Int64s, PagedKV

from ..forked import begin
from .instance import (
    EACH,
    POISON,
    Instance,
    Outcomes,
    Owner,
    Settings,
    Told,
    Written,
    what,
)

SLOW, SLOW_SECONDS = 0.1, 0.01
"""Share of the copies that go block by block, and the most seconds that one pauses in all."""
REMEMBERED = 0.05
"""Share of the look-ups that use an earlier answer; while there is no server, all do."""
REPORT_SECONDS = 0.2
OFFLINE_SECONDS = 0.02
PATIENCE_SECONDS = 60.0


class Reader(Instance):
    """Loads chunks, compares them, and publishes its copies for others."""

    each = EACH

    def __init__(self, settings: Settings, dice: random.Random) -> None:
        super().__init__(settings, dice)
        self.session.copier = Slowly(self.session.copier, self, SLOW, SLOW_SECONDS)
        if settings.control == "no verdict":
            believe_copies()
        self.neighbours = Neighbours(self.client, self.session.device, self.kv, 0)
        self.tables = Tables(self.client)
        self._found: dict[tuple[ChunkKey, ChunkKey], Found] = {}

    def round(self) -> None:
        keys, outcomes = self.some_prompt(), self.told.outcomes
        found = self._look_up(keys)
        self.step("looked up")
        count, runs = choose(found, self.tables, self.each)
        chosen = by_chunk(runs)
        count = self.checkable(count, chosen)
        if not count:
            outcomes.misses += 1
            return
        keys = keys[:count]
        residents = {
            number: ResidentChunk.unpacked(*replica)
            for number, replica in chosen.items()
            if number < count
        }
        blocks, generations = self.allocate(count)
        self.poison(blocks)
        self.step("before launch")
        before = self.session.stats.counted("chunks_")
        places = BlockPlaces(self.kv, self.session.chunk_size, blocks, self.kv.block_size)
        load = Load(
            self.session,
            places,
            keys,
            mark=self.session.copier.mark(),
            residents=residents,
            neighbours=self.neighbours,
        )
        loaded = load.run(PATIENCE_SECONDS)
        self.step("behind the verdict")
        after = self.session.stats.counted("chunks_")
        stale, refused = (after.get(name, 0) - before.get(name, 0) for name in ("stale", "refused"))
        outcomes.loads += bool(loaded)
        outcomes.chunks += loaded
        outcomes.nbytes += loaded * self.kv.chunk_bytes(self.session.chunk_size)
        outcomes.launched += bool(loaded or refused)
        outcomes.stale += bool(stale)
        outcomes.causes[load.cause] += 1
        if refused:
            outcomes.reuse_hits += 1
            changed = [chosen.get(number) for number in range(loaded, loaded + refused)]
            outcomes.differed += bool(
                self.wrong(keys[loaded : loaded + refused], blocks[loaded * self.each :], changed)
            )
        if nbytes := self.wrong(
            keys[:loaded], blocks, [chosen.get(number) for number in range(loaded)]
        ):
            outcomes.wrong += 1
            outcomes.wrong_bytes += nbytes
            self.told.wrong.append(self.describe(keys[:loaded], blocks, chosen))
        elif loaded:
            self.publish(
                keys[:loaded],
                blocks[: loaded * self.each],
                generations[: loaded * self.each],
                Written(over=True),
            )
        self.pool.free_blocks(blocks)

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
            return old or Found(b"", [], [])
        return found

    def checkable(self, count: int, chosen: Mapping[int, Replica]) -> int:
        """How many of these leading chunks can be told right from wrong: all."""
        return count

    def poison(self, blocks: Sequence[int]) -> None:
        """Fill the blocks with poison, so that bytes that a copy does not write are noticed."""
        self.words[:, blocks] = POISON

    def wrong(
        self, keys: Sequence[ChunkKey], blocks: Sequence[int], replicas: Sequence[Replica | None]
    ) -> int:
        """How many bytes of these chunks are wrong."""
        if not keys:
            return 0
        want = np.concatenate([what(key) for key in keys], axis=1)
        got = self.words[:, blocks[: len(keys) * EACH]]
        return (
            0
            if np.array_equal(got, want)
            else int((got.view(np.uint8) != want.view(np.uint8)).sum())
        )

    def describe(
        self, keys: Sequence[ChunkKey], blocks: Sequence[int], chosen: Mapping[int, Replica]
    ) -> str:
        """A description of the first wrong chunk. Call it before anything overwrites the blocks."""
        number = next(n for n, key in enumerate(keys) if self.wrong([key], blocks[n * EACH :], ()))
        got = self.words[:, blocks[number * EACH : (number + 1) * EACH]]
        instance, theirs, generations = chosen[number]
        view = self.tables.view(instance)
        ids = np.frombuffer(theirs, dtype="<u4")
        now = "gone" if view is None else view.counters[ids].tolist()
        return (
            f"process {os.getpid()}: chunk {number} of {len(keys)}, key "
            f"{bytes(keys[number]).hex()}, in {instance.hex()}'s blocks {ids.tolist()}, "
            f"generations {np.frombuffer(generations, dtype='<u8').tolist()}, now {now}; "
            f"{int((got == POISON).sum())} of {got.size} words are poison, "
            f"{int((got == 0).sum())} zero"
        )


class Slowly:
    """A copier that makes a share of its copies block by block, in the caller's thread, with pauses
    of at most `seconds` in all.
    """

    def __init__(self, inner: Copier, instance: Living, share: float, seconds: float) -> None:
        self._inner, self._instance, self._share, self._seconds = inner, instance, share, seconds
        self._kept: list[Completion] = []
        """The completions of the last slow copy; each keeps alive what its kernel reads."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def pull(
        self, kv: PagedKV, rows: Int64s, origins: Int64s, *given: Any, **more: Any
    ) -> Completion:
        instance = self._instance
        if len(rows) > 1 and instance.dice.random() < self._share:
            instance.told.outcomes.slow += 1
            self._kept = []
            for at in range(len(rows) - 1):
                self._kept.append(self._inner.pull(kv, rows[at : at + 1], origins, *given, **more))
                instance.step("copying")
                time.sleep(instance.dice.uniform(0, self._seconds / len(rows)))
            rows = rows[-1:]
        copy = self._inner.pull(kv, rows, origins, *given, **more)
        instance.step("copied")
        return copy

    def scatter(self, *given: Any, **more: Any) -> Completion:
        """Out of the pool: one stop under the lease before bytes are read, one before the
        verdict.
        """
        self._instance.step("copied")
        copy = self._inner.scatter(*given, **more)
        self._instance.step("copied")
        return copy


def believe_copies() -> None:
    """For a control: count every copy as right, whatever the generations, or the lease, say after
    it.
    """
    for part in (resident._ResidentPart, pooled._PooledPart):
        part.settle = _believed(part.settle)  # type: ignore[method-assign, assignment]


def _believed(settle: Callable[[Any], Settled]) -> Callable[[Any], Settled]:
    def settled(part: Any) -> Settled:
        settle(part)
        return Settled(part.count)

    return settled


class Living(Protocol):
    """An instance of a campaign, in its own process."""

    dice: random.Random
    told: Told
    over: bool

    def step(self, name: str) -> None: ...

    def round(self) -> None: ...

    def close(self) -> None: ...


def live(settings: Settings, pipe: Connection) -> None:
    """The main function of an instance's process."""
    live_as(Owner if settings.role == "owner" else Reader, settings, pipe)


def live_as(
    kind: Callable[[Settings, random.Random], Living], settings: Settings, pipe: Connection
) -> None:
    """Run instances of `kind`, and report what happened, until the process is killed. A wrong byte
    is reported at once.
    """
    begin(settings.log)
    dice = random.Random(settings.seed)
    instance = kind(settings, dice)
    while True:
        until = time.monotonic() + REPORT_SECONDS
        while time.monotonic() < until and not (instance.told.wrong or instance.over):
            try:
                instance.round()
            except Exception as error:  # noqa: BLE001 - none may come, and the parent counts it
                traceback.print_exc()
                instance.told.outcomes.raised += 1
                where = traceback.extract_tb(error.__traceback__)[-1]
                said = (
                    f"{Path(where.filename).name}:{where.lineno}: {type(error).__name__}: {error}"
                )
                instance.told.outcomes.causes[said[:150]] += 1
        pipe.send(instance.told)
        instance.told = Told(Outcomes(), [])
        if instance.over:
            instance.close()
            instance = kind(settings, dice)
