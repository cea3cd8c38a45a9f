"""Leases on committed chunks: who may read what until when. Pure: the clock is passed in."""

from __future__ import annotations

import heapq
from collections.abc import Callable

import msgspec

from vcache_backend.metadata_server.messages import GRACE_SECONDS
from vcache_backend.metadata_server.placement import Entry

MAX_LEASES_PER_CLIENT = 65_536


class Lease(msgspec.Struct, gc=False):
    """One reader's hold on some chunks until `deadline` (the server's monotonic clock, seconds)."""

    client: int
    deadline: float
    entries: list[Entry]


class Leases:
    """The table of leases. `unheld(entry)` is called whenever the last lease of an entry ends."""

    def __init__(self, seconds: float, unheld: Callable[[Entry], None]) -> None:
        self.seconds = seconds
        self.expired = 0
        self._unheld = unheld
        self._leases: dict[int, Lease] = {}
        self._of_client: dict[int, set[int]] = {}
        self._deadlines: list[tuple[float, int]] = []

    def __len__(self) -> int:
        return len(self._leases)

    def __contains__(self, lease: int) -> bool:
        return lease in self._leases

    def entries(self) -> list[Entry]:
        """Every leased entry, once for each lease."""
        return [entry for lease in self._leases.values() for entry in lease.entries]

    def full(self, client: int) -> bool:
        """Has the client as many leases as it may have?"""
        return len(self._of_client.get(client, ())) >= MAX_LEASES_PER_CLIENT

    def grant(self, lease: int, client: int, entries: list[Entry], now: float) -> None:
        for entry in entries:
            entry.leases += 1
        self._leases[lease] = Lease(client, now + self.seconds, entries)
        self._of_client.setdefault(client, set()).add(lease)
        heapq.heappush(self._deadlines, (now + self.seconds, lease))

    def renew(self, lease: int, now: float) -> bool:
        """Full time again for a lease that still holds, whoever asks: one process may read under another's lease."""
        self.expire(now)
        held = self._leases.get(lease)
        if held is None:
            return False
        held.deadline = now + self.seconds
        return True

    def release(self, lease: int, now: float) -> bool:
        """End a lease, whoever asks; did it hold until now?"""
        self.expire(now)
        if lease not in self._leases:
            return False
        self._end(lease)
        return True

    def expire(self, now: float) -> None:
        """End every lease whose time is over. A renewed one is looked at again at its new deadline."""
        while self._deadlines and self._deadlines[0][0] <= now:
            _, lease = heapq.heappop(self._deadlines)
            held = self._leases.get(lease)
            if held is None:
                continue
            if held.deadline > now:
                heapq.heappush(self._deadlines, (held.deadline, lease))
            else:
                self._end(lease)
                self.expired += 1

    def drop_client(self, client: int, now: float) -> None:
        """End all leases of a client that is gone, those granted within the last `GRACE_SECONDS` when that time is over."""
        for lease in list(self._of_client.get(client, ())):
            held = self._leases[lease]
            held.deadline = min(held.deadline, held.deadline - self.seconds + GRACE_SECONDS)
            if held.deadline > now:
                heapq.heappush(self._deadlines, (held.deadline, lease))
            else:
                self._end(lease)

    def _end(self, lease: int) -> None:
        held = self._leases.pop(lease)
        of_client = self._of_client[held.client]
        of_client.discard(lease)
        if not of_client:
            del self._of_client[held.client]
        for entry in held.entries:
            entry.leases -= 1
            if not entry.leases:
                self._unheld(entry)
