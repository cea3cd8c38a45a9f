"""What the plugin does with chunks: names them, leases them, moves them. Its callers see to it that nothing is raised into LMCache."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from lmcache.utils import CacheEngineKey
from lmcache.v1.memory_management import MemoryObj

from vcache_backend.config import OffloadConfig
from vcache_backend.errors import VCacheError
from vcache_backend.metadata_server.messages import ChunkKey, Location
from vcache_backend.transfer.arguments import KVCaches
from vcache_backend.transfer.keys import TaggedHashKeys, of_rank
from vcache_backend.transfer.leases import Lease
from vcache_backend.transfer.load import SLICE_SECONDS, Load
from vcache_backend.transfer.places import SlotPlaces
from vcache_backend.transfer.session import Session
from vcache_backend.transfer.store import store
from vcache_backend.vram_pool.paged import PagedKV

from .foreign import Foreign
from .memory import ChunkObj, DeferredObj, FetchedObj, Form, HostMemory, LeasedObj, NotedSlots, SharedLease
from .pins import Pin, Pins
from .scope import scoped

log = logging.getLogger(__name__)

COPY_SECONDS = 10.0
"""How long a load waits for its next chunk, beside what the offload tier may take; a copy takes milliseconds."""
HELD_SHARE = 8
"""Memory objects hold so many times `offload.staging_bytes` of host memory, at most; that much once is kept for next time."""
Slots = npt.NDArray[np.int64]


@dataclass
class _Loading:
    """A load whose caller went on: of chunks that begin with tokens `starts`, at `slots`; tokens before `skip` are left alone."""

    load: Load
    slots: Slots
    starts: Sequence[int]
    skip: int


class PoolWorker:
    """One rank's chunks in the pool. Look-ups and `get` in any thread; the rest in the worker's main thread.

    kvcaches: those that loads go to, and that the next `note` is of.
    settles: loads are only launched, and the caller will ask `settle`, in the same step, which of them held. What is queued on the
    current stream comes after the copy in any case; the host prepares it meanwhile.
    counts_offloaded: whether a look-up may promise what only the offload tier has. What is promised and does not come has to be
    recomputed, and not every vLLM does so rightly (see `Instance.recomputes`).
    """

    def __init__(
        self, session: Session, kvcaches: KVCaches, ranks: int, needs_scope: bool, metadata: Any, offload: OffloadConfig
    ) -> None:
        """ranks: how many hold a shard of every chunk. needs_scope: leave alone keys that do not say whose they are (see `scope`).
        metadata: LMCache's, which knows the shapes it takes a chunk for."""
        self.session, self.kvcaches, self.settles, self.counts_offloaded = session, kvcaches, False, True
        self.memory = HostMemory(HELD_SHARE * offload.staging_bytes, offload.staging_bytes)
        self.foreign = Foreign(session, self.paged)
        self._names = TaggedHashKeys(session.namespace, session.rank)
        self._ranks, self._needs_scope, self._unscoped = ranks, needs_scope, False
        self._form = Form.of(metadata.get_shapes(session.chunk_size), metadata.get_dtypes(), None)
        self._patience = COPY_SECONDS + offload.get_seconds
        self._pins = Pins(session.leases.release)
        self._loading: list[_Loading] = []

    # ---- look-ups

    def contains(self, keys: Sequence[CacheEngineKey], pin: bool) -> int:
        """How many leading chunks every rank can retrieve, from the pool or the offload tier. pin: lease this rank's, as far as they
        are in the pool, until `unpin` of the first key, or the lease's end."""
        if not self._mine(keys):
            return 0
        session, counts, found = self.session, self.counts_offloaded, None
        names = self._names.keys(keys)
        if self._ranks > 1 or not pin:
            first = of_rank(names, 0)
            found = session.lookup(first, self._ranks) if counts or not pin else session.client.lookup(first, self._ranks)
            if not pin or not found:
                return found
            names = names[:found]
        lease = session.leases.acquire(names)
        pooled = len(lease.keys) if lease is not None else 0
        readable = self._readable(lease) if lease is not None else 0
        # A chunk of the pool that is out of this worker's reach ends it: it would not be looked for in the offload tier.
        if readable < pooled or not counts:
            found = readable
        elif found is None:
            found = self._extended(names, pooled)
        if lease is not None or found:
            self._pins.keep(keys[0], Pin(names, lease))
        return found

    def _readable(self, lease: Lease) -> int:
        """How many leading chunks of it are within this worker's reach; their segments are mapped now."""
        known, locations = self.session.segments(), lease.locations
        return len(locations) if {at.segment for at in locations} <= known else len(self.session.views(locations))

    def _extended(self, names: list[ChunkKey], pooled: int) -> int:
        try:
            return self.session.lookup_offloaded(names, 1, pooled)
        except VCacheError as error:
            self.session.miss("lookup", error)
            return pooled

    def unpin(self, key: CacheEngineKey) -> bool:
        """End the oldest look-up that began with `key`; nothing for the keys after it."""
        return self._pins.end(key)

    # ---- loads

    def retrieve(self, keys: Sequence[CacheEngineKey], first: int, slots: Slots, skip: int) -> int:
        """Load the chunks `keys[first:]` of a request that was looked up, as `load` does: how many of them there are.

        With the names and under the lease of the look-up, if it reaches that far and has time for a copy.
        """
        size, count = self.session.chunk_size, len(keys)
        pin = self._pins.take(keys[0], lambda pin: self._covered(pin, keys, first))
        if pin is None and not self._mine(keys):
            return 0
        # The look-up may be another request's, which begins alike; the last key stands for all before it.
        looked_up = pin is not None and len(pin.names) >= count and pin.names[count - 1] == self._names.keys(keys[-1:])[0]
        names = pin.names[:count] if pin is not None and looked_up else self._names.keys(keys)
        held = pin.lease if pin is not None else None
        lease = self._part(held, held.keys[first:count], held.locations[first:count]) if held is not None else None
        places = SlotPlaces(self.paged(), size, slots, range(first * size, count * size, size), skip, whole=True)
        return self._bring(places, names[first:], range(first * size, count * size, size), skip, lease)

    def _covered(self, pin: Pin, keys: Sequence[CacheEngineKey], first: int) -> int:
        """Up to which of `keys` the lease of this look-up reaches; 0 if not past `first`, or if it has no time for a copy."""
        last = min(len(pin.lease.keys) if pin.lease is not None else 0, len(keys)) - 1
        # The last key stands for all before it.
        if last < first or pin.lease is None or not self.session.leases.good_for_a_copy(pin.lease):
            return 0
        return last + 1 if pin.names[last] == self._names.keys(keys[last : last + 1])[0] else 0

    def get(self, keys: Sequence[CacheEngineKey]) -> list[ChunkObj]:
        """The leading chunks that are there: those of the pool under leases, those of the offload tier in memory of their own, waited
        for."""
        objs: list[ChunkObj] = []
        names = self._names.keys(keys) if self._mine(keys) else []
        try:
            while len(objs) < len(names):
                lease = self.session.leases.acquire(names[len(objs) :])
                rest = len(objs) + (len(lease.keys) if lease is not None else 0)
                fetch = self.session.fetch(names[rest:])
                try:
                    objs += self._leased(lease) if lease is not None else []
                    fetched = self.foreign.fetched(self._form, self.memory, fetch) if fetch and len(objs) == rest else []
                finally:
                    if fetch is not None:
                        fetch.cancel()
                objs += fetched
                if not fetched:
                    break
        except VCacheError as error:
            self.session.miss("get", error)
        self.session.stats.count(chunks_missed=len(keys) - len(objs))
        return objs

    def _leased(self, lease: Lease) -> list[LeasedObj]:
        readable = self._readable(lease)
        if not readable:
            self.session.leases.release(lease)
            return []
        shared = SharedLease(lease, self.session.leases.release, readable)
        return [LeasedObj(self._form, shared, lease, index, self.foreign.clone) for index in range(readable)]

    def load(self, objs: Sequence[MemoryObj], starts: Sequence[int], slots: Slots, skip: int) -> int | None:
        """Bring chunks into the KV cache, in one launch for those of one lease, and wait unless the worker `settles`.

        The chunk of `objs[i]` begins with token `starts[i]`; no token before `skip` is written. Returns the index of the first
        token that is not valid now: its lease did not hold, its bytes were not there or not right; None if all are.
        """
        kv, size, failed = self.paged(), self.session.chunk_size, []
        pairs = list(zip(objs, starts, strict=True))
        for origin, group in groupby(pairs, key=lambda pair: getattr(pair[0], "shared", type(pair[0]))):
            part = list(group)
            its: list[Any] = [obj for obj, _ in part]
            begins = [start for _, start in part]
            places = SlotPlaces(kv, size, slots, begins, skip, whole=True)
            if isinstance(origin, SharedLease):
                lease = self._part(origin.take(), [obj.key for obj in its], [obj.location for obj in its])
                loaded = self._bring(places, [obj.key for obj in its], begins, skip, lease)
            else:
                loaded = self.foreign.load(places, its)
                if origin is FetchedObj and loaded:
                    tokens = sum(size - min(max(skip - start, 0), size) for start in begins[:loaded])
                    self.foreign.keep(places, its[:loaded], tokens)
            if loaded < len(part):
                failed.append(begins[loaded])
        return min(failed, default=None)

    def _part(self, lease: Lease | None, keys: list[ChunkKey], locations: list[Location]) -> Lease | None:
        """A lease on these of its chunks, with time for a copy; None if it is over."""
        if lease is None or not (self.session.leases.good_for_a_copy(lease) or self.session.leases.renew(lease)):
            return None
        return msgspec.structs.replace(lease, keys=keys, locations=locations)

    def _bring(self, places: SlotPlaces, names: list[ChunkKey], starts: Sequence[int], skip: int, lease: Lease | None) -> int:
        """Load these chunks: how many leading ones are valid, or will be if the worker `settles`."""
        loading = _Loading(Load(self.session, places, names, lease=lease), places.slots, starts, skip)
        if not self.settles:
            return self._finished(loading)
        load, reached, until = loading.load, 0, time.monotonic() + self._patience
        while not load.advance() and load.reached < len(names):
            if load.reached > reached:
                reached, until = load.reached, time.monotonic() + self._patience
            elif time.monotonic() > until:
                break
            load.wait(SLICE_SECONDS)
        load.hold()
        loading.starts = starts[: load.reached]
        self._loading.append(loading)
        return load.reached

    def _finished(self, loading: _Loading) -> int:
        """Wait for a load, and store in the pool again what came from the offload tier: how many leading chunks are valid."""
        load = loading.load
        loaded = load.run(self._patience)
        try:
            if chunks := load.to_promote():
                store(self.session, load.places, load.keys, chunks, fetched_in=load.epoch)
        except (VCacheError, RuntimeError) as error:
            self.session.miss("promote", error)
        return loaded

    def settle(self, block_size: int) -> set[int]:
        """Wait for the loads whose callers went on: the KV blocks, `block_size` tokens each, that are not valid. See `settles`."""
        loads, self._loading = self._loading, []
        bad: set[int] = set()
        for loading in loads:
            try:
                loaded = self._finished(loading)
            except Exception as error:  # noqa: BLE001 - what is not known to be right is reported to vLLM as wrong
                loaded = self.session.miss("load", error)
            for start in loading.starts[loaded:]:
                tokens = slice(max(start, loading.skip), max(start + self.session.chunk_size, loading.skip))
                bad |= set((loading.slots[tokens] // block_size).tolist())
        return bad

    # ---- stores

    def note(self, objs: Sequence[MemoryObj], starts: Sequence[int], slots: Slots) -> None:
        """Remember where the chunks of a store lie, until `put`. Work queued on the current stream has written them by then."""
        written = torch.cuda.current_stream().record_event() if self.session.device.ordinal is not None else None
        for obj, start in zip(objs, starts, strict=True):
            if isinstance(obj, DeferredObj):
                obj.source, obj.copy_out = NotedSlots(self.kvcaches, slots, start), self.foreign.copy_out(written)

    def put(self, keys: Sequence[CacheEngineKey], objs: Sequence[MemoryObj]) -> None:
        """Store noted chunks, those of one `note` in one launch. Visible once copied; those that are there already are not copied again.

        Others are refused: a chunk of the pool is what vLLM's KV blocks hold, byte for byte, and who reads it could not tell.
        """
        pairs = [(key, getattr(obj, "source", None)) for key, obj in zip(keys, objs, strict=False)]
        sources = [(key, source) for key, source in pairs if source is not None]
        refused = sum(not isinstance(obj, ChunkObj) for obj in objs)
        if refused and self.session.stats.failed("not_stored: another allocator's") == 1:
            log.warning(
                "%d chunks are not stored, nor will others be: another allocator made them, and the pool takes only what lies in KV blocks",
                refused,
            )
        if not sources or not self._mine([key for key, _ in sources]):
            return
        # Those of one `note`, which LMCache puts at once, lie at the same slots.
        for _, noted in groupby(sources, key=lambda pair: (id(pair[1].kvcaches), id(pair[1].slots))):
            part = list(noted)
            kvcaches, slots, _ = part[0][1]
            places = SlotPlaces(self.session.bind(kvcaches), self.session.chunk_size, slots, [source.start for _, source in part])
            store(self.session, places, self._names.keys([key for key, _ in part]), range(len(part)))

    def stored(self, keys: Sequence[CacheEngineKey]) -> list[CacheEngineKey]:
        """Those of `keys` that are in the pool, once this rank's stores so far are over, which is waited for."""
        self.session.flush()
        names = self._names.keys(keys)
        return [key for key, name in zip(keys, names, strict=True) if self.session.contains(name) == 0]

    def remove(self, keys: Sequence[CacheEngineKey], force: bool) -> int:
        """Forget chunks of this rank; how many were in the pool.

        force: also those that are leased or pinned, and, soon, those in the offload tier. Else it is an eviction from the pool.
        """
        names = self._names.keys(keys)
        if force and self.session.tier is not None:
            self.session.tier.forget(names)
        return self.session.client.remove(names, force)

    def clear(self) -> int:
        """Forget every chunk of the namespace, of all instances and ranks, offloaded ones as well; how many were in the pool."""
        return self.session.client.clear(self.session.namespace.prefix, reset=True)

    # ---- inside

    def paged(self) -> PagedKV:
        return self.session.bind(self.kvcaches)

    def _mine(self, keys: Sequence[CacheEngineKey]) -> bool:
        """Whether these keys say whose they are. Those of one call are of one request."""
        if not keys or not self._needs_scope or scoped(keys[0]):
            return bool(keys)
        if not self._unscoped:
            self._unscoped = True
            text = (
                "requests come without vcache's tag, so that LoRA and cache_salt cannot be told apart; nothing of them is cached. "
                "vLLM did not load the plugin `vcache`: add it to VLLM_PLUGINS, or unset that variable"
            )
            log.error(text)
            self.session.client.report("error", text)
        return False
