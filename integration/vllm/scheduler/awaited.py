"""Asks the server for announced chunks that will be read in place, from the beginning of their load
until another instance has computed them.
"""

from __future__ import annotations

from time import monotonic

import msgspec

from ..in_place.replicas import Run
from .lookups import Lookups
from .tracked import Tracked

AGAIN_SECONDS = 0.005
"""The time between two look-ups for one load, in steps that run a model. Idle steps, of some 2 ms,
ask each time.
"""
MOST_SECONDS = 0.001
"""How long one step may spend on look-ups. The load that was looked up longest ago comes first."""


class _Wait(msgspec.Struct):
    """A load of the chunks [first, stop), which waits for the chunks from `reached` on.

    owner: the instance whose KV cache holds the last chunks so far. until, asked: when the load
    gives up, and when the server was last asked, by time.monotonic."""

    tracked: Tracked
    first: int
    reached: int
    stop: int
    until: float
    asked: float = 0.0
    owner: bytes = b""


class Awaited:
    """Runs in the scheduler's thread. The loads wait in the workers, for `LoadSpec.wait_seconds`,
    and read the chunks that have been computed.
    """

    def __init__(self, lookups: Lookups) -> None:
        self._lookups = lookups
        self._waits: list[_Wait] = []

    def add(self, tracked: Tracked, first: int, stop: int, seconds: float) -> None:
        """Look for the request's chunks [first, stop) for `seconds`. `Lookups.name` must have made
        the keys.
        """
        self._waits.append(_Wait(tracked, first, first, stop, monotonic() + seconds))

    def found(self, idle: bool) -> dict[str, list[Run]]:
        """Return chunks that appeared in other KV caches since the last call: by request, numbered
        within the load.

        An empty entry: the computing instance is gone, so no more chunks will come. idle: the step
        runs no model, so asking delays no work."""
        if not self._waits:
            return {}
        now = monotonic()
        self._waits = [
            wait
            for wait in self._waits
            if wait.tracked.loading and wait.reached < wait.stop and now < wait.until
        ]
        appeared: dict[str, list[Run]] = {}
        for wait in sorted(self._waits, key=lambda wait: wait.asked):
            if (
                wait.asked + (0.0 if idle else AGAIN_SECONDS) > now
                or monotonic() > now + MOST_SECONDS
            ):
                break
            wait.asked = now
            answer = self._lookups.look(wait.tracked, wait.reached, wait.stop)
            residents = answer.residents_of(wait.first, wait.stop)
            # The workers find the pool's chunks by themselves.
            wait.reached = max(wait.reached, min(answer.hits, wait.stop))
            if residents:
                wait.owner = residents[-1].instance
            elif wait.owner and self._lookups.gone(wait.owner):
                wait.until = now
            else:
                continue
            appeared[wait.tracked.request.request_id] = residents
        return appeared
