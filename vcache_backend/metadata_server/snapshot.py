"""The directory as journal records, and from a journal's state: what one life of a server hands to the next,
the epoch of each namespace among it. Pure."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from itertools import count

from vcache_backend.metadata_server.contents import Contents
from vcache_backend.metadata_server.messages import NAMESPACE_BYTES, ChunkKey, SegmentId, SegmentInfo
from vcache_backend.metadata_server.placement import Entry, Segment
from vcache_backend.metadata_server.records import Counted, EpochTable, Held, JournalState, Live, Record, SegmentAdded
from vcache_backend.metadata_server.reservations import Reservations

SLICE = 2048
"""Chunks in one record of a snapshot: about a millisecond of the server's time."""
MAX_EPOCHS = 256
"""Namespaces with an epoch of their own; one more, and all are raised."""
_RANDOM_BITS = 40


def restore(state: JournalState, contents: Contents, reservations: Reservations, epochs: Epochs) -> None:
    """Take over what an earlier server knew. Its segments are absent, their chunks rest in them, reservations are void."""
    contents.placement.generations = count(1 + state.generation)
    epochs.restore(state.epochs)
    lying: dict[SegmentId, list[Entry]] = {id_: [] for id_ in state.segments}
    for key, location in state.chunks.items():
        entry = Entry(key, location)
        lying[location.segment].append(entry)
        contents.resting.put(entry)
    returning = {id_: entries[::-1] for id_, entries in lying.items()}
    for number, held in state.held.items():
        written = [Entry(key, location, number) for key, location in zip(held.keys, held.locations, strict=True)]
        reservations.restore(number, held.process, written)
        for entry in written:
            lying[entry.location.segment].append(entry)
    for id_, added in state.segments.items():
        info = SegmentInfo(id_, added.device, added.medium, added.nbytes, state="absent")
        segment = contents.placement.segments[id_] = Segment(info, lying[id_])
        segment.returning = returning[id_]


def snapshot(contents: Contents, reservations: Reservations, epochs: Epochs) -> Iterator[Record]:
    """The whole state, a slice at a time. Requests may change it in between if they are recorded too."""
    live, at = contents.live, contents.placement.segments
    newest = next(contents.placement.generations)
    yield EpochTable(epochs.all())
    segments, written = list(at.values()), reservations.items()
    resting = [entry for segment in segments for entry in reversed(segment.returning)]
    yield Counted(newest)
    for segment in segments:
        if at.get(segment.id) is segment:
            yield SegmentAdded(segment.id, segment.device, segment.medium, segment.nbytes)
    for start in range(0, len(resting), SLICE):
        yield _live([e for e in resting[start : start + SLICE] if contents.resting.holds(e) or live.holds(e)])
    for number, held in written:
        if reservations.get(number) is held:
            yield Held(number, held.process, [e.key for e in held.entries], [e.location for e in held.entries])
        else:
            yield _live([entry for entry in held.entries if live.holds(entry)])
    for piece in contents.order.pieces(SLICE):
        yield _live([entry for entry in piece if live.holds(entry) and entry.location.generation < newest])


def _live(entries: list[Entry]) -> Live:
    return Live([entry.key for entry in entries], [entry.location for entry in entries])


class Epochs:
    """Which epoch each namespace is in: a reset raises it, and nothing that was offloaded in an earlier one is found any more.

    0 until the first reset, so that nodes which were never reset share what they offload.

    After that a count and 40 random bits: it grows, and no other node, whose instances may have other weights by then, has the same
    one.
    """

    def __init__(self) -> None:
        self._others = 0
        self._of: dict[bytes, int] = {}

    def of(self, keys: list[ChunkKey]) -> int:
        """The epoch of these keys' namespace, which they have in common."""
        return self._of.get(keys[0][:NAMESPACE_BYTES], self._others) if self._of and keys else self._others

    def advance(self, namespace: bytes) -> None:
        """Raise the epoch of a namespace, or of all with b""."""
        if len(namespace) < NAMESPACE_BYTES or (namespace not in self._of and len(self._of) == MAX_EPOCHS):
            self._others, self._of = _next(max([self._others, *self._of.values()])), {}
        else:
            self._of[namespace] = _next(self._of.get(namespace, self._others))

    def all(self) -> dict[bytes, int]:
        """By namespace; b"": of every one that is not among them."""
        return {b"": self._others} | self._of

    def restore(self, epochs: dict[bytes, int]) -> None:
        """Take over what `all` said."""
        self._of = dict(epochs)
        self._others = self._of.pop(b"", 0)


def _next(epoch: int) -> int:
    return ((epoch >> _RANDOM_BITS) + 1) << _RANDOM_BITS | secrets.randbits(_RANDOM_BITS)
