"""One worker of the soak: an engine that retrieves into poisoned blocks, checks every byte, and
stores, until it is killed.

What its KV must hold follows from the tokens alone (../kv_content.py). Now and then it stops itself
before, during or after a copy, as if swapped out or in a debugger; the parent process sends
SIGCONT."""

from __future__ import annotations

import dataclasses
import functools
import os
import random
import signal
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import numpy as np
import torch

from vcache_backend.config import Config
from vcache_backend.engine import VCacheEngine
from vcache_backend.errors import VCacheError
from vcache_backend.metadata_server.messages import GRACE_SECONDS, ChunkKey
from vcache_backend.offload import objects
from vcache_backend.transfer.layout import Layout, Namespace
from vcache_backend.transfer.leases import Lease
from vcache_backend.vram_pool.copies import reference
from vcache_backend.vram_pool.copies.copier import Finished, HostCopier
from vcache_backend.vram_pool.copies.planner import CopyPlan
from vcache_backend.vram_pool.paged import PagedKV
from vcache_backend.vram_pool.slots import SlotView

from ..forked import Counts, begin
from ..kv_content import Shape, block_digests
from .paged_cache import Fault, PagedCache

SHAPE = Shape(layers=2, kv_heads=2, head_dim=16)
CHUNK_TOKENS = 64
CHUNK_BYTES = CHUNK_TOKENS * SHAPE.token_bytes
MOST_CHUNKS = 4
BLOCKS = 2 * MOST_CHUNKS * CHUNK_TOKENS // SHAPE.block_size
POISONS = 256
"""So many different poisons; up to that many workers each have their own."""
REMOVED = 0.01
"""Share of the rounds that remove a prompt's chunks from the pool."""
WRITERS_STOP = 4
"""How many times as often a worker stops in a store, since there are fewer stores."""
OFFLINE_SECONDS = 0.02
TELL_SECONDS = 0.5


class Settings(msgspec.Struct, frozen=True):
    """config: the engine's. log: the file for the worker's output. families: how many families of
    prompts. stops: share of the copies in which it stops itself. trusting: for the control: believe
    that every lease held and every object is right, whatever the server or a checksum says."""

    config: Config
    number: int
    seed: str
    log: str
    families: int
    stops: float
    trusting: bool = False


class Outcomes(Counts):
    """Counts. retrieves: calls of `retrieve`. verified: those that brought something, all of it
    compared. refused: those whose lease did not hold. stopped: copies in which a worker stopped
    itself, counted once it was awake again. below: chunks that came from the store. bad_objects:
    objects of the store that a worker refused."""

    retrieves: int = 0
    verified: int = 0
    tokens: int = 0
    nbytes: int = 0
    refused: int = 0
    stored: int = 0
    stopped: int = 0
    below: int = 0
    bad_objects: int = 0
    raised: int = 0
    wrong: int = 0
    wrong_bytes: int = 0


class Served(msgspec.Struct):
    """A worker's report. wrong: for each retrieve with a wrong byte, a description of the first
    one.
    """

    outcomes: Outcomes
    wrong: list[str]


class StoppingCopier(HostCopier):
    """A copier for host memory that stops its process in some copies: before them, between their
    halves, or after them.
    """

    def __init__(self, dice: random.Random, stops: float) -> None:
        self.stopped = 0
        self._dice, self._stops = dice, stops

    def _run(self, move: Any, kv: PagedKV, plan: CopyPlan, slots: Sequence[SlotView]) -> Finished:
        writes = move is reference.gather
        if self._dice.random() >= self._stops * (WRITERS_STOP if writes else 1):
            return super()._run(move, kv, plan, slots)
        at = self._dice.choice([0, len(plan.blocks) // 2, len(plan.blocks)])
        super()._run(move, kv, dataclasses.replace(plan, blocks=plan.blocks[:at]), slots)
        os.kill(os.getpid(), signal.SIGSTOP)
        self.stopped += 1
        return super()._run(move, kv, dataclasses.replace(plan, blocks=plan.blocks[at:]), slots)


class Worker:
    """The commands. One thread."""

    def __init__(self, settings: Settings) -> None:
        self._dice = random.Random(settings.seed)
        self._cache = PagedCache(SHAPE, BLOCKS, torch.device("cpu"), settings.number % POISONS)
        self._families = settings.families
        self._copier = StoppingCopier(self._dice, settings.stops)
        self._engine = VCacheEngine(settings.config, layout(self._cache), copier=self._copier)
        self._engine.register(self._cache.kvcaches)
        self._leases: list[Lease] = []
        self._refused = 0
        if settings.trusting:
            objects.Format.check = lambda *_: None  # type: ignore[method-assign]
        self._watch(settings.trusting)

    def _watch(self, trusting: bool) -> None:
        """Remember leases and verdicts. Have every other verdict ask the server, as if the lease's
        grace were over.
        """
        leases = self._engine._session.leases
        acquire, verdict = leases.acquire, leases.verdict

        def acquired(keys: list[ChunkKey]) -> Lease | None:
            got = acquire(keys)
            self._leases += [got] if got is not None else []
            return got

        def judged(lease: Lease, end: bool = True) -> bool:
            if self._dice.random() < 0.5:
                # Pretend that the grace is over, so that the server is asked.
                lease.deadline = min(
                    lease.deadline, time.monotonic() + lease.seconds - GRACE_SECONDS
                )
            held = verdict(lease, end)
            self._refused += not held
            return held or trusting

        leases.acquire, leases.verdict = acquired, judged  # type: ignore[method-assign]

    def serve(self, lasting: float) -> Served:
        """Run rounds for so many seconds, and report what happened. Returns at once on a wrong
        byte, since this process may be killed.
        """
        served, deadline = Served(Outcomes(), []), time.monotonic() + lasting
        before = self._counted()
        while time.monotonic() < deadline and not served.wrong:
            try:
                self._round(served)
            except Exception:  # noqa: BLE001 - none may come, and the parent shows it
                traceback.print_exc()
                served.outcomes.raised += 1
        now = self._counted()
        served.outcomes.add(Outcomes(**{name: now[name] - before[name] for name in now}))
        return served

    def _counted(self) -> dict[str, int]:
        """Counts that the engine keeps, since the beginning."""
        stats = self._engine._stats
        chunks, failures = stats.counted("chunks_"), stats.snapshot()["failures"]
        bad = sum(count for cause, count in failures.items() if cause.startswith("offload_bad"))
        found = {
            "stored": chunks.get("stored", 0),
            "below": chunks.get("offload", 0),
            "bad_objects": bad,
        }
        return {"stopped": self._copier.stopped, "refused": self._refused, **found}

    def _round(self, served: Served) -> None:
        dice, cache, engine = self._dice, self._cache, self._engine
        family, chunks = some_family(dice, self._families), dice.randint(1, MOST_CHUNKS)
        tokens = prompt(family, chunks)
        digests = _digests(family)[: len(tokens) // SHAPE.block_size]
        places = torch.tensor(dice.sample(range(BLOCKS), len(digests)))
        slots = cache.slots(places, len(tokens))
        self._leases.clear()
        mask = engine.retrieve(tokens, None, cache.kvcaches, slots)
        got = int(mask.sum())
        if not bool(mask[:got].all()) or got % CHUNK_TOKENS:
            raise AssertionError(
                f"what was retrieved is no prefix of chunks: {mask.nonzero().flatten().tolist()}"
            )
        blocks = got // SHAPE.block_size
        # A load that was refused may have left something in the blocks that do not count.
        cache.forget(places[blocks:])
        faults = cache.faults(places, digests, blocks)
        served.outcomes.add(
            Outcomes(retrieves=1, verified=bool(got), tokens=got, nbytes=got * SHAPE.token_bytes)
        )
        if faults:
            served.outcomes.add(
                Outcomes(wrong=1, wrong_bytes=sum(fault.nbytes for fault in faults))
            )
            served.wrong.append(self._describe(faults[0], engine.keys(tokens)))
        if not (got or engine._session.client.connected):
            # Leave the core to the process that starts the server again.
            time.sleep(OFFLINE_SECONDS)
        cache.prefill(places[blocks:], digests[blocks:])
        engine.store(tokens, mask.logical_not(), cache.kvcaches, slots)
        cache.forget(torch.arange(BLOCKS))
        if dice.random() < REMOVED:
            with suppress(VCacheError):
                engine._session.client.remove(engine.keys(tokens))

    def _describe(self, fault: Fault, keys: Sequence[ChunkKey]) -> str:
        """A description of the first fault. Call it before anything overwrites the blocks."""
        token = max(fault.token, 0)
        told = [
            (
                f"process {os.getpid()}: {fault.kind} at token {token} in layer {fault.layer}, "
                f"{fault.nbytes:,} bytes differ"
            )
        ]
        key = keys[token // CHUNK_TOKENS]
        for lease in self._leases:
            if key in lease.keys and fault.kind == "wrong":
                place, since = (
                    lease.locations[lease.keys.index(key)],
                    time.monotonic() - (lease.deadline - lease.seconds),
                )
                told.append(f"key {bytes(key).hex()} in {place}, leased {since:.3f} s before")
        return "; ".join(told)


def layout(cache: PagedCache) -> Layout:
    return Layout.of(cache.kvcaches, SHAPE.block_size, model="soak", chunk_size=CHUNK_TOKENS)


def namespace() -> Namespace:
    """The namespace of all workers' keys."""
    return layout(PagedCache(SHAPE, 1, torch.device("cpu"), 0)).namespace()


def prompt(family: int, chunks: int) -> np.ndarray:
    """The tokens of a prompt of so many chunks. Prompts of one family are prefixes of one
    another.
    """
    return np.arange(chunks * CHUNK_TOKENS) + family * 1_000_000


def some_family(dice: random.Random, families: int) -> int:
    """A random family's number, from 1 on; low ones come more often, as some prompts are more
    popular than others.
    """
    return 1 + min(dice.randrange(families), dice.randrange(families))


@functools.cache
def _digests(family: int) -> torch.Tensor:
    return torch.from_numpy(block_digests(prompt(family, MOST_CHUNKS), SHAPE.block_size))


def run(settings: Settings, pipe: Connection) -> None:
    """The main function of a worker process: reports what happened every TELL_SECONDS, until it is
    killed.
    """
    begin(settings.log)
    worker = Worker(settings)
    while True:
        pipe.send(worker.serve(TELL_SECONDS))
