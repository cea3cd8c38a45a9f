"""A worker's KV cache as others are told of it: where its pages lie, what a reader refuses, and
that it is shown again.
"""

from __future__ import annotations

import math
from contextlib import closing
from typing import Any

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
    with closing(SharedCache(regions=2, offset=64)) as made:
        yield made


@pytest.fixture
def shape(cache: SharedCache) -> CacheShape:
    return cache_shape(cache.kv, cache.regions, HOST)


# ---- what it is


def test_the_shape_says_where_every_plane_begins(cache: SharedCache, shape: CacheShape) -> None:
    kv = cache.kv
    expected = ("host", "host", kv.name, 16)
    assert (shape.device, shape.medium, shape.layout, shape.block_size) == expected
    assert (shape.kinds, shape.num_blocks) == ([LayerKind(3, 2, 2048, 2048)], 24)
    assert shape.regions == [64 + 2 * cache.layer_bytes, 64 + cache.layer_bytes]
    part = cache.layer_bytes // 2
    # Layers 0 and 2 lie in the first region, in the order in which `SharedCache` puts them.
    expected = [64, 64 + part, 64 + 2 * part, 64 + 3 * part]
    assert [offset for region, offset in shape.planes if region == 0] == expected
    addresses = [cache.regions[region].address + offset for region, offset in shape.planes]
    assert addresses == kv.planes[:, 0].tolist()


@pytest.mark.parametrize("arrangement", ARRANGEMENTS, ids=lambda each: each.name)
def test_every_layout_of_a_kv_cache_has_a_shape(arrangement: Arrangement) -> None:
    cache = Cache(arrangement)
    kv = PagedKV.describe(cache.tensors, SMALL.block_size)
    memory = [tensor.untyped_storage() for tensor in cache.tensors]
    regions = [Region(-1, one.nbytes(), one.data_ptr()) for one in memory]
    shape = cache_shape(kv, regions, HOST)
    assert len(shape.planes) == kv.layers * kv.parts
    check_shape(shape, BLOCKS, kv, HOST)


def test_a_cache_lies_where_the_pool_does(cache: SharedCache) -> None:
    """`pool.device: host` beside a GPU's KV cache: readers would take that for host memory."""
    with pytest.raises(LayoutError, match="on cpu, the pool on GPU-0; .*: set pool.device: auto"):
        cache_shape(cache.kv, cache.regions, Device("GPU-0", "cuda", 0))


def test_a_layer_of_which_the_last_byte_lies_outside_is_refused(cache: SharedCache) -> None:
    short = [region._replace(nbytes=region.nbytes - 1) for region in cache.regions]
    with pytest.raises(LayoutError, match="layer 1, part 1 of the KV cache lies at"):
        cache_shape(cache.kv, short, HOST)


def test_layers_whose_blocks_are_not_equally_far_apart_are_refused() -> None:
    memory = torch.zeros(1 << 20, dtype=torch.uint8)
    dense, wide = memory[: 1 << 18].view(torch.bfloat16), memory[1 << 19 :].view(torch.bfloat16)
    shape = (BLOCKS, 16, 64)
    layers = [dense[: math.prod(shape)].view(shape)]
    layers += [wide[: 2 * math.prod(shape)].view(BLOCKS, 32, 64)[:, :16]]
    kv = PagedKV.describe(layers, 16)
    with pytest.raises(LayoutError, match=r"blocks are \[2048, 4096\] B apart"):
        cache_shape(kv, [Region(-1, 1 << 20, memory.data_ptr())], HOST)


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
        ({"planes": [(0, 0)] * 5}, "5 planes, but its layers have 6"),
        ({"planes": [(0, 0)] * 5 + [(0, -1)]}, "plane 5 lies at bytes -1 to .* of region 0"),
        ({"planes": [(0, 0)] * 5 + [(2, 0)]}, "plane 5 lies in region 2 of 2"),
        ({"planes": [(0, 0)] * 5 + [(0, 1 << 60)]}, "of region 0, which has"),
        ({"num_blocks": 48}, "plane . lies at bytes .* which has"),
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
    client, wrong = alone.client(QUICK), list(cache.regions[:1])
    beats: list[int] = []
    client.on_beat.append(lambda: beats.append(1))
    shown = show_cache(client, ONE, 0, shape, wrong)
    assert f"show_cache {ONE.hex()}: 1 fds came along; its 2 regions" in shown.trouble
    eventually(lambda: len(beats) > 2)
    assert caplog.text.count("this KV cache is not shared in place") == 1
    wrong[:] = cache.regions
    eventually(lambda: shown.trouble == "")
    assert [one.missing for one in instances(alone)] == ["its scheduler"]


def test_what_was_closed_stays_hidden(alone: Stage, cache: SharedCache, shape: CacheShape) -> None:
    first, client = alone.server(), alone.client(QUICK)
    shown, before = show_cache(client, ONE, 0, shape, cache.regions), client.connections_lost
    shown.close()
    shown.close()
    first.kill()
    eventually(lambda: client.connections_lost > before)
    alone.server()
    eventually(lambda: client.connected)
    client.stats()
    assert instances(alone) == []
