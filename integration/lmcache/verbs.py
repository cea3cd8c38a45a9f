"""Replaces calls of LMCache's engine: look-up, retrieve, store, and the end of a look-up.

LMCache computes a request's keys three times, makes an object for each chunk, and searches every
tier for each chunk: 2 ms for 32k tokens before the copy begins. Here KV blocks move as opaque
bytes, in one launch each way, and a look-up's hit is kept under the request's id, with the keys and
the lease for the load. LMCache's other tiers are neither asked nor filled, since their keys do not
contain the layout of the bytes (ADR 0014)."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from lmcache.utils import CacheStoreEvent

from vcache_backend.errors import VCacheError
from vcache_backend.metadata_server.messages import ChunkKey
from vcache_backend.transfer.arguments import as_slots
from vcache_backend.transfer.lease_client import Lease

from .boundary import THEIRS, WORKER
from .doubts import NOT_RESET, RESET, WAS_RESET, Steps
from .scope import tags_of
from .worker import Hit, PoolWorker

if TYPE_CHECKING:
    from .backend import VCacheBackend

log = logging.getLogger(__name__)

MOST = 1024
"""The most hits that are kept; the oldest go first. Requests that never run leave hits behind."""


class Hits:
    """Keeps the hits of look-ups, by request id. Any thread."""

    def __init__(self, release: Callable[[Lease], None]) -> None:
        self._release = release
        self._kept: OrderedDict[str, Hit] = OrderedDict()
        self._lock = threading.Lock()

    def keep(self, request: str, hit: Hit) -> None:
        """Keep `hit` until `take`, in place of the request's earlier hit. End an empty hit."""
        with self._lock:
            ended = [self._kept.pop(request, None)]
            if hit.names:
                self._kept[request] = hit
            else:
                ended.append(hit)
            if len(self._kept) > MOST:
                ended.append(self._kept.popitem(last=False)[1])
        for dropped in ended:
            self.end(dropped)

    def take(self, request: str | None) -> Hit | None:
        """Return and forget the request's hit, or None. The caller must `end` it."""
        with self._lock:
            return self._kept.pop(request, None) if request is not None else None

    def end(self, hit: Hit | None) -> None:
        if hit is not None and hit.lease is not None:
            self._release(hit.lease)


class Verbs:
    """Our parts of an engine's methods, called through `WORKER` (see `boundary`). A VCacheError is
    a miss. `lookup` runs in any thread, `retrieve` and `store` in the worker's main thread.
    `THEIRS`: the engine's own method is to answer."""

    def __init__(self, engine: Any, backend: VCacheBackend, steps: Steps) -> None:
        self._engine, self._backend, self._steps = engine, backend, steps
        self._size: int = engine.token_database.chunk_size
        self._hits = Hits(self._release)
        self._storing = threading.Lock()

    # ---- look-ups

    def lookup(self, *_: Any, **asked: Any) -> Any:
        """Return how many leading tokens can be loaded, and keep the hit for the request, if
        LMCache's look-up server asks: with hashes, pinned, and with an id. LMCache's own method
        answers other look-ups."""
        worker, engine = self._backend.worker, self._engine
        hashes: Any = asked.get("hashes")
        request: Any = asked.get("lookup_id")
        from_server = asked.get("pin") and hashes is not None and request is not None
        if not from_server or worker is None or not engine.is_healthy():
            return THEIRS
        if RESET in (asked.get("request_configs") or {}):
            return self._reset(worker)
        stats = engine.stats_monitor.on_lookup_request(sum(asked.get("offsets") or ()))
        hit_tokens = 0
        try:
            hit = worker.promise(self._names(worker, hashes, asked.get("request_configs")))
            self._hits.keep(request, hit)
            hit_tokens = len(hit.names) * self._size
        except VCacheError as error:
            worker.session.miss("lookup", error)
        finally:
            engine.stats_monitor.on_lookup_finished(stats, hit_tokens)
        return hit_tokens

    @staticmethod
    def lookup_off(*_: Any, **asked: Any) -> Any:
        """Deny a reset, instead of `lookup`. LMCache's method finds nothing in an engine that
        failed."""
        return NOT_RESET if RESET in (asked.get("request_configs") or {}) else THEIRS

    def _reset(self, worker: PoolWorker) -> int:
        """Reset the namespace, and store nothing more of earlier planned steps."""
        try:
            with self._storing:
                self._steps.resets += 1
                worker.clear()
            return WAS_RESET
        except VCacheError as error:
            worker.session.miss("reset", error)
            return NOT_RESET

    def unpin(self, lookup_id: str) -> None:
        """End a look-up and release its chunks, retrieved or not."""
        self._hits.end(self._hits.take(lookup_id))

    def _release(self, lease: Lease) -> None:
        worker = self._backend.worker
        if worker is not None:
            worker.session.leases.release(lease)

    def _hashes(self, tokens: Any) -> list[int]:
        database = self._engine.token_database
        return [value for _, _, value in database.process_tokens(tokens, make_key=False)]

    def _names(
        self,
        worker: PoolWorker,
        hashes: Sequence[int],
        configs: dict[str, Any] | None,
    ) -> list[ChunkKey]:
        """The keys of a request's chunks. Empty if LMCache leaves out our tier, for example because
        LMCache is frozen, or our tier is bypassed."""
        tiers = self._engine.storage_manager.get_active_storage_backends(
            search_range=self._engine.retrieve_locations
        )
        ours = any(tier is self._backend for _, tier in tiers)
        return worker.names(hashes, tags_of(configs)) if ours else []

    # ---- loads

    def retrieve(self, tokens: Any, mask: Any = None, **kwargs: Any) -> Any:
        """Load a request's tokens. Returns a bool tensor: True for tokens that are or will be in
        the KV cache (see `PoolWorker.load`).

        mask: bool tensor; leading False tokens are not loaded."""
        engine, size, first = self._engine, self._size, _left_out(mask)
        worker = self._backend.worker
        self._steps.loads()
        if worker is None or first % size or not engine.is_healthy():
            return THEIRS
        started = engine.stats_monitor.on_retrieve_request(len(tokens) - first)
        loaded, request = 0, kwargs.get("req_id")
        try:
            loaded = self._load(worker, tokens, first // size, request, kwargs) * size
        except VCacheError as error:
            worker.session.miss("load", error)
        retrieved = np.zeros(len(tokens), dtype=np.bool_)
        retrieved[first : first + loaded] = True
        # LMCache's own retrievals leave inference-mode tensors in the counters.
        with torch.inference_mode():
            engine.stats_monitor.on_retrieve_finished(started, loaded)
        log.info("[req_id=%s] retrieved %d of %d tokens", request, loaded, len(tokens) - first)
        return torch.from_numpy(retrieved)

    def _load(
        self,
        worker: PoolWorker,
        tokens: Any,
        first: int,
        request: str | None,
        kwargs: dict[str, Any],
    ) -> int:
        """Load the chunks from number `first` on. Returns how many are or will be in place."""
        hit = self._hits.take(request)
        if hit is None:
            # No look-up was made, or the hit was dropped.
            hashes = self._hashes(tokens)
            hit = Hit(self._names(worker, hashes, kwargs.get("request_configs")))
        try:
            count = min(len(hit.names), len(tokens) // self._size)
            if first >= count:
                return 0
            mapping, skip = kwargs["slot_mapping"], int(kwargs.get("vllm_cached_tokens") or 0)
            return worker.load(hit, first, count, as_slots(mapping, len(mapping), 0), skip)
        finally:
            self._hits.end(hit)

    # ---- stores

    def store(self, tokens: Any = None, *, mask: Any = None, **kwargs: Any) -> Any:
        """Store a request's whole chunks, see `PoolWorker.store`. mask: as in `retrieve`."""
        engine, size, first = self._engine, self._size, _left_out(mask)
        worker = self._backend.worker
        if worker is None or tokens is None or first % size or not engine.is_healthy():
            return THEIRS
        started = engine.stats_monitor.on_store_request(len(tokens) - first)
        stored = 0
        try:
            count = len(tokens) // size
            hashes = self._hashes(tokens)[:count]
            names = self._names(worker, hashes, kwargs.get("request_configs"))
            mapping = kwargs["slot_mapping"]
            with self._storing:
                if first // size < len(names) and not self._steps.doubts(kwargs.get("req_id")):
                    slots, holds = as_slots(mapping, len(mapping), 0), self._steps.confirms()
                    worker.store(names, first // size, slots, _unless_off(holds))
                    stored = count * size - first
            if stored:
                self._announce(tokens, hashes, first // size)
        except VCacheError as error:
            worker.session.miss("store", error)
        engine.stats_monitor.on_store_finished(started, stored)
        log.info(
            "[req_id=%s] stored %d of %d tokens", kwargs.get("req_id"), stored, len(tokens) - first
        )
        return None

    def _announce(self, tokens: Any, hashes: Sequence[int], first: int) -> None:
        """Add LMCache's KV events of stored chunks, if LMCache publishes events."""
        if not self._engine.kv_events_enabled:
            return
        for chunk in range(first, len(hashes)):
            start = chunk * self._size
            self._engine.kv_events.append(
                CacheStoreEvent(
                    block_hashes=[hashes[chunk]],
                    parent_block_hash=hashes[chunk - 1] if chunk else None,
                    token_ids=torch.as_tensor(tokens[start : start + self._size]).tolist(),
                    block_size=self._size,
                    lora_id=None,
                    medium="cpu",
                    lora_name=None,
                )
            )


def _unless_off(holds: Callable[[], bool | None] | None) -> Callable[[], bool | None]:
    """Make `PendingStore.holds`: a store under way is not committed once this half shares
    nothing."""
    return lambda: False if WORKER.off else (True if holds is None else holds())


def _left_out(mask: Any) -> int:
    """How many leading tokens LMCache does not want: False in the mask; most often none."""
    # numpy, since torch's first operation after a pause takes up to 0.2 ms.
    wanted = None if mask is None else mask.numpy()
    if wanted is None or wanted[:1].all():
        return 0
    return int(wanted.size - np.count_nonzero(wanted))
