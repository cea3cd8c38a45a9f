"""What the connected clients say they have read out of others' KV caches. For the statistics alone."""

from __future__ import annotations

from heapq import nlargest

from vcache_backend.metadata_server import messages as m
from vcache_backend.metadata_server.placement import Peer

MAX_LISTED = 256
"""Most rows of the statistics: those with the most bytes."""


class ReadsTold:
    """By client, each what it said last. Gone with its connection."""

    def __init__(self) -> None:
        self._of: dict[int, tuple[Peer, list[m.Reads]]] = {}

    def note(self, client: Peer, reads: list[m.Reads]) -> m.Count:
        """In place of what this client said before."""
        self._of[client.id] = client, reads
        return m.Count(len(reads))

    def disconnect(self, client: Peer) -> None:
        self._of.pop(client.id, None)

    def stats(self) -> list[m.ReadStats]:
        """What people see, most bytes first."""
        rows = (
            m.ReadStats(client.process.pid, client.device, read.instance.hex(), read.nbytes, read.refused)
            for client, reads in self._of.values()
            for read in reads
        )
        return nlargest(MAX_LISTED, rows, key=lambda row: (row.nbytes, row.refused))
