"""Announced chunks that are read in place: asks the server for them from the time their load begins
until they are there.
"""

from __future__ import annotations

from time import monotonic

import msgspec

from .lookups import Lookups
from .replicas import Run
from .tracked import Tracked

AGAIN_SECONDS = 0.005
"""The time between two questions for the chunks of one load, in steps that run a model. Idle steps,
of some 2 ms, ask each time.
"""
MOST_SECONDS = 0.001
"""How long one step may ask. The load that was asked for longest ago comes first."""


class _Wait(msgspec.Struct):
    """A load of the chunks [first, stop), of which those before `reached` were found, the last ones
    in the KV cache of `owner`.

    until: when it gives up. asked: when the server was last asked. Both by time.monotonic.
    """

    tracked: Tracked
    first: int
    reached: int
    stop: int
    until: float
    asked: float = 0.0
    owner: bytes = b""


class Awaited:
    """In the scheduler's thread. The loads themselves wait in the workers, for
    `LoadSpec.wait_seconds`, and read what has come so far.
    """

    def __init__(self, lookups: Lookups) -> None:
        self._lookups = lookups
        self._waits: list[_Wait] = []

    def add(self, tracked: Tracked, first: int, stop: int, seconds: float) -> None:
        """Look for the request's chunks [first, stop), whose keys are known, for so many
        seconds.
        """
        self._waits.append(_Wait(tracked, first, first, stop, monotonic() + seconds))

    def found(self, idle: bool) -> dict[str, list[Run]]:
        """Chunks that lie in others' KV caches since the last call: by request, numbered within its
        load.

        An empty entry for a request: the instance that computed them is gone, and no more will
        come. idle: no model runs in the step, so that asking holds up nothing."""
        if not self._waits:
            return {}
        now = monotonic()
        self._waits = [
            one
            for one in self._waits
            if one.tracked.loading and one.reached < one.stop and now < one.until
        ]
        found: dict[str, list[Run]] = {}
        for wait in sorted(self._waits, key=lambda one: one.asked):
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
            found[wait.tracked.request.request_id] = residents
        return found
