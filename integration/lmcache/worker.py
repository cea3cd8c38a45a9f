"""Looks up, loads and stores a worker's chunks, in place of LMCache's engine.

LMCache computes a request's keys three times, makes an object for each chunk, and searches every
tier for each chunk: 2 ms for 32k tokens before the copy begins. Here KV blocks move as opaque
bytes, in one launch each way, and the keys that a look-up has found are kept under the request's
id. LMCache's other tiers are neither asked nor filled, since their keys do not
contain the layout of the bytes (ADR 0014)."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from math import inf
from time import monotonic, sleep
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from vcache_backend.errors import VCacheError
from vcache_backend.protocol.messages import ChunkKey, of_rank
from vcache_backend.transfer.keys import TaggedHashKeys
from vcache_backend.transfer.load import COPY_SECONDS, Load
from vcache_backend.transfer.places import SlotPlaces, as_slots
from vcache_backend.transfer.session import Session
from vcache_backend.transfer.store import store
from vcache_backend.vram_pool.copies.geometry import PagedKV

from .boundary import THEIRS, WORKER
from .instance import Instance
from .scheduler import RESET, TAG, TAG_NAME, WAS_RESET, Word

log = logging.getLogger(__name__)

MOST_HITS = 1024
"""The most hits that are kept; the oldest go first. Requests that never run leave hits behind."""
MOST_SECONDS = 5.0
"""How long a store waits for the steps that confirm it."""
_UNSCOPED = (
    "requests come without vcache's tag, so that LoRA and cache_salt cannot be told apart; nothing "
    "of them is cached. Unless they are for pooling, vLLM did not load the plugin `vcache`: add it "
    "to VLLM_PLUGINS, or unset that variable"
)


class LMCacheWorker:
    """Our parts of an engine's methods, called through `WORKER` (see `boundary`). A VCacheError is
    a miss. `look_up` runs in any thread, all other calls in the worker's main thread. `THEIRS`: the
    engine's own method is to answer.

    A store is committed only if no load can have failed, in any rank, in its step or the steps that
    vLLM had planned before. vLLM plans `depth` steps before it has the first one's result: so the
    scheduler's word in the step `depth` later tells."""

    def __init__(
        self, session: Session, kv: PagedKV, instance: Instance, engine: Any, backend: Any
    ) -> None:
        """kv: the KV cache that loads fill and stores read. engine, backend: LMCache's engine, and
        our backend in it."""
        self.session, self.closed = session, False
        self._kv, self._instance, self._engine, self._backend = kv, instance, engine, backend
        self._size = session.chunk_size
        self._keys = TaggedHashKeys(session.namespace, session.rank)
        self._unscoped = False
        self._hits: dict[str, list[ChunkKey]] = {}
        """By request: the keys of the chunks that its last look-up has found."""
        self._storing = threading.Lock()
        self._launched: list[tuple[Load, npt.NDArray[np.int64], Sequence[int], int]] = []
        """The loads to be settled: load, slots of the request's tokens, first token of each chunk,
        number of leading tokens that are not written."""
        vllm = instance.vllm_config
        self._depth = getattr(
            vllm, "max_concurrent_batches", vllm.parallel_config.pipeline_parallel_size + 1
        )
        self._number, self._last_load, self._voided = -1.0, -inf, 0.0
        """The last step, the last step with a load, and the most `Word.voided`."""

    def close(self) -> None:
        """Finish stores and leave the pool."""
        self.closed = True
        self.session.close()

    def clear(self, voided: float = 0.0) -> int | None:
        """Reset the namespace for all instances and ranks, and store nothing more of steps with a
        lower `Word.voided`. Returns how many chunks were removed; None after an error."""
        client, prefix = self.session.client, self.session.namespace.prefix
        with self._storing:
            self._voided = max(self._voided, voided)
            removed: int | None = self._ask(client.clear, prefix, reset=True)
        return removed

    # ---- look-ups

    def look_up(self, *_: Any, **asked: Any) -> Any:
        """Return how many leading tokens can be loaded, and keep the hit for the request, if
        LMCache's look-up server asks: with hashes, pinned, and with an id."""
        hashes, request = asked.get("hashes"), asked.get("lookup_id")
        if not asked.get("pin") or hashes is None or request is None or not self._works():
            return THEIRS
        configs = asked.get("request_configs") or {}
        if RESET in configs:
            return 0 if self.clear(configs[RESET]) is None else WAS_RESET
        names: list[ChunkKey] = self._ask(self._lookup, hashes, configs) or []
        self._hits.pop(request, None)
        if names:
            self._hits[request] = names
        if len(self._hits) > MOST_HITS:
            del self._hits[next(iter(self._hits))]
        return len(names) * self._size

    def _lookup(self, hashes: Sequence[int], configs: Mapping[str, Any]) -> list[ChunkKey]:
        """Look up the leading chunks that every rank can load, and pin this rank's part."""
        names, session, ranks = self._names(hashes, configs), self.session, self._instance.ranks
        asked = len(names)
        if names and ranks > 1:
            names = names[: session.client.lookup(of_rank(names, 0), ranks)]
        # Until the load, a few steps later.
        runs = session.client.pin(names, 2.0).runs if names else []
        # The chunks that this worker can read; maps their segments.
        readable = list(takewhile(lambda run: session.pool.segment(run.segment) is not None, runs))
        names = names[: readable[-1].stop] if readable else []
        if session.counts:  # every rank looks up
            session.client.count(asked=asked * self._size, found=len(names) * self._size)
        return names

    # ---- loads

    def retrieve(self, tokens: Any, mask: Any = None, **kwargs: Any) -> Any:
        """Load a request's tokens. Returns a bool tensor: True for tokens that are or will be in
        the KV cache; `settle` names failed blocks in the same step. Work queued on the current
        stream comes after the copies.

        mask: bool tensor; leading False tokens are not loaded."""
        first = _left_out(mask)
        word = self._word
        self._last_load = self._number + 1 if word is None else word.number
        if first % self._size or not self._works():
            return THEIRS
        loaded = self._ask(self._load, tokens, first // self._size, kwargs) or 0
        retrieved = np.zeros(len(tokens), dtype=np.bool_)
        retrieved[first : first + loaded * self._size] = True
        return torch.from_numpy(retrieved)

    def _load(self, tokens: Any, first: int, kwargs: dict[str, Any]) -> int:
        """Launch the load of the chunks from number `first` on. Returns how many are being
        copied."""
        size = self._size
        names = self._hits.pop(kwargs.get("req_id") or "", None)
        if names is None:  # No look-up was made, or it is forgotten.
            names = self._names(self._hashes(tokens), kwargs.get("request_configs"))
        count = min(len(names), len(tokens) // size)
        if first >= count:
            return 0
        slots, skip = _slots(kwargs), int(kwargs.get("vllm_cached_tokens") or 0)
        starts = range(first * size, count * size, size)
        places = SlotPlaces(self._kv, size, slots, starts, skip, whole=True)
        load = Load(self.session, places, names[first:count])
        reached = load.launch(COPY_SECONDS)
        self._launched.append((load, slots, starts[:reached], skip))
        return reached

    def settle(self, blocks: set[int]) -> set[int]:
        """Wait for the launched loads, at a step's end. Returns `blocks` and the unfilled KV
        blocks. Each load is judged by itself, also after an error elsewhere."""
        WORKER.run(self._hear)
        bad, block_size = set(blocks), self._instance.adapter._block_size
        for load, slots, starts, skip in self._launched:
            try:
                loaded = load.finish(COPY_SECONDS)
            except Exception as error:  # noqa: BLE001 - it counts as not loaded
                WORKER.raised(load.finish, error)
                loaded = 0
            # Chunks follow each other.
            for start in starts[loaded : loaded + 1]:
                tokens = slots[max(start, skip) : max(starts[-1] + self._size, skip)]
                bad |= set((tokens // block_size).tolist())
        self._launched = []
        return bad

    # ---- stores

    def store(self, tokens: Any = None, *, mask: Any = None, **kwargs: Any) -> Any:
        """Store a request's whole chunks: reserve slots, launch one copy, and return. Skips chunks
        of the pool. The commit follows in the background. mask: as in `retrieve`."""
        first = _left_out(mask)
        if tokens is None or first % self._size or not self._works():
            return THEIRS
        return self._ask(self._store, tokens, first // self._size, kwargs)

    def _store(self, tokens: Any, first: int, kwargs: dict[str, Any]) -> None:
        size, word = self._size, self._word
        names = self._names(self._hashes(tokens), kwargs.get("request_configs"))
        names = names[: len(tokens) // size]
        with self._storing:
            if first >= len(names) or word is None or word.voided < self._voided:
                return
            if word.distrusted is None or kwargs.get("req_id") in word.distrusted:
                return
            starts = range(first * size, len(names) * size, size)
            places = SlotPlaces(self._kv, size, _slots(kwargs), starts)
            chunks = range(len(names) - first)
            store(self.session, places, names[first:], chunks, holds=self._confirms(word))

    def _hear(self) -> None:
        """Hear the scheduler's word in a step."""
        with self._storing:
            if (word := self._word) is not None:
                # In this order: another thread reads both.
                self._voided = max(self._voided, word.voided)
                self._number = max(self._number, word.number)

    def _confirms(self, word: Word) -> Callable[[], bool | None]:
        """Return a function that says whether this step's stores may be committed, see
        `PendingStore.holds`."""
        until, number = monotonic() + MOST_SECONDS, word.number
        waits = number < self._last_load + self._depth

        def holds() -> bool | None:
            if WORKER.off or not waits:
                return not WORKER.off
            arrived = self._number >= number + self._depth
            if arrived or self._voided > word.voided or self.closed or monotonic() > until:
                return arrived and self._voided == word.voided
            sleep(0.02)
            return None

        return holds

    # ---- inside

    @property
    def _word(self) -> Word | None:
        """The scheduler's message of this step; None if there is none."""
        parent = self._instance.adapter._parent
        return getattr(parent._connector_metadata, "vcache", None)

    def _works(self) -> bool:
        return not self.closed and bool(self._engine.is_healthy())

    def _ask(self, act: Callable[..., Any], *given: Any, **named: Any) -> Any:
        """Call `act`. A VCacheError is a miss, which is counted and logged once: None."""
        try:
            return act(*given, **named)
        except VCacheError as error:
            self.session.miss(act.__name__.strip("_"), error)
            return None

    def _hashes(self, tokens: Any) -> list[int]:
        database = self._engine.token_database
        return [value for _, _, value in database.process_tokens(tokens, make_key=False)]

    def _names(self, hashes: Sequence[int], configs: Mapping[str, Any] | None) -> list[ChunkKey]:
        """The keys of a request's chunks. Empty if the request is not cached, or if LMCache leaves
        out our tier, for example because LMCache is frozen, or our tier is bypassed."""
        scope = (configs or {}).get(TAG)
        if scope is None and not self._unscoped:
            self._unscoped = True
            log.error(_UNSCOPED)
            self.session.client.report("error", _UNSCOPED)
        tiers = self._engine.storage_manager.get_active_storage_backends(
            search_range=self._engine.retrieve_locations
        )
        ours = any(tier is self._backend for _, tier in tiers)
        return self._keys.of_request(hashes, ((TAG_NAME, scope),)) if scope and ours else []


def _slots(kwargs: Mapping[str, Any]) -> npt.NDArray[np.int64]:
    """The slots of the request's tokens."""
    mapping = kwargs["slot_mapping"]
    return as_slots(mapping, len(mapping), 0)


def _left_out(mask: Any) -> int:
    """How many leading tokens LMCache does not want: False in the mask."""
    # numpy, since torch's first operation after a pause takes up to 0.2 ms.
    return 0 if mask is None else len(mask) - int(np.count_nonzero(mask.numpy()))
