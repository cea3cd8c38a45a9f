"""Takes leases on chunks of the pool, renews them, and ends them with a verdict."""

from __future__ import annotations

import time
from functools import partial

import msgspec

from vcache_backend.errors import VCacheError
from vcache_backend.protocol.client import Client
from vcache_backend.protocol.messages import GRACE_SECONDS, ChunkKey, Location
from vcache_backend.transfer.outbox import Outbox
from vcache_backend.transfer.stats import EngineStats


class Lease(msgspec.Struct, eq=False):
    """The right to read chunks at `locations`.

    deadline: the lease's end (time.monotonic), `seconds` after the request or renewal. connection:
    the number of the client's connection, with which the lease ends."""

    id: int
    locations: list[Location]
    deadline: float
    seconds: float
    connection: int

    @property
    def seconds_left(self) -> float:
        return max(self.deadline - time.monotonic(), 0.0)


class LeaseClient:
    """Takes and ends the leases of one session. Any thread."""

    def __init__(self, client: Client, outbox: Outbox, stats: EngineStats) -> None:
        self.client, self._outbox, self._stats = client, outbox, stats

    def acquire(self, keys: list[ChunkKey]) -> Lease | None:
        """Lease the leading run of `keys` in the pool; None without one. Raises VCacheError."""
        asked, connection = time.monotonic(), self.client.connections_lost
        leased = self.client.acquire(keys)
        self._stats.add_time("acquire", time.monotonic() - asked)
        if not leased.lease:
            return None
        until = asked + leased.seconds
        return Lease(leased.lease, leased.locations, until, leased.seconds, connection)

    def good_for_a_copy(self, lease: Lease) -> bool:
        """Whether more than half of the lease's time is left, and its connection still exists."""
        same = self.client.connected and lease.connection == self.client.connections_lost
        return same and lease.seconds_left > lease.seconds / 2

    def renew(self, lease: Lease) -> bool:
        """Extend a lease to its full time from now on. Waits for the answer. False if the lease had
        ended, or the server did not answer."""
        asked = time.monotonic()
        try:
            held = self.client.renew(lease.id)
        except VCacheError as error:
            self._stats.miss("renew", error)
            return False
        lease.deadline = asked + lease.seconds if held else lease.deadline
        return held

    def verdict(self, lease: Lease, end: bool = True) -> bool:
        """Whether the lease held until now. Call after a copy. end: also end the lease; False while
        other copies use it.

        Within `GRACE_SECONDS` of the grant every lease holds: True at once. Later asks the server;
        no answer means False."""
        granted = lease.deadline - lease.seconds
        if time.monotonic() < min(granted + GRACE_SECONDS, lease.deadline):
            if end:
                self.release(lease)
            return True
        if not end:
            return self.renew(lease)
        try:
            with self._stats.timed("release"):
                return self.client.release(lease.id)
        except VCacheError as error:
            self._stats.miss("release", error)
            return False

    def release(self, lease: Lease) -> None:
        self._outbox.send(partial(self.client.release, lease.id))
