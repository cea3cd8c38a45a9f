"""Keys that something was found out about a short while ago."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from vcache_backend.metadata_server.messages import ChunkKey


class Recent:
    """A set whose members leave it `seconds` after they were added, and the oldest when there are more than `bound`. Any thread."""

    def __init__(self, seconds: float, bound: int, now: Callable[[], float]) -> None:
        self._seconds, self._bound, self._now = seconds, bound, now
        self._until: OrderedDict[ChunkKey, float] = OrderedDict()
        self._lock = threading.Lock()

    def add(self, keys: Iterable[ChunkKey]) -> None:
        until = self._now() + self._seconds
        with self._lock:
            for key in keys:
                self._until[key] = until
                self._until.move_to_end(key)
            while len(self._until) > self._bound:
                self._until.popitem(last=False)

    def discard(self, keys: Iterable[ChunkKey]) -> None:
        with self._lock:
            for key in keys:
                self._until.pop(key, None)

    def clear(self) -> None:
        with self._lock:
            self._until.clear()

    def first(self, keys: Sequence[ChunkKey]) -> int:
        """The index of the first of `keys` that is a member; their number if none is."""
        if not self._until:
            return len(keys)
        return next((index for index, key in enumerate(keys) if key in self), len(keys))

    def __contains__(self, key: ChunkKey) -> bool:
        until = self._until.get(key)
        return until is not None and self._now() < until

    def __len__(self) -> int:
        return len(self._until)
