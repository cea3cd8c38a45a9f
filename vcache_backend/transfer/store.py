"""Stores chunks: reserves slots, gathers the chunks into them, and commits in the background."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from vcache_backend.errors import ServerUnavailable, VCacheError
from vcache_backend.protocol.messages import ChunkKey, Location, Refusal, Reserved
from vcache_backend.transfer.outbox import polled
from vcache_backend.transfer.places import BlockPlaces
from vcache_backend.vram_pool.copies.copier import Completion, CopyJob, Mark

if TYPE_CHECKING:
    from vcache_backend.transfer.session import Session

log = logging.getLogger(__name__)

MAX_INFLIGHT = 64
"""The most copied stores that are not yet committed. A further store is skipped and counted."""


@dataclass(eq=False)
class PendingStore:
    """A running copy into the reserved slots of the chunks `keys`, to be committed afterwards."""

    session: Session
    reservation: int
    keys: list[ChunkKey]
    prefix: list[ChunkKey]
    """Earlier chunks."""
    completion: Completion
    nbytes: int
    holds: Callable[[], bool | None] | None = None
    """Called after the copy. Returns whether the copied bytes belong to `keys`; None: ask again."""
    _right: bool | None = True

    def wait(self, seconds: float) -> bool:
        """Wait for the copy, and for the answer of `holds`; False after `seconds`."""
        if not self.completion.wait(seconds):
            return False
        self._right = self.holds() if self.holds is not None else True
        return self._right is not None

    def finish(self) -> None:
        """Commit the store, whose copy is over. A late commit is safe: the server refuses it."""
        stats, client = self.session.stats, self.session.client
        if (seconds := self.completion.seconds) is not None:
            stats.add_time("store_copy", seconds)
        if not self._right:
            stats.count(not_stored_changed=len(self.keys))
            give_back(self.session, self.reservation)
            return
        try:
            with stats.timed("commit"):
                visible = client.commit(self.reservation, self.prefix)
        except VCacheError as error:
            log.debug("commit: %s", error)
            stats.failed("commit_unavailable")
            give_back(self.session, self.reservation)
            return
        if not visible:
            stats.failed("reservation_void")
            return
        tokens = len(self.keys) * self.session.chunk_size
        stats.count(chunks_stored=visible, tokens_stored=tokens, bytes_stored=self.nbytes)
        for listener in self.session.on_stored:
            listener(self.keys)

    def give_up(self, error: Exception) -> None:
        """Return the reservation of a store that has failed, unless its copy may still be writing.
        Does nothing to a store that was committed."""
        with suppress(VCacheError):
            if self.completion.wait(0.0):
                give_back(self.session, self.reservation)


def give_back(session: Session, reservation: int) -> None:
    """Abort a reservation in the background, until the server has answered. No copy may be writing
    into its slots."""
    client = session.client

    def again(error: Exception) -> None:
        if isinstance(error, ServerUnavailable):
            give_back(session, reservation)

    connected = polled(lambda: client.connected, 0.05)
    session.outbox.after(connected, partial(client.abort, reservation), failed=again)


_REFUSALS = {Refusal.EXISTS: "exists", Refusal.BUSY: "busy", Refusal.FULL: "full"}


def store(
    session: Session,
    places: BlockPlaces,
    keys: Sequence[ChunkKey],
    chunks: Sequence[int],
    prefix: Sequence[ChunkKey] = (),
    *,
    beside: bool = False,
    computed_in: int | None = None,
    holds: Callable[[], bool | None] | None = None,
) -> PendingStore | None:
    """Reserve slots, copy in one launch, and commit in the background. Runs in the worker's thread.

    Returns None if nothing is copied: the pool has the chunks or no room, or too many stores wait
    for their commit. Raises VCacheError.

    chunks: numbers of the chunks to store; `keys[i]` and `places` belong to chunk i. prefix: keys
    of the chunks before chunk 0, to be marked as used, too. beside: the current stream does not
    wait for the copy, which reads the stream's writes so far; nothing may write into the blocks
    before the result's `completion`, see `Copier.fence`. computed_in: the epoch in which the chunks
    were computed; in another one they are not stored. None: it is not known. holds: see
    `PendingStore`.

    A commit publishes every slot of a reservation, so either all slots are written or the
    reservation is given back. After a RuntimeError (a launch that failed in torch) a copy may still
    be writing: the reservation is then neither committed nor given back, and the server quarantines
    the slots."""
    if not chunks:
        return None
    stats = session.stats
    if len(session.outbox) >= MAX_INFLIGHT:
        stats.count(not_stored_backlog=len(chunks))
        return None
    mark, asked = session.copier.mark() if beside else None, time.monotonic()
    nbytes = places.kv.chunk_bytes(session.chunk_size)
    reserved = _reserve(session, [keys[chunk] for chunk in chunks], nbytes, computed_in)
    if reserved is None:
        return None
    # Later this process was paused meanwhile. Half of the time is left for the copy, which takes
    # milliseconds.
    launch_by = asked + reserved.seconds * 0.5
    pairs = zip(chunks, reserved.slots, strict=True)
    slots = {chunk: slot for chunk, slot in pairs if isinstance(slot, Location)}
    if not slots:
        return None
    try:
        copy = _gather(session, places, slots, launch_by, mark)
    except VCacheError:
        give_back(session, reserved.reservation)
        raise
    if copy is None:
        give_back(session, reserved.reservation)
        return None
    named = [keys[chunk] for chunk in slots]
    before = [*prefix, *keys[: chunks[0]]]
    pending = PendingStore(session, reserved.reservation, named, before, *copy, holds)
    session.outbox.after(pending.wait, pending.finish, failed=pending.give_up)
    return pending


def _reserve(
    session: Session, keys: list[ChunkKey], nbytes: int, computed_in: int | None
) -> Reserved | None:
    """Reserve slots, and count why chunks get none. Returns None if there was a reset since the
    epoch `computed_in`."""
    stats = session.stats
    with stats.timed("reserve"):
        reserved = session.client.reserve(keys, nbytes)
    if computed_in not in (None, reserved.epoch):
        stats.count(not_stored_outdated=len(keys))
        if reserved.reservation:
            give_back(session, reserved.reservation)
        return None
    for slot in reserved.slots:
        if not isinstance(slot, Location):
            stats.count(**{f"not_stored_{_REFUSALS.get(Refusal(slot), 'no_slot')}": 1})
    if reserved.reason:
        stats.failed(f"not_stored: {reserved.reason}")
        if stats.unsaid(reserved.reason, session.client.run_id):
            log.warning("chunks are not stored: %s", reserved.reason)
    return reserved


def _gather(
    session: Session,
    places: BlockPlaces,
    slots: dict[int, Location],
    launch_by: float,
    mark: Mark | None,
) -> tuple[Completion, int] | None:
    """Copy chunks into their slots, unless it is later than `launch_by` (time.monotonic). Returns
    the copy and its bytes."""
    stats, count, nbytes = session.stats, len(slots), places.kv.chunk_bytes(session.chunk_size)
    found = session.pool.slots(list(slots.values()), nbytes)
    whole = len(found) == count and all(map(places.holds, slots))
    if not whole or time.monotonic() > launch_by:
        stats.count(**{"not_stored_late" if whole else "not_stored_no_slot": count})
        return None
    with stats.timed("plan"):
        rows = places.store_rows(list(slots), [address for _, address in found])
    local = all(segment.local for segment, _ in found)
    host = any(segment.whole.device.type == "cpu" for segment, _ in found)
    job = CopyJob(places.kv, *rows, keep=found, local=local, host=host, to_origin=True)
    return session.copier.copy(job, mark), nbytes * count
