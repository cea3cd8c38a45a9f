"""What leaves the KV cache of an instance that shares in place, and is saved in the pool beside it:
as its scheduler decides, and as its worker does."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
from engine_cases import ROOMY, Node, UnfinishedCopier
from in_place_cases import CHUNK, EACH, Engine, Make, engine, here, lying, make, new_tokens
from kv_cases import Cache, layout_of
from processes import SECONDS, eventually
from vllm_cases import needs_vllm

pytest.importorskip("vllm.v1.core.sched.scheduler", reason="vLLM is not installed")

import torch
from vllm.v1.request import Request

from vcache_backend.integration.vllm.metadata import PublicationSpec, SavedChunks, StepMetadata
from vcache_backend.integration.vllm.telemetry.stats import Meter
from vcache_backend.integration.vllm.worker.exporter import Exporter
from vcache_backend.integration.vllm.worker.in_place import InPlace
from vcache_backend.integration.vllm.worker.stores import Attached, Stores
from vcache_backend.protocol.messages import (
    HASH_BYTES,
    NAMESPACE_BYTES,
    RANK_BYTES,
    BlockRun,
    BlockTable,
    ChunkKey,
    InstanceId,
)
from vcache_backend.transfer.session import Session
from vcache_backend.vram_pool.generations import Generations

__all__ = ["engine", "here", "make"]
pytestmark = needs_vllm


# ---- what is saved in the pool


def saved(engine: Engine, meta: StepMetadata, request: Request) -> list[tuple[int, list[int]]]:
    """Which of the request's chunks a step saves, and no others, and where they lie. All are as
    they were published.
    """
    spec, counters = meta.victims, engine.half.publications.generations.counters
    if spec is None:
        return []
    places = [engine.keys(request).index(key) for key in spec.keys]
    lies = lying(spec)
    assert all(counters[block] == generation for block, generation in lies)
    blocks = [block for block, _ in lies]
    rows = [blocks[at : at + EACH] for at in range(0, len(blocks), EACH)]
    return list(zip(places, rows, strict=True))


def completed(engine: Engine) -> list[list[int]]:
    """The blocks of each chunk that steps complete from now on."""
    victims, found = engine.half.victims, list[list[int]]()
    plan = victims.plan

    def planned(meta: StepMetadata, chunks: list[tuple[list[ChunkKey], list[int]]]) -> None:
        for _, blocks in chunks:
            found.extend(blocks[at : at + EACH] for at in range(0, len(blocks), EACH))
        plan(meta, chunks)

    victims.plan = planned
    return found


def test_without_a_pool_beside_it_nothing_is_saved(engine: Engine) -> None:
    engine.finish(engine.add(new_tokens(3 * CHUNK)))
    engine.step()
    assert [meta.victims for meta in engine.metas] == [None] * len(engine.metas)


def test_what_may_be_used_again_is_saved_once_and_once_more_after_it_was_hit(make: Make) -> None:
    """The pool may have lost it by then. Beside a request that only runs on."""
    engine = make(lends=1 << 20)
    engine.add(new_tokens(CHUNK + 3), max_tokens=CHUNK)
    chunks = completed(engine)
    request = engine.add(new_tokens(3 * CHUNK + 5))
    engine.finish(request)
    early = [saved(engine, meta, request) for meta in engine.metas]
    assert early == [[]] * len(engine.metas), "it runs, nobody gets its blocks"
    mine = {one.block for meta in engine.metas for one in engine.published(request, meta)}
    due = list(enumerate(blocks for blocks in chunks if mine.issuperset(blocks)))
    assert saved(engine, engine.step(), request) == due
    assert len(due) == 3
    again = engine.add(request.prompt_token_ids[: CHUNK + 1])
    engine.step()
    assert engine.hit(again) == CHUNK
    engine.finish(again)
    assert [number for number, _ in saved(engine, engine.step(), request)] == [0]
    assert engine.step().victims is None


def test_a_chunk_is_saved_before_the_first_of_its_blocks_is_handed_out(make: Make) -> None:
    """Two plans before, or its copy would not be over; one, where requests hit much of what would
    be handed out first. They come and go, and answer; each step is small beside the cache."""
    engine = make(blocks=65, arguments={"max_num_batched_tokens": 64}, lends=1 << 20)
    choice = random.Random(5)
    known = [new_tokens(chunks * CHUNK + 7) for chunks in (1, 2, 3, 4) * 3]
    counters = engine.half.publications.generations.counters
    there = dict[int, Any]()
    told = dict[int, int]()
    left, chunks = list[int](), completed(engine)
    for number in range(400):
        if number % 3 == 0 and len(engine.scheduler.requests) < 3:
            tokens = choice.choice(known) + new_tokens(choice.choice([0, CHUNK]))
            engine.add(tokens, max_tokens=choice.randrange(1, 9))
        meta = engine.step()
        for first, (blocks, generations) in list(there.items()):
            if (counters[blocks] != generations).any():
                del there[first]
                left.append(number - told.pop(first))
        for blocks in chunks:
            there[blocks[0]] = blocks, counters[blocks].copy()
        chunks.clear()
        if meta.victims is not None:
            for block, _ in lying(meta.victims)[::EACH]:
                told.setdefault(block, number)
    assert len(left) > 50
    assert min(left) > 0
    assert left.count(1) < len(left) // 20


# ---- the worker


class Sharing:
    """A worker that shares its KV cache, in blocks 2n and 2n + 1 of which chunk n is, and lends to
    the pool. Its stores are read when a test says so."""

    def __init__(self, here: Node, undo: ExitStack) -> None:
        cache, exporter = Cache(), Exporter("cpu")
        around = exporter.context()
        assert around is not None
        with around:
            # As vLLM makes it.
            nbytes = sum(tensor.nbytes for tensor in cache.tensors)
            raw = torch.zeros(nbytes, dtype=torch.int8, device="cpu")
        each_layer = raw.view(torch.bfloat16).view(len(cache.tensors), *cache.tensors[0].shape)
        tensors = {f"layer {number}": one for number, one in enumerate(each_layer)}
        self.copier = UnfinishedCopier()
        self.session = Session(here.config("host", ROOMY), layout_of(cache), copier=self.copier)
        undo.callback(self.session.close)
        undo.callback(self.copier.finished.set)
        self.in_place = InPlace(exporter, cache.sizes.blocks, shows=True)
        self.stores = Stores(Meter())
        undo.callback(self.in_place.close)
        kv = self.session.bind(tensors)
        self.in_place.open(self.session, kv, tensors)
        self.attached = Attached(self.session, kv, cache.sizes.block_size)
        self.name = name = InstanceId(b"w" * 16)
        self.client = undo.enter_context(here.client())
        self.table = Generations(name, cache.sizes.blocks)
        undo.callback(self.table.close)
        prefix = self.session.namespace.prefix
        tables = [BlockTable("full")]
        self.client.join(name, prefix, self.table.blocks, 1, 2, tables, self.table.fd)
        self.in_place.show(self.session, name)
        self.keys = [ChunkKey(prefix + os.urandom(16) + b"\0\0") for _ in range(4)]
        self.epoch = self.client.present(self.keys).epoch

    def publish(self, *chunks: int) -> None:
        """Each is a request's."""
        specs = [PublicationSpec([self._run(chunk)], self.epoch) for chunk in chunks]
        self.in_place.publish(specs)
        assert self.in_place.publisher is not None
        assert self.in_place.publisher.outbox.flush(SECONDS)

    def save(self, *chunks: int) -> None:
        keys, packs = [self.keys[chunk] for chunk in chunks], self._packed(*chunks)
        self.in_place.save(self.attached, SavedChunks(keys, *packs, self.epoch), self.stores)

    def saved(self, chunk: int) -> bool:
        """Whether the pool has it, once everything that was saved is read."""
        self.copier.finished.set()
        assert self.session.flush(SECONDS)
        return bool(self.client.lookup([self.keys[chunk]]))

    def _run(self, chunk: int) -> BlockRun:
        hashes = bytes([chunk]) * HASH_BYTES + self.keys[chunk][NAMESPACE_BYTES:-RANK_BYTES]
        return BlockRun(0, 0, hashes, *self._packed(chunk))

    def _packed(self, *chunks: int) -> tuple[bytes, bytes]:
        """The chunks' blocks, and their generations."""
        blocks = np.array([(2 * chunk, 2 * chunk + 1) for chunk in chunks], dtype="<u4")
        return blocks.tobytes(), np.full_like(blocks, 2, "<u8").tobytes()


@pytest.fixture
def sharing(here: Node) -> Iterator[Sharing]:
    with ExitStack() as undo:
        yield Sharing(here, undo)


def test_what_was_never_published_is_not_saved(sharing: Sharing) -> None:
    """Nobody knows that it was computed from what it should be."""
    sharing.publish(2)
    for chunk in range(4):
        sharing.save(chunk)
    assert [sharing.saved(chunk) for chunk in range(4)] == [False, False, True, False]


@pytest.mark.parametrize("how", ["handed out", "reset"])
def test_what_changes_hands_while_it_is_saved_is_never_found(sharing: Sharing, how: str) -> None:
    sharing.publish(0, 1)
    sharing.save(0)
    if how == "reset":
        sharing.table.void_all()
    else:
        sharing.table.void([1])
    assert not sharing.saved(0)
    assert sharing.session.stats.counted("not_stored_")["changed"] == 1
    sharing.save(1)
    assert sharing.saved(1) == (how == "handed out"), "its slot was given back"
    eventually(lambda: sharing.client.stats().reservations == 0)


def test_what_was_published_before_somebody_elses_reset_is_not_saved(sharing: Sharing) -> None:
    """Its scheduler has not heard of it."""
    sharing.publish(0)
    sharing.client.clear(sharing.session.namespace.prefix, reset=True)
    sharing.save(0)
    assert not sharing.saved(0)
    assert sharing.client.stats().reservations == 0
