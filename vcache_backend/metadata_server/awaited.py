"""Segments of before a restart whose fd nobody has offered yet, and the chunks that rest in them. Pure."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from vcache_backend.metadata_server import journal
from vcache_backend.metadata_server.messages import ChunkKey, Pin, SegmentId, SegmentInfo
from vcache_backend.metadata_server.placement import Entry


class _Segment(msgspec.Struct):
    """`entries`: what has a place in it, by offset. `resting`: how many of them are chunks that it would bring back."""

    info: SegmentInfo
    entries: dict[int, Entry] = {}
    resting: int = 0


class Awaited:
    """What a journal brought back and is not usable yet. A chunk rests here until its segment comes, it is removed, or a newer
    copy of it is stored elsewhere; a place that may still be written stays known as long as its segment is awaited."""

    def __init__(self) -> None:
        self._segments: dict[SegmentId, _Segment] = {}
        self._resting: dict[ChunkKey, Entry] = {}

    def restore(self, state: journal.State) -> dict[int, list[Entry]]:
        """Take over a journal's state. Returns the entries of each of its open reservations."""
        for id_, added in state.segments.items():
            self._segments[id_] = _Segment(SegmentInfo(id_, added.device, added.medium, added.nbytes))
        for key, (location, pin) in state.chunks.items():
            segment = self._segments.get(location.segment)
            if segment is not None:
                self._resting[key] = segment.entries[location.offset] = Entry(key, location, pin=Pin(pin))
                segment.resting += 1
        written: dict[int, list[Entry]] = {}
        for reservation, held in state.held.items():
            pairs = zip(held.keys, held.locations, strict=True)
            written[reservation] = [
                Entry(key, location, reservation) for key, location in pairs if location.segment in self._segments
            ]
            for entry in written[reservation]:
                self._segments[entry.location.segment].entries[entry.location.offset] = entry
        return written

    def take(self, info: SegmentInfo) -> tuple[list[Entry], list[Entry]]:
        """The segment has come: its places that may still be written, and its chunks."""
        segment = self._segments.pop(info.id, None)
        entries = list(segment.entries.values()) if segment is not None else []
        written = [entry for entry in entries if entry.reservation]
        return written, [e for e in entries if not e.reservation and self._resting.pop(e.key, None) is e]

    def forget(self, keys: list[ChunkKey]) -> list[ChunkKey]:
        """These chunks are removed, or stored anew; which of them rested here."""
        rested: list[ChunkKey] = []
        for key in keys if self._resting else []:
            entry = self._resting.pop(key, None)
            if entry is not None:
                self._segments[entry.location.segment].resting -= 1
                rested.append(key)
        return rested

    def answered(self, entry: Entry) -> None:
        """The writer of this place is done with it."""
        del self._segments[entry.location.segment].entries[entry.location.offset]

    def give_up(self, id_: SegmentId) -> tuple[list[Entry], int]:
        """Stop waiting for a segment: its places that may still be written, and how many chunks are lost."""
        entries = list(self._segments[id_].entries.values())
        chunks = self.forget([entry.key for entry in entries if self.rests(entry)])
        del self._segments[id_]
        return [entry for entry in entries if entry.reservation], len(chunks)

    def rests(self, entry: Entry) -> bool:
        """Is this the chunk that its segment would bring back?"""
        return self._resting.get(entry.key) is entry

    def keys(self) -> Iterator[ChunkKey]:
        """Of the resting chunks."""
        return iter(self._resting)

    def segments(self) -> dict[SegmentId, SegmentInfo]:
        """The segments, as the journal knew them."""
        return {id_: segment.info for id_, segment in self._segments.items()}

    def contents(self) -> list[tuple[SegmentInfo, list[Entry]]]:
        """The segments with all their entries."""
        return [(segment.info, list(segment.entries.values())) for segment in self._segments.values()]

    def infos(self) -> list[SegmentInfo]:
        """The segments with the number of chunks they would bring back."""
        return [
            msgspec.structs.replace(segment.info, state="absent", chunks=segment.resting) for segment in self._segments.values()
        ]
