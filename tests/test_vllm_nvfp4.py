"""KV in NVFP4, in pages as vLLM makes them: half a byte a number, and beside them a scale for each
16.

Only a GPU computes with it. Its layout, allocation and views are vLLM's own, here on the CPU.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from vllm_cases import beside_vllm, needs_vllm

from vcache_backend.config import EngineConfig
from vcache_backend.integration.vllm.model import spec as model_spec
from vcache_backend.vram_pool.copies.copier import HostCopier
from vcache_backend.vram_pool.copies.planner import plan_blocks
from vcache_backend.vram_pool.slots import SlotView

pytestmark = needs_vllm
BLOCK, BLOCKS, HEADS, HEAD, LAYERS = 16, 12, 2, 128, 3
CHUNK = 4 * BLOCK
FROM, TO = [7, 1, 4, 2], [3, 8, 11, 5]


def moved(served: object, layout: str) -> tuple[int, dict[str, bool]]:
    """In a process with vLLM: the blocks FROM go through a slot of the pool into TO. Bytes of a
    chunk, and what is equal then.
    """
    for name in ("", ".decode", ".prefill", ".utils"):
        # Kernels, which vLLM imports with the class that knows the layout.
        sys.modules[f"flashinfer{name}"] = kernels = MagicMock()
        kernels.__spec__ = ModuleSpec(f"flashinfer{name}", None)
    from vllm.v1 import kv_cache_interface as kinds
    from vllm.v1.attention.backends import flashinfer
    from vllm.v1.kv_cache_layout import KVCacheLayout
    from vllm.v1.worker.utils import allocate_kv_cache

    plain = kinds.FullAttentionSpec(
        block_size=BLOCK,
        num_kv_heads=HEADS,
        head_size=HEAD,
        dtype=torch.uint8,
        kv_quant_mode=kinds.KVQuantMode.NVFP4,
    )
    spec = flashinfer.FlashInferBackend.customize_spec(plain)
    names, page = [f"layer {number}" for number in range(LAYERS)], spec.page_size_bytes
    apart = (page * BLOCKS, page) if layout.startswith("L") else (page, page * LAYERS)
    tensor = kinds.KVCacheTensor(page * BLOCKS * LAYERS, names, *apart)
    config = kinds.KVCacheConfig(BLOCKS, [tensor], [kinds.KVCacheGroupSpec(names, spec)])
    caches = allocate_kv_cache(config, torch.device("cpu"), KVCacheLayout[layout])
    for cache in caches.values():
        cache.copy_(torch.randint(256, cache.shape, dtype=torch.uint8))
    kv = model_spec.describe(
        SimpleNamespace(cache_config=SimpleNamespace(block_size=BLOCK)),
        caches,
        BLOCKS,
        CHUNK,
        EngineConfig(),
    )
    slot = SlotView.over(torch.zeros(kv.chunk_bytes(CHUNK), dtype=torch.uint8), local=True)
    copier = HostCopier()
    for blocks, copy in ((FROM, copier.gather), (TO, copier.scatter)):
        assert copy(kv, plan_blocks(kv, CHUNK, np.array(blocks)), [slot]).wait(0)
    equal: dict[str, Any] = {}
    for name, cache in caches.items():
        data, scales, _ = flashinfer._nvfp4_kv_views(cache, HEADS)
        for what, parts in (("data", data), ("scales", scales)):
            for side, part in zip("KV", parts, strict=True):
                raw = part.view(torch.uint8)
                equal[f"{name} {side} {what} {tuple(raw.shape)}"] = bool(
                    (raw[FROM] == raw[TO]).all() and raw[FROM].any()
                )
    return kv.chunk_bytes(CHUNK), equal


@pytest.mark.parametrize("layout", ["LBNHC", "BLHNC"])
def test_scales_lie_in_the_pages_of_what_they_scale_and_come_with_it(layout: str) -> None:
    with beside_vllm() as worker:
        nbytes, equal = worker.ask(moved, layout)
    # 9 bytes for 16 numbers, as `vcache doctor --model` counts them.
    assert nbytes == CHUNK * LAYERS * 2 * HEADS * HEAD * 9 // 16
    assert len(equal) == LAYERS * 4
    assert all(equal.values()), equal
