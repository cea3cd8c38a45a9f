"""Which chunk goes first. A policy only orders keys; the directory decides what may go (leases, hard pins)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Protocol

from vcache_backend.metadata_server.messages import ChunkKey, Pin


class EvictionPolicy(Protocol):
    """An order over the committed chunks. Called from the server's one thread; every call is O(1)."""

    def add(self, key: ChunkKey, pin: Pin) -> None:
        """A chunk was committed (or its pin changed): it is now the most recent of its class."""

    def touch(self, key: ChunkKey) -> None:
        """A chunk was used."""

    def remove(self, key: ChunkKey) -> None:
        """A chunk is gone (evicted, removed)."""

    def victims(self) -> Iterator[ChunkKey]:
        """Chunks from the first to go to the last; hard-pinned ones never. Not to be used after the next change."""

    def coldest_first(self) -> Iterator[ChunkKey]:
        """All chunks, hard-pinned ones too, coldest first: the order a journal's snapshot keeps."""


class LRU:
    """Least recently used first; soft-pinned chunks after all others."""

    def __init__(self) -> None:
        self._orders: list[OrderedDict[ChunkKey, None]] = [OrderedDict() for _ in Pin]
        self._plain = self._orders[Pin.NONE]
        self._pinned: dict[ChunkKey, Pin] = {}

    def add(self, key: ChunkKey, pin: Pin) -> None:
        if pin or key in self._pinned:
            self.remove(key)
            self._orders[pin][key] = None
            if pin:
                self._pinned[key] = pin
        else:
            self._plain[key] = None
            self._plain.move_to_end(key)

    def touch(self, key: ChunkKey) -> None:
        if key in self._plain:
            self._plain.move_to_end(key)
        else:
            self._orders[self._pinned[key]].move_to_end(key)

    def remove(self, key: ChunkKey) -> None:
        if key in self._plain:
            del self._plain[key]
        else:
            self._orders[self._pinned.pop(key, Pin.NONE)].pop(key, None)

    def victims(self) -> Iterator[ChunkKey]:
        yield from self._orders[Pin.NONE]
        yield from self._orders[Pin.SOFT]

    def coldest_first(self) -> Iterator[ChunkKey]:
        for order in self._orders:
            yield from order


POLICIES: dict[str, type[LRU]] = {"lru": LRU}
"""Policies by the name used in `server.eviction.policy`."""
