"""What the connected clients say they have read out of others' KV caches. For the statistics alone."""

from __future__ import annotations

from heapq import merge
from itertools import islice

from vcache_backend.metadata_server import messages as m
from vcache_backend.metadata_server.placement import Peer

MAX_LISTED = 256
"""Most rows of the statistics: those with the most bytes."""


class ReadsTold:
    """By client, each what it said last. Gone with its connection."""

    def __init__(self) -> None:
        self._of: dict[int, list[tuple[m.Reads, Peer]]] = {}
        """Of each the most bytes first."""

    def note(self, client: Peer, reads: list[m.Reads]) -> m.Count:
        """In place of what this client said before."""
        self._of[client.id] = sorted(((read, client) for read in reads), key=_order, reverse=True)
        return m.Count(len(reads))

    def disconnect(self, client: Peer) -> None:
        self._of.pop(client.id, None)

    def stats(self) -> list[m.ReadStats]:
        """What people see, most bytes first. Of many thousands no more are looked at than these, and one of each client."""
        most = islice(merge(*self._of.values(), key=_order, reverse=True), MAX_LISTED)
        return [m.ReadStats(who.process.pid, who.device, read.instance.hex(), read.nbytes, read.refused) for read, who in most]


def _order(row: tuple[m.Reads, Peer]) -> tuple[int, int]:
    return row[0].nbytes, row[0].refused
