"""The chunks that lie in the pool, by key, namespace by namespace, so that a whole namespace is forgotten in one step. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from vcache_backend.metadata_server.messages import NAMESPACE_BYTES, ChunkKey
from vcache_backend.metadata_server.placement import Entry

Space = dict[ChunkKey, Entry]
"""The chunks of one namespace."""
Spaces = dict[bytes, Space]
_EMPTY: Space = {}


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
