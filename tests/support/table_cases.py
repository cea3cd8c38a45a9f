"""KV caches of several block tables as vLLM itself lays them out on the CPU, in memory that other
instances can map: what a worker of a model with windows, local attention or states has."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from neighbour_cases import HOST, NAMESPACE
from soak import scheduling
from vllm.v1 import kv_cache_interface as kinds
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache
from vllm_objects import vllm_config

from vcache_backend.config import ClientConfig
from vcache_backend.integration.vllm.model import groups
from vcache_backend.integration.vllm.worker.in_place import Exporter
from vcache_backend.protocol.client import Client
from vcache_backend.protocol.messages import InstanceId, Join, ResidentRun
from vcache_backend.resident.own_cache import cache_shape, show_cache
from vcache_backend.vram_pool.generations import Generations

BLOCKS, BLOCK = 64, 16
PAGE = 2 * 2 * 64 * 2 * BLOCK
HEADS: dict[str, Any] = {"num_kv_heads": 2, "head_size": 64, "dtype": torch.bfloat16}


def planned(layers: dict[str, Any], layout: str, blocks: int = 10) -> kinds.KVCacheConfig:
    """What a worker gets from vLLM for these layers: so many blocks, in this layout."""
    config = vllm_config(
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
        attention_config=SimpleNamespace(hisparse_config=None),
        cache_config__num_gpu_blocks_override=blocks,
        cache_config__prefix_cache_retention_interval=None,
        cache_config__get_resolved_kv_cache_layout=lambda: KVCacheLayout[layout],
    )
    tables = kv_cache_utils.get_kv_cache_groups(config, dict(layers))
    return kv_cache_utils.get_kv_cache_config_from_groups(config, tables, 1 << 30)


full, window, local = (
    partial(make, **HEADS) for make in (scheduling.full, scheduling.window, scheduling.local)
)
_PARTS: dict[str, Any] = {"shapes": ((3, 40), (8, 20)), "dtypes": (torch.bfloat16, torch.float32)}
state = partial(scheduling.state, **_PARTS, page_size_padded=PAGE)
"""Two tensors in one page, as Mamba 2 has them, and room behind them."""


def sparse() -> dict[str, Any]:
    """The layers of DeepSeek V3.2 with fp8, as vLLM describes them: latents and the indexer's keys."""
    latent = {"dtype": torch.uint8, "head_size": 576, "state_content_bytes": 656}
    latent |= {"is_index_group_leader": True}
    layers = {}
    for number in range(3):
        attention = kinds.MLAAttentionSpec(block_size=64, num_kv_heads=1, **latent)
        keys = {"head_size": 132, "dtype": torch.uint8, "cache_role": kinds.SparseCacheRole.INDEXER}
        indexer = kinds.MLAAttentionSpec(block_size=64, num_kv_heads=1, **keys)
        layers |= {f"{number}.attn": attention, f"{number}.indexer.k_cache": indexer}
    return layers


def _every(count: int, one: Any, other: Any, layers: int = 8) -> dict[str, Any]:
    """Every `count`-th layer is the one, all others are the other."""
    return {f"layer {n}": one if n % count == count - 1 else other for n in range(layers)}


def models() -> dict[str, dict[str, Any]]:
    """Layers, by a model that has such."""
    wide = full(num_kv_heads=1, head_size=256)
    return {
        "gemma 3": _every(6, full(), window(64)),
        "gpt-oss": _every(2, full(), window(48)),
        "gemma 4": _every(6, wide, window(64)),
        "llama 4": _every(4, full(), local(64)),
        "qwen 3.5": _every(4, full(), state()),
        "mistral": {"layer 0": window(48), "layer 1": window(48)},
        "all kinds": {
            **_every(2, full(), window(48), 4),
            **{f"state {n}": state() for n in range(3)},
            "other": window(96),
        },
        "deepseek 3.2": sparse(),
    }


class Tables:
    """A worker's KV cache. Each table's blocks are written and read through vLLM's view of each of
    its layers alone."""

    def __init__(self, model: str, layout: str, cut: int = 1) -> None:
        """cut: how many blocks of the kernel make a block of vLLM; a state's blocks are whole."""
        self.config = planned(models()[model], layout, BLOCKS)
        kept = [group.kv_cache_spec for group in self.config.kv_cache_groups]
        sizes = [one.block_size // (1 if type(one) is kinds.MambaSpec else cut) for one in kept]
        exporter = Exporter("cpu")
        context = exporter.context()
        assert context is not None
        with context:
            there = torch.device("cpu"), KVCacheLayout[layout], sizes
            self.views = allocate_kv_cache(self.config, *there)
        self.whole = next(iter(self.views.values())).untyped_storage()
        self.groups = groups.read(self.config, groups.fitting(self.config, 64), in_place=True)
        self.kv = self.groups.describe(self.views, BLOCKS)
        self.region = exporter.region(self.views)
        self.shape = cache_shape(self.kv, self.region, HOST)
        self.layers = [group.layer_names for group in self.config.kv_cache_groups]

    def bytes(self) -> torch.Tensor:
        """All of it, as one tensor over the memory."""
        return torch.empty(0, dtype=torch.uint8).set_(self.whole)

    def fill(self, table: int, block: int, seed: int) -> None:
        """Write a block: every element of it, in all layers of the table; each layer's differ."""
        dice = torch.Generator().manual_seed(seed)
        for name in self.layers[table]:
            view = self._block(name, block)
            content = torch.randint(0, 256, (view.nbytes,), generator=dice, dtype=torch.uint8)
            view.copy_(content.view(view.dtype).view(view.shape))

    def held(self, table: int, block: int) -> list[bytes]:
        """A block's elements in each layer of the table."""
        views = [self._block(name, block) for name in self.layers[table]]
        return [view.contiguous().view(torch.uint8).numpy().tobytes() for view in views]

    def _block(self, name: str, block: int) -> torch.Tensor:
        cut = len(self.views[name]) // BLOCKS
        return self.views[name][block * cut : (block + 1) * cut]


class Owner(Tables):
    """An instance whose KV cache others read: its scheduler and its only worker."""

    def __init__(self, path: Path, config: ClientConfig, name: InstanceId, *given: Any) -> None:
        """given: see `Tables`."""
        torch.set_num_threads(1)
        super().__init__(*given)
        self.name, self.client = name, Client(path, config, HOST.name, HOST.medium)
        self.table = Generations(name, BLOCKS)
        sizes = [group.kv_cache_spec.block_size for group in self.config.kv_cache_groups]
        shared = [group.table(min(sizes)) for group in self.groups.all]
        self.client.join(Join(InstanceId(name), NAMESPACE, BLOCKS, 1, 4, shared), self.table.fd)
        self.shown = show_cache(self.client, name, 0, self.shape, self.region)

    def write(self, table: int, blocks: Sequence[int]) -> tuple[ResidentRun, list[list[bytes]]]:
        """As vLLM does: the blocks are handed out, a step is planned, and they are written. As
        others would find them, and what they hold."""
        self.table.void(list(blocks))
        self.table.filled(list(blocks))
        for block in blocks:
            self.fill(table, block, 1000 * table + block)
        numbers = np.array(blocks, dtype="<u4").tobytes()
        generations = self.table.counters[list(blocks)].astype("<u8").tobytes()
        run = ResidentRun(0, numbers, generations, table, self.name)
        return run, [self.held(table, block) for block in blocks]

    def close(self) -> None:
        self.shown.close()
        self.table.close()
        self.client.close()
