"""What the plugin does with chunks: names them, leases them, moves them. Its callers see to it that nothing is raised into LMCache."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from lmcache.utils import CacheEngineKey
from lmcache.v1.memory_management import MemoryObj

from vcache_backend.chunk import Namespace
from vcache_backend.chunk_io import ChecksumError, ChunkIO, KVCaches, Lease
from vcache_backend.errors import VCacheError
from vcache_backend.metadata_server.messages import ChunkKey, Location
from vcache_backend.vram_pool.copier import Completion
from vcache_backend.vram_pool.paged import PagedKV
from vcache_backend.vram_pool.planner import CopyPlan, Piece, plan, plan_chunks
from vcache_backend.vram_pool.slots import SlotView

from .keys import KeyMaker, scoped
from .memory import DeferredObj, Form, LeasedObj, SharedLease

log = logging.getLogger(__name__)

Slots = npt.NDArray[np.int64]
Placed = tuple[ChunkKey, Location]
"""A chunk and where it lies."""
FOREIGN_AT_ONCE = 8
"""Chunks of another tier that are staged on the device for one launch: 256 MiB for an 8B model."""
FOREIGN_SECONDS = 10.0
MAX_PINS = 1024


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

    settles: `load` only launches, and the caller will ask `settle`, in the same step, which loads held. What is queued on the
    current stream comes after the copy in any case; the host prepares it meanwhile.
    """

    def __init__(
        self, io: ChunkIO, kvcaches: KVCaches, namespace: Namespace, rank: int, ranks: int, needs_scope: bool, metadata: Any
    ) -> None:
        """`rank` of `ranks` that hold a shard of every chunk. needs_scope: leave alone keys that do not say whose they are (see
        `vllm_hooks`). metadata: LMCache's, which knows the shapes it takes a chunk for."""
        self.io, self._kvcaches = io, kvcaches
        self._names, self._first_rank, self._ranks = KeyMaker(namespace, rank), KeyMaker(namespace, 0), ranks
        self._needs_scope = needs_scope
        self._form = Form.of(metadata.get_shapes(io.chunk_size), metadata.get_dtypes(), None)
        self._pins: dict[CacheEngineKey, list[Lease]] = {}
        self._taken: Counter[CacheEngineKey] = Counter()
        self._pinning = threading.Lock()
        self._scratch: torch.Tensor | None = None
        self._cloned: list[SharedLease] = []
        self._loading: list[_Loading] = []
        self.settles = False
        self._unscoped = False

    # ---- reads

    def contains(self, keys: Sequence[CacheEngineKey], pin: bool) -> int:
        """How many leading chunks every rank can retrieve. pin: lease this rank's until `unpin` of the first key, or the lease's end."""
        if not self._mine(keys):
            return 0
        if self._ranks > 1 or not pin:
            found = self.io.lookup(self._first_rank.keys(keys), self._ranks)
            if not pin or not found:
                return found
            keys = keys[:found]
        lease = self.io.lease(self._names.keys(keys))
        if lease is None:
            return 0
        readable = len(self.io.views(lease.locations))
        with self._pinning:
            if len(self._pins) >= MAX_PINS:
                self._pins = {key: there for key, there in self._pins.items() if there and there[-1].seconds_left}
                self._taken = +self._taken
            # Look-ups of requests that were never scheduled leave theirs behind.
            self._pins[keys[0]] = [there for there in self._pins.get(keys[0], ()) if there.seconds_left] + [lease]
        return readable

    def unpin(self, key: CacheEngineKey) -> bool:
        """End the oldest lease of a look-up that began with `key`; nothing for the keys after it."""
        with self._pinning:
            if self._taken[key]:
                self._taken[key] -= 1
                return True
            leases = [lease for lease in self._pins.pop(key, ()) if lease.seconds_left]
            lease = leases.pop(0) if leases else None
            if leases:
                self._pins[key] = leases
        if lease is not None:
            self.io.let_go(lease)
        return lease is not None

    def get(self, keys: Sequence[CacheEngineKey]) -> list[LeasedObj]:
        """The leading chunks that are there, under one lease."""
        lease = self.io.lease(self._names.keys(keys)) if self._mine(keys) else None
        if lease is None:
            self.io.stats.count(chunks_missed=len(keys))
            return []
        readable = len(self.io.views(lease.locations))
        self.io.stats.count(chunks_missed=len(keys) - readable)
        if not readable:
            self.io.let_go(lease)
            return []
        shared = SharedLease(lease, self.io.let_go, readable)
        return [LeasedObj(self._form, shared, lease, index, self._clone) for index in range(readable)]

    def load(self, objs: Sequence[MemoryObj], starts: Sequence[int], slots: Slots, skip: int) -> int | None:
        """Bring chunks into the KV cache, in one launch for those of one lease, and wait unless the worker `settles`.

        The chunk of `objs[i]` begins with token `starts[i]`; no token before `skip` is written. Returns the index of the first
        token that is not valid now: its lease did not hold, its bytes were not there or not right; None if all are.
        """
        kv, failed = self.io.bind(self._kvcaches), []
        pairs = list(zip(objs, starts, strict=True))
        for shared, group in groupby(pairs, key=lambda pair: pair[0].shared if isinstance(pair[0], LeasedObj) else None):
            part = list(group)
            if shared is not None:
                failed.append(self._load_leased(kv, shared, part, slots, skip))
            else:
                step = FOREIGN_AT_ONCE
                failed += [self._load_foreign(kv, part[i : i + step], slots, skip) for i in range(0, len(part), step)]
        if not self._clones_held():
            self.io.stats.failed("lease_lost")
            failed.append(starts[0])
        return min((start for start in failed if start is not None), default=None)

    def retrieve(self, keys: Sequence[CacheEngineKey], first: int, slots: Slots, skip: int) -> int:
        """Load the chunks `keys[first:]` of a request that was looked up, as `load` does: how many of them there are.

        Under the lease of the look-up, if it has time for a copy, which spares naming and leasing them again.
        """
        kv, size = self.io.bind(self._kvcaches), self.io.chunk_size
        count = len(keys) - first
        starts = [chunk * size for chunk in range(first, len(keys))]
        lease = self._pinned(keys)
        placed: list[Placed] = []
        if lease is not None:
            placed = _placed(lease, first, len(keys))
        elif self._mine(keys):
            lease = self.io.lease(self._names.keys(keys[first:]))
            placed = _placed(lease) if lease is not None else []
        loaded = self._launch(kv, lease, placed, starts[: len(placed)], slots, skip) if lease is not None else 0
        self.io.stats.count(chunks_missed=count - loaded)
        return loaded

    def _pinned(self, keys: Sequence[CacheEngineKey]) -> Lease | None:
        """The lease of the look-up that found all of `keys`, taken from it; None if there is none with time for a copy."""
        with self._pinning:
            leases = self._pins.get(keys[0], [])
            for lease in leases:
                # The last key stands for all before it.
                enough = len(lease.keys) >= len(keys) and self.io.good_for_a_copy(lease)
                if enough and lease.keys[len(keys) - 1] == self._names.keys(keys[-1:])[0]:
                    leases.remove(lease)
                    # Its unpin is still to come, and must not end another request's lease.
                    self._taken[keys[0]] += 1
                    return lease
        return None

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

    def share(self) -> None:
        """Other tiers will want bytes: make the memory they are handed out in."""
        kv = self.io.bind(self._kvcaches)
        self._scratch = torch.empty(kv.chunk_bytes(self.io.chunk_size), dtype=torch.uint8, device=kv.device)

    def note(self, objs: Sequence[MemoryObj], starts: Sequence[int], slots: Slots) -> None:
        """Remember where the chunks of a store lie, until `put`. Work queued on the current stream has written them by then."""
        written = torch.cuda.current_stream().record_event() if self._on_gpu else None
        for obj, start in zip(objs, starts, strict=True):
            if isinstance(obj, DeferredObj):
                obj.source, obj.copy_out = (slots, start), self._copy_out(written)

    def put(self, keys: Sequence[CacheEngineKey], objs: Sequence[MemoryObj]) -> None:
        """Store noted chunks in one launch. Visible once copied; those that are there already are not copied again."""
        pairs = [(key, obj.source) for key, obj in zip(keys, objs, strict=False) if isinstance(obj, DeferredObj)]
        sources = [(key, source) for key, source in pairs if source is not None]
        if not sources or not self._mine([key for key, _ in sources]):
            return
        slots: Slots = sources[0][1][0]
        names = self._names.keys([key for key, _ in sources])
        self.io.store(self.io.bind(self._kvcaches), names, [first for _, (_, first) in sources], slots, [])

    def remove(self, keys: Sequence[CacheEngineKey]) -> int:
        """Forget chunks of this rank."""
        return self.io.client.remove(self._names.keys(keys))

    def clear(self) -> int:
        """Forget every chunk of the namespace, of all instances and ranks; how many chunks."""
        return self.io.client.clear(self.io.layout.namespace().prefix)

    # ---- inside

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
        fresh = self._fresh(shared.take(), [obj for obj, _ in part])
        starts = [start for _, start in part]
        if fresh is None:
            self.io.stats.failed("lease_lost")
            return starts[0]
        loaded = self._launch(kv, *fresh, starts, slots, skip)
        return starts[loaded] if loaded < len(starts) else None

    def _launch(self, kv: PagedKV, lease: Lease, placed: Sequence[Placed], starts: list[int], slots: Slots, skip: int) -> int:
        """Load leased chunks, and settle unless the caller does: how many leading ones are valid, or will be. Ends the lease."""
        views = self.io.views([location for _, location in placed])
        if len(views) < len(placed):
            self.io.stats.failed("segment")
        starts = starts[: len(views)]
        copy = self._plan(kv, starts, slots, skip)
        if not (views and self._whole(kv, copy, starts, skip)):
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

    def _plan(self, kv: PagedKV, starts: list[int], slots: Slots, skip: int) -> CopyPlan:
        size = self.io.chunk_size
        with self.io.stats.timed("plan"):
            if starts and starts == list(range(starts[0], starts[0] + size * len(starts), size)):
                return plan_chunks(kv, size, slots, starts[0], len(starts), max(skip - starts[0], 0))
            pieces = [Piece(i, at, min(max(skip - at, 0), size), size) for i, at in enumerate(starts)]
            return plan(kv, size, slots, pieces)

    def _whole(self, kv: PagedKV, copy: CopyPlan, starts: list[int], skip: int) -> bool:
        """Does the plan move every token that is wanted?"""
        size = self.io.chunk_size
        tokens = sum(size - min(max(skip - at, 0), size) for at in starts)
        return copy.nbytes * size == tokens * kv.chunk_bytes(size)

    def _load_foreign(self, kv: PagedKV, part: list[tuple[Any, int]], slots: Slots, skip: int) -> int | None:
        """Chunks that another tier kept for us, or that the first rank broadcast: opaque bytes as `ChunkObj.bytes` gave them."""
        need, views = kv.chunk_bytes(self.io.chunk_size), []
        for obj, _ in part:
            there = obj.raw_tensor if obj.raw_tensor is not None else obj.tensor
            flat = there.contiguous().view(-1).view(torch.uint8)
            if flat.numel() < need:
                break
            views.append(SlotView.over(flat[:need].to(kv.device, non_blocking=True), local=True))
        starts = [start for _, start in part[: len(views)]]
        copy = self._plan(kv, starts, slots, skip)
        loaded = bool(views) and self._whole(kv, copy, starts, skip) and self.io.load(kv, views, copy, FOREIGN_SECONDS)
        if not loaded or len(views) < len(part):
            self.io.stats.failed("foreign")
        if not loaded:
            return part[0][1]
        return part[len(views)][1] if len(views) < len(part) else None

    def _clone(self, obj: LeasedObj) -> torch.Tensor:
        """The bytes of a leased chunk in memory of their own; `load`, which comes next, asks whether the lease held."""
        self._cloned.append(obj.shared)
        views = self.io.views([obj.location])
        if views:
            return views[0].tensor[: self.io.bind(self._kvcaches).chunk_bytes(self.io.chunk_size)].clone()
        # LMCache dies of an exception here. Without its lease the chunk counts as lost.
        lease = obj.shared.take()
        if lease is not None:
            self.io.let_go(lease)
        return torch.zeros(obj.form.nbytes, dtype=torch.uint8, device=self.io.bind(self._kvcaches).device)

    def _clones_held(self) -> bool:
        cloned, self._cloned = self._cloned, []
        shared = list(dict.fromkeys(cloned))
        if not shared:
            return True
        if self._on_gpu:
            torch.cuda.synchronize(self.io.device.ordinal)
        # Every lease is ended, also after one that did not hold.
        held = [lease is not None and self.io.end(lease) for lease in (one.take() for one in shared)]
        return all(held)

    def _copy_out(self, written: torch.cuda.Event | None) -> Callable[[DeferredObj], torch.Tensor]:
        def copy_out(obj: DeferredObj) -> torch.Tensor:
            """For a tier that wants the bytes now, on its own stream, which is the current one."""
            kv, size = self.io.bind(self._kvcaches), self.io.chunk_size
            if written is not None:
                torch.cuda.current_stream().wait_event(written)
            assert obj.source is not None
            slots, start = obj.source
            # Made once: there may be no memory left later, and LMCache dies of an exception here. It uses the bytes before it
            # asks for the next, on one stream.
            if self._scratch is None:
                self._scratch = torch.empty(kv.chunk_bytes(size), dtype=torch.uint8, device=kv.device)
            self.io.copier.gather(kv, plan_chunks(kv, size, slots, start, 1), [SlotView.over(self._scratch, local=True)])
            return self._scratch

        return copy_out


def _placed(lease: Lease, first: int = 0, stop: int | None = None) -> list[Placed]:
    """Chunks `first` to `stop` of a lease."""
    return list(zip(lease.keys[first:stop], lease.locations[first:stop], strict=True))
