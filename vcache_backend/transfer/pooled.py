"""Reads a load's chunks in the pool, run by run, each run under a lease."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter

import numpy as np

from vcache_backend.errors import VCacheError
from vcache_backend.transfer.leases import AskedLease, Lease
from vcache_backend.transfer.memory import MemoryPart
from vcache_backend.transfer.session import Session
from vcache_backend.transfer.sources import LoadContext, Settled
from vcache_backend.vram_pool.copies.planner import plane_offsets
from vcache_backend.vram_pool.paged import Int64s


class _LeasedRun:
    """The chunks with these numbers, under one lease. users: how many parts are being copied, and 1
    while more may be launched.
    """

    def __init__(self, lease: Lease, numbers: Sequence[int]) -> None:
        self.lease, self.numbers, self.users = lease, numbers, 1

    def leave(self, session: Session) -> None:
        """Drop one user. The last user ends the lease."""
        self.users -= 1
        if not self.users:
            session.leases.release(self.lease)

    def consecutive(self, chunk: int) -> tuple[int, int]:
        """Find the lease's locations [start, end) of `chunk` and the consecutive chunks
        after it.
        """
        start = end = self.numbers.index(chunk)
        if isinstance(self.numbers, range):
            return start, len(self.numbers)
        while end < len(self.numbers) and self.numbers[end] - chunk == end - start:
            end += 1
        return start, end


@dataclass
class _PooledPart(MemoryPart):
    run: _LeasedRun

    def origin(self) -> tuple[object, Int64s]:
        kv, size = self.context.places.kv, self.context.session.chunk_size
        return plane_offsets, plane_offsets(
            len(kv.planes), kv.parts, kv.blocks_in(size), kv.page_bytes
        )[0]

    def offsets(self, chunks: Int64s, inside: Int64s) -> Int64s:
        return np.array([view.address for view in self.views], dtype=np.int64)[chunks] + inside

    def keep(self) -> None:
        lease = self.run.lease
        if lease.seconds_left < lease.seconds / 2:
            self.context.session.leases.renew(lease)

    def settle(self) -> Settled:
        context, seconds, started = self.context, self.seconds, perf_counter()
        self.run.users -= 1
        held = context.session.leases.verdict(self.run.lease, end=not self.run.users)
        context.stats.metadata_seconds += perf_counter() - started
        if not held:
            return Settled(0, "lease_lost")
        own = sum(view.local for view in self.views)
        context.stats.pooled(self.first, own, self.count, self.tokens(self.count), seconds)
        return Settled(self.count)

    def drop(self) -> None:
        self.run.leave(self.context.session)

    def lose(self) -> None:
        self.run.users -= 1


class Pooled:
    """Finds one load's chunks in the pool. Runs in the worker's thread.

    cause: why no chunk can come from the pool now; empty if the pool simply lacks the chunk."""

    def __init__(
        self,
        context: LoadContext,
        lease: Lease | AskedLease | None,
        numbers: Sequence[int] | None = None,
    ) -> None:
        """lease: a lease that was taken or asked for. numbers: the numbers of its chunks; None:
        consecutive chunks from the first chunk taken on.
        """
        self._context, self._given, self._numbers = context, lease, numbers
        self._run: _LeasedRun | None = None
        self.cause = ""

    def has(self, chunk: int) -> bool:
        """Whether this chunk is under a lease, or was asked for by number."""
        if self._run is not None:
            return chunk in self._run.numbers
        return self._given is not None and self._numbers is not None and chunk in self._numbers

    def take(self, chunk: int, ask: bool) -> MemoryPart | None:
        """Take the chunks from this number on that one lease covers and this process can read. ask:
        without a lease on them, ask the server and wait.
        """
        context, session = self._context, self._context.session
        if self._run is None or chunk not in self._run.numbers:
            if not ask and not (isinstance(self._given, Lease) and self._run is None):
                return None
            self._end_run()
            self._run = self._leased(chunk)
            if self._run is None:
                return None
        run, self.cause = self._run, ""
        start, end = run.consecutive(chunk)
        views = session.views(run.lease.locations[start:end])
        if not views:
            self.cause = "segment"
            self._end_run()
            return None
        run.users += 1
        if start + len(views) == len(run.numbers):
            self._end_run()
        return _PooledPart(
            context, chunk, len(views), views, all(view.local for view in views), run
        )

    def _end_run(self) -> None:
        """Start no further copy under the present lease."""
        run, self._run = self._run, None
        if run is not None:
            run.leave(self._context.session)

    def _leased(self, chunk: int) -> _LeasedRun | None:
        """Lease the chunks from this number on that are in the pool."""
        given, self._given = self._given, None
        self.cause = ""
        if isinstance(given, AskedLease):
            run = self._asked(given, chunk)
            if run is not None or self._numbers is None or chunk in self._numbers:
                return run
            # Another source has lost this chunk: ask the pool for it.
            given = None
        if given is not None and given.keys[0] != self._context.keys[chunk]:
            self._context.session.leases.release(given)
            given = None
        if given is not None:
            return _consecutive(given, chunk)
        session = self._context.session
        if not session.client.connected:
            self.cause = "server"
            return None
        return _consecutive(
            self._answered(lambda: session.leases.acquire(self._context.keys[chunk:])), chunk
        )

    def _asked(self, given: AskedLease, chunk: int) -> _LeasedRun | None:
        """Wait for the lease that was asked for. None if it does not cover this chunk."""
        if self._numbers is None and given.keys:
            # Plan while the answer is on its way.
            self._context.plan(chunk, len(given.keys))
        lease = self._answered(given.fetch)
        if lease is None or self._numbers is None:
            return _consecutive(lease, chunk)
        run = _LeasedRun(lease, self._numbers[: len(lease.keys)])
        if chunk in run.numbers:
            return run
        run.leave(self._context.session)
        return None

    def _answered(self, ask: Callable[[], Lease | None]) -> Lease | None:
        started = perf_counter()
        try:
            return ask()
        except VCacheError as error:
            self._context.session.miss("lease", error)
            self.cause = "server"
            return None
        finally:
            self._context.stats.metadata_seconds += perf_counter() - started

    def cancel(self) -> None:
        """End the leases that no copy uses. Idempotent."""
        self._end_run()
        given, self._given = self._given, None
        if isinstance(given, AskedLease):
            given.drop()
        elif given is not None:
            self._context.session.leases.release(given)


def _consecutive(lease: Lease | None, chunk: int) -> _LeasedRun | None:
    return None if lease is None else _LeasedRun(lease, range(chunk, chunk + len(lease.locations)))
