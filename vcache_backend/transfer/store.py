"""Stores chunks: reserves slots, gathers the chunks into them, and commits in the background."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from vcache_backend.errors import VCacheError
from vcache_backend.protocol.client import Client
from vcache_backend.protocol.messages import ChunkKey, Location, Refusal, Reserved
from vcache_backend.transfer.outbox import Outbox
from vcache_backend.transfer.places import BlockPlaces
from vcache_backend.transfer.stats import EngineStats
from vcache_backend.vram_pool.copies.copier import Completion, Mark

if TYPE_CHECKING:
    from vcache_backend.transfer.session import Session

log = logging.getLogger(__name__)

MAX_INFLIGHT = 64
"""The most copied stores that are not yet committed. A further store is skipped and counted."""
_SLICE_SECONDS = 0.05
"""How long to wait for a copy before other work gets its turn."""


class PendingStore(NamedTuple):
    """A running copy into the reserved slots of the chunks `keys`. prefix: earlier chunks.

    keepalive: the slots' views, whose mapping must live until the copy is complete. holds: called
    after the copy; returns whether the copied bytes belong to `keys`, or None: ask again."""

    reservation: int
    keys: list[ChunkKey]
    prefix: list[ChunkKey]
    tokens: int
    completion: Completion
    nbytes: int
    keepalive: Any
    holds: Callable[[], bool | None] | None = None


class Committer(Outbox):
    """Commits a session's stores in the order of submission, each store after its copy. Other
    messages to the server do not wait for stores."""

    def __init__(
        self,
        client: Client,
        stats: EngineStats,
        listeners: Sequence[Callable[[list[ChunkKey]], None]] = (),
    ) -> None:
        """listeners: called in the commit thread with newly visible chunks. The sequence may change
        later."""
        self._stats, self._listeners = stats, listeners
        self._queue: deque[PendingStore] = deque()
        super().__init__(client, stats.failed)

    def has_room(self) -> bool:
        return len(self._queue) < MAX_INFLIGHT

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
        except Exception:
            if store is not None:
                self._give_up(store)
            raise
        finally:
            if store is not None and over:
                with self._changed:
                    self._queue.popleft()
        super()._work()

    def _give_up(self, store: PendingStore) -> None:
        """Return the reservation of a store that has failed, unless its copy may still be writing.
        Does nothing to a store that was committed."""
        if store.completion.wait(_SLICE_SECONDS):
            self.give_back(store.reservation)

    def _finish(self, store: PendingStore) -> bool:
        """Commit a store if its copy is over; otherwise return False.

        A late commit is safe: the server refuses a commit once the reservation has expired, and
        keeps the slots reserved until then."""
        if not store.completion.wait(_SLICE_SECONDS):
            return False
        holds = store.holds() if store.holds is not None else True
        if holds is None:
            return False
        if store.completion.seconds is not None:
            self._stats.add_time("store_copy", store.completion.seconds)
        if not holds:
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


LAUNCH_WITHIN = 0.5
"""The fraction of a reservation's time within which the copy must start, to end in time. A copy
takes milliseconds."""
_REFUSALS = {Refusal.EXISTS: "exists", Refusal.BUSY: "busy", Refusal.FULL: "full"}


def store(
    session: Session,
    places: BlockPlaces,
    keys: Sequence[ChunkKey],
    chunks: Sequence[int],
    prefix: Sequence[ChunkKey] = (),
    *,
    beside: bool = False,
    fetched_in: int | None = None,
    holds: Callable[[], bool | None] | None = None,
) -> PendingStore | None:
    """Reserve slots, copy in one launch, and commit in the background. Runs in the worker's thread.

    Returns None if nothing is copied: the pool has the chunks or no room, or too many stores wait
    for their commit. Raises VCacheError.

    chunks: numbers of the chunks to store; `keys[i]` and `places` belong to chunk i. prefix: keys
    of the chunks before chunk 0, to be marked as used, too. beside: the current stream does not
    wait for the copy, which reads the stream's writes so far; nothing may write into the blocks
    before the result's `completion`, see `Copier.fence`. fetched_in: the epoch in which the offload
    tier stored the chunks, if they came from the tier; in a later epoch they are not stored. holds:
    see `PendingStore`.

    A commit publishes every slot of a reservation, so either all slots are written or the
    reservation is given back. After a RuntimeError (a launch that failed in torch) a copy may still
    be writing: the reservation is then neither committed nor given back, and the server quarantines
    the slots."""
    if not chunks:
        return None
    stats, committer = session.stats, session.committer
    if not committer.has_room():
        stats.count(not_stored_backlog=len(chunks))
        return None
    mark, asked = session.copier.mark() if beside else None, time.monotonic()
    nbytes = places.kv.chunk_bytes(session.chunk_size)
    with stats.timed("reserve"):
        reserved = session.client.reserve([keys[chunk] for chunk in chunks], nbytes)
    if fetched_in not in (None, reserved.epoch):
        # A reset came in between: these chunks are outdated.
        if reserved.reservation:
            committer.give_back(reserved.reservation)
        return None
    _note_refusals(stats, reserved, session.client.epoch)
    # Do not write if this process was paused meanwhile.
    launch_by = asked + reserved.seconds * LAUNCH_WITHIN
    pairs = zip(chunks, reserved.slots, strict=True)
    slots = {chunk: slot for chunk, slot in pairs if isinstance(slot, Location)}
    if not slots:
        return None
    try:
        copy = _gather(session, places, slots, launch_by, mark)
    except VCacheError:
        committer.give_back(reserved.reservation)
        raise
    if copy is None:
        committer.give_back(reserved.reservation)
        return None
    named = [keys[chunk] for chunk in slots]
    before = [*prefix, *keys[: chunks[0]]]
    pending = PendingStore(
        reserved.reservation, named, before, len(slots) * session.chunk_size, *copy, holds
    )
    committer.submit(pending)
    return pending


def _gather(
    session: Session,
    places: BlockPlaces,
    slots: dict[int, Location],
    launch_by: float,
    mark: Mark | None,
) -> tuple[Completion, int, Any] | None:
    """Copy chunks into their slots, unless it is later than `launch_by` (time.monotonic). Returns
    the copy, its bytes, and objects that must live until the copy is complete."""
    stats = session.stats
    count = len(slots)
    views = session.views(list(slots.values()))
    with stats.timed("plan"):
        plan = places.store_plan(list(slots))
    whole = len(views) == count and plan.complete(count).all()
    if not whole or time.monotonic() > launch_by:
        stats.count(**{"not_stored_late" if whole else "not_stored_no_slot": count})
        return None
    return session.copier.gather(places.kv, plan, views, mark), plan.nbytes, views


def _note_refusals(stats: EngineStats, reserved: Reserved, epoch: int) -> None:
    for slot in reserved.slots:
        if not isinstance(slot, Location):
            stats.count(**{f"not_stored_{_REFUSALS.get(Refusal(slot), 'no_slot')}": 1})
    if reserved.reason:
        stats.failed(f"not_stored: {reserved.reason}")
        if stats.unsaid(reserved.reason, epoch):
            log.warning("chunks are not stored: %s", reserved.reason)
