"""The segments of the pool as the directory has them: who may lend, what comes back after a restart, what is taken back and what goes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import count, islice

import msgspec

from vcache_backend.config import ServerConfig
from vcache_backend.metadata_server import messages as m
from vcache_backend.metadata_server import records
from vcache_backend.metadata_server.allocator import ALIGNMENT
from vcache_backend.metadata_server.backlog import Backlog, Steps
from vcache_backend.metadata_server.contents import Contents
from vcache_backend.metadata_server.placement import Entry, Peer, Segment
from vcache_backend.metadata_server.reservations import MAX_RESERVATIONS_PER_CLIENT, Claims, Reservations

MAX_AVOIDED = 1024
"""With more, a client's list of segments that it cannot use is rid of those that are not there."""
MAX_MOVED = 16
KEEP_SECONDS = 10.0
"""Chunks that one `move` is about, and how long they wait for it."""


class SegmentDirectory:
    """Part of `Directory`, whose contract holds here."""

    def __init__(self, limits: ServerConfig, now: Callable[[], float], first_id: int) -> None:
        self._now = now
        self._ids = count(first_id)
        self.contents = Contents()
        self.segments = self.contents.placement.segments
        self.records = self.contents.records
        self.counters = self.contents.counters
        self.reservations = Reservations(limits.reservation_seconds)
        self.backlog = Backlog()
        self._claims = Claims()
        self._reserves_from = 0.0
        self.shortened: list[Segment] = []
        """Those of which more has been given back: what lies behind their `end` is to be freed."""

    def lend(self, client: Peer, nbytes: int) -> m.Lendable:
        """What is missing of `nbytes` on the client's device and nobody else is about to make: the client may, soon."""
        there = sum(segment.nbytes for segment in self.segments.values() if segment.device == client.device)
        claim = next(self._ids)
        lendable = self._claims.grant(claim, client.id, client.device, nbytes - there, self._now())
        return m.Lendable(claim if lendable else 0, lendable)

    def redeem(self, client: Peer, claim: int, device: str, nbytes: int) -> bool:
        """A segment made under a claim of this client has come, which ends the claim; False if it is too late or too large."""
        return self._claims.redeem(claim, client.id, device, nbytes, self._now())

    def add_segment(self, info: m.SegmentInfo) -> int:
        """A segment is usable from now on. How many chunks of before a restart it brings back, soon, unless they have gone meanwhile."""
        segment = self.segments.get(info.id)
        if segment is None:
            segment = self.segments[info.id] = Segment(info)
            self.records.append(added(segment))
        elif segment.state == "absent":
            segment.state = "live"
        chunks = len(segment.returning)
        self.backlog.begin(self.contents.bring_back(segment, self.reservations.pending))
        self.backlog.begin(self._shorten(segment))
        return chunks

    def resize_segment(self, id_: m.SegmentId, nbytes: int, keep: bool = False) -> None:
        """Leave `nbytes` of a segment to the pool, for good; what lies behind them is forgotten, soon, or first may `move`. `shortened`
        names it once nobody reads or writes there any more, but for quarantined writers, who then write for nobody."""
        segment = self.segments[id_]
        segment.keeps_until = self._now() + KEEP_SECONDS if keep else 0.0
        segment.limit = min(segment.limit, nbytes // ALIGNMENT * ALIGNMENT)
        self.records.append(added(segment))
        self.backlog.begin(self._shorten(segment))

    def move(self, client: Peer, id_: m.SegmentId) -> m.Moves:
        """Slots for a few of the chunks that a resize or a drop keeps, wherever there is room or something older. The reservation cannot be
        committed once one of them is no more found where it was."""
        segment, reservation = self.segments.get(id_), next(self._ids)
        if segment is None or not segment.keeps_until or self._not_now(client):
            return m.Moves(0, [], 0)
        segment.keeps_until = self._now() + KEEP_SECONDS
        if segment.occupants if segment.state == "draining" else segment.end > segment.limit:
            return m.Moves(0, [], 1)  # not all of it was looked at yet; holes behind a new end would be taken, else
        near = msgspec.structs.replace(client, device=segment.device, medium=segment.medium)
        pairs: list[tuple[Entry, m.Location]] = []
        for entry in list(islice(segment.leaving.values(), MAX_MOVED)):
            if not self.contents.live.holds(entry) or self.reservations.pending(entry.key):
                continue
            if slot := self.contents.better(entry, near):
                pairs.append((entry, slot[0]))
            else:
                self.contents.forget([entry])
        left = len(segment.leaving) - len(pairs)
        if not pairs:
            return m.Moves(0, [], left)
        pairs.sort(key=lambda pair: -pair[0].use)  # as `commit` makes them recent
        sources = [entry for entry, _ in pairs]
        self._open(client, reservation, [entry.key for entry in sources], [to for _, to in pairs], sources)
        self.counters["moved"] += len(pairs)
        return m.Moves(reservation, [(entry.location, to) for entry, to in pairs], left)

    def drop_segment(self, id_: m.SegmentId, keep: bool = False) -> int:
        """Take no new chunks in a segment, and forget its own, soon, or first may `move`; how many it has. When they are forgotten and
        nobody reads or writes there any more, the segment is gone.

        Slots in quarantine are not waited for: whoever still writes there has the memory to itself."""
        segment = self.segments[id_]
        chunks, kept = segment.info().chunks, segment.keeps_until
        segment.keeps_until = self._now() + KEEP_SECONDS if keep else 0.0
        if segment.state != "draining" or (kept and not keep):
            segment.state = "draining"
            self.backlog.begin(self._empty(segment))
        return chunks

    def avoid(self, client: Peer, id_: m.SegmentId) -> int:
        """No slot there for this client, which cannot map the segment, should it come back, too; how many it avoids."""
        if len(client.avoids) >= MAX_AVOIDED:
            client.avoids.intersection_update(self.segments)
        client.avoids.add(id_)
        return len(client.avoids)

    def absent_segments(self) -> list[m.SegmentId]:
        """Segments of before a restart whose fd nobody has offered yet."""
        return [segment.id for segment in self.contents.placement.in_state("absent")]

    def forget_absent(self, ids: Iterable[m.SegmentId]) -> int:
        """Stop waiting for these; how many chunks are lost. Their memory must not be used again: somebody may still write there."""
        lost = 0
        for id_ in ids:
            segment = self.segments.pop(id_)
            lost += len(self.contents.resting.drop(segment.returning))
            self.reservations.let_go([entry for entry in segment.occupants.values() if entry.reservation])
            segment.let_go()
            self.records.append(records.SegmentGone(id_))
        return lost

    def segment_infos(self) -> list[m.SegmentInfo]:
        """Every segment, live, draining and absent, with its occupancy."""
        return [segment.info() for segment in self.segments.values()]

    # ---- inside

    def _open(
        self, client: Peer, reservation: int, keys: list[m.ChunkKey], locations: list[m.Location], sources: Iterable[Entry] = ()
    ) -> None:
        """These slots are the client's to write from now on."""
        entries = self.contents.occupy(keys, locations, reservation)
        self.reservations.open(reservation, client.id, client.process, entries, self._now(), sources)
        self.records.append(records.Held(reservation, client.process, keys, locations))

    def _not_now(self, client: Peer) -> str:
        """Why nothing at all is reserved for this client, if so."""
        if self.reservations.full(client.id):
            return f"{MAX_RESERVATIONS_PER_CLIENT} reservations of this client are open; commit or abort some"
        return "the server has just started again; try later" if self._now() < self._reserves_from else ""

    def _tick_segments(self, now: float) -> None:
        for segment in list(self.segments.values()):
            if 0 < segment.keeps_until < now:  # who was to move them does not
                segment.keeps_until = 0.0
                self.backlog.begin(self._empty(segment) if segment.state == "draining" else self._shorten(segment))
            if segment.state == "draining":
                self._close(segment)
            self._let_end_go(segment)

    def _empty(self, segment: Segment) -> Steps:
        """Forget the chunks of a segment; it goes with the last."""
        yield from self.contents.empty(segment)
        self._close(segment)

    def _close(self, segment: Segment) -> None:
        """The segment is gone, if nothing is left in it."""
        staying = segment.staying.values()
        waited_for = segment.occupants or not all(map(self.reservations.quarantined, staying))
        if not waited_for and self.segments.get(segment.id) is segment:
            self.reservations.let_go(list(staying))
            segment.let_go()
            del self.segments[segment.id]
            self.records.append(records.SegmentGone(segment.id))

    def _shorten(self, segment: Segment) -> Steps:
        """Forget what lies behind a segment's limit."""
        yield from self.contents.shorten(segment)
        self._let_end_go(segment)

    def _let_end_go(self, segment: Segment) -> None:
        """The memory behind a segment's limit is nobody's, if that is so."""
        rest = segment.nbytes - segment.end
        if segment.limit < segment.end or rest - segment.given_back < ALIGNMENT or segment.state != "live":
            return
        # Readers may count on the leases of an earlier server.
        if self._now() >= self._reserves_from and all(map(self.reservations.quarantined, segment.staying.values())):
            segment.given_back = rest
            self.shortened.append(segment)


def added(segment: Segment) -> records.SegmentAdded:
    whole = segment.limit == segment.nbytes // ALIGNMENT * ALIGNMENT
    return records.SegmentAdded(segment.id, segment.device, segment.medium, segment.nbytes, None if whole else segment.limit)
