"""One worker's access to the pool: connection, segments, copier, commits, offload tier, counts."""

from __future__ import annotations

import logging
import operator
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import torch

from vcache_backend.config import Config, OffloadConfig
from vcache_backend.errors import LayoutError, VCacheError
from vcache_backend.protocol.client import Client
from vcache_backend.protocol.messages import ChunkKey, of_rank
from vcache_backend.transfer.layout import Layout
from vcache_backend.transfer.outbox import Outbox
from vcache_backend.transfer.stats import EngineStats
from vcache_backend.vram_pool import devices
from vcache_backend.vram_pool.copies.copier import Copier, HostCopier
from vcache_backend.vram_pool.copies.geometry import PagedKV
from vcache_backend.vram_pool.memory_budget import LEAST, Shortfall
from vcache_backend.vram_pool.pool import Pool

if TYPE_CHECKING:
    from vcache_backend.offload.tier import OffloadTier
    from vcache_backend.offload.transfers import Fetch

log = logging.getLogger(__name__)

KVCaches = Sequence[torch.Tensor] | Mapping[str, torch.Tensor]


class Session:
    """Looks up and copies chunks for one rank of one model instance.

    Look-ups may come from any thread; `bind` and copies from the worker's thread that
    launches kernels. Methods raise VCacheError (or torch's RuntimeError). `miss` counts an error as
    a miss, and logs each cause once."""

    def __init__(
        self,
        config: Config,
        layout: Layout,
        *,
        rank: int = 0,
        copier: Copier | None = None,
        over_budget: Callable[[int, int], Shortfall | None] = lambda whole, new: None,
        anonymous: bool = False,
        kv_device: str = "",
        name: str = "",
    ) -> None:
        """Connect, and lend this worker's segment. Of the default size only what fits is lent: see
        `over_budget` in `Pool`.

        Raises ConfigError, and ValueError if `layout` has another chunk size. An absent server is
        no error: until it answers, everything is a miss.

        rank: in the keys of chunks that this worker stores. anonymous: do not tell the server the
        layout; another process of this instance does. kv_device: the device of the future KV
        caches, see `devices.resolve`. name: of the instance, for the server's status."""
        if layout.chunk_size != config.engine.chunk_size:
            ours = f"engine.chunk_size is {config.engine.chunk_size}"
            raise ValueError(f"layout.chunk_size is {layout.chunk_size}, {ours}")
        self.layout = layout
        self.namespace = layout.namespace()
        self.chunk_size, self.rank = layout.chunk_size, rank
        self.counts = not rank
        """Whether this worker counts loads for the server: one of an instance does."""
        self._config = config
        self.stats = EngineStats()
        self.device = devices.resolve(config.pool.device, kv_device)
        """The device of this worker's lent memory, and the GPU that reads the pool."""
        fields = {} if anonymous else layout.fields() | {"namespace": str(self.namespace)}
        place = self.device.name, self.device.medium
        self.client = Client(config.server.path, config.client, *place, fields, name=name)
        self.client.reads = self.stats.reads
        least = LEAST if config.pool.segment_bytes is None else None
        self.pool = Pool(self.client, self.device, config.pool.lent, over_budget, least)
        self.copier = copier or make_copier(self.device, config)
        self.tier = make_tier(config.offload, self.stats, self.device.ordinal is not None)
        """The offload tier, or None. `bind` sets None if memory for the tier is lacking; the pool
        works without a tier."""
        self.on_stored: list[Callable[[list[ChunkKey]], None]] = []
        """Called in the commit thread with this worker's newly visible chunks."""
        if self.tier is not None:
            self.on_stored.append(self.tier.offer)
        self.outbox = Outbox(self.stats.failed)
        """Commits this session's stores in their order, each after its copy."""
        self.miss = self.stats.miss
        self._paged: PagedKV | None = None
        self._tensors: list[torch.Tensor] = []
        self._addresses: list[int] = []

    # ---- the KV cache

    def bind(self, kvcaches: KVCaches, described: PagedKV | None = None) -> PagedKV:
        """Describe these tensors, once. described: their geometry, if known already.

        ValueError for other objects, LayoutError for tensors that do not fit the layout."""
        given = list(kvcaches.values()) if isinstance(kvcaches, Mapping) else kvcaches
        if self._paged is not None and self._same(given):
            return self._paged
        tensors = as_kvcaches(given)
        kv = described or PagedKV.describe(
            tensors, self.layout.block_size, axes=self._config.engine.kv_axes or None
        )
        said = self.layout.layers, self.layout.kv_layout
        if (kv.layers, kv.name) != said:
            here = f"kvcaches are {kv.layers} layers of {kv.name}"
            raise LayoutError(f"{here}, but the layout says {said[0]} of {said[1]}")
        self.copier.prepare(kv)
        self._bind_tier(kv)
        self._paged = kv
        self._tensors = tensors
        self._addresses = [tensor.data_ptr() for tensor in tensors]
        return kv

    def _same(self, kvcaches: object) -> bool:
        """Whether these are the bound tensors, at the same addresses. Every call runs this check,
        in some 0.1 us a tensor."""
        bound = self._tensors
        if not isinstance(kvcaches, list | tuple) or len(kvcaches) != len(bound):
            return False
        identical = all(map(operator.is_, kvcaches, bound))
        return identical and [tensor.data_ptr() for tensor in bound] == self._addresses

    # ---- look-ups

    def own(self, keys: Sequence[ChunkKey]) -> list[ChunkKey]:
        """Make the keys of this rank's part of these chunks. keys: all of one rank."""
        return of_rank(keys, self.rank)

    def lookup(self, keys: Sequence[ChunkKey], ranks: int = 1) -> int:
        """Count the leading chunks that all `ranks` ranks have, in the pool or the offload tier.
        keys: all of one rank."""
        if not keys:
            return 0
        keys = of_rank(keys, 0)
        pooled = self.client.lookup(keys, ranks)
        return pooled if self.tier is None else self.tier.extend(self.client, keys, ranks, pooled)

    def contains(self, key: ChunkKey) -> int:
        """Look one chunk up. 0: in the pool; 1: in the offload tier; -1: not found."""
        answer = self.client.present([key])
        if answer.present[0]:
            return 0
        return 1 if self.tier is not None and self.tier.lookup([key], answer.epoch) else -1

    # ---- the offload tier

    def _bind_tier(self, kv: PagedKV) -> None:
        """Prepare the offload tier for these KV caches. If memory is lacking, go on without it."""
        if self.tier is None:
            return
        nbytes = kv.chunk_bytes(self.chunk_size)
        try:
            self.tier.bind(self._config, self.layout, self.device, nbytes, self.pool)
        except (VCacheError, RuntimeError) as error:
            log.error("no offload tier: %s", error)
            with suppress(VCacheError):
                self.client.report("error", f"no offload tier: {error}")
            self.tier.close()
            self.tier = None

    def fetch(self, keys: Sequence[ChunkKey]) -> Fetch | None:
        """Begin to read the leading chunks that the pool lacks from the offload tier. None if the
        tier has none. Cancel a fetch that is not used up."""
        if self.tier is None or not keys or not self.tier.usable:
            return None
        answer = self.client.present(list(keys))
        count = [*answer.present, True].index(True)
        return self.tier.fetch(keys[:count], answer.epoch)

    # ---- life

    def flush(self, timeout: float = 5.0, through: bool = False) -> bool:
        """Wait until the stores so far are visible or given up; `through`: and offloaded or
        dropped. False after `timeout` seconds."""
        until = time.monotonic() + timeout
        flushed = self.outbox.flush(timeout)
        if not through or self.tier is None:
            return flushed
        return self.tier.flush(max(until - time.monotonic(), 0.0)) and flushed

    def close(self) -> None:
        """Finish stores, unmap, disconnect. Segments and chunks stay in the pool. Idempotent."""
        self.outbox.close()
        if self.tier is not None:
            self.tier.close()
        self.copier.drain()
        # Close the client before the pool: its heartbeats would map segments again.
        self.client.close()
        self.pool.close()


def make_tier(config: OffloadConfig, stats: EngineStats, on_gpu: bool) -> OffloadTier | None:
    """Make the offload tier. None if the tier is off, or (logged) cannot be opened. on_gpu: the KV
    caches are on GPUs."""
    if config.policy == "off":
        return None
    # Imports optional libraries.
    from vcache_backend.offload.tier import OffloadTier

    try:
        return OffloadTier(config, stats, on_gpu)
    except (VCacheError, OSError, RuntimeError) as error:  # RuntimeError: no thread can be had
        log.error("no offload tier: %s", error)
        return None


def make_copier(device: devices.Device, config: Config) -> Copier:
    """Make a device's copier: kernels, or `HostCopier` for host memory that no GPU reads."""
    if device.ordinal is None:
        return HostCopier()
    # Needs Triton, which a machine without a GPU may not have.
    from vcache_backend.vram_pool.copies.cuda_copier import CudaCopier

    return CudaCopier(device.ordinal, config.pool.max_ctas)


def as_kvcaches(kvcaches: object) -> list[torch.Tensor]:
    """The KV caches, a tensor for each layer, in the given order. ValueError unless dense."""
    if isinstance(kvcaches, Sequence):
        given = list(kvcaches)
        if all(isinstance(kv, torch.Tensor) and kv.layout == torch.strided for kv in given):
            return given
    wanted = "one dense torch.Tensor a layer, in a list or by name"
    raise ValueError(f"kvcaches is a {type(kvcaches).__name__}; expected {wanted}")
