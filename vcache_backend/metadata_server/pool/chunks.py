"""Chunks by namespace and key: one step forgets a whole namespace. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

from vcache_backend.metadata_server.pool.slots import Entry
from vcache_backend.protocol.messages import NAMESPACE_BYTES, ChunkKey, of_rank

Space = dict[ChunkKey, Entry]
"""The chunks of one namespace."""
_EMPTY: Space = {}


class Chunks:
    """Entries of chunks by key. An entry removed from this table may still occupy a slot."""

    def __init__(self) -> None:
        self._spaces: dict[bytes, Space] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def get(self, key: ChunkKey) -> Entry | None:
        return self._spaces.get(key[:NAMESPACE_BYTES], _EMPTY).get(key)

    def leading(self, keys: list[ChunkKey]) -> list[Entry]:
        """The entries of the leading keys, up to the first key without an entry."""
        space = self._spaces.get(keys[0][:NAMESPACE_BYTES], _EMPTY) if keys else _EMPTY
        entries = list(map(space.get, keys))
        if None in entries and not keys[entries.index(None)].startswith(keys[0][:NAMESPACE_BYTES]):
            entries = list(map(self.get, keys))  # keys of several namespaces
        return cast("list[Entry]", entries[: entries.index(None)] if None in entries else entries)

    def leading_of_all(self, keys: list[ChunkKey], ranks: int) -> int:
        """Count the leading chunks (keys of rank 0) that have entries for all ranks."""
        count = len(keys)
        for rank in range(ranks):
            count = len(self.leading(of_rank(keys[:count], rank) if ranks > 1 else keys))
        return count

    def of_all(self, keys: list[ChunkKey], ranks: int) -> list[bool]:
        """For each chunk (key of rank 0) whether it has entries for all ranks."""
        present = list(map(self.among(keys).__contains__, keys))
        for rank in range(1, ranks):
            if not any(present):
                break
            part = of_rank(keys, rank)
            rank_present = map(self.among(part).__contains__, part)
            present = [so_far and own for so_far, own in zip(present, rank_present, strict=True)]
        return present

    def among(self, keys: list[ChunkKey]) -> Space:
        """Return a table that holds every entry of these keys, and perhaps more entries of the
        namespace. Read the table before the next change."""
        if not self._count or not keys:
            return _EMPTY
        namespace = min(keys)[:NAMESPACE_BYTES]
        if max(keys).startswith(namespace):
            return self._spaces.get(namespace, _EMPTY)
        return {key: entry for key in keys if (entry := self.get(key)) is not None}

    def put(self, entries: Iterable[Entry]) -> None:
        """Add entries whose keys are new."""
        spaces = self._spaces
        for entry in entries:
            key = entry.key
            space = spaces.get(key[:NAMESPACE_BYTES])
            if space is None:
                space = spaces[key[:NAMESPACE_BYTES]] = {}
            space[key] = entry
            self._count += 1

    def shared(self, other: Chunks) -> list[Entry]:
        """The entries of `other` whose keys are in this table, too."""
        return [
            space[key]
            for namespace, space in other._spaces.items()
            for key in self._spaces.get(namespace, _EMPTY).keys() & space.keys()
        ]

    def merge(self, other: Chunks) -> None:
        """Take over all entries of `other`, whose keys are new."""
        for namespace, space in other._spaces.items():
            mine = self._spaces.setdefault(namespace, space)
            if mine is not space:
                mine.update(space)
        self._count += len(other)

    def drop(self, entries: Iterable[Entry]) -> list[ChunkKey]:
        """Remove entries. Returns the keys of the entries that the table held."""
        spaces, gone = self._spaces, list[ChunkKey]()
        for entry in entries if spaces else ():
            key = entry.key
            space = spaces.get(key[:NAMESPACE_BYTES], _EMPTY)
            if space.get(key) is entry:
                gone.append(key)
                del space[key]
                if not space:
                    del spaces[key[:NAMESPACE_BYTES]]
        self._count -= len(gone)
        return gone

    def clear(self, namespace: bytes) -> list[Space]:
        """Remove a namespace, or all namespaces with b"". Hands their tables to the caller."""
        taken = [space] if (space := self._spaces.pop(namespace, None)) else []
        if not namespace:
            taken = list(self._spaces.values())
            self._spaces = {}
        self._count -= sum(map(len, taken))
        return taken
