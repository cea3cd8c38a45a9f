"""One worker's way to the pool: connection, segments, copier, commit thread, offload tier and statistics in one place."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import msgspec

from vcache_backend.config import Config
from vcache_backend.errors import ChecksumError, LayoutError, ServerUnavailable, VCacheError
from vcache_backend.metadata_server.channel import Sent
from vcache_backend.metadata_server.messages import GRACE_SECONDS, ChunkKey, Leased, Location, SegmentId
from vcache_backend.transfer.arguments import KVCaches
from vcache_backend.transfer.checked import CheckedScatter
from vcache_backend.transfer.layout import Layout, checked_layout, is_checked
from vcache_backend.transfer.stats import EngineStats
from vcache_backend.transfer.store import Committer
from vcache_backend.vram_pool import devices, pool
from vcache_backend.vram_pool.copier import Completion, Copier, HostCopier, Mark
from vcache_backend.vram_pool.paged import PagedKV
from vcache_backend.vram_pool.planner import CopyPlan
from vcache_backend.vram_pool.slots import SlotView
from vcache_backend.vram_pool.uploads import Uploader, make_uploader

if TYPE_CHECKING:
    from vcache_backend.offload.read import Fetch, Staged
    from vcache_backend.offload.tier import OffloadTier
    from vcache_backend.vram_pool.checksum import Sealer

log = logging.getLogger(__name__)

FOREIGN = -1
"""The connection of a lease that another process's client got."""
_STUCK_SECONDS = 10.0
"""How long a scatter is waited for whose slots cannot be looked at."""


class Lease(msgspec.Struct, eq=False):
    """A leading run of chunks that may be read.

    `deadline`: until when (time.monotonic), counted from before it was asked for, `seconds` earlier. `connection`: which of the
    client's it was given on, it ends with it; FOREIGN for one of another process of this node.
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


class AskedLease:
    """A lease that was asked for. As a context it is given back at the end, unless somebody fetched it."""

    def __init__(self, session: Session, fetch: Callable[[], Lease | None]) -> None:
        self._session, self._fetch = session, fetch
        self._fetched = False

    def fetch(self) -> Lease | None:
        """Wait for the answer, once. Raises VCacheError."""
        self._fetched = True
        return self._fetch()

    def drop(self) -> None:
        """Give it back, unless it was fetched. Idempotent."""
        if not self._fetched:
            with suppress(VCacheError):
                lease = self.fetch()
                if lease is not None:
                    self._session.release(lease)

    def __enter__(self) -> AskedLease:
        return self

    def __exit__(self, *_: object) -> None:
        self.drop()


class Session:
    """Leases, copies and look-ups of one rank of one model instance.

    Look-ups and leases from any thread; `bind` and copies from the worker's thread that launches kernels. Methods raise VCacheError
    (and, from torch, RuntimeError) where something failed; `miss` turns that into a counted, once logged miss.
    """

    def __init__(
        self,
        config: Config,
        layout: Layout,
        *,
        rank: int = 0,
        copier: Copier | None = None,
        over_budget: Callable[[int, int], str | None] = lambda whole, new: None,
        anonymous: bool = False,
    ) -> None:
        """Connect, and lend this worker's segment, unless `over_budget` (see `Pool`) says why not. Raises ConfigError; an absent server
        is no error: everything is a miss until it is there. rank: of the keys that are stored here. anonymous: another process
        of this instance tells the server its layout."""
        if layout.chunk_size != config.engine.chunk_size:
            raise ValueError(f"layout.chunk_size is {layout.chunk_size}, engine.chunk_size is {config.engine.chunk_size}")
        self.layout = layout = checked_layout(config, layout)
        self.namespace = layout.namespace()
        self.chunk_size, self.rank = layout.chunk_size, rank
        self._config = config
        self.stats = EngineStats()
        self.device = devices.resolve(config.pool.device)
        fields = {} if anonymous else layout.fields() | {"namespace": str(self.namespace)}
        self.client = pool.connect(config, self.device, fields)
        self.pool = pool.Pool(self.client, self.device, config.pool.segment_bytes, over_budget)
        self.copier = copier or make_copier(self.device, config)
        self.sealer = make_sealer(self.device) if is_checked(layout) else None
        self.tier = make_tier(config, self.device, self.stats)
        self.on_stored: list[Callable[[list[ChunkKey]], None]] = [self._offer]
        """Told, in the commit thread, which chunks of this worker others can see from now on."""
        self.committer = Committer(self.client, self.stats, config.engine.max_inflight_stores, self.on_stored)
        self._uploader: Uploader | None = None
        self._paged: PagedKV | None = None
        self._paged_for: list[object] = []

    # ---- the KV cache

    def bind(self, kvcaches: KVCaches) -> PagedKV:
        """The geometry of these tensors, worked out once; LayoutError if it is not what the namespace stands for."""
        tensors = list(kvcaches.values()) if isinstance(kvcaches, Mapping) else kvcaches
        # All that the geometry follows from. Some 0.4 us a layer, in every call.
        mark: list[object] = [(tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype) for tensor in tensors]
        if self._paged is not None and mark == self._paged_for:
            return self._paged
        kv = PagedKV.describe(tensors, self.layout.block_size, axes=self._config.engine.kv_axes or None)
        if (kv.name, kv.layers) != (self.layout.kv_layout, self.layout.layers):
            here = f"{kv.layers} layers of {kv.name}"
            raise LayoutError(f"kvcaches are {here}, but the layout says {self.layout.layers} of {self.layout.kv_layout}")
        self.copier.prepare(kv)
        if self.sealer is not None:
            self.sealer.prepare(kv.chunk_bytes(self.chunk_size))
        self._bind_tier(kv)
        self._paged, self._paged_for = kv, mark
        return kv

    @property
    def chunk_bytes(self) -> int:
        """Bytes of one chunk, known once KV caches are bound; 0 before."""
        return 0 if self._paged is None else self._paged.chunk_bytes(self.chunk_size)

    # ---- look-ups

    @property
    def connected(self) -> bool:
        return self.client.connected

    def lookup(self, keys: list[ChunkKey], ranks: int = 1) -> int:
        """How many leading chunks are there for all `ranks` ranks (keys of rank 0), in the pool or the offload tier. No lease."""
        return self.lookup_offloaded(keys, ranks, self.client.lookup(keys, ranks)) if keys else 0

    def lookup_offloaded(self, keys: list[ChunkKey], ranks: int, found: int) -> int:
        """`lookup`, where the first `found` chunks are known to be in the pool and the next one is not."""
        return found if self.tier is None else self.tier.extend(self.client, keys, ranks, found)

    def contains(self, key: ChunkKey) -> int:
        """0: in the pool; 1: in the offload tier; -1: nowhere known. No lease."""
        answer = self.client.present([key])
        if answer.present[0]:
            return 0
        return 1 if self.tier is not None and self.tier.lookup([key], answer.epoch) else -1

    def remove(self, keys: list[ChunkKey], force: bool = True) -> int:
        """Take chunks out of the pool now; how many were there. force: also those that are leased."""
        return self.client.remove(keys, force)

    def touch(self, keys: list[ChunkKey]) -> None:
        """Make chunks recent, soon."""
        self.committer.touch(keys)

    def segments(self) -> frozenset[SegmentId]:
        """Those whose chunks this worker can read."""
        return frozenset(info.id for info in self.pool.mapped())

    # ---- leases

    def lease(self, keys: list[ChunkKey]) -> Lease | None:
        """Lease the leading run of chunks that are in the pool; None if there are none."""
        asked, connection = time.monotonic(), self.client.connections_lost
        return self._leased(keys, self.client.acquire(keys), asked, connection)

    def ask_lease(self, keys: list[ChunkKey]) -> AskedLease:
        """`lease` in two steps: the answer is fetched later."""
        asked, connection = time.monotonic(), self.client.connections_lost
        try:
            sent = self.client.send_acquire(keys) if keys else None
        except VCacheError as error:
            log.debug("a lease could not be asked for: %s", error)
            return AskedLease(self, lambda: self.lease(keys))
        return AskedLease(self, (lambda: self._leased(keys, self._answer(sent), asked, connection)) if sent else lambda: None)

    def _answer(self, sent: Sent[Leased]) -> Leased:
        """The answer to what was asked; a lease that comes too late is ended."""
        try:
            return sent.answer()
        except VCacheError:
            if not sent.over:
                self.committer.release_asked(sent)
            raise

    def _leased(self, keys: list[ChunkKey], leased: Leased, asked: float, connection: int) -> Lease | None:
        self.stats.add_time("acquire", time.monotonic() - asked)
        self.note_epoch(leased.epoch)
        if not leased.lease:
            return None
        there, until = keys[: len(leased.locations)], asked + leased.seconds
        return Lease(leased.lease, there, leased.locations, until, leased.seconds, connection)

    def good_for_a_copy(self, lease: Lease) -> bool:
        """Whether the lease has more than half its time left, and was given on the present connection."""
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

    def verdict(self, lease: Lease, end: bool = True) -> bool:
        """Whether a lease under which a copy is over held until now; `end` it, unless there are more copies. Nobody is asked, or waited
        for, before `GRACE_SECONDS` are over; then no answer is a no."""
        granted = lease.deadline - lease.seconds
        if time.monotonic() < min(granted + GRACE_SECONDS, lease.deadline):
            if end:
                self.release(lease)
            return True
        if not end:
            return self.renew(lease)
        if lease.connection == FOREIGN and not self.renew(lease):
            return False
        try:
            with self.stats.timed("release"):
                return self.client.release(lease.id)
        except VCacheError as error:
            self.miss("release", error)
            return False

    def release(self, lease: Lease) -> None:
        """End a lease in the background: nothing was read under it, or it does not matter."""
        self.committer.release(lease.id)

    def views(self, locations: Sequence[Location]) -> list[SlotView]:
        """Addresses of the leading locations this process can reach. Hold them until the copy is complete."""
        return self.pool.slots(locations)

    # ---- copies

    def mark(self) -> Mark:
        """Now, in the work of the current stream."""
        return self.copier.mark()

    def fence(self, copy: Completion) -> None:
        """Let what is queued on the current stream from now on come after `copy`."""
        self.copier.fence(copy)

    def scatter(
        self,
        kv: PagedKV,
        copy: CopyPlan,
        views: Sequence[SlotView],
        keys: Sequence[ChunkKey] | None,
        after: Mark | None = None,
    ) -> Completion:
        """Scatter in one launch, as `Copier.scatter` does, and look at the slots' checksums behind it, if there are any.

        keys: of the chunks in `views`, all of them or more. None: bytes that no pool ever had, which have no checksum. The answer's
        `done` and `wait` raise ChecksumError where a slot does not fit; the chunk is then counted and on its way out of the pool.
        """
        scattered = self.copier.scatter(kv, copy, views, after)
        if self.sealer is None or keys is None:
            return scattered
        named = list(keys[: len(views)])
        try:
            look = self.sealer.verify(views, named, kv.chunk_bytes(self.chunk_size), scattered)
        except BaseException as error:
            # The caller takes a VCacheError to mean that nothing writes into its blocks.
            if not scattered.wait(_STUCK_SECONDS):
                raise RuntimeError(f"a scatter goes on whose slots cannot be looked at: {error}") from error
            raise
        return CheckedScatter(scattered, look, lambda bad: self._drop_bad([named[i] for i in bad]))

    def slot_bytes(self, nbytes: int) -> int:
        """Of a slot for a chunk of `nbytes`, with its checksum if it has one. Raises LayoutError where such chunks can have none."""
        if self.sealer is None:
            return nbytes
        from vcache_backend.vram_pool.checksum import sealed_bytes

        return sealed_bytes(nbytes)

    def _drop_bad(self, keys: list[ChunkKey]) -> None:
        self.committer.remove(keys)
        for key in keys:
            if self.stats.failed("checksum") == 1:
                log.error("chunk %s changed after its commit: it does not fit its checksum, and leaves the pool", key.hex())

    # ---- the offload tier

    def _bind_tier(self, kv: PagedKV) -> None:
        """Make the offload tier ready for these KV caches; where there is no memory for it, leave it out."""
        if self.tier is None:
            return
        try:
            self._uploader = make_uploader(self.copier, kv, kv.chunk_bytes(self.chunk_size))
            self.tier.bind(self._config, self.layout, self.device, kv.chunk_bytes(self.chunk_size), self.views)
        except (VCacheError, RuntimeError) as error:
            log.error("no offload tier: %s", error)
            with suppress(VCacheError):
                self.client.report("error", f"no offload tier: {error}")
            self.tier.close()
            self.tier = self._uploader = None

    def _offer(self, keys: list[ChunkKey]) -> None:
        if self.tier is not None:
            self.tier.offer(keys)

    def fetch(self, keys: Sequence[ChunkKey]) -> Fetch | None:
        """Begin to read the leading run of chunks that the pool has not from the offload tier; None if nothing can come. To be cancelled
        if it is not used up."""
        if self.tier is None or not keys or not self.tier.may_have(keys[0]):
            return None
        answer = self.client.present(list(keys))
        pooled = answer.present
        return self.tier.fetch(keys[: pooled.index(True) if True in pooled else len(keys)], answer.epoch)

    def upload(self, kv: PagedKV, copy: CopyPlan, chunks: Sequence[Staged], after: Mark | None = None) -> Completion:
        """Scatter what a fetch brought, as `Copier.scatter` does; `most_staged` at once. Given back by the caller, once complete."""
        if self._uploader is None:
            raise VCacheError("the KV cache is not bound, or the offload tier was given up")
        return self._uploader.scatter(kv, copy, chunks, after)

    @property
    def most_staged(self) -> int:
        return self._uploader.most if self._uploader is not None else 1

    def offload_link(self) -> tuple[bool, float | None] | None:
        """Whether the offload tier can be read now, and the bytes of KV a second that it brought lately; None without one."""
        return None if self.tier is None else (self.tier.usable, self.tier.bandwidth)

    def note_epoch(self, epoch: int) -> None:
        """The server says that the namespace is in this epoch."""
        if self.tier is not None:
            self.tier.note_epoch(epoch)

    def known_offloaded(self, keys: Sequence[ChunkKey]) -> None:
        """These were read from the offload tier just now: it has them."""
        if self.tier is not None:
            self.tier.known(keys)

    def forget(self, keys: Sequence[ChunkKey]) -> None:
        """Remove chunks from the offload tier, soon."""
        if self.tier is not None:
            self.tier.forget(keys)

    @property
    def promotes(self) -> bool:
        """Whether chunks from the offload tier are to be stored in the pool again."""
        return self.tier is not None and self.tier.promotes

    def offload_snapshot(self) -> dict[str, Any] | None:
        """Counters and the state of the offload tier; None where there is none."""
        return None if self.tier is None else self.tier.snapshot()

    # ---- life

    def flush(self, timeout: float = 5.0, through: bool = False) -> bool:
        """Wait until the stores so far are visible or given up, and, if `through`, offloaded or dropped; False if they are not after
        `timeout` seconds."""
        until = time.monotonic() + timeout
        flushed = self.committer.flush(timeout)
        if not through or self.tier is None:
            return flushed
        return self.tier.flush(max(until - time.monotonic(), 0.0)) and flushed

    def miss(self, call: str, error: Exception) -> int:
        """Count a failure, and say each cause once. Always 0."""
        if isinstance(error, ChecksumError):
            return 0
        cause = f"{call}: {type(error).__name__}"
        if self.stats.failed(cause) == 1 and not isinstance(error, ServerUnavailable):
            log.warning("%s failed, which counts as a miss: %s", call, error)
        return 0

    def close(self) -> None:
        """Finish stores, unmap, disconnect. The segments and their chunks stay in the pool. Idempotent."""
        self.committer.close()
        if self.tier is not None:
            self.tier.close()
        self.copier.close()
        # The client first: a heartbeat of its thread would map segments again.
        self.client.close()
        self.pool.close()


def make_tier(config: Config, device: devices.Device, stats: EngineStats) -> OffloadTier | None:
    """The offload tier. None where it is off, or cannot be had, which is logged: the pool serves without."""
    if config.offload.policy == "off":
        return None
    # Needs libraries of its own.
    from vcache_backend.offload.tier import open_tier

    return open_tier(config.offload, stats, device.ordinal is not None)


def make_sealer(device: devices.Device) -> Sealer:
    """The sealer of a device."""
    # Needs Triton and takes a while to import.
    from vcache_backend.vram_pool import checksum

    return checksum.Sealer(device.ordinal)


def make_copier(device: devices.Device, config: Config) -> Copier:
    """The copier of a device: torch for host memory, kernels for a GPU."""
    if device.ordinal is None:
        return HostCopier()
    # Needs Triton, which a machine without a GPU may not have.
    from vcache_backend.vram_pool.cuda_copier import CudaCopier

    return CudaCopier(device.ordinal, config.pool.max_ctas)
