"""Chunks by key, between one worker's KV cache and the pool. The engine names chunks by tokens; doors bring keys of their own."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import numpy.typing as npt

from vcache_backend.config import Config
from vcache_backend.errors import LayoutError, ServerUnavailable, VCacheError
from vcache_backend.metadata_server.messages import GRACE_SECONDS, ChunkKey, Location, Refusal
from vcache_backend.transfer.arguments import KVCaches
from vcache_backend.transfer.committer import Committer, PendingStore
from vcache_backend.transfer.layout import Layout
from vcache_backend.transfer.stats import EngineStats
from vcache_backend.vram_pool import devices, pool
from vcache_backend.vram_pool.copier import Completion, Copier, HostCopier, Mark
from vcache_backend.vram_pool.paged import PagedKV
from vcache_backend.vram_pool.planner import CopyPlan, Piece, plan, plan_blocks
from vcache_backend.vram_pool.slots import SlotView
from vcache_backend.vram_pool.uploads import Uploader, make_uploader

if TYPE_CHECKING:
    from vcache_backend.offload.fetch import Fetch, Staged
    from vcache_backend.offload.tier import OffloadTier
    from vcache_backend.vram_pool.checksum import Check, Sealer

log = logging.getLogger(__name__)

Slots = npt.NDArray[np.int64]

CHECKSUM = "ml64x2-1"
"""What `Layout.extra["checksum"]` is where engine.checksum is on: `checksum.NAME`, without what that module imports."""
_FETCH_SECONDS = 0.05
"""How often somebody who waits for the store looks at the clock."""
_LAUNCH_WITHIN = 0.5
"""In which part of a reservation's time its copy must begin, so that it is over before that time is. A copy takes milliseconds."""
_STUCK_SECONDS = 10.0
"""How long a scatter is waited for whose slots cannot be looked at."""


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


class ChecksumError(VCacheError):
    """Chunks whose bytes changed after their commit. Counted, logged and on their way out of the pool already."""


class CheckedScatter:
    """A scatter and the look at its slots' checksums, over once both are. `tell`: is given the numbers of bad slots, once.

    A Completion. `done` and `wait` raise ChecksumError, as soon as nothing of both runs any more, if a slot is bad: that the
    bytes are in place is not to be had without that they are right.
    """

    def __init__(self, copy: Completion, look: Check, tell: Callable[[list[int]], None]) -> None:
        self._copy, self._look, self._tell = copy, look, tell
        self._lock, self._told = threading.Lock(), False

    def done(self) -> bool:
        return self._copy.done() and self._look.done() and self._right()

    def wait(self, timeout_s: float) -> bool:
        until = time.monotonic() + timeout_s
        return self._copy.wait(timeout_s) and self._look.wait(max(until - time.monotonic(), 0.0)) and self._right()

    @property
    def seconds(self) -> float | None:
        """Of the scatter."""
        return self._copy.seconds

    def _right(self) -> bool:
        bad = self._look.bad(0.0)
        if not bad:
            return True
        with self._lock:
            if not self._told:
                self._told = True
                self._tell(bad)
        raise ChecksumError(f"{len(bad)} chunks do not fit their checksums; the first is number {bad[0]} of the load")


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
        over_budget: Callable[[int, int], str | None] = lambda whole, new: None,
        anonymous: bool = False,
        rank: int = 0,
    ) -> None:
        """Connect, and lend this worker's segment, unless `over_budget` (see `Pool`) says why not. Raises ConfigError; an absent server
        is no error: everything is a miss. anonymous: another process of this instance tells the server its layout. rank: of the
        keys that are stored here."""
        if layout.chunk_size != config.engine.chunk_size:
            raise ValueError(f"layout.chunk_size is {layout.chunk_size}, engine.chunk_size is {config.engine.chunk_size}")
        if (layout.extra.get("checksum") == CHECKSUM) != config.engine.checksum:
            there = layout.extra.get("checksum")
            raise ValueError(f"engine.checksum is {config.engine.checksum}, the layout's is {there!r}; see `checked_layout`")
        self.layout, self.chunk_size = layout, layout.chunk_size
        self._config, self._whole_config = config.engine, config
        self.stats = EngineStats()
        self.device = devices.resolve(config.pool.device)
        fields = {} if anonymous else layout.fields() | {"namespace": str(layout.namespace())}
        self.client = pool.connect(config, self.device, fields)
        self.pool = pool.Pool(self.client, self.device, config.pool.segment_bytes, over_budget)
        self.copier = copier or make_copier(self.device, config)
        self._sealer = make_sealer(self.device, config) if config.engine.checksum else None
        self.committer = Committer(self.client, self.stats, config.engine.max_inflight_stores)
        self.tier = make_tier(config, self.device, self.stats)
        """The offload tier; None where there is none."""
        self._uploader: Uploader | None = None
        self._paged: PagedKV | None = None
        self._paged_for: list[object] = []

    def bind(self, kvcaches: KVCaches) -> PagedKV:
        """The geometry of these tensors, worked out once; LayoutError if it is not what the namespace stands for."""
        tensors = list(kvcaches.values()) if isinstance(kvcaches, Mapping) else kvcaches
        # All that the geometry follows from. Some 0.6 us a layer, in every call.
        mark: list[object] = [(tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype) for tensor in tensors]
        if self._paged is not None and mark == self._paged_for:
            return self._paged
        axes, whole = self._config.kv_axes or None, self._config.whole_blocks_only
        kv = PagedKV.describe(tensors, self.layout.block_size, axes=axes, whole_blocks_only=whole)
        if (kv.name, kv.layers) != (self.layout.kv_layout, self.layout.layers):
            here = f"{kv.layers} layers of {kv.name}"
            raise LayoutError(f"kvcaches are {here}, but the layout says {self.layout.layers} of {self.layout.kv_layout}")
        self.copier.prepare(kv)
        if self._sealer is not None:
            self._sealer.prepare()
        self._bind_tier(kv)
        self._paged, self._paged_for = kv, mark
        return kv

    def _bind_tier(self, kv: PagedKV) -> None:
        """Make the tier ready for these KV caches; where there is no memory for it, leave it out."""
        if self.tier is None:
            return
        try:
            self._uploader = make_uploader(self.copier, kv, kv.chunk_bytes(self.chunk_size))
            self.tier.bind(self._whole_config, self.layout, self.device, kv.chunk_bytes(self.chunk_size), self.views)
        except (VCacheError, RuntimeError) as error:
            log.error("no offload tier: %s", error)
            with suppress(VCacheError):
                self.client.report("error", f"no offload tier: {error}")
            self.tier.close()
            self.tier = self._uploader = None
            return
        self.committer.on_visible = self._visible

    def _visible(self, keys: list[ChunkKey]) -> None:
        if self.tier is not None:
            self.tier.offer(keys)

    # ---- reads

    def lookup(self, keys: list[ChunkKey], ranks: int = 1) -> int:
        """How many leading chunks are there for all `ranks` ranks (keys of rank 0), in the pool or below. No lease."""
        return self.continued(keys, ranks, self.client.lookup(keys, ranks)) if keys else 0

    def continued(self, keys: list[ChunkKey], ranks: int, found: int) -> int:
        """`lookup`, where the first `found` chunks are known to be in the pool and the next one is not."""
        return found if self.tier is None else self.tier.extend(self.client, keys, ranks, found)

    def contains(self, key: ChunkKey) -> int:
        """0: in the pool; 1: below it; -1: nowhere known. No lease."""
        answer = self.client.present([key])
        if answer.present[0]:
            return 0
        return 1 if self.tier is not None and self.tier.lookup([key], answer.epoch) else -1

    def lease(self, keys: list[ChunkKey]) -> Lease | None:
        """Lease the leading run of chunks that are there; None if there are none."""
        asked, connection = time.monotonic(), self.client.connections_lost
        with self.stats.timed("acquire"):
            leased = self.client.acquire(keys)
        if self.tier is not None:
            self.tier.note_epoch(leased.epoch)
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

    def load(
        self, kv: PagedKV, views: Sequence[SlotView], copy: CopyPlan, seconds: float, keys: Sequence[ChunkKey] | None = None
    ) -> bool:
        """`scatter` and wait: was every byte in place within `seconds`? Only then may the bytes be trusted."""
        return self.complete(self.scatter(kv, copy, views, keys), seconds)

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
        if self._sealer is None or keys is None:
            return scattered
        named = list(keys[: len(views)])
        try:
            stream = self._sealer.after(scattered, storing=False)
            look = self._sealer.verify(views, named, kv.chunk_bytes(self.chunk_size), stream)
        except BaseException as error:
            # The caller takes a VCacheError to mean that nothing writes into its blocks.
            if not scattered.wait(_STUCK_SECONDS):
                raise RuntimeError(f"a scatter goes on whose slots cannot be looked at: {error}") from error
            raise
        return CheckedScatter(scattered, look, lambda bad: self._drop_bad([named[i] for i in bad]))

    def _drop_bad(self, keys: list[ChunkKey]) -> None:
        self.committer.remove(keys)
        for key in keys:
            if self.stats.failed("checksum") == 1:
                log.error("chunk %s changed after its commit: it does not fit its checksum, and leaves the pool", key.hex())

    # ---- reads from below

    def fetch(self, keys: Sequence[ChunkKey]) -> Fetch | None:
        """Begin to read the leading run of chunks that the pool has not; None if nothing is below. To be cancelled if it is not used up."""
        if self.tier is None or not keys or not self.tier.may_have(keys[0]):
            return None
        answer = self.client.present(list(keys))
        pooled = answer.present
        return self.tier.fetch(keys[: pooled.index(True) if True in pooled else len(keys)], answer.epoch)

    def upload(self, kv: PagedKV, copy: CopyPlan, chunks: Sequence[Staged], after: Mark | None = None) -> Completion:
        """Scatter what a fetch brought, as `Copier.scatter` does; `most_staged` at once. Given back by the caller, once complete."""
        if self._uploader is None:
            raise VCacheError("the KV cache is not bound, or the offload tier was given up")
        return self._uploader.scatter(kv, copy, [chunk.chunk for chunk in chunks], after)

    @property
    def most_staged(self) -> int:
        return self._uploader.most if self._uploader is not None else 1

    def load_fetched(self, kv: PagedKV, fetch: Fetch, planned: Callable[[int, int], CopyPlan]) -> int:
        """Wait for what is fetched and put it into the KV cache: how many leading chunks are in place, complete and right.

        planned: the copy of chunks, from the first number and so many of them, out of slots 0, 1, ...
        """
        done = 0
        try:
            while not fetch.over:
                chunks = fetch.ready(self.most_staged)
                if not chunks:
                    fetch.wait(_FETCH_SECONDS)
                    continue
                started = time.perf_counter()
                copy = self.upload(kv, planned(done, len(chunks)), chunks)
                if not copy.wait(_STUCK_SECONDS):
                    # What it reads must not be written again: these buffers are lost.
                    raise RuntimeError(f"a copy of {len(chunks)} chunks from the offload tier goes on after {_STUCK_SECONDS:g} s")
                self.stats.add_time("retrieve_copy", copy.seconds or time.perf_counter() - started)
                fetch.give_back(chunks)
                done += len(chunks)
        finally:
            fetch.cancel()
        return done

    def note_fetched(self, keys: Sequence[ChunkKey], tokens: int) -> None:
        """These chunks, `tokens` of them wanted, came from below and are in the KV cache."""
        if self.tier is not None:
            self.tier.known(keys)
        each = self._paged.chunk_bytes(self.chunk_size) // self.chunk_size if self._paged is not None else 0
        self.stats.count(chunks_offload=len(keys), tokens_retrieved=tokens, bytes_offload=tokens * each)

    @property
    def promotes(self) -> bool:
        """Are chunks from below to be stored in the pool again?"""
        return self.tier is not None and self.tier.promotes

    # ---- copies

    def complete(self, scattered: Completion, seconds: float) -> bool:
        """Wait for a `scatter`: was every byte in place within `seconds`? Raises ChecksumError."""
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

    def conclude(self, lease: Lease, ours: bool = True) -> bool:
        """End a lease whose copy is over: did it hold until now? Nobody is asked before `GRACE_SECONDS` are over.

        ours: this client got it; another process's is asked about, if need be, and renewed.
        """
        granted = lease.deadline - lease.seconds
        if time.monotonic() < min(granted + GRACE_SECONDS, lease.deadline):
            self.let_go(lease)
            return True
        return self.end(lease) if ours else self.renew(lease) and self.end(lease)

    def let_go(self, lease: Lease) -> None:
        """Release in the background: nothing was read under it, or it does not matter."""
        self.committer.release(lease.id)

    # ---- stores

    def store(
        self,
        kv: PagedKV,
        keys: Sequence[ChunkKey],
        firsts: Sequence[int],
        slots: Slots,
        prefix: list[ChunkKey],
        fetched_in: int | None = None,
    ) -> int:
        """Reserve, gather in one launch, and leave the commit to the background; how many chunks are on their way.

        The tokens of chunk `keys[i]` have their places at `slots[firsts[i] : firsts[i] + chunk_size]`. `prefix`: the chunks
        before the first of `keys`. Chunks that are there already are not copied. `fetched_in`: they came from below, in that epoch:
        they are not stored if it is over, and must not make another chunk be lost.
        """
        size = self.chunk_size

        def planned(chosen: Sequence[int]) -> CopyPlan:
            return plan(kv, size, slots, [Piece(slot, firsts[i], 0, size) for slot, i in enumerate(chosen)])

        stored = self._store(kv, keys, prefix, planned, None, fetched_in)
        return stored.tokens // size if stored is not None else 0

    def store_blocks(
        self, kv: PagedKV, keys: Sequence[ChunkKey], blocks: Slots, prefix: list[ChunkKey], fetched_in: int | None = None
    ) -> PendingStore | None:
        """`store` for chunks that lie in whole blocks, while the current stream goes on: the copy reads what that stream has
        written by now. None if nothing is copied.

        blocks: (chunks, blocks a chunk) block numbers. Until the answer's `completion` nothing may write into them, see
        `Copier.fence`.
        """

        def planned(chosen: Sequence[int]) -> CopyPlan:
            return plan_blocks(kv, self.chunk_size, blocks[list(chosen)].reshape(-1))

        return self._store(kv, keys, prefix, planned, self.copier.mark(), fetched_in)

    def _store(
        self,
        kv: PagedKV,
        keys: Sequence[ChunkKey],
        prefix: list[ChunkKey],
        planned: Callable[[Sequence[int]], CopyPlan],
        after: Mark | None,
        fetched_in: int | None,
    ) -> PendingStore | None:
        """planned: the copy of some of `keys`, by their numbers, into slots 0, 1, ..."""
        if not keys:
            return None
        if not self.committer.has_room():
            self.stats.count(not_stored_backlog=len(keys))
            return None
        asked = time.monotonic()
        with self.stats.timed("reserve"):
            reserved = self.client.reserve(list(keys), self.slot_bytes(kv))
        if self.tier is not None:
            self.tier.note_epoch(reserved.epoch)
        if fetched_in not in (None, reserved.epoch):
            # A reset came in between: these are chunks of before.
            if reserved.reservation:
                self.committer.give_back(reserved.reservation)
            return None
        places = [(i, slot) for i, slot in enumerate(reserved.slots) if isinstance(slot, Location)]
        self._note_refusals(reserved.slots, reserved.reason)
        if not places:
            return None
        named = [keys[i] for i, _ in places]
        launch_by = asked + reserved.seconds * _LAUNCH_WITHIN
        return self._gather(kv, places, named, planned, reserved.reservation, launch_by, prefix, after)

    def slot_bytes(self, kv: PagedKV) -> int:
        """Bytes of a slot for one chunk. Raises LayoutError where such chunks have no checksum."""
        need = kv.chunk_bytes(self.chunk_size)
        return need if self._sealer is None else self._sealer.slot_bytes(need)

    def _gather(
        self,
        kv: PagedKV,
        places: list[tuple[int, Location]],
        keys: list[ChunkKey],
        planned: Callable[[Sequence[int]], CopyPlan],
        reservation: int,
        launch_by: float,
        prefix: list[ChunkKey],
        after: Mark | None,
    ) -> PendingStore | None:
        """Gather into the reserved slots. All of them, or the reservation is given back: a commit publishes every slot.

        launch_by: until when (time.monotonic) a copy may begin. A process that was stopped meanwhile writes nothing.
        After a RuntimeError (a launch that failed in torch), or whatever happens to the checksums of a copy that runs, nobody
        knows whether something writes: the reservation is neither committed nor given back, and its slots wait in quarantine.
        """
        count = len(places)
        try:
            views = self.pool.slots([location for _, location in places])
            with self.stats.timed("plan"):
                copy = planned([i for i, _ in places])
            if len(views) < count or not copy.complete(count).all():
                self.stats.count(not_stored_no_slot=count)
                self.committer.give_back(reservation)
                return None
            if time.monotonic() > launch_by:
                self.stats.count(not_stored_late=count)
                self.committer.give_back(reservation)
                return None
            completion = self.copier.gather(kv, copy, views, after)
        except VCacheError:
            self.committer.give_back(reservation)
            raise
        sealed = None
        if self._sealer is not None:
            stream = self._sealer.after(completion, storing=True)
            sealed = self._sealer.seal(views, keys, kv.chunk_bytes(self.chunk_size), stream)
        pending = PendingStore(
            completion=completion,
            reservation=reservation,
            prefix=prefix,
            tokens=count * self.chunk_size,
            nbytes=copy.nbytes,
            keepalive=views,
            sealed=sealed,
            keys=keys,
        )
        self.committer.submit(pending)
        return pending

    # ---- life

    def flush(self, timeout: float = 5.0, through: bool = False) -> bool:
        """Wait until the stores so far are visible or given up, and, if `through`, written below or dropped; False if they are not
        after `timeout` seconds."""
        until = time.monotonic() + timeout
        flushed = self.committer.flush(timeout)
        if not through or self.tier is None:
            return flushed
        return self.tier.flush(max(until - time.monotonic(), 0.0)) and flushed

    def close(self) -> None:
        """Finish stores, unmap, disconnect. The segments and their chunks stay in the pool. Idempotent."""
        self.committer.close()
        if self.tier is not None:
            self.tier.close()
        self.copier.close()
        # The client first: a heartbeat of its thread would map segments again.
        self.client.close()
        self.pool.close()

    # ---- counting

    def note_retrieved(self, views: Sequence[SlotView], tokens: int) -> None:
        """`tokens` of the chunks in `views` are now in the KV cache; their bytes are counted by where they came from."""
        chunk_bytes = views[0].nbytes if self._paged is None else self._paged.chunk_bytes(self.chunk_size)
        each = tokens * chunk_bytes // (self.chunk_size * len(views))
        own = sum(view.local for view in views)
        peer = len(views) - own
        self.stats.count(chunks_retrieved=len(views), tokens_retrieved=tokens, bytes_own=own * each, bytes_peer=peer * each)

    def miss(self, call: str, error: Exception) -> int:
        """Count a failure, and say each cause once. Always 0."""
        if isinstance(error, ChecksumError):
            return 0
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


def checked_layout(config: Config, layout: Layout) -> Layout:
    """The layout with what the configuration changes of it: slots with and without checksums are never shared, nor are chunks that
    came through a codec which loses something."""
    extra = {name: value for name, value in layout.extra.items() if name not in ("checksum", "offload_codec")}
    checksum = {"checksum": CHECKSUM} if config.engine.checksum else {}
    codec = {"offload_codec": config.offload.codec} if config.offload.loses else {}
    return msgspec.structs.replace(layout, extra=extra | checksum | codec)


def make_tier(config: Config, device: devices.Device, stats: EngineStats) -> OffloadTier | None:
    """The offload tier. None where it is off, or cannot be had, which is logged: the pool serves without."""
    if config.offload.policy == "off":
        return None
    # Needs libraries of its own.
    from vcache_backend.offload.tier import open_tier

    return open_tier(config.offload, stats, device.ordinal is not None)


def make_sealer(device: devices.Device, config: Config) -> Sealer:
    """The sealer of a device."""
    # Needs Triton and takes a while to import.
    from vcache_backend.vram_pool import checksum

    return checksum.make_sealer(device.ordinal, config.pool.max_ctas)


def make_copier(device: devices.Device, config: Config) -> Copier:
    """The copier of a device: torch for host memory, kernels for a GPU."""
    if device.ordinal is None:
        return HostCopier()
    # Needs Triton, which a machine without a GPU may not have.
    from vcache_backend.vram_pool.cuda_copier import CudaCopier

    return CudaCopier(device.ordinal, config.pool.max_ctas)
