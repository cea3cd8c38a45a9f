"""A reader of the in-place campaign, and the life of the process of either kind of instance."""

from __future__ import annotations

import os
import random
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from integration.vllm.replicas import Replica, choose
from vcache_backend.errors import VCacheError
from vcache_backend.metadata_server.messages import ChunkKey, Found
from vcache_backend.resident.neighbours import Neighbours
from vcache_backend.resident.tables import Tables
from vcache_backend.transfer import resident
from vcache_backend.transfer.load import Load
from vcache_backend.transfer.places import BlockPlaces
from vcache_backend.transfer.resident import ResidentChunk
from vcache_backend.transfer.sources import Settled
from vcache_backend.vram_pool import reference
from vcache_backend.vram_pool.copier import HostCopier, Mark
from vcache_backend.vram_pool.paged import Int64s, PagedKV

from .inplace_instance import (
    EACH,
    FAMILIES,
    PLANES,
    POISON,
    WORDS,
    Instance,
    Outcomes,
    Owner,
    Settings,
    Told,
    Written,
    prompt,
    what,
)
from .kv import BLOCK_SIZE
from .processes import die_with_parent

SLOW = 0.1
"""Share of the copies that go page by page with pauses in between."""
REMEMBERED = 0.05
"""Share of the look-ups that are answered from an old answer, as they all are while there is no server."""
REPORT_SECONDS = 0.2
OFFLINE_SECONDS = 0.02
PATIENCE_SECONDS = 60.0


class Reader(Instance):
    """Loads, compares, and has its copies read by others."""

    def __init__(self, settings: Settings, dice: random.Random) -> None:
        super().__init__(settings, dice, SlowCopier(self))
        if settings.control == "no verdict":
            _believe_copies()
        self.neighbours = Neighbours(self.client, self.session.device, self.kv, 0)
        self.tables = Tables(self.client)
        self._found: dict[ChunkKey, Found] = {}

    def round(self) -> None:
        keys, outcomes = self.some_prompt(), self.told.outcomes
        found = self._look_up(keys)
        self.step("looked up")
        count, chosen = choose(found, self.tables, EACH)
        if not count:
            outcomes.misses += 1
            return
        keys = keys[:count]
        blocks, generations = self.allocate(count)
        self.words[:, blocks] = POISON
        self.step("before launch")
        before = self.session.stats.counted("chunks_")
        residents = {number: ResidentChunk.unpacked(*replica) for number, replica in chosen.items()}
        places = BlockPlaces(self.kv, EACH * BLOCK_SIZE, blocks, BLOCK_SIZE)
        load = Load(self.session, places, keys, mark=self.session.copier.mark(), residents=residents, neighbours=self.neighbours)
        loaded = load.run(PATIENCE_SECONDS)
        self.step("behind the verdict")
        after = self.session.stats.counted("chunks_")
        stale, refused = (after.get(name, 0) - before.get(name, 0) for name in ("stale", "refused"))
        outcomes.loads += bool(loaded)
        outcomes.chunks += loaded
        outcomes.nbytes += loaded * PLANES * EACH * WORDS * 8
        outcomes.launched += bool(loaded or refused)
        outcomes.stale += bool(stale)
        outcomes.causes[load.cause] += 1
        if refused:
            outcomes.reuse_hits += 1
            outcomes.differed += bool(self._wrong(keys[loaded : loaded + refused], blocks[loaded * EACH :]))
        if nbytes := self._wrong(keys[:loaded], blocks):
            outcomes.wrong += 1
            outcomes.wrong_bytes += nbytes
            self.told.wrong.append(self._describe(keys[:loaded], blocks, chosen))
        elif loaded:
            self.publish(keys[:loaded], blocks[: loaded * EACH], generations[: loaded * EACH], Written(over=True))
        self.pool.free(blocks)

    def _look_up(self, keys: list[ChunkKey]) -> Found:
        old = self._found.get(keys[-1])
        if old is not None and self.dice.random() < REMEMBERED:
            return old
        try:
            found = self._found[keys[-1]] = self.client.find(keys, 1, self.instance)
        except VCacheError:
            # Whoever starts the server again needs the core.
            time.sleep(OFFLINE_SECONDS)
            return old or Found(b"", [], [])
        return found

    def _wrong(self, keys: Sequence[ChunkKey], blocks: Sequence[int]) -> int:
        """How many bytes of these chunks are not what they must be."""
        if not keys:
            return 0
        want = np.concatenate([what(key) for key in keys], axis=1)
        got = self.words[:, blocks[: len(keys) * EACH]]
        return 0 if np.array_equal(got, want) else int((got.view(np.uint8) != want.view(np.uint8)).sum())

    def _describe(self, keys: Sequence[ChunkKey], blocks: Sequence[int], chosen: dict[int, Replica]) -> str:
        """The first wrong chunk, before anything is written over it."""
        number = next(n for n, key in enumerate(keys) if self._wrong([key], blocks[n * EACH :]))
        got = self.words[:, blocks[number * EACH : (number + 1) * EACH]]
        instance, theirs, generations = chosen[number]
        view = self.tables.view(instance)
        ids = np.frombuffer(theirs, dtype="<u4")
        now = "gone" if view is None else view.counters[ids].tolist()
        said = [f"process {os.getpid()}: chunk {number} of {len(keys)}, key {bytes(keys[number]).hex()}"]
        said += [f"in {instance.hex()}'s blocks {ids.tolist()}, generations {np.frombuffer(generations, dtype='<u8').tolist()}"]
        said += [
            f"which are now {now}; {int((got == POISON).sum())} of {got.size} words are poison, {int((got == 0).sum())} zero"
        ]
        for family in range(FAMILIES):
            for at, key in enumerate(prompt(self.hasher, family)):
                if same := int((got == what(key)).sum()):
                    said.append(f"{same} prompt {family}'s chunk {at}")
        return ", ".join(said)


class SlowCopier(HostCopier):
    """Some of its copies go page by page, with pauses."""

    def __init__(self, instance: Instance) -> None:
        self._instance = instance

    def pull(  # type: ignore[override]
        self, kv: PagedKV, rows: Int64s, origins: Int64s, after: Mark | None = None, keep: object = None, *, local: bool = False
    ) -> Copied:
        instance, started = self._instance, time.perf_counter()
        dice = instance.dice
        if dice.random() < SLOW:
            instance.told.outcomes.slow += 1
            for row in rows:
                for plane, page in enumerate(kv.pages):
                    one: Any = SimpleNamespace(pages=[page], page_bytes=kv.page_bytes)
                    reference.pull(one, row[None], origins[:, plane : plane + 1])
                    instance.step("copying")
                time.sleep(dice.uniform(0, 0.001))
        else:
            super().pull(kv, rows, origins)
        instance.step("launched")
        return Copied(instance, time.perf_counter() - started)


@dataclass
class Copied:
    """A copy that is over, which its load has not heard yet."""

    instance: Instance
    seconds: float

    def done(self) -> bool:
        self.instance.step("before the verdict")
        return True

    def wait(self, timeout_s: float) -> bool:
        return True


def _believe_copies() -> None:
    """What a copy brought counts, whatever the generations say afterwards."""
    settle = resident._ResidentPiece.settle

    def settled(piece: resident._ResidentPiece, *arguments: Any) -> Settled:
        settle(piece, *arguments)
        return Settled(piece.count)

    resident._ResidentPiece.settle = settled  # type: ignore[method-assign, assignment]


def live(settings: Settings, pipe: Connection) -> None:
    """The life of an instance's process: until it is killed, it tells what happened. A wrong byte is told at once."""
    die_with_parent()
    log = os.open(settings.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for output in (1, 2):
        os.dup2(log, output)
    torch.set_num_threads(1)
    kind, dice = Owner if settings.role == "owner" else Reader, random.Random(settings.seed)
    instance = kind(settings, dice)
    while True:
        until = time.monotonic() + REPORT_SECONDS
        while time.monotonic() < until and not (instance.told.wrong or instance.over):
            try:
                instance.round()
            except Exception:  # noqa: BLE001 - none may come, and the parent counts it
                traceback.print_exc()
                instance.told.outcomes.raised += 1
        pipe.send(instance.told)
        instance.told = Told(Outcomes(), [])
        if instance.over:
            instance.close()
            instance = kind(settings, dice)
