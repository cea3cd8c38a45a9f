"""The end of an engine."""

from __future__ import annotations

import gc
import os
import threading
from pathlib import Path

from engine_cases import ROOMY, Node, Pair, folder, get, node, put, shared
from kv_cases import CHUNK, Cache, layout_of, places, prompt
from processes import eventually, ran

from vcache_backend.config import ClientConfig
from vcache_backend.engine import VCacheEngine

__all__ = ["folder", "shared"]


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


def test_close_finishes_the_stores_under_way(shared: Node) -> None:
    pair = Pair(shared)
    tokens, slots = prompt(4 * CHUNK), places(pair.mine.sizes, 4 * CHUNK)
    pair.mine.fill(tokens, slots)
    pair.writer.store(tokens, None, pair.mine.tensors, slots)
    pair.writer.close()
    assert get(pair.reader, pair.theirs, tokens) == 4 * CHUNK
