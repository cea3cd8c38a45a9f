"""`VCacheEngine`: stores, looks up and retrieves token sequences' KV in the pool."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from vcache_backend.config import Config
from vcache_backend.errors import LayoutError, VCacheError
from vcache_backend.protocol.messages import KEY_BYTES, ChunkKey
from vcache_backend.transfer.keys import TokenHasher, as_tokens
from vcache_backend.transfer.layout import Layout
from vcache_backend.transfer.load import COPY_SECONDS, Load
from vcache_backend.transfer.places import SlotMapping, SlotPlaces, as_slots, first_wanted
from vcache_backend.transfer.session import KVCaches, Session
from vcache_backend.transfer.store import store
from vcache_backend.vram_pool.copies.copier import Copier

Tokens = Sequence[int] | torch.Tensor | npt.NDArray[np.integer[Any]]


class VCacheEngine:
    """Store, look up and retrieve the KV of token prefixes, in chunks of `config.engine.chunk_size`
    tokens.

    An engine serves a rank of a model instance. `store` and `retrieve` run in the worker's thread
    that launches kernels; `lookup` and `contains` in any thread, at any time. A failure is a miss:
    the five calls raise ValueError for wrong arguments, which the message names, and nothing if a
    server, segment or GPU fails. `get_stats()` counts failures, and the log names each cause
    once."""

    def __init__(
        self,
        config: Config,
        layout: Layout,
        *,
        rank: int = 0,
        ranks: int = 1,
        copier: Copier | None = None,
        kv_device: str = "",
    ) -> None:
        """Connect to the server, and lend this worker's segment to the pool.

        rank: this worker's number among the `ranks` workers that each hold a part of every chunk
        (`ranks` is 1 if all hold the same, as with MLA). copier: moves bytes; by default the
        configured device's. kv_device: the device of the KV caches, such as `cuda:0`; needed if the
        pool is in host memory and they are not.

        Raises ConfigError for an impossible configuration, and ValueError if `layout` has another
        chunk size. An absent server is no error: until it answers, everything is a miss."""
        self._session = session = Session(
            config, layout, rank=rank, copier=copier, kv_device=kv_device
        )
        self._layout, self._ranks, self._stats = session.layout, ranks, session.stats
        self._hasher = TokenHasher(session.namespace, layout.chunk_size, rank)
        self._patience = COPY_SECONDS + config.offload.get_seconds
        self.device = session.device

    def __enter__(self) -> VCacheEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- the five calls

    def lookup(self, tokens: Tokens, *, salt: bytes | None = None) -> int:
        """How many leading tokens every rank can retrieve now, from the pool or the offload tier: a
        multiple of the chunk size."""
        with self._stats.timed("lookup"):
            ids = as_tokens(tokens)
            keys = self._hasher.keys(ids, _as_salt(salt))
            try:
                chunks = self._session.lookup(keys, self._ranks)
            except Exception as error:  # noqa: BLE001 - nothing is raised into the caller
                return self._session.miss("lookup", error)
        hit = chunks * self._layout.chunk_size
        self._stats.count(tokens_asked=len(ids), tokens_hit=hit)
        self._session.client.count(asked=len(keys) * self._layout.chunk_size, found=hit)
        return hit

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

        mask: a boolean for each token: False on a prefix that the pool has already, then True.
        None: True everywhere. kvcaches: vLLM's tensors, one for each layer. slot_mapping:
        `slot_mapping[i]` is the slot of token `offset + i`: block · block_size + place in the
        block, -1 for none, no slot twice. int64, preferably on the CPU.

        A chunk is stored if its tokens lie in whole blocks, in order. Returns when the copy is
        launched; on a GPU the current stream waits for the copy, so work queued after this call may
        overwrite the blocks. The chunks become visible in the background."""
        with self._stats.timed("store"):
            ids, size = as_tokens(tokens), self._layout.chunk_size
            first = first_wanted(mask, len(ids)) // size
            slots = as_slots(slot_mapping, len(ids), offset)
            keys = self._hasher.keys(ids, _as_salt(salt))
            places = self._placed("store", kvcaches, slots, first * size, len(keys))
            if places is None:
                return
            prefix, keys = keys[:first], keys[first:]
            try:
                chunks = [chunk for chunk in range(len(keys)) if places.holds(chunk)]
                store(self._session, places, keys, chunks, prefix)
            except Exception as error:  # noqa: BLE001 - a kernel's compiler raises what it likes
                self._session.miss("store", error)

    def retrieve(
        self,
        tokens: Tokens,
        mask: torch.Tensor | None,
        kvcaches: KVCaches,
        slot_mapping: SlotMapping,
        *,
        salt: bytes | None = None,
    ) -> torch.Tensor:
        """Fill `kvcaches` with the KV of the leading tokens that the pool or the offload tier has,
        and wait for the KV.

        mask: as in `store`; False on a prefix that the caller has already, which is not written.
        slot_mapping: the slot of each token, -1 for unwanted tokens. A block is filled only if all
        its tokens are wanted and lie in the block, in order.

        Returns a CPU tensor with a boolean for each token: True if the KV is now in `kvcaches`,
        complete and valid. KV from the pool counts only if its slots were not used again before the
        copy was over.
        On a GPU the current stream waits for the copy."""
        with self._stats.timed("retrieve"):
            ids, size = as_tokens(tokens), self._layout.chunk_size
            first = first_wanted(mask, len(ids))
            start, keys = first // size, self._hasher.keys(ids, _as_salt(salt))
            slots = as_slots(slot_mapping, len(ids), 0)
            places = self._placed("retrieve", kvcaches, slots, first, len(keys))
            if places is None:
                return torch.zeros(len(ids), dtype=torch.bool)
            load = Load(self._session, places, keys[start:])
            return torch.from_numpy(places.loaded(load.finish(self._patience, keys[:start])))

    def contains(self, cache_key: bytes) -> int:
        """0: the chunk of this key is in the pool; 1: in the offload tier; -1: in neither, as far
        as known."""
        key = _as_key(cache_key)
        try:
            return self._session.contains(key)
        except Exception as error:  # noqa: BLE001 - nothing is raised into the caller
            self._session.miss("contains", error)
            return -1

    def get_stats(self) -> dict[str, Any]:
        """Counters and latencies of this engine (see `EngineStats.snapshot`). Under `server`: the
        pool's segments with their occupancy, chunks and evictions; None without a server."""
        mine: dict[str, Any] = self._stats.snapshot()
        client = self._session.client
        mine["connected"] = client.connected
        mine["connections_lost"] = client.connections_lost
        mine["namespace"] = str(self._session.namespace)
        mine["device"] = self.device.name
        tier = self._session.tier
        mine["offload"] = None if tier is None else tier.snapshot()
        try:
            server = client.stats()
        except VCacheError:
            return mine | {"server": None}
        segments = {info.id: msgspec.structs.asdict(info) for info in server.segments}
        evictions = server.counters.get("evicted", 0)
        return mine | {
            "server": {"segments": segments, "evictions": evictions, "chunks": server.chunks}
        }

    # ---- life

    def register(self, kvcaches: KVCaches) -> None:
        """Check the KV caches and compile their kernels before the first request. Optional; in the
        worker's thread.

        Raises ValueError for other objects than tensors, and LayoutError for KV caches that do not
        match the layout: nothing would ever be stored or retrieved."""
        self._session.bind(kvcaches)

    def keys(self, tokens: Tokens, *, salt: bytes | None = None) -> list[ChunkKey]:
        """The keys of the whole chunks of `tokens`, as `contains` takes them."""
        return self._hasher.keys(tokens, _as_salt(salt))

    def flush(self, timeout: float = 5.0, through: bool = False) -> bool:
        """Wait until the stores so far are visible or given up; False after `timeout` seconds.
        through: also wait until the chunks are offloaded or dropped."""
        return self._session.flush(_as_seconds(timeout), through)

    def close(self) -> None:
        """Finish stores, unmap, disconnect. Segments and chunks stay in the pool. Idempotent."""
        self._session.close()

    # ---- inside

    def _placed(
        self, call: str, kvcaches: KVCaches, slots: npt.NDArray[np.int64], first: int, stop: int
    ) -> SlotPlaces | None:
        """The places of the chunks from token `first` to chunk `stop`. ValueError if the KV caches
        are not tensors or do not match the layout, or if two tokens have one slot. None, counted as
        a miss, if the KV caches cannot be bound for another reason, or lack a slot."""
        try:
            kv = self._session.bind(kvcaches)
        except LayoutError as error:
            raise ValueError(str(error)) from error
        except ValueError:
            raise
        except Exception as error:  # noqa: BLE001 - nothing is raised into the caller
            self._session.miss(call, error)
            return None
        try:
            return SlotPlaces.of_chunks(kv, self._layout.chunk_size, slots, first, stop)
        except LayoutError as error:
            self._session.miss(call, error)
            return None


def _as_salt(salt: object) -> bytes:
    """Convert the salt to bytes; empty for None: no salt, as in vLLM and LMCache. ValueError."""
    if salt is None:
        return b""
    if not isinstance(salt, bytes | bytearray | memoryview):
        raise ValueError(f"salt is a {type(salt).__name__}; expected bytes, or None for none")
    return bytes(salt)


def _as_key(cache_key: object) -> ChunkKey:
    if isinstance(cache_key, bytes) and len(cache_key) == KEY_BYTES:
        return ChunkKey(cache_key)
    raise ValueError(
        f"cache_key is {cache_key!r:.80}; expected {KEY_BYTES} bytes, one of `keys(tokens)`"
    )


def _as_seconds(timeout: object) -> float:
    """Convert a timeout to seconds, limited to the longest wait of a lock. ValueError for NaN and
    for values that are no number."""
    if not isinstance(timeout, int | float) or timeout != timeout:
        raise ValueError(f"timeout is {timeout!r}; expected seconds")
    return min(max(timeout, 0.0), threading.TIMEOUT_MAX / 2)
