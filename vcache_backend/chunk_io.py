"""Chunks by key, between one worker's KV cache and the pool. The engine names chunks by tokens; doors bring keys of their own."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from vcache_backend.chunk import Layout
from vcache_backend.committer import Committer, PendingStore
from vcache_backend.config import Config
from vcache_backend.errors import LayoutError, ServerUnavailable, VCacheError
from vcache_backend.metadata_server.messages import ChunkKey, Location, Refusal
from vcache_backend.stats import EngineStats
from vcache_backend.vram_pool import devices, pool
from vcache_backend.vram_pool.copier import Completion, Copier, HostCopier
from vcache_backend.vram_pool.paged import PagedKV
from vcache_backend.vram_pool.planner import CopyPlan, Piece, plan
from vcache_backend.vram_pool.slots import SlotView

log = logging.getLogger(__name__)

KVCaches = Sequence[torch.Tensor] | Mapping[str, torch.Tensor]
Slots = npt.NDArray[np.int64]


class Lease(msgspec.Struct, eq=False):
    """A leading run of chunks that may be read.

    `deadline`: until when (time.monotonic), counted from before it was asked for, `seconds` earlier. `connection`: which of the
    client's it was given on; it ends with it.
    """

    id: int
    keys: list[ChunkKey]
    locations: list[Location]
    deadline: float
    seconds: float
    connection: int

    @property
    def seconds_left(self) -> float:
        return max(self.deadline - time.monotonic(), 0.0)


class ChunkIO:
    """Lease, load and store chunks of one rank of one model instance.

    Look-ups and leases from any thread; `bind`, `store` and `load` from the worker's thread that launches kernels. Methods raise
    VCacheError (and, from torch, RuntimeError) where something failed; `miss` turns that into a counted, once logged miss.
    """

    def __init__(
        self,
        config: Config,
        layout: Layout,
        copier: Copier | None = None,
        unfit: Callable[[int, int], str | None] = lambda whole, new: None,
    ) -> None:
        """Connect, and lend this worker's segment, unless `unfit` (see `Pool`) says why not. Raises ConfigError; an absent server
        is no error: everything is a miss."""
        if layout.chunk_size != config.engine.chunk_size:
            raise ValueError(f"layout.chunk_size is {layout.chunk_size}, engine.chunk_size is {config.engine.chunk_size}")
        self.layout, self.chunk_size = layout, layout.chunk_size
        self._config = config.engine
        self.stats = EngineStats()
        self.device = devices.resolve(config.pool.device)
        fields = layout.fields() | {"namespace": str(layout.namespace())}
        self.client = pool.connect(config, self.device, fields)
        self.pool = pool.Pool(self.client, self.device, config.pool.segment_bytes, unfit)
        self.copier = copier or make_copier(self.device, config)
        self.committer = Committer(self.client, self.stats, config.engine.max_inflight_stores)
        self._paged: PagedKV | None = None
        self._paged_for: tuple[int, ...] = ()

    def bind(self, kvcaches: KVCaches) -> PagedKV:
        """The geometry of these tensors, worked out once; LayoutError if it is not what the namespace stands for."""
        tensors = list(kvcaches.values()) if isinstance(kvcaches, Mapping) else kvcaches
        mark = (len(tensors), *(tensor.data_ptr() for tensor in (tensors[0], tensors[-1]))) if tensors else ()
        if self._paged is not None and mark == self._paged_for:
            return self._paged
        axes, whole = self._config.kv_axes or None, self._config.whole_blocks_only
        kv = PagedKV.describe(tensors, self.layout.block_size, axes=axes, whole_blocks_only=whole)
        if (kv.name, kv.layers) != (self.layout.kv_layout, self.layout.layers):
            here = f"{kv.layers} layers of {kv.name}"
            raise LayoutError(f"kvcaches are {here}, but the layout says {self.layout.layers} of {self.layout.kv_layout}")
        self.copier.prepare(kv)
        self._paged, self._paged_for = kv, mark
        return kv

    # ---- reads

    def lookup(self, keys: list[ChunkKey], ranks: int = 1) -> int:
        """How many leading chunks are there for all `ranks` ranks (keys of rank 0). No lease."""
        return self.client.lookup(keys, ranks) if keys else 0

    def lease(self, keys: list[ChunkKey]) -> Lease | None:
        """Lease the leading run of chunks that are there; None if there are none."""
        asked, connection = time.monotonic(), self.client.connections_lost
        with self.stats.timed("acquire"):
            leased = self.client.acquire(keys)
        if not leased.lease:
            return None
        there, until = keys[: len(leased.locations)], asked + leased.seconds
        return Lease(leased.lease, there, leased.locations, until, leased.seconds, connection)

    def good_for_a_copy(self, lease: Lease) -> bool:
        """Has the lease more than half its time left, and is its connection the present one?"""
        same = self.client.connected and lease.connection == self.client.connections_lost
        return same and lease.seconds_left > lease.seconds / 2

    def renew(self, lease: Lease) -> bool:
        """Give a lease its full time again; False if it had ended, or nobody answered."""
        asked = time.monotonic()
        try:
            held = self.client.renew(lease.id)
        except VCacheError as error:
            self.miss("renew", error)
            return False
        lease.deadline = asked + lease.seconds if held else lease.deadline
        return held

    def views(self, locations: Sequence[Location]) -> list[SlotView]:
        """Addresses of the leading locations this process can reach. Hold them until the copy is complete."""
        return self.pool.slots(locations)

    def load(self, kv: PagedKV, views: Sequence[SlotView], copy: CopyPlan, seconds: float) -> bool:
        """Scatter, in one launch, and wait: was every byte in place within `seconds`? Only then may the bytes be trusted."""
        return self.complete(self.copier.scatter(kv, copy, views), seconds)

    def complete(self, scattered: Completion, seconds: float) -> bool:
        """Wait for a scatter of `copier`: was every byte in place within `seconds`?"""
        started = time.perf_counter()
        complete = scattered.wait(seconds)
        self.stats.add_time("retrieve_copy", scattered.seconds or time.perf_counter() - started)
        return complete

    def end(self, lease: Lease) -> bool:
        """Release: did the lease hold until now? No answer is no."""
        try:
            with self.stats.timed("release"):
                return self.client.release(lease.id)
        except VCacheError as error:
            self.miss("release", error)
            return False

    def let_go(self, lease: Lease) -> None:
        """Release in the background: nothing was read under it, or it does not matter."""
        self.committer.release(lease.id)

    # ---- stores

    def store(self, kv: PagedKV, keys: Sequence[ChunkKey], firsts: Sequence[int], slots: Slots, prefix: list[ChunkKey]) -> int:
        """Reserve, gather in one launch, and leave the commit to the background; how many chunks are on their way.

        The tokens of chunk `keys[i]` have their places at `slots[firsts[i] : firsts[i] + chunk_size]`. `prefix`: the chunks
        before the first of `keys`. Chunks that are there already are not copied.
        """
        if not keys:
            return 0
        if not self.committer.has_room():
            self.stats.count(not_stored_backlog=len(keys))
            return 0
        with self.stats.timed("reserve"):
            reserved = self.client.reserve(list(keys), kv.chunk_bytes(self.chunk_size))
        places = [(at, slot) for at, slot in zip(firsts, reserved.slots, strict=True) if isinstance(slot, Location)]
        self._note_refusals(reserved.slots, reserved.reason)
        return self._gather(kv, places, slots, reserved.reservation, prefix) if places else 0

    def _gather(
        self, kv: PagedKV, places: list[tuple[int, Location]], slots: Slots, reservation: int, prefix: list[ChunkKey]
    ) -> int:
        """Gather into the reserved slots. All of them, or the reservation is given back: a commit publishes every slot.

        After a RuntimeError (a launch that failed in torch) nobody knows whether something writes: the reservation is
        neither committed nor given back, and its slots wait in quarantine.
        """
        size, count = self.chunk_size, len(places)
        try:
            views = self.pool.slots([location for _, location in places])
            with self.stats.timed("plan"):
                copy = plan(kv, size, slots, [Piece(slot, at, 0, size) for slot, (at, _) in enumerate(places)])
            if len(views) < count or not copy.complete(count).all():
                self.stats.count(not_stored_no_slot=count)
                self.committer.give_back(reservation)
                return 0
            completion = self.copier.gather(kv, copy, views)
        except VCacheError:
            self.committer.give_back(reservation)
            raise
        self.committer.submit(
            PendingStore(
                completion=completion,
                reservation=reservation,
                prefix=prefix,
                tokens=count * size,
                nbytes=copy.nbytes,
                keepalive=views,
            )
        )
        return count

    # ---- life

    def flush(self, timeout: float = 5.0) -> bool:
        """Wait until the stores so far are visible or given up; False if they are not after `timeout` seconds."""
        return self.committer.flush(timeout)

    def close(self) -> None:
        """Finish stores, unmap, disconnect. The segments and their chunks stay in the pool. Idempotent."""
        self.committer.close()
        self.copier.close()
        # The client first: a heartbeat of its thread would map segments again.
        self.client.close()
        self.pool.close()

    # ---- counting

    def note_retrieved(self, views: Sequence[SlotView], tokens: int) -> None:
        """`tokens` of the chunks in `views` are now in the KV cache; their bytes are counted by where they came from."""
        each = tokens * views[0].nbytes // (self.chunk_size * len(views))
        own = sum(view.local for view in views)
        peer = len(views) - own
        self.stats.count(chunks_retrieved=len(views), tokens_retrieved=tokens, bytes_own=own * each, bytes_peer=peer * each)

    def miss(self, call: str, error: Exception) -> int:
        """Count a failure, and say each cause once. Always 0."""
        cause = f"{call}: {type(error).__name__}"
        if self.stats.failed(cause) == 1 and not isinstance(error, ServerUnavailable):
            log.warning("%s failed, which counts as a miss: %s", call, error)
        return 0

    def _note_refusals(self, slots: Sequence[Location | int], reason: str) -> None:
        names = {Refusal.EXISTS: "exists", Refusal.BUSY: "busy", Refusal.FULL: "full"}
        for slot in slots:
            if not isinstance(slot, Location):
                self.stats.count(**{f"not_stored_{names.get(Refusal(slot), 'no_slot')}": 1})
        if reason and self.stats.failed(f"not_stored: {reason}") == 1:
            log.warning("chunks are not stored: %s", reason)


def make_copier(device: devices.Device, config: Config) -> Copier:
    """The copier of a device: torch for host memory, kernels for a GPU."""
    if device.ordinal is None:
        return HostCopier()
    # Needs Triton, which a machine without a GPU may not have.
    from vcache_backend.vram_pool.cuda_copier import CudaCopier

    return CudaCopier(device.ordinal, config.pool.max_ctas)
