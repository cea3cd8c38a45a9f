"""The worker's half of sharing in place: shows the worker's KV cache, maps other instances' KV
caches, and publishes the blocks that steps compute."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import groupby
from operator import attrgetter

import numpy as np
import torch

from vcache_backend.protocol.channel import Standing
from vcache_backend.protocol.messages import InstanceId
from vcache_backend.resident.mappings import Neighbours
from vcache_backend.resident.own_cache import cache_shape, show_cache
from vcache_backend.transfer.publisher import Publisher
from vcache_backend.transfer.session import Session
from vcache_backend.vram_pool import devices
from vcache_backend.vram_pool.copies.copier import NOTHING, Mark
from vcache_backend.vram_pool.copies.geometry import PagedKV

from ..metadata import PublicationSpec, SavedChunks
from .exporter import Exporter
from .stores import Attached, Stores

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
        self._shape = cache_shape(kv, [self._region], device)
        self.neighbours = Neighbours(session.client, device, kv, session.rank)

    def show(self, session: Session, instance: InstanceId) -> None:
        """Show the KV cache to others under the instance's name. Later calls do nothing."""
        if self._shown is not None or not self._shows:
            return
        self._shown = show_cache(
            session.client, instance, session.rank, self._shape, [self._region]
        )
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
