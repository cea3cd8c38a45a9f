"""Reads a load's chunks in the pool, run by run, under a lease for each run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter

import numpy as np

from vcache_backend.errors import VCacheError
from vcache_backend.transfer.lease_client import Lease
from vcache_backend.transfer.memory import MemoryPart
from vcache_backend.transfer.session import Session
from vcache_backend.transfer.sources import LoadContext, Settled
from vcache_backend.vram_pool.copies.geometry import Int64s
from vcache_backend.vram_pool.copies.plan import chunk_planes


class _LeasedRun:
    """The chunks `numbers` under one lease. users: how many parts are being copied, plus 1 while
    further copies may be launched."""

    def __init__(self, lease: Lease, numbers: Sequence[int]) -> None:
        self.lease, self.numbers, self.users = lease, numbers, 1

    def leave(self, session: Session) -> None:
        """Drop one user. The last user ends the lease."""
        self.users -= 1
        if not self.users:
            session.leases.release(self.lease)

    def consecutive(self, chunk: int) -> tuple[int, int]:
        """Find the lease's locations [start, end) of `chunk` and the chunks directly behind it."""
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
        return chunk_planes, chunk_planes(self.context.places.kv, self.context.session.chunk_size)

    def offsets(self, chunks: Int64s, inside: Int64s, number: int) -> Int64s:
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
        own, stats = sum(view.local for view in self.views), context.stats
        brought = self.count, self.tokens(self.count), seconds
        stats.later(stats.pooled, self.first, own, *brought)
        return Settled(self.count)

    def drop(self) -> None:
        self.run.leave(self.context.session)

    def lose(self) -> None:
        self.run.users -= 1


class Pooled:
    """Finds a load's chunks in the pool. Runs in the worker's thread.

    cause: why no chunk can come from the pool now; empty if the pool simply lacks the chunk."""

    def __init__(
        self, context: LoadContext, lease: Lease | None, numbers: Sequence[int] = ()
    ) -> None:
        """lease: on the load's leading chunks. numbers: chunks to lease together, once the first is
        taken."""
        self._context, self._numbers = context, numbers
        self._run = None if lease is None else _LeasedRun(lease, range(len(lease.locations)))
        self.cause = ""

    def has(self, chunk: int) -> bool:
        """Whether this chunk is under a lease, or will be leased."""
        return chunk in (self._numbers if self._run is None else self._run.numbers)

    def take(self, chunk: int, ask: bool) -> MemoryPart | None:
        """Take the chunks from this number on that a lease covers and this process can read. ask:
        if there is no lease, ask the server and wait."""
        context, session = self._context, self._context.session
        if self._run is None or chunk not in self._run.numbers:
            if not ask:
                return None
            self.cancel()
            self._run = self._leased(chunk)
            if self._run is None:
                return None
        run = self._run
        self.cause = ""
        start, end = run.consecutive(chunk)
        views = session.views(run.lease.locations[start:end])
        if not views:
            self.cause = "segment"
            self.cancel()
            return None
        run.users += 1
        if start + len(views) == len(run.numbers):
            self.cancel()
        return _PooledPart(
            context, chunk, len(views), views, all(view.local for view in views), run
        )

    def cancel(self) -> None:
        """Take no more chunks under the present lease, which its last copy ends. Idempotent."""
        run = self._run
        self._run = None
        if run is not None:
            run.leave(self._context.session)

    def _leased(self, chunk: int) -> _LeasedRun | None:
        """Lease the chunks from this number on that are in the pool."""
        context, session = self._context, self._context.session
        numbers = self._numbers
        self._numbers = ()
        self.cause = ""
        if not session.client.connected:
            self.cause = "server"
            return None
        wanted: Sequence[int] = range(chunk, len(context.keys))
        if chunk in numbers:
            wanted = [number for number in numbers if number >= chunk]
        started = perf_counter()
        try:
            lease = session.leases.acquire([context.keys[number] for number in wanted])
        except VCacheError as error:
            session.miss("lease", error)
            self.cause = error.cause
            return None
        finally:
            context.stats.metadata_seconds += perf_counter() - started
        return None if lease is None else _LeasedRun(lease, wanted[: len(lease.locations)])
