"""Pauses between attempts that fail."""

from __future__ import annotations


class Backoff:
    """Pauses in seconds: `first`, then twice as long each time, up to `longest`. No lock."""

    def __init__(self, first: float, longest: float) -> None:
        self._first, self._longest = first, longest
        self._next = first

    def next(self) -> float:
        """The pause after one more failure."""
        pause = self._next
        self._next = min(2 * pause, self._longest)
        return pause

    def reset(self) -> None:
        """Begin with `first` again, after a success."""
        self._next = self._first
