"""What the plugin does with chunks: names them, leases them, moves them. Its callers see to it that nothing is raised into LMCache."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from lmcache.utils import CacheEngineKey
from lmcache.v1.memory_management import MemoryObj

from vcache_backend.errors import VCacheError
from vcache_backend.metadata_server.messages import ChunkKey, Location
from vcache_backend.transfer.arguments import KVCaches
from vcache_backend.transfer.chunk_io import ChecksumError, ChunkIO, Lease
from vcache_backend.transfer.keys import TaggedHashKeys
from vcache_backend.transfer.layout import Namespace
from vcache_backend.vram_pool.copier import Completion
from vcache_backend.vram_pool.paged import PagedKV
from vcache_backend.vram_pool.slots import SlotView

from .foreign import AT_ONCE, Foreign
from .keys import scoped
from .memory import ChunkObj, DeferredObj, FetchedObj, Form, LeasedObj, SharedLease, Source
from .offload import Below
from .pins import Pins
from .plans import Slots, is_whole, planned

log = logging.getLogger(__name__)

Placed = tuple[ChunkKey, Location]
"""A chunk and where it lies."""


@dataclass
class _Loading:
    """A load under way: `tokens` tokens from `start` on, at `slots`; those before `skip` are left alone."""

    lease: Lease
    views: list[SlotView]
    tokens: int
    slots: Slots
    start: int
    skip: int
    scattered: Completion | None = None


class PoolWorker:
    """One rank's chunks in the pool. Look-ups in any thread; the rest in the worker's main thread.

    kvcaches: those that loads go to, and that the next `note` is of.
    settles: `load` only launches, and the caller will ask `settle`, in the same step, which loads held. What is queued on the
    current stream comes after the copy in any case; the host prepares it meanwhile.
    """

    def __init__(
        self,
        io: ChunkIO,
        kvcaches: KVCaches,
        namespace: Namespace,
        rank: int,
        ranks: int,
        needs_scope: bool,
        metadata: Any,
        below: Below,
    ) -> None:
        """`rank` of `ranks` that hold a shard of every chunk. needs_scope: leave alone keys that do not say whose they are (see
        `vllm_hooks`). metadata: LMCache's, which knows the shapes it takes a chunk for."""
        self.below, self.foreign = below, Foreign(io, self.paged)
        self.io, self.kvcaches = io, kvcaches
        self._names, self._first_rank, self._ranks = TaggedHashKeys(namespace, rank), TaggedHashKeys(namespace, 0), ranks
        self._needs_scope = needs_scope
        self._form = Form.of(metadata.get_shapes(io.chunk_size), metadata.get_dtypes(), None)
        self._pins = Pins(io.let_go)
        self._loading: list[_Loading] = []
        self.settles = False
        self._unscoped = False

    # ---- reads

    def contains(self, keys: Sequence[CacheEngineKey], pin: bool) -> int:
        """How many leading chunks every rank can retrieve, from the pool or the offload tier it. pin: lease this rank's, as far as they
        are in the pool, until `unpin` of the first key, or the lease's end."""
        if not self._mine(keys):
            return 0
        found = None
        if self._ranks > 1 or not pin:
            first = self._first_rank.keys(keys)
            counts = self.below.counts or not pin
            found = self.io.lookup(first, self._ranks) if counts else self.io.client.lookup(first, self._ranks)
            if not pin or not found:
                return found
            keys = keys[:found]
        names = self._names.keys(keys)
        lease = self.io.lease(names)
        pooled = len(lease.keys) if lease is not None else 0
        readable = len(self.io.views(lease.locations)) if lease is not None else 0
        # A chunk of the pool that is out of this worker's reach ends it: it would not be looked for below.
        if readable < pooled or not self.below.counts:
            found = readable
        elif found is None:
            found = self.below.continued(names, pooled)
        if lease is not None or found:
            self._pins.keep(keys[0], lease)
        return found

    def unpin(self, key: CacheEngineKey) -> bool:
        """End the oldest look-up that began with `key`; nothing for the keys after it."""
        return self._pins.end(key)

    def get(self, keys: Sequence[CacheEngineKey]) -> list[ChunkObj]:
        """The leading chunks that are there: those of the pool under leases, those from below in memory of their own, waited for."""
        objs: list[ChunkObj] = []
        names = self._names.keys(keys) if self._mine(keys) else []
        try:
            while len(objs) < len(names):
                at = len(objs)
                lease = self.io.lease(names[at:])
                rest = at + (len(lease.keys) if lease is not None else 0)
                fetch = self.below.fetch(names[rest:])
                try:
                    objs += self._leased(lease) if lease is not None else []
                    fetched = self.below.objects(self._form, fetch) if fetch is not None and len(objs) == rest else []
                finally:
                    if fetch is not None:
                        fetch.cancel()
                objs += fetched
                if not fetched:
                    break
        except VCacheError as error:
            self.io.miss("get", error)
        self.io.stats.count(chunks_missed=len(keys) - len(objs))
        return objs

    def _leased(self, lease: Lease) -> list[LeasedObj]:
        readable = len(self.io.views(lease.locations))
        if not readable:
            self.io.let_go(lease)
            return []
        shared = SharedLease(lease, self.io.let_go, readable)
        return [LeasedObj(self._form, shared, lease, index, self.foreign.clone) for index in range(readable)]

    def load(self, objs: Sequence[MemoryObj], starts: Sequence[int], slots: Slots, skip: int) -> int | None:
        """Bring chunks into the KV cache, in one launch for those of one lease, and wait unless the worker `settles`.

        The chunk of `objs[i]` begins with token `starts[i]`; no token before `skip` is written. Returns the index of the first
        token that is not valid now: its lease did not hold, its bytes were not there or not right; None if all are.
        """
        kv, failed = self.paged(), []
        pairs = list(zip(objs, starts, strict=True))
        for origin, group in groupby(pairs, key=lambda pair: _origin(pair[0])):
            part = list(group)
            if isinstance(origin, SharedLease):
                failed.append(self._load_leased(kv, origin, part, slots, skip))
            elif origin is FetchedObj:
                failed.append(self.below.load_objects(kv, part, slots, skip))
            else:
                failed += [self.foreign.load(kv, part[i : i + AT_ONCE], slots, skip) for i in range(0, len(part), AT_ONCE)]
                if not self.foreign.clones_held([obj for obj, _ in part]):
                    self.io.stats.failed("lease_lost")
                    failed.append(part[0][1])
        return min((start for start in failed if start is not None), default=None)

    def retrieve(self, keys: Sequence[CacheEngineKey], first: int, slots: Slots, skip: int) -> int:
        """Load the chunks `keys[first:]` of a request that was looked up, as `load` does: how many of them there are.

        Under the lease of the look-up, if it has time for a copy, which spares naming and leasing them again. Run by run: what the
        pool has, then what is only below, and so on up to the first chunk that is nowhere.
        """
        kv, size = self.paged(), self.io.chunk_size
        at, names = first, list[ChunkKey]()
        lease = self._pins.take(keys[0], lambda lease: self._covered(lease, keys, first))
        pinned = lease is not None
        while at < len(keys):
            if lease is not None:
                placed = _placed(lease, first, len(keys))
            elif names or self._mine(keys):
                names = names or self._names.keys(keys)
                lease = self.io.lease(names[at:])
                placed = _placed(lease) if lease is not None else []
            else:
                break
            rest = at + len(placed)
            if rest < len(keys) and self.below.there:
                names = names or self._names.keys(keys)
                fetch = self.below.fetch(names[rest:])
            else:
                fetch = None
            try:
                if lease is not None:
                    at += self._launch(kv, lease, placed, list(range(at * size, rest * size, size)), slots, skip)
                fetched = self.below.load(kv, fetch, at * size, slots, skip) if fetch is not None and at == rest else 0
            finally:
                if fetch is not None:
                    fetch.cancel()
            at += fetched
            # After the look-up's lease, which may cover a part, there may be more in the pool.
            if at < rest or not (fetched or pinned):
                break
            lease, pinned = None, False
        self.io.stats.count(chunks_missed=len(keys) - at)
        return at - first

    def _covered(self, lease: Lease, keys: Sequence[CacheEngineKey], first: int) -> int:
        """Up to which of `keys` this lease of a look-up reaches; 0 if not past `first`, or if it has no time for a copy."""
        last = min(len(lease.keys), len(keys)) - 1
        # The last key stands for all before it.
        if last < first or not self.io.good_for_a_copy(lease) or lease.keys[last] != self._names.keys(keys[last : last + 1])[0]:
            return 0
        return last + 1

    def settle(self, block_size: int) -> set[int]:
        """Wait for the loads whose callers went on: the KV blocks, `block_size` tokens each, that are not valid. See `settles`."""
        loads, self._loading = self._loading, []
        bad: set[int] = set()
        for loading in loads:
            try:
                good = self._settled(loading)
            except Exception as error:  # noqa: BLE001 - what is not known to be right is reported to vLLM as wrong
                good = bool(self.io.miss("load", error))
            if not good:
                bad |= set((loading.slots[max(loading.start, loading.skip) :] // block_size).tolist())
        return bad

    # ---- stores

    def note(self, objs: Sequence[MemoryObj], starts: Sequence[int], slots: Slots) -> None:
        """Remember where the chunks of a store lie, until `put`. Work queued on the current stream has written them by then."""
        written = torch.cuda.current_stream().record_event() if self._on_gpu else None
        for obj, start in zip(objs, starts, strict=True):
            if isinstance(obj, DeferredObj):
                obj.source, obj.copy_out = Source(self.kvcaches, slots, start), self.foreign.copy_out(written)

    def put(self, keys: Sequence[CacheEngineKey], objs: Sequence[MemoryObj]) -> None:
        """Store noted chunks, those of one `note` in one launch. Visible once copied; those that are there already are not copied again.

        Others are refused: a chunk of the pool is what vLLM's KV blocks hold, byte for byte, and who reads it could not tell.
        """
        pairs = [(key, getattr(obj, "source", None)) for key, obj in zip(keys, objs, strict=False)]
        sources = [(key, source) for key, source in pairs if source is not None]
        refused = sum(not isinstance(obj, ChunkObj) for obj in objs)
        if refused and self.io.stats.failed("not_stored: another allocator's") == 1:
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
            names = self._names.keys([key for key, _ in part])
            self.io.store(self.io.bind(kvcaches), names, [source.start for _, source in part], slots, [])

    def stored(self, keys: Sequence[CacheEngineKey]) -> list[CacheEngineKey]:
        """Those of `keys` that are in the pool, once this rank's stores so far are over, which is waited for."""
        self.io.flush()
        there = self.io.client.contains(self._names.keys(keys))
        return [key for key, found in zip(keys, there, strict=True) if found]

    def remove(self, keys: Sequence[CacheEngineKey], force: bool) -> int:
        """Forget chunks of this rank; how many were in the pool.

        force: also those that are leased or pinned, and, soon, those below. Else it is an eviction from the pool.
        """
        names = self._names.keys(keys)
        if force:
            self.below.forget(names)
        return self.io.client.remove(names, force)

    def clear(self) -> int:
        """Forget every chunk of the namespace, of all instances and ranks, below as well; how many chunks were in the pool."""
        return self.io.client.clear(self.io.layout.namespace().prefix, reset=True)

    # ---- inside

    def paged(self) -> PagedKV:
        return self.io.bind(self.kvcaches)

    @property
    def _on_gpu(self) -> bool:
        return self.io.device.ordinal is not None

    def _mine(self, keys: Sequence[CacheEngineKey]) -> bool:
        """Do these keys say whose they are? Those of one call are of one request."""
        if not keys or not self._needs_scope or scoped(keys[0]):
            return bool(keys)
        if not self._unscoped:
            self._unscoped = True
            text = (
                "requests come without vcache's tag, so that LoRA and cache_salt cannot be told apart; nothing of them is cached. "
                "vLLM did not load the plugin `vcache`: add it to VLLM_PLUGINS, or unset that variable"
            )
            log.error(text)
            self.io.client.report("error", text)
        return False

    def _load_leased(self, kv: PagedKV, shared: SharedLease, part: list[tuple[Any, int]], slots: Slots, skip: int) -> int | None:
        """Chunks that `get` leased; what the pool does not have any more is looked for below."""
        objs, starts = [obj for obj, _ in part], [start for _, start in part]
        fresh = self._fresh(shared.take(), objs)
        if fresh is None:
            self.io.stats.failed("lease_lost")
        loaded = self._launch(kv, *fresh, starts[: len(fresh[1])], slots, skip) if fresh is not None else 0
        if loaded < len(part):
            loaded += self.below.rescue(kv, [obj.key for obj in objs[loaded:]], starts[loaded:], slots, skip)
        return starts[loaded] if loaded < len(part) else None

    def _launch(self, kv: PagedKV, lease: Lease, placed: Sequence[Placed], starts: list[int], slots: Slots, skip: int) -> int:
        """Load leased chunks, and settle unless the caller does: how many leading ones are valid, or will be. Ends the lease."""
        views = self.io.views([location for _, location in placed])
        if len(views) < len(placed):
            self.io.stats.failed("segment")
        starts = starts[: len(views)]
        copy = planned(self.io, kv, starts, slots, skip)
        if not (views and is_whole(self.io, kv, copy, starts, skip)):
            self.io.let_go(lease)
            return 0
        tokens = copy.nbytes // (kv.chunk_bytes(self.io.chunk_size) // self.io.chunk_size)
        loading = _Loading(lease, views, tokens, slots, starts[0], skip)
        try:
            loading.scattered = self.io.scatter(kv, copy, views, [key for key, _ in placed])
        except VCacheError:
            self.io.let_go(lease)
            raise
        if self.settles:
            self._loading.append(loading)
        elif not self._settled(loading):
            return 0
        return len(views)

    def _settled(self, loading: _Loading) -> bool:
        """Wait for a load under way, and end its lease: are its tokens valid? What failed is counted."""
        lease = loading.lease
        try:
            complete = loading.scattered is not None and self.io.complete(loading.scattered, lease.seconds_left)
        except ChecksumError:  # counted, as `checksum`
            self.io.let_go(lease)
            return False
        held = self.io.conclude(lease) if complete else self.io.end(lease)
        if not (complete and held):
            self.io.stats.failed("lease_lost")
            return False
        self.io.note_retrieved(loading.views, loading.tokens)
        return True

    def _fresh(self, lease: Lease | None, objs: list[LeasedObj]) -> tuple[Lease, list[Placed]] | None:
        """A lease with time for a copy, and where the chunks lie: the lease there is, renewed if past half its life, or a new one."""
        if lease is not None and (self.io.good_for_a_copy(lease) or self.io.renew(lease)):
            return lease, [(obj.key, obj.location) for obj in objs]
        lease = self.io.lease([obj.key for obj in objs])
        return None if lease is None else (lease, _placed(lease))


def _origin(obj: MemoryObj) -> object:
    """What decides how a memory object is loaded: its lease, that it came from below, or nothing that is ours."""
    return obj.shared if isinstance(obj, LeasedObj) else type(obj) if isinstance(obj, FetchedObj) else None


def _placed(lease: Lease, first: int = 0, stop: int | None = None) -> list[Placed]:
    """Chunks `first` to `stop` of a lease."""
    return list(zip(lease.keys[first:stop], lease.locations[first:stop], strict=True))
