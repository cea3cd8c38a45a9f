"""The pool's segments in the directory: lending, adding, restoring after a restart, dropping."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

from vcache_backend.config import ServerConfig
from vcache_backend.metadata_server import records
from vcache_backend.metadata_server.pool.backlog import Backlog, Steps
from vcache_backend.metadata_server.pool.contents import Contents
from vcache_backend.metadata_server.pool.placement import Peer
from vcache_backend.metadata_server.pool.reservations import (
    MAX_RESERVATIONS_PER_CLIENT,
    MAX_WRITTEN,
    Claims,
    Reservations,
)
from vcache_backend.metadata_server.pool.slots import Entry, Segment
from vcache_backend.protocol import messages as m


class SegmentDirectory:
    """The part of `Directory` for segments; the directory's contract holds here."""

    def __init__(self, limits: ServerConfig, now: Callable[[], float], first_id: int) -> None:
        self._now = now
        self._ids = count(first_id)
        self.contents = Contents()
        self.segments = self.contents.placement.segments
        self.records = self.contents.records
        self.counters = self.contents.counters
        self.reservations = Reservations(limits.reservation_seconds)
        self.backlog = Backlog()
        self.claims = Claims()
        self._reserves_from = 0.0

    def lend(self, client: Peer, nbytes: int) -> int:
        """Grant the bytes that the client's device lacks of `nbytes` and no other client claims."""
        pooled = sum(
            segment.nbytes for segment in self.segments.values() if segment.device == client.device
        )
        return self.claims.grant(client.id, client.device, nbytes - pooled, self._now())

    def add_segment(self, info: m.SegmentInfo) -> int:
        """Make a segment usable. Returns how many chunks from before a restart it can bring back.

        The chunks become live now or in later turns, unless a client removes them first."""
        segment = self.segments.get(info.id)
        if segment is None:
            segment = self.segments[info.id] = Segment(info)
            self.records.append(added(segment))
        elif segment.state == "absent":
            segment.state = "live"
        chunks = len(segment.returning)
        self.backlog.begin(self.contents.bring_back(segment, self.reservations.pending))
        return chunks

    def drop_segment(self, id_: m.SegmentId) -> int:
        """Stop storing in a segment, and forget its chunks now or in later turns. Returns how many
        it has.

        The segment is removed after its last chunk, reader and writer. Slots in quarantine do not
        delay the removal: their writer keeps the memory mapped."""
        segment = self.segments[id_]
        chunks = segment.info().chunks
        if segment.state != "draining":
            segment.state = "draining"
            self.backlog.begin(self._empty(segment))
        return chunks

    def forget_absent(self) -> tuple[int, int]:
        """Stop waiting for segments from before a restart that no client has offered yet. Returns
        their number, and how many chunks are lost. The memory stays unused, since an earlier writer
        may write to it."""
        absent = self.contents.placement.in_state("absent")
        lost = 0
        for segment in absent:
            lost += len(self.contents.resting.drop(segment.returning))
            self._remove(segment, [entry for entry in segment.occupants if entry.reservation])
        return len(absent), lost

    def segment_infos(self) -> list[m.SegmentInfo]:
        return [segment.info() for segment in self.segments.values()]

    # ---- inside

    def _not_now(self, client: Peer) -> str:
        """Explain why this client can reserve nothing now; empty if it can."""
        if self.reservations.full(client.id):
            return f"this client has {MAX_RESERVATIONS_PER_CLIENT} open reservations; commit some"
        if sum(segment.reserved for segment in self.segments.values()) >= MAX_WRITTEN:
            return f"{MAX_WRITTEN:,} slots are being written or in quarantine: see `vcache status`"
        soon = self._now() < self._reserves_from
        return "the server has just started again; try later" if soon else ""

    def _empty(self, segment: Segment) -> Steps:
        """Forget the chunks of a segment, then remove it."""
        yield from self.contents.empty(segment)
        self._close(segment)

    def _close(self, segment: Segment) -> None:
        """Remove the segment if only quarantined writers still use it."""
        staying = segment.staying.values()
        waited_for = segment.occupants or not all(map(self.reservations.quarantined, staying))
        if not waited_for and self.segments.get(segment.id) is segment:
            self._remove(segment, list(staying))

    def _remove(self, segment: Segment, quarantined: list[Entry]) -> None:
        self.reservations.let_go(quarantined)
        segment.let_go()
        del self.segments[segment.id]
        self.records.append(records.SegmentGone(segment.id))


def added(segment: Segment) -> records.SegmentAdded:
    return records.SegmentAdded(segment.id, segment.device, segment.medium, segment.nbytes)
