"""Which chunk goes first. A policy only orders chunks; the directory decides what may go (leases, hard pins)."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Protocol, get_args

from vcache_backend.metadata_server.messages import ChunkKey, Location, Medium, Pin, SegmentId
from vcache_backend.metadata_server.placement import Entry


class EvictionPolicy(Protocol):
    """An order over the committed chunks of each medium. Called from the server's one thread; every call is O(1)."""

    def add(self, entry: Entry, medium: Medium) -> None:
        """A chunk was committed (or its pin changed): it is now the most recent of its class."""

    def touch(self, entry: Entry) -> None:
        """A chunk was used."""

    def remove(self, entry: Entry) -> None:
        """A chunk is gone (evicted, removed)."""

    def victims(self, medium: Medium) -> Iterator[Entry]:
        """Chunks of a medium from the first to go to the last; hard-pinned ones never. Not to be used after the next change."""

    def pieces(self, size: int) -> Iterator[list[Entry]]:
        """All chunks, hard-pinned ones too, at most `size` at once, coldest first within a medium and pin: the order a journal's
        snapshot keeps. Everything may change between two pieces: what is there from first to last is told once, and what becomes
        recent before it was told is told as such."""


class LRU:
    """Least recently used first; soft-pinned chunks after all others.

    The order runs through the entries themselves (`older`, `newer`), in a ring for each medium and pin, so that no step depends on
    how many there are.
    """

    LOOKED_AT = 8
    """A piece of `size` looks at so many times `size` entries: more than become recent in a turn, so that the pieces come to an end."""

    def __init__(self) -> None:
        self._rings = {ring: _ring() for ring in product(get_args(Medium), Pin)}
        self._rounds = 0
        self._moved: list[Entry] | None = None
        """What changed its ring since the pieces began: it may have come behind the place of one and gone from before that of another."""

    def add(self, entry: Entry, medium: Medium) -> None:
        if self._moved is not None and entry.ring is not None:
            self._moved.append(entry)
        _unlink(entry)
        entry.ring = self._rings[medium, entry.pin]
        _link(entry, entry.ring.older, entry.ring)

    def touch(self, entry: Entry) -> None:
        ring = entry.ring
        if ring is not None:
            _unlink(entry)
            _link(entry, ring.older, ring)

    def remove(self, entry: Entry) -> None:
        _unlink(entry)
        entry.ring = None

    def victims(self, medium: Medium) -> Iterator[Entry]:
        for pin in (Pin.NONE, Pin.SOFT):
            ring = self._rings[medium, pin]
            entry = ring.newer
            while entry is not None and entry is not ring:
                newer = entry.newer
                if entry.key:
                    yield entry
                entry = newer

    def pieces(self, size: int) -> Iterator[list[Entry]]:
        self._rounds += 1
        turn, self._moved = self._rounds, []
        try:
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
        finally:
            moved, self._moved = self._moved or [], None
        for start in range(0, len(moved), size):
            yield [entry for entry in moved[start : start + size] if entry.ring is not None and self._is_news(entry, turn)]

    def _piece(self, place: Entry, ring: Entry, size: int, turn: int) -> list[Entry]:
        """Entries behind `place`, which moves on, that were not told in this turn."""
        piece: list[Entry] = []
        for _ in range(self.LOOKED_AT * size):
            entry = place.newer
            if entry is None or entry is ring or len(piece) == size:
                break
            _unlink(place)
            _link(place, entry, entry.newer)
            if entry.key and self._is_news(entry, turn):
                piece.append(entry)
        return piece

    @staticmethod
    def _is_news(entry: Entry, turn: int) -> bool:
        """Was it not told in this turn yet? Now it is."""
        news, entry.told = entry.told != turn, turn
        return news


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


POLICIES: dict[str, type[LRU]] = {"lru": LRU}
"""Policies by the name used in `server.eviction.policy`."""
