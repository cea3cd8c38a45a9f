"""One instance of the in-place campaign: a KV cache that others read, and whose blocks are
constantly handed out and rewritten.

An owner computes chunks. A reader (`reader`) loads them out of others' KV caches, compares
each byte, and publishes its copies. What a block must hold follows from its chunk's key and
position alone. Both stop themselves at any step of the protocol, as if swapped out or in a
debugger; the parent process sends SIGCONT."""

from __future__ import annotations

import functools
import os
import random
import secrets
import signal
import time
import traceback
from collections import Counter
from dataclasses import dataclass
from typing import Literal, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from integration.vllm.in_place.block_pool import ResidentPool
from vcache_backend.config import Config
from vcache_backend.errors import VCacheError
from vcache_backend.metadata_server.messages import INSTANCE_BYTES, ChunkKey, InstanceId
from vcache_backend.resident.generations import Generations, UInt64s
from vcache_backend.resident.own_cache import OwnCache, cache_shape
from vcache_backend.transfer.keys import TokenHasher
from vcache_backend.transfer.layout import Layout
from vcache_backend.transfer.publisher import Publication, Publisher
from vcache_backend.transfer.session import Session
from vcache_backend.vram_pool.copies.copier import Mark
from vcache_backend.vram_pool.exports.host_memory import HostExportable

from ..forked import Counts
from ..kv_content import content, mix
from .blocks import BlockPool

BLOCK_SIZE = 16
LAYERS, HEADS, DIM = 2, 2, 16
PLANES = 2 * LAYERS
WORDS = BLOCK_SIZE * HEADS * DIM * 2 // 8
"""64-bit words of a page."""
EACH = 2
"""Blocks of a chunk."""
MOST_CHUNKS = 6
BLOCKS = 8 * MOST_CHUNKS * EACH
FAMILIES = 12
"""Families of prompts. Prompts of one family are prefixes of one another."""
POISON = 0x5A5A5A5A5A5A5A5A
OFTEN = 20
"""How many times as often an owner stops itself at rare steps."""

Role = Literal["owner", "reader", "vllm"]
Control = Literal["", "no verdict", "counted late", "published early", "no bound"]


class Settings(msgspec.Struct, frozen=True):
    """stops: share of the steps at which the instance stops itself. control: the rule of the
    protocol that is broken, see `__main__`; empty: none. shared: a folder that all
    instances use. number: the instance's place among them. pauses: share of the loads between whose
    launch and verdict the instance stops itself; 0: as often as elsewhere. lends: bytes that it
    lends to a pool, through which it shares; 0: it shares in place."""

    config: Config
    role: Role
    seed: str
    log: str
    stops: float
    control: Control = ""
    shared: str = ""
    number: int = 0
    pauses: float = 0.0
    lends: int = 0


class Outcomes(Counts):
    """Counts of events.

    launched: loads that copied anything. loads: loads that brought something, all of it compared;
    with whole vLLMs, requests for which something was loaded. reuse_hits: loads whose verdict
    refused some chunks, since a block changed between launch and verdict. differed: those of them
    whose refused chunks did hold other bytes. stale: loads that found a chunk gone before the
    launch. misses: look-ups that found nothing. written: chunks that owners
    have written. by_step: how often a process stopped itself, by the step of the protocol. answers:
    vLLM's, to whole requests. waits: of requests for what others computed, by their end. overdue:
    requests that waited longer than their bound."""

    loads: int = 0
    launched: int = 0
    chunks: int = 0
    nbytes: int = 0
    slow: int = 0
    reuse_hits: int = 0
    differed: int = 0
    stale: int = 0
    misses: int = 0
    written: int = 0
    published: int = 0
    raised: int = 0
    wrong: int = 0
    wrong_bytes: int = 0
    answers: int = 0
    overdue: int = 0
    waits: Counter[str] = msgspec.field(default_factory=Counter)
    by_step: Counter[str] = msgspec.field(default_factory=Counter)
    causes: Counter[str] = msgspec.field(default_factory=Counter)

    @property
    def pauses(self) -> int:
        """How often a process stopped itself between a load's launch and its verdict."""
        return self.by_step["copying"] + self.by_step["copied"]


class Told(NamedTuple):
    """An instance's report. wrong: a description of each load with a wrong byte."""

    outcomes: Outcomes
    wrong: list[str]


@dataclass
class Written:
    """The end of a model's step, which may still be to come."""

    over: bool

    def reached(self) -> bool:
        return self.over


class Instance:
    """The KV cache of an instance, its blocks, and its name at the server. One thread.

    over: the instance must no longer be believed; another one takes its place in this process.
    """

    def __init__(self, settings: Settings, dice: random.Random) -> None:
        self.dice, self.over = dice, False
        self.told = Told(Outcomes(), [])
        self.settings, self._late = (
            settings,
            settings.role == "owner" and settings.control == "counted late",
        )
        memory = HostExportable()
        with memory.context():
            whole = torch.zeros(PLANES * BLOCKS * WORDS * 8, dtype=torch.int8)
        self.words: npt.NDArray[np.int64] = (
            whole.numpy().view(np.int64).reshape(PLANES, BLOCKS, WORDS)
        )
        shape = (LAYERS, 2, BLOCKS, BLOCK_SIZE, HEADS, DIM)
        tensors = list(whole.view(torch.bfloat16).view(shape))
        layout = Layout.of(tensors, BLOCK_SIZE, model="inplace", chunk_size=EACH * BLOCK_SIZE)
        self.session = Session(settings.config, layout, anonymous=True)
        self.kv, self.client = self.session.bind(tensors), self.session.client
        self.instance, self.sequence = InstanceId(secrets.token_bytes(INSTANCE_BYTES)), 0
        self.table, self.pool = Generations(self.instance, BLOCKS), BlockPool(BLOCKS)
        if not self._late:
            ResidentPool(self.pool, self.table, self._reset)
        self.client.on_return.append(self._join)
        try:
            self._join()
        except VCacheError:
            traceback.print_exc()
        regions = memory.allocations()
        shown = cache_shape(self.kv, regions, self.session.device)
        self.shown = OwnCache(self.client, self.instance, 0, shown, regions)
        self.publisher = Publisher(self.client, self.session.stats, self.instance, EACH)
        self.hasher = TokenHasher(self.session.namespace, EACH * BLOCK_SIZE)

    def _join(self) -> None:
        self.client.join(
            self.instance, self.session.namespace.prefix, BLOCKS, 1, EACH, self.table.fd
        )

    def _reset(self) -> None:
        self.publisher.retract(self.instance, self.sequence + 1)

    def some_prompt(self) -> list[ChunkKey]:
        """The keys of a random prompt; some prompts are more popular than others."""
        family = min(self.dice.randrange(FAMILIES), self.dice.randrange(FAMILIES))
        return prompt(self.hasher, family)[: self.dice.randint(1, MOST_CHUNKS)]

    def allocate(self, chunks: int) -> tuple[list[int], UInt64s]:
        """Blocks for so many chunks, and their new generations. From here on nobody may believe
        what they held before.
        """
        blocks = [block.block_id for block in self.pool.get_new_blocks(chunks * EACH)]
        if self._late:
            return blocks, np.full(len(blocks), self.table.coming, dtype=np.uint64)
        # By vLLM's plan; what is published of it is told when they are written.
        self.table.filled(blocks)
        return blocks, self.table.counters[blocks]

    def publish(
        self, keys: list[ChunkKey], blocks: list[int], generations: UInt64s, written: Mark
    ) -> None:
        """Publish the chunks once they are written."""
        self.sequence += 1
        self.told.outcomes.published += len(keys)
        numbers = np.array(blocks, dtype="<u4").tobytes()
        self.publisher.submit(
            Publication(keys, numbers, generations.astype("<u8").tobytes(), self.sequence), written
        )

    def step(self, name: str, often: int = 1) -> None:
        """A step of the protocol, at which the process may stop itself. often: how many times as
        often as elsewhere.
        """
        if self.dice.random() < often * self.settings.stops:
            stop_self()
            self.told.outcomes.by_step[name] += 1

    def round(self) -> None:
        """Handle one request."""
        raise NotImplementedError

    def close(self) -> None:
        self.publisher.close()
        self.shown.close()
        self.table.close()
        self.session.close()


class Owner(Instance):
    """Computes chunk after chunk, more than its blocks can hold."""

    def round(self) -> None:
        keys = self.some_prompt()
        blocks, generations = self.allocate(len(keys))
        self.step("handed out")
        written = Written(self.settings.control == "published early")
        self.publish(keys, blocks, generations, written)
        self._write(keys, blocks)
        if self._late:
            self.table.void(blocks)
            self.table.filled(blocks)
        self.step("before publication")
        written.over = True
        self.told.outcomes.written += len(keys)
        self.pool.free_blocks(blocks)
        if not self._late:
            self._mishap(blocks[-EACH:], self.dice.random())
        time.sleep(self.dice.uniform(0, 0.004))

    def _mishap(self, blocks: list[int], chance: float) -> None:
        if chance < 0.02:
            # A load into these blocks failed: they are computed again where they are, and nothing
            # of it is told.
            self.pool.evict_blocks(set(blocks))
            self.step("evicted", OFTEN)
            self.words[:, blocks] = POISON
        elif chance < 0.025:
            # What is there does not count any more, and here its bytes say so.
            self.pool.reset_prefix_cache()
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
            for plane, pages in enumerate(what(key)):
                for block, page in zip(here, pages, strict=True):
                    self.words[plane, block] = page
            self.step("writing")
            if self.dice.random() < 0.3:
                time.sleep(0.0003)


def stop_self() -> None:
    """Stop this process, as if it were swapped out or in a debugger."""
    os.kill(os.getpid(), signal.SIGSTOP)


@functools.cache
def prompt(hasher: TokenHasher, family: int) -> list[ChunkKey]:
    """The keys of the chunks of a family's longest prompt."""
    return hasher.keys(np.arange(MOST_CHUNKS * EACH * BLOCK_SIZE) + family * 1_000_000)


@functools.cache
def what(key: ChunkKey) -> npt.NDArray[np.int64]:
    """What a chunk's blocks must hold, shape (PLANES, EACH, WORDS): different words in each
    page.
    """
    seeds = mix(
        torch.tensor([int.from_bytes(key[8:16], "little", signed=True)]) + torch.arange(EACH)
    )
    return torch.cat([content(seeds, layer, WORDS) for layer in range(LAYERS)]).numpy()
