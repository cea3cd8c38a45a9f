"""A worker's KV cache as others are told of it: where its pages lie, what a reader refuses, and
that it is shown again.
"""

from __future__ import annotations

import math
from contextlib import closing
from typing import Any

import instance_cases
import msgspec
import pytest
import torch
from kv_cases import ARRANGEMENTS, SMALL, Arrangement, Cache
from neighbour_cases import HOST, SharedCache, instance
from processes import PATIENT, QUICK, Stage, eventually

from vcache_backend.errors import LayoutError
from vcache_backend.protocol.messages import CacheShape, InstanceStats, LayerKind
from vcache_backend.resident.own_cache import cache_shape, check_shape, show_cache
from vcache_backend.vram_pool.copies.geometry import PagedKV
from vcache_backend.vram_pool.devices import Device
from vcache_backend.vram_pool.exports import Region

ONE = instance(1)
BLOCKS = SMALL.blocks


@pytest.fixture
def cache() -> Any:
    with closing(SharedCache(offset=64)) as made:
        yield made


@pytest.fixture
def shape(cache: SharedCache) -> CacheShape:
    return cache_shape(cache.kv, cache.region, HOST)


# ---- what it is


def test_the_shape_says_where_every_plane_begins(cache: SharedCache, shape: CacheShape) -> None:
    kv = cache.kv
    expected = ("host", "host", kv.name, 16)
    assert (shape.device, shape.medium, shape.layout, shape.block_size) == expected
    assert (shape.kinds, shape.num_blocks) == ([LayerKind(3, 2, 2048, 2048)], 24)
    assert shape.nbytes == 64 + 3 * cache.layer_bytes
    assert shape.planes == [64 + plane * cache.layer_bytes // 2 for plane in range(6)]
    assert [cache.region.address + at for at in shape.planes] == kv.planes[:, 0].tolist()


@pytest.mark.parametrize("arrangement", ARRANGEMENTS, ids=lambda each: each.name)
def test_every_layout_of_a_kv_cache_has_a_shape(arrangement: Arrangement) -> None:
    cache = Cache(arrangement)
    kv = PagedKV.describe(cache.tensors, SMALL.block_size)
    memory = [tensor.untyped_storage() for tensor in cache.tensors]
    first = min(one.data_ptr() for one in memory)
    end = max(one.data_ptr() + one.nbytes() for one in memory)
    shape = cache_shape(kv, Region(-1, end - first, first), HOST)
    assert len(shape.planes) == kv.layers * kv.parts
    check_shape(shape, BLOCKS, kv, HOST)


def test_a_cache_lies_where_the_pool_does(cache: SharedCache) -> None:
    """`pool.device: host` beside a GPU's KV cache: readers would take that for host memory."""
    with pytest.raises(LayoutError, match="on cpu, the pool on GPU-0; .*: set pool.device: auto"):
        cache_shape(cache.kv, cache.region, Device("GPU-0", "cuda", 0))


def test_a_layer_of_which_the_last_byte_lies_outside_is_refused(cache: SharedCache) -> None:
    short = cache.region._replace(nbytes=cache.region.nbytes - 1)
    with pytest.raises(LayoutError, match="layer 2, part 1 of the KV cache lies at"):
        cache_shape(cache.kv, short, HOST)
    behind = cache.region._replace(address=cache.region.address + 65)
    with pytest.raises(LayoutError, match="layer 0, part 0 of the KV cache lies at"):
        cache_shape(cache.kv, behind, HOST)


def test_layers_whose_blocks_are_not_equally_far_apart_are_refused() -> None:
    memory = torch.zeros(1 << 20, dtype=torch.uint8)
    dense, wide = memory[: 1 << 18].view(torch.bfloat16), memory[1 << 19 :].view(torch.bfloat16)
    shape = (BLOCKS, 16, 64)
    layers = [dense[: math.prod(shape)].view(shape)]
    layers += [wide[: 2 * math.prod(shape)].view(BLOCKS, 32, 64)[:, :16]]
    kv = PagedKV.describe(layers, 16)
    with pytest.raises(LayoutError, match=r"blocks are \[2048, 4096\] B apart"):
        cache_shape(kv, Region(-1, 1 << 20, memory.data_ptr()), HOST)


# ---- what a reader refuses


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layout": "other"}, "its KV cache has layout other, here part2"),
        (
            {"kinds": [LayerKind(4, 2, 1024, 2048)]},
            r"layers, parts and bytes a page \[\(4, 2, 1024\)\], here \[\(3, 2, 2048\)\]",
        ),
        ({"num_blocks": 25}, "25 blocks for 24 generations"),
        ({"kinds": [LayerKind(3, 2, 2048, 2047)]}, "pages of 2,048 B every 2,047 B"),
        ({"planes": [0] * 5}, "5 planes, but its layers have 6"),
        ({"planes": [0] * 5 + [-1]}, "plane 5 at bytes -1 to 49,151 of 294,976"),
        ({"planes": [0] * 5 + [1 << 60]}, "plane 5 at bytes .* of 294,976"),
        ({"num_blocks": 48}, "plane 5 at bytes .* of 294,976"),
    ],
)
def test_a_shape_that_does_not_fit_is_refused(
    cache: SharedCache, shape: CacheShape, changes: Any, message: str
) -> None:
    with pytest.raises(LayoutError, match=message):
        check_shape(msgspec.structs.replace(shape, **changes), BLOCKS, cache.kv, HOST)


# ---- shown


def instances(stage: Stage) -> list[InstanceStats]:
    return stage.client(PATIENT).stats().instances


def test_a_server_that_refuses_a_cache_is_heard_and_asked_again(
    alone: Stage, cache: SharedCache, shape: CacheShape, caplog: pytest.LogCaptureFixture
) -> None:
    alone.server()
    client, others = alone.client(QUICK), alone.client(PATIENT)
    for number in range(64):
        instance_cases.show(others, instance(100 + number))
    beats: list[int] = []
    client.on_beat.append(lambda: beats.append(1))
    shown = show_cache(client, ONE, 0, shape, cache.region)
    assert f"show_cache {ONE.hex()}: 64 instances share in place already" in shown.trouble
    eventually(lambda: len(beats) > 2)
    assert caplog.text.count("this KV cache is not shared in place") == 1
    others.close()
    eventually(lambda: shown.trouble == "")
    assert [one.missing for one in instances(alone)] == ["its scheduler"]


def test_what_was_closed_stays_hidden(alone: Stage, cache: SharedCache, shape: CacheShape) -> None:
    first, client = alone.server(), alone.client(QUICK)
    shown, before = show_cache(client, ONE, 0, shape, cache.region), client.connections_lost
    shown.close()
    shown.close()
    first.kill()
    eventually(lambda: client.connections_lost > before)
    alone.server()
    eventually(lambda: client.connected)
    client.stats()
    assert instances(alone) == []
