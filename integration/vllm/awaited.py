"""Announced chunks, where KV caches are shared in place: looked for from the time their load began until they are there."""

from __future__ import annotations

from time import monotonic

import msgspec

from .lookups import Lookups
from .replicas import Replica
from .tracked import Tracked

AGAIN_SECONDS = 0.005
"""How often the chunks of one load are asked for beside a model run; in idle steps, of some 2 ms, each time."""
MOST_SECONDS = 0.001
"""How long one step may ask. Who has waited longest is first."""


class _Wait(msgspec.Struct):
    """A load whose chunks before number `reached` have been found, the last of them in the KV cache of `owner`. first: the number of its
    first one. asked: when it last was."""

    tracked: Tracked
    first: int
    reached: int
    stop: int
    until: float
    asked: float = 0.0
    owner: bytes = b""


class Awaited:
    """In the scheduler's thread. The loads wait in the workers, for as long as they were told to, and read what has come meanwhile."""

    def __init__(self, lookups: Lookups) -> None:
        self._lookups = lookups
        self._waits: list[_Wait] = []

    def add(self, tracked: Tracked, first: int, stop: int, seconds: float) -> None:
        """A load of the request's chunks [first, stop), which are named, waits for them so many seconds."""
        self._waits.append(_Wait(tracked, first, first, stop, monotonic() + seconds))

    def found(self, idle: bool) -> dict[str, dict[int, Replica]]:
        """Chunks that lie in others' KV caches and did not at the last call: by request, and by their numbers within its load. None of a
        request: whoever computed them has died, and no more will come. idle: no model runs in the step, so that nothing is held up."""
        if not self._waits:
            return {}
        now = monotonic()
        self._waits = [one for one in self._waits if one.tracked.loading and one.reached < one.stop and now < one.until]
        found: dict[str, dict[int, Replica]] = {}
        for wait in sorted(self._waits, key=lambda one: one.asked):
            if wait.asked + (0.0 if idle else AGAIN_SECONDS) > now or monotonic() > now + MOST_SECONDS:
                break
            wait.asked = now
            answer = self._lookups.look(wait.tracked, wait.reached, wait.stop)
            residents = answer.residents_of(wait.first, wait.stop)
            # What the pool has besides the workers find there.
            wait.reached = max(wait.reached, min(answer.hits, wait.stop))
            if residents:
                wait.owner = residents[max(residents)][0]
            elif wait.owner and self._lookups.gone(wait.owner):
                wait.until = now
            else:
                continue
            found[wait.tracked.request.request_id] = residents
        return found
