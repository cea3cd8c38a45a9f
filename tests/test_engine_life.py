"""The engine in several threads, and its end."""

from __future__ import annotations

import gc
import os
import threading
from pathlib import Path

from engine_cases import ROOMY, Node, Pair, folder, get, node, put, shared
from kv_cases import CHUNK, Cache, layout_of, places, prompt
from processes import SECONDS, eventually

from vcache_backend.config import ClientConfig
from vcache_backend.engine import VCacheEngine

__all__ = ["folder", "shared"]


# ---- threads, and the end


def test_lookup_runs_beside_store_and_retrieve(shared: Node) -> None:
    """The scheduler's side never sees an impossible answer, and the worker's bytes stay right."""
    pair = Pair(shared, chunks=6)
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
            assert (
                get(pair.reader, pair.theirs, prompt(3 * CHUNK, 1 + turn % 4), seed=turn)
                == 3 * CHUNK
            )
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
    busy = ClientConfig(
        connect_seconds=10, request_seconds=10, control_seconds=10, heartbeat_seconds=0.0005
    )
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


def test_close_finishes_the_stores_under_way(shared: Node) -> None:
    pair = Pair(shared)
    tokens, slots = prompt(4 * CHUNK), places(pair.mine.sizes, 4 * CHUNK)
    pair.mine.fill(tokens, slots)
    pair.writer.store(tokens, None, pair.mine.tensors, slots)
    pair.writer.close()
    assert get(pair.reader, pair.theirs, tokens) == 4 * CHUNK
