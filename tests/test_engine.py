"""The engine's five calls, against a real server process and host segments; other processes and failures have files of their own."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_cases import (
    ARRANGEMENTS,
    CHUNK,
    FLASH,
    MLA,
    PACKED,
    SMALL,
    Arrangement,
    Cache,
    Node,
    Sizes,
    UnfinishedCopier,
    get,
    layout_of,
    node,
    places,
    prompt,
    put,
)
from processes import QUICK, SECONDS, eventually

from vcache_backend import engine as engine_module
from vcache_backend.config import ClientConfig
from vcache_backend.engine import VCacheEngine
from vcache_backend.errors import ConfigError, LayoutError
from vcache_backend.metadata_server.client import Client
from vcache_backend.metadata_server.messages import SegmentInfo

ROOMY = 1 << 20
"""A segment that holds every chunk of most tests."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Of a server that the tests share."""
    with node(tmp_path_factory.mktemp("server")) as made:
        made.serve()
        yield made.path.parent


@pytest.fixture
def here(folder: Path) -> Iterator[Node]:
    """A node without any segment."""
    with node(folder) as made:
        yield made
        made.undo.close()
        client = made.client()
        for segment in client.list_segments():
            client.drop_segment(segment.id)
        eventually(lambda: not client.list_segments())


@pytest.fixture
def fresh(tmp_path: Path) -> Iterator[Node]:
    """A node whose server this test has for itself."""
    with node(tmp_path) as made:
        made.serve()
        yield made


class Pair:
    """A writer that lends a segment on host:a, a reader on host:b that lends nothing, and a cache of each."""

    def __init__(self, here: Node, arrangement: Arrangement = FLASH, chunks: int = 0, sizes: Sizes = SMALL) -> None:
        self.mine, self.theirs = Cache(arrangement, sizes), Cache(arrangement, sizes)
        self.layout = layout_of(self.mine)
        self.writer = here.engine("host:a", chunks * self.mine.chunk_bytes or ROOMY, self.layout)
        self.reader = here.engine("host:b", 0, self.layout)


@pytest.fixture
def pair(here: Node) -> Pair:
    return Pair(here)


def said(caplog: pytest.LogCaptureFixture, text: str) -> list[str]:
    return [record.getMessage() for record in caplog.records if text in record.getMessage()]


# ---- the bytes


@pytest.mark.parametrize("arrangement", ARRANGEMENTS, ids=lambda a: a.name)
def test_what_is_stored_comes_back_into_other_blocks_and_touches_nothing_else(here: Node, arrangement: Arrangement) -> None:
    pair = Pair(here, arrangement)
    tokens = prompt(4 * CHUNK)
    put(pair.writer, pair.mine, tokens)
    assert pair.reader.lookup(tokens) == 4 * CHUNK
    assert get(pair.reader, pair.theirs, tokens) == 4 * CHUNK
    assert get(pair.writer, pair.mine, tokens, seed=2) == 4 * CHUNK


def test_a_layer_replaced_between_two_calls_is_the_one_that_is_read_and_written(pair: Pair) -> None:
    put(pair.writer, pair.mine, prompt(2 * CHUNK))
    assert get(pair.reader, pair.theirs, prompt(2 * CHUNK)) == 2 * CHUNK
    for cache, other in ((pair.mine, Cache()), (pair.theirs, Cache())):
        for parts, others in ((cache._memory, other._memory), (cache.tensors, other.tensors), (cache._rows, other._rows)):
            parts[1], others[1] = others[1], parts[1]
    assert get(pair.reader, pair.theirs, prompt(2 * CHUNK)) == 2 * CHUNK
    put(pair.writer, pair.mine, prompt(2 * CHUNK, 2))
    assert get(pair.reader, pair.theirs, prompt(2 * CHUNK, 2)) == 2 * CHUNK


def test_a_view_of_fewer_blocks_is_never_written_beyond_its_end(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    tokens, half = prompt(2 * CHUNK), SMALL.blocks // 2
    put(pair.writer, pair.mine, tokens)
    assert get(pair.reader, pair.theirs, tokens) == 2 * CHUNK
    pair.theirs.poison()
    view, slots = [tensor[:, :half] for tensor in pair.theirs.tensors], torch.arange(2 * CHUNK) + half * SMALL.block_size
    assert not pair.reader.retrieve(tokens, None, view, slots).any()
    assert pair.theirs.holds_only(tokens[:0], slots[:0])
    assert said(caplog, f"blocks {half} to {half + 3} but the KV cache has {half} blocks")


def test_a_tail_shorter_than_a_chunk_is_not_stored(pair: Pair) -> None:
    tokens = prompt(2 * CHUNK + CHUNK - 1)
    put(pair.writer, pair.mine, tokens)
    assert pair.reader.lookup(tokens) == 2 * CHUNK
    assert get(pair.reader, pair.theirs, tokens) == 2 * CHUNK
    put(pair.writer, pair.mine, prompt(CHUNK - 1, 2))
    assert pair.reader.lookup(prompt(CHUNK - 1, 2)) == pair.reader.lookup([]) == 0
    for kind in (tokens.tolist(), tokens.int(), tokens.numpy()):
        mask = pair.reader.retrieve(kind, None, pair.theirs.tensors, places(SMALL, len(tokens), 1).numpy())
        assert (mask.dtype, mask.shape, mask.device.type, int(mask.sum())) == (torch.bool, tokens.shape, "cpu", 2 * CHUNK)
    assert pair.reader.retrieve([], None, pair.theirs.tensors, []).shape == (0,)


def test_a_hit_ends_where_the_prompts_part(pair: Pair) -> None:
    put(pair.writer, pair.mine, prompt(3 * CHUNK))
    other = torch.cat([prompt(2 * CHUNK + 1), prompt(2 * CHUNK, 2)])
    assert pair.reader.lookup(other) == 2 * CHUNK
    assert get(pair.reader, pair.theirs, other) == 2 * CHUNK
    assert pair.reader.lookup(prompt(3 * CHUNK, 3)) == 0
    assert get(pair.reader, pair.theirs, prompt(3 * CHUNK, 3)) == 0
    assert get(pair.reader, pair.theirs, torch.cat([prompt(1, 4), prompt(3 * CHUNK)])) == 0


# ---- what the caller has already, and what has no place


@pytest.mark.parametrize("arrangement", [FLASH, PACKED, MLA], ids=lambda a: a.name)
def test_a_prefix_the_caller_has_is_never_written(here: Node, arrangement: Arrangement) -> None:
    """Chunk-aligned, block-aligned and in the middle of a block, of which nothing is brought then."""
    pair = Pair(here, arrangement)
    tokens, slots, block = prompt(3 * CHUNK), places(pair.mine.sizes, 3 * CHUNK, 1), pair.mine.sizes.block_size
    put(pair.writer, pair.mine, tokens)
    for known in (CHUNK, 16, CHUNK + 16, 1, 5, 37, 2 * CHUNK - 1, 3 * CHUNK - 1, 3 * CHUNK):
        pair.theirs.poison()
        wanted = torch.arange(len(tokens)) >= known
        mask = pair.reader.retrieve(tokens, wanted, pair.theirs.tensors, slots)
        assert torch.equal(mask, torch.arange(len(tokens)) >= -(-known // block) * block), known
        assert pair.theirs.holds_only(tokens[mask], slots[mask]), known


def test_a_block_is_brought_as_a_whole_or_not_at_all(pair: Pair) -> None:
    """Not where a token has no slot, nor where the tokens do not lie in one block, in order."""
    tokens, slots, block = prompt(3 * CHUNK), places(pair.mine.sizes, 3 * CHUNK, 1), pair.mine.sizes.block_size
    put(pair.writer, pair.mine, tokens)
    slots[:7] = slots[CHUNK + 3] = slots[2 * CHUNK :] = -1
    slots[[CHUNK + block, CHUNK + block + 1]] = slots[[CHUNK + block + 1, CHUNK + block]]
    mask = pair.reader.retrieve(tokens, None, pair.theirs.tensors, slots)
    assert torch.equal(mask, (torch.arange(len(tokens)) >= block) & (torch.arange(len(tokens)) < CHUNK))
    assert pair.theirs.holds_only(tokens[mask], slots[mask])
    shifted = places(pair.mine.sizes, 3 * CHUNK + block, 3)[5:][: 3 * CHUNK]
    assert not pair.reader.retrieve(tokens, None, pair.theirs.tensors, shifted).any()
    other = prompt(3 * CHUNK, 2)
    pair.mine.fill(other, shifted)
    pair.writer.store(other, None, pair.mine.tensors, shifted)
    assert pair.writer.flush(SECONDS)
    assert pair.writer.lookup(other) == 0


@pytest.mark.parametrize("hole", [0, CHUNK + 5, 3 * CHUNK - 1])
def test_a_chunk_is_stored_if_all_its_tokens_have_a_slot(pair: Pair, hole: int) -> None:
    tokens, slots = prompt(3 * CHUNK), places(pair.mine.sizes, 3 * CHUNK)
    pair.mine.fill(tokens, slots)
    slots[hole] = -1
    pair.writer.store(tokens, None, pair.mine.tensors, slots)
    assert pair.writer.flush(SECONDS)
    there = [pair.reader.contains(key) == 0 for key in pair.reader.keys(tokens)]
    assert there == [chunk != hole // CHUNK for chunk in range(3)]
    put(pair.writer, pair.mine, tokens)
    assert get(pair.reader, pair.theirs, tokens) == 3 * CHUNK


@pytest.mark.parametrize("offset", [CHUNK, CHUNK + 16, 5])
def test_slot_mapping_may_begin_at_an_offset(pair: Pair, offset: int) -> None:
    """As LMCache calls: the first `offset` tokens are in the pool already, and no slots are given for them."""
    tokens, slots = prompt(4 * CHUNK), places(pair.mine.sizes, 4 * CHUNK)
    pair.mine.fill(tokens, slots)
    pair.writer.store(tokens, torch.arange(len(tokens)) >= offset, pair.mine.tensors, slots[offset:], offset)
    assert pair.writer.flush(SECONDS)
    first = -(-offset // CHUNK)
    assert [pair.reader.contains(key) for key in pair.reader.keys(tokens)] == [-1] * first + [0] * (4 - first)
    put(pair.writer, pair.mine, tokens[: first * CHUNK])
    assert get(pair.reader, pair.theirs, tokens) == 4 * CHUNK


def test_the_mask_of_a_store_skips_whole_chunks_only(pair: Pair) -> None:
    tokens, slots = prompt(3 * CHUNK), places(pair.mine.sizes, 3 * CHUNK)
    pair.mine.fill(tokens, slots)
    pair.writer.store(tokens, torch.arange(len(tokens)) >= CHUNK + 5, pair.mine.tensors, slots)
    assert pair.writer.flush(SECONDS)
    assert [pair.reader.contains(key) for key in pair.reader.keys(tokens)] == [-1, 0, 0]
    pair.writer.store(tokens, torch.zeros(len(tokens), dtype=torch.bool), pair.mine.tensors, slots)
    assert pair.writer.flush(SECONDS)
    assert pair.writer.contains(pair.writer.keys(tokens)[0]) == -1


# ---- whose chunks they are


def test_chunks_lie_on_all_devices_of_the_node(here: Node) -> None:
    mine, theirs = Cache(), Cache()
    layout = layout_of(mine)
    writer = here.engine("host:a", 2 * mine.chunk_bytes, layout)
    reader = here.engine("host:b", 4 * mine.chunk_bytes, layout)
    put(writer, mine, prompt(5 * CHUNK))
    used = {s["device"]: s["chunks"] for s in writer.get_stats()["server"]["segments"].values()}
    assert used == {"host:a": 2, "host:b": 3}
    assert get(reader, theirs, prompt(5 * CHUNK)) == 5 * CHUNK
    moved = reader.get_stats()["bytes"]
    assert (moved["own"], moved["peer"], moved["stored"]) == (3 * mine.chunk_bytes, 2 * mine.chunk_bytes, 0)


def test_several_segments_of_one_device_are_one_pool(here: Node) -> None:
    """A worker that wants more than its predecessor left gets a second segment for the rest."""
    mine, theirs = Cache(), Cache()
    layout = layout_of(mine)
    with VCacheEngine(here.config("host:a", 2 * mine.chunk_bytes), layout) as predecessor:
        put(predecessor, mine, prompt(2 * CHUNK))
    writer = here.engine("host:a", 5 * mine.chunk_bytes, layout)
    put(writer, mine, prompt(5 * CHUNK))
    segments = writer.get_stats()["server"]["segments"].values()
    assert sorted((s["device"], s["chunks"]) for s in segments) == [("host:a", 2), ("host:a", 3)]
    reader = here.engine("host:a", 0, layout)
    assert get(reader, theirs, prompt(5 * CHUNK)) == 5 * CHUNK
    assert reader.get_stats()["bytes"]["peer"] == 0


def test_a_chunk_counts_only_when_every_rank_has_stored_it(here: Node) -> None:
    caches = [Cache(), Cache()]
    layout = layout_of(caches[0], tp_size=2)
    ranks = [here.engine(f"host:{rank}", ROOMY, layout, rank=rank, ranks=2) for rank in range(2)]
    assert ranks[0].keys(prompt(CHUNK)) != ranks[1].keys(prompt(CHUNK))
    put(ranks[0], caches[0], prompt(3 * CHUNK))
    assert [engine.lookup(prompt(3 * CHUNK)) for engine in ranks] == [0, 0]
    put(ranks[1], caches[1], prompt(2 * CHUNK))
    assert [engine.lookup(prompt(3 * CHUNK)) for engine in ranks] == [2 * CHUNK, 2 * CHUNK]
    assert [get(engine, cache, prompt(2 * CHUNK)) for engine, cache in zip(ranks, caches, strict=True)] == [2 * CHUNK, 2 * CHUNK]


def test_a_salt_keeps_tenants_apart(pair: Pair) -> None:
    tokens = prompt(2 * CHUNK)
    put(pair.writer, pair.mine, tokens, salt=b"alice")
    assert [pair.reader.lookup(tokens, salt=salt) for salt in (b"", b"bob", b"alice")] == [0, 0, 2 * CHUNK]
    assert get(pair.reader, pair.theirs, tokens, salt=b"bob") == 0
    assert get(pair.reader, pair.theirs, tokens, salt=b"alice") == 2 * CHUNK
    assert pair.reader.contains(pair.reader.keys(tokens, salt=b"alice")[0]) == 0


def test_why_two_instances_do_not_share_is_said_once_on_either_side(fresh: Node, caplog: pytest.LogCaptureFixture) -> None:
    mine, fp16 = Cache(), Cache(FLASH._replace(dtype=torch.float16))
    fresh.engine("host:a", 0, layout_of(mine))
    fresh.engine("host:b", 0, layout_of(mine))
    assert not said(caplog, "does not share")
    fresh.engine("host:c", 0, layout_of(fp16))
    (line,) = said(caplog, "does not share")
    assert "dtype: 'float16' here, 'bfloat16' there" in line
    assert "block_size" not in line
    fresh.undo.close()
    fresh.server.signal(signal.SIGTERM)
    status, text = fresh.server.wait()
    assert status == 0
    assert text.count("does not share") == 1
    assert "dtype: 'float16' here" in text


# ---- the directory as the engine shows it


def test_contains_says_where_a_chunk_is_and_takes_no_lease(here: Node) -> None:
    pair = Pair(here, chunks=2)
    tokens = prompt(2 * CHUNK)
    first, second = pair.reader.keys(tokens)
    assert pair.reader.contains(first) == -1
    put(pair.writer, pair.mine, tokens)
    assert [pair.reader.contains(key) for key in (first, second)] == [0, 0]
    assert pair.reader.contains(pair.reader.keys(prompt(CHUNK, 9))[0]) == -1
    assert pair.reader.lookup(tokens) == 2 * CHUNK
    assert here.client().stats().leases == 0
    put(pair.writer, pair.mine, prompt(2 * CHUNK, 2))
    assert pair.reader.contains(first) == -1


def test_storing_twice_stores_once(pair: Pair) -> None:
    tokens = prompt(2 * CHUNK)
    put(pair.writer, pair.mine, tokens)
    put(pair.writer, pair.mine, tokens)
    put(pair.writer, pair.mine, prompt(3 * CHUNK))
    stats = pair.writer.get_stats()
    assert stats["server"]["chunks"] == 3
    assert stats["tokens"]["stored"] == 3 * CHUNK
    assert stats["not_stored"]["exists"] == 4
    assert get(pair.reader, pair.theirs, prompt(3 * CHUNK)) == 3 * CHUNK


def test_a_chunk_is_visible_only_when_its_copy_is_complete(here: Node) -> None:
    copier, mine, theirs = UnfinishedCopier(), Cache(), Cache()
    writer = here.engine("host:a", ROOMY, layout_of(mine), copier=copier)
    reader = here.engine("host:b", 0, layout_of(mine))
    tokens, slots = prompt(2 * CHUNK), places(mine.sizes, 2 * CHUNK)
    mine.fill(tokens, slots)
    writer.store(tokens, None, mine.tensors, slots)
    assert not writer.flush(0.2)
    assert (reader.lookup(tokens), reader.contains(reader.keys(tokens)[0])) == (0, -1)
    assert get(reader, theirs, tokens) == 0
    copier.finished.set()
    assert writer.flush(SECONDS)
    assert get(reader, theirs, tokens) == 2 * CHUNK


def test_a_store_that_would_wait_behind_too_many_others_is_skipped(here: Node) -> None:
    copier, mine = UnfinishedCopier(), Cache()
    writer = here.engine("host:a", ROOMY, layout_of(mine), copier=copier, max_inflight_stores=2)
    slots = places(mine.sizes, CHUNK)
    for family in range(1, 5):
        writer.store(prompt(CHUNK, family), None, mine.tensors, slots)
    copier.finished.set()
    assert writer.flush(SECONDS)
    assert [writer.lookup(prompt(CHUNK, family)) for family in range(1, 5)] == [CHUNK, CHUNK, 0, 0]
    assert writer.get_stats()["not_stored"]["backlog"] == 2


def test_the_pool_evicts_the_coldest(fresh: Node) -> None:
    pair = Pair(fresh, chunks=3)
    for family in (1, 2, 3):
        put(pair.writer, pair.mine, prompt(CHUNK, family))
    assert get(pair.reader, pair.theirs, prompt(CHUNK, 1)) == CHUNK
    put(pair.writer, pair.mine, prompt(CHUNK, 4))
    assert [pair.reader.lookup(prompt(CHUNK, family)) for family in (1, 2, 3, 4)] == [CHUNK, 0, CHUNK, CHUNK]
    assert pair.writer.get_stats()["server"]["evictions"] == 1
    for family in (1, 3, 4):
        assert get(pair.reader, pair.theirs, prompt(CHUNK, family)) == CHUNK


def test_a_prefix_the_caller_kept_stays_as_warm_as_what_it_loads(here: Node) -> None:
    pair = Pair(here, chunks=3)
    put(pair.writer, pair.mine, prompt(2 * CHUNK))
    put(pair.writer, pair.mine, prompt(CHUNK, 2))
    tokens, slots = prompt(2 * CHUNK), places(pair.mine.sizes, 2 * CHUNK)
    assert pair.reader.retrieve(tokens, torch.arange(len(tokens)) >= CHUNK, pair.theirs.tensors, slots).sum() == CHUNK
    assert pair.reader.flush(SECONDS)
    put(pair.writer, pair.mine, prompt(CHUNK, 3))
    assert pair.reader.lookup(tokens) == 2 * CHUNK
    assert pair.reader.lookup(prompt(CHUNK, 2)) == 0


def test_a_chunk_larger_than_a_segment_is_one_clear_line(here: Node, caplog: pytest.LogCaptureFixture) -> None:
    mine = Cache()
    engine = here.engine("host:a", mine.chunk_bytes - 4096, layout_of(mine))
    for family in (1, 2):
        put(engine, mine, prompt(2 * CHUNK, family))
    assert engine.lookup(prompt(2 * CHUNK)) == 0
    (line,) = said(caplog, "not stored")
    assert f"needs {mine.chunk_bytes:,} B" in line
    assert f"set pool.segment_bytes >= {mine.chunk_bytes}" in line
    assert engine.get_stats()["not_stored"]["no_slot"] == 4


# ---- statistics


def test_stats_count_what_happened(fresh: Node) -> None:
    pair = Pair(fresh, chunks=4)
    chunk = pair.mine.chunk_bytes
    put(pair.writer, pair.mine, prompt(3 * CHUNK))
    assert pair.writer.lookup(prompt(5 * CHUNK)) == pair.reader.lookup(prompt(5 * CHUNK)) == 3 * CHUNK
    assert get(pair.writer, pair.mine, prompt(2 * CHUNK)) == 2 * CHUNK
    assert get(pair.reader, pair.theirs, prompt(5 * CHUNK)) == 3 * CHUNK
    writer, reader = pair.writer.get_stats(), pair.reader.get_stats()
    assert writer["tokens"] == {"asked": 5 * CHUNK, "hit": 3 * CHUNK, "retrieved": 2 * CHUNK, "stored": 3 * CHUNK}
    assert (writer["hits"]["vram"], writer["misses"]) == (2, 0)
    below = {"offload": 0, "offload_written": 0}
    assert writer["bytes"] == {"own": 2 * chunk, "peer": 0, "stored": 3 * chunk} | below
    assert (reader["hits"]["vram"], reader["misses"]) == (3, 2)
    assert reader["bytes"] == {"own": 0, "peer": 3 * chunk, "stored": 0} | below
    assert (reader["device"], reader["connected"], reader["failures"]) == ("host:b", True, {})
    (segment,) = reader["server"]["segments"].values()
    assert segment == {"device": "host:a", "nbytes": 4 * chunk, "used": 3 * chunk, "chunks": 3, "state": "live"}
    assert (reader["server"]["chunks"], reader["server"]["evictions"]) == (3, 0)


@pytest.mark.parametrize("missing", [None, 0, 1, 2, 5, 7])
def test_a_large_retrieve_is_launched_in_two_parts(pair: Pair, monkeypatch: pytest.MonkeyPatch, missing: int | None) -> None:
    """Of eight chunks two are on their way before the others are looked at; the lease of both ends with the last."""
    monkeypatch.setattr(engine_module, "SPLIT_BYTES", 1)
    tokens = prompt(8 * CHUNK)
    put(pair.writer, pair.mine, tokens)
    if missing is not None:
        pair.writer._session.remove([pair.writer.keys(tokens)[missing]])
    assert get(pair.reader, pair.theirs, prompt(CHUNK, 2)) == 0
    found = CHUNK * (8 if missing is None else missing)
    assert get(pair.reader, pair.theirs, tokens) == found
    assert pair.reader.get_stats()["retrieve_copy"]["count"] == min(found // (2 * CHUNK), 1) + (found > 2 * CHUNK) + (
        found == CHUNK
    )
    client = pair.reader._session.client
    eventually(lambda: client.stats().leases == 0)


def test_a_slot_named_twice_is_refused_also_behind_the_part_that_is_launched_first(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "SPLIT_BYTES", 1)
    tokens, slots = prompt(8 * CHUNK), places(pair.theirs.sizes, 8 * CHUNK)
    put(pair.writer, pair.mine, tokens)
    slots[-1] = slots[7 * CHUNK]
    assert get(pair.reader, pair.theirs, prompt(CHUNK, 2)) == 0
    with pytest.raises(ValueError, match="each token needs a slot of its own"):
        pair.reader.retrieve(tokens, None, pair.theirs.tensors, slots)
    client = pair.reader._session.client
    eventually(lambda: client.stats().leases == 0)


def test_stats_split_metadata_time_from_data_time(pair: Pair) -> None:
    put(pair.writer, pair.mine, prompt(3 * CHUNK))
    assert pair.reader.lookup(prompt(3 * CHUNK)) == 3 * CHUNK
    assert get(pair.reader, pair.theirs, prompt(3 * CHUNK)) == 3 * CHUNK
    writer, reader = pair.writer.get_stats(), pair.reader.get_stats()
    assert [writer[name]["count"] for name in ("store", "reserve", "commit", "store_copy")] == [1, 1, 1, 1]
    assert [reader[name]["count"] for name in ("lookup", "retrieve", "acquire", "retrieve_copy")] == [1] * 4
    for stats, whole in ((writer, "store"), (reader, "retrieve")):
        assert stats["metadata_us"] > 0
        assert stats["data_us"] > 0
        assert stats[whole]["p50_us"] <= stats[whole]["p99_us"]
    assert reader["gb_per_s"]["retrieve"] > 0
    assert reader["gb_per_s"]["store"] == writer["gb_per_s"]["retrieve"] == 0.0


# ---- arguments


def test_arguments_that_cannot_be_meant_are_errors_that_say_which(pair: Pair) -> None:
    tokens, slots, kv = prompt(CHUNK), places(pair.mine.sizes, CHUNK), pair.mine.tensors
    true = torch.ones(CHUNK, dtype=torch.bool)
    hole = true.clone()
    hole[3] = False
    calls = [
        (r"mask .*\(31,\).*expected \(32,\)", lambda e: (tokens, true[1:], kv, slots)),
        (r"mask .*int64.*torch\.bool", lambda e: (tokens, true.long(), kv, slots)),
        (r"mask .*list.*torch\.bool", lambda e: (tokens, true.tolist(), kv, slots)),
        (r"mask must be False on a prefix", lambda e: (tokens, hole, kv, slots)),
        (r"slot_mapping .*\(31,\).*32 tokens", lambda e: (tokens, None, kv, slots[1:])),
        (r"slot_mapping .*\(2, 16\)", lambda e: (tokens, None, kv, slots.view(2, 16))),
        (r"slot_mapping .*float.*integers", lambda e: (tokens, None, kv, slots.float())),
        (r"tokens .*float.*integers", lambda e: (tokens.float(), None, kv, slots)),
        (r"tokens .*\(32, 1\)", lambda e: (tokens[:, None], None, kv, slots)),
        (r"tokens .*bool", lambda e: (true, None, kv, slots)),
        (
            rf"slot {slots[4]} to the tokens at \[4, 9\]",
            lambda e: (tokens, None, kv, slots.index_fill(0, torch.tensor([9]), slots[4])),
        ),
        (r"slot_mapping .*18446744073709551615", lambda e: (tokens, None, kv, np.full(CHUNK, -1).astype(np.uint64))),
        (r"kvcaches .*NoneType", lambda e: (tokens, None, None, slots)),
    ]
    for pattern, arguments in calls:
        for call in (pair.writer.store, pair.writer.retrieve):
            with pytest.raises(ValueError, match=pattern):
                call(*arguments(pair.writer))
    with pytest.raises(ValueError, match=r"slot_mapping .*offset 5"):
        pair.writer.store(tokens, None, kv, slots, 5)
    with pytest.raises(ValueError, match=r"slot_mapping .*offset -1"):
        pair.writer.store(tokens, None, kv, torch.cat([slots, slots[:1]]), -1)
    with pytest.raises(ValueError, match=r"tokens .*float"):
        pair.writer.lookup([0.5] * CHUNK)
    assert pair.writer.get_stats()["failures"] == {}


def test_whatever_it_is_asked_an_engine_raises_nothing_but_value_error(here: Node, pair: Pair) -> None:
    tokens, slots, kv, e = prompt(CHUNK), places(SMALL, CHUNK), pair.mine.tensors, pair.writer
    odd: list[object] = [None, 0, -1, 1 << 70, 0.5, float("nan"), "x", b"x", (), [], [[1], [1, 2]], {}, {"a": 1}, object(), Cache]
    odd += [[None] * CHUNK]
    odd += [torch.tensor(1), torch.empty(CHUNK, device="meta"), torch.ones(CHUNK).to_sparse(), np.array([object()] * CHUNK)]
    odd += [
        [torch.empty_like(layer, device="meta") for layer in kv],
        [kv[0].to_sparse()] * 3,
        [torch.ones(CHUNK, dtype=torch.bool)],
    ]
    for x in odd:
        for call in (
            lambda x: (e.lookup(x), e.lookup(tokens, salt=x)),
            lambda x: e.store(x, None, kv, slots),
            lambda x: e.store(tokens, x, kv, slots),
            lambda x: e.store(tokens, None, x, slots),
            lambda x: e.store(tokens, None, kv, x),
            lambda x: e.store(tokens, None, kv, slots, x),
            lambda x: e.store(tokens, None, kv, slots, salt=x),
            lambda x: e.retrieve(x, None, kv, slots),
            lambda x: e.retrieve(tokens, x, kv, slots),
            lambda x: e.retrieve(tokens, None, x, slots),
            lambda x: e.retrieve(tokens, None, kv, x),
            lambda x: e.retrieve(tokens, None, kv, slots, salt=x),
            e.contains,
            e.keys,
            lambda x: e.keys(tokens, salt=x),
            e.flush,
        ):
            with contextlib.suppress(ValueError):
                call(x)
    assert e.flush(SECONDS)
    assert e.keys(tokens, salt=None) == e.keys(tokens)
    stats = here.client().stats()
    assert stats.leases == stats.reservations == stats.quarantined == 0


def test_places_outside_of_the_cache_are_a_failure_not_a_write(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    tokens, slots = prompt(2 * CHUNK), places(pair.mine.sizes, 2 * CHUNK)
    put(pair.writer, pair.mine, tokens)
    for wrong in (pair.mine.sizes.blocks * pair.mine.sizes.block_size, -2):
        outside = slots.clone()
        outside[CHUNK + 7] = wrong
        assert not pair.reader.retrieve(tokens, None, pair.theirs.tensors, outside).any()
        assert pair.theirs.holds_only(tokens[:0], slots[:0])
    outside = torch.where(slots == slots[7], 10**9, slots)
    pair.writer.store(prompt(2 * CHUNK, 2), None, pair.mine.tensors, outside)
    assert pair.writer.flush(SECONDS)
    assert pair.writer.lookup(prompt(2 * CHUNK, 2)) == 0
    assert pair.writer.get_stats()["server"]["segments"].popitem()[1]["used"] == 2 * pair.mine.chunk_bytes
    assert len(said(caplog, "load failed")) == len(said(caplog, "store failed")) == 1


def test_an_impossible_configuration_is_an_error_at_construction(here: Node) -> None:
    mine = Cache()
    with pytest.raises(ValueError, match=r"layout\.chunk_size is 64, engine\.chunk_size is 32"):
        VCacheEngine(here.config("host:a"), layout_of(mine, 64))
    with pytest.raises(ConfigError, match=r"pool\.device"):
        VCacheEngine(here.config("tape:0"), layout_of(mine))


def test_register_refuses_kv_caches_that_are_not_what_the_layout_says(here: Node) -> None:
    pair = Pair(here)
    pair.writer.register(pair.mine.tensors)
    for wrong in (Cache(PACKED), Cache(FLASH, Sizes(dim=32)), Cache(FLASH, Sizes(layers=2))):
        with pytest.raises(LayoutError, match="the layout says 3 of"):
            pair.reader.register(wrong.tensors)


# ---- threads, and the end


def test_lookup_runs_beside_store_and_retrieve(here: Node) -> None:
    """The scheduler's side never sees an impossible answer, and the worker's bytes stay right."""
    pair = Pair(here, chunks=6)
    done, odd, lookups = threading.Event(), [], [0]

    def schedule() -> None:
        while not done.is_set():
            for family in range(1, 5):
                found = pair.reader.lookup(prompt(3 * CHUNK, family))
                pair.reader.contains(pair.reader.keys(prompt(CHUNK, family))[0])
                if found not in (0, CHUNK, 2 * CHUNK, 3 * CHUNK):
                    odd.append(found)
                lookups[0] += 1
            pair.reader.get_stats()

    thread = threading.Thread(target=schedule)
    thread.start()
    try:
        for turn in range(12):
            put(pair.writer, pair.mine, prompt(3 * CHUNK, 1 + turn % 4))
            assert get(pair.reader, pair.theirs, prompt(3 * CHUNK, 1 + turn % 4), seed=turn) == 3 * CHUNK
            # What it has read may be evicted again: its lease ends behind its back.
            assert pair.reader.flush(SECONDS)
    finally:
        done.set()
        thread.join(SECONDS)
    assert not thread.is_alive()
    assert not odd
    assert lookups[0] > 12
    assert pair.reader.get_stats()["failures"] == {}


def _held() -> tuple[int, int, int]:
    """File descriptors, mappings of segments and threads of this process."""
    gc.collect()
    mappings = sum("vcache" in line for line in Path("/proc/self/maps").read_text().splitlines())
    return len(os.listdir("/proc/self/fd")), mappings, threading.active_count()


def test_close_is_idempotent_and_leaves_nothing_behind(tmp_path: Path) -> None:
    """Over many lives of engines, with heartbeats all the time."""
    busy = ClientConfig(connect_seconds=10, request_seconds=10, control_seconds=10, heartbeat_seconds=0.0005)
    with node(tmp_path, busy) as here:
        here.serve()
        mine = Cache()
        layout = layout_of(mine)
        keeper = here.engine("host:a", ROOMY, layout)
        put(keeper, mine, prompt(2 * CHUNK))

        def live(life: int) -> VCacheEngine:
            engine = VCacheEngine(here.config("host:b", ROOMY), layout)
            assert get(engine, mine, prompt(2 * CHUNK), seed=life) == 2 * CHUNK
            put(engine, mine, prompt(CHUNK, 2 + life))
            return engine

        with live(0):
            # The keeper maps what the other one lends, for good.
            eventually(lambda: len(keeper._session.pool.mapped()) == 2)
        before = _held()
        closed = []
        for life in range(1, 6):
            engine = live(life)
            assert all(now > was for now, was in zip(_held(), before, strict=True))
            engine.close()
            engine.close()
            closed.append(engine)
        assert _held() == before
        assert {engine.lookup(prompt(CHUNK)) for engine in closed} == {0}
        assert keeper.lookup(prompt(2 * CHUNK)) == 2 * CHUNK


def test_a_heartbeat_under_way_maps_nothing_after_close(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with node(tmp_path, QUICK) as here:
        here.serve()
        mine = Cache()
        here.engine("host:a", ROOMY, layout_of(mine))
        engine = here.engine("host:b", 0, layout_of(mine))
        assert len(engine._session.pool.mapped()) == 1
        whole, asked = Client.list_segments, threading.Event()

        def slow(client: Client) -> list[SegmentInfo]:
            infos = whole(client)
            if client is engine._session.client:
                asked.set()
                time.sleep(0.2)
            return infos

        monkeypatch.setattr(Client, "list_segments", slow)
        assert asked.wait(SECONDS)
        engine.close()
        time.sleep(0.3)
        assert engine._session.pool.mapped() == []


def test_close_finishes_the_stores_under_way(here: Node) -> None:
    pair = Pair(here)
    tokens, slots = prompt(4 * CHUNK), places(pair.mine.sizes, 4 * CHUNK)
    pair.mine.fill(tokens, slots)
    pair.writer.store(tokens, None, pair.mine.tensors, slots)
    pair.writer.close()
    assert get(pair.reader, pair.theirs, tokens) == 4 * CHUNK


def test_what_a_closed_engine_is_asked_is_a_miss(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    put(pair.writer, pair.mine, prompt(CHUNK))
    pair.writer.close()
    assert pair.writer.lookup(prompt(CHUNK)) == 0
    assert get(pair.writer, pair.mine, prompt(CHUNK)) == 0
    pair.writer.store(prompt(CHUNK), None, pair.mine.tensors, places(pair.mine.sizes, CHUNK))
    assert pair.writer.contains(pair.writer.keys(prompt(CHUNK))[0]) == -1
    assert pair.writer.get_stats()["server"] is None
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
