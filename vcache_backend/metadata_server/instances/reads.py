"""How much each client has read out of other instances' KV caches, for the statistics."""

from __future__ import annotations

from heapq import merge
from itertools import islice

from vcache_backend.metadata_server import messages as m
from vcache_backend.metadata_server.pool.placement import Peer

MAX_LISTED = 256
"""The most rows in the statistics. Rows with the most bytes come first."""


class ReadReports:
    """The last report of each client, kept until its connection closes."""

    def __init__(self) -> None:
        self._of: dict[int, list[tuple[m.Reads, Peer, m.InstanceId]]] = {}
        """The rows of each client, the rows with the most bytes first."""

    def note(self, client: Peer, instance: m.InstanceId, reads: list[m.Reads]) -> m.Count:
        """Replace the last report of this client, which belongs to `instance`."""
        self._of[client.id] = sorted(
            ((read, client, instance) for read in reads), key=_order, reverse=True
        )
        return m.Count(len(reads))

    def disconnect(self, client: Peer) -> None:
        self._of.pop(client.id, None)

    def stats(self) -> list[m.ReadStats]:
        """Return the rows with the most bytes. Examines at most `MAX_LISTED` rows and one more of
        each client."""
        most = islice(merge(*self._of.values(), key=_order, reverse=True), MAX_LISTED)
        return [
            m.ReadStats(
                who.process.pid,
                who.device,
                read.instance.hex(),
                read.nbytes,
                read.refused,
                instance.hex(),
            )
            for read, who, instance in most
        ]


def _order(row: tuple[m.Reads, Peer, m.InstanceId]) -> tuple[int, int]:
    return row[0].nbytes, row[0].refused
