"""A load: chunks into a KV cache, run by run as they come, from memory of this node or the offload tier."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from time import perf_counter
from typing import TYPE_CHECKING

from vcache_backend.errors import ChecksumError, VCacheError
from vcache_backend.metadata_server.messages import ChunkKey
from vcache_backend.transfer.checked import of_copier
from vcache_backend.transfer.held import HeldChunk, HeldSource
from vcache_backend.transfer.leases import AskedLease, Lease
from vcache_backend.transfer.load_stats import LoadStats
from vcache_backend.transfer.memory import MemorySource
from vcache_backend.transfer.places import Places
from vcache_backend.transfer.pooled import POLL_SECONDS, Pooled
from vcache_backend.transfer.session import Session
from vcache_backend.transfer.sources import LoadContext, OffloadSource, Part, Source
from vcache_backend.vram_pool.copier import Mark

if TYPE_CHECKING:
    from vcache_backend.resident.neighbours import Neighbours
    from vcache_backend.transfer.resident import ResidentChunk, ResidentChunks

log = logging.getLogger(__name__)

ABSENT = "absent"
"""The cause of a load that ends with a chunk that is nowhere."""
CANCELLED = "cancelled"
NO_FAILURE = ("", ABSENT, "store_absent", CANCELLED, "checksum", "changed")
"""Causes that are not counted as failures here: a chunk that does not fit its checksum was, where it was found, and that an owner used
a block again while it was read is counted by itself."""
SLICE_SECONDS = 0.005
"""How long `run` waits before it goes on: a chunk of another source may have come meanwhile."""
LINGER_SECONDS = 0.1
"""How often to look whether the copies of an abandoned load are over."""


class Load:
    """Brings the leading chunks of `keys` to their places. In the worker's thread that launches kernels.

    `advance` does what can be done without waiting and says whether the load is over; `loaded` leading chunks are then in place,
    complete and right, and `cause` says why not all. A load is never over while something may still write into its places.
    """

    def __init__(
        self,
        session: Session,
        places: Places,
        keys: list[ChunkKey],
        *,
        lease: Lease | AskedLease | None = None,
        mark: Mark | None = None,
        wait_seconds: float = 0.0,
        consume: bool = False,
        offload: bool = True,
        name: str = "",
        held: Mapping[int, HeldChunk] | None = None,
        residents: Mapping[int, ResidentChunk] | None = None,
        neighbours: Neighbours | None = None,
        rest: Callable[[], tuple[list[ChunkKey], Places]] | None = None,
    ) -> None:
        """`keys[i]` and `places` are those of chunk i. lease: one on the leading chunks that there is already, or was asked for; this load
        ends it, and asks for one on the rest. mark: see `LoadContext`; None: the current stream goes on behind the copies.
        wait_seconds: how long chunks that are not there yet may take to come. consume: remove the chunks once they are in place.
        offload: what the pool has not may lie in the offload tier. name: of the request, for the log. held: chunks that
        somebody has in host memory already, by number; a lease then begins with the first of the others. residents: chunks that lie in
        the KV caches of `neighbours`, by number; a KV cache that is new is mapped aside, and waited for; chunks that are gone by the
        time they are launched may come from elsewhere. Without a lease the pool is asked for the others at once, and for nothing if
        there are none. rest: gives `keys` and `places` of all chunks, where those above are of the first ones only; called once these
        are on their way, or found not to be there."""
        self.keys, self.places, self.stats = keys, places, LoadStats(session, places.kv, name, len(keys))
        self.loaded, self.cause = 0, ""
        self._session, self._consume = session, consume
        self._context = LoadContext(session, places, keys, mark, self.stats)
        numbers = None
        if residents and lease is None and session.client.connected:
            numbers = [number for number in range(len(keys)) if number not in residents]
            lease = session.leases.ask([keys[number] for number in numbers]) if numbers else None
        self._residents = self._of_others(residents or {}, neighbours) if residents or wait_seconds else None
        poll = POLL_SECONDS if self._residents is None else SLICE_SECONDS
        self._pool = Pooled(self._context, lease, poll if wait_seconds else 0.0, numbers)
        self._memory = MemorySource(self._context, self._pool, self._residents)
        self._offload = OffloadSource(self._context, session.tier) if offload and session.tier is not None else None
        self._held = HeldSource(self._context, held or {})
        self._sources: list[Source] = [self._memory, *([self._offload] if self._offload is not None else ()), self._held]
        self._parts: deque[Part] = deque()
        self._until, self._late = time.monotonic() + wait_seconds, "timeout" if wait_seconds else ABSENT
        self._end = len(keys)
        """Nothing is launched from this chunk on."""
        self._rest = rest
        self._failed = self._cancelled = self._over = False

    def advance(self) -> bool:
        """Go on as far as possible without waiting; whether it is over. Once it is, it stays so."""
        if self._over:
            return True
        try:
            self._go_on()
        except ChecksumError:
            self._fail("checksum")
        except Exception as error:  # noqa: BLE001 - what is not known to be right does not count
            self._fail("copy")
            with suppress(Exception):
                self._session.miss("load", error)
        if self._failed:
            self._drain()
        if not self._parts and (self._failed or self.reached >= self._end):
            self._finish()
        return self._over

    def run(self, patience: float) -> int:
        """Go on until it is over, or for `patience` seconds without a chunk that is in place: how many there are."""
        moved, until = self.loaded, time.monotonic() + patience
        while not self.advance():
            now = time.monotonic()
            if self.loaded > moved:
                moved, until = self.loaded, now + patience
            elif now >= until:
                self.abandon()
            self.wait(SLICE_SECONDS)
        return self.loaded

    def wait(self, seconds: float) -> None:
        """Wait, at most so long, until `advance` may have something to do."""
        if self._over:
            return
        if not self._parts:
            if not any(source.wait(seconds) for source in self._sources):
                time.sleep(min(seconds, POLL_SECONDS))
            return
        try:
            self._parts[0].moving.wait(seconds)
        except VCacheError:
            log.debug("a copy failed; `advance` will say so", exc_info=True)

    @property
    def reached(self) -> int:
        """Leading chunks that are in place or on their way."""
        return self._parts[-1].first + self._parts[-1].count if self._parts else self.loaded

    @property
    def launched(self) -> bool:
        """Whether all of it is on its way, or in place, or nothing more of it is launched."""
        return self._over or self.reached >= self._end

    def follow(self) -> None:
        """What is queued in the current stream from now on comes behind the copies that are under way; only after a `mark`, else it does
        so anyway."""
        try:
            for part in self._parts:
                self._session.copier.fence(of_copier(part.moving))
        except Exception as error:  # noqa: BLE001 - what is not known to be right does not count
            self._fail("copy")
            with suppress(Exception):
                self._session.miss("load", error)

    def found(self, residents: Mapping[int, ResidentChunk]) -> None:
        """These chunks, by number, lie in the KV caches of the neighbours by now. If there are none, no more are waited for."""
        if not residents:
            self._until, self._late = 0.0, ABSENT
        if self._residents is not None and not self._over:
            self._residents.add({number: one for number, one in residents.items() if number >= self.reached})

    def hold(self, cause: str = ABSENT) -> None:
        """Launch nothing more: what is not on its way by now is not wanted."""
        if not self._over and self.reached < self._end:
            self._end, self.cause = self.reached, self.cause or cause

    def cancel(self) -> None:
        """Nobody wants the chunks any more. What is on its way is waited for all the same."""
        self._cancelled = True
        self.hold(CANCELLED)
        for source in self._sources:
            source.cancel()

    def abandon(self) -> None:
        """Wait for nothing any more: what it had to bring is not there, though something may still write into its places."""
        if not self._over:
            self._fail("copy")
            self._finish()
            if self._parts:
                threading.Thread(target=self._linger, name="vcache-abandoned-load", daemon=True).start()

    @property
    def epoch(self) -> int:
        """The one in which chunks of the offload tier were stored that it brought; see `to_promote`."""
        return min(self._context.epochs)

    def to_promote(self) -> list[int]:
        """Once it is over: numbers of the chunks to store in the pool again, since they came from the offload tier."""
        context, offload = self._context, self._offload
        if len(context.epochs) != 1 or self._cancelled or offload is None or not offload.tier.promotes:
            return []
        return [chunk for chunk in context.fetched if chunk < self.loaded and self.places.holds(chunk)]

    # ---- inside

    def _of_others(self, residents: Mapping[int, ResidentChunk], neighbours: Neighbours | None) -> ResidentChunks | None:
        if neighbours is None:
            return None
        # Only who shares in place needs it.
        from vcache_backend.transfer.resident import ResidentChunks

        return ResidentChunks(self._context, residents, neighbours)

    def _go_on(self) -> None:
        self._settle()
        while not self._failed and self.reached < self._end and self._launch():
            self._settle()
        if not self._failed and self.reached < self._end:
            self._give_up()

    def _launch(self) -> bool:
        """Start the copy of the next chunks that are at hand; False if there are none, now or at all."""
        chunk, sources = self.reached, self._sources
        coming = [source for source in sources if source.expects(chunk)]
        if self._launched_from(coming or sources):
            return True
        self._grow()
        if coming or not any(source.may_have for source in sources):
            return False
        self._context.idle_since = perf_counter()
        if any(source.prepare(chunk) for source in sources if source.may_have):
            return False
        # Somebody may have put it into the pool between the two questions.
        return self._launched_from(sources)

    def _launched_from(self, sources: list[Source]) -> bool:
        for source in sources:
            part = source.launch(self.reached)
            if part is not None:
                self._parts.append(part)
                self._grow()
                if not (self._pool.more or self._held.expects(self.reached) or self._memory.has(self.reached)):
                    for other in self._sources:
                        other.prepare(self.reached)
                return True
        return False

    def _grow(self) -> None:
        """The chunks behind the first ones are part of it from now on."""
        rest, self._rest = self._rest, None
        if rest is not None:
            self.keys, self.places = self._context.keys, self._context.places = rest()
            self._end = self.stats.chunks = len(self.keys)

    def _give_up(self) -> None:
        """Nothing could be launched: launch nothing more, unless something is on its way or may still come."""
        if any(source.expects(self.reached) for source in self._sources):
            return
        # That the pool cannot be read does not change; that the offload tier has nothing may. Who had a chunk and used its blocks again has
        # no reason to compute it once more.
        gone = self._residents is not None and self._residents.gone
        if not gone and not self._pool.cause and time.monotonic() < self._until:
            return
        self.hold(next((source.cause for source in self._sources if source.cause), ABSENT if gone else self._late))

    def _settle(self) -> None:
        """Take what is in place."""
        while self._parts and not self._failed:
            part = self._parts[0]
            if not part.moving.done():
                for one in self._parts:
                    one.keep()
                return
            self._parts.popleft()
            right, cause = part.settle()
            self.loaded = part.first + right
            if self._consume:
                self._remove([number for number in part.pooled if number < self.loaded])
            if cause:
                self._fail(cause)
                return
            self._context.idle_since = perf_counter()

    def _remove(self, numbers: list[int]) -> None:
        keys = [self.keys[number] for number in numbers]
        if not keys:
            return
        if self._session.tier is not None:
            self._session.tier.forget(keys)
        try:
            self._session.client.remove(keys)
        except VCacheError as error:
            self._session.miss("consume", error)

    def _fail(self, cause: str) -> None:
        """Nothing that is not in place by now counts."""
        self._failed, self.cause = True, cause

    def _linger(self) -> None:
        """In a thread, as there may be no other load and no step: all that the copies use stays until they are over, and no longer, as an
        owner's memory is free only then."""
        while self._parts:
            time.sleep(LINGER_SECONDS)
            self._drain()

    def _drain(self) -> None:
        """Let go of parts that write nothing any more. A copy that failed does not."""
        for part in list(self._parts):
            with suppress(Exception):
                try:
                    over = part.moving.done()
                except VCacheError:
                    over = True
                if over:
                    self._parts.remove(part)
                    part.drop()

    def _finish(self) -> None:
        self._over = True
        with suppress(Exception):  # a number too few
            for source in self._sources:
                source.cancel()
            if not self._cancelled and self.loaded < len(self.keys):
                self._session.stats.count(chunks_missed=len(self.keys) - self.loaded)
            if self.cause not in NO_FAILURE:
                self._session.stats.failed(self.cause)
