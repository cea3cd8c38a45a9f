"""Makes a worker's chunk keys; leases, loads and stores the worker's chunks. May raise."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
from lmcache.utils import CacheEngineKey

from vcache_backend.errors import VCacheError
from vcache_backend.metadata_server.messages import ChunkKey, of_rank
from vcache_backend.transfer.keys import TaggedHashKeys, Tags
from vcache_backend.transfer.lease_client import Lease
from vcache_backend.transfer.load import COPY_SECONDS, Load
from vcache_backend.transfer.places import SlotPlaces
from vcache_backend.transfer.session import Session
from vcache_backend.transfer.store import store
from vcache_backend.vram_pool.paged import PagedKV

from .boundary import WORKER
from .scope import scoped

log = logging.getLogger(__name__)

Slots = npt.NDArray[np.int64]


@dataclass
class Hit:
    """A look-up's hit: the keys of the leading loadable chunks, and a lease on the chunks."""

    names: list[ChunkKey] = field(default_factory=list)
    lease: Lease | None = None


class _Launched(NamedTuple):
    """A load that was launched and not settled yet.

    starts: the first token of each chunk. slots: the slots of the request's tokens. skip: earlier
    tokens are not written."""

    load: Load
    slots: Slots
    starts: Sequence[int]
    skip: int


class PoolWorker:
    """Loads and stores a rank's chunks. Look-ups run in any thread, all other calls in the main
    thread. Requests without our tag are not cached (see `scope`)."""

    def __init__(self, session: Session, kv: PagedKV, ranks: int) -> None:
        """kv: the KV cache that loads fill and stores read. ranks: how many ranks hold a shard of
        every chunk."""
        self.session = session
        self._kv = kv
        self._names = TaggedHashKeys(session.namespace, session.rank)
        self._ranks = ranks
        self._unscoped = False
        self._launched: list[_Launched] = []

    def ask(self, verb: str, *given: Any) -> int:
        """Call `verb`; a VCacheError is a miss, which is counted and logged once: 0."""
        try:
            return int(getattr(self, verb)(*given))
        except VCacheError as error:
            return self.session.miss(verb, error)

    # ---- look-ups

    def names(self, hashes: Sequence[int], tags: Tags) -> list[ChunkKey]:
        """Make the keys of a request's chunks. Empty if the request lacks our tag."""
        return self._names.of_request(hashes, tags) if hashes and self._mine(tags) else []

    def contains(self, key: CacheEngineKey) -> bool:
        """Whether every rank has the chunk. Takes no lease."""
        chunks = self.session.lookup(self.names([key.chunk_hash], key.tags), self._ranks)
        self._count(1, chunks)
        return bool(chunks)

    def promise(self, names: list[ChunkKey]) -> Hit:
        """Look up the leading chunks that every rank can load, and lease this rank's part."""
        asked = len(names)
        if names and self._ranks > 1:
            names = names[: self.session.client.lookup(of_rank(names, 0), self._ranks)]
        lease = self.session.leases.acquire(names) if names else None
        hit = Hit()
        if lease is not None:
            # The chunks that this worker can read; maps their segments.
            hit = Hit(names[: len(self.session.views(lease.locations))], lease)
        self._count(asked, len(hit.names))
        return hit

    def _count(self, asked: int, found: int) -> None:
        """Report a look-up to the server, in chunks. Every rank looks up; rank 0 reports."""
        size = self.session.chunk_size
        if self.session.rank == 0:
            self.session.client.count(asked * size, found * size)

    # ---- loads

    def load(self, hit: Hit, first: int, count: int, slots: Slots, skip: int) -> int:
        """Launch the load of the chunks [first, count) of `hit`. Returns how many are being copied:
        the caller asks `settle` for failed blocks in the same step. Work queued on the current
        stream comes after the copies.

        slots: int64, the slots of the request's tokens. skip: earlier tokens are not written. Uses
        the hit's lease if it lasts long enough for a copy, otherwise leases the chunks again."""
        size, names = self.session.chunk_size, hit.names[first:count]
        starts = range(first * size, count * size, size)
        places = SlotPlaces(self._kv, size, slots, starts, skip, whole=True)
        load = Load(self.session, places, names, lease=self._lease_on(hit, first, count))
        reached = load.launch(COPY_SECONDS)
        self._launched.append(_Launched(load, slots, starts[:reached], skip))
        return reached

    def _lease_on(self, hit: Hit, first: int, count: int) -> Lease | None:
        """Take the hit's lease, cut to these chunks. None if it is too short for a copy."""
        lease, leases = hit.lease, self.session.leases
        if lease is None or not (leases.good_for_a_copy(lease) or leases.renew(lease)):
            return None
        hit.lease = None
        return msgspec.structs.replace(lease, locations=lease.locations[first:count])

    def settle(self, block_size: int) -> set[int]:
        """Wait for the launched loads. Returns the unfilled KV blocks, of `block_size` tokens. Each
        load is judged by its own lease, also after an error elsewhere; may be repeated."""
        bad: set[int] = set()
        for load, slots, starts, skip in self._launched:
            try:
                loaded = load.finish(COPY_SECONDS)
            except Exception as error:  # noqa: BLE001 - it counts as not loaded
                WORKER.give_up(load.finish, error)
                loaded = 0
            # Chunks follow each other.
            for start in starts[loaded : loaded + 1]:
                tokens = slots[max(start, skip) : max(starts[-1] + self.session.chunk_size, skip)]
                bad |= set((tokens // block_size).tolist())
        self._launched = []
        return bad

    # ---- stores and removals

    def store(
        self,
        names: Sequence[ChunkKey],
        first: int,
        slots: Slots,
        holds: Callable[[], bool | None] | None = None,
    ) -> None:
        """Store the chunks from number `first` on: reserve slots, launch one copy, and return.
        Skips chunks of the pool. The commit follows in the background.

        slots: int64, the slots of the request's tokens. holds: see `PendingStore`."""
        size = self.session.chunk_size
        places = SlotPlaces(self._kv, size, slots, range(first * size, len(names) * size, size))
        store(self.session, places, names[first:], range(len(names) - first), holds=holds)

    def remove(self, key: CacheEngineKey) -> bool:
        """Remove this rank's part of a chunk. Returns whether it was there."""
        return bool(self.session.client.remove(self.names([key.chunk_hash], key.tags)))

    def clear(self) -> int:
        """Reset the namespace for all instances and ranks. Returns how many chunks were removed."""
        return self.session.client.clear(self.session.namespace.prefix, reset=True)

    # ---- inside

    def _mine(self, tags: Tags) -> bool:
        """Whether chunks with these tags may be cached: our tag is among them. Reports the first
        refusal."""
        if scoped(tags):
            return True
        if not self._unscoped:
            self._unscoped = True
            text = (
                "requests come without vcache's tag, so that LoRA and cache_salt cannot be told "
                "apart; nothing of them is cached. Unless they are for pooling, vLLM did not load "
                "the plugin `vcache`: add it to VLLM_PLUGINS, or unset that variable"
            )
            log.error(text)
            self.session.client.report("error", text)
        return False
