"""A store: reserve slots, gather the chunks into them, and commit in the background."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from vcache_backend.errors import VCacheError
from vcache_backend.metadata_server.client import Client
from vcache_backend.metadata_server.messages import ChunkKey, Location, Refusal, Reserved
from vcache_backend.transfer.courier import Courier
from vcache_backend.transfer.places import Places
from vcache_backend.transfer.stats import EngineStats
from vcache_backend.vram_pool.copier import Completion, Mark

if TYPE_CHECKING:
    from vcache_backend.transfer.session import Session

log = logging.getLogger(__name__)

LAUNCH_WITHIN = 0.5
"""In which part of a reservation's time its copy must begin, so that it is over before that time is. A copy takes milliseconds."""
_SLICE_SECONDS = 0.05
"""How long a copy is waited for before the rest of the work is looked at again."""
_REFUSALS = {Refusal.EXISTS: "exists", Refusal.BUSY: "busy", Refusal.FULL: "full"}


class PendingStore(msgspec.Struct):
    """Copies under way into reserved slots. `keepalive`: slot views, whose mapping must live until the copy is complete.
    `sealed`: the writing of their checksums, behind the copy; None where there are none. `keys`: of the chunks."""

    completion: Completion
    reservation: int
    prefix: list[ChunkKey]
    tokens: int
    nbytes: int
    keepalive: Any
    sealed: Completion | None
    keys: list[ChunkKey]


def store(
    session: Session,
    places: Places,
    keys: Sequence[ChunkKey],
    chunks: Sequence[int],
    prefix: Sequence[ChunkKey] = (),
    *,
    beside: bool = False,
    fetched_in: int | None = None,
) -> PendingStore | None:
    """Reserve, gather in one launch, and leave the commit to the background. None if nothing is copied: what is there already is not.

    chunks: numbers of the chunks to store; `keys[i]` and `places` are those of chunk i. prefix: keys of the chunks before chunk 0,
    which become as recent. beside: the current stream goes on beside the copy, which reads what that stream has written by now;
    until the answer's `completion` nothing may write into the blocks, see `Copier.fence`. fetched_in: they came from the offload
    tier, stored in that epoch: they are not stored if it is over, and must not make another chunk be lost.

    Of a reservation all slots are written, or it is given back: a commit publishes every slot. After a RuntimeError (a launch that
    failed in torch), or whatever happens to the checksums of a copy that runs, nobody knows whether something writes: the
    reservation is neither committed nor given back, and its slots wait in quarantine.
    """
    if not chunks:
        return None
    stats, committer = session.stats, session.committer
    if not committer.has_room():
        stats.count(not_stored_backlog=len(chunks))
        return None
    mark, asked = session.mark() if beside else None, time.monotonic()
    nbytes = places.kv.chunk_bytes(session.chunk_size)
    with stats.timed("reserve"):
        reserved = session.client.reserve([keys[chunk] for chunk in chunks], session.slot_bytes(nbytes))
    session.note_epoch(reserved.epoch)
    if fetched_in not in (None, reserved.epoch):
        # A reset came in between: these are chunks of before.
        if reserved.reservation:
            committer.give_back(reserved.reservation)
        return None
    _note_refusals(stats, reserved)
    # A process that was stopped meanwhile writes nothing.
    pending = _gather(session, places, keys, chunks, reserved, asked + reserved.seconds * LAUNCH_WITHIN, mark)
    if pending is not None:
        pending.prefix = [*prefix, *keys[: chunks[0]]]
        committer.submit(pending)
    return pending


def _gather(
    session: Session,
    places: Places,
    keys: Sequence[ChunkKey],
    chunks: Sequence[int],
    reserved: Reserved,
    launch_by: float,
    mark: Mark | None,
) -> PendingStore | None:
    """Copy into the slots that were reserved, unless it is later than `launch_by` (time.monotonic)."""
    slots = [(chunk, slot) for chunk, slot in zip(chunks, reserved.slots, strict=True) if isinstance(slot, Location)]
    if not slots:
        return None
    stats, committer, count = session.stats, session.committer, len(slots)
    chosen = [chunk for chunk, _ in slots]
    try:
        views = session.views([slot for _, slot in slots])
        with stats.timed("plan"):
            copy = places.store_plan(chosen)
        whole = len(views) == count and copy.complete(count).all()
        if not whole or time.monotonic() > launch_by:
            stats.count(**{"not_stored_late" if whole else "not_stored_no_slot": count})
            committer.give_back(reserved.reservation)
            return None
        completion = session.copier.gather(places.kv, copy, views, mark)
    except VCacheError:
        committer.give_back(reserved.reservation)
        raise
    named, sealed = [keys[chunk] for chunk in chosen], None
    if session.sealer is not None:
        sealed = session.sealer.seal(views, named, places.kv.chunk_bytes(session.chunk_size), completion)
    tokens = count * session.chunk_size
    return PendingStore(completion, reserved.reservation, [], tokens, copy.nbytes, views, sealed, named)


def _note_refusals(stats: EngineStats, reserved: Reserved) -> None:
    for slot in reserved.slots:
        if not isinstance(slot, Location):
            stats.count(**{f"not_stored_{_REFUSALS.get(Refusal(slot), 'no_slot')}": 1})
    if reserved.reason and stats.failed(f"not_stored: {reserved.reason}") == 1:
        log.warning("chunks are not stored: %s", reserved.reason)


class Committer(Courier):
    """Commits the stores of one session, in the order they were submitted: each only after its copy's event, and its checksums'.

    What else there is to tell the server waits for no store.
    """

    def __init__(
        self, client: Client, stats: EngineStats, max_inflight: int, listeners: Sequence[Callable[[list[ChunkKey]], None]] = ()
    ) -> None:
        """listeners: told, in the commit thread, which chunks others can see from now on; looked at anew every time."""
        self._stats, self._max_inflight, self._listeners = stats, max_inflight, listeners
        self._queue: deque[PendingStore] = deque()
        super().__init__(client)

    def has_room(self) -> bool:
        """Whether one more store may be submitted."""
        return len(self._queue) < self._max_inflight

    def submit(self, store: PendingStore) -> None:
        """Hand over a store whose copy was launched. Never blocks."""
        with self._changed:
            self._queue.append(store)
            self._changed.notify_all()

    def _has_work(self) -> bool:
        return bool(self._queue) or super()._has_work()

    def _work(self) -> None:
        store, over = (self._queue[0] if self._queue else None), True
        try:
            over = store is None or self._finish(store)
        except Exception:  # a store that fails is a store that did not happen
            log.exception("a background commit failed; its chunks are not shared")
            self._stats.failed("commit_error")
        super()._work()
        if store is not None and over:
            with self._changed:
                self._queue.popleft()

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
            self.give_back(store.reservation)
            return True
        if not visible:
            self._stats.failed("reservation_void")
            return True
        self._stats.count(chunks_stored=visible, tokens_stored=store.tokens, bytes_stored=store.nbytes)
        for listener in self._listeners:
            listener(store.keys)
        return True
