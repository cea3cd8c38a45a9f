"""A reset of the connector: what the scheduler was told before it counts no more."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from engine_cases import CHUNK, SNAPPY, Cache, Node, layout_of, node, prompt, put
from processes import SECONDS
from vllm_cases import OURS

from vcache_backend.engine import VCacheEngine
from vcache_backend.metadata_server.messages import NAMESPACE_BYTES
from vcache_backend.transfer.courier import Courier

CHUNKS = 5


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Node]:
    with node(tmp_path, SNAPPY) as made:
        made.serve()
        yield made


@pytest.fixture
def engine(here: Node) -> VCacheEngine:
    cache = Cache()
    made = here.undo.enter_context(VCacheEngine(here.config("host", 4 << 20), layout_of(cache)))
    put(made, cache, prompt(CHUNKS * CHUNK))
    assert made.flush(SECONDS)
    return made


@pytest.mark.parametrize("way", ["look_up", "lease"])
def test_an_answer_of_before_is_no_answer_after_it(here: Node, engine: VCacheEngine, way: str) -> None:
    """Of a request that waits to be scheduled meanwhile: its chunks are those of other weights."""
    pytest.importorskip("vllm.distributed.kv_events")
    finders, schedulers = (import_module(f"{OURS}.{name}") for name in ("finder", "scheduler"))
    keys = engine.keys(prompt(CHUNKS * CHUNK))
    client = here.client()
    with closing(Courier(client)) as releaser:
        finder: Any = finders.Finder.__new__(finders.Finder)
        finder._client, finder._releaser, finder._below = client, releaser, None
        finder._meter = SimpleNamespace(looked_up=lambda *_: None)
        finder._prefix, finder._namer, finder._shards, finder.refused = keys[0][:NAMESPACE_BYTES], object(), {(0, 0): 0}, ""
        finder.ranks, finder._size = 1, CHUNK
        finder.readable = frozenset(segment.id for segment in client.stats().segments)
        tracked = finders.Tracked(SimpleNamespace(request_id="1"), None, keys=keys)
        side: Any = schedulers.SchedulerSide.__new__(schedulers.SchedulerSide)
        side.finder, side._requests = finder, {"1": tracked}
        ask = getattr(finder, way)

        assert ask(tracked, 0, CHUNKS) == ask(tracked, 0, CHUNKS) == CHUNKS
        assert (tracked.granted is not None) is (way == "lease")
        assert side.reset()
        assert tracked.granted is None
        assert ask(tracked, 0, CHUNKS) == 0
        releaser.flush(SECONDS)
    assert client.stats().leases == 0
