"""Leases on chunks of the pool: asked for, given their full time again, and ended with a verdict."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress

import msgspec

from vcache_backend.errors import VCacheError
from vcache_backend.metadata_server.channel import Sent
from vcache_backend.metadata_server.client import Client
from vcache_backend.metadata_server.messages import GRACE_SECONDS, ChunkKey, Leased, Location
from vcache_backend.transfer.courier import Courier
from vcache_backend.transfer.stats import EngineStats

ASK_AGAIN_SECONDS = 0.02
FOREIGN = -1
"""The connection of a lease that another process's client got. Others may read under it, too: that process ends it."""


class Lease(msgspec.Struct, eq=False):
    """A leading run of chunks that may be read.

    `deadline`: until when (time.monotonic), counted from before it was asked for, `seconds` earlier. `connection`: which of the
    client's it was given on, it ends with it; FOREIGN for one of another process of this node. `patience`: seconds that a verdict may
    take where the lease did not hold, or nobody says so: what was read cannot be taken back.
    """

    id: int
    keys: list[ChunkKey]
    locations: list[Location]
    deadline: float
    seconds: float
    connection: int
    patience: float = 0.0

    @property
    def seconds_left(self) -> float:
        return max(self.deadline - time.monotonic(), 0.0)


class AskedLease:
    """A lease on the leading run of `keys` that was asked for. As a context it is given back at the end, unless it was fetched."""

    def __init__(self, leases: LeaseClient, keys: list[ChunkKey]) -> None:
        self.keys, self._leases = keys, leases
        self._asked, self._connection = time.monotonic(), leases.client.connections_lost
        self._sent: Sent[Leased] | None = None
        self._failure: VCacheError | None = None
        try:
            self._sent = leases.client.send_acquire(keys) if keys else None
        except VCacheError as error:
            self._failure = error

    def fetch(self) -> Lease | None:
        """Wait for the answer, once; None if none of the chunks is in the pool. Raises VCacheError."""
        if self._failure is not None:
            raise self._failure
        sent, self._sent = self._sent, None
        if sent is None:
            return None
        try:
            leased = sent.answer()
        except VCacheError:
            # A lease that comes too late is ended.
            if not sent.over:
                self._leases.end_asked(sent)
            raise
        return self._leases.granted(self.keys, leased, self._asked, self._connection)

    def drop(self) -> None:
        """Give it back in the background, unless it was fetched. Idempotent."""
        sent, self._sent = self._sent, None
        if sent is not None:
            self._leases.end_asked(sent)

    def __enter__(self) -> AskedLease:
        return self

    def __exit__(self, *_: object) -> None:
        self.drop()


class LeaseClient:
    """The leases of one session. Any thread. `note_epoch`: told in which epoch of the namespace the leased chunks were stored."""

    def __init__(self, client: Client, courier: Courier, stats: EngineStats, note_epoch: Callable[[int], None]) -> None:
        self.client, self._courier, self._stats, self._note_epoch = client, courier, stats, note_epoch

    def acquire(self, keys: list[ChunkKey]) -> Lease | None:
        """Lease the leading run of chunks that are in the pool; None if there are none. Raises VCacheError."""
        asked, connection = time.monotonic(), self.client.connections_lost
        return self.granted(keys, self.client.acquire(keys), asked, connection)

    def ask(self, keys: list[ChunkKey]) -> AskedLease:
        """`acquire` in two steps: the answer is fetched later."""
        return AskedLease(self, keys)

    def granted(self, keys: list[ChunkKey], leased: Leased, asked: float, connection: int) -> Lease | None:
        """The server's answer, which was asked for at that time on that connection."""
        self._stats.add_time("acquire", time.monotonic() - asked)
        self._note_epoch(leased.epoch)
        if not leased.lease:
            return None
        there, until = keys[: len(leased.locations)], asked + leased.seconds
        return Lease(leased.lease, there, leased.locations, until, leased.seconds, connection)

    def good_for_a_copy(self, lease: Lease) -> bool:
        """Whether the lease has more than half its time left, and was given on the present connection."""
        same = self.client.connected and lease.connection == self.client.connections_lost
        return same and lease.seconds_left > lease.seconds / 2

    def renew(self, lease: Lease) -> bool:
        """Give a lease its full time again; False if it had ended, or nobody answered."""
        asked = time.monotonic()
        try:
            held = self.client.renew(lease.id)
        except VCacheError as error:
            self._stats.miss("renew", error)
            return False
        lease.deadline = asked + lease.seconds if held else lease.deadline
        return held

    def verdict(self, lease: Lease, end: bool = True) -> bool:
        """Whether a lease under which a copy is over held until now; `end` it, unless there are more copies. Nobody is asked, or waited
        for, before `GRACE_SECONDS` are over; then no answer is a no, unless the lease has patience."""
        end = end and lease.connection != FOREIGN
        granted = lease.deadline - lease.seconds
        if time.monotonic() < min(granted + GRACE_SECONDS, lease.deadline):
            if end:
                self.release(lease)
            return True
        if not end:
            return self.renew(lease) or self._untouched(lease)
        try:
            with self._stats.timed("release"):
                return self.client.release(lease.id)
        except VCacheError as error:
            self._stats.miss("release", error)
            return False

    def _untouched(self, lease: Lease) -> bool:
        """Whether its chunks lie where they lay when it was given: a slot that was used again meanwhile has another generation, also under
        a server that was started again. Chunks that are not there may come back, with their segment."""
        until, before = time.monotonic() + lease.patience, dict(zip(lease.keys, lease.locations, strict=True))
        while time.monotonic() < until:
            with suppress(VCacheError):
                found = self.client.acquire(list(before))
                if found.lease:
                    self._courier.release(found.lease)
                if len(found.locations) == len(before):
                    return found.locations == list(before.values())
            time.sleep(ASK_AGAIN_SECONDS)
        return False

    def release(self, lease: Lease) -> None:
        """End a lease in the background: nothing was read under it, or it does not matter."""
        if lease.connection != FOREIGN:
            self._courier.release(lease.id)

    def end_asked(self, sent: Sent[Leased]) -> None:
        """End a lease whose answer is still to come, in the background."""
        self._courier.release_asked(sent)
