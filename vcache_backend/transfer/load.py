"""Loads blocks: copies them into a KV cache, run by run as they arrive, from this node's memory or
the offload tier."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from time import perf_counter

from vcache_backend import threads
from vcache_backend.errors import VCacheError
from vcache_backend.protocol.messages import ChunkKey, ResidentRun, SlotRun
from vcache_backend.resident.mappings import Neighbours
from vcache_backend.transfer.offloaded import OffloadSource
from vcache_backend.transfer.outbox import at_once
from vcache_backend.transfer.places import BlockPlaces
from vcache_backend.transfer.session import Session
from vcache_backend.transfer.sources import CHANGED, LoadContext, MemorySource, Part
from vcache_backend.transfer.stats import LoadStats
from vcache_backend.transfer.store import store
from vcache_backend.vram_pool.copies.copier import Mark

ABSENT = "absent"
"""The cause of a load that ended because no source has a block."""
CANCELLED = "cancelled"
NO_FAILURE = ("", ABSENT, "store_absent", CANCELLED, CHANGED)
"""Causes that do not count as failures. Changed memory has its own counter."""
COPY_SECONDS = 10.0
"""How long to wait for a copy beside the offload tier's deadline. A copy takes milliseconds."""


class Load(LoadContext):
    """Copies leading blocks to their places. Runs in the worker's thread that launches kernels.

    Call `advance`, which never waits for chunks or copies, until it returns True. Then the `filled`
    leading blocks are in place and verified, unless they were not wanted, and `cause` says why
    further blocks are not; `stats.tell` counts the load. A load is not over while a copy may still
    write into its places, unless it was abandoned."""

    def __init__(
        self,
        session: Session,
        places: BlockPlaces,
        keys: list[ChunkKey],
        *,
        mark: Mark | None = None,
        offload: bool = True,
        name: str = "",
        runs: Sequence[ResidentRun | SlotRun] = (),
        neighbours: Neighbours | None = None,
        more: bool = False,
    ) -> None:
        """keys: `keys[i]` belongs to chunk i of `places`. Blocks without a key, perhaps all, are
        looked for in `runs` only.

        mark: see `LoadContext`; None: the current stream continues behind the copies.
        offload: look in the offload tier for chunks that the pool lacks. name: of the request, for
        the log. runs: where blocks are known to be, in the KV caches of `neighbours` or in the
        pool: a resident run counts blocks of `places`, a run of slots counts chunks. The load finds
        the other chunks itself. more: the load is open, and `extend` tells of further runs: until
        the last ones it waits for missing blocks. Without keys.

        A new KV cache is mapped in the background, and the load waits for it. If memory is used
        again before its copy would start, another source may provide the blocks."""
        super().__init__(session, places, keys, mark, LoadStats(session, name, places))
        self.cause = ""
        self._memory = MemorySource(self, runs, neighbours)
        self._offload: OffloadSource | None = None
        if offload and keys and session.tier is not None:
            self._offload = OffloadSource(self, session.tier, self._memory)
        self._parts: deque[Part] = deque()
        self._settled = 0
        """The first block behind those that copies have brought."""
        self._end = places.total
        """The first block that is no longer wanted: no copy of this or a later block starts."""
        self._open = more
        self._failed = self._cancelled = self._over = False

    def advance(self) -> bool:
        """Make progress, and wait for the server's answers only. Never raises.

        Returns whether the load is over; afterwards always True."""
        if self._over:
            return True
        try:
            self._go_on()
        except Exception as error:  # noqa: BLE001 - unverified chunks do not count
            self._fail("copy")
            with suppress(Exception):
                # A copy may be running that no part names.
                self.session.copier.drain()
                self.session.miss("load", error)
        if self._failed:
            self._drain()
        if not self._parts and (self._failed or self.reached >= self._end):
            self._finish()
        return self._over

    def extend(self, runs: Sequence[ResidentRun], last: bool) -> None:
        """Go on with these runs. last: no others follow, so the load ends with what it has."""
        self._memory.extend(runs)
        self._open = not last

    @property
    def starved(self) -> bool:
        """Whether an open load only waits for further runs."""
        return self._open and not self._parts and not self._memory.has(self.reached)

    def run(self, patience: float) -> int:
        """Wait until the load is over. Abandons it after `patience` seconds without a further
        block. Returns `loaded`."""
        if not self._wait_until(self.advance, patience):
            self.abandon()
        self.stats.tell()
        return self.loaded

    def launch(self, patience: float) -> int:
        """Launch the load's copies; `finish` waits for their ends. Waits at most `patience` seconds
        for the next block. Returns how many leading chunks are in place or being copied; no further
        copy starts later."""
        self._wait_until(lambda: self.advance() or self.launched, patience)
        self.hold()
        return self._chunks(self.reached)

    def end(self, deadline: float) -> None:
        """Wait until the load is over; abandon the load at `deadline` (time.monotonic)."""
        while not self.advance() and time.monotonic() < deadline:
            self.wait()
        self.abandon()

    def finish(self, patience: float, prefix: Sequence[ChunkKey] = ()) -> int:
        """Call `run`, then store the offload tier's chunks in the pool again. Never raises.

        prefix: keys of the chunks before the load, to be marked as used, too."""
        session = self.session
        try:
            self.run(patience)
            if prefix:
                session.outbox.after(at_once, partial(session.client.pin, list(prefix), 0.0))
            if chunks := self.to_promote():
                store(session, self.places, self.keys, chunks, prefix, computed_in=self.epoch)
        except Exception as error:  # noqa: BLE001 - the loaded chunks stay right
            session.miss("promote", error)
        return self.loaded

    def wait(self, seconds: float = 0.005) -> None:
        """Wait at most `seconds` until `advance` may make progress."""
        if self._over:
            return
        if not self._parts:
            if self._offload is None or not self._offload.wait(seconds):
                # Until another KV cache has been mapped.
                time.sleep(min(seconds, 0.0002))
            return
        with suppress(VCacheError):  # a copy failed; `advance` will say so
            self._parts[0].copy.wait(seconds)

    @property
    def filled(self) -> int:
        """How many leading blocks are in place, or not wanted."""
        return self.places.after(self._settled)

    @property
    def loaded(self) -> int:
        """How many leading chunks are in place. Only chunks with keys count."""
        return self._chunks(self.filled)

    @property
    def reached(self) -> int:
        """How many leading blocks are in place, being copied, or not wanted."""
        return self.places.after(self._parts[-1].stop if self._parts else self._settled)

    @property
    def launched(self) -> bool:
        return self._over or self.reached >= self._end

    def hold(self, cause: str = ABSENT) -> None:
        """Start no further copies: the load ends with the running copies."""
        if not self._over and self.reached < self._end:
            self._end = self.reached
            self.cause = self.cause or cause

    def cancel(self) -> None:
        """Cancel a load that is no longer needed. The load ends with its running copies."""
        self._cancelled = True
        self.hold(CANCELLED)
        self._release()

    def abandon(self) -> None:
        """End the load as failed at once, although copies may still write into its places. A thread
        waits for these copies."""
        if not self._over:
            self._fail("copy")
            self._finish()
            if self._parts:
                threads.start(self._linger, "vcache-abandoned-load")

    @property
    def epoch(self) -> int:
        """The epoch in which the offload tier stored the loaded chunks; see `to_promote`."""
        return min(self.epochs)

    def to_promote(self) -> list[int]:
        """After the load: the offload tier's chunks that should be stored in the pool again."""
        offload = self._offload
        if offload is None or not offload.tier.promotes:
            return []
        if len(self.epochs) != 1 or self._cancelled:
            return []
        loaded = [chunk for chunk in self.fetched if chunk < self.loaded]
        return list(filter(self.places.holds, loaded))

    # ---- inside

    def _chunks(self, blocks: int) -> int:
        return min(self.places.chunks(blocks), len(self.keys)) if self.keys else 0

    def _wait_until(self, done: Callable[[], bool], patience: float) -> bool:
        """Wait until `done()`. False after `patience` seconds without a further block."""
        seen = self.reached, self.filled
        until = time.monotonic() + patience
        while not done():
            if (self.reached, self.filled) != seen:
                seen = self.reached, self.filled
                until = time.monotonic() + patience
            elif time.monotonic() >= until:
                return False
            self.wait()
        return True

    def _go_on(self) -> None:
        self._settle()
        while not self._failed and self.reached < self._end and self._launch():
            self._settle()

    def _launch(self) -> bool:
        """Start the copy of the next available blocks. Returns False without such blocks, and holds
        the load if none are coming."""
        block, memory, offload = self.reached, self._memory, self._offload
        if memory.expects(block):
            return False
        if offload is not None and offload.expects(block):
            return self._began(offload.launch(block))
        if self._began(memory.launch(block)):
            return True
        if self._open:
            return False
        if offload is not None and offload.may_have:
            self.idle_since = perf_counter()
            # Another instance may have stored the chunk between the two questions.
            if not offload.prepare(block) and self._began(memory.launch(block)):
                return True
            if offload.expects(block):
                return False
        if memory.expects(block):
            # The block's first owner is gone, and the second owner's KV cache is being mapped.
            return False
        self.hold(memory.cause or (offload.cause if offload is not None else "") or ABSENT)
        return False

    def _began(self, parts: Sequence[Part]) -> bool:
        """Note the parts of a copy. Then begin to fetch the next chunk, if memory lacks its next
        block."""
        self._parts += parts
        if parts and self._offload is not None and not self._memory.has(self.reached):
            self._offload.prepare(self.reached)
        return bool(parts)

    def _settle(self) -> None:
        while self._parts and not self._failed:
            part = self._parts[0]
            if not part.copy.done():
                return
            self._parts.popleft()
            right, cause = part.settle()
            self._settled = part.first + right
            if cause:
                self._fail(cause)
                return
            self.idle_since = perf_counter()

    def _fail(self, cause: str) -> None:
        """End the load with the blocks that are now in place."""
        self._failed = True
        self.cause = cause

    def _linger(self) -> bool:
        """A turn of a thread of its own, since no later step may come: release the parts of an
        abandoned load once their copies are over, so that owners can free their memory. Returns
        whether the thread is to end."""
        time.sleep(0.1)
        self._drain()
        return not self._parts

    def _drain(self) -> None:
        """Release the parts whose copies are over. A failed copy has stopped writing."""
        for part in list(self._parts):
            with suppress(Exception):
                try:
                    ended = part.copy.done()
                except VCacheError:
                    ended = True
                if ended:
                    self._parts.remove(part)
                    part.drop()

    def _release(self) -> None:
        """Release the memory that no copy reads."""
        self._memory.cancel()
        if self._offload is not None:
            self._offload.cancel()

    def _finish(self) -> None:
        self._over = True
        with suppress(Exception):  # at worst a counter is missed
            self._release()
            if self.keys and not self._cancelled and self.loaded < len(self.keys):
                self.session.stats.count(chunks_missed=len(self.keys) - self.loaded)
            if self.cause not in NO_FAILURE:
                self.session.stats.failed(self.cause)
