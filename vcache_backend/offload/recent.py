"""Names that something was found out about a short while ago."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
MOST_REMEMBERED = 1 << 16


class Recent(Generic[K]):
    """A set whose members leave it `seconds` after they were added, and the oldest when there are more than `bound`. Any thread."""

    def __init__(self, seconds: float, bound: int, now: Callable[[], float]) -> None:
        self._seconds, self._bound, self._now = seconds, bound, now
        self._until: OrderedDict[K, float] = OrderedDict()
        self._lock = threading.Lock()

    def add(self, keys: Iterable[K]) -> None:
        until = self._now() + self._seconds
        with self._lock:
            for key in keys:
                self._until[key] = until
                self._until.move_to_end(key)
            while len(self._until) > self._bound:
                self._until.popitem(last=False)

    def discard(self, keys: Iterable[K]) -> None:
        with self._lock:
            for key in keys:
                self._until.pop(key, None)

    def clear(self) -> None:
        with self._lock:
            self._until.clear()

    def first(self, keys: Sequence[K]) -> int:
        """The index of the first of `keys` that is a member; their number if none is."""
        if not self._until:
            return len(keys)
        return next((index for index, key in enumerate(keys) if key in self), len(keys))

    def __contains__(self, key: K) -> bool:
        until = self._until.get(key)
        return until is not None and self._now() < until

    def __len__(self) -> int:
        return len(self._until)
