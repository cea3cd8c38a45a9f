"""From the pool to the store and back, on the host and on a GPU: staging, promotion.
Bytes are compared.
"""

from __future__ import annotations

import pytest
from engine_cases import Node, get
from kv_cases import CHUNK, FLASH, MLA, Arrangement, Cache, places, prompt
from mooncake_cases import depot, model, needs_mooncake
from mooncake_store import Depot
from offload_cases import LENGTH, engine, nodes, through
from processes import SECONDS

from vcache_backend.protocol.messages import ChunkKey
from vcache_backend.transfer.load import Load
from vcache_backend.transfer.places import BlockPlaces
from vcache_backend.transfer.store import store

__all__ = ["depot", "model", "nodes"]
pytestmark = needs_mooncake

DEVICES = ["host", pytest.param("cuda:0", marks=pytest.mark.gpu)]


def cache_on(device: str, arrangement: Arrangement = FLASH) -> Cache:
    return Cache(arrangement, device="cpu" if device == "host" else device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("arrangement", [FLASH, MLA], ids=lambda value: value.name)
def test_what_one_node_stored_another_reads_and_keeps(
    nodes: list[Node],
    depot: Depot,
    model: str,
    device: str,
    arrangement: Arrangement,
) -> None:
    cache, tokens = cache_on(device, arrangement), prompt(LENGTH + 7)
    one, two = (engine(at, depot, model, cache=cache, device=device) for at in nodes)
    through(one, cache, tokens)
    (key, *_) = two.keys(tokens)
    assert (one.contains(key), two.contains(key), two.contains(ChunkKey(bytes(26)))) == (0, 1, -1)
    assert two.lookup(tokens) == LENGTH
    assert get(two, cache, tokens) == LENGTH
    stats = two.get_stats()
    assert (stats["hits"]["offload"], stats["bytes"]["offload"]) == (5, 5 * cache.chunk_bytes)
    # Promoted, and not written below again.
    assert two.flush(SECONDS, through=True)
    assert two.contains(key) == 0
    assert get(two, cache, tokens, seed=2) == LENGTH
    stats = two.get_stats()
    assert (stats["hits"]["vram"], stats["offload"]["written"]) == (5, 0)


@pytest.mark.parametrize("device", DEVICES)
def test_whole_blocks_are_filled_behind_a_mark(
    nodes: list[Node], depot: Depot, model: str, device: str
) -> None:
    """As the connector for vLLM does it: the model's stream goes on, and waits for nothing."""
    cache, tokens = cache_on(device), prompt(LENGTH)
    one, two = (engine(at, depot, model, cache=cache, device=device) for at in nodes)
    there, here = places(cache.sizes, LENGTH, 1), places(cache.sizes, LENGTH, 2)
    each, keys = CHUNK // cache.sizes.block_size, one.keys(tokens)
    blocks = (there[:: cache.sizes.block_size] // cache.sizes.block_size).reshape(-1, each).numpy()
    cache.fill(tokens, there)
    kv = one._session.bind(cache.tensors)
    at = BlockPlaces(kv, CHUNK, blocks.reshape(-1).tolist(), kv.block_size)
    assert store(one._session, at, keys, range(len(keys)), beside=True) is not None
    assert one.flush(SECONDS, through=True)
    cache.poison()
    session = two._session
    ids = (here[:: cache.sizes.block_size] // cache.sizes.block_size).tolist()
    kv = session.bind(cache.tensors)
    at = BlockPlaces(kv, CHUNK, ids, kv.block_size)
    load = Load(session, at, keys, mark=session.copier.mark())
    assert load.run(SECONDS) == len(keys)
    assert cache.holds_only(tokens, here)
    assert load.to_promote() == list(range(len(keys)))
    load.cancel()
    assert load.to_promote() == [], "the blocks may have another owner by now"
