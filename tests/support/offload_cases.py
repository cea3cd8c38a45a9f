"""Engines with a real Mooncake below their pool, on two nodes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from engine_cases import Node, node, put
from kv_cases import CHUNK, FLASH, Arrangement, Cache, layout_of
from mooncake_store import Depot
from processes import QUICK, SECONDS, eventually

from vcache_backend.engine import VCacheEngine

ROOMY = 4 << 20
LENGTH = 5 * CHUNK
TIER = {"retry_seconds": 0.05, "lookup_seconds": 10.0, "get_seconds": 10.0}
"""What breaks is tried again soon; but only tests of deadlines set some that a slow machine may
miss."""


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[list[Node]]:
    """Two, each with a server of its own."""
    with node(tmp_path / "one", QUICK) as one, node(tmp_path / "two", QUICK) as two:
        for made in (one, two):
            made.serve()
        yield [one, two]


def engine(
    at: Node,
    store: Depot,
    model: str,
    cache: Cache | None = None,
    device: str = "host",
    room: int = ROOMY,
    **offload: Any,
) -> VCacheEngine:
    """An engine of `at` whose tier is open. room: bytes that it lends to the pool."""
    cache = cache or Cache()
    tier = store.offload(**(TIER | offload))
    config = msgspec.structs.replace(at.config(device, room), offload=tier)
    made = VCacheEngine(config, layout_of(cache, model=model))
    at.undo.enter_context(made)
    made.register(cache.tensors)
    eventually(lambda: made.get_stats()["offload"]["usable"])
    return made


def through(made: VCacheEngine, cache: Cache, tokens: torch.Tensor) -> None:
    """Store, and wait until it is below."""
    put(made, cache, tokens)
    assert made.flush(SECONDS, through=True)


def cache_on(device: str, arrangement: Arrangement = FLASH) -> Cache:
    return Cache(arrangement, device="cpu" if device == "host" else device)
