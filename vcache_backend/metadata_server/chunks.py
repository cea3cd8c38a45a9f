"""The chunks that lie in the pool: by key, so that a whole namespace is forgotten in one step, and in the order of their last use. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import get_args

from vcache_backend.metadata_server.messages import NAMESPACE_BYTES, ChunkKey, Location, Medium, SegmentId
from vcache_backend.metadata_server.placement import Entry

Space = dict[ChunkKey, Entry]
"""The chunks of one namespace."""
Spaces = dict[bytes, Space]
_EMPTY: Space = {}
LOOKED_AT = 8
"""A piece of `size` looks at so many times `size` entries: more than become recent in a turn, so that the pieces come to an end."""


class Chunks:
    """Key to entry. What is taken out of here nobody sees any more, wherever it still occupies a slot."""

    def __init__(self) -> None:
        self._spaces: Spaces = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Entry]:
        return chain.from_iterable(space.values() for space in self._spaces.values())

    def __contains__(self, key: bytes) -> bool:
        return key in self._spaces.get(key[:NAMESPACE_BYTES], _EMPTY)

    def get(self, key: ChunkKey) -> Entry | None:
        return self._spaces.get(key[:NAMESPACE_BYTES], _EMPTY).get(key)

    def beside(self, keys: list[ChunkKey]) -> Space:
        """The namespace of the first key, which mostly is that of all: what is not in there has to be asked for by itself."""
        return self._spaces.get(keys[0][:NAMESPACE_BYTES], _EMPTY) if keys else _EMPTY

    def put(self, entry: Entry) -> None:
        """Its key is not there yet."""
        self._spaces.setdefault(entry.key[:NAMESPACE_BYTES], {})[entry.key] = entry
        self._count += 1

    def holds(self, entry: Entry) -> bool:
        """Whether its key leads to this very entry."""
        return self.get(entry.key) is entry

    def drop(self, entry: Entry) -> bool:
        """Take it out; whether its key led to this very entry."""
        namespace = entry.key[:NAMESPACE_BYTES]
        space = self._spaces.get(namespace, _EMPTY)
        if space.get(entry.key) is not entry:
            return False
        del space[entry.key]
        if not space:
            del self._spaces[namespace]
        self._count -= 1
        return True

    def clear(self, namespace: bytes) -> tuple[Spaces, int]:
        """Take a namespace out, or all with b"": the caller's from now on, and how many chunks they are."""
        if not namespace:
            taken, self._spaces = self._spaces, {}
        else:
            space = self._spaces.pop(namespace, _EMPTY)
            taken = {namespace: space} if space else {}
        count = sum(map(len, taken.values()))
        self._count -= count
        return taken, count


class LRU:
    """The order of the committed chunks of each medium, by last use. Called from the server's one thread; every call is O(1).

    The order runs through the entries themselves (`older`, `newer`), in a ring for each medium, so that no step depends on how many
    there are.
    """

    def __init__(self) -> None:
        self._rings: dict[Medium, Entry] = {medium: _ring() for medium in get_args(Medium)}
        self._rounds = 0

    def add(self, entry: Entry, medium: Medium) -> None:
        """A chunk was committed: it is now the most recent of its medium."""
        entry.ring = self._rings[medium]
        _link(entry, entry.ring.older, entry.ring)

    def touch(self, entry: Entry) -> None:
        """A chunk was used, if it is one of these."""
        ring = entry.ring
        if ring is not None:
            _unlink(entry)
            _link(entry, ring.older, ring)

    def remove(self, entry: Entry) -> None:
        """A chunk is gone, if it was one of these."""
        _unlink(entry)
        entry.ring = None

    def coldest(self, medium: Medium) -> Iterator[Entry]:
        """Chunks of a medium from the first to go to the last. Not to be used after the next change."""
        ring = self._rings[medium]
        entry = ring.newer
        while entry is not None and entry is not ring:
            newer = entry.newer
            if entry.key:
                yield entry
            entry = newer

    def pieces(self, size: int) -> Iterator[list[Entry]]:
        """All chunks, at most `size` at once, coldest first within a medium: the order a journal's snapshot keeps. Everything may change
        between two pieces: what is there from first to last is told once, what becomes recent before it was told is told as such."""
        self._rounds += 1
        turn = self._rounds
        for ring in self._rings.values():
            place = _ring()  # stands behind the entries that were looked at, whatever happens to those around it
            _link(place, ring, ring.newer)
            try:
                while place.newer is not ring:
                    piece = self._piece(place, ring, size, turn)
                    at_end = place.newer is ring
                    yield piece
                    if at_end:
                        break  # what came behind it meanwhile is new, or was told
            finally:
                _unlink(place)

    @staticmethod
    def _piece(place: Entry, ring: Entry, size: int, turn: int) -> list[Entry]:
        """Entries behind `place`, which moves on, that were not told in this turn."""
        piece: list[Entry] = []
        for _ in range(LOOKED_AT * size):
            entry = place.newer
            if entry is None or entry is ring or len(piece) == size:
                break
            _unlink(place)
            _link(place, entry, entry.newer)
            if entry.key and entry.told != turn:
                entry.told = turn
                piece.append(entry)
        return piece


def _ring() -> Entry:
    """Where a ring begins and ends, or a place in one: an entry of no chunk."""
    entry = Entry(ChunkKey(b""), Location(SegmentId(""), 0, 0, 0))
    entry.older = entry.newer = entry
    return entry


def _link(entry: Entry, older: Entry | None, newer: Entry | None) -> None:
    entry.older, entry.newer = older, newer
    if older is not None and newer is not None:
        older.newer = newer.older = entry


def _unlink(entry: Entry) -> None:
    older, newer = entry.older, entry.newer
    if older is not None and newer is not None:
        older.newer, newer.older = newer, older
        entry.older = entry.newer = None
