"""The worker's half of sharing in place: shows the worker's KV cache, maps other instances' KV
caches, and publishes the chunks that steps compute."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np
import torch
from msgspec import structs

from vcache_backend.protocol.messages import InstanceId, Publish
from vcache_backend.resident.mappings import Neighbours
from vcache_backend.resident.own_cache import OwnCache, cache_shape
from vcache_backend.transfer.publisher import Publisher
from vcache_backend.transfer.session import Session
from vcache_backend.vram_pool import devices
from vcache_backend.vram_pool.copies.geometry import PagedKV

from ..metadata import PublicationSpec
from .exporter import Exporter
from .stores import Attached, Stores


class InPlace:
    """Runs in the worker's main thread. neighbours: other instances' KV caches; None before `open`.
    publisher: None before `show`."""

    def __init__(self, exporter: Exporter, each: int, shows: bool) -> None:
        """each: blocks of a chunk. shows: other instances read this worker's KV cache. With MLA all
        ranks hold the same KV, and only the first rank shows its cache."""
        self.exporter, self._each, self._shows = exporter, each, shows
        self.neighbours: Neighbours | None = None
        self._shown: OwnCache | None = None
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
        self._shown = OwnCache(session.client, instance, session.rank, self._shape, [self._region])
        self.publisher = Publisher(session.client, session.stats, instance, self._each)

    def publish(self, session: Session, specs: Sequence[PublicationSpec]) -> None:
        """Publish chunks once the step has computed them. The step's whole model run must be
        queued."""
        if self.publisher is None or not specs:
            return
        written = session.copier.mark()
        for spec in specs:
            self.publisher.submit(_own(session, spec.publish), written, soon=not spec.loaded)

    def save(self, worker: Attached, victims: Publish, stores: Stores) -> None:
        """Store the published chunks of `victims` in the pool. A chunk that loses a block during
        the copy is dropped."""
        publisher = self.publisher
        if publisher is None:
            return
        for published in publisher.known(_own(worker.session, victims)):
            blocks: list[int] = np.frombuffer(published.blocks, dtype="<u4").tolist()
            holds = partial(publisher.holds, published)
            stores.save(worker, published.keys, blocks, published.epoch, holds)

    def close(self) -> None:
        """Idempotent. Call after the last load is over, and before the session is closed."""
        for part in (self.publisher, self._shown, self.neighbours):
            if part is not None:
                part.close()


def _own(session: Session, publish: Publish) -> Publish:
    """This rank's part of the chunks."""
    return structs.replace(publish, keys=session.own(publish.keys))
