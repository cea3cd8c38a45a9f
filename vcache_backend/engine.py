"""The engine: token sequences and paged KV caches on one side, the pool on the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from vcache_backend.config import Config
from vcache_backend.errors import VCacheError
from vcache_backend.metadata_server.messages import ChunkKey
from vcache_backend.transfer.arguments import (
    KVCaches,
    SlotMapping,
    as_key,
    as_kvcaches,
    as_salt,
    as_seconds,
    as_slots,
    first_wanted,
    refuse_shared,
)
from vcache_backend.transfer.chunk_io import ChunkIO, Lease, checked_layout
from vcache_backend.transfer.keys import TokenHasher, as_tokens
from vcache_backend.transfer.layout import Layout
from vcache_backend.vram_pool.copier import Copier
from vcache_backend.vram_pool.planner import CopyPlan, plan_chunks

if TYPE_CHECKING:
    from vcache_backend.offload.fetch import Fetch

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
        layout = checked_layout(config, layout)
        self._io = ChunkIO(config, layout, copier, rank=rank)
        self._layout, self._ranks = layout, ranks
        self._namespace = layout.namespace()
        self._hasher = TokenHasher(self._namespace, layout.chunk_size, rank)
        self._first_rank = TokenHasher(self._namespace, layout.chunk_size, 0)
        self._stats, self._client = self._io.stats, self._io.client
        self.device = self._io.device

    def __enter__(self) -> VCacheEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- the five calls

    def lookup(self, tokens: Tokens, *, salt: bytes | None = None) -> int:
        """How many leading tokens can be retrieved now, by every rank, from the pool or the offload tier it. A multiple of the chunk
        size. Takes no lease."""
        with self._stats.timed("lookup"):
            ids = as_tokens(tokens)
            keys = self._first_rank.keys(ids, as_salt(salt))
            try:
                found = self._io.lookup(keys, self._ranks)
            except Exception as error:  # noqa: BLE001 - the door
                return self._io.miss("lookup", error)
        self._stats.count(tokens_asked=len(ids), tokens_hit=found * self._layout.chunk_size)
        return found * self._layout.chunk_size

    def store(
        self,
        tokens: Tokens,
        mask: torch.Tensor | None,
        kvcaches: KVCaches,
        slot_mapping: SlotMapping,
        offset: int = 0,
        *,
        salt: bytes | None = None,
    ) -> None:
        """Put the KV of whole chunks of `tokens` into the pool.

        mask: boolean, one a token, False on a prefix that is in the pool already; None: nothing is. kvcaches: one
        tensor a layer, as vLLM has them. slot_mapping: `slot_mapping[i]` is the slot (block · block_size + place in the
        block) of token `offset + i`, -1 where it has none, each slot once; int64, CPU preferred. A chunk is stored if all its tokens have a
        slot. Returns when the copy is launched; on a GPU the current stream waits for it, so that blocks freed after this
        call are not overwritten too early. The chunks become visible in the background.
        """
        with self._stats.timed("store"):
            ids, tensors = as_tokens(tokens), as_kvcaches(kvcaches)
            first, size = first_wanted(mask, len(ids)) // self._layout.chunk_size, self._layout.chunk_size
            slots = as_slots(slot_mapping, len(ids), offset)
            keys = self._hasher.keys(ids, as_salt(salt))
            refuse_shared(slots, first * size, len(keys) * size)
            try:
                self._store(keys, first, tensors, slots)
            except Exception as error:  # noqa: BLE001 - the door; a kernel's compiler raises what it likes
                self._io.miss("store", error)

    def retrieve(
        self,
        tokens: Tokens,
        mask: torch.Tensor | None,
        kvcaches: KVCaches,
        slot_mapping: SlotMapping,
        *,
        salt: bytes | None = None,
    ) -> torch.Tensor:
        """Fill `kvcaches` with the KV of the leading tokens that the pool has.

        mask: False on a prefix the caller has already (never written). slot_mapping: a slot of its own for each token, -1: not wanted.
        Returns a boolean CPU tensor, one a token: True where the KV is now in `kvcaches`, complete and valid. The lease held
        from before the copy until after it; if it did not, no token counts. On a GPU the current stream is ordered behind
        the copy, too.
        """
        with self._stats.timed("retrieve"):
            ids, tensors = as_tokens(tokens), as_kvcaches(kvcaches)
            size = len(ids)
            first = first_wanted(mask, size)
            slots = as_slots(slot_mapping, size, 0)
            keys = self._hasher.keys(ids, as_salt(salt))
            refuse_shared(slots, first, len(keys) * self._layout.chunk_size)
            try:
                got = self._retrieve(keys, first, tensors, slots)
            except Exception as error:  # noqa: BLE001 - the door
                self._io.miss("retrieve", error)
                got = None
        return torch.zeros(size, dtype=torch.bool) if got is None else torch.from_numpy(got)

    def contains(self, cache_key: bytes) -> int:
        """0: the chunk of this key is in VRAM; 1: in the storage tier below; -1: nowhere known. Takes no lease."""
        key = as_key(cache_key)
        try:
            return self._io.contains(key)
        except Exception as error:  # noqa: BLE001 - the door
            self._io.miss("contains", error)
            return -1

    def get_stats(self) -> dict[str, Any]:
        """Counters and latencies of this engine (see `EngineStats.snapshot`) and, under `server`, the pool's as the server
        counts them: occupancy by segment, evictions; None while there is no server."""
        mine: dict[str, Any] = self._stats.snapshot()
        mine["connected"] = self._client.connected
        mine["connections_lost"] = self._client.connections_lost
        mine["namespace"] = str(self._namespace)
        mine["device"] = self.device.name
        mine["offload"] = None if self._io.tier is None else self._io.tier.snapshot()
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
        self._io.bind(as_kvcaches(kvcaches))

    def keys(self, tokens: Tokens, *, salt: bytes | None = None) -> list[ChunkKey]:
        """The keys of the whole chunks of `tokens`, as `contains` takes them."""
        return self._hasher.keys(tokens, as_salt(salt))

    def flush(self, timeout: float = 5.0, through: bool = False) -> bool:
        """Wait until the stores so far are visible or given up, and, if `through`, written to the offload tier or dropped; False if they
        are not after `timeout` seconds."""
        return self._io.flush(as_seconds(timeout), through)

    def close(self) -> None:
        """Finish stores, unmap, disconnect. The segments and their chunks stay in the pool. Idempotent."""
        self._io.close()

    # ---- inside

    def _store(
        self, keys: list[ChunkKey], start: int, kvcaches: KVCaches, slots: npt.NDArray[np.int64], fetched_in: int | None = None
    ) -> None:
        size = self._layout.chunk_size
        lowest = slots[: len(keys) * size].reshape(-1, size).min(axis=1)
        chunks = [chunk for chunk in range(start, len(keys)) if lowest[chunk] >= 0]
        if chunks:
            wanted, firsts = [keys[chunk] for chunk in chunks], [chunk * size for chunk in chunks]
            self._io.store(self._io.bind(kvcaches), wanted, firsts, slots, keys[: chunks[0]], fetched_in)

    def _retrieve(
        self, keys: list[ChunkKey], first: int, kvcaches: KVCaches, slots: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.bool_] | None:
        """Run by run: what the pool has, under a lease, then what is only below, and so on up to the first chunk that is nowhere."""
        size = self._layout.chunk_size
        start = at = first // size
        covered: npt.NDArray[np.bool_] | None = None
        while at < len(keys):
            lease = self._io.lease(keys[at:])
            pooled = len(lease.keys) if lease is not None else 0
            fetch, loaded, got = None, 0, None
            try:
                # On its way while the pool's are copied.
                fetch = self._io.fetch(keys[at + pooled :])
            except (VCacheError, RuntimeError) as error:
                # What is leased can be had all the same, and its lease is ended behind it.
                self._io.miss("fetch", error)
            try:
                if lease is not None:
                    loaded, got = self._load(lease, at, first, kvcaches, slots)
                    covered = _either(covered, got)
                if fetch is not None and loaded == pooled:
                    fetched, got = self._fetched(fetch, keys, at + pooled, first, kvcaches, slots)
                    covered, loaded = _either(covered, got), loaded + fetched
            finally:
                if fetch is not None:
                    fetch.cancel()
            at += loaded
            if fetch is None or loaded <= pooled:
                break
        self._stats.count(chunks_missed=len(keys) - at)
        if start:
            self._io.committer.touch(keys[:start])
        return covered

    def _fetched(
        self, fetch: Fetch, keys: list[ChunkKey], at: int, first: int, kvcaches: KVCaches, slots: npt.NDArray[np.int64]
    ) -> tuple[int, npt.NDArray[np.bool_] | None]:
        """What comes from below, from chunk `at` on: how many chunks, and which tokens."""
        size, kv = self._layout.chunk_size, self._io.bind(kvcaches)

        def planned(done: int, count: int) -> CopyPlan:
            begin = (at + done) * size
            return plan_chunks(kv, size, slots, begin, count, min(max(first - begin, 0), count * size))

        count = self._io.load_fetched(kv, fetch, planned)
        if not count:
            return 0, None
        covered = planned(0, count).covered(len(slots))
        self._io.note_fetched(keys[at : at + count], int(covered.sum()))
        if self._io.promotes:
            self._store(keys[: at + count], at, kvcaches, slots, fetched_in=fetch.epoch)
        return count, covered

    def _load(
        self, lease: Lease, at: int, first: int, kvcaches: KVCaches, slots: npt.NDArray[np.int64]
    ) -> tuple[int, npt.NDArray[np.bool_] | None]:
        """Copy what is leased, from chunk `at` on, and end the lease: how many chunks and which tokens that gave, none if it did not
        hold."""
        size = self._layout.chunk_size
        begin = at * size
        covered, complete, views = None, True, []
        try:
            kv = self._io.bind(kvcaches)
            views = self._io.views(lease.locations)
            if views:
                with self._stats.timed("plan"):
                    copy = plan_chunks(kv, size, slots, begin, len(views), max(first - begin, 0))
                complete = self._io.load(kv, views, copy, lease.seconds_left, lease.keys)
                covered = copy.covered(len(slots))
        finally:
            held = self._io.end(lease)
        if not (complete and held):
            self._stats.failed("lease_lost")
            return 0, None
        if covered is not None:
            self._io.note_retrieved(views, int(covered.sum()))
        return len(views), covered


def _either(one: npt.NDArray[np.bool_] | None, other: npt.NDArray[np.bool_] | None) -> npt.NDArray[np.bool_] | None:
    """Tokens that are in one of them."""
    if one is None or other is None:
        return other if one is None else one
    return one | other
