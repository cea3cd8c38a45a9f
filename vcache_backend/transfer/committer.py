"""The background half of a store: wait until the bytes are in their slots, then publish them."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec

from vcache_backend.errors import VCacheError
from vcache_backend.metadata_server.client import Client
from vcache_backend.metadata_server.messages import ChunkKey
from vcache_backend.transfer.stats import EngineStats
from vcache_backend.vram_pool.copier import Completion

log = logging.getLogger(__name__)

MAX_UNANSWERED = 4096
"""Reservations remembered to be aborted once the server is back; what is beyond it waits for the server's quarantine."""
RETRY_SECONDS = 1.0
_SLICE_SECONDS = 0.05
"""How long a copy is waited for before the rest of the work is looked at again."""


class PendingStore(msgspec.Struct):
    """Copies under way into reserved slots. `keepalive`: slot views, whose mapping must live until the copy is complete.
    `sealed`: the writing of their checksums, behind the copy; None where there are none. `keys`: of the chunks."""

    completion: Completion
    reservation: int
    prefix: list[ChunkKey]
    tokens: int
    nbytes: int
    keepalive: Any
    sealed: Completion | None = None
    keys: list[ChunkKey] = []


class Committer:
    """One thread that commits the stores of one engine, in the order they were submitted.

    A store is committed only after its copy's event, and its checksums'. What else there is to tell the server waits for no store.
    """

    def __init__(self, client: Client, stats: EngineStats, max_inflight: int) -> None:
        self.on_visible: Callable[[list[ChunkKey]], None] | None = None
        """Told, in the committer's thread, which chunks others can see from now on."""
        self._client, self._stats = client, stats
        self._max_inflight = max_inflight
        self._queue: deque[PendingStore] = deque()
        self._unanswered: deque[int] = deque(maxlen=MAX_UNANSWERED)
        self._touches: deque[list[ChunkKey]] = deque(maxlen=max_inflight)
        self._leases: deque[int] = deque(maxlen=MAX_UNANSWERED)
        self._removals: deque[list[ChunkKey]] = deque(maxlen=MAX_UNANSWERED)
        self._changed = threading.Condition()
        self._busy = False
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="vcache-committer", daemon=True)
        self._thread.start()

    def has_room(self) -> bool:
        """May one more store be submitted?"""
        return len(self._queue) < self._max_inflight

    def submit(self, store: PendingStore) -> None:
        """Hand over a store whose copy was launched. Never blocks."""
        with self._changed:
            self._queue.append(store)
            self._changed.notify_all()

    def give_back(self, reservation: int) -> None:
        """Abort a reservation under which nothing was or is written, soon."""
        with self._changed:
            self._unanswered.append(reservation)
            self._changed.notify_all()

    def touch(self, keys: list[ChunkKey]) -> None:
        """Make chunks recent, soon."""
        with self._changed:
            self._touches.append(keys)
            self._changed.notify_all()

    def remove(self, keys: list[ChunkKey]) -> None:
        """Take chunks out of the pool, soon. Any thread."""
        with self._changed:
            self._removals.append(keys)
            self._changed.notify_all()

    def release(self, lease: int) -> None:
        """End a lease under which nothing more is read, soon."""
        with self._changed:
            self._leases.append(lease)
            self._changed.notify_all()

    def flush(self, timeout: float) -> bool:
        """Wait until everything submitted so far is committed or given up; False at the deadline (seconds)."""
        with self._changed:
            if self._stopping:
                return not self._queue
            return self._changed.wait_for(lambda: not (self._has_work() or self._busy), timeout)

    def close(self, timeout: float = 5.0) -> None:
        """Finish what is queued, within `timeout` seconds, and end the thread. Idempotent."""
        self.flush(timeout)
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._thread.join(timeout)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._busy = False
                self._changed.notify_all()
                self._changed.wait_for(self._has_work, RETRY_SECONDS)
                if self._stopping:
                    return
                store = self._queue[0] if self._queue else None
                keys = self._touches.popleft() if self._touches else None
                self._busy = bool(store or keys)
            over = True
            try:
                over = store is None or self._finish(store)
                self._tell(keys)
            except Exception:  # the thread's last line of defence: a store that fails is a store that did not happen
                log.exception("a background commit failed; its chunks are not shared")
                self._stats.failed("commit_error")
            if store is not None and over:
                with self._changed:
                    self._queue.popleft()

    def _has_work(self) -> bool:
        return bool(self._queue or self._touches or self._stopping or self._has_letters())

    def _has_letters(self) -> bool:
        return bool((self._unanswered or self._leases or self._removals) and self._client.connected)

    def _tell(self, keys: list[ChunkKey] | None) -> None:
        """What is there to be told now, and nothing that comes in meanwhile: a store may wait for this."""
        if not self._client.connected:
            return
        try:
            for _ in range(len(self._leases)):
                self._client.release(self._leases.popleft())
            if keys:
                self._client.touch(keys)
            for _ in range(len(self._removals)):
                self._client.remove(self._removals.popleft())
            for _ in range(len(self._unanswered)):
                self._client.abort(self._unanswered[0])
                self._unanswered.popleft()
        except VCacheError as error:
            log.debug("touch, abort: %s", error)

    def _finish(self, store: PendingStore) -> bool:
        """Commit a store if nothing of it writes any more; False if something does. Too late, the server says so and takes the slots
        back, however long that took: nobody else had them meanwhile."""
        for written in (store.completion, store.sealed):
            if written is not None and not written.wait(_SLICE_SECONDS):
                return False
        if store.completion.seconds is not None:
            self._stats.add_time("store_copy", store.completion.seconds)
        try:
            with self._stats.timed("commit"):
                visible = self._client.commit(store.reservation, store.prefix)
        except VCacheError as error:
            log.debug("commit: %s", error)
            self._stats.failed("commit_unavailable")
            self._unanswered.append(store.reservation)
            return True
        if not visible:
            self._stats.failed("reservation_void")
            return True
        self._stats.count(chunks_stored=visible, tokens_stored=store.tokens, bytes_stored=store.nbytes)
        if self.on_visible is not None:
            self.on_visible(store.keys)
        return True
