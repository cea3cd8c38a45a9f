"""The worker's half of sharing in place: has vLLM allocate its KV cache where other instances can
map it, shows it, maps their KV caches, and publishes the blocks that steps compute.

vLLM asks the connector for a context around exactly the allocation of its KV cache, in all
supported releases (`tests/outside/releases.py`)."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cache, partial
from itertools import groupby
from operator import attrgetter

import numpy as np
import torch

from vcache_backend.errors import LayoutError, SegmentError, VCacheError
from vcache_backend.protocol.client import Standing
from vcache_backend.protocol.messages import InstanceId
from vcache_backend.resident.mappings import Neighbours
from vcache_backend.resident.own_cache import cache_shape, show_cache
from vcache_backend.transfer.publisher import Publisher
from vcache_backend.transfer.session import Session
from vcache_backend.vram_pool import devices
from vcache_backend.vram_pool.copies.copier import NOTHING, Mark
from vcache_backend.vram_pool.copies.geometry import PagedKV
from vcache_backend.vram_pool.exports import CudaExportable, HostExportable, Region

from ..metadata import PublicationSpec, SavedChunks
from ..model.sharing import POOL
from .stores import Attached, Stores

log = logging.getLogger("vllm.vcache")

TOGETHER = 16
"""How many chunks are saved together. If a block is handed out before the copy, the whole group is
not saved."""


class InPlace:
    """Runs in the worker's main thread. neighbours: other instances' KV caches; None before `open`.
    publisher: None before `show`."""

    def __init__(self, exporter: Exporter, blocks: int, shows: bool) -> None:
        """blocks: vLLM's number of blocks. shows: other instances read this worker's KV cache. With
        MLA all ranks hold the same KV, and only the first rank shows its cache."""
        self.exporter, self._blocks, self._shows = exporter, blocks, shows
        self.neighbours: Neighbours | None = None
        self._shown: Standing | None = None
        self.publisher: Publisher | None = None

    def open(self, session: Session, kv: PagedKV, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Prepare reading other KV caches, once the worker has joined the pool. kv: the geometry of
        `kv_caches`. LayoutError or SegmentError if other instances cannot map `kv_caches`."""
        device = session.device
        if device.medium == "host" and kv.device.type != "cpu":
            device = devices.resolve(str(kv.device))
        self._region = self.exporter.region(kv_caches)
        self._shape = cache_shape(kv, self._region, device)
        self.neighbours = Neighbours(session.client, device, kv, session.rank)

    def show(self, session: Session, instance: InstanceId) -> None:
        """Show the KV cache to others under the instance's name. Later calls do nothing."""
        if self._shown is not None or not self._shows:
            return
        self._shown = show_cache(session.client, instance, session.rank, self._shape, self._region)
        self.publisher = Publisher(
            session.client, session.stats, instance, session.rank, self._blocks
        )

    def publish(self, specs: Sequence[PublicationSpec], written: Mark = NOTHING) -> None:
        """Publish blocks once the work before `written` is done: the whole model run of the step
        that computes them."""
        if self.publisher is None:
            return
        for (epoch, later), group in groupby(specs, key=attrgetter("epoch", "later")):
            runs = [run for spec in group for run in spec.runs]
            self.publisher.submit(runs, epoch, written, soon=not later)

    def save(self, worker: Attached, victims: SavedChunks, stores: Stores) -> None:
        """Store the published chunks of `victims` in the pool, the last chunks first. A chunk that
        loses a block during the copy is dropped."""
        publisher = self.publisher
        if publisher is None:
            return
        blocks = np.frombuffer(victims.blocks, dtype="<u4").reshape(len(victims.keys), -1)
        generations = np.frombuffer(victims.generations, dtype="<u8").reshape(blocks.shape)
        known = np.flatnonzero(publisher.known(blocks, generations).all(axis=1))
        keys = worker.session.own(victims.keys)
        for stop in range(len(known), 0, -TOGETHER):
            chunks = known[max(0, stop - TOGETHER) : stop]
            own, packs = blocks[chunks], (blocks[chunks].tobytes(), generations[chunks].tobytes())
            names, holds = [keys[chunk] for chunk in chunks], partial(publisher.holds, *packs)
            stores.save(worker, names, own.reshape(-1).tolist(), victims.epoch, holds)

    def close(self) -> None:
        """Idempotent. Call after the last load is over, and before the session is closed."""
        for part in (self.publisher, self._shown, self.neighbours):
            if part is not None:
                part.close()


# ---- the memory of vLLM's KV cache

Exportable = CudaExportable | HostExportable
_CANNOT = "vLLM's KV cache cannot be shared in place"


class Exporter:
    """The memory of one worker's KV cache. All methods run in the worker's main thread, in which
    vLLM makes its KV cache.

    The region and its descriptor belong to vLLM's tensors and live as long as these: callers do not
    close them."""

    def __init__(self, device_type: str) -> None:
        """device_type: vLLM's, `cuda` or `cpu`. Never raises: without exportable memory `region`
        raises the reason."""
        self._memory: Exportable | None = None
        self._problems: list[str] = []
        with self._noting_failure():
            self._memory = _memory(device_type)

    def context(self) -> AbstractContextManager[None] | None:
        """Return the context in which vLLM makes its KV cache, for `get_mem_pool_context`. None
        without exportable memory."""
        return self._around(self._memory) if self._memory is not None else None

    def region(self, kv_caches: Mapping[str, torch.Tensor]) -> Region:
        """Return the exportable allocation that holds `kv_caches`. vLLM makes one for all layers.

        LayoutError if the KV caches lie elsewhere, SegmentError without exportable memory."""
        memory = self._memory
        if memory is None or self._problems:
            raise SegmentError(f"{_CANNOT}: {'; '.join(self._problems)}; or set {POOL}")
        storage = next(iter(kv_caches.values())).untyped_storage()
        first, end = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
        regions = memory.allocations()
        for region in regions:
            if region.address <= first and end <= region.address + region.nbytes:
                return region
        why = memory.problem or "another connector or allocator has made it"
        lie = f"{storage.nbytes():,} B on {storage.device} lie in none of the {len(regions)}"
        raise LayoutError(f"{_CANNOT}: {lie} exportable allocations ({why}); or set {POOL}")

    @contextmanager
    def _around(self, memory: Exportable) -> Iterator[None]:
        """Enter `memory`'s context. Never raises, since vLLM enters and leaves it."""
        undo = ExitStack()
        with self._noting_failure():
            undo.enter_context(memory.context())
        try:
            yield
        finally:
            with self._noting_failure():
                undo.close()

    @contextmanager
    def _noting_failure(self) -> Iterator[None]:
        """Turn an error into a problem for `region` to raise: vLLM uses its own memory."""
        try:
            yield
        except VCacheError as error:
            self._problems.append(str(error))
        except Exception as error:
            log.exception("vcache: the KV cache cannot be shared in place")
            self._problems.append(f"{type(error).__name__}: {error}")


def _memory(device_type: str) -> Exportable:
    if device_type == "cpu":
        return HostExportable()
    if device_type == "cuda" and torch.cuda.is_available():
        return _gpu(torch.cuda.current_device())
    raise SegmentError(f"a KV cache on {device_type!r} cannot be mapped: only one on a CPU or GPU")


@cache
def _gpu(ordinal: int) -> CudaExportable:
    """Make the exporter's memory for one GPU. Never freed: torch may free tensors in it until the
    process ends."""
    return CudaExportable(ordinal)
