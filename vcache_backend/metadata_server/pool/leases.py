"""Leases: which client may read which chunks until when. Pure."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable

import msgspec

from vcache_backend.metadata_server.pool.backlog import Steps
from vcache_backend.metadata_server.pool.slots import Entry
from vcache_backend.protocol.messages import GRACE_SECONDS

MAX_LEASES_PER_CLIENT = 65_536
MAX_LEASED_PER_CLIENT = 1 << 18
"""The most chunks under the leases of one client. A chunk counts once for each lease."""
AT_ONCE = 2048
"""About how many chunks one call of `expire` releases; the next call continues."""


class Grant(msgspec.Struct, gc=False):
    """A reader's lease on chunks until `deadline`, in seconds of the server's monotonic clock.
    `client`: None once the reader's connection is closed."""

    client: int | None
    deadline: float
    entries: list[Entry]


class Leases:
    """The table of leases. Calls `let_go(entries)` when a lease ends. now: a monotonic clock in
    seconds. Any client may renew or release a lease, since a process may read under another
    process's lease."""

    def __init__(
        self, seconds: float, now: Callable[[], float], let_go: Callable[[list[Entry]], None]
    ) -> None:
        self._seconds, self._now = seconds, now
        self.expired = 0
        self._let_go = let_go
        self._leases: OrderedDict[int, Grant] = OrderedDict()
        """In order of deadlines, since all leases last equally long."""
        self._orphans: OrderedDict[int, Grant] = OrderedDict()
        """Leases of closed connections, in order of deadlines."""
        self._of_client: dict[int, dict[int, None]] = {}
        self._leased_by: Counter[int] = Counter()

    def __len__(self) -> int:
        return len(self._leases) + len(self._orphans)

    def full(self, client: int, more: int = 1) -> bool:
        """Whether the client has reached its number of leases, or would exceed its number of chunks
        with `more`."""
        leases = len(self._of_client.get(client, ()))
        return (
            leases >= MAX_LEASES_PER_CLIENT
            or self._leased_by[client] + more > MAX_LEASED_PER_CLIENT
        )

    def grant(self, lease: int, client: int, entries: list[Entry]) -> None:
        """Add a lease of `entries`, each once. The caller has counted the reader."""
        self._leases[lease] = Grant(client, self._now() + self._seconds, entries)
        self._of_client.setdefault(client, {})[lease] = None
        self._leased_by[client] += len(entries)

    def renew(self, lease: int) -> bool:
        """Extend a lease to its full time; False if it has ended."""
        now = self._now()
        held = self._holding(lease, now)
        if held is None:
            return False
        held.deadline = now + self._seconds
        if held.client not in self._of_client:
            held.client = None
        self._orphans.pop(lease, None)
        self._leases[lease] = held
        self._leases.move_to_end(lease)
        return True

    def release(self, lease: int) -> bool:
        """End a lease; False if it had ended before."""
        held = self._holding(lease, self._now())
        if held is None:
            return False
        self._end(lease, held)
        return True

    def expire(self) -> None:
        now, left = self._now(), AT_ONCE
        for table in (self._leases, self._orphans):
            while table and left > 0:
                lease, held = next(iter(table.items()))
                if held.deadline > now:
                    break
                left -= 1 + len(held.entries)
                self._holding(lease, now)

    def drop_client(self, client: int) -> Steps:
        """Make the leases of a closed connection end after `GRACE_SECONDS`, the time promised by
        each grant, unless another client renews them."""
        leases = self._of_client.pop(client, {})
        self._leased_by.pop(client, None)
        return self._orphan(leases)

    def _orphan(self, leases: Iterable[int]) -> Steps:
        for lease in leases:
            held = self._leases.get(lease)
            if held is not None and held.client is not None:
                held.client = None
                held.deadline = self._now() + GRACE_SECONDS
                self._orphans[lease] = self._leases.pop(lease)
            yield

    def _holding(self, lease: int, now: float) -> Grant | None:
        """Return the lease if it has not ended. Ends a lease whose time is over."""
        held = self._leases.get(lease) or self._orphans.get(lease)
        if held is not None and held.deadline <= now:
            self._end(lease, held)
            self.expired += 1
            return None
        return held

    def _end(self, lease: int, held: Grant) -> None:
        if self._leases.pop(lease, None) is None:
            del self._orphans[lease]
        if held.client in self._of_client:
            self._of_client[held.client].pop(lease, None)
            self._leased_by[held.client] -= len(held.entries)
        self._let_go(held.entries)
