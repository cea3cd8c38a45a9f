"""The engine's five calls, against a real server process and host segments; other processes and
failures have files of their own.
"""

from __future__ import annotations

import gc
import threading
from pathlib import Path

import engine_cases
import msgspec
import pytest
import torch
from engine_cases import ROOMY, Node, Pair, fresh, get, node, pair, put, said
from kv_cases import CHUNK, SMALL, Cache, layout_of, places, prompt
from memory_cases import mappings, open_fds
from processes import PATIENT, QUICK, SECONDS, eventually, ran

from vcache_backend.engine import VCacheEngine
from vcache_backend.transfer import store

__all__ = ["fresh", "pair"]


# ---- the bytes


def test_a_layer_replaced_between_two_calls_is_the_one_that_is_read_and_written(pair: Pair) -> None:
    put(pair.writer, pair.mine, prompt(2 * CHUNK))
    assert get(pair.reader, pair.theirs, prompt(2 * CHUNK)) == 2 * CHUNK
    for cache, other in ((pair.mine, Cache()), (pair.theirs, Cache())):
        for name in ("memory", "tensors", "rows"):
            parts, others = getattr(cache, name), getattr(other, name)
            parts[1], others[1] = others[1], parts[1]
    assert get(pair.reader, pair.theirs, prompt(2 * CHUNK)) == 2 * CHUNK
    put(pair.writer, pair.mine, prompt(2 * CHUNK, 2))
    assert get(pair.reader, pair.theirs, prompt(2 * CHUNK, 2)) == 2 * CHUNK


def test_no_view_is_written_beyond_its_end(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    tokens, half = prompt(2 * CHUNK), SMALL.blocks // 2
    put(pair.writer, pair.mine, tokens)
    assert get(pair.reader, pair.theirs, tokens) == 2 * CHUNK
    pair.theirs.poison()
    view = [tensor[:, :half] for tensor in pair.theirs.tensors]
    slots = torch.arange(2 * CHUNK) + half * SMALL.block_size
    for _ in range(2):
        assert not pair.reader.retrieve(tokens, None, view, slots).any()
        assert pair.theirs.holds_only(tokens[:0], slots[:0])
        pair.reader.store(prompt(2 * CHUNK, 2), None, view, slots)
        assert pair.reader.flush(SECONDS)
    (load,) = said(caplog, "load failed")
    assert f"blocks {half} to {half + 3} but the KV cache has {half} blocks" in load
    assert len(said(caplog, "store failed")) == 1
    (segment,) = pair.reader.get_stats()["server"]["segments"].values()
    assert segment["used"] == 2 * pair.mine.chunk_bytes, "nothing is stored or kept for it"


def test_a_tail_shorter_than_a_chunk_is_not_stored(pair: Pair) -> None:
    tokens = prompt(2 * CHUNK + CHUNK - 1)
    put(pair.writer, pair.mine, tokens)
    assert pair.reader.lookup(tokens) == 2 * CHUNK
    assert get(pair.reader, pair.theirs, tokens) == 2 * CHUNK
    put(pair.writer, pair.mine, prompt(CHUNK - 1, 2))
    assert pair.reader.lookup(prompt(CHUNK - 1, 2)) == pair.reader.lookup([]) == 0
    for kind in (tokens.tolist(), tokens.int(), tokens.numpy()):
        slots = places(SMALL, len(tokens), 1).numpy()
        mask = pair.reader.retrieve(kind, None, pair.theirs.tensors, slots)
        expected = (torch.bool, tokens.shape, "cpu", 2 * CHUNK)
        assert (mask.dtype, mask.shape, mask.device.type, int(mask.sum())) == expected
    assert pair.reader.retrieve([], None, pair.theirs.tensors, []).shape == (0,)


# ---- what the caller has already, and what has no place


def test_a_prefix_the_caller_has_is_never_written(pair: Pair) -> None:
    """Chunk-aligned, block-aligned and in the middle of a block, of which nothing is brought
    then.
    """
    tokens = prompt(3 * CHUNK)
    slots = places(pair.mine.sizes, 3 * CHUNK, 1)
    block = pair.mine.sizes.block_size
    put(pair.writer, pair.mine, tokens)
    for known in (CHUNK, 16, 37, 3 * CHUNK - 1, 3 * CHUNK):
        pair.theirs.poison()
        wanted = torch.arange(len(tokens)) >= known
        mask = pair.reader.retrieve(tokens, wanted, pair.theirs.tensors, slots)
        assert torch.equal(mask, torch.arange(len(tokens)) >= -(-known // block) * block), known
        assert pair.theirs.holds_only(tokens[mask], slots[mask]), known


@pytest.mark.parametrize("offset", [CHUNK, 5])
def test_slot_mapping_may_begin_at_an_offset(pair: Pair, offset: int) -> None:
    """As LMCache calls: the first `offset` tokens are in the pool already, and no slots are given
    for them.
    """
    tokens, slots = prompt(4 * CHUNK), places(pair.mine.sizes, 4 * CHUNK)
    pair.mine.fill(tokens, slots)
    wanted = torch.arange(len(tokens)) >= offset
    pair.writer.store(tokens, wanted, pair.mine.tensors, slots[offset:], offset)
    assert pair.writer.flush(SECONDS)
    first = -(-offset // CHUNK)
    there = [pair.reader.contains(key) for key in pair.reader.keys(tokens)]
    assert there == [-1] * first + [0] * (4 - first)
    put(pair.writer, pair.mine, tokens[: first * CHUNK])
    assert get(pair.reader, pair.theirs, tokens) == 4 * CHUNK


# ---- whose chunks they are


# ---- the directory as the engine shows it


def test_a_store_behind_too_many_is_skipped(fresh: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "MAX_INFLIGHT", 2)
    copier, mine = engine_cases.UnfinishedCopier(), Cache()
    writer = fresh.engine("host:a", ROOMY, layout_of(mine), copier=copier)
    slots = places(mine.sizes, CHUNK)
    for family in range(1, 5):
        writer.store(prompt(CHUNK, family), None, mine.tensors, slots)
    copier.finished.set()
    assert writer.flush(SECONDS)
    assert [writer.lookup(prompt(CHUNK, family)) for family in range(1, 5)] == [CHUNK, CHUNK, 0, 0]
    assert writer.get_stats()["not_stored"]["backlog"] == 2


# ---- statistics


def test_stats_count_what_happened(fresh: Node) -> None:
    # Loads are told with heartbeats.
    fresh.client_config = QUICK
    pair = Pair(fresh, chunks=4)
    chunk = pair.mine.chunk_bytes
    put(pair.writer, pair.mine, prompt(3 * CHUNK))
    assert pair.writer.lookup(prompt(5 * CHUNK)) == 3 * CHUNK
    assert get(pair.writer, pair.mine, prompt(2 * CHUNK)) == 2 * CHUNK
    assert get(pair.reader, pair.theirs, prompt(5 * CHUNK)) == 3 * CHUNK
    writer, reader = pair.writer.get_stats(), pair.reader.get_stats()
    tokens = {"asked": 5, "hit": 3, "retrieved": 2, "stored": 3}
    assert writer["tokens"] == {name: count * CHUNK for name, count in tokens.items()}
    assert (writer["hits"]["vram"], writer["misses"]) == (2, 0)
    assert (reader["hits"]["vram"], reader["misses"]) == (3, 2)
    below = {"offload": 0, "offload_written": 0}
    assert writer["bytes"] == {"own": 2 * chunk, "peer": 0, "stored": 3 * chunk} | below
    assert reader["bytes"] == {"own": 0, "peer": 3 * chunk, "stored": 0} | below
    assert (reader["device"], reader["connected"], reader["failures"]) == ("host:b", True, {})
    (segment,) = reader["server"]["segments"].values()
    assert (segment["device"], segment["used"], segment["chunks"]) == ("host:a", 3 * chunk, 3)
    # Two loads of two and three chunks, out of the pool.
    stats = pair.writer._session.client.stats
    eventually(lambda: stats().minute == (2, 5 * CHUNK))
    read = {row.nbytes: (row.instance, row.tokens) for row in stats().reads}
    assert read == {count * chunk: ("pool", count * CHUNK) for count in (2, 3)}
    counted = [writer[name]["count"] for name in ("store", "reserve", "commit", "store_copy")]
    assert counted == [1, 1, 1, 1]


# ---- its end


def _held() -> tuple[int, int, int]:
    """File descriptors, mappings of segments and threads of this process."""
    gc.collect()
    return open_fds(), mappings(), threading.active_count()


def test_close_is_idempotent_and_leaves_nothing_behind(tmp_path: Path) -> None:
    """Over many lives of engines, with heartbeats all the time."""
    with node(tmp_path, msgspec.structs.replace(PATIENT, heartbeat_seconds=0.0005)) as here:
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
        inherited = ran("ls", "-l", "/proc/self/fd", close_fds=False).stdout
        assert "memfd:" not in inherited, "a program started meanwhile has none of it either"
        closed = []
        for life in range(1, 4):
            engine = live(life)
            assert all(now > was for now, was in zip(_held(), before, strict=True))
            engine.close()
            engine.close()
            closed.append(engine)
        # Fewer where something of an earlier test went meanwhile.
        assert all(now <= was for now, was in zip(_held(), before, strict=True))
        assert {engine.lookup(prompt(CHUNK)) for engine in closed} == {0}
        assert keeper.lookup(prompt(2 * CHUNK)) == 2 * CHUNK


def test_close_finishes_the_stores_under_way(fresh: Node) -> None:
    copier, mine, tokens = engine_cases.UnfinishedCopier(), Cache(), prompt(4 * CHUNK)
    writer = fresh.engine("host:a", ROOMY, layout_of(mine), copier=copier)
    slots = places(mine.sizes, len(tokens))
    mine.fill(tokens, slots)
    writer.store(tokens, None, mine.tensors, slots)
    threading.Timer(0.1, copier.finished.set).start()
    writer.close()
    assert get(fresh.engine("host:b", 0, layout_of(mine)), mine, tokens) == len(tokens)
