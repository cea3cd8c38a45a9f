"""The session by its former name and verbs, for the LMCache plugin until that stands on `Load` and `store`."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from vcache_backend.errors import ChecksumError as ChecksumError
from vcache_backend.errors import VCacheError
from vcache_backend.metadata_server.messages import ChunkKey
from vcache_backend.transfer import store as storing
from vcache_backend.transfer.layout import checked_layout as checked_layout
from vcache_backend.transfer.places import SlotPlaces
from vcache_backend.transfer.session import Lease as Lease
from vcache_backend.transfer.session import Session
from vcache_backend.vram_pool.copier import Completion
from vcache_backend.vram_pool.paged import PagedKV
from vcache_backend.vram_pool.planner import CopyPlan
from vcache_backend.vram_pool.slots import SlotView

if TYPE_CHECKING:
    from vcache_backend.offload.fetch import Fetch

Slots = npt.NDArray[np.int64]

_FETCH_SECONDS = 0.05
_STUCK_SECONDS = 10.0


class ChunkIO(Session):
    """See the module."""

    continued = Session.lookup_offloaded
    let_go = Session.release
    conclude = Session.verdict

    def load(
        self, kv: PagedKV, views: Sequence[SlotView], copy: CopyPlan, seconds: float, keys: Sequence[ChunkKey] | None = None
    ) -> bool:
        return self.complete(self.scatter(kv, copy, views, keys), seconds)

    def complete(self, scattered: Completion, seconds: float) -> bool:
        started = time.perf_counter()
        complete = scattered.wait(seconds)
        self.stats.add_time("retrieve_copy", scattered.seconds or time.perf_counter() - started)
        return complete

    def end(self, lease: Lease) -> bool:
        try:
            with self.stats.timed("release"):
                return self.client.release(lease.id)
        except VCacheError as error:
            self.miss("release", error)
            return False

    def note_retrieved(self, views: Sequence[SlotView], tokens: int) -> None:
        chunk_bytes = views[0].nbytes if self._paged is None else self._paged.chunk_bytes(self.chunk_size)
        each = tokens * chunk_bytes // (self.chunk_size * len(views))
        own = sum(view.local for view in views)
        peer = len(views) - own
        self.stats.count(chunks_retrieved=len(views), tokens_retrieved=tokens, bytes_own=own * each, bytes_peer=peer * each)

    def note_fetched(self, keys: Sequence[ChunkKey], tokens: int) -> None:
        self.known_offloaded(keys)
        each = self._paged.chunk_bytes(self.chunk_size) // self.chunk_size if self._paged is not None else 0
        self.stats.count(chunks_offload=len(keys), tokens_retrieved=tokens, bytes_offload=tokens * each)

    def load_fetched(self, kv: PagedKV, fetch: Fetch, planned: Callable[[int, int], CopyPlan]) -> int:
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

    def store(
        self,
        kv: PagedKV,
        keys: Sequence[ChunkKey],
        firsts: Sequence[int],
        slots: Slots,
        prefix: list[ChunkKey],
        fetched_in: int | None = None,
    ) -> int:
        places = SlotPlaces(kv, self.chunk_size, slots, firsts)
        pending = storing.store(self, places, keys, range(len(keys)), prefix, fetched_in=fetched_in)
        return pending.tokens // self.chunk_size if pending is not None else 0
