"""Segments of before a restart whose fd nobody has offered yet, and the chunks that rest in them. Pure."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from vcache_backend.metadata_server import journal
from vcache_backend.metadata_server.messages import ChunkKey, Pin, SegmentId, SegmentInfo
from vcache_backend.metadata_server.placement import Entry


class Awaited:
    """What a journal brought back and is not usable yet. A chunk rests here until its segment comes, it is removed, or a newer
    copy of it is stored elsewhere; a place that may still be written stays known as long as its segment is awaited."""

    def __init__(self) -> None:
        self._segments: dict[SegmentId, tuple[SegmentInfo, list[Entry]]] = {}
        self._resting: dict[ChunkKey, Entry] = {}

    def restore(self, state: journal.State) -> dict[int, list[Entry]]:
        """Take over a journal's state. Returns the entries of each of its open reservations."""
        entries: dict[SegmentId, list[Entry]] = {id_: [] for id_ in state.segments}
        for key, (location, pin) in state.chunks.items():
            if location.segment in entries:
                self._resting[key] = Entry(key, location, pin=Pin(pin))
                entries[location.segment].append(self._resting[key])
        written: dict[int, list[Entry]] = {}
        for id_, held in state.held.items():
            pairs = zip(held.keys, held.locations, strict=True)
            written[id_] = [Entry(key, location, id_) for key, location in pairs if location.segment in entries]
            for entry in written[id_]:
                entries[entry.location.segment].append(entry)
        for segment, added in state.segments.items():
            self._segments[segment] = (SegmentInfo(segment, added.device, added.medium, added.nbytes), entries[segment])
        return written

    def take(self, info: SegmentInfo) -> tuple[list[Entry], list[Entry]]:
        """The segment has come: its places that may still be written, and its chunks."""
        _, entries = self._segments.pop(info.id, (info, []))
        written = [entry for entry in entries if entry.reservation]
        return written, [e for e in entries if not e.reservation and self._resting.pop(e.key, None) is e]

    def forget(self, keys: list[ChunkKey]) -> list[ChunkKey]:
        """These chunks are removed, or stored anew; which of them rested here."""
        return [key for key in keys if self._resting.pop(key, None)] if self._resting else []

    def answered(self, entry: Entry) -> None:
        """The writer of this place is done with it."""
        self._segments[entry.location.segment][1].remove(entry)

    def give_up(self, id_: SegmentId) -> tuple[list[Entry], int]:
        """Stop waiting for a segment: its places that may still be written, and how many chunks are lost."""
        _, entries = self._segments.pop(id_)
        chunks = self.forget([entry.key for entry in entries if self.rests(entry)])
        return [entry for entry in entries if entry.reservation], len(chunks)

    def rests(self, entry: Entry) -> bool:
        """Is this the chunk that its segment would bring back?"""
        return self._resting.get(entry.key) is entry

    def keys(self) -> Iterator[ChunkKey]:
        """Of the resting chunks."""
        return iter(self._resting)

    def segments(self) -> dict[SegmentId, SegmentInfo]:
        """The segments, as the journal knew them."""
        return {id_: info for id_, (info, _) in self._segments.items()}

    def contents(self) -> list[tuple[SegmentInfo, list[Entry]]]:
        """The segments with all their entries."""
        return list(self._segments.values())

    def infos(self) -> list[SegmentInfo]:
        """The segments with the number of chunks they would bring back."""
        return [
            msgspec.structs.replace(info, state="absent", chunks=sum(map(self.rests, entries)))
            for info, entries in self._segments.values()
        ]
