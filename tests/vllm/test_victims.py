"""What leaves the KV cache of an instance that shares in place, and is saved in the pool beside it, as
its scheduler decides; its worker: test_in_place."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from math import inf
from typing import Any

import pytest
from in_place_cases import CHUNK, EACH, Engine, Make, engine, here, lying, make, new_tokens
from vllm_cases import needs_vllm

pytest.importorskip("vllm.v1.core.sched.scheduler", reason="vLLM is not installed")

from vllm.v1.request import Request

from vcache_backend.integration.vllm import victims
from vcache_backend.integration.vllm.metadata import StepMetadata
from vcache_backend.protocol.messages import ChunkKey

__all__ = ["engine", "here", "make"]
pytestmark = needs_vllm


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
    planner, found = engine.half.victims, list[list[int]]()
    plan = planner.plan

    def planned(
        meta: StepMetadata,
        chunks: list[tuple[list[ChunkKey], list[int]]],
        used: Iterator[list[int]],
    ) -> None:
        for _, blocks in chunks:
            found.extend(blocks[at : at + EACH] for at in range(0, len(blocks), EACH))
        plan(meta, chunks, used)

    planner.plan = planned
    return found


def saved_before(engine: Engine, steps: int, ask: Callable[[int], None]) -> list[int]:
    """Of each chunk that leaves the cache within so many steps: how many plans before its first
    block was handed out it was saved; 0: it was not. ask: called before each step."""
    counters = engine.half.publications.generations.counters
    there, told = dict[int, Any](), dict[int, int]()
    left, chunks = list[int](), completed(engine)
    for number in range(steps):
        ask(number)
        meta = engine.step()
        for first, (blocks, generations) in list(there.items()):
            if (counters[blocks] != generations).any():
                del there[first]
                left.append(number - told.pop(first, number))
        for blocks in chunks:
            there[blocks[0]] = blocks, counters[blocks].copy()
            told.pop(blocks[0], None)
        chunks.clear()
        if meta.victims is not None:
            for block, _ in lying(meta.victims)[::EACH]:
                told.setdefault(block, number)
    return left


def many(engine: Engine, requests: int, shortest: int) -> Callable[[int], None]:
    """Keeps so many requests there, with prompts that are never asked again. shortest: tokens of
    the shortest answer."""
    choice = random.Random(5)

    def ask(_: int) -> None:
        while len(engine.scheduler.requests) < requests:
            answer = choice.randrange(shortest, 60)
            engine.add(new_tokens(choice.choice([2, 3, 4]) * CHUNK), answer)

    return ask


def test_without_a_pool_beside_it_nothing_is_saved(engine: Engine) -> None:
    engine.finish(engine.add(new_tokens(3 * CHUNK)))
    engine.step()
    assert [meta.victims for meta in engine.metas] == [None] * len(engine.metas)


def test_what_may_be_used_again_is_saved_once_and_once_more_after_it_was_hit(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pool may have lost it by then. Beside a request that only runs on."""
    monkeypatch.setattr(victims, "PUBLISHED_SECONDS", inf)
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

    def ask(number: int) -> None:
        if number % 3 == 0 and len(engine.scheduler.requests) < 3:
            tokens = choice.choice(known) + new_tokens(choice.choice([0, CHUNK]))
            engine.add(tokens, max_tokens=choice.randrange(1, 9))

    left = saved_before(engine, 400, ask)
    assert len(left) > 50
    assert min(left) > 0
    assert left.count(1) < len(left) // 20


def test_while_requests_wait_for_blocks_chunks_are_saved_before_their_request_ends(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The blocks of a request that ends go to a waiting one in the next step, before a copy of
    them would be over."""
    monkeypatch.setattr(victims, "PUBLISHED_SECONDS", 0.0)
    engine = make(blocks=65, arguments={"max_num_seqs": 32}, lends=1 << 20)
    left = saved_before(engine, 400, many(engine, 20, 30))
    assert len(left) > 150
    assert left.count(0) + left.count(1) < len(left) // 10


def test_an_old_request_that_goes_on_for_long_keeps_no_others_from_being_saved(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two have as many blocks as three times what is examined."""
    monkeypatch.setattr(victims, "PUBLISHED_SECONDS", 0.0)
    more = {"max_num_seqs": 64, "max_num_batched_tokens": 128, "max_model_len": 4000}
    engine = make(blocks=257, arguments=more, lends=1 << 20)
    for _ in range(2):
        engine.add(new_tokens(25 * CHUNK), max_tokens=2000)
    left = saved_before(engine, 400, many(engine, 50, 40))
    assert len(left) > 300
    assert left.count(0) + left.count(1) < len(left) // 8


def test_of_a_request_that_runs_the_first_chunk_is_the_last_to_leave_the_pool(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server takes the first chunk of a commit for the most recent one. Without it nobody
    finds the others."""
    monkeypatch.setattr(victims, "PUBLISHED_SECONDS", 0.0)
    engine = make(lends=1 << 20)
    request = engine.add(new_tokens(4 * CHUNK + 5), max_tokens=CHUNK)
    early = list[int]()
    for _ in range(2 * victims.LOOK_PLANS):
        early += [number for number, _ in saved(engine, engine.step(), request)]
    assert early == [0, 1, 2, 3]


def test_what_ends_before_it_is_published_is_saved_once_it_is(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker drops what it has not published, as the chunk that an answer has just completed."""
    monkeypatch.setattr(victims, "PUBLISHED_SECONDS", inf)
    engine = make(lends=1 << 20)
    request = engine.add(new_tokens(CHUNK - 3), max_tokens=9)
    engine.finish(request)
    first, others = engine.step(), [engine.step() for _ in range(2 * victims.LOOK_PLANS)]
    assert [saved(engine, meta, request) for meta in (first, *others)].count([]) == len(others)
    monkeypatch.setattr(victims, "PUBLISHED_SECONDS", 0.0)
    again = [engine.step() for _ in range(2 * victims.LOOK_PLANS)]
    assert [number for meta in again for number, _ in saved(engine, meta, request)] == [0]
