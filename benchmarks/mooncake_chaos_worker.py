"""One worker of the chaos benchmark: an engine that retrieves, checks every byte, and stores, until it is killed.

Started with its settings as JSON in its only argument; commands are lines of JSON on standard input, answers lines of JSON on standard
output. What its KV must hold follows from the tokens alone (demo/content.py), so that no other worker has to be asked.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
import traceback
from typing import Any

import msgspec
import numpy as np
import torch

from vcache_backend.config import Config, from_dict
from vcache_backend.demo.cache import PagedCache
from vcache_backend.demo.content import Shape, block_digests
from vcache_backend.engine import VCacheEngine
from vcache_backend.offload import objects
from vcache_backend.transfer.layout import Layout
from vcache_backend.vram_pool.paged import PagedKV

SHAPE = Shape(layers=2, kv_heads=2, head_dim=16)
CHUNK_TOKENS = 64
CHUNK_BYTES = CHUNK_TOKENS * SHAPE.token_bytes
MOST_CHUNKS = 12
BLOCKS = 3 * MOST_CHUNKS * CHUNK_TOKENS // SHAPE.block_size


class Settings(msgspec.Struct, frozen=True):
    """config: the engine's, as in its YAML file. device: of its KV cache. accept: take every object for a right one, to see that wrong
    bytes are found."""

    config: dict[str, Any]
    seed: int
    families: int
    accept: bool = False
    device: str = "cpu"


class Outcomes(msgspec.Struct):
    """Counts. asked, promised and got are chunks: in prompts, by look-ups, in place and checked. Times are the longest calls, in s."""

    rounds: int = 0
    asked: int = 0
    promised: int = 0
    got: int = 0
    below: int = 0
    wrong_bytes: int = 0
    raised: int = 0
    bad_objects: int = 0
    longest_lookup: float = 0.0
    longest_retrieve: float = 0.0
    longest_store: float = 0.0

    def add(self, more: Outcomes) -> None:
        for name in self.__struct_fields__:
            mine, its = getattr(self, name), getattr(more, name)
            setattr(self, name, max(mine, its) if name.startswith("longest") else mine + its)


def layout() -> Layout:
    """Of every worker, and of whoever wants to know their keys."""
    cache = PagedCache(SHAPE, BLOCKS, torch.device("cpu"), 0)
    return Layout(
        model="chaos",
        dtype="bfloat16",
        layers=SHAPE.layers,
        kv_heads=SHAPE.kv_heads,
        head_dim=SHAPE.head_dim,
        block_size=SHAPE.block_size,
        kv_layout=PagedKV.describe(cache.kvcaches, SHAPE.block_size).name,
        chunk_size=CHUNK_TOKENS,
    )


def prompt(family: int, chunks: int) -> np.ndarray:
    """Prompts of one family are prefixes of one another."""
    return np.arange(chunks * CHUNK_TOKENS) + family * 1_000_000


def some_family(dice: random.Random, families: int) -> int:
    """From 1 on; low ones more often, as some prompts are more popular than others."""
    return 1 + min(dice.randrange(families), dice.randrange(families))


class Worker:
    """The commands. One thread."""

    def __init__(self, settings: Settings) -> None:
        torch.set_num_threads(1)
        if settings.accept:
            objects.check = lambda buffer, got, *rest: got - objects.HEADER_BYTES
        self._settings, self._dice = settings, random.Random(settings.seed)
        self._device = torch.device(settings.device)
        self._cache = PagedCache(SHAPE, BLOCKS, self._device, settings.seed)
        config: Config = from_dict(settings.config)
        self._engine = VCacheEngine(config, layout())
        self._engine.register(self._cache.kvcaches)
        self._before = 0, 0

    def serve(self, lasting: float) -> dict[str, Any]:
        """Rounds for so long; what happened in them."""
        counts, deadline = Outcomes(), time.monotonic() + lasting
        while time.monotonic() < deadline:
            try:
                self._round(counts)
            except Exception:  # noqa: BLE001 - none may come, and the parent shows it
                traceback.print_exc()
                counts.raised += 1
        stats = self._engine.get_stats()
        bad = sum(count for cause, count in stats["failures"].items() if cause.startswith("offload_bad"))
        below = stats["hits"]["offload"]
        counts.below, counts.bad_objects = below - self._before[0], bad - self._before[1]
        self._before = below, bad
        return dict(msgspec.to_builtins(counts))

    def _round(self, counts: Outcomes) -> None:
        tokens = prompt(some_family(self._dice, self._settings.families), self._dice.randint(1, MOST_CHUNKS))
        digests = torch.from_numpy(block_digests(tokens, SHAPE.block_size)).to(self._device)
        shuffled = np.random.default_rng(self._dice.getrandbits(32)).permutation(BLOCKS)[: len(digests)]
        places = torch.from_numpy(shuffled).to(self._device)
        slots, cache = self._cache.slots(places, len(tokens)), self._cache
        started = time.perf_counter()
        found = self._engine.lookup(tokens)
        looked_up = time.perf_counter()
        mask = self._engine.retrieve(tokens, None, cache.kvcaches, slots)
        retrieved = time.perf_counter()
        got = int(mask.sum())
        if not bool(mask[:got].all()):
            raise AssertionError("what was retrieved is no prefix")
        # A load that failed half-way may have left a part of the KV in blocks that do not count.
        blocks = got // SHAPE.block_size
        wrong = [fault for fault in cache.faults(places[:blocks], digests[:blocks], blocks) if fault.kind == "wrong"]
        cache.prefill(places[blocks:], digests[blocks:])
        begun = time.perf_counter()
        self._engine.store(tokens, mask.logical_not(), cache.kvcaches, slots)
        stored = time.perf_counter()
        cache.forget(torch.arange(BLOCKS))
        if wrong:
            print(f"family {tokens[0] // 1_000_000}, {len(tokens)} tokens: {wrong}", file=sys.stderr, flush=True)
        chunks = got // CHUNK_TOKENS
        counts.add(
            Outcomes(
                rounds=1,
                asked=len(tokens) // CHUNK_TOKENS,
                promised=found // CHUNK_TOKENS,
                got=chunks,
                wrong_bytes=sum(fault.nbytes for fault in wrong),
                longest_lookup=looked_up - started,
                longest_retrieve=retrieved - looked_up,
                longest_store=stored - begun,
            )
        )


def main() -> None:
    # Libraries write to standard output.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    worker = Worker(msgspec.json.decode(sys.argv[1], type=Settings))
    for line in sys.stdin:
        command, arguments = json.loads(line)
        answers.write(json.dumps({"answer": getattr(worker, command)(**arguments)}) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
