"""The engine: token sequences and paged KV caches on one side, the pool on the other."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from vcache_backend.arguments import SlotMapping, as_slots, first_wanted
from vcache_backend.chunk import Layout
from vcache_backend.committer import Committer, PendingStore
from vcache_backend.config import Config
from vcache_backend.errors import LayoutError, ServerUnavailable, VCacheError
from vcache_backend.hashing import TokenHasher
from vcache_backend.metadata_server.messages import ChunkKey, Leased, Location, Refusal
from vcache_backend.stats import EngineStats
from vcache_backend.vram_pool import devices, pool
from vcache_backend.vram_pool.copier import Copier, CudaCopier, HostCopier
from vcache_backend.vram_pool.paged import PagedKV
from vcache_backend.vram_pool.planner import Piece, plan, plan_chunks
from vcache_backend.vram_pool.slots import SlotView

log = logging.getLogger(__name__)

KVCaches = Sequence[torch.Tensor] | Mapping[str, torch.Tensor]
Tokens = Sequence[int] | torch.Tensor | npt.NDArray[np.int64]


class VCacheEngine:
    """Store, look up and retrieve the KV of token prefixes, in chunks of `config.engine.chunk_size` tokens.

    One engine serves one rank of one model instance. `lookup` and `contains` may run in any thread beside `store` and
    `retrieve`, which belong to the worker's thread that launches kernels. A failure is a miss: the methods raise
    ValueError for arguments that cannot be meant (their message says which), and nothing for servers, segments or GPUs that
    fail. What happened is in `get_stats()` and, once for each cause, in the log.
    """

    def __init__(self, config: Config, layout: Layout, *, rank: int = 0, ranks: int = 1, copier: Copier | None = None) -> None:
        """`rank` of `ranks` that hold a shard of each chunk (1 where all ranks hold the same, as with MLA).

        `copier`: how bytes move; by default the one of the configured device. Raises ConfigError for an impossible
        configuration; an absent metadata server is no error: everything is a miss until it is there.
        """
        if layout.chunk_size != config.engine.chunk_size:
            raise ValueError(f"layout.chunk_size is {layout.chunk_size}, engine.chunk_size is {config.engine.chunk_size}")
        self._layout, self._ranks, self._config = layout, ranks, config.engine
        self._namespace = layout.namespace()
        self._hasher = TokenHasher(self._namespace, layout.chunk_size, rank)
        self._first_rank = TokenHasher(self._namespace, layout.chunk_size, 0)
        self._stats = EngineStats()
        self.device = devices.resolve(config.pool.device)
        fields = layout.fields() | {"namespace": str(self._namespace)}
        self._client = pool.connect(config, self.device, fields)
        self._pool = pool.Pool(self._client, self.device, config.pool.segment_bytes)
        self._copier = copier or _copier(self.device, config)
        self._committer = Committer(self._client, self._stats, config.engine.max_inflight_stores)
        self._paged: PagedKV | None = None
        self._paged_for: tuple[int, ...] = ()

    def __enter__(self) -> VCacheEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- the five calls

    def lookup(self, tokens: Tokens, *, salt: bytes = b"") -> int:
        """How many leading tokens can be retrieved now, by every rank. A multiple of the chunk size. Takes no lease."""
        with self._stats.timed("lookup"):
            keys = self._first_rank.keys(tokens, salt)
            try:
                found = self._client.lookup(keys, self._ranks) if keys else 0
            except VCacheError as error:
                return self._miss("lookup", error)
        self._stats.count(tokens_asked=len(tokens), tokens_hit=found * self._layout.chunk_size)
        return found * self._layout.chunk_size

    def store(
        self,
        tokens: Tokens,
        mask: torch.Tensor | None,
        kvcaches: KVCaches,
        slot_mapping: SlotMapping,
        offset: int = 0,
        *,
        salt: bytes = b"",
    ) -> None:
        """Put the KV of whole chunks of `tokens` into the pool.

        mask: boolean, one a token, False on a prefix that is in the pool already; None: nothing is. kvcaches: one
        tensor a layer, as vLLM has them. slot_mapping: `slot_mapping[i]` is the slot (block · block_size + place in the
        block) of token `offset + i`, -1 where it has none; int64, CPU preferred. A chunk is stored if all its tokens have a
        slot. Returns when the copy is launched; on a GPU the current stream waits for it, so that blocks freed after this
        call are not overwritten too early. The chunks become visible in the background.
        """
        with self._stats.timed("store"):
            first = first_wanted(mask, len(tokens))
            slots = as_slots(slot_mapping, len(tokens), offset)
            keys = self._hasher.keys(tokens, salt)
            try:
                self._store(keys, first // self._layout.chunk_size, kvcaches, slots)
            except (VCacheError, RuntimeError) as error:
                self._miss("store", error)

    def retrieve(
        self,
        tokens: Tokens,
        mask: torch.Tensor | None,
        kvcaches: KVCaches,
        slot_mapping: SlotMapping,
        *,
        salt: bytes = b"",
    ) -> torch.Tensor:
        """Fill `kvcaches` with the KV of the leading tokens that the pool has.

        mask: False on a prefix the caller has already (never written). slot_mapping: one slot a token, -1: not wanted.
        Returns a boolean CPU tensor, one a token: True where the KV is now in `kvcaches`, complete and valid. The lease held
        from before the copy until after it; if it did not, no token counts. On a GPU the current stream is ordered behind
        the copy, too.
        """
        with self._stats.timed("retrieve"):
            size = len(tokens)
            first = first_wanted(mask, size)
            slots = as_slots(slot_mapping, size, 0)
            keys = self._hasher.keys(tokens, salt)
            try:
                got = self._retrieve(keys, first, kvcaches, slots)
            except (VCacheError, RuntimeError) as error:
                self._miss("retrieve", error)
                got = None
        return torch.zeros(size, dtype=torch.bool) if got is None else torch.from_numpy(got)

    def contains(self, cache_key: bytes) -> int:
        """0: the chunk of this key is in VRAM; 1: in the storage tier below; -1: nowhere known. Takes no lease."""
        try:
            return 0 if self._client.contains([ChunkKey(cache_key)])[0] else -1
        except VCacheError as error:
            self._miss("contains", error)
            return -1

    def get_stats(self) -> dict[str, Any]:
        """Counters and latencies of this engine (see `EngineStats.snapshot`) and, under `server`, the pool's as the server
        counts them: occupancy by segment, evictions; None while there is no server."""
        mine: dict[str, Any] = self._stats.snapshot()
        mine["connected"] = self._client.connected
        mine["connections_lost"] = self._client.connections_lost
        mine["namespace"] = str(self._namespace)
        mine["device"] = self.device.name
        try:
            server = self._client.stats()
        except VCacheError:
            return mine | {"server": None}
        fields = ("device", "nbytes", "used", "chunks", "state")
        segments = {info.id: {name: getattr(info, name) for name in fields} for info in server.segments}
        evictions = server.counters.get("evicted", 0)
        return mine | {"server": {"segments": segments, "evictions": evictions, "chunks": server.chunks}}

    # ---- life

    def register(self, kvcaches: KVCaches) -> None:
        """Check the KV caches and compile the kernels for them, so that no request waits for it. Optional, once, in the
        worker's thread. Raises LayoutError if they are not what the layout says: nothing would ever be stored or retrieved."""
        self._describe(kvcaches)

    def keys(self, tokens: Tokens, *, salt: bytes = b"") -> list[ChunkKey]:
        """The keys of the whole chunks of `tokens`, as `contains` takes them."""
        return self._hasher.keys(tokens, salt)

    def flush(self, timeout: float = 5.0) -> bool:
        """Wait until the stores so far are visible or given up; False if they are not after `timeout` seconds."""
        return self._committer.flush(timeout)

    def close(self) -> None:
        """Finish stores, unmap, disconnect. The segments and their chunks stay in the pool. Idempotent."""
        self._committer.close()
        self._copier.close()
        # The client first: a heartbeat of its thread would map segments again.
        self._client.close()
        self._pool.close()

    # ---- inside

    def _store(self, keys: list[ChunkKey], start: int, kvcaches: KVCaches, slots: npt.NDArray[np.int64]) -> None:
        size = self._layout.chunk_size
        lowest = slots[: len(keys) * size].reshape(-1, size).min(axis=1)
        chunks = [chunk for chunk in range(start, len(keys)) if lowest[chunk] >= 0]
        if not chunks:
            return
        if not self._committer.has_room():
            self._stats.count(not_stored_backlog=len(chunks))
            return
        kv = self._describe(kvcaches)
        with self._stats.timed("reserve"):
            reserved = self._client.reserve([keys[chunk] for chunk in chunks], kv.chunk_bytes(size))
        places = [(chunk, slot) for chunk, slot in zip(chunks, reserved.slots, strict=True) if isinstance(slot, Location)]
        self._note_refusals(reserved.slots, reserved.reason)
        if places:
            self._launch_store(kv, slots, places, keys, reserved.reservation)

    def _launch_store(
        self,
        kv: PagedKV,
        slots: npt.NDArray[np.int64],
        places: list[tuple[int, Location]],
        keys: list[ChunkKey],
        reservation: int,
    ) -> None:
        """Gather into the reserved slots. All of them, or the reservation is given back: a commit publishes every slot.

        After a RuntimeError (a launch that failed in torch) nobody knows whether something writes: the reservation is
        neither committed nor given back, and its slots wait in quarantine.
        """
        size = self._layout.chunk_size
        try:
            views = self._pool.slots([location for _, location in places])
            with self._stats.timed("plan"):
                pieces = [Piece(slot, chunk * size, 0, size) for slot, (chunk, _) in enumerate(places)]
                copy = plan(kv, size, slots, pieces)
            if len(views) < len(places) or not copy.complete(len(places)).all():
                self._stats.count(not_stored_no_slot=len(places))
                self._committer.give_back(reservation)
                return
            completion = self._copier.gather(kv, copy, views)
        except VCacheError:
            self._committer.give_back(reservation)
            raise
        self._committer.submit(
            PendingStore(
                completion=completion,
                reservation=reservation,
                prefix=keys[: places[0][0]],
                tokens=len(places) * size,
                nbytes=copy.nbytes,
                keepalive=views,
            )
        )

    def _retrieve(
        self, keys: list[ChunkKey], first: int, kvcaches: KVCaches, slots: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.bool_] | None:
        start = first // self._layout.chunk_size
        if start >= len(keys):
            return None
        kv = self._describe(kvcaches)
        asked = time.monotonic()
        with self._stats.timed("acquire"):
            leased = self._client.acquire(keys[start:])
        covered, complete = None, True
        try:
            views = self._pool.slots(leased.locations)
            self._stats.count(chunks_missed=len(keys) - start - len(views))
            if views:
                covered, complete = self._scatter(kv, views, first, slots, asked + leased.seconds)
        finally:
            held = self._release(leased) if leased.lease else True
        if start:
            self._committer.touch(keys[:start])
        if not (complete and held):
            self._stats.failed("lease_lost")
            return None
        if covered is not None:
            self._note_retrieved(views, int(covered.sum()))
        return covered

    def _scatter(
        self, kv: PagedKV, views: list[SlotView], first: int, slots: npt.NDArray[np.int64], deadline: float
    ) -> tuple[npt.NDArray[np.bool_], bool]:
        """Copy and wait: which tokens it moves, none before `first`, and whether it was complete by `deadline`."""
        started = time.perf_counter()
        size = self._layout.chunk_size
        begin = first // size * size
        with self._stats.timed("plan"):
            copy = plan_chunks(kv, size, slots, begin, len(views), first - begin)
        completion = self._copier.scatter(kv, copy, views)
        covered = copy.covered(len(slots))
        complete = completion.wait(max(deadline - time.monotonic(), 0.0))
        self._stats.add_time("retrieve_copy", completion.seconds or time.perf_counter() - started)
        return covered, complete

    def _release(self, leased: Leased) -> bool:
        """Did the lease hold? No answer is no."""
        try:
            with self._stats.timed("release"):
                return self._client.release(leased.lease)
        except VCacheError as error:
            self._miss("release", error)
            return False

    def _describe(self, kvcaches: KVCaches) -> PagedKV:
        """The geometry of these tensors, worked out once; LayoutError if it is not what the namespace stands for."""
        tensors = list(kvcaches.values()) if isinstance(kvcaches, Mapping) else kvcaches
        mark = (len(tensors), *(tensor.data_ptr() for tensor in (tensors[0], tensors[-1]))) if tensors else ()
        if self._paged is not None and mark == self._paged_for:
            return self._paged
        kv = PagedKV.describe(
            tensors,
            self._layout.block_size,
            axes=self._config.kv_axes or None,
            whole_blocks_only=self._config.whole_blocks_only,
        )
        if (kv.name, kv.layers) != (self._layout.kv_layout, self._layout.layers):
            here = f"{kv.layers} layers of {kv.name}"
            raise LayoutError(f"kvcaches are {here}, but the layout says {self._layout.layers} of {self._layout.kv_layout}")
        self._copier.prepare(kv)
        self._paged, self._paged_for = kv, mark
        return kv

    def _note_retrieved(self, views: list[SlotView], tokens: int) -> None:
        """`tokens` of the chunks in `views` are now in the KV cache; their bytes are counted by where they came from."""
        each = tokens * views[0].nbytes // (self._layout.chunk_size * len(views))
        own = sum(view.local for view in views)
        peer = len(views) - own
        self._stats.count(chunks_retrieved=len(views), tokens_retrieved=tokens, bytes_own=own * each, bytes_peer=peer * each)

    def _note_refusals(self, slots: Sequence[Location | int], reason: str) -> None:
        names = {Refusal.EXISTS: "exists", Refusal.BUSY: "busy", Refusal.FULL: "full"}
        for slot in slots:
            if not isinstance(slot, Location):
                self._stats.count(**{f"not_stored_{names.get(Refusal(slot), 'no_slot')}": 1})
        if reason and self._stats.failed(f"not_stored: {reason}") == 1:
            log.warning("chunks are not stored: %s", reason)

    def _miss(self, call: str, error: Exception) -> int:
        """Count a failure, and say each cause once."""
        cause = f"{call}: {type(error).__name__}"
        if self._stats.failed(cause) == 1 and not isinstance(error, ServerUnavailable):
            log.warning("%s failed, which counts as a miss: %s", call, error)
        return 0


def _copier(device: devices.Device, config: Config) -> Copier:
    return HostCopier() if device.ordinal is None else CudaCopier(device.ordinal, config.pool.max_ctas)
