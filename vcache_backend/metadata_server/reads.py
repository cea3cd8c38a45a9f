"""What the connected clients say they have read out of others' KV caches, for the statistics."""

from __future__ import annotations

from collections.abc import Callable
from heapq import merge
from itertools import islice

from vcache_backend.metadata_server import messages as m
from vcache_backend.metadata_server.placement import Peer
from vcache_backend.metadata_server.records import ProcessId

MAX_LISTED = 256
"""The most rows in the statistics: those with the most bytes."""


class ReadsTold:
    """What each client said last, until its connection closes."""

    def __init__(self) -> None:
        self._of: dict[int, list[tuple[m.Reads, Peer]]] = {}
        """By client, the rows with the most bytes first."""

    def note(self, client: Peer, reads: list[m.Reads]) -> m.Count:
        """Replace what this client said before."""
        self._of[client.id] = sorted(((read, client) for read in reads), key=_order, reverse=True)
        return m.Count(len(reads))

    def disconnect(self, client: Peer) -> None:
        self._of.pop(client.id, None)

    def stats(self, instance_of: Callable[[ProcessId], str]) -> list[m.ReadStats]:
        """The rows for the statistics, those with the most bytes first. Looks at no more than these, and at one more of each client.

        instance_of: the instance that a process is part of, in hex.
        """
        most = islice(merge(*self._of.values(), key=_order, reverse=True), MAX_LISTED)
        return [
            m.ReadStats(who.process.pid, who.device, read.instance.hex(), read.nbytes, read.refused, instance_of(who.process))
            for read, who in most
        ]


def _order(row: tuple[m.Reads, Peer]) -> tuple[int, int]:
    return row[0].nbytes, row[0].refused
