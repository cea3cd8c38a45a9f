"""Generations of blocks beside vLLM's own block pool: what changes them, when, and that vLLM
notices nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm.v1.core.block_pool", reason="vLLM is not installed")

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id

from vcache_backend.integration.vllm.blocks import KVBlocks
from vcache_backend.integration.vllm.duplicates import Duplicates
from vcache_backend.integration.vllm.news import ServerNews
from vcache_backend.integration.vllm.publications import Publications
from vcache_backend.integration.vllm.requests import DEFAULT, StoreState, Tracked
from vcache_backend.protocol.messages import COPY, BlockTable, Copies, InstanceId, Segments
from vcache_backend.vram_pool.generations import Generations, GenerationView

OWNER, BLOCKS, EACH = b"o" * 16, 12, 2


class Watched:
    """A pool that is watched, and what others see of it. It is its own connection to the server, by
    which it sees the owner's blocks."""

    connected = True

    def __init__(self) -> None:
        self.pool = BlockPool(BLOCKS, enable_caching=True, hash_block_size=4)
        self.owner = Generations(OWNER, BLOCKS)
        self.theirs = GenerationView(self.owner.fd, OWNER, BLOCKS)
        self.publications = Publications(BLOCKS, {0: BlockTable("full")})
        self.news = ServerNews(copies=True)
        self.generations = self.publications.generations
        self.blocks = KVBlocks(self.pool, lambda *_: self.generations.give_up())
        self.duplicates = Duplicates(self.blocks, self, self.publications, EACH)
        self.publications.pool.watch(self.blocks)
        instance = self.publications.instance
        self.seen = GenerationView(self.generations.fd, instance, BLOCKS)
        self.hashes = 0

    def view(self, instance: bytes) -> GenerationView | None:
        """Another instance's blocks."""
        return self.theirs if instance == OWNER else None

    def take(self, count: int) -> tuple[Any, list[int]]:
        """Blocks of vLLM's, void as they are handed out, and filled then; and which generations
        changed meanwhile.
        """
        before, blocks = self.seen.counters.copy(), self.pool.get_new_blocks(count)
        ids = np.array([block.block_id for block in blocks], dtype=np.intp)
        assert (self.seen.counters[ids] & np.uint64(1)).all()
        self.generations.filled(ids)
        return blocks, self.changed(before)

    def known(self, blocks: list[Any]) -> None:
        """vLLM finds them, each under a name of its own, until they are handed out."""
        for block in blocks:
            self.hashes += 1
            name = make_block_hash_with_group_id(self.hashes.to_bytes(4), 0)
            self.pool._insert_block_hash(name, block, num_tokens=4)

    def read(self, chunks: list[int]) -> tuple[Tracked, list[Any]]:
        """A request has loaded these chunks of the owner's, two blocks each, into blocks of its
        own, has published them, and hears that the owner has them, too.
        """
        blocks, _ = self.take(len(chunks) * EACH)
        ids = np.array([block.block_id for block in blocks], dtype=np.uint32)
        self.known(blocks)
        for chunk, own in zip(chunks, ids.reshape(-1, EACH).tolist(), strict=True):
            last = EACH * chunk + EACH - 1
            self.hear(own[-1], own[0], last, int(self.owner.counters[last]))
        return used(ids), blocks

    def hear(self, own: int, first: int, block: int, generation: int) -> None:
        """The server says that the owner has a copy of the chunk in these blocks, too. own, block:
        the last of the chunk here, and there.
        """
        here = int(self.seen.counters[own % BLOCKS])
        copy = COPY.pack(own, here, first, block, generation)
        self.news.hear(Segments([], 0, [Copies(InstanceId(OWNER), copy)]))
        self.duplicates.learn()

    def end(self, tracked: Tracked, blocks: list[Any]) -> None:
        """The request ends."""
        self.duplicates.finished(tracked)
        self.pool.free_blocks(reversed(blocks))

    def changed(self, before: Any) -> list[int]:
        """Blocks whose generation is another."""
        return [int(block) for block in np.flatnonzero(self.seen.counters != before)]


def used(blocks: Any) -> Tracked:
    """A request with these blocks."""
    return Tracked(None, DEFAULT, may_load=True, store=StoreState([list(blocks)]))


@pytest.fixture
def watched() -> Iterator[Watched]:
    made = Watched()
    yield made
    made.generations.close()
    made.owner.close()


def freed(watched: Watched, chunks: list[int]) -> list[Any]:
    """The blocks of a request that has read these chunks, and has ended."""
    tracked, blocks = watched.read(chunks)
    watched.end(tracked, blocks)
    return blocks


def fill_up(watched: Watched, count: int) -> list[Any]:
    """A request of its own has computed so many blocks, and has ended."""
    blocks, _ = watched.take(count)
    watched.known(blocks)
    watched.duplicates.finished(used([block.block_id for block in blocks]))
    watched.pool.free_blocks(reversed(blocks))
    return blocks


def test_of_two_that_would_give_the_same_up_at_once_one_keeps_it(watched: Watched) -> None:
    """Else it would be lost, most often where both plan their steps at the same time."""
    fill_up(watched, BLOCKS - 1 - EACH)
    copy = freed(watched, [0])
    end, view = copy[-1].block_id, watched.view
    before, seen = watched.seen.counters[end], list[int]()

    def meanwhile(instance: bytes) -> GenerationView | None:
        seen.append(int(watched.seen.counters[end]))
        watched.owner.void([EACH - 1])
        return view(instance)

    watched.view = meanwhile
    watched.take(1)
    assert seen[0] % 2, "the other would not see it"
    assert all(block.block_hash is not None for block in copy)
    assert watched.seen.counters[end] == before


def test_a_server_may_say_anything_of_copies(watched: Watched) -> None:
    """Impossible ones are passed over, the others count, and they take a bounded memory."""
    own = fill_up(watched, BLOCKS - 1 - EACH)
    copy = freed(watched, [0])
    places = iter([block.block_id for block in own])
    for block, generation in [(BLOCKS, 2), ((1 << 32) - 1, 2), (1, 0), (1, (1 << 64) - 1)]:
        first, last = next(places), next(places)
        watched.hear(last, first, block, generation)
    for last, first in ((BLOCKS, 1), ((1 << 32) - 1, 1), (next(places), BLOCKS)):
        watched.hear(last, first, 1, 2)
    watched.hear(copy[-1].block_id, copy[0].block_id, EACH - 1, 2)
    watched.take(1)
    assert copy[-1].block_hash is None
    assert all(block.block_hash is not None for block in own)
    for number in range(1000):
        watched.hear(number % BLOCKS, 0, 1, 2)
    assert watched.duplicates.count <= BLOCKS // EACH


def test_a_kept_block_is_handed_out_last_of_all_though_it_has_no_hash(watched: Watched) -> None:
    """A decode server may still read what a prompt has behind its last whole block."""
    blocks, _ = watched.take(1)
    watched.publications.pool.keep(blocks[0].block_id)
    fill_up(watched, BLOCKS - 2)
    watched.pool.free_blocks(blocks)
    assert watched.take(BLOCKS - 1)[0][-1] is blocks[0]


@pytest.mark.parametrize("used", [0, 2], ids=["nothing runs", "blocks are in use"])
@pytest.mark.parametrize("call", ["_evict", "_reset"])
def test_blocks_are_void_before_vllm_evicts_or_resets_them(
    watched: Watched, call: str, used: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM computes into evicted blocks without handing them out anew, and where it refuses a
    reset the weights change all the same.
    """
    blocks, asked = watched.take(used)[0], list[bool]()
    ids, theirs = [block.block_id for block in blocks], getattr(watched.blocks, call)

    def ask(*given: Any) -> Any:
        asked.append(bool((watched.generations.counters[ids] & np.uint64(1)).all()))
        return theirs(*given)

    monkeypatch.setattr(watched.blocks, call, ask)
    if call == "_evict":
        watched.pool.evict_blocks(set(ids))
    else:
        assert watched.pool.reset_prefix_cache() == (not used)
    assert asked == [True]


def test_what_vllm_never_hands_out_is_never_read(watched: Watched) -> None:
    """Its null block, which takes what no request wants, and blocks that nobody has filled."""
    odd = watched.seen.counters & np.uint64(1)
    assert odd.all()
    _, changed = watched.take(BLOCKS - 1)
    assert sorted({*range(BLOCKS)} - {*changed}) == [watched.pool.null_block.block_id]
    void = np.flatnonzero(watched.seen.counters & np.uint64(1)).tolist()
    assert void == [watched.pool.null_block.block_id]


@pytest.mark.parametrize("call", ["get", "evict", "reset"])
def test_if_counting_fails_nobody_believes_it_and_vllm_goes_on(watched: Watched, call: str) -> None:
    """Here: its memory can be read only, and is too small."""
    blocks, _ = watched.take(2)
    assert not watched.seen.dead
    watched.generations.counters = np.frombuffer(bytes(8), dtype=np.uint64)
    if call == "get":
        assert len(watched.pool.get_new_blocks(3)) == 3
    elif call == "evict":
        watched.pool.evict_blocks({blocks[0].block_id})
    else:
        assert not watched.pool.reset_prefix_cache()
    assert watched.seen.dead
    assert watched.blocks.failed
