"""A session's background thread: commits stores, and sends the messages of `outbox`."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from vcache_backend.errors import VCacheError
from vcache_backend.metadata_server.client import Client
from vcache_backend.metadata_server.messages import ChunkKey
from vcache_backend.transfer.outbox import Outbox
from vcache_backend.transfer.stats import EngineStats
from vcache_backend.vram_pool.copies.copier import Completion

log = logging.getLogger(__name__)

MOST_INFLIGHT = 64
"""The most stores that are copied and not yet committed. A further store is skipped and counted."""
_SLICE_SECONDS = 0.05
"""How long to wait for a copy before other work gets its turn."""


class PendingStore(NamedTuple):
    """A running copy into the reserved slots of the chunks `keys`. prefix: keys of the chunks
    before them.

    keepalive: the slots' views, whose mapping must live until the copy is complete. holds: called
    after the copy; returns whether the copied bytes still belonged to `keys`."""

    completion: Completion
    reservation: int
    keys: list[ChunkKey]
    prefix: list[ChunkKey]
    tokens: int
    nbytes: int
    keepalive: Any
    holds: Callable[[], bool] | None = None


class Committer(Outbox):
    """Commits the stores of one session in the order of submission, each after its copy. Other
    messages to the server do not wait for stores.
    """

    def __init__(
        self,
        client: Client,
        stats: EngineStats,
        listeners: Sequence[Callable[[list[ChunkKey]], None]] = (),
    ) -> None:
        """listeners: called in the commit thread with chunks that others can now see. The sequence
        may change later.
        """
        self._stats, self._listeners = stats, listeners
        self._queue: deque[PendingStore] = deque()
        super().__init__(client)

    def has_room(self) -> bool:
        """Whether another store may be submitted."""
        return len(self._queue) < MOST_INFLIGHT

    def submit(self, store: PendingStore) -> None:
        """Queue a store whose copy was launched. Never blocks."""
        with self._changed:
            self._queue.append(store)
            self._changed.notify_all()

    def _has_work(self) -> bool:
        return bool(self._queue) or super()._has_work()

    def _hurries(self) -> bool:
        return bool(self._queue) or super()._hurries()

    def _work(self) -> None:
        store, over = (self._queue[0] if self._queue else None), True
        try:
            over = store is None or self._finish(store)
        except Exception:  # a failed store counts as no store
            log.exception("a background commit failed; its chunks are not shared")
            self._stats.failed("commit_error")
        super()._work()
        if store is not None and over:
            with self._changed:
                self._queue.popleft()

    def _finish(self, store: PendingStore) -> bool:
        """Commit a store if its copy is over; else return False.

        A late commit is safe: the server refuses it once the reservation has expired, and gives the
        slots to nobody before."""
        if not store.completion.wait(_SLICE_SECONDS):
            return False
        if store.completion.seconds is not None:
            self._stats.add_time("store_copy", store.completion.seconds)
        if store.holds is not None and not store.holds():
            self._stats.count(not_stored_changed=len(store.keys))
            self.give_back(store.reservation)
            return True
        try:
            with self._stats.timed("commit"):
                visible = self._client.commit(store.reservation, store.prefix)
        except VCacheError as error:
            log.debug("commit: %s", error)
            self._stats.failed("commit_unavailable")
            self.give_back(store.reservation)
            return True
        if not visible:
            self._stats.failed("reservation_void")
            return True
        self._stats.count(
            chunks_stored=visible, tokens_stored=store.tokens, bytes_stored=store.nbytes
        )
        for listener in self._listeners:
            listener(store.keys)
        return True
