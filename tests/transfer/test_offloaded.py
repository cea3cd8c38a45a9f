"""Loads out of the offload tier, into places of all kinds."""

from __future__ import annotations

from contextlib import closing

import pytest
import torch
from engine_cases import Node
from kv_cases import CHUNK, Cache, places, prompt
from mooncake_cases import depot, model, needs_mooncake
from mooncake_store import Depot
from neighbour_cases import Owner, instance, mapped
from offload_cases import LENGTH, cache_on, engine, nodes, through
from processes import PATIENT, SECONDS

from vcache_backend.resident.mappings import Neighbours
from vcache_backend.transfer.load import Load
from vcache_backend.transfer.places import BlockPlaces
from vcache_backend.transfer.store import store

__all__ = ["depot", "model", "nodes"]


pytestmark = needs_mooncake


# ---- on the host and on a GPU

DEVICES = ["host", pytest.param("cuda:0", marks=pytest.mark.gpu)]


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


def test_a_chunk_whose_first_block_is_resident_is_fetched_for_the_rest(
    nodes: list[Node], depot: Depot, model: str
) -> None:
    cache, tokens = Cache(), prompt(LENGTH)
    one, two = (engine(at, depot, model, cache=cache) for at in nodes)
    through(one, cache, tokens)
    session, size = two._session, cache.sizes.block_size
    kv, count = session.bind(cache.tensors), LENGTH // size
    with closing(Owner(nodes[1].path, PATIENT, instance(1))) as owner:
        there = owner.compute(tokens[: 3 * size], [7, 2, 9])
        neighbours = Neighbours(session.client, session.device, kv, 0)
        assert mapped(neighbours, owner.name)
        cache.poison()
        at = BlockPlaces(kv, CHUNK, range(count), size)
        keys = one.keys(tokens)
        load = Load(session, at, keys, runs=[there], neighbours=neighbours)
        assert load.run(SECONDS) == len(keys)
        neighbours.close()
    assert cache.holds_only(tokens, torch.arange(LENGTH))
    assert load.stats.tokens == {"resident": 3 * size, "store": LENGTH - 3 * size}
    assert load.to_promote() == list(range(1, len(keys)))
